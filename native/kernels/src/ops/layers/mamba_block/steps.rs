//! The block as a sequence of ops, on any backend.

use super::Problem;
use crate::base::elementwise::Map;
use crate::error::Result;
use crate::op::{Named, named};
use crate::ops::causal_conv1d::{self, Activation, CausalConv1d, CausalConv1dBackward};
use crate::ops::products::linear;
use crate::ops::products::matrices;
use crate::ops::scan::selective_scan::backward::SelectiveScanBackward;
use crate::ops::scan::selective_scan::{self, SelectiveScan};
use crate::place::Place;
use crate::place::copy_rows;
use crate::tensor::Spec;
use std::ops::Range;

/// The block: `y`, and if they are wanted `conv_state` and `ssm_state`.
pub fn forward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let between = steps.between(outputs.take("conv_state"))?;
    let s = steps.scan(&between, outputs.take("ssm_state"))?;
    let y = P::briefly_mut(outputs.expect("y")?);
    steps.linear(P::view(&s), "out_proj", Some("out_proj_b"), 0..problem.model, y)
}

/// The gradients of the block for all inputs that are there.
pub fn backward<'a, P: Place>(
    place: &P,
    problem: &Problem,
    inputs: &Named<P::View<'a>>,
    mut outputs: Named<P::ViewMut<'a>>,
) -> Result<()> {
    let steps = Steps { place, problem, inputs };
    let between = steps.between(None)?;
    let s = steps.scan(&between, None)?;
    let mut ds = steps.like_inner()?;
    steps.linear_backward(
        [P::view(&s), steps.input("out_proj")?, steps.input("dy")?],
        steps.optional("out_proj_b"),
        [P::view_mut(&mut ds), P::briefly_mut(outputs.expect("dout_proj")?)],
        outputs.take("dout_proj_b").map(P::briefly_mut),
    )?;
    let scan = steps.scan_backward(&between, &ds, &mut outputs)?;
    let dc = steps.x_proj_backward(&between, &scan, &mut outputs)?;
    let du = steps.conv_backward(&between, &dc, &mut outputs)?;
    steps.in_proj_backward(&du, &scan.dz, &mut outputs)?;
    place.map(Map::Product, &[P::view(&scan.da), P::view(&between.a)], outputs.expect("dA_log")?)
}

/// What the scan is given, and what it comes from, by its name in the formula.
struct Between<T> {
    u: T,
    z: T,
    c: T,
    delta: T,
    b_t: T,
    c_t: T,
    dt: T,
    a: T,
}

/// The gradients of the inputs of the scan that are no inputs of the block.
struct OfScan<T> {
    dc: T,
    ddt: T,
    da: T,
    db_t: T,
    dc_t: T,
    dz: T,
}

/// A call of the block at some place.
struct Steps<'p, 'i, 'a, P: Place> {
    place: &'p P,
    problem: &'p Problem,
    inputs: &'i Named<P::View<'a>>,
}

impl<'a, P: Place> Steps<'_, '_, 'a, P> {
    fn input<'s>(&self, name: &str) -> Result<P::View<'s>>
    where
        'a: 's,
    {
        Ok(P::briefly(self.inputs.get(name)?))
    }

    fn optional<'s>(&self, name: &str) -> Option<P::View<'s>>
    where
        'a: 's,
    {
        self.inputs.find(name).map(P::briefly)
    }

    /// Memory for a tensor (B, L, `width`) of the storage type.
    fn like_x(&self, width: usize) -> Result<P::Owned> {
        let Problem { batch, length, dtype, .. } = *self.problem;
        self.place.empty(Spec::new(dtype, &[batch, length, width])?)
    }

    fn like_inner(&self) -> Result<P::Owned> {
        self.like_x(self.problem.inner)
    }

    fn like_a(&self) -> Result<P::Owned> {
        let Problem { inner, state, dtype, .. } = *self.problem;
        self.place.empty(Spec::new(dtype.wide(), &[inner, state])?)
    }

