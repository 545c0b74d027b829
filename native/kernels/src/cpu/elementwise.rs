//! Elementwise operations.

use super::activation::Unary;
use super::math;
use super::pool::Shared;
use super::strips::Strips;
use super::{Exec, Real, Storage, Vector, Work, Writing, each_vector, fence, line, prefetch_near, prefetch_to_write};
use crate::base::elementwise::{DECAY_ENDS, Map};
use crate::error::Result;
use crate::tensor::{Described, View, ViewMut};
use crate::{with_activation, with_type};
use std::marker::PhantomData;
use std::ops::Range;

/// Prefetch distance for inputs and output, in bytes.
const AHEAD: usize = 4096;

/// Computes an elementwise operation on the CPU, over tensors of equal type and shape.
pub fn map(map: Map, inputs: &[View], to: ViewMut, exec: &Exec) -> Result<()> {
    with_type!(to.spec().dtype, S => map_as::<S>(map, inputs, to, exec))
}

fn map_as<S: Storage>(map: Map, inputs: &[View], to: ViewMut, exec: &Exec) -> Result<()> {
    let inputs = inputs.iter().map(View::slice).collect::<Result<Vec<&[S]>>>()?;
    let to = to.slice::<S>()?;
    let factor = map.factor();
    match (map, &inputs[..]) {
        (Map::NegExp, &[v]) => each::<S, NegExp, 1>([v], to, factor, exec),
        (Map::Product, &[a, b]) => each::<S, Product, 2>([a, b], to, factor, exec),
        (Map::Sum, &[a]) => each::<S, Sum, 1>([a], to, factor, exec),
        (Map::Sum, &[a, b]) => each::<S, Sum, 2>([a, b], to, factor, exec),
        (Map::Sum, &[a, b, c]) => each::<S, Sum, 3>([a, b, c], to, factor, exec),
        (Map::Sum, &[a, b, c, d]) => each::<S, Sum, 4>([a, b, c, d], to, factor, exec),
        (Map::Scaled(_), &[v]) => each::<S, Scaled, 1>([v], to, factor, exec),
        (Map::PlusScaled(_), &[a, b]) => each::<S, PlusScaled, 2>([a, b], to, factor, exec),
        (Map::PlusScaled(_), &[a, b, c]) => each::<S, PlusScaled, 3>([a, b, c], to, factor, exec),
        (Map::PlusScaled(_), &[a, b, c, d]) => each::<S, PlusScaled, 4>([a, b, c, d], to, factor, exec),
        (Map::Activate(f), &[v]) => with_activation!(Some(f), F => each::<S, Value<F>, 1>([v], to, factor, exec)),
        (Map::Slope(f), &[v]) => with_activation!(Some(f), F => each::<S, Slope<F>, 1>([v], to, factor, exec)),
        (Map::SlopeTimes(f), &[v, dy]) => {
            with_activation!(Some(f), F => each::<S, SlopeTimes<F>, 2>([v, dy], to, factor, exec))
        }
        (Map::Gate(f), &[v, by]) => with_activation!(Some(f), F => each::<S, Gate<F>, 2>([v, by], to, factor, exec)),
        (Map::GateSlope(f), &[v, by, dy]) => {
            with_activation!(Some(f), F => each::<S, GateSlope<F>, 3>([v, by, dy], to, factor, exec))
        }
        (Map::Decay, &[a]) => each::<S, Decay, 1>([a], to, factor, exec),
        (Map::Decay, &[a, c]) => each::<S, Decay, 2>([a, c], to, factor, exec),
        (Map::DecaySlope, &[a, dy]) => each::<S, DecaySlope, 2>([a, dy], to, factor, exec),
        (Map::DecaySlope, &[a, c, dy]) => each::<S, DecaySlope, 3>([a, c, dy], to, factor, exec),
        (Map::Integrate, &[z, h, g, gamma]) => each::<S, Integrate, 4>([z, h, g, gamma], to, factor, exec),
        (Map::Carry, &[g, gamma, dh]) => each::<S, Carry, 3>([g, gamma, dh], to, factor, exec),
        (Map::DifferenceTimes, &[a, b, c]) => each::<S, DifferenceTimes, 3>([a, b, c], to, factor, exec),
        (map, inputs) => unreachable!("{map:?} of {} tensors", inputs.len()),
    }
}

/// An elementwise function of `N` values and a scalar factor.
trait Function<const N: usize> {
    fn of<V: Vector>(values: [V; N], factor: V) -> V;
}

struct NegExp;

impl Function<1> for NegExp {
    #[inline(always)]
    fn of<V: Vector>([v]: [V; 1], _: V) -> V {
        V::zero().sub(v.exp())
    }
}

struct Product;

impl Function<2> for Product {
    #[inline(always)]
    fn of<V: Vector>([a, b]: [V; 2], _: V) -> V {
        a.mul(b)
    }
}

struct Sum;

impl<const N: usize> Function<N> for Sum {
    #[inline(always)]
    fn of<V: Vector>(values: [V; N], _: V) -> V {
        let mut sum = values[0];
        for value in &values[1..] {
            sum = sum.add(*value);
        }
        sum
    }
}

