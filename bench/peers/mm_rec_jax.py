"""MM-Rec's recurrence in JAX: `lax.scan` over time."""

import jax
import jax.numpy as jnp

from common import Form
from mm_rec import MIX


def recurrence(z, gamma, w_gate, b_gate, w_mix, b_mix):
    """What a step needs of `z` alone is computed before for all of them."""
    width = z.shape[-1]
    of_z = z @ w_mix[:, :width].T + b_mix
    of_state = jnp.concatenate([w_gate, w_mix[:, width:]]).T

    def step(h, at):
        z, gamma, of_z = at
        of_s, of_m = jnp.split(h @ of_state, 2, axis=-1)
        s, m = jax.nn.sigmoid(of_s + b_gate), jax.nn.sigmoid(of_m + of_z)
        kept = gamma * h
        h = z * s + kept + MIX * (m * z + (1 - m) * h + kept)
        return h, h

    steps = tuple(x.swapaxes(0, 1) for x in (z, gamma, of_z))
    _, h = jax.lax.scan(step, jnp.zeros_like(z[:, 0]), steps)
    return h.swapaxes(0, 1)


def associative(gamma):
    return jax.lax.associative_scan(jnp.multiply, gamma, axis=2)


FORMS = {
    "block_recurrence": {"jax/scan": Form(recurrence)},
    "cumprod_scan": {
        "jax/cumprod": Form(lambda gamma: jnp.cumprod(gamma, 2)),
        "jax/associative_scan": Form(associative),
    },
}
