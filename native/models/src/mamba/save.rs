//! Models as files that other programs can read: the weights, and the matching `config.json`.

use super::checkpoint::TOLD_FORMATS;
use super::config::{self, FORMATS, METHOD, OURS, QUANTIZATION};
use super::family::Words;
use super::model::Home;
use super::{Model, Weights, stored};
use crate::watch::{Stage, Unwatched, Watch, in_chunks};
use serde_json::{Value, json};
use sidewinder_files::json;
use sidewinder_files::safetensors::{self, Told};
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::{DType, View};
use std::collections::BTreeSet;
use std::path::Path;

/// The metadata of a file with tensors of these names.
pub fn told<'n>(names: impl Iterator<Item = &'n str>) -> Told {
    told_of(&stored::formats(names))
}

/// The metadata of a file with these formats. Transformers refuses files that do not name the framework of their
/// tensors.
fn told_of(formats: &BTreeSet<&str>) -> Told {
    let mut told = Told::from([("format".to_string(), "pt".to_string())]);
    if !formats.is_empty() {
        told.insert(TOLD_FORMATS.to_string(), formats.iter().copied().collect::<Vec<_>>().join(","));
    }
    told
}

/// Merges configurations; the last one takes precedence.
pub fn merged(configs: &[&[u8]]) -> Result<String> {
    Ok(json::written(&Value::Object(words(configs)?)))
}

/// Adds the quantization formats to a configuration; `names` are those of all tensors.
pub fn quantized_config<'n>(config: &[u8], names: impl Iterator<Item = &'n str>) -> Result<String> {
    let mut words = words(&[config])?;
    tell_formats(&mut words, &stored::formats(names));
    Ok(json::written(&Value::Object(words)))
}

fn words(configs: &[&[u8]]) -> Result<Words> {
    let mut words = Words::new();
    for config in configs {
        words.extend(config::words("config", config)?);
    }
    Ok(words)
}

fn tell_formats(words: &mut Words, formats: &BTreeSet<&str>) {
    match formats.is_empty() {
        true => words.remove(QUANTIZATION),
        false => words.insert(QUANTIZATION.into(), json!({ METHOD: OURS, FORMATS: formats })),
    };
}

impl Model {
    /// Writes its weights to a file, as returned by [`Model::stored`].
    pub fn save(&self, path: &Path) -> Result<()> {
        self.save_watched(path, &Unwatched)
    }

    /// Like [`Model::save`], with reports to `watch`.
    pub fn save_watched(&self, path: &Path, watch: &dyn Watch) -> Result<()> {
        let tensors = self.stored()?;
        let views: Vec<(&str, View)> = tensors.iter().map(|(name, weight)| (name.as_str(), weight.view())).collect();
        let bytes = views.iter().map(|(_, view)| view.bytes().len()).sum();
        in_chunks(watch, Stage::Write, bytes, |chunks| {
            safetensors::write_in_chunks(path, &views, &told_of(&self.formats()), chunks)
        })
    }

    /// The `config.json` that matches [`Model::save`], with the keys of Hugging Face's configurations. Other keys of
    /// these configurations are kept; the last configuration takes precedence.
    pub fn described(&self, configs: &[&[u8]]) -> Result<String> {
        let mut words = words(configs)?;
        self.config().tell(&mut words);
        self.tell_layers(&mut words);
        tell_formats(&mut words, &self.formats());
        Ok(json::written(&Value::Object(words)))
    }

    fn tell_layers(&self, words: &mut Words) {
        let [in_bias, conv_bias, tied] = match &self.home {
            Home::Cpu(weights, _) => parts(weights, weights.tied(super::model::same_weight)),
            Home::Cuda(weights, ..) => parts(weights, weights.tied(sidewinder_kernels::cuda::Buffer::same)),
        };
        let [language_model, backbone] = self.config().mixer.family().architectures();
        let architecture = if self.config().vocabulary > 0 { language_model } else { backbone };
        for (word, value) in [
            ("model_type", self.config().mixer.model_type().into()),
            ("architectures", json!([architecture])),
            ("hidden_act", "silu".into()),
            ("use_bias", in_bias.into()),
            ("use_conv_bias", conv_bias.into()),
            ("tie_word_embeddings", tied.into()),
            ("torch_dtype", torch(self.dtype()).into()),
        ] {
            words.insert(word.into(), value);
        }
        // Aliases of two of these keys, of mamba_ssm and of later versions of transformers; updated where present.
        for (word, value) in [("tie_embeddings", tied.into()), ("dtype", torch(self.dtype()).into())] {
            words.get_mut(word).into_iter().for_each(|said| *said = Value::clone(&value));
        }
    }
}

/// Whether the projections have biases, whether the convolutions have some, and whether the embeddings are tied.
fn parts<T>(weights: &Weights<T>, tied: bool) -> [bool; 3] {
    let biases = |i: usize| weights.layers.iter().any(|layer| layer.block.biases()[i]);
    [biases(0), biases(1), tied]
}

/// PyTorch's name for a type.
fn torch(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "float64",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}
