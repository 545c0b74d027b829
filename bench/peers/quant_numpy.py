"""What quantized weights and ternary numbers are used in place of, in NumPy."""

import numpy as np

from common import Form


def packed(cells):
    return np.packbits(cells, axis=-1, bitorder="little")


def spread(plane):
    return np.unpackbits(plane, axis=-1, bitorder="little").view(np.int8)


def net(x, read1, b1, read2, b2, **_planes):
    h = np.maximum(np.sign(x) @ read1.T + b1, 0)
    return np.sign(h) @ read2.T + b2


DENSE = {"numpy/f32": Form(lambda x, read, **_: x @ read.T)}
FORMS = {
    "matmul_q8_q8": DENSE,
    "matmul_i8_ternary": DENSE,
    "ternary_encode": {
        "numpy/packbits": Form(
            lambda values: {"plane0": packed(values > 0), "plane1": packed(values < 0)}
        )
    },
    "ternary_decode": {
        "numpy/unpackbits": Form(
            lambda plane0, plane1: {"values": spread(plane0) - spread(plane1)}
        )
    },
    "simple_rotor_net": {"numpy/f32": Form(net)},
}
