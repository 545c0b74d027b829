"""MM-Rec's recurrence in PyTorch: a loop over time, and a GRU of the same width."""

import torch
from torch.nn import functional as F

from common import Form
from mm_rec import MIX


def step(h, z, gamma, w_gate, b_gate, w_mix, b_mix):
    """One step, with the matrix products that the original has in each."""
    s = torch.sigmoid(F.linear(h, w_gate, b_gate))
    m = torch.sigmoid(F.linear(torch.cat([z, h], -1), w_mix, b_mix))
    kept = gamma * h
    return z * s + kept + MIX * (m * z + (1 - m) * h + kept)


def loop(step):
    def recurrence(z, gamma, w_gate, b_gate, w_mix, b_mix):
        h, hs = torch.zeros_like(z[:, 0]), []
        # Unbound, not indexed: the gradient of an index is a whole tensor of zeros.
        for z, gamma in zip(z.unbind(1), gamma.unbind(1)):
            h = step(h, z, gamma, w_gate, b_gate, w_mix, b_mix)
            hs.append(h)
        return torch.stack(hs, dim=1)

    return recurrence


class Gru:
    """cuDNN's on a GPU."""

    layer = None

    def __call__(self, z, w_gate, w_mix, **_others):
        if self.layer is None:
            weights = torch.cat([w_gate, *w_mix.chunk(2, 1)]).detach()
            with torch.inference_mode(False):
                self.layer = self.made(z.shape[-1], weights.clone())
        return self.layer(z)[0]

    @staticmethod
    @torch.no_grad()
    def made(width, weights):
        layer = torch.nn.GRU(width, width, bias=False, batch_first=True)
        layer = layer.to(weights.device)
        for parameter in layer.parameters():
            parameter.copy_(weights)
        return layer

    def parameters(self):
        return self.layer.parameters()


FORMS = {
    "block_recurrence": {
        "torch_eager/per_step": Form(loop(step)),
        "torch_compile/per_step": Form(loop(torch.compile(step))),
        "torch_graph/per_step": Form(loop(step), recorded=True),
        "gru/torch": Form(Gru()),
    },
    "cumprod_scan": {
        "torch_eager/plain": Form(lambda gamma: torch.cumprod(gamma, 2)),
        "torch_compile/plain": Form(torch.compile(lambda gamma: torch.cumprod(gamma, 2))),
    },
}