struct Scaled;

impl Function<1> for Scaled {
    #[inline(always)]
    fn of<V: Vector>([v]: [V; 1], factor: V) -> V {
        v.mul(factor)
    }
}

struct PlusScaled;

impl<const N: usize> Function<N> for PlusScaled {
    #[inline(always)]
    fn of<V: Vector>(values: [V; N], factor: V) -> V {
        let mut sum = values[0];
        for value in &values[1..N - 1] {
            sum = sum.add(*value);
        }
        values[N - 1].mul_add(factor, sum)
    }
}

struct Value<F>(PhantomData<F>);

impl<F: Unary> Function<1> for Value<F> {
    #[inline(always)]
    fn of<V: Vector>([v]: [V; 1], _: V) -> V {
        F::value(v)
    }
}

struct Slope<F>(PhantomData<F>);

impl<F: Unary> Function<1> for Slope<F> {
    #[inline(always)]
    fn of<V: Vector>([v]: [V; 1], _: V) -> V {
        F::slope(v)
    }
}

struct SlopeTimes<F>(PhantomData<F>);

impl<F: Unary> Function<2> for SlopeTimes<F> {
    #[inline(always)]
    fn of<V: Vector>([v, dy]: [V; 2], _: V) -> V {
        F::slope(v).mul(dy)
    }
}

struct Gate<F>(PhantomData<F>);

impl<F: Unary> Function<2> for Gate<F> {
    #[inline(always)]
    fn of<V: Vector>([v, by]: [V; 2], _: V) -> V {
        F::value(v).mul(by)
    }
}

struct GateSlope<F>(PhantomData<F>);

impl<F: Unary> Function<3> for GateSlope<F> {
    #[inline(always)]
    fn of<V: Vector>([v, by, dy]: [V; 3], _: V) -> V {
        F::slope(v).mul(by).mul(dy)
    }
}

struct Decay;

impl<const N: usize> Function<N> for Decay {
    #[inline(always)]
    fn of<V: Vector>(values: [V; N], _: V) -> V {
        let [low, high] = DECAY_ENDS;
        product_of_sigmoids(&values).max(V::constant(low)).min(V::constant(high))
    }
}

/// The product of the sigmoids of one or two values.
#[inline(always)]
fn product_of_sigmoids<V: Vector>(values: &[V]) -> V {
    let first = math::sigmoid(values[0]);
    if values.len() == 1 { first } else { first.mul(math::sigmoid(values[1])) }
}

struct DecaySlope;

impl<const N: usize> Function<N> for DecaySlope {
    #[inline(always)]
    fn of<V: Vector>(values: [V; N], _: V) -> V {
        let [low, high] = [V::constant(DECAY_ENDS[0]), V::constant(DECAY_ENDS[1])];
        let decay = product_of_sigmoids(&values[..N - 1]);
        let mut slope = math::sigmoid_slope(values[0]);
        if N == 3 {
            slope = slope.mul(math::sigmoid(values[1]));
        }
        let zero = V::zero();
        let slope = slope.mul(values[N - 1]);
        zero.where_less(decay, low, zero.where_less(high, decay, slope))
    }
}

struct Integrate;

impl Function<4> for Integrate {
    #[inline(always)]
    fn of<V: Vector>([z, h, g, gamma]: [V; 4], _: V) -> V {
        let carried = V::constant(1.0).sub(g).add(gamma);
        g.mul_add(z, carried.mul(h))
    }
}

struct Carry;

impl Function<3> for Carry {
    #[inline(always)]
    fn of<V: Vector>([g, gamma, dh]: [V; 3], _: V) -> V {
        V::constant(1.0).sub(g).add(gamma).mul(dh)
    }
}

struct DifferenceTimes;

impl Function<3> for DifferenceTimes {
    #[inline(always)]
    fn of<V: Vector>([a, b, c]: [V; 3], _: V) -> V {
        a.sub(b).mul(c)
    }
}

fn each<S: Storage, F: Function<N>, const N: usize>(
    inputs: [&[S]; N],
    to: &mut [S],
    factor: f64,
    exec: &Exec,
) -> Result<()> {
    let count = to.len();
    assert!(inputs.iter().all(|input| input.len() == count), "inputs as long as the output");
    let writing = Writing::of(std::mem::size_of_val(to), exec);
    let to = Shared::new(to);
    Strips::new(exec, 1, count, count, usize::MAX).for_each(|_, range| {
        let strip = Strip::<S, F, N> { inputs: &inputs, to: &to, range, writing, factor, function: PhantomData };
        S::Wide::dispatch(exec.level, strip);
    })
}

struct Strip<'a, S, F, const N: usize> {
    inputs: &'a [&'a [S]; N],
    to: &'a Shared<'a, S>,
    range: Range<usize>,
    writing: Writing,
    factor: f64,
    function: PhantomData<F>,
}

