"""Ops in PyTorch, eager and compiled, as worker.py times them."""

import torch

import scan_torch
import transformer_torch
from common import host_clock, read_tensors

FORMS = {"selective_scan": scan_torch.FORMS, **transformer_torch.FORMS}


def prepare(name, op, file, device, threads):
    """Returns the call to time and a way to read its results."""
    inputs = read_tensors(file)
    torch.set_num_threads(threads)
    form = FORMS[op][name]
    given = {k: torch.from_numpy(v).to(device) for k, v in form.turned(inputs).items()}
    dy = given.pop("dy", None)

    def call():
        with torch.inference_mode():
            return {"y": form.call(**given)}

    def call_with_gradient():
        leaves = {k: v.detach().requires_grad_() for k, v in given.items()}
        y = form.call(**leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        return dict(zip(["y", *(f"d{k}" for k in leaves)], [y, *gradients]))

    def read(results):
        return form.turned({k: v.detach().cpu().numpy() for k, v in results.items()})

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
