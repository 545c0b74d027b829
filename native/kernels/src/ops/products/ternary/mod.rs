//! Ternary numbers: cells of -1, 0 and +1 in two bits, `value = bit0 - bit1`. A cell with both bits set is not a value:
//! a *sentinel*. Arithmetic treats it as 0 and never fails for it. [`stats`] counts sentinels, and conversions refuse
//! them unless told otherwise.
//!
//! Weights are kept in two *planes* of bits, U8 `(out, ceil(in / 8))`. Cell `i` is in byte `i / 8` at bit `i mod 8`,
//! the least significant first, and each row starts on a byte. Bits past the end of a row are written as 0 and ignored
//! when read. [`layouts`] describes the other forms that files use.
//!
//! [`rules`] quantizes floats to ternary numbers (BitNet b1.58's absmean, Ternary Weight Networks, a threshold), and
//! activations to 8 bits. [`products`] multiplies, [`linear`] and [`net`] are layers made of these, and [`sums`]
//! verifies results by column sums. `reference` implements all of it cell by cell.

mod cpu;
mod cuda;
pub mod dequantize;
mod grid;
pub mod layouts;
pub mod linear;
pub mod net;
pub mod problem;
pub mod products;
mod reference;
pub mod rules;
pub mod stats;
pub mod sums;

pub use cpu::wide::{Extensions, allow};

use crate::cpu::{Exec, Level};
use crate::error::Result;
use crate::op::{Named, Slot};
use crate::place::Cpu;
use crate::tensor::{DType, Owned, Spec, View, ViewMut};
use ndarray::ArrayD;

/// The storage types of floats that meet ternary numbers. All arithmetic is in f32.
pub const STORAGE: &[DType] = &[DType::F32, DType::Bf16, DType::F16];

/// Runs a composed op through the references of its parts. Unlike those of `place`, which are in f64, they are in f32:
/// quantized results are defined by their roundings.
fn through_references(
    slots: &[Slot],
    inputs: &Named<ArrayD<f64>>,
    outputs: &Named<Spec>,
    run: impl FnOnce(&Cpu, &Named<View>, Named<ViewMut>) -> Result<()>,
) -> Result<Named<ArrayD<f64>>> {
    let inputs = reference::typed(slots, inputs)?;
    let in_f32 = |spec: &Spec| Spec { dtype: if spec.dtype.is_float() { DType::F32 } else { spec.dtype }, ..*spec };
    let mut results = outputs.map(|spec| Owned::poisoned(in_f32(spec)));
    let views = results.iter_mut().map(|(name, result)| (name.clone(), result.view_mut())).collect();
    run(&Cpu(&Exec { level: Level::Reference, threads: 1 }), &inputs.map(Owned::view), views)?;
    Ok(results.map(|result| result.view().to_f64()))
}

/// Implements the runs of a composed op by a function `steps(place, problem, inputs, outputs)`. Its `Problem` has a
/// field `dtype`, the storage type, unless no step reads one.
macro_rules! by_steps {
    () => {
        $crate::ops::products::ternary::by_steps!(problem => {
            let mut in_f32 = problem.clone();
            in_f32.dtype = DType::F32;
            in_f32
        });
    };
    ($problem:ident => $in_f32:expr) => {
        fn cpu(
            problem: &Self::Problem,
            inputs: &Named<View>,
            outputs: Named<ViewMut>,
            exec: &$crate::cpu::Exec,
        ) -> Result<()> {
            steps(&$crate::place::Cpu(exec), problem, inputs, outputs)
        }

        fn reference(
            $problem: &Self::Problem,
            inputs: &Named<ArrayD<f64>>,
            outputs: &Named<Spec>,
        ) -> Result<Named<ArrayD<f64>>> {
            let problem = $in_f32;
            $crate::ops::products::ternary::through_references(Self::INPUTS, inputs, outputs, |place, inputs, outputs| {
                steps(place, &problem, inputs, outputs)
            })
        }

        fn cuda(problem: &Self::Problem, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
            let (inputs, outputs) = (inputs.map(|&b| b.clone()), outputs.map(|&b| b.clone()));
            steps(&$crate::place::Cuda(lane), problem, &inputs, outputs)
        }
    };
}
use by_steps;
