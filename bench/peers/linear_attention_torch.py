"""Linear attention by the Triton kernels of flash-linear-attention."""

import torch

from common import Form


def triton(q, k, v, g):
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, g.float())[0]


def triton_by_key(q, k, v, g):
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, g)[0]


def forms(call):
    return {
        "fla_triton/chunk64": Form(call, dtype=torch.bfloat16),
        "fla_graph/chunk64": Form(call, dtype=torch.bfloat16, recorded=True),
    }


FORMS = forms(triton)
FORMS_BY_KEY = forms(triton_by_key)
