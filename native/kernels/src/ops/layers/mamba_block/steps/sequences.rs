//! A block over whole sequences.

use super::{Between, Block, Recurrence};
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::causal_conv1d::{self, Activation, CausalConv1d};
use crate::ops::products::matrices;
use crate::ops::scan::selective_scan::{self, SelectiveScan};
use crate::place::{Place, copy_rows};
use crate::tensor::Described;

/// The state before sequences (zeros if there is none), and memory for the state after them, if it is requested.
pub struct State<V, M> {
    /// The initial state.
    pub before: Option<V>,
    /// Memory for the last state.
    pub after: Option<M>,
}

impl<V, M> Default for State<V, M> {
    fn default() -> State<V, M> {
        State { before: None, after: None }
    }
}

/// The recurrence over whole sequences, with rows `(B, L, ...)`.
pub struct Sequences<'s, P: Place> {
    pub(super) a: P::Owned,
    conv: State<P::View<'s>, P::ViewMut<'s>>,
    ssm: State<P::View<'s>, P::ViewMut<'s>>,
}

impl<'s, P: Place> Sequences<'s, P> {
    /// Sequences with the states of the convolution and of the scan.
    pub fn new(block: &Block<P>, [conv, ssm]: [State<P::View<'s>, P::ViewMut<'s>>; 2]) -> Result<Sequences<'s, P>> {
        let a_log = &block.weights.a_log;
        let mut a = block.place.empty(a_log.spec())?;
        block.place.map(Map::NegExp, &[P::briefly(a_log)], P::view_mut(&mut a))?;
        Ok(Sequences { a, conv, ssm })
    }

    /// The inputs of the convolution, with cotangents for its gradient.
    pub(super) fn conv_inputs<'t>(
        &'t self,
        block: &'t Block<P>,
        u: &'t P::Owned,
        [dy, dlast_state]: [Option<P::View<'t>>; 2],
    ) -> Named<P::View<'t>> {
        named([
            ("x", Some(P::view(u))),
            ("w", Some(P::briefly(&block.weights.conv_w))),
            ("bias", block.weights.conv_b.as_ref().map(P::briefly)),
            ("initial_state", self.conv.before.as_ref().map(P::briefly)),
            ("dy", dy),
            ("dlast_state", dlast_state),
        ])
    }

    /// The inputs of the scan, with cotangents for its gradient.
    pub(super) fn scan_inputs<'t>(
        &'t self,
        block: &'t Block<P>,
        of: &'t Between<P::Owned>,
        [dy, dlast_state]: [Option<P::View<'t>>; 2],
    ) -> Named<P::View<'t>> {
        named([
            ("x", Some(P::view(&of.c))),
            ("dt", Some(P::view(&of.dt))),
            ("A", Some(P::view(&self.a))),
            ("B", Some(P::view(&of.b_t))),
            ("C", Some(P::view(&of.c_t))),
            ("D", Some(P::briefly(&block.weights.d))),
            ("z", Some(P::view(&of.z))),
            ("dt_bias", Some(P::briefly(&block.weights.dt_b))),
            ("initial_state", self.ssm.before.as_ref().map(P::briefly)),
            ("dy", dy),
            ("dlast_state", dlast_state),
        ])
    }
}

impl<P: Place> Recurrence<P> for Sequences<'_, P> {
    fn conv(&mut self, block: &Block<P>, u: &P::Owned, c: &mut P::Owned) -> Result<()> {
        let after = self.conv.after.take();
        let options = causal_conv1d::Options { activation: Some(Activation::Silu), return_state: after.is_some() };
        let outputs = named([("y", Some(P::view_mut(c))), ("last_state", after.map(P::briefly_mut))]);
        block.place.call::<CausalConv1d>(&options, self.conv_inputs(block, u, [None, None]), outputs)
    }

    fn x_proj(&self, block: &Block<P>, c: &P::Owned) -> Result<[P::Owned; 3]> {
        let [_, state, rank] = block.sizes();
        let mut projected = block.like(&P::view(c), rank + 2 * state)?;
        matrices::multiply(block.place, P::view(c), &block.weights.x_proj, P::view_mut(&mut projected))?;
        let part = |start, width| {
            let mut part = block.like(&P::view(c), width)?;
            copy_rows::take_columns(block.place, &P::view(&projected), start, P::view_mut(&mut part))?;
            Ok(part)
        };
        Ok([part(0, rank)?, part(rank, state)?, part(rank + state, state)?])
    }

    fn scan(&mut self, block: &Block<P>, of: &Between<P::Owned>, s: &mut P::Owned) -> Result<()> {
        let after = self.ssm.after.take();
        let return_state = after.is_some();
        let options = selective_scan::Options { dt_softplus: true, return_state, ..Default::default() };
        let outputs = named([("y", Some(P::view_mut(s))), ("last_state", after.map(P::briefly_mut))]);
        block.place.call::<SelectiveScan>(&options, self.scan_inputs(block, of, [None, None]), outputs)
    }
}
