//! Counts the values among ternary numbers, and the sentinels.

use super::grid::{self, Grid, SLOTS};
use super::{cpu, cuda, reference};
use crate::error::Result;
use crate::op::{Bound, Named, Op, Slot};
use crate::options;
use crate::tensor::{DType, Spec};

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

    crate::forward_by_kernels!(cpu::cells::stats, reference::stats, cuda::stats);
}
