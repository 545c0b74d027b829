"""The selective scan in PyTorch: eager, with a compiled step, mamba-ssm's kernel."""

import torch

from common import Form


def mamba_ref(x, dt, A, B, C):
    """As mamba-ssm's selective_scan_ref: channel-first, all factors made first."""
    decay = torch.exp(torch.einsum("bdl,dn->bdln", dt, A))
    added = torch.einsum("bdl,bnl,bdl->bdln", dt, B, x)
    h = A.new_zeros(x.shape[0], *A.shape)
    ys = []
    # Unbound, not indexed: the gradient of an index is a whole tensor of zeros.
    for decay, added, C in zip(decay.unbind(2), added.unbind(2), C.unbind(2)):
        h = decay * h + added
        ys.append(torch.einsum("bdn,bn->bd", h, C))
    return torch.stack(ys, dim=2)


def step(h, x, dt, A, B, C):
    """One time step; the state is [B, N, D], so that vectors run along the channels."""
    h = torch.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[..., None]
    return h, (h * C[..., None]).sum(1)


def loop(step):
    """The scan around `step`: nothing larger than one step is ever stored."""

    def scan(x, dt, A, B, C):
        A = A.T.contiguous()
        h = A.new_zeros(x.shape[0], *A.shape)
        ys = []
        for x, dt, B, C in zip(*(v.unbind(1) for v in (x, dt, B, C))):
            h, y = step(h, x, dt, A, B, C)
            ys.append(y)
        return torch.stack(ys, dim=1)

    return scan


def mamba_ssm(x, dt, A, B, C):
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn(x, dt, A, B, C)


CHANNELS = tuple("x dt B C dy y dx ddt dB dC".split())  # all but A
FORMS = {
    "torch_eager/mamba_ref": Form(mamba_ref, CHANNELS),
    "torch_eager/per_step": Form(loop(step)),
    "torch_compile/per_step": Form(loop(torch.compile(step))),
    "mamba_ssm/selective_scan_fn": Form(mamba_ssm, CHANNELS),
}
