//! Cells of ternary numbers in a layout; [`layouts`](super::layouts) describes all.

use super::problem::{agree, plane, split_last, wrong};
use crate::error::{Error, Kind, Result};
use crate::op::{Named, Slot};
use crate::tensor::{DType, Spec, View};
use crate::{options, shared_options};
use serde::{Deserialize, Serialize};

/// A layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One byte per cell, holding its value.
    Values,
    /// Two planes of bits.
    Planes,
    /// Two adjacent bits per cell.
    Packed2,
    /// Two bits per cell; a byte holds four rows of a column.
    OffsetRows,
    /// Two planes of bytes.
    BytePlanes,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Layout; 5] =
        [Layout::Values, Layout::Planes, Layout::Packed2, Layout::OffsetRows, Layout::BytePlanes];

    /// The names of its tensors.
    pub fn tensors(self) -> &'static [&'static str] {
        match self {
            Layout::Values => &["values"],
            Layout::Planes => &["plane0", "plane1"],
            Layout::Packed2 => &["packed2"],
            Layout::OffsetRows => &["offset_rows"],
            Layout::BytePlanes => &["byte0", "byte1"],
        }
    }

    fn dtype(self) -> DType {
        if self == Layout::Values { DType::I8 } else { DType::U8 }
    }

    /// Cells of a row per byte.
    pub fn in_byte(self) -> usize {
        match self {
            Layout::Planes => 8,
            Layout::Packed2 => 4,
            _ => 1,
        }
    }
}

/// The treatment of sentinels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnSentinel {
    /// Fail, reporting the first.
    #[default]
    Error,
    /// Write them as 0.
    Zero,
    /// Write them as 0, and let the caller warn about the reported number.
    Warn,
}

shared_options! {
    cells {
        /// cells per row of planes or packed2; as many as fit by default
        n: Option<usize> = None;
    }
    sizes {
        ..crate::ops::products::ternary::grid::cells;
        /// rows of offset_rows; as many as fit by default
        rows: Option<usize> = None;
    }
}

options! {
    /// Sizes that the shapes of a layout's tensors do not determine.
    pub struct Options {
        /// layout of the results; planes by default
        to: Option<Layout> = None;
        ..sizes;
        /// handling of sentinel cells
        on_sentinel: OnSentinel = OnSentinel::Error;
    }
}

/// The tensors of all layouts; a call gives those of one.
pub const SLOTS: &[Slot] = &[
    Slot::new("values", "(..., N)").exactly(DType::I8).optional().loose(),
    plane("plane0", "(..., P)").optional(),
    plane("plane1", "(..., P)").optional(),
    plane("packed2", "(..., P)").optional(),
    plane("offset_rows", "(R, N)").optional(),
    plane("byte0", "(..., N)").optional(),
    plane("byte1", "(..., N)").optional(),
];

/// The layout and sizes of some cells.
#[derive(Clone, Debug)]
pub struct Grid {
    /// The layout.
    pub layout: Layout,
    /// The sizes of the axes before the last.
    pub leading: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Cells of a row.
    pub n: usize,
}

impl Grid {
    /// The grid of the given cells, in the one layout whose tensors are present.
    pub fn given(inputs: &Named<Spec>, options: &Options) -> Result<Grid> {
        let mut there = Layout::ALL.into_iter().filter(|l| l.tensors().iter().any(|name| inputs.find(name).is_some()));
        let (layout, second) = (there.next(), there.next());
        let (Some(layout), None) = (layout, second) else {
            let got = if layout.is_none() { "none" } else { "several" };
            let error = Error::new(Kind::Argument, layout.map_or("values", |layout| layout.tensors()[0]));
            return Err(error
                .expected("the tensors of one layout: values, plane0 and plane1, packed2, offset_rows, byte0 and byte1")
                .got(got));
        };
        let name = layout.tensors()[0];
        let spec = inputs.get(name)?;
        for other in layout.tensors() {
            let got = inputs.get(other)?;
            if got.shape != spec.shape {
                return Err(wrong(other, &spec.shape.to_string(), got));
            }
        }
        let grid = Grid::of(layout, name, spec, options)?;
        match grid.rows.checked_mul(grid.n) {
            Some(cells) if cells <= i32::MAX as usize => Ok(grid),
            _ => Err(Error::new(Kind::Size, name).expected("fewer than 2^31 cells").got(spec)),
        }
    }

    fn of(layout: Layout, name: &str, spec: &Spec, options: &Options) -> Result<Grid> {
        let (before, last) = split_last(name, "(..., N)", spec)?;
        let n = room("n", options.n, last, layout.in_byte())?;
        if layout != Layout::OffsetRows {
            if let Some(rows) = options.rows {
                agree("rows", Some(rows), before.iter().product())?;
            }
            return Ok(Grid { layout, leading: before.to_vec(), rows: before.iter().product(), n });
        }
        let &[quarter] = before else { return Err(wrong(name, "(R, N)", spec)) };
        let rows = room("rows", options.rows, quarter, 4)?;
        Ok(Grid { layout, leading: vec![rows], rows, n })
    }

    /// The grid of these cells in another layout.
    pub fn to(&self, layout: Layout) -> Grid {
        Grid { layout, ..self.clone() }
    }

    /// Byte rows of `offset_rows`.
    pub fn quarter(&self) -> usize {
        self.rows.div_ceil(4)
    }

    /// The specs of the layout's tensors.
    pub fn specs(&self) -> Result<Named<Spec>> {
        let mut dims = if self.layout == Layout::OffsetRows { vec![self.quarter()] } else { self.leading.clone() };
        dims.push(self.n.div_ceil(self.layout.in_byte()));
        let spec = Spec::new(self.layout.dtype(), &dims)?;
        Ok(self.layout.tensors().iter().map(|&name| (name, spec)).collect())
    }

    /// The bytes of the layout's tensors; a single tensor is given twice.
    pub fn bytes<'a>(&self, inputs: &Named<View<'a>>) -> Result<[&'a [u8]; 2]> {
        let names = self.layout.tensors();
        let bytes = |name: &str| inputs.get(name).map(View::bytes);
        Ok([bytes(names[0])?, bytes(names[names.len() - 1])?])
    }

    /// The error for sentinels: their number and the position of the first, in row-major order.
    pub fn refuse(&self, count: usize, first: usize) -> Error {
        let (row, cell) = (first / self.n.max(1), first % self.n.max(1));
        let hint = match self.layout {
            Layout::Values => "Quantize first, or say on_sentinel: \"zero\" to read them as 0",
            _ => "Is it this layout? Say on_sentinel: \"zero\" or \"warn\" to read them as 0",
        };
        Error::new(Kind::Argument, self.layout.tensors()[0])
            .expected("cells of -1, 0 or 1")
            .got(format_args!("{count} that are none, the first in row {row} at {cell}"))
            .hint(hint)
    }
}

/// The number of cells in `bytes` bytes; an option may name any number that fills them.
fn room(name: &str, option: Option<usize>, bytes: usize, in_byte: usize) -> Result<usize> {
    match option {
        None => Ok(bytes * in_byte),
        Some(count) if count.div_ceil(in_byte) == bytes => Ok(count),
        Some(count) => Err(Error::new(Kind::Option, name)
            .expected(format_args!("a number that takes {bytes} bytes of {in_byte}"))
            .got(count)),
    }
}

/// A checked conversion.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The given cells.
    pub from: Grid,
    /// The wanted layout.
    pub to: Grid,
    /// The treatment of sentinels.
    pub on_sentinel: OnSentinel,
}
