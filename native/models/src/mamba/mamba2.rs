//! The layer of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 7; `mamba_ssm/modules/mamba2.py` and
//! `Mamba2Mixer` of transformers), between the norm and the residual of a model.
//!
//! With `linear(v, M) = v M^T`, for `D` channels in `H` heads and `G` groups of `N` states:
//!
//! ```text
//! [z | xBC | dt] = linear(u, in_proj) + in_proj_b                  of widths D, D + 2 G N and H
//! c, conv_state = causal_conv1d(xBC, conv_w, conv_b, silu, conv_state)
//! [x | B | C] = c                                                  of widths D, G N and G N
//! s, ssm_state = ssd(x, dt, A, B, C, D, dt_b, softplus, limits, ssm_state)     A = -exp(A_log)
//! y = linear(gated_rms_norm(s, z, norm; G groups), out_proj) + out_proj_b
//! ```
//!
//! A token is a sequence of length 1, so prompts and steps are one walk.

use super::config::{Config, Heads};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{Slot, named};
use sidewinder_kernels::ops::causal_conv1d::{self, Activation, CausalConv1d};
use sidewinder_kernels::ops::layers::mamba_block::steps::State;
use sidewinder_kernels::ops::norm::gated::{self, GatedRmsNorm};
use sidewinder_kernels::ops::products::matrices::{self, Dense, Matrix};
use sidewinder_kernels::ops::scan::ssd::{self, Ssd};
use sidewinder_kernels::place::{Place, copy_rows};
use sidewinder_kernels::tensor::{Described, Spec};
use std::ops::Range;

/// The weights of a layer, with `I = 2 D + 2 G N + H` and `K = D + 2 G N`.
pub const SLOTS: [Slot; 10] = [
    Slot::new("in_proj", "(I, M)"),
    Slot::new("in_proj_b", "(I)").optional(),
    Slot::new("conv_w", "(K, W)").wide(),
    Slot::new("conv_b", "(K)").wide().optional(),
    Slot::new("dt_b", "(H)").wide(),
    Slot::new("A_log", "(H)").wide(),
    Slot::new("D", "(H)").wide(),
    Slot::new("norm", "(D)").wide(),
    Slot::new("out_proj", "(M, D)"),
    Slot::new("out_proj_b", "(M)").optional(),
];

/// The weights of a layer; the large matrices may be quantized. Shapes are those of the slots.
#[derive(Clone)]
pub struct Weights<T> {
    pub in_proj: Dense<T>,
    pub conv_w: T,
    pub conv_b: Option<T>,
    pub dt_b: T,
    pub a_log: T,
    pub d: T,
    pub norm: T,
    pub out_proj: Dense<T>,
}

impl<T> Weights<T> {
    /// The weights that `find` knows by the names of the slots, or an error that says which one is missing.
    pub fn new(find: impl Fn(&'static str) -> Option<Matrix<T>>) -> Result<Weights<T>> {
        let missing = |name| Error::new(Kind::Argument, name).expected("a tensor").got("none");
        let matrix = |name| find(name).ok_or_else(|| missing(name));
        let maybe = |name| find(name).and_then(Matrix::float);
        let tensor = |name| maybe(name).ok_or_else(|| missing(name));
        Ok(Weights {
            in_proj: Dense { w: matrix("in_proj")?, b: maybe("in_proj_b") },
            conv_w: tensor("conv_w")?,
            conv_b: maybe("conv_b"),
            dt_b: tensor("dt_b")?,
            a_log: tensor("A_log")?,
            d: tensor("D")?,
            norm: tensor("norm")?,
            out_proj: Dense { w: matrix("out_proj")?, b: maybe("out_proj_b") },
        })
    }

    /// The weights that are there, by the names of the slots.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, Matrix<&T>)> {
        let Weights { in_proj, conv_w, conv_b, dt_b, a_log, d, norm, out_proj } = self;
        let all = [
            ("in_proj", Some(in_proj.w.as_ref())),
            ("in_proj_b", in_proj.b.as_ref().map(Matrix::Float)),
            ("conv_w", Some(Matrix::Float(conv_w))),
            ("conv_b", conv_b.as_ref().map(Matrix::Float)),
            ("dt_b", Some(Matrix::Float(dt_b))),
            ("A_log", Some(Matrix::Float(a_log))),
            ("D", Some(Matrix::Float(d))),
            ("norm", Some(Matrix::Float(norm))),
            ("out_proj", Some(out_proj.w.as_ref())),
            ("out_proj_b", out_proj.b.as_ref().map(Matrix::Float)),
        ];
        all.into_iter().filter_map(|(name, weight)| Some((name, weight?)))
    }

