//! Mamba models of random weights.

use sidewinder_kernels::tensor::{DType, Owned, Spec};
use sidewinder_models::mamba::{Config, Heads, Mixer, Weight};
use std::collections::BTreeMap;

/// Weights by their names in checkpoints.
pub type Tensors = BTreeMap<String, Weight>;

/// Random weights, large enough that each one affects the output. A `whole` model has biases of projections and a
/// separate head; others have neither.
pub fn tensors(config: &Config, whole: bool) -> Tensors {
    let Config { width, layers, vocabulary, inner, state, rank, conv, .. } = *config;
    let mut tensors = Tensors::new();
    let mut add = |name: String, dims: &[usize], mean: f64, spread: f64| {
        let mut random = crate::common::Random(tensors.len() as u64 + 1);
        // Wide matrices get smaller weights, so that activations and their rounding errors stay small.
        let spread = spread * (8.0 / *dims.last().unwrap_or(&1) as f64).sqrt().min(1.0);
        let spec = Spec::new(DType::F64, dims).unwrap();
        tensors.insert(name, Owned::from_fn(spec, |_| mean + spread * 3.0 * (random.next() - 0.5)).into());
    };
    add("backbone.embeddings.weight".into(), &[vocabulary, width], 0.0, 1.0);
    add("backbone.norm_f.weight".into(), &[width], 1.0, 0.3);
    if whole {
        add("lm_head.weight".into(), &[vocabulary, width], 0.0, 0.5);
    }
    for layer in 0..layers {
        let mut of = |name: &str, dims: &[usize], mean: f64, spread: f64| {
            add(format!("backbone.layers.{layer}.{name}"), dims, mean, spread)
        };
        of("norm.weight", &[width], 1.0, 0.3);
        let (channels, rows) = match config.mixer {
            Mixer::Mamba2(Heads { count, groups, .. }) => {
                (inner + 2 * groups * state, 2 * inner + 2 * groups * state + count)
            }
            _ => (inner, 2 * inner),
        };
        of("mixer.in_proj.weight", &[rows, width], 0.0, 0.4);
        of("mixer.conv1d.weight", &[channels, 1, conv], 0.0, 0.5);
        of("mixer.conv1d.bias", &[channels], 0.0, 0.2);
        if let Mixer::Mamba2(Heads { count, .. }) = config.mixer {
            of("mixer.dt_bias", &[count], -1.0, 0.5);
            of("mixer.A_log", &[count], 0.0, 0.5);
            of("mixer.D", &[count], 1.0, 0.3);
            of("mixer.norm.weight", &[inner], 1.0, 0.3);
        } else {
            of("mixer.x_proj.weight", &[rank + 2 * state, inner], 0.0, 0.4);
            of("mixer.dt_proj.weight", &[inner, rank], 0.0, 0.5);
            of("mixer.dt_proj.bias", &[inner], -1.0, 0.5);
            of("mixer.A_log", &[inner, state], 0.0, 0.5);
            of("mixer.D", &[inner], 1.0, 0.3);
        }
        of("mixer.out_proj.weight", &[width, inner], 0.0, 0.4);
        if whole {
            of("mixer.in_proj.bias", &[rows], 0.0, 0.2);
            of("mixer.out_proj.bias", &[width], 0.0, 0.2);
        }
    }
    tensors
}
