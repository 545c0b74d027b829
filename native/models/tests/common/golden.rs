//! The small golden model, and the results of an independent float64 implementation.

use sidewinder_files::safetensors::Reader;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::Owned;
use sidewinder_models::mamba::{Checkpoint, Config, Input, Model, Weight, Where};
use std::path::PathBuf;

pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../test/golden/mamba")
}

/// A tensor that the independent implementation read or gave.
pub fn expected(name: &str) -> Owned {
    let reader = Reader::open(&folder().join("expected.safetensors")).unwrap();
    reader.tensor(reader.entry(name).unwrap()).unwrap()
}

/// Two sequences of tokens.
pub fn tokens() -> Vec<u32> {
    expected("tokens").view().to_f64().iter().map(|&token| token as u32).collect()
}

/// The tensors of the checkpoint.
pub fn tensors() -> Vec<(String, Weight)> {
    let reader = Reader::open(&folder().join("model.safetensors")).unwrap();
    let tensor = |entry| reader.tensor(entry).unwrap().into();
    reader.entries().iter().map(|entry| (entry.name.clone(), tensor(entry))).collect()
}

pub fn config() -> Config {
    Config::parse("config.json", &std::fs::read(folder().join("config.json")).unwrap()).unwrap()
}

pub fn of_tensors(config: Option<Config>, tensors: Vec<(String, Weight)>) -> Result<Model> {
    Model::new(Checkpoint::new("tensors", config, tensors), None, false, Where::Cpu(Exec::default()))
}

pub fn forward(model: &Model, tokens: &[u32], batch: usize) -> Owned {
    let mut logits = Owned::poisoned(model.output(&[batch, tokens.len() / batch]).unwrap());
    model.forward(Input::Tokens(tokens), batch, logits.view_mut()).unwrap();
    logits
}
