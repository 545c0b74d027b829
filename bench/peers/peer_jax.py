"""Ops in JAX, all jitted, as worker.py times them."""

import jax
import numpy as np

import mm_rec_jax
import scan_jax
import transformer_jax
from common import OUTPUTS, Form, host_clock, read_tensors

jax.config.update("jax_default_matmul_precision", "highest")  # on GPUs: no TF32

FORMS = {
    "selective_scan": {name: Form(scan) for name, scan in scan_jax.FORMS.items()},
    **transformer_jax.FORMS,
    **mm_rec_jax.FORMS,
}
clock = host_clock


def with_gradient(call, output):
    """The op that gives the gradients of its inputs as well."""

    def both(**given):
        dy = given.pop(f"d{output}")
        y, pull_back = jax.vjp(lambda given: call(**given), given)
        (gradients,) = pull_back(dy)
        return {output: y, **{f"d{name}": v for name, v in gradients.items()}}

    return both


def prepare(name, op, file, device, threads):
    """Returns the call to time and a way to read its results.

    XLA takes as many threads as the process has cores, so `threads` is not needed.
    """
    inputs = read_tensors(file)
    form, to = FORMS[op][name], jax.devices(device)[0]
    given = {k: jax.device_put(v, to) for k, v in form.turned(inputs).items()}
    output = OUTPUTS.get(op, "y")
    alone = lambda **given: {output: form.call(**given)}
    both = with_gradient(form.call, output)
    call = jax.jit(both if f"d{output}" in inputs else alone)
    read = lambda results: form.turned({k: np.asarray(v) for k, v in results.items()})
    return lambda: jax.block_until_ready(call(**given)), read