    /// Applies `f` to each tensor; fails with its first error.
    pub fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U>) -> Result<Weights<U>> {
        Ok(Weights {
            in_proj: self.in_proj.as_ref().try_map(&f)?,
            conv_w: f(&self.conv_w)?,
            conv_b: self.conv_b.as_ref().map(&f).transpose()?,
            dt_b: f(&self.dt_b)?,
            a_log: f(&self.a_log)?,
            d: f(&self.d)?,
            norm: f(&self.norm)?,
            out_proj: self.out_proj.as_ref().try_map(&f)?,
        })
    }
}

/// A layer at some place.
pub struct Mamba2<'b, 'w, P: Place> {
    pub place: &'b P,
    pub config: &'b Config,
    pub heads: &'b Heads,
    pub weights: &'b Weights<P::View<'w>>,
    /// `(H)`.
    pub a: &'b P::View<'w>,
}

/// The state of sequences in the convolution or in the scan, before and after them.
pub type Through<'s, P> = State<<P as Place>::View<'s>, <P as Place>::ViewMut<'s>>;

/// Sequences of one batch and length, whose rows follow each other.
struct Part<'y, 's, P: Place> {
    number: usize,
    state: Through<'s, P>,
    y: P::ViewMut<'y>,
}

/// The inputs of the scan, as rows of all sequences.
struct Scanned<T> {
    x: T,
    dt: T,
    b: T,
    c: T,
}

