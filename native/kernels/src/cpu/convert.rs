//! Converts whole slices between the storage type and the type of the arithmetic.

use super::pool::Shared;
use super::strips::Strips;
use super::{Exec, Real, Storage, Vector, Work, each_vector};
use crate::base::scratch::Scratch;
use crate::error::Result;
use crate::tensor::Element;
use std::ops::Deref;

/// Values in the type of the arithmetic.
pub enum Widened<'a, E> {
    /// Storage is of that type.
    Stored(&'a [E]),
    /// A copy.
    Copied(Scratch<E>),
}

impl<E: Element> Deref for Widened<'_, E> {
    type Target = [E];

    fn deref(&self) -> &[E] {
        match self {
            Widened::Stored(values) => values,
            Widened::Copied(values) => values,
        }
    }
}

/// The values in the type of the arithmetic. They are copied only if the types differ.
pub fn widened<'a, S: Storage>(values: &'a [S], exec: &Exec) -> Result<Widened<'a, S::Wide>> {
    if S::DTYPE == S::Wide::DTYPE {
        return Ok(Widened::Stored(bytemuck::cast_slice(values)));
    }
    copied(values, exec).map(Widened::Copied)
}

/// A copy of the values in the type of the arithmetic.
pub fn copied<S: Storage>(values: &[S], exec: &Exec) -> Result<Scratch<S::Wide>> {
    let mut wide = Scratch::any(values.len())?;
    convert(values, &mut wide, exec)?;
    Ok(wide)
}

/// Lets `fill` write values in the type of the arithmetic, over any content, then rounds them to the storage type.
pub fn rounded<S: Storage>(to: &mut [S], exec: &Exec, fill: impl FnOnce(&mut [S::Wide]) -> Result<()>) -> Result<()> {
    if S::DTYPE == S::Wide::DTYPE {
        return fill(bytemuck::cast_slice_mut(to));
    }
    let mut wide = Scratch::any(to.len())?;
    fill(&mut wide)?;
    convert(&wide, to, exec)
}

fn convert<A: Storage, B: Storage<Wide = A::Wide>>(from: &[A], to: &mut [B], exec: &Exec) -> Result<()> {
    let to = Shared::new(to);
    Strips::new(exec, 1, from.len(), from.len(), usize::MAX).for_each(|_, range| {
        // SAFETY: strips share no element.
        let to = unsafe { to.part(range.start, range.len()) };
        A::Wide::dispatch(exec.level, Convert { from: &from[range], to });
    })
}

struct Convert<'a, A, B> {
    from: &'a [A],
    to: &'a mut [B],
}

impl<A: Storage, B: Storage<Wide = A::Wide>> Work<A::Wide> for Convert<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = A::Wide>>(self) {
        let (from, count) = (self.from, self.from.len());
        let to = &mut self.to[..count];
        each_vector!(count, |at, end| {
            B::store(A::load::<V>(&from[at..end]), &mut to[at..end]);
        });
    }
}
