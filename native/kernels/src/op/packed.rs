//! Packed calls: sequences of different lengths, one after the other in a batch of 1.
//!
//! `cu_seqlens = [0, l1, l1 + l2, ..., L]` has the ends of `S` sequences, as in FlashAttention's calls of variable
//! length. No state and no window crosses an end: each sequence is like a call of its own on a range of the axis `L`.
//! Tensors `(B, L, ...)` are `(1, L, ...)`, and states `(B, ...)` are `(S, ...)`, one for each sequence. Gradients of shared
//! inputs are summed over the sequences in order: each in the type of the gradient, their sum in the type of the
//! arithmetic or wider, rounded once. On CUDA an op may have kernels that take all sequences at once
//! ([`Op::cuda_packed`]): their sums are rounded once only.

use super::pattern::Axis;
use super::{Bound, Name, Named, Op, Output, Pattern, Sizes, Slot, about, run_cpu, run_cuda};
use crate::cpu;
use crate::cuda::{Buffer, Lane, columns};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Owned, Spec, View, ViewMut};
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD, Slice};
use std::marker::PhantomData;
use std::ops::Range;

/// The input with the ends of the sequences.
pub const CU_SEQLENS: &str = "cu_seqlens";

const HINT: &str = "Packed sequences lie one after the other in a batch of 1; states have an element for each sequence";

/// An op over sequences, with the optional input `cu_seqlens` of packed calls. Its tensors of sequences begin with the
/// axes `B, L`, its states with `B` alone; all others are shared.
pub struct Packed<O>(PhantomData<O>);

/// A checked call.
pub enum Problem<O: Op> {
    /// Without `cu_seqlens`.
    Batch(O::Problem),
    /// With it.
    Packed(Box<Packing<O>>),
}

/// A checked call with `cu_seqlens`, whose values are not known yet.
pub struct Packing<O: Op> {
    options: O::Options,
    /// The call, as if all were one sequence.
    whole: O::Problem,
    layout: Layout,
}

/// What the tensors of a packed call have for each sequence.
struct Layout {
    length: usize,
    inputs: Named<(Role, Spec)>,
    outputs: Named<Role>,
}

/// What a tensor has for each sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// A range of the second axis.
    Steps,
    /// An element of the first axis.
    State,
    /// Nothing of its own.
    Shared,
}

impl Role {
    /// The role of a tensor by its declared shape: of a loose one, by the first alternative of the tensor's rank.
    fn of(shape: &Pattern, spec: &Spec) -> Role {
        let of_rank = shape.alternatives().find(|one| one.axes().len() == spec.shape.len());
        let shape = of_rank.unwrap_or(*shape);
        let letter = |at| shape.axes().get(at).and_then(Axis::letter).map(|letter| b'A' + letter);
        match (letter(0), letter(1)) {
            (Some(b'B'), Some(b'L')) => Role::Steps,
            (Some(b'B'), _) => Role::State,
            _ => Role::Shared,
        }
    }

    /// The part of a tensor that belongs to sequence `at` with these steps.
    fn part<T: Parts>(self, tensor: T, at: usize, steps: &Range<usize>) -> Result<T> {
        let dims = tensor.spec().shape;
        match self {
            Role::Steps => {
                let part = [&[1, steps.len()], &dims[2..]].concat();
                tensor.shaped(&dims[1..])?.range(steps.clone())?.shaped(&part)
            }
            Role::State => tensor.range(at..at + 1),
            Role::Shared => Ok(tensor),
        }
    }

    /// The axis of that part, and where it lies there.
    fn axis(self, at: usize, steps: &Range<usize>) -> Option<(ndarray::Axis, Slice)> {
        match self {
            Role::Steps => Some((ndarray::Axis(1), Slice::from(steps.clone()))),
            Role::State => Some((ndarray::Axis(0), Slice::from(at..at + 1))),
            Role::Shared => None,
        }
    }

