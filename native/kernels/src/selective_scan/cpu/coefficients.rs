//! `B` and `C` over a tile of time, as the channel-per-lane kernel reads them.

use super::call::{Call, Coefficient, Segment};
use crate::cpu::vector::MAX_LANES;
use crate::cpu::{Storage, Vector};
use crate::selective_scan::Form;
use crate::tensor::Element;
use std::ops::Range;

/// The coefficients of a block over a tile.
pub trait Rows<V>: Copy {
    /// What is stored for one state.
    type Item: Copy;
    /// Those of `K` neighbouring states at one step.
    fn row<const K: usize>(&self, step: usize, first: usize) -> &[Self::Item; K];
    /// One of them, for all channels of the block.
    fn vector(item: Self::Item) -> V;
}

/// All channels of the block have the same: one value a state, spread over the lanes when read.
#[derive(Clone, Copy)]
pub struct Same<'a, E> {
    values: &'a [E],
    state: usize,
}

impl<V: Vector> Rows<V> for Same<'_, V::Element> {
    type Item = V::Element;

    #[inline(always)]
    fn row<const K: usize>(&self, step: usize, first: usize) -> &[V::Element; K] {
        self.values[step * self.state + first..].first_chunk().expect("a full row")
    }

    #[inline(always)]
    fn vector(item: V::Element) -> V {
        V::splat(item)
    }
}

/// Each channel has its own: one vector a state.
#[derive(Clone, Copy)]
pub struct Own<'a, V> {
    values: &'a [V],
    /// From step to step: the state size, or 0 where all steps have the same.
    stride: usize,
}

impl<V: Vector> Rows<V> for Own<'_, V> {
    type Item = V;

    #[inline(always)]
    fn row<const K: usize>(&self, step: usize, first: usize) -> &[V; K] {
        self.values[step * self.stride + first..].first_chunk().expect("a full row")
    }

    #[inline(always)]
    fn vector(item: V) -> V {
        item
    }
}

/// Room for one tile.
pub struct Tile<V: Vector> {
    same: Vec<V::Element>,
    /// The first row in `same` and how many there are: neighbouring blocks mostly ask for the same.
    holds: Option<(usize, usize)>,
    own: Vec<V>,
}

/// A filled tile, in the form that fits the block.
#[derive(Clone, Copy)]
pub enum Filled<'a, V: Vector> {
    Same(Same<'a, V::Element>),
    Own(Own<'a, V>),
}

impl<V: Vector> Tile<V> {
    pub fn new() -> Self {
        Tile { same: Vec::new(), holds: None, own: Vec::new() }
    }

    /// Reads a coefficient for the channels of a segment over some time.
    #[inline(always)]
    pub fn fill<S: Storage<Wide = V::Element>>(
        &mut self,
        call: &Call<S>,
        of: &Coefficient<S>,
        segment: &Segment,
        time: Range<usize>,
    ) -> Filled<'_, V> {
        let state = call.problem.state;
        match of.form {
            Form::Constant => {
                self.gather(call, of, segment, time.start..time.start + 1);
                Filled::Own(Own { values: &self.own, stride: 0 })
            }
            Form::PerStep { groups } if one_group(segment, call.problem.channels / groups) => {
                self.copy(call, of, segment, time);
                Filled::Same(Same { values: &self.same, state })
            }
            Form::PerStep { .. } => {
                self.gather(call, of, segment, time);
                Filled::Own(Own { values: &self.own, stride: state })
            }
        }
    }

    /// One row a step, widened.
    #[inline(always)]
    fn copy<S: Storage<Wide = V::Element>>(
        &mut self,
        call: &Call<S>,
        of: &Coefficient<S>,
        segment: &Segment,
        time: Range<usize>,
    ) {
        let state = call.problem.state;
        let first = call.row_index(of, segment.batch, time.start, segment.channels.start);
        if self.holds == Some((first, time.len())) {
            return;
        }
        self.holds = Some((first, time.len()));
        self.same.resize(time.len() * state, V::Element::from_f64(0.0));
        for (to, t) in self.same.chunks_exact_mut(state.max(1)).zip(time) {
            let from = call.row(of, segment.batch, t, segment.channels.start);
            for n in (0..state).step_by(V::LANES) {
                S::load::<V>(&from[n..]).store_partial(&mut to[n..]);
            }
        }
    }

    /// One row a step and channel, transposed.
    #[inline(always)]
    fn gather<S: Storage<Wide = V::Element>>(
        &mut self,
        call: &Call<S>,
        of: &Coefficient<S>,
        segment: &Segment,
        time: Range<usize>,
    ) {
        self.own.clear();
        for t in time {
            let row = |channel| call.row(of, segment.batch, t, channel);
            for n in 0..call.problem.state {
                let mut lanes = [V::Element::from_f64(0.0); MAX_LANES];
                for (lane, channel) in lanes.iter_mut().zip(segment.channels.clone()) {
                    *lane = row(channel)[n].widen();
                }
                self.own.push(V::load(&lanes));
            }
        }
    }
}

fn one_group(segment: &Segment, channels_per_group: usize) -> bool {
    let Range { start, end } = segment.channels;
    start / channels_per_group == (end - 1) / channels_per_group
}
