"""The gated delta rule by the Triton kernels of flash-linear-attention."""

import torch

from common import Form


def triton(q, k, v, beta, g):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g.float(), beta, use_qk_l2norm_in_kernel=True)[0]


FORMS = {
    "fla_triton/chunk64": Form(triton, dtype=torch.bfloat16),
    "fla_graph/chunk64": Form(triton, dtype=torch.bfloat16, recorded=True),
}
