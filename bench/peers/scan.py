"""The selective scan: its inputs, its float64 truth and the workloads."""

import numpy as np

from common import Op, Workload


def step_sizes(random, batch, length, channels):
    """softplus(noise + bias), the bias such that dt lies around 0.001 to 0.1."""
    typical = np.exp(random.uniform(np.log(0.001), np.log(0.1), channels))
    bias = typical + np.log(-np.expm1(-typical))  # inverse softplus
    noise = 0.5 * random.standard_normal((batch, length, channels))
    return np.logaddexp(0, noise + bias)


def decay(random, channels, state):
    """-(1..N) as in the paper, times random factors: no structure to exploit."""
    return -np.arange(1, state + 1) * random.uniform(0.9, 1.1, (channels, state))


def inputs(random, batch, length, channels, state):
    return dict(
        x=random.standard_normal((batch, length, channels)),
        dt=step_sizes(random, batch, length, channels),
        A=decay(random, channels, state),
        B=random.standard_normal((batch, length, state)),
        C=random.standard_normal((batch, length, state)),
        dy=random.standard_normal((batch, length, channels)),
    )


def reference(x, dt, A, B, C):
    """The plain selective scan in float64: one step of time after the other."""
    x, dt, A, B, C = (v.astype(np.float64) for v in (x, dt, A, B, C))
    h = np.zeros((x.shape[0], *A.shape))  # [B, D, N]
    y = np.empty_like(x)
    for t in range(x.shape[1]):
        h *= np.exp(dt[:, t, :, None] * A)
        h += (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None]
        y[:, t] = (h @ C[:, t, :, None])[..., 0]
    return y


def reference_gradient(x, dt, A, B, C, dy):
    """The gradients of that scan in float64, for the cotangent `dy` of its output."""
    x, dt, A, B, C, dy = (v.astype(np.float64) for v in (x, dt, A, B, C, dy))
    h = np.zeros((x.shape[1] + 1, x.shape[0], *A.shape))  # [L + 1, B, D, N]
    for t in range(x.shape[1]):
        h[t + 1] = np.exp(dt[:, t, :, None] * A) * h[t]
        h[t + 1] += (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None]
    to = {name: np.zeros_like(v) for name, v in dict(x=x, dt=dt, A=A, B=B, C=C).items()}
    carry = np.zeros_like(h[0])
    for t in reversed(range(x.shape[1])):
        g = dy[:, t, :, None] * C[:, t, None] + carry
        carry = np.exp(dt[:, t, :, None] * A) * g
        log_decay = carry * h[t]
        from_b = (g @ B[:, t, :, None])[..., 0]
        to["x"][:, t] = from_b * dt[:, t]
        to["dt"][:, t] = (log_decay * A).sum(-1) + from_b * x[:, t]
        to["A"] += (log_decay * dt[:, t, :, None]).sum(0)
        to["B"][:, t] = (g * (dt[:, t] * x[:, t])[..., None]).sum(1)
        to["C"][:, t] = (dy[:, t, :, None] * h[t + 1]).sum(1)
    return {f"d{name}": gradient for name, gradient in to.items()}


def truth(_file, tensors):
    """All that a contender gives, in float64."""
    given = {name: value for name, value in tensors.items() if name != "dy"}
    gradients = reference_gradient(**tensors) if "dy" in tensors else {}
    return dict(y=reference(**given), **gradients)


OP = Op("selective_scan", inputs, truth, ours="selective_scan")
WORKLOADS = (
    Workload("reference", OP, dict(batch=32, length=60, channels=512, state=16)),
    Workload("mamba-130m", OP, dict(batch=1, length=2048, channels=1536, state=16)),
)
