//! The handlers as a library of their own, for clients of XLA other than Elixir. `python/sidewinder_jax.py` makes them
//! functions of JAX.

pub use sidewinder_xla::{sidewinder_xla_cuda, sidewinder_xla_cuda_graph, sidewinder_xla_host};
