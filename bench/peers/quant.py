"""Dense layers with weights in ggml's Q8_0 and Q4_0: their inputs, float64 truths and workloads."""

import numpy as np

from common import Op, Workload, write_tensors

BLOCK = 32
LAST_CACHE = 1 << 28  # more than the largest that machines here have


def q8(x):
    """Scales as they are stored, and integers."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    v = blocks * np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    return d.astype(np.float16), (np.sign(v) * np.floor(np.abs(v) + np.float32(0.5))).astype(np.int8)


def q4(x):
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    at = np.abs(blocks).argmax(-1, keepdims=True)
    d = np.take_along_axis(blocks, at, -1) / np.float32(-8)
    v = blocks * np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    return d.astype(np.float16), np.minimum(15, (v + np.float32(8.5)).astype(np.int8)).astype(np.uint8)


def as_bytes(d, q):
    if q.dtype == np.uint8:
        q = q[..., : BLOCK // 2] | q[..., BLOCK // 2 :] << 4
    blocks = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=-1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def values(d, q):
    integers = q.astype(np.float64) - (8 if q.dtype == np.uint8 else 0)
    return (d.astype(np.float64) * integers).reshape(*q.shape[:-2], -1)


def inputs(quantize):
    def make(random, rows, width):
        w = quantize(random.standard_normal((width, width)) / np.sqrt(width))
        x = random.standard_normal((rows, width))
        # Beside the bytes what they are read as, for who multiplies floats.
        return dict(x=x, w=as_bytes(*w), read=values(*w))

    return make


def truth(_file, tensors):
    return dict(y=values(*q8(tensors["x"])) @ tensors["read"].astype(np.float64).T)


def write(folder, tensors, _sizes):
    file = folder / "inputs.safetensors"
    write_tensors(file, tensors | dict(w=tensors["w"].astype(np.uint8)))
    return file


def moves(tensors):
    return int(tensors["w"].size)


def op(name, quantize, **more):
    # What is not quantized is as far off as quantized rows are.
    return Op(name, inputs(quantize), truth, ours=name, write=write, rtol=2e-2, moves=moves, **more)


def workloads(name, quantize, bits):
    for rows in (1, 32):
        sizes = dict(rows=rows, width=4096)
        yield Workload(f"{name}-{rows}x4096", op(name, quantize), sizes)
        copies = int(2 * LAST_CACHE / (bits / 8 * 4096**2)) + 1
        yield Workload(f"{name}-{rows}x4096-cold", op(name, quantize, copies=copies), sizes)


WORKLOADS = (*workloads("matmul_q8_q8", q8, 8.5), *workloads("matmul_q8_q4", q4, 4.5))