    fn of_array<'a>(self, array: &'a ArrayD<f64>, at: usize, steps: &Range<usize>) -> ArrayViewD<'a, f64> {
        self.axis(at, steps).map_or_else(|| array.view(), |(axis, part)| array.slice_axis(axis, part))
    }

    fn of_array_mut<'a>(self, array: &'a mut ArrayD<f64>, at: usize, steps: &Range<usize>) -> ArrayViewMutD<'a, f64> {
        match self.axis(at, steps) {
            Some((axis, part)) => array.slice_axis_mut(axis, part),
            None => array.view_mut(),
        }
    }
}

/// Tensors whose parts are tensors.
trait Parts: Described + Sized {
    fn shaped(self, dims: &[usize]) -> Result<Self>;
    fn range(self, rows: Range<usize>) -> Result<Self>;
}

macro_rules! parts {
    ($($type:ty),*) => {
        $(impl Parts for $type {
            fn shaped(self, dims: &[usize]) -> Result<Self> {
                self.reshape(dims)
            }

            fn range(self, rows: Range<usize>) -> Result<Self> {
                self.rows(rows)
            }
        })*
    };
}
parts!(View<'_>, ViewMut<'_>, Buffer);

impl Parts for Spec {
    fn shaped(self, dims: &[usize]) -> Result<Self> {
        Spec::new(self.dtype, dims)
    }

    fn range(self, rows: Range<usize>) -> Result<Self> {
        Ok(self.rows(rows)?.0)
    }
}

/// More slots than any op has.
const MOST: usize = 24;

impl<O: Op> Packed<O> {
    const SLOTS: &'static [Slot; MOST] = &{
        let mut slots = [Slot::new(CU_SEQLENS, "(S+1)").exactly(DType::I32).optional().loose(); MOST];
        let mut i = 0;
        while i < O::INPUTS.len() {
            slots[i] = O::INPUTS[i];
            i += 1;
        }
        slots
    };

    /// The call as if all were one sequence.
    fn whole<T>(call: &Bound<Self>, with: impl FnOnce(&Bound<O>) -> Result<T>) -> Result<T> {
        let inputs = whole(O::INPUTS, call.inputs)?;
        with(&Bound { inputs: &inputs, options: call.options, sizes: call.sizes, storage: call.storage })
    }
}

/// The inputs with their roles, without `cu_seqlens`.
fn roles(slots: &'static [Slot], inputs: &Named<Spec>) -> Named<(Role, Spec)> {
    let role =
        |slot: &'static Slot| inputs.find(slot.name).map(|spec| (slot.name, (Role::of(&slot.shape, spec), *spec)));
    slots.iter().filter_map(role).collect()
}

/// The roles of outputs: those of their declared shapes, or of the inputs that they are the gradients of.
fn roles_of_outputs(declared: &[Output], gradients_of: &'static [Slot], outputs: &Named<Spec>) -> Named<Role> {
    let shape = |name: &str| {
        let declared = declared.iter().find(|output| output.name == name).map(|output| &output.shape);
        declared.or_else(|| gradients_of.iter().find(|slot| slot.gradient() == name).map(|slot| &slot.shape))
    };
    let role =
        |(name, spec): (&Name, &Spec)| (name.clone(), shape(name).map_or(Role::Shared, |shape| Role::of(shape, spec)));
    outputs.iter().map(role).collect()
}

/// The inputs of a call as if all were one sequence.
fn whole(slots: &'static [Slot], inputs: &Named<Spec>) -> Result<Named<Spec>> {
    let Some(ends) = inputs.find(CU_SEQLENS) else { return Ok(inputs.clone()) };
    let sequences = sequences(ends)?;
    let one = |(name, (role, spec)): (&Name, &(Role, Spec))| Ok((name.clone(), one(name, *role, *spec, sequences)?));
    roles(slots, inputs).iter().map(one).collect()
}

