//! The small golden models, and the results of an independent float64 implementation.

// Each test uses only a part of this module.
#![allow(dead_code)]

use sidewinder_files::safetensors::Reader;
use sidewinder_kernels::cpu::Exec;
use sidewinder_kernels::error::Result;
use sidewinder_kernels::tensor::Owned;
use sidewinder_models::mamba::{Checkpoint, Config, Input, Model, Weight, Where};
use std::path::PathBuf;

/// A golden model, by the name of its folder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Golden(&'static str);

pub const MAMBA: Golden = Golden("mamba");
pub const FALCON_MAMBA: Golden = Golden("falcon_mamba");
pub const MAMBA2: Golden = Golden("mamba2");
pub const MAMBA2_GROUPS: Golden = Golden("mamba2_groups");
pub const ALL: [Golden; 4] = [MAMBA, FALCON_MAMBA, MAMBA2, MAMBA2_GROUPS];

impl Golden {
    pub fn folder(self) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../test/golden").join(self.0)
    }

    /// An input or output of the independent implementation.
    pub fn expected(self, name: &str) -> Owned {
        let reader = Reader::open(&self.folder().join("expected.safetensors")).unwrap();
        reader.tensor(reader.entry(name).unwrap()).unwrap()
    }

    /// Two sequences of tokens.
    pub fn tokens(self) -> Vec<u32> {
        self.expected("tokens").view().to_f64().iter().map(|&token| token as u32).collect()
    }

    /// The tensors of the checkpoint.
    pub fn tensors(self) -> Vec<(String, Weight)> {
        let reader = Reader::open(&self.folder().join("model.safetensors")).unwrap();
        let tensor = |entry| reader.tensor(entry).unwrap().into();
        reader.entries().iter().map(|entry| (entry.name.clone(), tensor(entry))).collect()
    }

    pub fn config(self) -> Config {
        Config::parse("config.json", &std::fs::read(self.folder().join("config.json")).unwrap()).unwrap()
    }
}

pub fn folder() -> PathBuf {
    MAMBA.folder()
}

pub fn expected(name: &str) -> Owned {
    MAMBA.expected(name)
}

pub fn tokens() -> Vec<u32> {
    MAMBA.tokens()
}

pub fn tensors() -> Vec<(String, Weight)> {
    MAMBA.tensors()
}

pub fn config() -> Config {
    MAMBA.config()
}

pub fn of_tensors(config: Option<Config>, tensors: Vec<(String, Weight)>) -> Result<Model> {
    Model::new(Checkpoint::new("tensors", config, tensors), None, false, Where::Cpu(Exec::default()))
}

pub fn forward(model: &Model, tokens: &[u32], batch: usize) -> Owned {
    let mut logits = Owned::poisoned(model.output(&[batch, tokens.len() / batch]).unwrap());
    model.forward(Input::Tokens(tokens), batch, logits.view_mut()).unwrap();
    logits
}
