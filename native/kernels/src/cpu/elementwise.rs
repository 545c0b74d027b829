//! What is done element by element between the ops of a larger one.

use super::pool::Shared;
use super::strips::Strips;
use super::{Exec, Real, Storage, Vector, Work};
use crate::error::Result;
use crate::place::Map;
use crate::tensor::{Described, View, ViewMut};
use crate::with_type;
use std::ops::Range;

/// Computes on the CPU, from tensors of one type and shape to another of them.
pub fn map(map: Map, inputs: &[View], to: ViewMut, exec: &Exec) -> Result<()> {
    with_type!(to.spec().dtype, S => map_as::<S>(map, inputs, to, exec))
}

fn map_as<S: Storage>(map: Map, inputs: &[View], to: ViewMut, exec: &Exec) -> Result<()> {
    let inputs = inputs.iter().map(View::slice).collect::<Result<Vec<&[S]>>>()?;
    let to = to.slice::<S>()?;
    let count = to.len();
    assert!(inputs.iter().all(|input| input.len() == count), "inputs as long as the output");
    let to = Shared::new(to);
    Strips::new(exec, 1, count, count, usize::MAX).for_each(|_, range| {
        S::Wide::dispatch(exec.level, Strip { map, inputs: &inputs, to: &to, range });
    })
}

struct Strip<'a, S> {
    map: Map,
    inputs: &'a [&'a [S]],
    to: &'a Shared<'a, S>,
    range: Range<usize>,
}

impl<S: Storage> Work<S::Wide> for Strip<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        let end = self.range.end;
        for first in self.range.step_by(V::LANES) {
            let block = first..end.min(first + V::LANES);
            let value = match (self.map, self.inputs) {
                (Map::NegExp, [v]) => V::zero().sub(S::load::<V>(&v[block.clone()]).exp()),
                (Map::Product, [a, b]) => S::load::<V>(&a[block.clone()]).mul(S::load(&b[block.clone()])),
                (Map::Sum, terms) => {
                    let mut sum = V::zero();
                    for term in terms.iter() {
                        sum = sum.add(S::load(&term[block.clone()]));
                    }
                    sum
                }
                (map, inputs) => unreachable!("{map:?} of {} tensors", inputs.len()),
            };
            // SAFETY: strips share no element.
            S::store(value, unsafe { self.to.part(block.start, block.len()) });
        }
    }
}
