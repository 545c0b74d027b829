"""The transformer's ops in PyTorch's own functions, eager and compiled."""

from functools import cache

import torch
from torch.nn import functional as F

from common import Form


def layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b, eps=1e-5)


def layer_norm_gelu(x, w, b):
    return F.gelu(layer_norm(x, w, b), approximate="tanh")


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@cache
def target(shape):
    return torch.empty(shape)


def copy(x, **_weights):
    return target(x.shape).copy_(x)


FUNCTIONS = {
    "silu": lambda x: F.silu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": lambda x: F.gelu(x),
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, eps=1e-6),
    "layer_norm": layer_norm,
    "layer_norm_gelu": layer_norm_gelu,
    "linear": lambda x, w: F.linear(x, w),
    "attention": attention,
}
FORMS = {
    op: {
        "torch_eager/plain": Form(function),
        "torch_compile/plain": Form(torch.compile(function)),
        "copy/torch": Form(copy),
    }
    for op, function in FUNCTIONS.items()
}
