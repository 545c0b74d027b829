//! `B` and `C` over a tile of time, as the channel-per-lane kernel reads them.

use super::call::{Coefficient, Inputs, Segment};
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Storage, Vector};
use crate::ops::scan::selective_scan::Form;
use crate::tensor::Element;
use std::ops::Range;

/// The coefficients of a block over a tile.
pub trait Rows<V>: Copy {
    /// The stored values of one state.
    type Item: Copy;
    /// Whether all channels of the block share their values.
    const SHARED: bool;
    /// The stored values of `K` neighbouring states at one step.
    fn row<const K: usize>(&self, step: usize, first: usize) -> &[Self::Item; K];
    /// A stored value as a vector of the block's channels.
    fn vector(item: Self::Item) -> V;
}

/// Values that all channels of the block share: one for each state, broadcast to the lanes when read.
#[derive(Clone, Copy)]
pub struct Same<'a, E> {
    values: &'a [E],
    /// The number of states of a step: all of them, except where they are read [`Same::together`].
    stride: usize,
}

impl<V: Vector> Rows<V> for Same<'_, V::Element> {
    type Item = V::Element;
    const SHARED: bool = true;

    #[inline(always)]
    fn row<const K: usize>(&self, step: usize, first: usize) -> &[V::Element; K] {
        self.values[step * self.stride + first..].first_chunk().expect("a full row")
    }

    #[inline(always)]
    fn vector(item: V::Element) -> V {
        V::splat(item)
    }
}

/// Like [`Same`], where all states are read together: their number is then known at compile time.
#[derive(Clone, Copy)]
pub struct Together<'a, E> {
    values: &'a [E],
}

impl<'a, E> Same<'a, E> {
    pub fn together(self) -> Together<'a, E> {
        Together { values: self.values }
    }
}

impl<V: Vector> Rows<V> for Together<'_, V::Element> {
    type Item = V::Element;
    const SHARED: bool = true;

    #[inline(always)]
    fn row<const K: usize>(&self, step: usize, _first: usize) -> &[V::Element; K] {
        &self.values.as_chunks::<K>().0[step]
    }

    #[inline(always)]
    fn vector(item: V::Element) -> V {
        V::splat(item)
    }
}

/// Values of each channel: one vector for each state.
#[derive(Clone, Copy)]
pub struct Own<'a, V> {
    values: &'a [V],
    /// The number of states of a step, or 0 where all steps have the same values.
    stride: usize,
    /// The first state that `values` has.
    from: usize,
}

impl<V: Vector> Rows<V> for Own<'_, V> {
    type Item = V;
    const SHARED: bool = false;

    #[inline(always)]
    fn row<const K: usize>(&self, step: usize, first: usize) -> &[V; K] {
        self.values[step * self.stride + first - self.from..].first_chunk().expect("a full row")
    }

    #[inline(always)]
    fn vector(item: V) -> V {
        item
    }
}

/// The buffers for one tile.
pub struct Tile<V: Vector> {
    same: Vec<V::Element>,
    /// The contents of `same`: the first row, the number of rows, and their states. Neighbouring blocks mostly read
    /// equal rows, which are then not read again.
    holds: Option<(usize, usize, Range<usize>)>,
    own: Vec<V>,
}

/// B and C over a tile: both shared by the channels of the block, or both with values of each channel.
#[derive(Clone, Copy)]
pub enum Both<'a, V: Vector> {
    Same(Same<'a, V::Element>, Same<'a, V::Element>),
    Own(Own<'a, V>, Own<'a, V>),
}

/// Reads B and C for the channels of a segment over its time, at least for `states`. `shared` is the result of
/// [`are_shared`].
#[inline(always)]
pub fn fill<'a, V: Vector<Element = S::Wide>, S: Storage>(
    inputs: &Inputs<S>,
    segment: &Segment,
    shared: bool,
    states: Range<usize>,
    [b, c]: [&'a mut Tile<V>; 2],
) -> Both<'a, V> {
    if shared {
        Both::Same(b.copy(inputs, &inputs.b, segment, states.clone()), c.copy(inputs, &inputs.c, segment, states))
    } else {
        Both::Own(b.gather(inputs, &inputs.b, segment, states.clone()), c.gather(inputs, &inputs.c, segment, states))
    }
}

/// Whether all channels of a segment have the same B and the same C.
#[inline(always)]
pub fn are_shared<S: Storage>(inputs: &Inputs<S>, segment: &Segment) -> bool {
    is_shared(inputs, &inputs.b, segment) && is_shared(inputs, &inputs.c, segment)
}

#[inline(always)]
fn is_shared<S: Storage>(inputs: &Inputs<S>, of: &Coefficient<S>, segment: &Segment) -> bool {
    let share = match of.form {
        Form::Constant => 1,
        Form::PerStep { groups } => inputs.problem.channels / groups,
    };
    let Range { start, end } = segment.channels;
    start / share == (end - 1) / share && of.form != Form::Constant
}

impl<V: Vector> Tile<V> {
    pub fn new() -> Self {
        Tile { same: Vec::new(), holds: None, own: Vec::new() }
    }

    /// Reads one row per step, widened to the type of the arithmetic.
    #[inline(always)]
    fn copy<S: Storage<Wide = V::Element>>(
        &mut self,
        inputs: &Inputs<S>,
        of: &Coefficient<S>,
        segment: &Segment,
        states: Range<usize>,
    ) -> Same<'_, V::Element> {
        let first = inputs.row_index(of, segment.batch, segment.time.start, segment.channels.start);
        let stride = states.len();
        let wanted = Some((first, segment.time.len(), states.clone()));
        if self.holds != wanted {
            self.widen(inputs, of, segment, states);
            self.holds = wanted;
        }
        Same { values: &self.same, stride }
    }

    #[inline(always)]
    fn widen<S: Storage<Wide = V::Element>>(
        &mut self,
        inputs: &Inputs<S>,
        of: &Coefficient<S>,
        segment: &Segment,
        states: Range<usize>,
    ) {
        self.same.resize(segment.time.len() * states.len(), V::Element::from_f64(0.0));
        for (to, t) in self.same.chunks_exact_mut(states.len().max(1)).zip(segment.time.clone()) {
            let from = &inputs.row(of, segment.batch, t, segment.channels.start)[states.clone()];
            for n in (0..from.len()).step_by(V::LANES) {
                S::load::<V>(&from[n..]).store_partial(&mut to[n..]);
            }
        }
    }

    /// Reads one row per step and channel, transposed to vectors of channels.
    #[inline(always)]
    fn gather<S: Storage<Wide = V::Element>>(
        &mut self,
        inputs: &Inputs<S>,
        of: &Coefficient<S>,
        segment: &Segment,
        states: Range<usize>,
    ) -> Own<'_, V> {
        self.own.clear();
        let steps = match of.form {
            Form::Constant => 1,
            Form::PerStep { .. } => segment.time.len(),
        };
        for t in segment.time.clone().take(steps) {
            let row = |channel| inputs.row(of, segment.batch, t, channel);
            for n in states.clone() {
                let mut lanes = [V::Element::from_f64(0.0); MAX_LANES];
                for (lane, channel) in lanes.iter_mut().zip(segment.channels.clone()) {
                    *lane = row(channel)[n].widen();
                }
                self.own.push(V::load(&lanes));
            }
        }
        let stride = if of.form == Form::Constant { 0 } else { states.len() };
        Own { values: &self.own, stride, from: states.start }
    }
}