/// The number of sequences.
fn sequences(ends: &Spec) -> Result<usize> {
    match ends.shape[..] {
        [ends] if ends > 0 => Ok(ends - 1),
        _ => Err(Error::new(Kind::Shape, CU_SEQLENS).expected("shape (S+1)").got(ends.shape).hint(ENDS)),
    }
}

/// The spec of a tensor as if all were one sequence.
fn one(name: &str, role: Role, spec: Spec, sequences: usize) -> Result<Spec> {
    let expected = match role {
        Role::Steps => 1,
        Role::State => sequences,
        Role::Shared => return Ok(spec),
    };
    match &spec.shape[..] {
        [first, rest @ ..] if *first == expected => with_first(spec, 1, rest),
        _ => Err(Error::new(Kind::Shape, name)
            .expected(format_args!("{expected} as the size of the first axis"))
            .got(spec.shape)
            .hint(HINT)),
    }
}

fn with_first(spec: Spec, first: usize, rest: &[usize]) -> Result<Spec> {
    Spec::new(spec.dtype, &[&[first], rest].concat())
}

const ENDS: &str = "It has the ends of all sequences after a 0, as in [0, 5, 12] for lengths of 5 and 7";

/// The steps of each sequence; fails unless the ends rise from 0 to `length`.
fn steps(ends: &[i32], length: usize) -> Result<Vec<Range<usize>>> {
    let wrong =
        |expected: String, got: i32| Error::new(Kind::Argument, CU_SEQLENS).expected(expected).got(got).hint(ENDS);
    if ends[0] != 0 {
        return Err(wrong("0 as its first element".into(), ends[0]));
    }
    if let Some(fall) = ends.windows(2).find(|pair| pair[1] < pair[0]) {
        return Err(wrong(format!("at least {} after {}", fall[0], fall[0]), fall[1]));
    }
    match ends[ends.len() - 1] {
        last if last as usize != length => Err(wrong(format!("the length {length} as its last element"), last)),
        _ => Ok(ends.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect()),
    }
}

impl<O: Op> Op for Packed<O> {
    const NAME: &'static str = O::NAME;
    const ABOUT: &'static str = O::ABOUT;
    const INPUTS: &'static [Slot] = Self::SLOTS.split_at(O::INPUTS.len() + 1).0;
    const OUTPUTS: &'static [Output] = O::OUTPUTS;
    const HINT: &'static str = O::HINT;
    const STORAGE: &'static [DType] = O::STORAGE;
    const COTANGENTS: &'static [&'static str] = O::COTANGENTS;
    const BACKWARD_OF: Option<&'static str> = O::BACKWARD_OF;

    type Options = O::Options;
    type Problem = Problem<O>;

    fn sizes(inputs: &Named<Spec>) -> Result<Sizes> {
        Sizes::bind(about::<O>(), &whole(O::INPUTS, inputs)?)
    }

    fn check(call: &Bound<Self>) -> Result<Problem<O>> {
        Self::whole(call, |bound| {
            let whole = O::check(bound)?;
            if call.inputs.find(CU_SEQLENS).is_none() {
                return Ok(Problem::Batch(whole));
            }
            let outputs = roles_of_outputs(O::OUTPUTS, O::GRADIENTS_OF, &O::outputs(&whole, bound)?);
            let layout = Layout { length: call.sizes.of('L'), inputs: roles(O::INPUTS, call.inputs), outputs };
            Ok(Problem::Packed(Box::new(Packing { options: call.options.clone(), whole, layout })))
        })
    }

    fn work(problem: &Problem<O>, inputs: &Named<Spec>) -> u64 {
        match problem {
            Problem::Batch(whole) => O::work(whole, inputs),
            Problem::Packed(packing) => O::work(&packing.whole, inputs),
        }
    }

    fn outputs(problem: &Problem<O>, call: &Bound<Self>) -> Result<Named<Spec>> {
        match problem {
            Problem::Batch(whole) => Self::whole(call, |bound| O::outputs(whole, bound)),
            Problem::Packed(packing) => {
                let outputs = Self::whole(call, |bound| O::outputs(&packing.whole, bound))?;
                packing.layout.of_all(&outputs, sequences(call.inputs.get(CU_SEQLENS)?)?)
            }
        }
    }

    crate::runs! {
        cpu(problem, inputs, outputs, exec) {
            match problem {
                Problem::Batch(whole) => O::cpu(whole, inputs, outputs, exec),
                Problem::Packed(packing) => packing.cpu(inputs, outputs, exec),
            }
        }
        reference(problem, inputs, outputs) {
            match problem {
                Problem::Batch(whole) => O::reference(whole, inputs, outputs),
                Problem::Packed(packing) => packing.reference(inputs, outputs),
            }
        }
        cuda(problem, inputs, outputs, lane) {
            match problem {
                Problem::Batch(whole) => O::cuda(whole, inputs, outputs, lane),
                Problem::Packed(packing) => packing.cuda(inputs, outputs, lane),
            }
        }
    }
}

