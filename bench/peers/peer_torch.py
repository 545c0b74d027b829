"""The selective scan in PyTorch: eager, with a compiled step, mamba-ssm's kernel."""

import time

import torch


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


VARIANTS = {
    "torch_eager/mamba_ref": mamba_ref,
    "torch_eager/per_step": loop(step),
    "torch_compile/per_step": loop(torch.compile(step)),
    "mamba_ssm/selective_scan_fn": mamba_ssm,
}
CHANNEL_FIRST = (mamba_ref, mamba_ssm)


def prepare(name, inputs, device, threads):
    """Returns the call to time and a way to read its results.

    Those that want channels first get them so, untimed.
    """
    torch.set_num_threads(threads)
    scan = VARIANTS[name]
    swap = (lambda v: v.transpose(1, 2)) if scan in CHANNEL_FIRST else (lambda v: v)
    given = {k: torch.from_numpy(v).to(device) for k, v in inputs.items()}
    given = {k: v if k == "A" else swap(v).contiguous() for k, v in given.items()}
    dy = given.pop("dy", None)

    def call():
        with torch.inference_mode():
            return {"y": scan(**given)}

    def call_with_gradient():
        leaves = {k: v.detach().requires_grad_() for k, v in given.items()}
        y = scan(**leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        return dict(zip(["y", *(f"d{k}" for k in leaves)], [y, *gradients]))

    def read(results):
        back = {k: v if k == "dA" else swap(v) for k, v in results.items()}
        return {k: v.detach().cpu().numpy() for k, v in back.items()}

    return call if dy is None else call_with_gradient, read


def clock(call, device):
    """(milliseconds by the device's clock, by the host's)."""
    if device == "cpu":
        return host_clock(call)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def marked():
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()

    host_ms = host_clock(marked)[1]
    return first.elapsed_time(last), host_ms


def host_clock(call):
    start = time.perf_counter()
    call()
    ms = (time.perf_counter() - start) * 1e3
    return ms, ms
