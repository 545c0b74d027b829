//! Mamba (Gu and Dao 2023), FalconMamba (Zuo et al. 2024) and Mamba-2 (Dao and Gu 2024): language models, or
//! backbones that take features.
//!
//! ```text
//! x = embedding[tokens]                    or features, (B, L, M)
//! x = x + mixer(rms_norm(x; norm))         for each layer; the mixer is a mamba_block or a Mamba-2 layer
//! logits = linear(rms_norm(x; norm_f), head)      with tied embeddings the head is the embedding
//! ```
//!
//! The residual stream `x` is kept in the type of the arithmetic, even where weights and activations have 16 bits, as
//! in the published models. A sequence can run whole, or in chunks that carry a [`State`]; the outputs are equal within
//! rounding, wherever it is cut. The time of a decode step does not depend on the length of the sequence.

mod block;
mod checkpoint;
mod config;
pub mod ends;
mod family;
mod layers;
mod layout;
mod mamba2;
mod model;
mod quantize;
pub mod sample;
mod save;
mod seen;
mod session;
mod step;
mod stored;
pub mod train;
mod weights;

pub use checkpoint::{Checkpoint, names};
pub use config::{Config, Description, Heads, Mixer};
pub use layers::State;
pub use layout::files;
pub use model::{Input, Model, Where};
pub use save::{merged, quantized_config, told};
pub use seen::Seen;
pub use session::{Session, choose};
pub use weights::Weight;

use block::Block;
use sidewinder_kernels::ops::products::matrices::Dense;

/// The weights of a model.
pub struct Weights<T> {
    /// `(V, M)`; none for a backbone.
    embedding: Option<T>,
    layers: Vec<Layer<T>>,
    /// `(M)`.
    norm: T,
    /// `(V, M)`, without a bias; none for a backbone.
    head: Option<Dense<T>>,
}

/// The weights of a layer.
struct Layer<T> {
    /// `(M)`.
    norm: T,
    block: Block<T>,
    /// `-exp(A_log)`, computed once on loading.
    a: T,
}