impl<O: Op> Packing<O> {
    fn cpu(&self, inputs: &Named<View>, outputs: Named<ViewMut>, exec: &cpu::Exec) -> Result<()> {
        self.layout.cpu(inputs, outputs, &|given, written| run_cpu::<O>(&self.options, given, written, exec))
    }

    fn reference(&self, inputs: &Named<ArrayD<f64>>, outputs: &Named<Spec>) -> Result<Named<ArrayD<f64>>> {
        self.layout.reference(inputs, outputs, &|specs, given| {
            let (problem, wanted) = super::part::<O>(specs, &self.options)?;
            O::reference(&problem, given, &wanted)
        })
    }

    /// Waits until `cu_seqlens` is there, to read it.
    fn cuda(&self, inputs: &Named<&Buffer>, outputs: &Named<&Buffer>, lane: &Lane) -> Result<()> {
        let ends = lane.read(inputs.get(CU_SEQLENS)?)?;
        let all = steps(ends.view().slice()?, self.layout.length)?;
        if O::cuda_packed(&self.whole, inputs, outputs, &all, lane)? {
            return Ok(());
        }
        self.layout.cuda_each(inputs, outputs, &all, lane, &|given, written| {
            run_cuda::<O>(&self.options, given, written, lane)
        })
    }
}

/// A call of one sequence with its inputs and outputs.
type OnCpu<'r> = dyn Fn(&Named<View>, Named<ViewMut>) -> Result<()> + 'r;
/// The results of one sequence by the specs and values of its inputs.
type InReference<'r> = dyn Fn(&Named<Spec>, &Named<ArrayD<f64>>) -> Result<Named<ArrayD<f64>>> + 'r;
/// Queues a call of one sequence with its inputs and outputs.
type OnLane<'r> = dyn Fn(&Named<&Buffer>, &Named<&Buffer>) -> Result<()> + 'r;

impl Layout {
    /// The specs of the outputs, from those of one sequence.
    fn of_all(&self, outputs: &Named<Spec>, sequences: usize) -> Result<Named<Spec>> {
        let all = |(name, spec): (&Name, &Spec)| match self.outputs.find(name) {
            Some(Role::State) => Ok((name.clone(), with_first(*spec, sequences, &spec.shape[1..])?)),
            _ => Ok((name.clone(), *spec)),
        };
        outputs.iter().map(all).collect()
    }

    /// The inputs of one sequence.
    fn given<'a, T: 'a, P: Parts>(
        &self,
        inputs: &'a Named<T>,
        own: impl Fn(&'a T) -> P,
        at: usize,
        steps: &Range<usize>,
    ) -> Result<Named<P>> {
        let part = |(name, (role, _)): (&Name, &(Role, Spec))| {
            Ok((name.clone(), role.part(own(inputs.get(name)?), at, steps)?))
        };
        self.inputs.iter().map(part).collect()
    }

    /// The outputs that are sums over the sequences, each made by `make`.
    fn sums<'a, T: 'a, S>(&self, outputs: &'a Named<T>, make: impl Fn(&'a T) -> Result<S>) -> Result<Named<S>> {
        let shared = outputs.iter().filter(|(name, _)| self.outputs.find(name) == Some(&Role::Shared));
        shared.map(|(name, tensor)| Ok((name.clone(), make(tensor)?))).collect()
    }

