"""Products of ggml with quantized weights, as worker.py times them.

`plain` keeps the weights in the format's own order, `repacked` in whatever order the CPU's
backend likes best.
"""

import ctypes
from itertools import chain

import ggml
import numpy as np

from common import host_clock, read_tensors

TYPES = {
    "matmul_q8_q8": ggml.GGML_TYPE_Q8_0,
    "matmul_q8_q4": ggml.GGML_TYPE_Q4_0,
    "matmul_i8_ternary": ggml.GGML_TYPE_TQ2_0,
}
clock = host_clock


@ggml.ggml_log_callback
def silent(_level, _text, _data):
    """It tells of every tensor that it repacks."""


ggml.ggml_log_set(silent, None)


def weights(op, inputs):
    """The bytes of the weights; ternary ones are read from floats."""
    if op != "matmul_i8_ternary":
        return inputs["w"]
    read = np.ascontiguousarray(inputs["read"])
    rows, width = read.shape
    to = np.empty(rows * ggml.ggml_row_size(TYPES[op], width), np.uint8)
    given = read.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ggml.ggml_quantize_chunk(TYPES[op], given, to.ctypes.data, 0, rows, width, None)
    return to


def buffer_types(backend):
    """Where tensors may lie, the order that the backend likes best first."""
    device = ggml.ggml_backend_get_device(backend)
    registry = ggml.ggml_backend_dev_backend_reg(device)
    find = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    list_of = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(find)
    extra = list_of(device)
    for place in range(16):
        if not extra[place]:
            return
        yield extra[place]


def context():
    return ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 20, mem_buffer=None, no_alloc=True))


def allocate(backend, op, name, shape):
    """A tensor for weights: in the first place that takes them."""
    own = ggml.ggml_backend_get_default_buffer_type(backend)
    places = chain(buffer_types(backend), [own]) if name == "ggml/repacked" else [own]
    for place in places:
        inside = context()
        tensor = ggml.ggml_new_tensor_2d(inside, TYPES[op], *reversed(shape))
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(inside, place)
        if buffer and (place == own or tensor.contents.extra):
            return tensor
    raise SystemExit("There is no place for the weights.")


def prepare(name, op, file, device, threads):
    """Returns the call to time and a way to read its results."""
    inputs = read_tensors(file)
    x = np.ascontiguousarray(inputs["x"])
    shape = inputs["read"].shape
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, threads)

    w = allocate(backend, op, name, shape)
    data = np.ascontiguousarray(weights(op, inputs))
    ggml.ggml_backend_tensor_set(w, data.ctypes.data, 0, data.nbytes)
    inside = context()
    given = ggml.ggml_new_tensor_2d(inside, ggml.GGML_TYPE_F32, *reversed(x.shape))
    product = ggml.ggml_mul_mat(inside, w, given)
    graph = ggml.ggml_new_graph(inside)
    ggml.ggml_build_forward_expand(graph, product)
    ggml.ggml_backend_alloc_ctx_tensors(inside, backend)
    ggml.ggml_backend_tensor_set(given, x.ctypes.data, 0, x.nbytes)

    def read(_):
        y = np.empty((x.shape[0], shape[0]), np.float32)
        ggml.ggml_backend_tensor_get(product, y.ctypes.data, 0, y.nbytes)
        return {"y": y}

    return lambda: ggml.ggml_backend_graph_compute(backend, graph), read
