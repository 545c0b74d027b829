"""Linear attention by the Triton kernels of flash-linear-attention."""

import torch

from common import Form


def triton(q, k, v, g):
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, g.float())[0]


FORMS = {
    "fla_triton/chunk64": Form(triton, dtype=torch.bfloat16),
    "fla_graph/chunk64": Form(triton, dtype=torch.bfloat16, recorded=True),
}
