"""Attention by PyTorch's fused kernels: those of cuDNN, and its own of FlashAttention-2."""

from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import Form

BACKENDS = {
    "torch_cudnn/sdpa": SDPBackend.CUDNN_ATTENTION,
    "torch_flash/sdpa": SDPBackend.FLASH_ATTENTION,
}


def attention(q, k, v, *, backend, causal):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def forms(causal):
    return {
        name: Form(
            partial(attention, backend=backend, causal=causal), dtype=torch.bfloat16
        )
        for name, backend in BACKENDS.items()
    }


FORMS = {"attention_to_all": forms(False), "attention_causal": forms(True)}
