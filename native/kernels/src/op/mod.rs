//! The trait of ops: named tensors in, checked options, named tensors out.
//!
//! An op is a type that implements [`Op`]. Code that calls ops by name, such as the NIF, XLA's handlers and the golden
//! tests, uses them as [`AnyOp`], so a new op is one folder and one line in [`crate::ops`].

mod about;
mod bound;
mod call;
mod describe;
mod gradient;
mod host;
mod kernels;
mod named;
mod options;
mod packed;
mod parts;
pub mod pattern;
mod shape;

pub use about::{About, about};
pub use bound::Bound;
pub use call::{Any, AnyOp, Call, Configured, QUICK, run_cpu, run_cuda, specs};
pub use describe::{Output, Precision, Slot, When, given, slots};
pub use gradient::{Backward, Differentiable, gradient_of, gradients};
pub use host::run_host;
pub use named::{Name, Named, named};
pub use options::{NoOptions, OptionDoc, OptionInfo, Options, Range, Takes};
pub use packed::{CU_SEQLENS, Packed};
pub use parts::{Parts, lanes_of_parts, of_part};
pub use pattern::Pattern;
pub use shape::Sizes;

use crate::chunks::Chunks;
use crate::cpu;
use crate::cuda;
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Shape, Spec, View, ViewMut};
use ndarray::ArrayD;
use std::ops;

/// The layout of sequences, which a tensor of the wrong shape often has in another order.
const LAYOUT: &str = "Layout is channel-last: batch, length, channels";

/// An operation: its inputs and outputs, and its implementation on each backend.
pub trait Op: Sized + 'static {
    /// Its name in every language.
    const NAME: &'static str;
    /// What it does, in a line.
    const ABOUT: &'static str;
    /// Its inputs. The first of [`Precision::Storage`] determines the storage type.
    const INPUTS: &'static [Slot];
    /// Its outputs, in a fixed order. Outputs whose shapes depend on more than sizes and flags are not declared here.
    const OUTPUTS: &'static [Output] = &[];
    /// The shapes of undeclared outputs of an op over sequences, for [`Packed`] calls.
    const RESULTS: &'static [Slot] = &[];
    /// The hint in errors about an input's shape.
    const HINT: &'static str = LAYOUT;
    /// The storage types that it supports.
    const STORAGE: &'static [DType] = &DType::FLOATS;
    /// Cotangents of its outputs that golden files may hold in addition to its inputs.
    const COTANGENTS: &'static [&'static str];
    /// The op that this one is the gradient of. A gradient takes inputs, outputs and cotangents of that op by name, and
    /// gives `dx` for each given input `x`.
    const BACKWARD_OF: Option<&'static str> = None;
    /// Inputs that are changed in place. An output of equal name and spec holds the input's values when the computation
    /// begins, which reads them there. A caller that no longer needs the old values may pass the tensor as that output
    /// alone.
    const IN_PLACE: &'static [&'static str] = &[];

    /// Inputs of another op whose gradients are the outputs of this one.
    const GRADIENTS_OF: &'static [Slot] = &[];

    /// The options, with their defaults; unknown keys are errors.
    type Options: Options;
    /// The checked call: sizes, forms and options, everything but the data.
    type Problem: Send + Sync;

    /// The sizes of the letters in the declaration; fails if inputs disagree.
    fn sizes(inputs: &Named<Spec>) -> Result<Sizes> {
        Sizes::bind(about::<Self>(), inputs)
    }

    /// Checks what the declaration does not say, and derives what kernels need.
    fn check(call: &Bound<Self>) -> Result<Self::Problem>;

    /// The number of multiply-adds or state updates of a checked call, where that is more than a few per element read
    /// or written. It determines the scheduler and the device: see [`Call::work`].
    fn work(_problem: &Self::Problem, _inputs: &Named<Spec>) -> u64 {
        0
    }

    /// The specs of a checked call's outputs, in a fixed order.
    fn outputs(_problem: &Self::Problem, call: &Bound<Self>) -> Result<Named<Spec>> {
        call.outputs()
    }

    /// Computes on the CPU; must write every element of every output.
    fn cpu(problem: &Self::Problem, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()>;

    /// How many parts [`Op::cpu_in_chunks`] tells of.
    fn parts(_problem: &Self::Problem) -> usize {
        1
    }

    /// Like [`Op::cpu`], in chunks if the op can be cut.
    fn cpu_in_chunks(
        problem: &Self::Problem,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &cpu::Exec,
        chunks: Chunks,
    ) -> Result<()> {
        Self::cpu(problem, inputs, outputs, exec)?;
        (chunks.done)(Self::parts(problem))
    }

    /// Computes the formula in f64; may give outputs that the call did not request.
    fn reference(
        problem: &Self::Problem,
        inputs: &Named<ArrayD<f64>>,
        outputs: &Named<Spec>,
    ) -> Result<Named<ArrayD<f64>>>;

    /// Queues the computation on a lane; must write every element of every output.
    fn cuda(
        problem: &Self::Problem,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        lane: &cuda::Lane,
    ) -> Result<()>;

    /// The axis of the steps of a packed tensor of this rank, by that of its declared shape: options may order axes
    /// otherwise.
    fn axis_of_steps(_options: &Self::Options, _rank: usize, declared: usize) -> usize {
        declared
    }

    /// Queues a packed call of sequences with these steps in kernels of its own, where the op has some that support it;
    /// returns whether it did. `problem` is the call as if all were one sequence, and `steps` has an element for each
    /// state. See [`Packed`], which otherwise makes a call for each sequence.
    fn cuda_packed(
        _problem: &Self::Problem,
        _inputs: &Named<&cuda::Buffer>,
        _outputs: &Named<&cuda::Buffer>,
        _steps: &[ops::Range<usize>],
        _lane: &cuda::Lane,
    ) -> Result<bool> {
        Ok(false)
    }
}

