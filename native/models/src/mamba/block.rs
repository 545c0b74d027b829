//! The weights of a layer's mixer, for each kind of layer.

use super::mamba2;
use super::{Config, Mixer};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::op::{Op, Slot};
use sidewinder_kernels::ops::layers::mamba_block::{self, MambaBlock, Norms};
use sidewinder_kernels::ops::products::matrices::{Dense, Matrix};
use sidewinder_kernels::tensor::{DType, Owned, Spec};

/// The weights of a mixer: everything between a layer's norm and its residual connection.
#[derive(Clone)]
pub(super) enum Block<T> {
    /// The first Mamba, and FalconMamba.
    Mamba(mamba_block::Weights<T>),
    /// Mamba-2.
    Mamba2(mamba2::Weights<T>),
}

impl Mixer {
    /// The names, precisions and shapes of a layer's weights.
    pub(super) fn slots(&self) -> &'static [Slot] {
        match self {
            Mixer::Mamba | Mixer::FalconMamba(_) => MambaBlock::INPUTS,
            Mixer::Mamba2(_) => &mamba2::SLOTS,
        }
    }
}

/// The norms of a FalconMamba's `dt`, `B` and `C`, whose weights are ones; `None` for other models.
pub(super) fn norms<T: From<Owned>>(config: &Config, dtype: DType) -> Option<Norms<T>> {
    let Mixer::FalconMamba(eps) = config.mixer else {
        return None;
    };
    let ones = |size| Owned::from_fn(Spec::new(dtype, &[size]).expect("one axis"), |_| 1.0).into();
    Some(Norms { eps, w: [config.rank, config.state, config.state].map(ones) })
}

impl<T> Block<T> {
    /// The weights that `find` returns by slot name, or an error that names the one that is missing. Checkpoints of
    /// FalconMamba have no weights for its norms, so the caller adds those.
    pub(super) fn new(mixer: &Mixer, find: impl Fn(&'static str) -> Option<Matrix<T>>) -> Result<Block<T>> {
        match mixer {
            Mixer::Mamba | Mixer::FalconMamba(_) => mamba_block::Weights::new(find).map(Block::Mamba),
            Mixer::Mamba2(_) => mamba2::Weights::new(find).map(Block::Mamba2),
        }
    }

    /// The weights that checkpoints store, with their slot names.
    pub(super) fn named(&self) -> Vec<(&'static str, Matrix<&T>)> {
        match self {
            Block::Mamba(weights) => weights.named().collect(),
            Block::Mamba2(weights) => weights.named().collect(),
        }
    }

    /// The large projection matrices, which may be quantized.
    pub(super) fn matrices(&self) -> Vec<&Dense<T>> {
        match self {
            Block::Mamba(weights) => vec![&weights.in_proj, &weights.x_proj, &weights.out_proj],
            Block::Mamba2(weights) => vec![&weights.in_proj, &weights.out_proj],
        }
    }

    /// The large projection matrices with their slot names, for replacement.
    pub(super) fn matrices_mut(&mut self) -> Vec<(&'static str, &mut Dense<T>)> {
        match self {
            Block::Mamba(weights) => vec![
                ("in_proj", &mut weights.in_proj),
                ("x_proj", &mut weights.x_proj),
                ("out_proj", &mut weights.out_proj),
            ],
            Block::Mamba2(weights) => vec![("in_proj", &mut weights.in_proj), ("out_proj", &mut weights.out_proj)],
        }
    }

    /// `A_log`.
    pub(super) fn a_log(&self) -> &T {
        match self {
            Block::Mamba(weights) => &weights.a_log,
            Block::Mamba2(weights) => &weights.a_log,
        }
    }

    /// Whether the projections have biases, and whether the convolution has one.
    pub(super) fn biases(&self) -> [bool; 2] {
        match self {
            Block::Mamba(weights) => [weights.in_proj.b.is_some(), weights.conv_b.is_some()],
            Block::Mamba2(weights) => [weights.in_proj.b.is_some(), weights.conv_b.is_some()],
        }
    }

    /// Applies `f` to each tensor; fails with its first error.
    pub(super) fn try_map<'a, U>(&'a self, f: impl Fn(&'a T) -> Result<U>) -> Result<Block<U>> {
        Ok(match self {
            Block::Mamba(weights) => Block::Mamba(weights.try_map(f)?),
            Block::Mamba2(weights) => Block::Mamba2(weights.try_map(f)?),
        })
    }
}
