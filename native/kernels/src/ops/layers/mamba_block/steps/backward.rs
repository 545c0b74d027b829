//! The gradient of the block.

use super::{Between, Block, Norms, Problem, Sequences, State, Weights, among};
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::causal_conv1d::{self, Activation, CausalConv1dBackward};
use crate::ops::norm::{RmsNormBackward, RmsOptions};
use crate::ops::products::linear;
use crate::ops::scan::selective_scan;
use crate::ops::scan::selective_scan::backward::SelectiveScanBackward;
use crate::place::{Place, Steps, copy_rows};
use crate::tensor::Described;
use std::ops::Range;

/// The gradients of all given inputs of the block.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    backward_with(place, problem, inputs, outputs, None)
}

/// Like [`backward`], of a block with these norms, whose weights get no gradients.
pub fn backward_with<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
    norms: Option<Norms<P::View<'a>>>,
) -> Result<()> {
    let call = Steps { place, problem, inputs };
    let weights = Weights { norms, ..among::<P>(inputs)? };
    let block = Block { place, weights: &weights };
    let states = ["conv_state", "ssm_state"].map(|name| State { before: call.optional(name), after: None });
    let mut sequences = Sequences::new(&block, states)?;
    let between = block.between(inputs.get("x")?, &mut sequences)?;
    let s = block.scan(&between, &mut sequences)?;
    let steps = Again { call, block, sequences, between };
    let to = (outputs.expect("dout_proj")?, outputs.take("dout_proj_b"));
    let of = [P::view(&s), steps.call.input("out_proj")?, steps.call.input("dy")?];
    let ds = steps.dense_backward(of, steps.call.optional("out_proj_b"), to)?;
    let scan = steps.scan_backward(&ds, &mut outputs)?;
    let dc = steps.x_proj_backward(&scan, &mut outputs)?;
    let du = steps.conv_backward(&dc, &mut outputs)?;
    steps.in_proj_backward(&du, &scan.dz, &mut outputs)?;
    place.map(Map::Product, &[P::view(&scan.da), P::view(&steps.sequences.a)], outputs.expect("dA_log")?)
}

/// The gradients of the scan's inputs, those of intermediate tensors of the block.
struct OfScan<T> {
    dc: T,
    ddt: T,
    da: T,
    db_t: T,
    dc_t: T,
    dz: T,
}

/// A call of the gradient, with the recomputed intermediate tensors.
struct Again<'b, 'i, 'a, P: Place> {
    call: Steps<'b, 'i, 'a, P, Problem>,
    block: Block<'b, 'a, P>,
    sequences: Sequences<'a, P>,
    between: Between<P::Owned>,
}

impl<'a, P: Place> Again<'_, '_, 'a, P> {
    /// Allocates a tensor like `c`, of another width.
    fn like_c(&self, width: usize) -> Result<P::Owned> {
        self.block.like(&P::view(&self.between.c), width)
    }

    /// The gradient of a dense layer: returns `dx`, from `x`, `w` and `dy`. Also writes `dw`, and `db` if there is a
    /// bias `b`.
    fn dense_backward<'s>(
        &self,
        [x, w, dy]: [P::View<'s>; 3],
        b: Option<P::View<'s>>,
        (dw, db): (P::ViewMut<'_>, Option<P::ViewMut<'_>>),
    ) -> Result<P::Owned> {
        let mut dx = self.block.place.empty(x.spec())?;
        let of = [&x, &w, &dy].map(P::briefly);
        let to = [P::view_mut(&mut dx), P::briefly_mut(dw)];
        linear::backward_at(self.block.place, of, b.as_ref().map(P::briefly), to, db.map(P::briefly_mut))?;
        Ok(dx)
    }

    fn conv_backward(&self, dc: &P::Owned, outputs: &mut Named<P::ViewMut<'a>>) -> Result<P::Owned> {
        let mut du = self.like_c(self.block.sizes()[0])?;
        let cotangents = [Some(P::view(dc)), self.call.optional("dconv_state")];
        let inputs = self.sequences.conv_inputs(&self.block, &self.between.u, cotangents);
        let to = named([
            ("dx", Some(P::view_mut(&mut du))),
            ("dw", outputs.take("dconv_w").map(P::briefly_mut)),
            ("dbias", outputs.take("dconv_b").map(P::briefly_mut)),
            ("dinitial_state", outputs.take("dconv_state").map(P::briefly_mut)),
        ]);
        let options = causal_conv1d::Options { activation: Some(Activation::Silu), return_state: false };
        self.block.place.call::<CausalConv1dBackward>(&options, inputs, to)?;
        Ok(du)
    }