impl<'w, P: Place> Mamba2<'_, 'w, P> {
    /// Computes `y` of rows `u`, `(rows, M)`. The rows are as many parts of `batch` sequences of this length as there are
    /// states of the convolution, and of the scan.
    pub fn run<'s>(
        &self,
        u: &P::View<'_>,
        dims: [usize; 2],
        [conv, ssm]: [Vec<Through<'s, P>>; 2],
        y: P::ViewMut<'_>,
    ) -> Result<()> {
        let ([inner, of_conv, of_heads], in_proj) = (self.widths(), &self.weights.in_proj);
        let z = self.project(u, in_proj, 0..inner)?;
        let xbc = self.project(u, in_proj, inner..inner + of_conv)?;
        let dt = self.project(u, in_proj, inner + of_conv..inner + of_conv + of_heads)?;
        let c = self.conv(&xbc, dims, conv)?;
        let s = self.scan(&self.scanned(&c, dt)?, dims, ssm)?;
        let normed = self.norm(&s, &z)?;
        matrices::multiply(self.place, P::view(&normed), &self.weights.out_proj, P::briefly_mut(y))
    }

    /// The widths of the parts of `in_proj`.
    fn widths(&self) -> [usize; 3] {
        [self.config.inner, self.config.conv_channels(), self.heads.count]
    }

    /// The product of `u` with these rows of a dense layer's matrix, with their bias.
    fn project(&self, u: &P::View<'_>, of: &Dense<P::View<'w>>, rows: Range<usize>) -> Result<P::Owned> {
        let mut y = self.rows_like(u, rows.len())?;
        matrices::multiply(self.place, P::briefly(u), &matrices::rows::<P>(of, rows)?, P::view_mut(&mut y))?;
        Ok(y)
    }

    fn conv(&self, xbc: &P::Owned, [batch, length]: [usize; 2], states: Vec<Through<P>>) -> Result<P::Owned> {
        let width = self.config.conv_channels();
        let mut c = self.rows_like(&P::view(xbc), width)?;
        let (rows, dims) = (batch * length, [batch, length, width]);
        self.place.each(parts::<P>(&mut c, rows, states)?, |place, Part { number, state, y }| {
            let options =
                causal_conv1d::Options { activation: Some(Activation::Silu), return_state: state.after.is_some() };
            let inputs = named([
                ("x", Some(rows_of::<P>(xbc, number, rows, &dims)?)),
                ("w", Some(P::briefly(&self.weights.conv_w))),
                ("bias", self.weights.conv_b.as_ref().map(P::briefly)),
                ("initial_state", state.before.as_ref().map(P::briefly)),
            ]);
            let after = state.after.map(P::briefly_mut);
            let outputs = named([("y", Some(P::reshape_mut(y, &dims)?)), ("last_state", after)]);
            place.call::<CausalConv1d>(&options, inputs, outputs)
        })?;
        Ok(c)
    }

    /// `x`, `B` and `C`, beside `dt`.
    fn scanned(&self, c: &P::Owned, dt: P::Owned) -> Result<Scanned<P::Owned>> {
        let (inner, states) = (self.config.inner, self.heads.groups * self.config.state);
        let part = |start, width| {
            let mut part = self.rows_like(&P::view(c), width)?;
            copy_rows::take_columns(self.place, &P::view(c), start, P::view_mut(&mut part))?;
            Ok(part)
        };
        Ok(Scanned { x: part(0, inner)?, b: part(inner, states)?, c: part(inner + states, states)?, dt })
    }

    fn scan(&self, of: &Scanned<P::Owned>, [batch, length]: [usize; 2], states: Vec<Through<P>>) -> Result<P::Owned> {
        let (Heads { count, groups, limit }, Config { inner, state, .. }) = (*self.heads, *self.config);
        let mut s = self.rows_like(&P::view(&of.x), inner)?;
        let (rows, wide) = (batch * length, [batch, length, count, inner / count]);
        let (each, shared) = ([batch, length, count], [batch, length, groups, state]);
        let held = [batch, count, inner / count, state];
        self.place.each(parts::<P>(&mut s, rows, states)?, |place, Part { number, state, y }| {
            let options = ssd::Options {
                dt_softplus: true,
                dt_clamp: (limit != (0.0, f64::INFINITY)).then_some(limit),
                return_state: state.after.is_some(),
                ..Default::default()
            };
            let inputs = named([
                ("x", Some(rows_of::<P>(&of.x, number, rows, &wide)?)),
                ("dt", Some(rows_of::<P>(&of.dt, number, rows, &each)?)),
                ("A", Some(P::briefly(self.a))),
                ("B", Some(rows_of::<P>(&of.b, number, rows, &shared)?)),
                ("C", Some(rows_of::<P>(&of.c, number, rows, &shared)?)),
                ("D", Some(P::briefly(&self.weights.d))),
                ("dt_bias", Some(P::briefly(&self.weights.dt_b))),
                ("initial_state", state.before.as_ref().map(|before| P::reshape(before, &held)).transpose()?),
            ]);
            let after = state.after.map(|after| P::reshape_mut(after, &held)).transpose()?;
            place.call::<Ssd>(&options, inputs, named([("y", Some(P::reshape_mut(y, &wide)?)), ("last_state", after)]))
        })?;
        Ok(s)
    }

    fn norm(&self, s: &P::Owned, z: &P::Owned) -> Result<P::Owned> {
        let mut y = self.rows_like(&P::view(s), self.config.inner)?;
        let options = gated::Options { eps: self.config.eps, groups: self.heads.groups, norm_before_gate: false };
        let w = Some(P::briefly(&self.weights.norm));
        let inputs = named([("x", Some(P::view(s))), ("z", Some(P::view(z))), ("w", w)]);
        self.place.call::<GatedRmsNorm>(&options, inputs, named([("y", Some(P::view_mut(&mut y)))]))?;
        Ok(y)
    }

    /// Memory for rows of this width, as many and of the type of those of `x`.
    fn rows_like(&self, x: &P::View<'_>, width: usize) -> Result<P::Owned> {
        let Spec { dtype, shape } = x.spec();
        self.place.empty(Spec::new(dtype, &[shape[0], width])?)
    }
}

/// The rows of `y` with the states of their sequences, `rows` for each state.
fn parts<'y, 's, P: Place>(
    y: &'y mut P::Owned,
    rows: usize,
    states: Vec<Through<'s, P>>,
) -> Result<Vec<Part<'y, 's, P>>> {
    let mut rest = P::view_mut(y);
    let mut parts = Vec::with_capacity(states.len());
    for (number, state) in states.into_iter().enumerate() {
        let (y, others) = P::split_rows(rest, rows)?;
        parts.push(Part { number, state, y });
        rest = others;
    }
    Ok(parts)
}

/// The rows of a part, of this shape.
fn rows_of<'t, P: Place>(of: &'t P::Owned, number: usize, rows: usize, dims: &[usize]) -> Result<P::View<'t>> {
    P::reshape(&P::rows(&P::view(of), number * rows..(number + 1) * rows)?, dims)
}
