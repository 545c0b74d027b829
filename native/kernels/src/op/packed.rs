//! Packed calls: sequences of different lengths, one after the other in a batch of 1.
//!
//! `cu_seqlens = [0, l1, l1 + l2, ..., L]` has the ends of `S` sequences, as in FlashAttention's calls of variable
//! length. No state and no window crosses an end: each sequence is like a call of its own on a range of the axis `L`.
//! Tensors `(B, L, ...)`, or `(B, H, L, ...)`, have a batch of 1, and states `(B, ...)` are `(S, ...)`, one for each
//! sequence. Gradients of shared inputs are summed over the sequences in order: each in the type of the gradient, their
//! sum in the type of the arithmetic or wider, rounded once. On CUDA an op may have kernels that take all sequences at
//! once ([`Op::cuda_packed`]): their sums are rounded once only.

mod role;

use super::{Bound, Name, Named, Op, Output, Sizes, Slot, about, run_cpu, run_cuda};
use crate::cpu;
use crate::cuda::{Buffer, Lane, columns};
use crate::error::{Error, Kind, Result};
use crate::tensor::{DType, Described, Owned, Spec, View, ViewMut};
use ndarray::ArrayD;
use role::{Role, each_block, roles, roles_of_outputs};
use std::marker::PhantomData;
use std::ops::Range;

/// The input with the ends of the sequences.
pub const CU_SEQLENS: &str = "cu_seqlens";

const HINT: &str = "Packed sequences lie one after the other in a batch of 1; states have an element for each sequence";

