//! Whole models: Mamba, made of ops, with its checkpoints, sessions and training, and tokenizers.

pub mod mamba;
pub mod tokenizer;
pub mod watch;
