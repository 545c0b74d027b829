"""The scan of Mamba-2 in PyTorch: chunks as in the paper's listing, and mamba-ssm's Triton kernels."""

import torch

from common import Form


def segment_sums(x):
    """Sums of x over (j, i] for j <= i, else -inf."""
    sums = x.cumsum(-1)
    mask = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return (sums[..., None] - sums[..., None, :]).masked_fill(~mask, -torch.inf)


def chunked(x, dt, A, B, C, chunk=64):
    """Listing 1 of the paper; all heads have the same B and C."""
    batch, length = x.shape[:2]
    x, dA = x * dt[..., None], dt * A
    x, B, C = (v.reshape(batch, length // chunk, chunk, *v.shape[2:]) for v in (x, B, C))
    dA = dA.reshape(batch, length // chunk, chunk, -1).permute(0, 3, 1, 2)  # [B, H, C, T]
    sums = dA.cumsum(-1)
    within = torch.exp(segment_sums(dA))
    B, C = B[:, :, :, 0], C[:, :, :, 0]
    y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", C, B, within, x)
    states = torch.einsum("bcln,bhcl,bclhp->bchpn", B, torch.exp(sums[..., -1:] - sums), x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    between = torch.exp(segment_sums(torch.nn.functional.pad(sums[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
    y = y + torch.einsum("bcln,bchpn,bhcl->bclhp", C, states, torch.exp(sums))
    return y.reshape(batch, length, *y.shape[3:])


def triton(chunk):
    def scan(x, dt, A, B, C):
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return mamba_chunk_scan_combined(x, dt, A.float(), B, C, chunk)

    return scan


FORMS = {
    "torch_eager/chunked": Form(chunked),
    "torch_compile/chunked": Form(torch.compile(chunked)),
    "mamba_ssm_triton/chunk128": Form(triton(128), dtype=torch.bfloat16),
    "mamba_ssm_triton/chunk256": Form(triton(256), dtype=torch.bfloat16),
    "mamba_ssm_graph/chunk128": Form(triton(128), dtype=torch.bfloat16, recorded=True),
    "mamba_ssm_graph/chunk256": Form(triton(256), dtype=torch.bfloat16, recorded=True),
}