    /// Computes all up to the scan, and the state of the convolution if it is wanted.
    fn between(&self, conv_state: Option<P::ViewMut<'a>>) -> Result<Between<P::Owned>> {
        let Problem { state, rank, .. } = *self.problem;
        let mut between = Between {
            u: self.half_of_in_proj(0)?,
            z: self.half_of_in_proj(1)?,
            c: self.like_inner()?,
            delta: self.like_x(rank)?,
            b_t: self.like_x(state)?,
            c_t: self.like_x(state)?,
            dt: self.like_inner()?,
            a: self.like_a()?,
        };
        self.conv(&between.u, &mut between.c, conv_state)?;
        let mut projected = self.like_x(rank + 2 * state)?;
        self.linear(P::view(&between.c), "x_proj", None, 0..rank + 2 * state, P::view_mut(&mut projected))?;
        let mut start = 0;
        for (part, width) in [(&mut between.delta, rank), (&mut between.b_t, state), (&mut between.c_t, state)] {
            copy_rows::take_columns(self.place, &P::view(&projected), start, P::view_mut(part))?;
            start += width;
        }
        self.linear(P::view(&between.delta), "dt_w", None, 0..self.problem.inner, P::view_mut(&mut between.dt))?;
        self.place.map(Map::NegExp, &[self.input("A_log")?], P::view_mut(&mut between.a))?;
        Ok(between)
    }

    /// `u` or `z`: the rows of in_proj that give it are a matrix of their own.
    fn half_of_in_proj(&self, half: usize) -> Result<P::Owned> {
        let mut to = self.like_inner()?;
        let inner = self.problem.inner;
        self.linear(
            self.input("x")?,
            "in_proj",
            Some("in_proj_b"),
            half * inner..(half + 1) * inner,
            P::view_mut(&mut to),
        )?;
        Ok(to)
    }

