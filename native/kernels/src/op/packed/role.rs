//! What the tensors of a packed call have for each sequence, and the parts that belong to one.

use crate::cuda::Buffer;
use crate::error::Result;
use crate::op::pattern::Axis;
use crate::op::{Name, Named, Op, Pattern, Slot};
use crate::tensor::{Described, Spec, View, ViewMut};
use ndarray::{ArrayD, ArrayViewD, ArrayViewMutD, Slice};
use std::ops::Range;

/// What a tensor has for each sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A range of this axis.
    Steps(usize),
    /// An element of the first axis.
    State,
    /// Nothing of its own.
    Shared,
}

impl Role {
    /// The role of a tensor by its declared shape: of a loose one, by the first alternative of the tensor's rank.
    pub fn of(shape: &Pattern, spec: &Spec) -> Role {
        let of_rank = shape.alternatives().find(|one| one.axes().len() == spec.shape.len());
        let shape = of_rank.unwrap_or(*shape);
        let is = |axis: &Axis, letters: &[u8]| axis.letter().is_some_and(|letter| letters.contains(&(b'A' + letter)));
        match shape.axes().iter().position(|axis| is(axis, b"LM")) {
            _ if !shape.axes().first().is_some_and(|axis| is(axis, b"B")) => Role::Shared,
            Some(axis) => Role::Steps(axis),
            None => Role::State,
        }
    }

    /// The role with the axis of steps that the options tell.
    pub fn laid_out<O: Op>(self, options: &O::Options, spec: &Spec) -> Role {
        match self {
            Role::Steps(axis) => Role::Steps(O::axis_of_steps(options, spec.shape.len(), axis)),
            other => other,
        }
    }

    /// The spec of the part of a tensor that belongs to a sequence of some steps.
    pub fn spec(self, of: &Spec, steps: usize) -> Result<Spec> {
        let mut dims = of.shape.to_vec();
        match self {
            Role::Steps(axis) => dims[axis] = steps,
            Role::State => dims[0] = 1,
            Role::Shared => {}
        }
        Spec::new(of.dtype, &dims)
    }

    /// The axis of steps that do not lie one after the other: those of several heads, if heads come first.
    pub fn scattered(self, of: &Spec) -> Option<usize> {
        match self {
            Role::Steps(axis) if of.shape[..axis].iter().product::<usize>() != 1 => Some(axis),
            _ => None,
        }
    }

    /// The part of a tensor that belongs to sequence `at` with these steps, which lie one after the other.
    pub fn part<T: Parts>(self, tensor: T, at: usize, steps: &Range<usize>) -> Result<T> {
        let (all, own) = (tensor.spec(), self.spec(&tensor.spec(), steps.len())?);
        assert!(self.scattered(&all).is_none(), "steps that lie one after the other");
        match self {
            Role::Steps(axis) => tensor.shaped(&all.shape[axis..])?.range(steps.clone())?.shaped(&own.shape),
            Role::State => tensor.range(at..at + 1),
            Role::Shared => Ok(tensor),
        }
    }

    /// The axis of that part, and where it lies there.
    fn axis(self, at: usize, steps: &Range<usize>) -> Option<(ndarray::Axis, Slice)> {
        match self {
            Role::Steps(axis) => Some((ndarray::Axis(axis), Slice::from(steps.clone()))),
            Role::State => Some((ndarray::Axis(0), Slice::from(at..at + 1))),
            Role::Shared => None,
        }
    }

    pub fn of_array<'a>(self, array: &'a ArrayD<f64>, at: usize, steps: &Range<usize>) -> ArrayViewD<'a, f64> {
        self.axis(at, steps).map_or_else(|| array.view(), |(axis, part)| array.slice_axis(axis, part))
    }

    pub fn of_array_mut<'a>(
        self,
        array: &'a mut ArrayD<f64>,
        at: usize,
        steps: &Range<usize>,
    ) -> ArrayViewMutD<'a, f64> {
        match self.axis(at, steps) {
            Some((axis, part)) => array.slice_axis_mut(axis, part),
            None => array.view_mut(),
        }
    }
}

/// Calls `copy` with the bytes of each block of these steps along an axis: in the tensor, and in one that has them alone.
pub fn each_block(of: &Spec, axis: usize, steps: &Range<usize>, mut copy: impl FnMut(Range<usize>, Range<usize>)) {
    let step = of.dtype.size() * of.shape[axis + 1..].iter().product::<usize>();
    let (all, own) = (of.shape[axis] * step, steps.len() * step);
    for block in 0..of.shape[..axis].iter().product() {
        let first = block * all + steps.start * step;
        copy(first..first + own, block * own..(block + 1) * own);
    }
}

/// Tensors whose parts are tensors.
pub trait Parts: Described + Sized {
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

/// The inputs with their roles, without `cu_seqlens`.
pub fn roles(slots: &'static [Slot], inputs: &Named<Spec>) -> Named<(Role, Spec)> {
    let role =
        |slot: &'static Slot| inputs.find(slot.name).map(|spec| (slot.name, (Role::of(&slot.shape, spec), *spec)));
    slots.iter().filter_map(role).collect()
}

/// The roles of outputs: those of their shapes, or of the inputs that they are the gradients of.
pub fn roles_of_outputs<O: Op>(outputs: &Named<Spec>) -> Named<Role> {
    let shape = |name: &str| {
        let declared = O::OUTPUTS.iter().map(|output| (output.name, &output.shape));
        let known = O::RESULTS.iter().map(|slot| (slot.name, &slot.shape));
        let gradients = O::GRADIENTS_OF.iter().map(|slot| (slot.gradient(), &slot.shape));
        declared.chain(known).chain(gradients).find(|(one, _)| *one == name).map(|(_, shape)| shape)
    };
    let role =
        |(name, spec): (&Name, &Spec)| (name.clone(), shape(name).map_or(Role::Shared, |shape| Role::of(shape, spec)));
    outputs.iter().map(role).collect()
}
