"""The transformer's ops in JAX."""

import jax
import jax.numpy as jnp

from common import Form


def over_root(x, eps):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def layer_norm(x, w, b):
    return over_root(x - x.mean(-1, keepdims=True), 1e-5) * w + b


def attention(q, k, v):
    """Its own; it wants (batch, length, heads, width)."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def composed_attention(q, k, v):
    scores = q @ jnp.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v


PLAIN = {
    "silu": lambda x: jax.nn.silu(x),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "rms_norm": lambda x, w: over_root(x, 1e-6) * w,
    "layer_norm": layer_norm,
    "layer_norm_gelu": lambda **given: jax.nn.gelu(layer_norm(**given)),
    "linear": lambda x, w: x @ w.T,
    "attention": composed_attention,
}
FORMS = {op: {"jax/plain": Form(call)} for op, call in PLAIN.items()}
FORMS["linear"]["jax/weights_in_out"] = Form(lambda x, w: x @ w, ("w",), (0, 1))
FORMS["attention"]["jax/nn"] = Form(attention, ("q", "k", "v", "y"))
