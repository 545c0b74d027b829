//! Models whose large matrices are quantized on loading.

use super::{Layer, Weight, Weights};
use crate::watch::{Stage, Tally, Watch};
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::{Error, Result};
use sidewinder_kernels::ops::products::matrices::{Dense, Matrix, Quantization};
use sidewinder_kernels::tensor::Described;
use std::collections::BTreeSet;

/// The matrices of a layer that are quantized. The remaining one, `dt_proj`, is small and has short rows.
pub(super) const OF_LAYER: [&str; 3] = ["in_proj", "x_proj", "out_proj"];

impl Weights<Weight> {
    /// The weights with their large matrices quantized, including the head. The embedding stays as it is, because its
    /// rows are read one by one.
    pub(super) fn quantized(&self, how: Quantization, exec: &Exec, watch: &dyn Watch) -> Result<Weights<Weight>> {
        let tally = Tally::begin(watch, Stage::Quantize, self.layers.len() + 1)?;
        let layer = |(i, layer): (usize, &Layer<Weight>)| {
            let mut block = layer.block.clone();
            for (name, dense) in block.matrices_mut() {
                *dense = quantized(dense, || format!("layers.{i}.{name}"), how, exec)?;
            }
            tally.add(1)?;
            Ok(Layer { norm: layer.norm.clone(), block, a: layer.a.clone() })
        };
        let layers = self.layers.iter().enumerate().map(layer).collect::<Result<_>>()?;
        let head = self.head.as_ref().map(|head| quantized(head, || "head".to_string(), how, exec)).transpose()?;
        tally.add(1)?;
        Ok(Weights { layers, head, embedding: self.embedding.clone(), norm: self.norm.clone() })
    }
}

impl<T> Weights<T> {
    /// Whether any matrix is quantized.
    pub(super) fn is_quantized(&self) -> bool {
        !self.formats().is_empty()
    }

    /// The formats of quantized matrices.
    pub(super) fn formats(&self) -> BTreeSet<&'static str> {
        let of_layers = self.layers.iter().flat_map(|layer| layer.block.matrices());
        of_layers.chain(&self.head).filter_map(format).collect()
    }
}

/// The format of a layer's matrix, if it is quantized.
fn format<T>(of: &Dense<T>) -> Option<&'static str> {
    of.w.quantization().map(Quantization::name)
}

/// Quantizes a matrix of floats if its rows fit the format, else copies it; `name` identifies it in errors.
fn quantized(of: &Dense<Weight>, name: impl Fn() -> String, how: Quantization, exec: &Exec) -> Result<Dense<Weight>> {
    match &of.w {
        Matrix::Float(w) if how.fits(&w.spec()) => {
            let quantized = how.of(&w.view(), exec).and_then(|matrix| matrix.try_map(|part| Ok(part.into())));
            let quantized = quantized.map_err(|error| Error { argument: name().into(), ..error })?;
            Ok(with_bias(quantized, of.b.clone()))
        }
        _ => Ok(of.clone()),
    }
}

/// A dense layer. Beside a quantized matrix, the bias is cast to the type of the arithmetic.
pub(super) fn with_bias(w: Matrix<Weight>, b: Option<Weight>) -> Dense<Weight> {
    let quantized = w.quantization().is_some();
    Dense { b: b.map(|b| if quantized { b.cast(b.spec().dtype.wide()) } else { b }), w }
}
