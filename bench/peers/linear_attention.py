"""Linear attention with a decay for each head, or for each key (GLA): inputs, float64 truth and workloads."""

from functools import partial

import numpy as np

from common import Op, Workload

CHUNK = 64


def inputs(random, batch, length, heads, keys, values, by_key=False):
    of_keys, of_values = (batch, length, heads, keys), (batch, length, heads, values)
    return dict(
        q=random.standard_normal(of_keys),
        k=random.standard_normal(of_keys),
        v=random.standard_normal(of_values),
        g=-np.exp(random.uniform(np.log(1e-3), np.log(0.5), of_keys if by_key else of_keys[:3])),
        dy=random.standard_normal(of_values),
    )


def begun(q, k, v, g):
    """The inputs in float64, heads before steps and q scaled; a state of zeros; and room for y."""
    q, k, v, g = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, g))
    state = np.zeros((*k.shape[:2], k.shape[3], v.shape[3]))
    return q / np.sqrt(q.shape[-1]), k, v, g, state, np.empty_like(v)


def through_chunks(q, k, v, g, find_inputs):
    """y of [B, L, H, V] in float64, chunk after chunk; `find_inputs` gives what a chunk's steps add to the state."""
    q, k, v, g, state, y = begun(q, k, v, g)
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


def reference_by_key(q, k, v, g):
    """As above. Decays of a chunk are within float64, so that their inverses are, too."""
    q, k, v, g, state, y = begun(q, k, v, g)
    for first in range(0, k.shape[2], CHUNK):
        time = slice(first, first + CHUNK)
        log = np.cumsum(g[:, :, time], axis=2)  # [B, H, T, K]
        qs, ks, vs = q[:, :, time] * np.exp(log), k[:, :, time] * np.exp(-log), v[:, :, time]
        y[:, :, time] = qs @ state + np.tril(qs @ ks.swapaxes(2, 3)) @ vs
        end = np.exp(log[:, :, -1:]).swapaxes(2, 3)
        state = end * (state + ks.swapaxes(2, 3) @ vs)
    return y.swapaxes(1, 2)


def truth(reference):
    def of(_file, tensors):
        given = {name: value for name, value in tensors.items() if name != "dy"}
        return dict(y=reference(**given))

    return of


OP = Op(
    "linear_attention", inputs, truth(reference), ours="linear_attention", type="bf16", rtol=2e-2
)
BY_KEY = Op(
    "gla",
    partial(inputs, by_key=True),
    truth(reference_by_key),
    ours="linear_attention",
    type="bf16",
    rtol=2e-2,
)


def workloads(op):
    """Training on sequences of 4096; one long sequence."""
    names = ("batch", "length", "heads", "keys", "values")
    sizes = {"8x4096": (8, 4096, 16, 128, 128), "1x32768": (1, 32768, 16, 128, 128)}
    return tuple(Workload(label, op, dict(zip(names, of))) for label, of in sizes.items())


ON_GPU = workloads(OP)
BY_KEY_ON_GPU = workloads(BY_KEY)
