"""The transformer's ops in plain NumPy, and copies for their memory traffic."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from scipy.special import erf

from common import Form

ROOT = np.sqrt(2 / np.pi, dtype=np.float32)


def gelu_tanh(x):
    inner = ROOT * (x + 0.044715 * (x * x * x))  # a power takes far longer
    return 0.5 * x * (1 + np.tanh(inner))


def over_root(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def layer_norm(x, w, b):
    return over_root(x - x.mean(-1, keepdims=True), 1e-5) * w + b


@cache
def hidden(length):
    """(L, L): 0 where a query sees a key, else minus infinity."""
    return np.triu(np.full((length, length), -np.inf, np.float32), 1)


def attention(q, k, v):
    scale = np.float32(q.shape[-1] ** -0.5)
    scores = (q * scale) @ k.swapaxes(-1, -2) + hidden(q.shape[-2])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@cache
def target(shape):
    return np.empty(shape, np.float32)


@cache
def pool(threads):
    return ThreadPoolExecutor(threads)


def copy(x, **_weights):
    """Each thread copies a part; the first is this one's."""
    y, threads = target(x.shape), len(os.sched_getaffinity(0))
    first, *others = zip(np.array_split(y, threads), np.array_split(x, threads))
    running = [pool(threads).submit(np.copyto, *part) for part in others]
    np.copyto(*first)
    for part in running:
        part.result()
    return y


PLAIN = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": gelu_tanh,
    "gelu_erf": lambda x: 0.5 * x * (1 + erf(x * np.float32(0.5**0.5))),
    "rms_norm": lambda x, w: over_root(x, 1e-6) * w,
    "layer_norm": layer_norm,
    "layer_norm_gelu": lambda **given: gelu_tanh(layer_norm(**given)),
    "linear": lambda x, w: x @ w.T,
    "attention": attention,
}
FORMS = {
    op: {"numpy/plain": Form(call), "copy/numpy": Form(copy)}
    for op, call in PLAIN.items()
}
