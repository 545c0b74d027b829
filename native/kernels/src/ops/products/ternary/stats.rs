//! Counts the values among ternary numbers, and the sentinels.

use super::grid::{self, Grid, SLOTS};
use super::{cpu, cuda, reference};
use crate::cuda::{Buffer, Lane};
use crate::error::Result;
use crate::op::{Bound, Named, Op, Slot};
use crate::options;
use crate::tensor::{DType, Spec, View, ViewMut};
use ndarray::ArrayD;

options! {
    /// Sizes that the shapes of a layout's tensors do not determine.
    pub struct Options {
        ..grid::sizes;
    }
}

/// The counting op.
pub struct StatsTernary;

impl Op for StatsTernary {
    const NAME: &'static str = "stats_ternary";
    const ABOUT: &'static str = "Counts of -1, 0, +1 and sentinels among ternary numbers, and the first sentinel";
    const INPUTS: &'static [Slot] = SLOTS;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Grid;

    fn check(call: &Bound<Self>) -> Result<Grid> {
        let Options { n, rows } = *call.options;
        Grid::given(call.inputs, &grid::Options { n, rows, ..Default::default() })
    }

    /// `counts` of -1, 0, +1 and sentinels; `first` is the position of the first sentinel in row-major order, or -1.
    fn outputs(_: &Grid, _: &Bound<Self>) -> Result<Named<Spec>> {
        let of = |count| Spec::new(DType::I64, &[count]);
        Ok([("counts", of(4)?), ("first", of(1)?)].into_iter().collect())
    }

    fn cpu(grid: &Grid, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &crate::cpu::Exec) -> Result<()> {
        cpu::cells::stats(grid, inputs, outputs, exec)
    }

    fn reference(grid: &Grid, inputs: &Named<ArrayD<f64>>, _: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        reference::stats(grid, inputs)
    }

    fn cuda(grid: &Grid, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        cuda::stats(grid, inputs, outputs, lane)
    }
}
