//! The handlers as a library by themselves, for clients of XLA that are not Elixir: `sidewinder_xla_host` and
//! `sidewinder_xla_cuda`. `tests/jax_client.py` has one such client.

pub use sidewinder_xla::{sidewinder_xla_cuda, sidewinder_xla_host};