    fn scan_backward(&self, ds: &P::Owned, outputs: &mut Named<P::ViewMut<'a>>) -> Result<OfScan<P::Owned>> {
        let [inner, state, _] = self.block.sizes();
        let mut of_scan = OfScan {
            dc: self.like_c(inner)?,
            ddt: self.like_c(inner)?,
            da: self.block.place.empty(P::view(&self.sequences.a).spec())?,
            db_t: self.like_c(state)?,
            dc_t: self.like_c(state)?,
            dz: self.like_c(inner)?,
        };
        let to = named([
            ("dx", Some(P::view_mut(&mut of_scan.dc))),
            ("ddt", Some(P::view_mut(&mut of_scan.ddt))),
            ("dA", Some(P::view_mut(&mut of_scan.da))),
            ("dB", Some(P::view_mut(&mut of_scan.db_t))),
            ("dC", Some(P::view_mut(&mut of_scan.dc_t))),
            ("dD", outputs.take("dD").map(P::briefly_mut)),
            ("dz", Some(P::view_mut(&mut of_scan.dz))),
            ("ddt_bias", outputs.take("ddt_b").map(P::briefly_mut)),
            ("dinitial_state", outputs.take("dssm_state").map(P::briefly_mut)),
        ]);
        let cotangents = [Some(P::view(ds)), self.call.optional("dssm_state")];
        let inputs = self.sequences.scan_inputs(&self.block, &self.between, cotangents);
        let options = selective_scan::Options { dt_softplus: true, ..Default::default() };
        self.block.place.call::<SelectiveScanBackward>(&options, inputs, to)?;
        Ok(of_scan)
    }

    /// Goes back through dt_w, the norms and x_proj; returns the complete gradient of `c`.
    fn x_proj_backward(&self, scan: &OfScan<P::Owned>, outputs: &mut Named<P::ViewMut<'a>>) -> Result<P::Owned> {
        let (Between { c, delta, .. }, [_, state, rank]) = (&self.between, self.block.sizes());
        let dt_w = [P::view(delta), self.call.input("dt_w")?, P::view(&scan.ddt)];
        let ddelta = self.dense_backward(dt_w, None, (outputs.expect("ddt_w")?, None))?;
        let mut dprojected = self.like_c(rank + 2 * state)?;
        let normed = [&ddelta, &scan.db_t, &scan.dc_t];
        let through = self.norms_backward(normed)?;
        let parts = through.as_ref().map_or(normed, |parts| parts.each_ref());
        let mut start = 0;
        for (part, width) in parts.into_iter().zip([rank, state, state]) {
            copy_rows::put_columns(self.block.place, &P::view(part), P::view_mut(&mut dprojected), start)?;
            start += width;
        }
        let x_proj = [P::view(c), self.call.input("x_proj")?, P::view(&dprojected)];
        let through = self.dense_backward(x_proj, None, (outputs.expect("dx_proj")?, None))?;
        let mut dc = self.like_c(self.block.sizes()[0])?;
        self.block.place.map(Map::Sum, &[P::view(&through), P::view(&scan.dc)], P::view_mut(&mut dc))?;
        Ok(dc)
    }

    /// Goes back through the norms of `delta`, `B` and `C`; `None` for a block without norms.
    fn norms_backward(&self, cotangents: [&P::Owned; 3]) -> Result<Option<[P::Owned; 3]>> {
        let (Some(Norms { eps, w }), Some(projected)) = (&self.block.weights.norms, &self.between.projected) else {
            return Ok(None);
        };
        let options = RmsOptions { eps: *eps, ..Default::default() };
        let through = |part: usize| {
            let (x, w) = (&projected[part], &w[part]);
            let (mut dx, mut dw) = (self.block.place.empty(P::view(x).spec())?, self.block.place.empty(w.spec())?);
            let inputs =
                named([("x", Some(P::view(x))), ("w", Some(P::briefly(w))), ("dy", Some(P::view(cotangents[part])))]);
            let to = named([("dx", Some(P::view_mut(&mut dx))), ("dw", Some(P::view_mut(&mut dw)))]);
            self.block.place.call::<RmsNormBackward>(&options, inputs, to)?;
            Ok(dx)
        };
        Ok(Some([through(0)?, through(1)?, through(2)?]))
    }

    /// Goes back through both halves of in_proj.
    fn in_proj_backward(&self, du: &P::Owned, dz: &P::Owned, outputs: &mut Named<P::ViewMut<'a>>) -> Result<()> {
        let inner = self.block.sizes()[0];
        let (dw_u, dw_z) = P::split_rows(outputs.expect("din_proj")?, inner)?;
        let (db_u, db_z) = match outputs.take("din_proj_b") {
            Some(db) => P::split_rows(db, inner).map(|(u, z)| (Some(u), Some(z)))?,
            None => (None, None),
        };
        let half = |rows: Range<usize>, dy: &P::Owned, to| {
            let w = P::rows(self.call.inputs.get("in_proj")?, rows.clone())?;
            let b = self.call.inputs.find("in_proj_b").map(|b| P::rows(b, rows)).transpose()?;
            self.dense_backward([self.call.input("x")?, w, P::view(dy)], b, to)
        };
        let (of_u, of_z) = (half(0..inner, du, (dw_u, db_u))?, half(inner..2 * inner, dz, (dw_z, db_z))?);
        let terms = [P::view(&of_u), P::view(&of_z)];
        self.block.place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dx")?))
    }
}
