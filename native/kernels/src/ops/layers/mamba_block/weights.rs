//! The weights of a block.

use crate::error::{Error, Kind, Result};
use crate::ops::products::matrices::{Dense, Matrix};

/// The weights of a block; the large matrices may be quantized. Shapes are those of the op's inputs.
#[derive(Clone)]
pub struct Weights<T> {
    /// `(2D, M)`, with its bias.
    pub in_proj: Dense<T>,
    /// `(D, W)`.
    pub conv_w: T,
    /// `(D)`.
    pub conv_b: Option<T>,
    /// `(R+2N, D)`, without a bias.
    pub x_proj: Dense<T>,
    /// `(D, R)`.
    pub dt_w: T,
    /// `(D)`.
    pub dt_b: T,
    /// `(D, N)`.
    pub a_log: T,
    /// `(D)`.
    pub d: T,
    /// `(M, D)`, with its bias.
    pub out_proj: Dense<T>,
    /// How `delta`, `B` and `C` are normed; as in FalconMamba, and not in the op.
    pub norms: Option<Norms<T>>,
}

/// Norms of the root mean square of `delta`, `B` and `C`.
#[derive(Clone)]
pub struct Norms<T> {
    /// The epsilon that is added to the divisors.
    pub eps: f64,
    /// Their weights: `(R)`, `(N)` and `(N)`.
    pub w: [T; 3],
}

impl<T> Weights<T> {
    /// The weights that `find` gives for the names of the op's inputs; fails for one that is required and missing.
    pub fn new(find: impl Fn(&'static str) -> Option<Matrix<T>>) -> Result<Weights<T>> {
        let missing = |name| Error::new(Kind::Argument, name).expected("a tensor").got("none");
        let matrix = |name| find(name).ok_or_else(|| missing(name));
        let maybe = |name| find(name).and_then(Matrix::float);
        let tensor = |name| maybe(name).ok_or_else(|| missing(name));
        Ok(Weights {
            in_proj: Dense { w: matrix("in_proj")?, b: maybe("in_proj_b") },
            conv_w: tensor("conv_w")?,
            conv_b: maybe("conv_b"),
            x_proj: matrix("x_proj")?.into(),
            dt_w: tensor("dt_w")?,
            dt_b: tensor("dt_b")?,
            a_log: tensor("A_log")?,
            d: tensor("D")?,
            out_proj: Dense { w: matrix("out_proj")?, b: maybe("out_proj_b") },
            norms: None,
        })
    }

    /// The given weights that are inputs of the op, by their names there.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, Matrix<&T>)> {
        let Weights { in_proj, conv_w, conv_b, x_proj, dt_w, dt_b, a_log, d, out_proj, norms: _ } = self;
        let all = [
            ("in_proj", Some(in_proj.w.as_ref())),
            ("in_proj_b", in_proj.b.as_ref().map(Matrix::Float)),
            ("conv_w", Some(Matrix::Float(conv_w))),
            ("conv_b", conv_b.as_ref().map(Matrix::Float)),
            ("x_proj", Some(x_proj.w.as_ref())),
            ("dt_w", Some(Matrix::Float(dt_w))),
            ("dt_b", Some(Matrix::Float(dt_b))),
            ("A_log", Some(Matrix::Float(a_log))),
            ("D", Some(Matrix::Float(d))),
            ("out_proj", Some(out_proj.w.as_ref())),
            ("out_proj_b", out_proj.b.as_ref().map(Matrix::Float)),
        ];
        all.into_iter().filter_map(|(name, weight)| Some((name, weight?)))
    }

    /// Applies `f` to each tensor; stops at the first error.
    pub fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U>) -> Result<Weights<U>> {
        Ok(Weights {
            in_proj: self.in_proj.as_ref().try_map(&f)?,
            conv_w: f(&self.conv_w)?,
            conv_b: self.conv_b.as_ref().map(&f).transpose()?,
            x_proj: self.x_proj.as_ref().try_map(&f)?,
            dt_w: f(&self.dt_w)?,
            dt_b: f(&self.dt_b)?,
            a_log: f(&self.a_log)?,
            d: f(&self.d)?,
            out_proj: self.out_proj.as_ref().try_map(&f)?,
            norms: self.norms.as_ref().map(|norms| norms.try_map(&f)).transpose()?,
        })
    }
}

impl<T> Norms<T> {
    /// Applies `f` to each tensor; stops at the first error.
    pub fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U>) -> Result<Norms<U>> {
        let [dt, b, c] = &self.w;
        Ok(Norms { eps: self.eps, w: [f(dt)?, f(b)?, f(c)?] })
    }
}
