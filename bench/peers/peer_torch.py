"""Ops in PyTorch, eager and compiled, as worker.py times them."""

import torch

import attention_torch
import bf16_torch
import gated_delta_rule_torch
import linear_attention_torch
import mm_rec_torch
import quant_torch
import scan_torch
import ssd_torch
import transformer_torch
from common import OUTPUTS, host_clock, read_tensors

FORMS = {
    "selective_scan": scan_torch.FORMS,
    "ssd": ssd_torch.FORMS,
    "gated_delta_rule": gated_delta_rule_torch.FORMS,
    "linear_attention": linear_attention_torch.FORMS,
    "gla": linear_attention_torch.FORMS_BY_KEY,
    **attention_torch.FORMS,
    **transformer_torch.FORMS,
    **mm_rec_torch.FORMS,
    **quant_torch.FORMS,
}
for op, forms in bf16_torch.FORMS.items():
    FORMS[op] = FORMS.get(op, {}) | forms
# NumPy has no bf16.
RESULTS = {torch.bfloat16: torch.float32}


class Recorded:
    """A call as one CUDA graph, recorded at the first call."""

    def __init__(self, call):
        self.call = call
        self.graph = None

    def __call__(self):
        if self.graph is None:
            self.record()
        self.graph.replay()
        return self.results

    def record(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.call()  # compiles and tunes, which cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self.call()


def prepare(name, op, file, device, threads):
    """Returns the call to time and a way to read its results."""
    inputs = read_tensors(file)
    torch.set_num_threads(threads)
    form = FORMS[op][name]
    given = {
        k: torch.from_numpy(v).to(device, form.dtype) for k, v in form.turned(inputs).items()
    }
    output = OUTPUTS.get(op, "y")
    dy = given.pop(f"d{output}", None)

    def call():
        with torch.inference_mode():
            return {output: form.call(**given)}

    def call_with_gradient():
        leaves = {k: v.detach().requires_grad_() for k, v in given.items()}
        y = form.call(**leaves)
        # What a limit does not read has no gradient, and it may have weights of its own.
        of = [*leaves.values(), *getattr(form.call, "parameters", list)()]
        gradients = torch.autograd.grad(y, of, dy, allow_unused=True)
        named = zip([output, *(f"d{k}" for k in leaves)], [y, *gradients])
        return {name: value for name, value in named if value is not None}

    def read(results):
        here = {k: v.detach().cpu() for k, v in results.items()}
        wide = {k: v.to(RESULTS.get(v.dtype, v.dtype)) for k, v in here.items()}
        return form.turned({k: v.numpy() for k, v in wide.items()})

    timed = call if dy is None else call_with_gradient
    return Recorded(timed) if form.recorded else timed, read


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
