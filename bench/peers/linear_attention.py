"""Linear attention with a decay for each head: its inputs, its float64 truth and the workloads."""

import numpy as np

from common import Op, Workload

CHUNK = 64


def inputs(random, batch, length, heads, keys, values):
    of_keys, of_values = (batch, length, heads, keys), (batch, length, heads, values)
    return dict(
        q=random.standard_normal(of_keys),
        k=random.standard_normal(of_keys),
        v=random.standard_normal(of_values),
        g=-np.exp(random.uniform(np.log(1e-3), np.log(0.5), of_keys[:3])),
        dy=random.standard_normal(of_values),
    )


def reference(q, k, v, g):
    """Chunks in float64, one after the other."""
    q, k, v, g = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, g))
    q = q / np.sqrt(q.shape[-1])
    state = np.zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    y = np.empty_like(v)
    for first in range(0, k.shape[2], CHUNK):
        time = slice(first, first + CHUNK)
        log = np.cumsum(g[:, :, time], axis=2)[..., None]  # [B, H, T, 1]
        decay = np.tril(np.exp(np.minimum(log - log.swapaxes(2, 3), 0)))
        qs, ks, vs = q[:, :, time], k[:, :, time], v[:, :, time]
        y[:, :, time] = np.exp(log) * (qs @ state) + decay * (qs @ ks.swapaxes(2, 3)) @ vs
        left = ks * np.exp(log[:, :, -1:] - log)
        state = np.exp(log[:, :, -1:]) * state + left.swapaxes(2, 3) @ vs
    return y.swapaxes(1, 2)


def truth(_file, tensors):
    given = {name: value for name, value in tensors.items() if name != "dy"}
    return dict(y=reference(**given))


OP = Op("linear_attention", inputs, truth, ours="linear_attention", type="bf16", rtol=2e-2)


def workload(label, *sizes):
    names = ("batch", "length", "heads", "keys", "values")
    return Workload(label, OP, dict(zip(names, sizes)))


# Training on sequences of 4096; one long sequence.
ON_GPU = (
    workload("8x4096", 8, 4096, 16, 128, 128),
    workload("1x32768", 1, 32768, 16, 128, 128),
)