/// Checks a call of `O`; gives its problem and the specs of its outputs. What holds for every op comes first (known
/// names, required inputs, one storage type), then the checks of [`part`].
pub fn check<O: Op>(inputs: &Named<Spec>, options: &O::Options) -> Result<(O::Problem, Named<Spec>)> {
    about::<O>().check(inputs).and_then(|()| part::<O>(inputs, options)).map_err(|error| error.in_op(O::NAME))
}

/// Checks shapes and option values against the declaration of `O`, then by the op's own rules. Alone it suffices for
/// ops that are steps of another op.
pub fn part<O: Op>(inputs: &Named<Spec>, options: &O::Options) -> Result<(O::Problem, Named<Spec>)> {
    let call = Bound::<O>::new(inputs, options)?;
    let problem = O::check(&call)?;
    let outputs = O::outputs(&problem, &call)?;
    Ok((problem, outputs))
}

/// The error for a tensor that lacks the shape `expected`.
pub fn wrong_shape(name: &str, expected: &str, got: &Spec) -> Error {
    Error::new(Kind::Shape, name).expected(format_args!("shape {expected}")).got(got.shape).hint(LAYOUT)
}

/// Checks that the input of that name, if given, has these sizes.
pub fn same_shape(inputs: &Named<Spec>, name: &str, dims: &[usize]) -> Result<()> {
    match inputs.find(name) {
        Some(spec) if spec.shape[..] != *dims => Err(wrong_shape(name, &Shape::new(dims)?.to_string(), spec)),
        _ => Ok(()),
    }
}

/// The product of sizes, saturating.
pub fn product(sizes: &[usize]) -> u64 {
    sizes.iter().fold(1, |product: u64, &size| product.saturating_mul(size as u64))
}

/// The total number of elements of the inputs with these names.
pub fn elements(inputs: &Named<Spec>, names: &[&str]) -> usize {
    names.iter().filter_map(|name| inputs.find(name)).map(|spec| spec.shape.elements()).fold(0, usize::saturating_add)
}

/// The work of a gradient: it recomputes the op and then goes through it in reverse.
pub fn work_of_gradient<O: Op>(of: &O::Problem, inputs: &Named<Spec>) -> u64 {
    O::work(of, inputs).saturating_mul(4)
}
