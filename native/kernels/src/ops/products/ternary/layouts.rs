//! The layouts of ternary numbers, and conversions between them, each by name:
//!
//! ```text
//! values       I8 (..., n)            -1, 0 or 1
//! planes       two U8 (..., n / 8)    cell i at bit i mod 8 of byte i / 8
//! packed2      U8 (..., n / 4)        code 2 bit0 + bit1 of cell i at bits 2 (i mod 4) and one up of byte i / 4
//! offset_rows  U8 (rows / 4, n)       code value + 1, 3 is none; with R = rows / 4, row i R + r is in byte row r at
//!                                     bits 2 i: public BitNet checkpoints
//! byte_planes  two U8 (..., n)        a byte of 0 or 1 for each bit, to exchange with others
//! ```
//!
//! Quotients are rounded up, and padding cells are written as 0. Missing rows of `offset_rows` are code 0, which reads
//! as -1: pass the number of `rows`.

use super::grid::{Conversion, Grid, SLOTS};
use super::{cpu, cuda, reference};
use crate::error::Result;
use crate::op::{Bound, Named, Op, Slot};
use crate::tensor::{DType, Spec};

pub use super::grid::{Layout, OnSentinel, Options};

/// A conversion from the layout whose tensors are given.
pub struct ConvertTernary;

impl Op for ConvertTernary {
    const NAME: &'static str = "convert_ternary";
    const ABOUT: &'static str = "Ternary numbers from one layout to another; -1, 0 and 1 to planes and back";
    const INPUTS: &'static [Slot] = SLOTS;
    const STORAGE: &'static [DType] = super::STORAGE;
    const COTANGENTS: &'static [&'static str] = &[];

    type Options = Options;
    type Problem = Conversion;

    fn check(call: &Bound<Self>) -> Result<Conversion> {
        let (inputs, options) = (call.inputs, call.options);
        let from = Grid::given(inputs, options)?;
        let to = from.to(options.to.unwrap_or(Layout::Planes));
        Ok(Conversion { from, to, on_sentinel: options.on_sentinel })
    }

    /// The layout's tensors, the number of sentinels, and the position of the first or -1.
    fn outputs(problem: &Conversion, _: &Bound<Self>) -> Result<Named<Spec>> {
        let mut outputs = problem.to.specs()?;
        outputs.push("sentinels", Spec::new(DType::I32, &[1])?);
        outputs.push("first", Spec::new(DType::I64, &[1])?);
        Ok(outputs)
    }

    crate::forward_by_kernels!(cpu::cells::convert, reference::convert, cuda::convert);
}
