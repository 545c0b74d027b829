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


def through_chunks(q, k, v, g, find_inputs):
    """y of [B, L, H, V] in float64, chunk after chunk; `find_inputs` gives what a chunk's steps add to the state."""
    q, k, v, g = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, g))
    q = q / np.sqrt(q.shape[-1])
    state = np.zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    y = np.empty_like(v)
    for first in range(0, k.shape[2], CHUNK):
        time = slice(first, first + CHUNK)
        log = np.cumsum(g[:, :, time], axis=2)[..., None]  # [B, H, T, 1]
        decay = np.tril(np.exp(np.minimum(log - log.swapaxes(2, 3), 0)))
        qs, ks = q[:, :, time], k[:, :, time]
        u = find_inputs(time, ks, v[:, :, time], decay, np.exp(log) * (ks @ state))
        y[:, :, time] = np.exp(log) * (qs @ state) + decay * (qs @ ks.swapaxes(2, 3)) @ u
        left = ks * np.exp(log[:, :, -1:] - log)
        state = np.exp(log[:, :, -1:]) * state + left.swapaxes(2, 3) @ u
    return y.swapaxes(1, 2)


def reference(q, k, v, g):
    return through_chunks(q, k, v, g, lambda _time, _ks, vs, _decay, _read: vs)


def truth(_file, tensors):
    given = {name: value for name, value in tensors.items() if name != "dy"}
    return dict(y=reference(**given))


OP = Op("linear_attention", inputs, truth, ours="linear_attention", type="bf16", rtol=2e-2)


def workloads(op):
    """Training on sequences of 4096; one long sequence."""
    names = ("batch", "length", "heads", "keys", "values")
    sizes = {"8x4096": (8, 4096, 16, 128, 128), "1x32768": (1, 32768, 16, 128, 128)}
    return tuple(Workload(label, op, dict(zip(names, of))) for label, of in sizes.items())


ON_GPU = workloads(OP)