    fn cpu(&self, inputs: &Named<View>, mut outputs: Named<ViewMut>, run: &OnCpu) -> Result<()> {
        let all = steps(inputs.get(CU_SEQLENS)?.slice()?, self.length)?;
        let mut terms = self.sums(&outputs, |output| Owned::try_poisoned(output.spec()))?;
        let mut sums = self.sums(&outputs, |output| Ok(ArrayD::zeros(&output.spec().shape[..])))?;
        for (at, steps) in all.iter().enumerate() {
            let given = self.given(inputs, |view| *view, at, steps)?;
            let mut written: Named<_> = terms.iter_mut().map(|(name, term)| (name.clone(), term.view_mut())).collect();
            for (name, output) in outputs.iter_mut().filter(|(name, _)| sums.find(name).is_none()) {
                let role = self.outputs.get(name)?;
                written.push(name.clone(), role.part(output.reborrow(), at, steps)?);
            }
            run(&given, written)?;
            for (name, sum) in sums.iter_mut() {
                *sum += &terms.get(name)?.view().to_f64();
            }
        }
        sums.into_iter().try_for_each(|(name, sum)| {
            outputs.expect(&name)?.store_f64(&sum);
            Ok(())
        })
    }

    fn reference(
        &self,
        inputs: &Named<ArrayD<f64>>,
        outputs: &Named<Spec>,
        run: &InReference,
    ) -> Result<Named<ArrayD<f64>>> {
        let ends: Vec<i32> = inputs.get(CU_SEQLENS)?.iter().map(|&end| end as i32).collect();
        let mut results = outputs.map(|spec| ArrayD::zeros(&spec.shape[..]));
        for (at, steps) in steps(&ends, self.length)?.iter().enumerate() {
            let specs = self.inputs.try_map(|(role, spec)| role.part(*spec, at, steps))?;
            let part = |(name, (role, _)): (&Name, &(Role, Spec))| {
                Ok((name.clone(), role.of_array(inputs.get(name)?, at, steps).to_owned()))
            };
            let of_one = run(&specs, &self.inputs.iter().map(part).collect::<Result<_>>()?)?;
            for (name, result) in results.iter_mut() {
                let mut to = self.outputs.get(name)?.of_array_mut(result, at, steps);
                to += of_one.get(name)?;
            }
        }
        Ok(results)
    }

    fn cuda_each(
        &self,
        inputs: &Named<&Buffer>,
        outputs: &Named<&Buffer>,
        all: &[Range<usize>],
        lane: &Lane,
        run: &OnLane,
    ) -> Result<()> {
        let terms = self.sums(outputs, |output| {
            let spec = output.spec();
            lane.temporary(Spec::new(spec.dtype, &[&[all.len()], &spec.shape[..]].concat())?)
        })?;
        for (at, steps) in all.iter().enumerate() {
            let given = self.given(inputs, |buffer| Buffer::clone(buffer), at, steps)?;
            let written = outputs.iter().map(|(name, output)| {
                let part = match terms.find(name) {
                    Some(terms) => terms.rows(at..at + 1)?.reshape(&output.spec().shape)?,
                    None => self.outputs.get(name)?.part(Buffer::clone(output), at, steps)?,
                };
                Ok((name.clone(), part))
            });
            let written: Named<Buffer> = written.collect::<Result<_>>()?;
            run(&given.as_ref(), &written.as_ref())?;
        }
        terms.iter().try_for_each(|(name, terms)| match all.len() {
            0 => lane.fill(outputs.get(name)?, 0),
            count => columns(terms, count, outputs.get(name)?, lane),
        })
    }
}
