//! The handlers as a library by themselves, for clients of XLA that are not Elixir. `python/sidewinder_jax.py` makes them
//! functions of JAX.

pub use sidewinder_xla::{sidewinder_xla_cuda, sidewinder_xla_cuda_graph, sidewinder_xla_host};
