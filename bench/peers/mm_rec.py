"""MM-Rec's recurrence and its direct scan: their inputs, float64 truths and workloads."""

import numpy as np

from common import Op, Workload

MIX = 0.1


def inputs(random, batch, length, width):
    """Decays that let the state neither grow nor vanish; dense layers as they start."""
    bound = 1 / np.sqrt(width)
    weights = lambda *shape: random.uniform(-bound, bound, shape)
    sequence = (batch, length, width)
    return dict(
        z=random.standard_normal(sequence),
        gamma=random.uniform(0, 0.5, sequence),
        w_gate=weights(width, width),
        b_gate=weights(width),
        w_mix=weights(width, 2 * width),
        b_mix=weights(width),
        dh=random.standard_normal(sequence),
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gates(z, w_gate, b_gate, w_mix, b_mix):
    """What the gates' sums have from all but the state, and their matrix for that."""
    width = z.shape[-1]
    of_z = z @ w_mix[:, :width].T + b_mix
    return of_z, np.concatenate([w_gate, w_mix[:, width:]])


def forward(z, gamma, w_gate, b_gate, w_mix, b_mix):
    """`h` by the formula, one step of time after the other, and both gates."""
    of_z, of_state = gates(z, w_gate, b_gate, w_mix, b_mix)
    h, s, m = (np.empty_like(z) for _ in range(3))
    state = np.zeros_like(z[:, 0])
    for t in range(z.shape[1]):
        of_s, of_m = np.split(state @ of_state.T, 2, axis=-1)
        s[:, t], m[:, t] = sigmoid(of_s + b_gate), sigmoid(of_m + of_z[:, t])
        kept = gamma[:, t] * state
        mixed = m[:, t] * z[:, t] + (1 - m[:, t]) * state + kept
        state = h[:, t] = z[:, t] * s[:, t] + kept + MIX * mixed
    return h, s, m


def backward(z, gamma, w_gate, b_gate, w_mix, b_mix, dh):
    h, s, m = forward(z, gamma, w_gate, b_gate, w_mix, b_mix)
    width, (_, of_state) = z.shape[-1], gates(z, w_gate, b_gate, w_mix, b_mix)
    before = np.concatenate([np.zeros_like(h[:, :1]), h[:, :-1]], axis=1)
    ds, dm, dz, dgamma = (np.empty_like(z) for _ in range(4))
    g = np.zeros_like(z[:, 0])
    for t in reversed(range(z.shape[1])):
        g = g + dh[:, t]
        ds[:, t] = g * z[:, t] * s[:, t] * (1 - s[:, t])
        dm[:, t] = MIX * g * (z[:, t] - before[:, t]) * m[:, t] * (1 - m[:, t])
        dz[:, t] = g * s[:, t] + MIX * g * m[:, t]
        dgamma[:, t] = (1 + MIX) * g * before[:, t]
        g = g * ((1 + MIX) * gamma[:, t] + MIX * (1 - m[:, t]))
        g += np.concatenate([ds[:, t], dm[:, t]], axis=-1) @ of_state
    rows = lambda x: x.reshape(-1, width)
    both = np.concatenate([rows(z), rows(before)], axis=-1)
    return dict(
        h=h,
        dz=dz + dm @ w_mix[:, :width],
        dgamma=dgamma,
        dw_gate=rows(ds).T @ rows(before),
        db_gate=rows(ds).sum(0),
        dw_mix=rows(dm).T @ both,
        db_mix=rows(dm).sum(0),
    )


def truth(_file, tensors):
    given = {name: value.astype(np.float64) for name, value in tensors.items()}
    return backward(**given) if "dh" in given else dict(h=forward(**given)[0])


def gru(_file, tensors):
    """What a GRU gives that has these weights for its inputs and for its state."""
    z, w_gate, w_mix = (tensors[name].astype(np.float64) for name in ("z", "w_gate", "w_mix"))
    width, state = z.shape[-1], np.zeros_like(z[:, 0], dtype=np.float64)
    weights = np.concatenate([w_gate, w_mix[:, :width], w_mix[:, width:]])
    of_z = z @ weights.T
    h = np.empty_like(z)
    for t in range(z.shape[1]):
        (rz, uz, nz), (rh, uh, nh) = (
            np.split(x, 3, axis=-1) for x in (of_z[:, t], state @ weights.T)
        )
        update = sigmoid(uz + uh)
        state = (1 - update) * np.tanh(nz + sigmoid(rz + rh) * nh) + update * state
        h[:, t] = state
    return dict(h=h)


def decays(random, batch, heads, length, width):
    shape = (batch, heads, length, width)
    return dict(
        gamma=1 - random.uniform(0, 8 / length, shape), dy=random.standard_normal(shape)
    )


def products(_file, tensors):
    gamma = tensors["gamma"].astype(np.float64)
    y = np.cumprod(gamma, axis=2)
    if "dy" not in tensors:
        return dict(y=y)
    sums = np.flip(np.cumsum(np.flip(tensors["dy"] * y, 2), axis=2), 2)
    return dict(y=y, dgamma=sums / gamma)


RECURRENCE = Op(
    "block_recurrence",
    inputs,
    truth,
    ours="block_recurrence",
    options={"mix": MIX},
    rtol=1e-4,  # sums of weights' gradients over all times, in float32
    limit=gru,
)
SCAN = Op("cumprod_scan", decays, products, ours="cumprod_scan", rtol=1e-4)


def recurrence(batch, length, width):
    sizes = dict(batch=batch, length=length, width=width)
    return Workload(f"recurrence-{batch}x{length}x{width}", RECURRENCE, sizes)


def scan(batch, heads, length, width):
    sizes = dict(batch=batch, heads=heads, length=length, width=width)
    return Workload(f"cumprod-{batch}x{heads}x{length}x{width}", SCAN, sizes)


SCANS = (scan(8, 16, 2048, 64), scan(1, 8, 32768, 128))
ON_CPU = (recurrence(4, 512, 256), recurrence(4, 512, 1024), SCANS[0])
ON_GPU = (recurrence(8, 2048, 512), recurrence(8, 2048, 2048), *SCANS)
