//! Checked calls, and dynamic dispatch over ops.

use super::options::{OptionInfo, describe};
use super::{About, Named, Op, about};
use crate::chunks::Chunks;
use crate::cpu;
use crate::cuda;
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Spec, View, ViewMut};
use erased_serde::Deserializer;
use ndarray::ArrayD;
use std::marker::PhantomData;

/// The specs of these tensors.
pub fn specs<T: Described>(tensors: &Named<T>) -> Named<Spec> {
    tensors.map(Described::spec)
}

/// Calls with less work than this are too short to wake other threads for. `Sidewinder.Kernel` has this number too.
pub const QUICK: u64 = 131_072;

/// The cost of an update in f64, in updates in f32. Some ops compute f64 one value at a time.
const F64: u64 = 16;

/// A call whose inputs and options are proven to fit together; only the data is missing.
pub struct Call {
    op: &'static About,
    problem: Box<dyn Checked>,
    inputs: Named<Spec>,
    outputs: Named<Spec>,
}

/// The problem of an op, without its type.
trait Checked: Send + Sync {
    fn work(&self, inputs: &Named<Spec>) -> u64;
    fn parts(&self) -> usize;
    fn cpu(&self, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec, chunks: Chunks) -> Result<()>;
    fn reference(&self, inputs: &Named<ArrayD<f64>>, outputs: &Named<Spec>) -> Result<Named<ArrayD<f64>>>;
    fn cuda(&self, inputs: &Named<&cuda::Buffer>, outputs: &Named<&cuda::Buffer>, lane: &cuda::Lane) -> Result<()>;
}

struct ProblemOf<O: Op>(O::Problem);

impl<O: Op> Checked for ProblemOf<O> {
    fn work(&self, inputs: &Named<Spec>) -> u64 {
        O::work(&self.0, inputs)
    }

    fn parts(&self) -> usize {
        O::parts(&self.0)
    }

    fn cpu(&self, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec, chunks: Chunks) -> Result<()> {
        O::cpu_in_chunks(&self.0, inputs, outputs, exec, chunks)
    }

    fn reference(&self, inputs: &Named<ArrayD<f64>>, outputs: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        O::reference(&self.0, inputs, outputs)
    }

    fn cuda(&self, inputs: &Named<&cuda::Buffer>, outputs: &Named<&cuda::Buffer>, lane: &cuda::Lane) -> Result<()> {
        O::cuda(&self.0, inputs, outputs, lane)
    }
}

impl Call {
    /// Checks inputs and options of `O`.
    pub fn new<O: Op>(inputs: Named<Spec>, options: &O::Options) -> Result<Call> {
        let (problem, outputs) = super::check::<O>(&inputs, options)?;
        Ok(Call { op: about::<O>(), problem: Box::new(ProblemOf::<O>(problem)), inputs, outputs })
    }

    /// The op.
    pub fn op(&self) -> &'static About {
        self.op
    }

    /// The call's outputs.
    pub fn outputs(&self) -> &Named<Spec> {
        &self.outputs
    }

    /// Estimated CPU time of the call, in multiply-adds or state updates in f32: at least one for each element that it
    /// reads or writes.
    pub fn work(&self) -> u64 {
        let tensors = self.inputs.iter().chain(self.outputs.iter());
        let elements = tensors.map(|(_, spec)| spec.shape.elements() as u64).fold(0, u64::saturating_add);
        let each = if self.op.storage(&self.inputs).1 == DType::F64 { F64 } else { 1 };
        self.problem.work(&self.inputs).max(elements).saturating_mul(each)
    }

    /// The parts of the call that [`Call::cpu_in_chunks`] tells of, in chunks of several.
    pub fn parts(&self) -> usize {
        self.problem.parts()
    }

    /// Computes on the CPU; views must have the specs that were checked.
    pub fn cpu(&self, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        self.cpu_in_chunks(inputs, outputs, exec, Chunks::WHOLE)
    }

    /// Like [`Call::cpu`], in chunks.
    pub fn cpu_in_chunks(
        &self,
        inputs: &Named<View>,
        outputs: Named<ViewMut>,
        exec: &cpu::Exec,
        chunks: Chunks,
    ) -> Result<()> {
        self.same_inputs(inputs, &outputs)
            .and_then(|()| self.run().cpu(inputs, outputs, exec, chunks))
            .map_err(|error| error.in_op(self.op.name))
    }

    /// Computes the formula in f64; may give outputs that the call did not request.
    pub fn reference(&self, inputs: &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> {
        self.problem.reference(inputs, &self.outputs)
    }

    /// Queues the computation on a lane; buffers must have the specs that were checked.
    pub fn cuda(&self, inputs: &Named<&cuda::Buffer>, outputs: &Named<&cuda::Buffer>, lane: &cuda::Lane) -> Result<()> {
        self.same_inputs(inputs, outputs)
            .and_then(|()| self.run().cuda(inputs, outputs, lane))
            .map_err(|error| error.in_op(self.op.name))
    }

    fn run(&self) -> Run<'_> {
        Run { op: self.op, problem: &*self.problem, outputs: &self.outputs }
    }

    /// Checks that the inputs have exactly the specs that were checked, because kernels rely on them.
    fn same_inputs<I: Described, T: Described>(&self, inputs: &Named<I>, outputs: &Named<T>) -> Result<()> {
        same_specs(&self.inputs, &self.op.specs_of_call(inputs, outputs))
    }
}

/// A checked call whose inputs are known to have the checked specs.
struct Run<'r> {
    op: &'static About,
    problem: &'r dyn Checked,
    outputs: &'r Named<Spec>,
}

