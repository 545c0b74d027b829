"""The gated delta rule: its inputs, its float64 truth and the workloads."""

import numpy as np

from common import Op
from linear_attention import through_chunks, workloads


def inputs(random, batch, length, heads, keys, values):
    of_keys, of_steps = (batch, length, heads, keys), (batch, length, heads)
    return dict(
        q=random.standard_normal(of_keys),
        k=random.standard_normal(of_keys),
        v=random.standard_normal((*of_steps, values)),
        beta=random.uniform(0, 1, of_steps),
        g=-np.exp(random.uniform(np.log(1e-3), np.log(0.5), of_steps)),
        dy=random.standard_normal((*of_steps, values)),
    )


def unit(rows):
    return rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6)


def reference(q, k, v, beta, g):
    """Chunks in float64, whose inputs solve a triangular system."""
    betas = beta.astype(np.float64).swapaxes(1, 2)[..., None]

    def find_inputs(time, ks, vs, decay, read):
        of_steps = betas[:, :, time]
        lower = np.tril(of_steps * decay * (ks @ ks.swapaxes(2, 3)), -1)
        return np.linalg.solve(np.eye(lower.shape[-1]) + lower, of_steps * (vs - read))

    return through_chunks(*(unit(x.astype(np.float64)) for x in (q, k)), v, g, find_inputs)


def truth(_file, tensors):
    given = {name: value for name, value in tensors.items() if name != "dy"}
    return dict(y=reference(**given))


OP = Op(
    "gated_delta_rule",
    inputs,
    truth,
    ours="gated_delta_rule",
    options={"qk_l2norm": True},
    type="bf16",
    rtol=2e-2,
)

ON_GPU = workloads(OP)
