//! Gradients of ops, which are ops too.

use super::{Bound, Named, Op, Slot, same_shape, work_of_gradient};
use crate::cpu;
use crate::cuda;
use crate::error::Result;
use crate::tensor::{Spec, View, ViewMut};
use ndarray::ArrayD;
use std::marker::PhantomData;
use std::ops::Range;

/// An op with a gradient, which is the op [`Backward`] of it.
pub trait Differentiable: Op {
    /// The gradient's name.
    const BACKWARD: &'static str;
    /// The gradient's inputs by name: inputs of the op, outputs of the op, and cotangents.
    const GIVEN: &'static [Slot];

    /// The gradients' specs: for each differentiable input that is given, its own spec, under its name with a `d`
    /// before it.
    fn gradients(inputs: &Named<Spec>) -> Named<Spec> {
        of_differentiable(Self::INPUTS, inputs)
    }

    /// Computes the gradients on the CPU; must write every element of every output.
    fn cpu_backward(
        problem: &Self::Problem,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &cpu::Exec,
    ) -> Result<()>;

    /// Computes the formula of the gradients in f64.
    fn reference_backward(
        problem: &Self::Problem,
        inputs: &Named<ArrayD<f64>>,
        outputs: &Named<Spec>,
    ) -> Result<Named<ArrayD<f64>>>;

    /// Queues the gradients on a lane; must write every element of every output.
    fn cuda_backward(
        problem: &Self::Problem,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        lane: &cuda::Lane,
    ) -> Result<()>;

    /// Queues the gradients of a packed call as [`Op::cuda_packed`] does.
    fn cuda_backward_packed(
        _problem: &Self::Problem,
        _inputs: &Named<&cuda::Buffer>,
        _outputs: &Named<&cuda::Buffer>,
        _steps: &[Range<usize>],
        _lane: &cuda::Lane,
    ) -> Result<bool> {
        Ok(false)
    }
}

fn of_differentiable(slots: &'static [Slot], inputs: &Named<Spec>) -> Named<Spec> {
    let wanted = slots.iter().filter(|slot| slot.precision.is_differentiable());
    wanted.filter_map(|slot| Some((slot.gradient(), *inputs.find(slot.name)?))).collect()
}

/// Checks that outputs and cotangents among the inputs have the shapes of the op's outputs.
fn as_outputs(outputs: &Named<Spec>, inputs: &Named<Spec>) -> Result<()> {
    outputs.iter().try_for_each(|(name, spec)| {
        same_shape(inputs, name, &spec.shape)?;
        same_shape(inputs, &format!("d{name}"), &spec.shape)
    })
}

/// A checked call of a gradient.
#[derive(Clone, Debug)]
pub struct Gradient<P> {
    /// The checked call of the op.
    pub of: P,
    /// The specs of the gradients.
    pub outputs: Named<Spec>,
}

/// Specs of gradients: for each pair of an input and its gradient's name, the spec of the input, if it is given.
pub fn gradients(inputs: &Named<Spec>, names: &[(&str, &'static str)]) -> Named<Spec> {
    names.iter().filter_map(|&(input, gradient)| Some((gradient, *inputs.find(input)?))).collect()
}

/// The name of the gradient of an input of `O`.
pub fn gradient_of<O: Op>(input: &str) -> &'static str {
    O::INPUTS.iter().find(|slot| slot.name == input).expect("an input of the op").gradient()
}

/// The gradient of an op, as an op.
pub struct Backward<O>(PhantomData<O>);

impl<O: Differentiable> Op for Backward<O> {
    const NAME: &'static str = O::BACKWARD;
    const ABOUT: &'static str = "The gradient of an op";
    const INPUTS: &'static [Slot] = O::GIVEN;
    const HINT: &'static str = O::HINT;
    const COTANGENTS: &'static [&'static str] = &[];
    const BACKWARD_OF: Option<&'static str> = Some(O::NAME);
    const GRADIENTS_OF: &'static [Slot] = O::INPUTS;

    /// The op's own options; those that select outputs have no effect here.
    type Options = O::Options;
    type Problem = Gradient<O::Problem>;

    fn check(call: &Bound<Self>) -> Result<Gradient<O::Problem>> {
        let Bound { inputs, options, sizes, storage } = *call;
        let call = Bound { inputs, options, sizes, storage };
        let of = O::check(&call)?;
        // Shapes of declared outputs have been checked as the gradient's inputs; undeclared ones are checked here.
        if O::OUTPUTS.is_empty() {
            as_outputs(&O::outputs(&of, &call)?, inputs)?;
        }
        Ok(Gradient { of, outputs: O::gradients(inputs) })
    }

    fn work(call: &Gradient<O::Problem>, inputs: &Named<Spec>) -> u64 {
        work_of_gradient::<O>(&call.of, inputs)
    }

    fn outputs(call: &Gradient<O::Problem>, _: &Bound<Self>) -> Result<Named<Spec>> {
        Ok(call.outputs.clone())
    }

    crate::runs! {
        cpu(call, inputs, outputs, exec) { O::cpu_backward(&call.of, inputs, outputs, exec) }
        reference(call, inputs, outputs) { O::reference_backward(&call.of, inputs, outputs) }
        cuda(call, inputs, outputs, lane) { O::cuda_backward(&call.of, inputs, outputs, lane) }
    }

    fn axis_of_steps(options: &Self::Options, rank: usize, declared: usize) -> usize {
        O::axis_of_steps(options, rank, declared)
    }

    fn cuda_packed(
        call: &Gradient<O::Problem>,
        inputs: &Named<&cuda::Buffer>,
        outputs: &Named<&cuda::Buffer>,
        steps: &[Range<usize>],
        lane: &cuda::Lane,
    ) -> Result<bool> {
        O::cuda_backward_packed(&call.of, inputs, outputs, steps, lane)
    }
}
