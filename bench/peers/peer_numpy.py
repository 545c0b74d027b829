"""Ops in NumPy, as worker.py times them."""

from common import host_clock, read_tensors
from transformer_numpy import FORMS

clock = host_clock


def prepare(name, op, file, device, threads):
    """Returns the call to time and a way to read its results.

    The libraries under NumPy read their number of threads from the environment.
    """
    inputs = read_tensors(file)
    form = FORMS[op][name]
    given = form.turned(inputs)
    return lambda: {"y": form.call(**given)}, form.turned
