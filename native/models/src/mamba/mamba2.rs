//! The mixer of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 7; `mamba_ssm/modules/mamba2.py` and
//! `Mamba2Mixer` of transformers), between the norm and the residual connection of a layer.
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
//! A token is a sequence of length 1, so prefill and decode steps share this code.

mod backward;

use super::config::{Config, Heads};
use sidewinder_kernels::error::{Error, Kind, Result};
use sidewinder_kernels::op::{Named, Slot, named};
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

/// The weights of a layer; the large matrices may be quantized. The shapes are those in [`SLOTS`].
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
    /// The weights that `find` returns by slot name, or an error that names the one that is missing.
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

    /// The weights that are present, with their slot names.
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

/// A layer on the device of `place`.
pub struct Mamba2<'b, 'w, P: Place> {
    pub place: &'b P,
    pub config: &'b Config,
    pub heads: &'b Heads,
    pub weights: &'b Weights<P::View<'w>>,
    /// `(H)`.
    pub a: &'b P::View<'w>,
}

/// The state of the convolution or of the scan, before and after a call.
pub type Through<'s, P> = State<<P as Place>::View<'s>, <P as Place>::ViewMut<'s>>;

/// One call of an op: `batch` sequences of equal length in contiguous rows, with their inputs, state and output.
struct Part<'t, 's, P: Place> {
    inputs: Named<P::View<'t>>,
    state: Through<'s, P>,
    y: P::ViewMut<'t>,
}

/// The inputs of the scan, as rows of all sequences.
struct Scanned<T> {
    x: T,
    dt: T,
    b: T,
    c: T,
}

/// The shapes of the scan's tensors.
struct Shapes {
    x: [usize; 4],
    dt: [usize; 3],
    b: [usize; 4],
    state: [usize; 4],
}

