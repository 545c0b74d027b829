//! The hierarchy over a bank of memory slots, each level the adaptive average of the one below, and its gradient.
//! Level 0 is the bank. Level `i` has `max(1, M / ratio^i)` slots, rounded down, and from `S` slots to `T`:
//!
//! ```text
//! window(j) = j S / T rounded down, and on, but not to (j+1) S / T rounded up
//! next[j] = mean of level[r] over the r of window(j)         dlevel[r] = sum of dnext[j] / |window(j)| over the
//!                                                            j whose windows have r
//! ```
//!
//! Windows overlap where `T` does not divide `S` (as in PyTorch's adaptive average pooling). A bank that is a ring is
//! pooled from its oldest slot on, which is `cursor`, the next one to be written. Keys and values are pooled
//! separately, in equal ways. Storage is f32, f64, bf16 or f16; sums are f32 (f64 for f64 storage). Each level is the
//! average of the unrounded level below.

mod cpu;
mod cuda;
pub mod query;
mod reference;

use crate::error::{Error, Kind, Result};
use crate::op::{self, Backward, Bound, Differentiable, Named, Op, Slot};
use crate::tensor::{DType, Spec};
use crate::{options, shared_options};
use std::ops::Range;

/// The most levels, including the bank.
pub const MOST_LEVELS: usize = 16;

shared_options! {
    levels {
        /// number of levels, including the bank
        levels: usize = 3;
        /// slots pooled into one slot of the next level
        ratio: usize = 4;
    }
}

options! {
    /// The options.
    pub struct Options {
        ..levels;
        /// oldest slot of the bank, if it is a ring
        cursor: usize = 0;
    }
}

/// The rows of a level with `from` rows whose average is row `j` of the next level with `to` rows. With both numbers
/// swapped: the rows of the level above whose windows contain row `j`.
#[inline(always)]
pub fn window(j: usize, from: usize, to: usize) -> Range<usize> {
    j * from / to..((j + 1) * from).div_ceil(to)
}

/// The sizes of a hierarchy.
#[derive(Clone, Debug)]
pub struct Levels {
    /// Batch size, `B` in the shapes.
    pub batch: usize,
    /// Width of a slot, `D`.
    pub width: usize,
    /// Slots of each level, from the bank up.
    pub sizes: Vec<usize>,
    /// The oldest slot of the bank.
    pub first: usize,
}

impl Levels {
    /// The levels over a bank of this shape, which has three axes.
    pub fn new(name: &str, bank: &Spec, options: &Options) -> Result<Levels> {
        let [batch, slots, width] = [0, 1, 2].map(|axis| bank.shape[axis]);
        if slots == 0 {
            return Err(op::wrong_shape(name, "(B, M, D) with at least one slot", bank).hint("Nothing has no average"));
        }
        let Options { levels, ratio, cursor } = *options;
        within("levels", levels, 1..=MOST_LEVELS)?;
        within("ratio", ratio, 2..=usize::MAX)?;
        // Windows are computed from products of the sizes of adjacent levels, which must not overflow.
        if slots.checked_mul(slots / 2 + 2).is_none_or(|product| product > i64::MAX as usize) {
            return Err(Error::new(Kind::Size, name).expected("fewer slots").got(slots));
        }
        let size = |level: usize| (slots / ratio.saturating_pow(level as u32)).max(1);
        Ok(Levels { batch, width, sizes: (0..levels).map(size).collect(), first: cursor % slots })
    }

    /// Number of elements of a bank.
    pub fn elements(&self) -> usize {
        self.batch * self.sizes[0] * self.width
    }
}

/// Checks that the value of an option is in a range.
pub fn within(name: &str, value: usize, range: std::ops::RangeInclusive<usize>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    let error = Error::new(Kind::Option, name).got(value);
    Err(match *range.end() {
        usize::MAX => error.expected(format_args!("{} or more", range.start())),
        end => error.expected(format_args!("a number from {} to {end}", range.start())),
    })
}

/// A checked call.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The sizes.
    pub levels: Levels,
    /// The storage type.
    pub dtype: DType,
}

macro_rules! of_levels {
    ($($level:literal)*) => {
        [$([concat!("k", $level), concat!("v", $level), concat!("dk", $level), concat!("dv", $level)]),*]
    };
}

/// The names of the keys and values of each level above the bank, and of their cotangents.
pub const NAMES: [[&str; 4]; MOST_LEVELS - 1] = of_levels!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

macro_rules! shapes {
    ($($level:literal)*) => { [$(concat!("(B, M", $level, ", D)")),*] };
}

const SHAPES: [&str; MOST_LEVELS - 1] = shapes!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

const COTANGENTS: [&str; 2 * NAMES.len()] = {
    let mut all = [""; 2 * NAMES.len()];
    let mut i = 0;
    while i < all.len() {
        all[i] = NAMES[i / 2][2 + i % 2];
        i += 1;
    }
    all
};

const COTANGENT_SLOTS: [Slot; COTANGENTS.len()] = {
    let mut all = [Slot::new("", "()"); COTANGENTS.len()];
    let mut i = 0;
    while i < all.len() {
        all[i] = Slot::new(COTANGENTS[i], SHAPES[i / 2]).optional().loose();
        i += 1;
    }
    all
};

/// The hierarchy.
pub struct HdsConstruct;

impl Op for HdsConstruct {
    const NAME: &'static str = "hds_construct";
    const ABOUT: &'static str = "Levels over a memory bank, each the adaptive average of the one below";
    const INPUTS: &'static [Slot] = &[Slot::new("k", "(B, M, D)"), Slot::new("v", "(B, M, D)").loose()];
    const HINT: &'static str = "A bank is (batch, slots, width), and k and v are alike";
    const COTANGENTS: &'static [&'static str] = &COTANGENTS;

    type Options = Options;
    type Problem = Problem;

    fn check(call: &Bound<Self>) -> Result<Problem> {
        let (inputs, options, k) = (call.inputs, call.options, call.inputs.get("k")?);
        within("levels", options.levels, 2..=MOST_LEVELS)
            .map_err(|e| e.hint("Level 0 is the bank itself, which is there already"))?;
        let levels = Levels::new("k", k, options)?;
        // Checked last: if `k` has no slots, that is the error to report.
        op::same_shape(inputs, "v", &k.shape)?;
        for name in NAMES[options.levels - 1..].iter().flat_map(|names| &names[2..]) {
            if inputs.find(name).is_some() {
                return Err(Error::new(Kind::Argument, *name)
                    .expected(format_args!("cotangents of {} levels", options.levels))
                    .got(*name));
            }
        }
        Ok(Problem { levels, dtype: call.storage })
    }

    fn outputs(problem: &Problem, _: &Bound<Self>) -> Result<Named<Spec>> {
        let Levels { batch, width, ref sizes, .. } = problem.levels;
        let mut outputs = Named::default();
        for (&size, [k, v, ..]) in sizes[1..].iter().zip(NAMES) {
            let spec = Spec::new(problem.dtype, &[batch, size, width])?;
            outputs.push(k, spec);
            outputs.push(v, spec);
        }
        Ok(outputs)
    }

    crate::forward_by_kernels!();
}

/// The gradient of [`HdsConstruct`].
pub type HdsConstructBackward = Backward<HdsConstruct>;

impl Differentiable for HdsConstruct {
    const BACKWARD: &'static str = "hds_construct_backward";
    const GIVEN: &'static [Slot] = &op::slots::<{ 2 + COTANGENT_SLOTS.len() }>(Self::INPUTS, &COTANGENT_SLOTS);

    crate::backward_by_kernels!();
}
