//! Files that models come in: safetensors, GGUF and JSON, with errors that say what a file is and what to do with it.

pub mod file;
pub mod gguf;
pub mod json;
pub mod recognise;
pub mod safetensors;