impl<'w, P: Place> Mamba2<'_, 'w, P> {
    /// Computes `y` from rows `u`, `(rows, M)`. They consist of parts of `dims`, `[batch, length]`; `conv` and `ssm`
    /// have a state for each part.
    pub fn run(
        &self,
        u: &P::View<'_>,
        dims: [usize; 2],
        [conv, ssm]: [Vec<Through<P>>; 2],
        y: P::ViewMut<'_>,
    ) -> Result<()> {
        let [z, xbc, dt] = self.projected(u)?;
        let of = self.scanned(&self.conv(&xbc, dims, conv)?, dt)?;
        let normed = self.norm(&self.scan(&of, dims, ssm)?, &z)?;
        matrices::multiply(self.place, P::view(&normed), &self.weights.out_proj, P::briefly_mut(y))
    }

    /// `z`, `xBC` and `dt` of rows `u`.
    fn projected(&self, u: &P::View<'_>) -> Result<[P::Owned; 3]> {
        let [inner, channels, heads] = [self.config.inner, self.config.conv_channels(), self.heads.count];
        let part = |rows: Range<usize>| {
            let mut y = self.rows_like(u, rows.len())?;
            let part = matrices::rows::<P>(&self.weights.in_proj, rows)?;
            matrices::multiply(self.place, P::briefly(u), &part, P::view_mut(&mut y))?;
            Ok(y)
        };
        let ends = [inner, inner + channels, inner + channels + heads];
        Ok([part(0..ends[0])?, part(ends[0]..ends[1])?, part(ends[1]..ends[2])?])
    }

    fn conv(&self, xbc: &P::Owned, dims @ [batch, length]: [usize; 2], states: Vec<Through<P>>) -> Result<P::Owned> {
        let mut c = self.rows_like(&P::view(xbc), self.config.conv_channels())?;
        let shape = self.conv_shape(dims);
        let parts = parts::<P>(&mut c, batch * length, states, |number| self.conv_inputs(xbc, number, dims))?;
        self.place.each(parts, |place, Part { mut inputs, state, y }| {
            inputs.extend_with("initial_state", state.before.as_ref().map(P::briefly));
            let y = P::reshape_mut(y, &shape)?;
            let options = conv_options(state.after.is_some());
            let outputs = named([("y", Some(y)), ("last_state", state.after.map(P::briefly_mut))]);
            place.call::<CausalConv1d>(&options, inputs, outputs)
        })?;
        Ok(c)
    }

    fn conv_shape(&self, [batch, length]: [usize; 2]) -> [usize; 3] {
        [batch, length, self.config.conv_channels()]
    }

    /// The inputs of the convolution for part `number`, without its state.
    fn conv_inputs<'t>(
        &'t self,
        xbc: &'t P::Owned,
        number: usize,
        dims @ [batch, length]: [usize; 2],
    ) -> Result<Named<P::View<'t>>> {
        Ok(named([
            ("x", Some(rows_of::<P>(xbc, number, batch * length, &self.conv_shape(dims))?)),
            ("w", Some(P::briefly(&self.weights.conv_w))),
            ("bias", self.weights.conv_b.as_ref().map(P::briefly)),
        ]))
    }

    /// Splits the output of the convolution into `x`, `B` and `C`, and adds `dt`.
    fn scanned(&self, c: &P::Owned, dt: P::Owned) -> Result<Scanned<P::Owned>> {
        let (inner, states) = (self.config.inner, self.heads.groups * self.config.state);
        let part = |start, width| {
            let mut part = self.rows_like(&P::view(c), width)?;
            copy_rows::take_columns(self.place, &P::view(c), start, P::view_mut(&mut part))?;
            Ok(part)
        };
        Ok(Scanned { x: part(0, inner)?, b: part(inner, states)?, c: part(inner + states, states)?, dt })
    }

    fn scan(
        &self,
        of: &Scanned<P::Owned>,
        dims @ [batch, length]: [usize; 2],
        states: Vec<Through<P>>,
    ) -> Result<P::Owned> {
        let mut s = self.rows_like(&P::view(&of.x), self.config.inner)?;
        let (shapes, options) = (self.shapes(dims), self.scan_options());
        let parts = parts::<P>(&mut s, batch * length, states, |number| self.scan_inputs(of, number, dims))?;
        self.place.each(parts, |place, Part { mut inputs, state, y }| {
            let options = ssd::Options { return_state: state.after.is_some(), ..options };
            let before = state.before.as_ref().map(|before| P::reshape(before, &shapes.state));
            let after = state.after.map(|after| P::reshape_mut(after, &shapes.state));
            inputs.extend_with("initial_state", before.transpose()?);
            let y = P::reshape_mut(y, &shapes.x)?;
            let outputs = named([("y", Some(y)), ("last_state", after.transpose()?)]);
            place.call::<Ssd>(&options, inputs, outputs)
        })?;
        Ok(s)
    }

    fn scan_options(&self) -> ssd::Options {
        let limit = self.heads.limit;
        let dt_clamp = (limit != (0.0, f64::INFINITY)).then_some(limit);
        ssd::Options { dt_softplus: true, dt_clamp, ..Default::default() }
    }

    fn shapes(&self, [batch, length]: [usize; 2]) -> Shapes {
        let (Heads { count, groups, .. }, Config { inner, state, .. }) = (*self.heads, *self.config);
        Shapes {
            x: [batch, length, count, inner / count],
            dt: [batch, length, count],
            b: [batch, length, groups, state],
            state: [batch, count, inner / count, state],
        }
    }

    /// The inputs of the scan for part `number`, without its state.
    fn scan_inputs<'t>(
        &'t self,
        of: &'t Scanned<P::Owned>,
        number: usize,
        dims @ [batch, length]: [usize; 2],
    ) -> Result<Named<P::View<'t>>> {
        let Shapes { x, dt, b, .. } = self.shapes(dims);
        let part = |of, shape: &[usize]| rows_of::<P>(of, number, batch * length, shape);
        Ok(named([
            ("x", Some(part(&of.x, &x)?)),
            ("dt", Some(part(&of.dt, &dt)?)),
            ("A", Some(P::briefly(self.a))),
            ("B", Some(part(&of.b, &b)?)),
            ("C", Some(part(&of.c, &b)?)),
            ("D", Some(P::briefly(&self.weights.d))),
            ("dt_bias", Some(P::briefly(&self.weights.dt_b))),
        ]))
    }

    fn norm(&self, s: &P::Owned, z: &P::Owned) -> Result<P::Owned> {
        let mut y = self.rows_like(&P::view(s), self.config.inner)?;
        let outputs = named([("y", Some(P::view_mut(&mut y)))]);
        self.place.call::<GatedRmsNorm>(&self.norm_options(), self.norm_inputs(s, z), outputs)?;
        Ok(y)
    }

    fn norm_options(&self) -> gated::Options {
        gated::Options { eps: self.config.eps, groups: self.heads.groups, norm_before_gate: false }
    }

    fn norm_inputs<'t>(&'t self, s: &'t P::Owned, z: &'t P::Owned) -> Named<P::View<'t>> {
        let w = Some(P::briefly(&self.weights.norm));
        named([("x", Some(P::view(s))), ("z", Some(P::view(z))), ("w", w)])
    }

    /// Memory for rows of this width, with the number and the type of the rows of `x`.
    fn rows_like(&self, x: &P::View<'_>, width: usize) -> Result<P::Owned> {
        let Spec { dtype, shape } = x.spec();
        self.place.empty(Spec::new(dtype, &[shape[0], width])?)
    }
}

fn conv_options(return_state: bool) -> causal_conv1d::Options {
    causal_conv1d::Options { activation: Some(Activation::Silu), return_state }
}

/// Splits `y` into parts of `rows` rows, one for each state, each with its inputs.
fn parts<'t, 's, P: Place>(
    y: &'t mut P::Owned,
    rows: usize,
    states: Vec<Through<'s, P>>,
    inputs: impl Fn(usize) -> Result<Named<P::View<'t>>>,
) -> Result<Vec<Part<'t, 's, P>>> {
    let mut rest = P::view_mut(y);
    let mut parts = Vec::with_capacity(states.len());
    for (number, state) in states.into_iter().enumerate() {
        let (y, others) = P::split_rows(rest, rows)?;
        parts.push(Part { inputs: inputs(number)?, state, y });
        rest = others;
    }
    Ok(parts)
}

/// The rows of part `number`, with the shape `dims`.
fn rows_of<'t, P: Place>(of: &'t P::Owned, number: usize, rows: usize, dims: &[usize]) -> Result<P::View<'t>> {
    P::reshape(&P::rows(&P::view(of), number * rows..(number + 1) * rows)?, dims)
}
