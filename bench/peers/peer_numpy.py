"""Ops in NumPy, as worker.py times them."""

import quant_numpy
import transformer_numpy
from common import OUTPUTS, host_clock, read_tensors

FORMS = {**transformer_numpy.FORMS, **quant_numpy.FORMS}

clock = host_clock


def prepare(name, op, file, device, threads):
    """Returns the call to time and a way to read its results.

    The libraries under NumPy read their number of threads from the environment.
    """
    inputs = read_tensors(file)
    form = FORMS[op][name]
    given = form.turned(inputs)

    def call():
        result = form.call(**given)
        return result if isinstance(result, dict) else {OUTPUTS.get(op, "y"): result}

    return call, form.turned
