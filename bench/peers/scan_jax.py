"""The selective scan in JAX: sequential forms and the associative scan."""

import jax.numpy as jnp
from jax import lax


def time_first(v):
    return jnp.moveaxis(v, 1, 0)


def scan_over(step, h, *along):
    """lax.scan over time of inputs [B, L, ...]; gives y [B, L, D]."""
    return time_first(lax.scan(step, h, tuple(map(time_first, along)))[1])


def scan_precomputed(x, dt, A, B, C):
    """All factors made before the loop, as mamba-ssm's reference does."""
    decay = jnp.exp(dt[..., None] * A)
    added = (dt * x)[..., None] * B[:, :, None]

    def step(h, given):
        decay, added, C = given
        h = decay * h + added
        return h, jnp.einsum("bdn,bn->bd", h, C)

    return scan_over(step, jnp.zeros((x.shape[0], *A.shape), A.dtype), decay, added, C)


def scan_per_step(x, dt, A, B, C):
    """The recurrence as one would write it down: state [B, D, N], exp in the loop."""

    def step(h, given):
        x, dt, B, C = given
        h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * B[:, None]
        return h, (h * C[:, None]).sum(-1)  # no dot product, so that a GPU fuses it all

    return scan_over(step, jnp.zeros((x.shape[0], *A.shape), A.dtype), x, dt, B, C)


def wide_step(h, x, dt, A, B, C):
    """A step on the state [B, N, D], so that vectors run along the channels."""
    h = jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[..., None]
    return h, jnp.einsum("bnd,bn->bd", h, C)


def scan_channels_last(x, dt, A, B, C):
    A = A.T  # inside the step it would be turned every time, at twice the cost

    def step(h, given):
        x, dt, B, C = given
        return wide_step(h, x, dt, A, B, C)

    return scan_over(step, jnp.zeros((x.shape[0], *A.shape), A.dtype), x, dt, B, C)


def fori_channels_last(x, dt, A, B, C):
    """As above, but reading [B, L, ...] in place: no turning of the inputs."""

    A = A.T

    def step(t, carry):
        h, ys = carry
        now = [lax.dynamic_index_in_dim(v, t, 1, keepdims=False) for v in (x, dt, B, C)]
        h, y = wide_step(h, now[0], now[1], A, now[2], now[3])
        return h, lax.dynamic_update_index_in_dim(ys, y, t, 1)

    start = jnp.zeros((x.shape[0], *A.shape), A.dtype), jnp.zeros_like(x)
    return lax.fori_loop(0, x.shape[1], step, start)[1]


def compose(first, second):
    return first[0] * second[0], second[0] * first[1] + second[1]


def associative_scan(x, dt, A, B, C):
    decay = jnp.exp(dt[..., None] * A)
    added = (dt * x)[..., None] * B[:, :, None]
    h = lax.associative_scan(compose, (decay, added), axis=1)[1]
    return jnp.einsum("bldn,bln->bld", h, C)


FORMS = {
    "jax_sequential/scan_precomputed": scan_precomputed,
    "jax_sequential/scan_per_step": scan_per_step,
    "jax_sequential/scan_channels_last": scan_channels_last,
    "jax_sequential/fori_channels_last": fori_channels_last,
    "jax_associative/associative_scan": associative_scan,
}