impl Run<'_> {
    fn cpu(&self, inputs: &Named<View>, mut outputs: Named<ViewMut>, exec: &cpu::Exec, chunks: Chunks) -> Result<()> {
        same_specs(self.outputs, &outputs)?;
        // Without output elements there is nothing to compute, but loops would still run over all empty rows.
        if self.outputs.iter().all(|(_, spec)| spec.shape.elements() == 0) {
            return (chunks.done)(self.problem.parts());
        }
        for (name, from) in self.op.copied(inputs) {
            outputs.get_mut(name)?.bytes_mut().copy_from_slice(from.bytes());
        }
        match exec.level {
            cpu::Level::Reference => {
                self.reference(inputs, outputs)?;
                (chunks.done)(self.problem.parts())
            }
            _ => self.problem.cpu(inputs, outputs, exec, chunks),
        }
    }

    fn reference(&self, inputs: &Named<View>, outputs: Named<ViewMut>) -> Result<()> {
        let mut given = inputs.map(View::to_f64);
        self.op.held(inputs, &outputs).for_each(|(name, tensor)| given.push(name, tensor.view().to_f64()));
        let mut results = self.problem.reference(&given, self.outputs)?;
        for (name, output) in outputs {
            output.store_f64(&results.expect(&name)?);
        }
        Ok(())
    }

    fn cuda(&self, inputs: &Named<&cuda::Buffer>, outputs: &Named<&cuda::Buffer>, lane: &cuda::Lane) -> Result<()> {
        same_specs(self.outputs, outputs)?;
        self.op.copied(inputs).try_for_each(|(name, from)| lane.copy(from, outputs.get(name)?))?;
        self.problem.cuda(inputs, outputs, lane)
    }
}

fn same_specs<T: Described>(expected: &Named<Spec>, got: &Named<T>) -> Result<()> {
    for (name, expected) in expected.iter() {
        let got = got.get(name)?.spec();
        if got != *expected {
            return Err(Error::new(Kind::Shape, name.as_ref()).expected(expected).got(got));
        }
    }
    // Kernels find optional tensors by name, so an unexpected one would be used.
    match got.iter().find(|(name, _)| expected.find(name).is_none()) {
        Some((name, _)) => {
            Err(Error::new(Kind::Argument, name.as_ref()).expected("none, as the call was checked").got("a tensor"))
        }
        None => Ok(()),
    }
}

/// Checks a call of `O` and runs it on the CPU.
pub fn run_cpu<O: Op>(
    options: &O::Options,
    inputs: &Named<View>,
    outputs: Named<ViewMut>,
    exec: &cpu::Exec,
) -> Result<()> {
    let op = about::<O>();
    let (problem, expected) = super::check::<O>(&op.specs_of_call(inputs, &outputs), options)?;
    let run = Run { op, problem: &ProblemOf::<O>(problem), outputs: &expected };
    run.cpu(inputs, outputs, exec, Chunks::WHOLE).map_err(|error| error.in_op(op.name))
}

/// Checks a call of `O` and queues it on a lane.
pub fn run_cuda<O: Op>(
    options: &O::Options,
    inputs: &Named<&cuda::Buffer>,
    outputs: &Named<&cuda::Buffer>,
    lane: &cuda::Lane,
) -> Result<()> {
    let op = about::<O>();
    let (problem, expected) = super::check::<O>(&op.specs_of_call(inputs, outputs), options)?;
    let run = Run { op, problem: &ProblemOf::<O>(problem), outputs: &expected };
    run.cuda(inputs, outputs, lane).map_err(|error| error.in_op(op.name))
}

/// An op without its type, for code that is common to all ops.
pub trait AnyOp: Send + Sync {
    /// Its declaration.
    fn about(&self) -> &'static About;

    /// Its options.
    fn options(&self) -> Vec<OptionInfo>;

    /// Its options' defaults by name; none for those that may be absent.
    fn defaults(&self) -> Box<dyn erased_serde::Serialize>;

    /// A call with options of the op's own type; panics if they are of another.
    fn call(&self, inputs: Named<Spec>, options: &dyn std::any::Any) -> Result<Call>;

    /// The op with these options; fails if a name is unknown or a value has the wrong type.
    fn with(&self, options: &mut dyn Deserializer) -> std::result::Result<Configured, erased_serde::Error>;
}

/// An op with its options: checks the specs of inputs, and gives the call.
pub type Configured = Box<dyn Fn(Named<Spec>) -> Result<Call>>;

/// The op `O` as an [`AnyOp`].
pub struct Any<O>(PhantomData<fn() -> O>);

impl<O> Any<O> {
    /// The only value.
    pub const NEW: Any<O> = Any(PhantomData);
}

impl<O: Op> AnyOp for Any<O> {
    fn about(&self) -> &'static About {
        about::<O>()
    }

    fn options(&self) -> Vec<OptionInfo> {
        describe::<O::Options>()
    }

    fn defaults(&self) -> Box<dyn erased_serde::Serialize> {
        Box::new(O::Options::default())
    }

    fn call(&self, inputs: Named<Spec>, options: &dyn std::any::Any) -> Result<Call> {
        Call::new::<O>(inputs, options.downcast_ref().expect("options of this op"))
    }

    fn with(&self, options: &mut dyn Deserializer) -> std::result::Result<Configured, erased_serde::Error> {
        let options: O::Options = erased_serde::deserialize(options)?;
        Ok(Box::new(move |inputs| Call::new::<O>(inputs, &options)))
    }
}
