//! Models whose large matrices are quantized on loading.

use super::stored;
use super::{HEAD, Layer, Weight, Weights};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Error, Result};
use sidewinder_kernels::op::Named;
use sidewinder_kernels::ops::products::matrices::Quantization;
use sidewinder_kernels::tensor::Described;
use std::collections::BTreeSet;

/// The matrices of a layer that are quantized. The remaining one is small and has short rows.
pub(super) const OF_LAYER: [&str; 3] = ["in_proj", "x_proj", "out_proj"];

impl Weights<Weight> {
    /// The weights with their large matrices quantized, including the head. The embedding stays as it is, because its
    /// rows are read one by one.
    pub(super) fn quantized(&self, how: Quantization, exec: &Exec) -> Result<Weights<Weight>> {
        let layer = |(i, layer): (usize, &Layer<Weight>)| {
            let block = quantized(&layer.block, (&OF_LAYER, Some(i)), how, exec)?;
            Ok(Layer { norm: layer.norm.clone(), block, a: layer.a.clone() })
        };
        Ok(Weights {
            layers: self.layers.iter().enumerate().map(layer).collect::<Result<_>>()?,
            head: quantized(&self.head, (&[HEAD], None), how, exec)?,
            embedding: self.embedding.clone(),
            norm: self.norm.clone(),
        })
    }
}

impl<T> Weights<T> {
    /// Whether any matrix is quantized.
    pub(super) fn is_quantized(&self) -> bool {
        !self.formats().is_empty()
    }

    /// The formats of quantized matrices.
    pub(super) fn formats(&self) -> BTreeSet<&'static str> {
        let of_layers = self.layers.iter().flat_map(|layer| layer.block.iter());
        stored::formats(of_layers.chain(self.head.iter()).map(|(name, _)| &**name))
    }
}

/// Quantizes the tensors with these names, where their rows allow it.
fn quantized(
    of: &Named<Weight>,
    (names, layer): (&[&str], Option<usize>),
    how: Quantization,
    exec: &Exec,
) -> Result<Named<Weight>> {
    let place = |name: &str| layer.map_or(name.into(), |layer| format!("layers.{layer}.{name}").into());
    let mut all = Named::default();
    for (name, weight) in of.iter() {
        if names.contains(&&**name) && how.fits(&weight.spec()) {
            let parts = how.of(name, &weight.view(), exec).map_err(|error| Error { argument: place(name), ..error })?;
            parts.into_iter().for_each(|(name, part)| all.push(name, part.into()));
        } else {
            all.push(name.clone(), weight.clone());
        }
    }
    Ok(with_biases(all))
}

/// The weights of a block, with the biases of quantized matrices in the type of the arithmetic.
pub(super) fn with_biases(block: Named<Weight>) -> Named<Weight> {
    let is_quantized = |matrix: &str| OF_LAYER.contains(&matrix) && block.find(matrix).is_none();
    let bias = |name: &str, weight: &Weight| match name.strip_suffix("_b") {
        Some(matrix) if is_quantized(matrix) => weight.cast(weight.spec().dtype.wide()),
        _ => weight.clone(),
    };
    block.iter().map(|(name, weight)| (name.clone(), bias(name, weight))).collect()
}