    /// What some rows of a matrix make of `x`, with its bias if it has one.
    fn linear<'s>(
        &self,
        x: P::View<'s>,
        name: &str,
        bias: Option<&str>,
        rows: Range<usize>,
        y: P::ViewMut<'s>,
    ) -> Result<()>
    where
        'a: 's,
    {
        let w = matrices::rows::<P>(&matrices::find::<P>(self.inputs, name)?, rows.clone())?;
        let b = bias.and_then(|bias| self.optional(bias)).map(|b| P::rows(&b, rows)).transpose()?;
        matrices::multiply(self.place, x, w, b, y)
    }

    fn linear_backward<'s>(
        &self,
        [x, w, dy]: [P::View<'s>; 3],
        b: Option<P::View<'s>>,
        [dx, dw]: [P::ViewMut<'s>; 2],
        db: Option<P::ViewMut<'s>>,
    ) -> Result<()> {
        linear::backward_at(self.place, [x, w, dy], b, [dx, dw], db)
    }

    fn conv(&self, u: &P::Owned, c: &mut P::Owned, state: Option<P::ViewMut<'a>>) -> Result<()> {
        let inputs = named([
            ("x", Some(P::view(u))),
            ("w", Some(self.input("conv_w")?)),
            ("bias", self.optional("conv_b")),
            ("initial_state", self.optional("conv_state")),
        ]);
        let options = causal_conv1d::Options { activation: Some(Activation::Silu), return_state: state.is_some() };
        let outputs = named([("y", Some(P::view_mut(c))), ("last_state", state.map(P::briefly_mut))]);
        self.place.call::<CausalConv1d>(&options, inputs, outputs)
    }

    fn conv_backward(
        &self,
        between: &Between<P::Owned>,
        dc: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<P::Owned> {
        let mut du = self.like_inner()?;
        let inputs = named([
            ("x", Some(P::view(&between.u))),
            ("w", Some(self.input("conv_w")?)),
            ("bias", self.optional("conv_b")),
            ("initial_state", self.optional("conv_state")),
            ("dy", Some(P::view(dc))),
            ("dlast_state", self.optional("dconv_state")),
        ]);
        let to = named([
            ("dx", Some(P::view_mut(&mut du))),
            ("dw", outputs.take("dconv_w").map(P::briefly_mut)),
            ("dbias", outputs.take("dconv_b").map(P::briefly_mut)),
            ("dinitial_state", outputs.take("dconv_state").map(P::briefly_mut)),
        ]);
        let options = causal_conv1d::Options { activation: Some(Activation::Silu), return_state: false };
        self.place.call::<CausalConv1dBackward>(&options, inputs, to)?;
        Ok(du)
    }

    /// The inputs of the scan, with its cotangents if there are any.
    fn scan_inputs<'s>(
        &self,
        between: &'s Between<P::Owned>,
        dy: Option<P::View<'s>>,
        dlast_state: Option<P::View<'s>>,
    ) -> Result<Named<P::View<'s>>>
    where
        'a: 's,
    {
        Ok(named([
            ("x", Some(P::view(&between.c))),
            ("dt", Some(P::view(&between.dt))),
            ("A", Some(P::view(&between.a))),
            ("B", Some(P::view(&between.b_t))),
            ("C", Some(P::view(&between.c_t))),
            ("D", Some(self.input("D")?)),
            ("z", Some(P::view(&between.z))),
            ("dt_bias", Some(self.input("dt_b")?)),
            ("initial_state", self.optional("ssm_state")),
            ("dy", dy),
            ("dlast_state", dlast_state),
        ]))
    }

    fn scan(&self, between: &Between<P::Owned>, state: Option<P::ViewMut<'a>>) -> Result<P::Owned> {
        let mut s = self.like_inner()?;
        let return_state = state.is_some();
        let options = selective_scan::Options { dt_softplus: true, return_state, ..Default::default() };
        let outputs = named([("y", Some(P::view_mut(&mut s))), ("last_state", state.map(P::briefly_mut))]);
        self.place.call::<SelectiveScan>(&options, self.scan_inputs(between, None, None)?, outputs)?;
        Ok(s)
    }

    fn scan_backward(
        &self,
        between: &Between<P::Owned>,
        ds: &P::Owned,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<OfScan<P::Owned>> {
        let state = self.problem.state;
        let mut of_scan = OfScan {
            dc: self.like_inner()?,
            ddt: self.like_inner()?,
            da: self.like_a()?,
            db_t: self.like_x(state)?,
            dc_t: self.like_x(state)?,
            dz: self.like_inner()?,
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
        let options = selective_scan::Options { dt_softplus: true, ..Default::default() };
        let inputs = self.scan_inputs(between, Some(P::view(ds)), self.optional("dssm_state"))?;
        self.place.call::<SelectiveScanBackward>(&options, inputs, to)?;
        Ok(of_scan)
    }

    /// Through dt_w and x_proj: all of the gradient of `c`.
    fn x_proj_backward(
        &self,
        between: &Between<P::Owned>,
        scan: &OfScan<P::Owned>,
        outputs: &mut Named<P::ViewMut<'a>>,
    ) -> Result<P::Owned> {
        let Problem { rank, state, .. } = *self.problem;
        let (mut ddelta, mut dc) = (self.like_x(rank)?, self.like_inner()?);
        self.linear_backward(
            [P::view(&between.delta), self.input("dt_w")?, P::view(&scan.ddt)],
            None,
            [P::view_mut(&mut ddelta), P::briefly_mut(outputs.expect("ddt_w")?)],
            None,
        )?;
        let mut dprojected = self.like_x(rank + 2 * state)?;
        let mut start = 0;
        for (part, width) in [(&ddelta, rank), (&scan.db_t, state), (&scan.dc_t, state)] {
            copy_rows::put_columns(self.place, &P::view(part), P::view_mut(&mut dprojected), start)?;
            start += width;
        }
        let mut through = self.like_inner()?;
        self.linear_backward(
            [P::view(&between.c), self.input("x_proj")?, P::view(&dprojected)],
            None,
            [P::view_mut(&mut through), P::briefly_mut(outputs.expect("dx_proj")?)],
            None,
        )?;
        self.place.map(Map::Sum, &[P::view(&through), P::view(&scan.dc)], P::view_mut(&mut dc))?;
        Ok(dc)
    }

    /// Through both halves of in_proj.
    fn in_proj_backward(&self, du: &P::Owned, dz: &P::Owned, outputs: &mut Named<P::ViewMut<'a>>) -> Result<()> {
        let Problem { model, inner, .. } = *self.problem;
        let (dw_u, dw_z) = P::split_rows(outputs.expect("din_proj")?, inner)?;
        let (db_u, db_z) = match outputs.take("din_proj_b") {
            Some(db) => P::split_rows(db, inner).map(|(u, z)| (Some(u), Some(z)))?,
            None => (None, None),
        };
        let mut terms = [self.like_x(model)?, self.like_x(model)?];
        let halves = [(0..inner, du, dw_u, db_u), (inner..2 * inner, dz, dw_z, db_z)];
        for ((rows, dy, dw, db), term) in halves.into_iter().zip(&mut terms) {
            let w = P::rows(&self.input("in_proj")?, rows.clone())?;
            let b = self.optional("in_proj_b").map(|b| P::rows(&b, rows)).transpose()?;
            let to = [P::view_mut(term), P::briefly_mut(dw)];
            self.linear_backward([self.input("x")?, w, P::view(dy)], b, to, db.map(P::briefly_mut))?;
        }
        let terms = [P::view(&terms[0]), P::view(&terms[1])];
        self.place.map(Map::Sum, &terms, P::briefly_mut(outputs.expect("dx")?))
    }
}
