"""Products and attention in bf16 in PyTorch, on inputs that were rounded before."""

import torch

from common import Form
from transformer_torch import FUNCTIONS

FUNCTIONS = {name: FUNCTIONS[name] for name in ("linear", "attention")} | {
    "matmul": lambda a, b: a @ b,
}
FORMS = {
    op: {"torch_bf16/plain": Form(function, dtype=torch.bfloat16)}
    for op, function in FUNCTIONS.items()
}
