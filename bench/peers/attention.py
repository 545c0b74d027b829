"""Attention over long sequences on a GPU: its inputs, its float64 truth and the workloads."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

import transformer
from common import Op, Workload

QUERIES = 256


def inputs(random, batch, heads, length, width):
    tensors = transformer.heads(random, batch, heads, length, width)
    return tensors | dict(dy=random.standard_normal(tensors["q"].shape))


def one_head(q, k, v, dy=None, *, causal):
    """The output of a head, and with `dy` the gradients: by parts that fit into caches."""
    scale = q.shape[-1] ** -0.5
    results = dict(y=np.empty_like(v))
    if dy is not None:
        results |= dict(dq=np.empty_like(q), dk=np.zeros_like(k), dv=np.zeros_like(v))
    for first in range(0, len(q), QUERIES):
        some = slice(first, first + QUERIES)
        seen = slice(0, first + QUERIES if causal else len(k))
        scores = q[some] @ k[seen].T * scale
        if causal:
            scores[np.triu_indices(len(scores), first + 1, scores.shape[1])] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        results["y"][some] = weights @ v[seen]
        if dy is None:
            continue
        slopes = dy[some] @ v[seen].T
        slopes -= (slopes * weights).sum(-1, keepdims=True)
        slopes *= weights * scale
        results["dq"][some] = slopes @ k[seen]
        results["dk"][seen] += slopes.T @ q[some]
        results["dv"][seen] += weights.T @ dy[some]
    return results


def truth(_file, tensors, causal):
    """In float64, by one thread a head."""
    shape = tensors["q"].shape
    heads = [tensors[name].astype(np.float64).reshape(-1, *shape[2:]) for name in tensors]
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(partial(one_head, causal=causal), *heads))
    return {k: np.stack([one[k] for one in results]).reshape(shape) for k in results[0]}


def op(name, causal):
    about = dict(ours="attention", options={"causal": causal}, type="bf16", rtol=2e-2)
    return Op(name, inputs, partial(truth, causal=causal), **about)


def workloads(*sizes):
    names = ("batch", "heads", "length", "width")
    for op in OPS:
        yield Workload(f"{op.name}-{'x'.join(map(str, sizes))}", op, dict(zip(names, sizes)))


OPS = (op("attention_to_all", False), op("attention_causal", True))
ON_GPU = (*workloads(4, 16, 4096, 64), *workloads(1, 16, 8192, 128))