/// An op over sequences, with the optional input `cu_seqlens` of packed calls. Its tensors of sequences begin with the
/// axis `B` and have an axis of steps, `L` or `M`; its states begin with `B` and have none; all others are shared.
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
        Role::Steps(_) => 1,
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
            let layout = Layout::new::<O>(call.inputs, call.options, &O::outputs(&whole, bound)?)?;
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
    fn new<O: Op>(inputs: &Named<Spec>, options: &O::Options, outputs: &Named<Spec>) -> Result<Layout> {
        if let Some(slot) = O::INPUTS.iter().find(|slot| inputs.find(slot.name).is_some() && slot.shape.may_repeat()) {
            return Err(Error::new(Kind::Argument, slot.name)
                .expected(format_args!("none beside {CU_SEQLENS}"))
                .got("one")
                .hint("Packed sequences do not see each other without it; causal masks are allowed"));
        }
        let mut roles = roles(O::INPUTS, inputs);
        roles.iter_mut().for_each(|(_, (role, spec))| *role = role.laid_out::<O>(options, spec));
        let steps = |(name, (role, spec)): (&Name, &(Role, Spec))| match role {
            Role::Steps(axis) => Some((name.clone(), *axis, spec.shape[*axis], *spec)),
            _ => None,
        };
        let length = roles.iter().find_map(steps).map_or(0, |(_, _, length, _)| length);
        if let Some((name, axis, _, spec)) = roles.iter().filter_map(steps).find(|&(_, _, steps, _)| steps != length) {
            return Err(Error::new(Kind::Shape, name)
                .expected(format_args!("{length} steps as axis {axis}"))
                .got(spec.shape)
                .hint(HINT));
        }
        let mut outputs_roles = roles_of_outputs::<O>(outputs);
        for (name, role) in outputs_roles.iter_mut() {
            *role = role.laid_out::<O>(options, outputs.get(name)?);
        }
        Ok(Layout { length, inputs: roles, outputs: outputs_roles })
    }

    /// The specs of the outputs, from those of one sequence.
    fn of_all(&self, outputs: &Named<Spec>, sequences: usize) -> Result<Named<Spec>> {
        let all = |(name, spec): (&Name, &Spec)| match self.outputs.find(name) {
            Some(Role::State) => Ok((name.clone(), with_first(*spec, sequences, &spec.shape[1..])?)),
            _ => Ok((name.clone(), *spec)),
        };
        outputs.iter().map(all).collect()
    }

    /// The inputs of one sequence, each given by `part`.
    fn given<P>(&self, part: impl Fn(&Name, Role) -> Result<P>) -> Result<Named<P>> {
        self.inputs.iter().map(|(name, (role, _))| Ok((name.clone(), part(name, *role)?))).collect()
    }

    /// Copies of the inputs of a sequence whose steps do not lie one after the other.
    fn copies(&self, inputs: &Named<View>, steps: &Range<usize>) -> Result<Named<Owned>> {
        let copy = |(name, (role, spec)): (&Name, &(Role, Spec))| {
            let axis = role.scattered(spec)?;
            Some(role.spec(spec, steps.len()).and_then(Owned::try_any).and_then(|mut copy| {
                let (from, mut to) = (inputs.get(name)?.bytes(), copy.view_mut());
                each_block(spec, axis, steps, |all, own| to.bytes_mut()[own].copy_from_slice(&from[all]));
                Ok((name.clone(), copy))
            }))
        };
        self.inputs.iter().filter_map(copy).collect()
    }

    /// Memory for the outputs of a sequence whose steps do not lie one after the other.
    fn apart(&self, outputs: &Named<ViewMut>, steps: &Range<usize>) -> Result<Named<Owned>> {
        let own = |(name, role): (&Name, &Role)| {
            let spec = outputs.find(name)?.spec();
            role.scattered(&spec)?;
            let own = role.spec(&spec, steps.len()).and_then(Owned::try_any);
            Some(own.map(|own| (name.clone(), own)))
        };
        self.outputs.iter().filter_map(own).collect()
    }

    /// Writes those outputs to their places.
    fn put(&self, parts: &Named<Owned>, outputs: &mut Named<ViewMut>, steps: &Range<usize>) -> Result<()> {
        for (name, part) in parts.iter() {
            let to = outputs.get_mut(name)?;
            let spec = to.spec();
            if let Some(axis) = self.outputs.get(name)?.scattered(&spec) {
                let from = part.view();
                each_block(&spec, axis, steps, |all, own| to.bytes_mut()[all].copy_from_slice(&from.bytes()[own]));
            }
        }
        Ok(())
    }

    /// The outputs that are sums over the sequences, each made by `make`.
    fn sums<'a, T: 'a, S>(&self, outputs: &'a Named<T>, make: impl Fn(&'a T) -> Result<S>) -> Result<Named<S>> {
        let shared = outputs.iter().filter(|(name, _)| self.outputs.find(name) == Some(&Role::Shared));
        shared.map(|(name, tensor)| Ok((name.clone(), make(tensor)?))).collect()
    }

    fn cpu(&self, inputs: &Named<View>, mut outputs: Named<ViewMut>, run: &OnCpu) -> Result<()> {
        let all = steps(inputs.get(CU_SEQLENS)?.slice()?, self.length)?;
        let mut terms = self.sums(&outputs, |output| Owned::try_any(output.spec()))?;
        let mut sums = self.sums(&outputs, |output| Ok(ArrayD::zeros(&output.spec().shape[..])))?;
        for (at, steps) in all.iter().enumerate() {
            let copies = self.copies(inputs, steps)?;
            let given = self.given(|name, role| match copies.find(name) {
                Some(copy) => Ok(copy.view()),
                None => role.part(*inputs.get(name)?, at, steps),
            })?;
            let mut apart = self.apart(&outputs, steps)?;
            let own = terms.iter_mut().chain(apart.iter_mut());
            let mut written: Named<_> = own.map(|(name, own)| (name.clone(), own.view_mut())).collect();
            for (name, output) in outputs.iter_mut() {
                if written.find(name).is_none() {
                    written.push(name.clone(), self.outputs.get(name)?.part(output.reborrow(), at, steps)?);
                }
            }
            run(&given, written)?;
            self.put(&apart, &mut outputs, steps)?;
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
            let specs = self.inputs.try_map(|(role, spec)| role.spec(spec, steps.len()))?;
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
            let given = self.given(|name, role| role.part(Buffer::clone(inputs.get(name)?), at, steps))?;
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
