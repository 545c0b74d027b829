//! Model files: safetensors, GGUF and JSON, with errors that name a file's format and a remedy.

pub mod file;
pub mod gguf;
pub mod json;
mod position;
pub mod recognise;
pub mod safetensors;
