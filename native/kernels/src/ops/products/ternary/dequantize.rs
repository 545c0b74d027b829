//! Multiplies ternary numbers by their scale, to floats:
//!
//! ```text
//! w = scale q          q of planes, where cells that are no value are 0
//! ```

use super::grid::{Grid, Layout, Options as Sizes};
use super::problem::{one_or, plane, plane_bytes};
use super::reference;
use crate::chunks::Chunks;
use crate::cpu::Exec;
use crate::cpu::pool::{self, Shared};
use crate::cuda::{Buffer, Lane, Source, launch_each, params, types};
use crate::error::Result;
use crate::op::{Bound, Named, Op, Slot};
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

pub use super::problem::CellOptions as Options;

/// From this number of elements on, waking another thread pays off.
const WORTH_SHARING: usize = 1 << 17;

const SOURCE: Source<Params> = Source::new("dequantize_ternary", include_str!("dequantize.cu"));

/// Converts planes and their scale to floats.
pub struct DequantizeTernary;

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    grid: Grid,
    /// Number of scales: 1, or one per row.
    scales: usize,
}

impl Problem {
    fn scale(&self, row: usize) -> usize {
        if self.scales == 1 { 0 } else { row }
    }

    /// The bytes of a row of a plane.
    fn row<'a>(&self, plane: &'a [u8], row: usize) -> &'a [u8] {
        let bytes = plane_bytes(self.grid.n);
        &plane[row * bytes..][..bytes]
    }
}

/// The scaled value of a cell. A zero stays 0 even where the scale is not finite.
fn scaled(plane0: u8, plane1: u8, bit: usize, scale: f32) -> f32 {
    match (plane0 >> bit & 1, plane1 >> bit & 1) {
        (1, 0) => scale,
        (0, 1) => -scale,
        _ => 0.0,
    }
}

fn write(w: &mut [f32], plane0: &[u8], plane1: &[u8], scale: f32) {
    for ((w, &plane0), &plane1) in w.chunks_mut(8).zip(plane0).zip(plane1) {
        w.iter_mut().enumerate().for_each(|(bit, w)| *w = scaled(plane0, plane1, bit, scale));
    }
}

params! {
    /// The parameters of `dequantize.cu`.
    struct Params {
        plane0: u64 as "const unsigned char*",
        plane1: u64 as "const unsigned char*",
        scale: u64 as "const float*",
        w: u64 as "float*",
        rows: i64,
        n: i64,
        per_row: i32,
    }
}

impl Op for DequantizeTernary {
    const NAME: &'static str = "dequantize_ternary";
    const ABOUT: &'static str = "Ternary numbers in planes times their scale, as f32";
    const INPUTS: &'static [Slot] = &[
        plane("plane0", "(O, P)"),
        plane("plane1", "(O, P)"),
        Slot::new("scale", "(O|1)").exactly(DType::F32).loose(),
    ];
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options) = (call.inputs, call.options);
        let planes = ["plane0", "plane1"].iter().map(|&name| Ok((name, *inputs.get(name)?)));
        let planes: Named<Spec> = planes.collect::<Result<Vec<_>>>()?.into_iter().collect();
        let grid = Grid::given(&planes, &Sizes { n: options.n, ..Sizes::default() })?;
        one_or(inputs, "scale", grid.rows)?;
        debug_assert_eq!(grid.layout, Layout::Planes);
        Ok(Problem { scales: inputs.get("scale")?.shape.elements(), grid })
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let w = Spec::new(DType::F32, &[&problem.grid.leading[..], &[problem.grid.n]].concat())?;
        Ok([("w", w)].into_iter().collect())
    }

    fn cpu(problem: &Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &Exec) -> Result<()> {
        Self::cpu_in_chunks(problem, inputs, outputs, exec, Chunks::WHOLE)
    }

    fn parts(problem: &Problem) -> usize {
        problem.grid.rows * problem.grid.n
    }

    fn cpu_in_chunks(
        problem: &Problem,
        inputs: &Named<View>,
        mut outputs: Named<ViewMut>,
        exec: &Exec,
        chunks: Chunks,
    ) -> Result<()> {
        let (plane0, plane1) = (inputs.get("plane0")?.bytes(), inputs.get("plane1")?.bytes());
        let scales = inputs.get("scale")?.slice::<f32>()?;
        let w = Shared::new(outputs.expect("w")?.slice::<f32>()?);
        let Grid { rows, n, .. } = problem.grid;
        let threads = pool::worth(exec.threads, rows * n, WORTH_SHARING);
        let write = |row| {
            // SAFETY: no two rows share an element.
            let w = unsafe { w.part(row * n, n) };
            write(w, problem.row(plane0, row), problem.row(plane1, row), scales[problem.scale(row)]);
        };
        chunks.each(rows, n, |range| pool::for_each(threads, range.len(), |row| write(range.start + row)))
    }

    fn reference(problem: &Problem, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::dequantize(&problem.grid, inputs)
    }

    fn cuda(problem: &Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let at = |name: &str| lane.address(inputs.get(name)?);
        let Grid { rows, n, .. } = problem.grid;
        let params = Params {
            plane0: at("plane0")?,
            plane1: at("plane1")?,
            scale: at("scale")?,
            w: lane.address(outputs.get("w")?)?,
            rows: rows as i64,
            n: n as i64,
            per_row: (problem.scales != 1).into(),
        };
        let kernel = lane.device().kernel(&SOURCE, &types(DType::F32))?;
        // SAFETY: the op's checks prove that all sizes fit the buffers.
        unsafe { launch_each(lane, &kernel, rows * n, &params) }
    }
}
