"""The transformer's ops: their inputs, their float64 truth and the workloads."""

from functools import partial

import numpy as np
from scipy.special import erf

from common import Op, Workload


def rows_alone(random, rows, columns):
    return dict(x=random.standard_normal((rows, columns)))


def weighted_rows(random, rows, columns, bias):
    """Rows, and weights around 1 with a bias around 0 for each column."""
    w = dict(w=random.uniform(0.5, 1.5, columns))
    b = dict(b=random.uniform(-0.5, 0.5, columns)) if bias else {}
    return rows_alone(random, rows, columns) | w | b


def layer(random, rows, inputs, outputs):
    """Rows and weights (out, in) that keep their size."""
    w = random.standard_normal((outputs, inputs)) / np.sqrt(inputs)
    return rows_alone(random, rows, inputs) | dict(w=w)


def heads(random, batch, heads, length, width):
    shape = (batch, heads, length, width)
    return {name: random.standard_normal(shape) for name in "qkv"}


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def centered(x):
    return x - x.mean(-1, keepdims=True)


def over_root(x, eps):
    """Rows over the root of their mean square."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def layer_norm(x, w, b):
    return over_root(centered(x), 1e-5) * w + b


def layer_norm_gelu(x, w, b):
    return gelu_tanh(layer_norm(x, w, b))


def one_head(q, k, v):
    """Causal attention of one head: no query sees a later key."""
    scores = q @ k.T / np.sqrt(q.shape[-1])
    scores[np.triu_indices(len(q), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def attention(q, k, v):
    each = zip(*(t.reshape(-1, *t.shape[2:]) for t in (q, k, v)))
    return np.stack([one_head(*head) for head in each]).reshape(q.shape)


def exact(function, output="y"):
    """The function's result in float64."""
    return lambda _file, tensors: {
        output: function(**{name: v.astype(np.float64) for name, v in tensors.items()})
    }


STREAMS = dict(
    moves=lambda tensors: 2 * tensors["x"].nbytes,
    limit=lambda _file, tensors: dict(y=tensors["x"]),
)


def activation(name, function):
    options = {"fn": name}
    return Op(name, rows_alone, exact(function), "activations", options, **STREAMS)


def norm(name, function, **options):
    inputs = partial(weighted_rows, bias=name != "rms_norm")
    return Op(name, inputs, exact(function), name, options, **STREAMS)


STREAMING = (
    activation("silu", lambda x: x / (1 + np.exp(-x))),
    activation("gelu_tanh", gelu_tanh),
    activation("gelu_erf", lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2)))),
    norm("rms_norm", lambda x, w: over_root(x, 1e-6) * w, eps=1e-6),
    norm("layer_norm", layer_norm, eps=1e-5),
    norm("layer_norm_gelu", layer_norm_gelu, eps=1e-5, gelu="tanh"),
)
LINEAR = Op("linear", layer, exact(lambda x, w: x @ w.T), "linear")
ATTENTION = Op("attention", heads, exact(attention), "attention", {"causal": True})


def workload(op, **sizes):
    return Workload(f"{op.name}-{'x'.join(map(str, sizes.values()))}", op, sizes)


WORKLOADS = (
    *(workload(op, rows=n, columns=4096) for n in (128, 4096) for op in STREAMING),
    *(workload(LINEAR, rows=n, inputs=4096, outputs=4096) for n in (128, 1)),
    workload(ATTENTION, batch=4, heads=8, length=128, width=64),
    workload(ATTENTION, batch=1, heads=16, length=2048, width=64),
)
