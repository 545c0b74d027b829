"""The scan of Mamba-2: its inputs, its float64 truth and the workloads."""

import numpy as np

from common import Op, Workload
from scan import step_sizes

CHUNK = 64


def inputs(random, batch, length, heads, width, state):
    rows = (batch, length, heads, width)
    return dict(
        x=random.standard_normal(rows),
        dt=step_sizes(random, batch, length, heads),
        A=-random.uniform(1, 16, heads),
        B=random.standard_normal((batch, length, 1, state)),
        C=random.standard_normal((batch, length, 1, state)),
        dy=random.standard_normal(rows),
    )


def reference(x, dt, A, B, C):
    """Chunks in float64, one after the other; all heads have the same B and C."""
    x, dt, A, B, C = (v.astype(np.float64) for v in (x, dt, A, B, C))
    state = np.zeros((x.shape[0], x.shape[2], x.shape[3], B.shape[3]))
    y = np.empty_like(x)
    for first in range(0, x.shape[1], CHUNK):
        time = slice(first, first + CHUNK)
        decay = np.cumsum(dt[:, time] * A, axis=1).swapaxes(1, 2)  # [B, H, T]
        b, c = (v[:, time, 0][:, None] for v in (B, C))  # [B, 1, T, N]
        rows = (x[:, time] * dt[:, time, :, None]).swapaxes(1, 2)  # [B, H, T, P]
        scores = np.tril(np.exp(np.minimum(decay[..., None] - decay[..., None, :], 0)))
        scores *= c @ b.swapaxes(2, 3)
        out = scores @ rows + (c @ state.swapaxes(2, 3)) * np.exp(decay)[..., None]
        y[:, time] = out.swapaxes(1, 2)
        left = np.exp(decay[..., -1:] - decay)[..., None]
        state = state * np.exp(decay[..., -1])[..., None, None] + (rows * left).swapaxes(2, 3) @ b
    return y


def truth(_file, tensors):
    given = {name: value for name, value in tensors.items() if name != "dy"}
    return dict(y=reference(**given))


OP = Op("ssd", inputs, truth, ours="ssd", rtol=1e-4)
BF16 = OP._replace(type="bf16", rtol=2e-2)


def workload(label, op, *sizes):
    names = ("batch", "length", "heads", "width", "state")
    return Workload(label, op, dict(zip(names, sizes)))


# A prompt of mamba2-130m; training on sequences of 2048; one long sequence.
ON_CPU = (workload("mamba2-130m", OP, 1, 512, 24, 64, 128),)
ON_GPU = (
    workload("8x2048", BF16, 8, 2048, 24, 64, 128),
    workload("1x32768", BF16, 1, 32768, 24, 64, 128),
)
