"""Dense layers whose weights are not quantized, in PyTorch: what quantized ones are used in place of."""

from functools import cache

import torch
from torch.nn import functional as F

from common import Form


# Once, as a layer's weights are.
@cache
def narrow(weights):
    return weights.to(torch.bfloat16)


def in_bf16(x, read, **_quantized):
    return F.linear(x.to(torch.bfloat16), narrow(read)).float()


def net(x, read1, b1, read2, b2, **_planes):
    h = F.relu(F.linear(torch.sign(x), read1, b1))
    return F.linear(torch.sign(h), read2, b2)


DENSE = {
    "torch_eager/f32": Form(lambda x, read, **_: F.linear(x, read)),
    "torch_eager/bf16": Form(in_bf16),
}
FORMS = {
    "matmul_q8_q8": DENSE,
    "matmul_i8_ternary": DENSE,
    "simple_rotor_net": {"torch_eager/f32": Form(net)},
}