impl<S: Storage, F: Function<N>, const N: usize> Work<S::Wide> for Strip<'_, S, F, N> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = S::Wide>>(self) {
        // SAFETY: strips share no element.
        let to = unsafe { self.to.part(self.range.start, self.range.len()) };
        // Slices of one length, so that one bounds check covers all. They are copied to a local: through a reference
        // they would be reloaded after each store.
        let mut from = *self.inputs;
        let mut i = 0;
        while i < N {
            from[i] = &from[i][self.range.start..][..to.len()];
            i += 1;
        }
        let factor = V::constant(self.factor);
        let (ahead, past) = (self.writing == Writing::Ahead, self.writing == Writing::Past);
        // A loop, so that there is one copy of the code for fewer elements than a vector.
        let (mut at, mut part) = (0, S::to_alignment::<V>(to).min(to.len()));
        loop {
            if at < part {
                S::store(Self::value::<V>(&from, factor, at, part - at), &mut to[at..part]);
                at = part;
            }
            while past && at + V::LANES <= to.len() {
                S::stream(Self::value::<V>(&from, factor, at, V::LANES), &mut to[at..at + V::LANES]);
                at += V::LANES;
            }
            while at + V::LANES <= to.len() {
                if ahead {
                    Self::ask::<V>(&from, to, at);
                }
                S::store(Self::value::<V>(&from, factor, at, V::LANES), &mut to[at..at + V::LANES]);
                at += V::LANES;
            }
            if at == to.len() {
                break;
            }
            part = to.len();
        }
        if past {
            fence();
        }
    }
}

impl<S: Storage, F: Function<N>, const N: usize> Strip<'_, S, F, N> {
    /// Prefetches what lies AHEAD bytes after element `at`, once per cache line.
    #[inline(always)]
    fn ask<V: Vector>(from: &[&[S]; N], to: &[S], at: usize) {
        if at % line::<S>() < V::LANES {
            let at = at + AHEAD / size_of::<S>();
            prefetch_to_write(to.as_ptr(), at);
            let mut i = 0;
            while i < N {
                prefetch_near(from[i].as_ptr(), at);
                i += 1;
            }
        }
    }

    #[inline(always)]
    fn value<V: Vector<Element = S::Wide>>(from: &[&[S]; N], factor: V, at: usize, count: usize) -> V {
        let mut values = [V::zero(); N];
        // Not an iterator: it would not be inlined here, and would cost a call per vector.
        let mut i = 0;
        while i < N {
            values[i] = S::load(&from[i][at..at + count]);
            i += 1;
        }
        F::of(values, factor)
    }
}

/// Applies a function to values in place.
pub fn in_place<E: Real>(
    activation: Option<crate::base::activation::Activation>,
    values: &mut [E],
    exec: &Exec,
) -> Result<()> {
    if activation.is_none() {
        return Ok(());
    }
    with_activation!(activation, F => strips::<E, InPlace<F>>(&[], values, exec))
}

/// Multiplies values in place by the derivative of a function, given its arguments.
pub fn slope_in_place<E: Real>(
    activation: Option<crate::base::activation::Activation>,
    arguments: &[E],
    values: &mut [E],
    exec: &Exec,
) -> Result<()> {
    if activation.is_none() {
        return Ok(());
    }
    with_activation!(activation, F => strips::<E, SlopeInPlace<F>>(arguments, values, exec))
}

/// An operation on values in place.
trait Change {
    fn change<V: Vector>(value: V, argument: V) -> V;
    const ARGUMENTS: bool;
}

struct InPlace<F>(PhantomData<F>);

impl<F: Unary> Change for InPlace<F> {
    const ARGUMENTS: bool = false;
    #[inline(always)]
    fn change<V: Vector>(value: V, _: V) -> V {
        F::value(value)
    }
}

struct SlopeInPlace<F>(PhantomData<F>);

impl<F: Unary> Change for SlopeInPlace<F> {
    const ARGUMENTS: bool = true;
    #[inline(always)]
    fn change<V: Vector>(value: V, argument: V) -> V {
        F::slope(argument).mul(value)
    }
}

fn strips<E: Real, C: Change>(arguments: &[E], values: &mut [E], exec: &Exec) -> Result<()> {
    let count = values.len();
    let values = Shared::new(values);
    Strips::new(exec, 1, count, count, usize::MAX).for_each(|_, range| {
        let arguments = if C::ARGUMENTS { &arguments[range.clone()] } else { &[] };
        // SAFETY: strips share no element.
        let values = unsafe { values.part(range.start, range.len()) };
        E::dispatch(exec.level, Changed::<E, C> { arguments, values, change: PhantomData });
    })
}

struct Changed<'a, E, C> {
    arguments: &'a [E],
    values: &'a mut [E],
    change: PhantomData<C>,
}

impl<E: Real, C: Change> Work<E> for Changed<'_, E, C> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector<Element = E>>(self) {
        let count = self.values.len();
        let arguments = if C::ARGUMENTS { &self.arguments[..count] } else { &[] };
        each_vector!(count, |at, end| {
            let argument = if C::ARGUMENTS { V::load_partial(&arguments[at..end]) } else { V::zero() };
            let value = C::change(V::load_partial(&self.values[at..end]), argument);
            value.store_partial(&mut self.values[at..end]);
        });
    }
}
