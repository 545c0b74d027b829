"""Dense layers with weights in ggml's Q8_0 and Q4_0, and ternary ones: their inputs, float64 truths and workloads."""

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


def blocks(quantize):
    def inputs(random, rows, width):
        w = quantize(random.standard_normal((width, width)) / np.sqrt(width))
        x = random.standard_normal((rows, width))
        # The floats that the bytes stand for, for contenders that multiply floats.
        return dict(x=x, w=as_bytes(*w), read=values(*w))

    return inputs


def planes(cells):
    """Where cells are 1, and where they are -1."""
    return {
        f"plane{at}": np.packbits(cells == sign, axis=-1, bitorder="little")
        for at, sign in enumerate((1, -1))
    }


def cells(random, *shape):
    return random.integers(-1, 2, shape)


def ternary(random, rows, width):
    w, scale = cells(random, width, width), 0.015625
    x = random.standard_normal((rows, width))
    return dict(x=x, **planes(w), w_scale=np.full(1, scale), read=scale * w)


def encoded(random, width):
    return dict(values=cells(random, width))


def decoded(random, width):
    return planes(cells(random, width))


def net(random, rows, widths):
    inputs, hidden, outputs = widths
    given = dict(x=random.standard_normal((rows, inputs)))
    for layer, shape in enumerate(((hidden, inputs), (outputs, hidden)), 1):
        w = cells(random, *shape)
        given |= {f"w{layer}_{name}": plane for name, plane in planes(w).items()}
        given |= {f"b{layer}": random.standard_normal(shape[0]), f"read{layer}": w}
    return given


def bits(plane):
    return np.unpackbits(plane.astype(np.uint8), bitorder="little").astype(np.float64)


def product(_file, tensors):
    return dict(y=values(*q8(tensors["x"])) @ tensors["read"].astype(np.float64).T)


def planes_of_cells(_file, tensors):
    return {name: plane.astype(np.float64) for name, plane in planes(tensors["values"]).items()}


def cells_of_planes(_file, tensors):
    return dict(values=bits(tensors["plane0"]) - bits(tensors["plane1"]))


def logits(_file, tensors):
    given = {name: value.astype(np.float64) for name, value in tensors.items()}
    h = np.sign(given["x"]) @ given["read1"].T + given["b1"]
    return dict(logits=(h > 0) @ given["read2"].T + given["b2"])


def write(folder, tensors, _sizes):
    """Bytes and integers as such: the inputs are floats all of them."""
    file = folder / "inputs.safetensors"
    is_bytes = lambda name: name == "w" or "plane" in name
    whole = {k: v.astype(np.uint8) for k, v in tensors.items() if is_bytes(k)}
    whole |= {k: v.astype(np.int8) for k, v in tensors.items() if k == "values"}
    write_tensors(file, tensors | whole)
    return file


def moves(tensors):
    return sum(int(v.size) for k, v in tensors.items() if k == "w" or "plane" in k)


# What is not quantized is as far off as quantized rows are.
LOSSY = dict(write=write, rtol=2e-2, moves=moves)


def products(name, inputs, bits, width):
    for rows in (1, 32):
        sizes = dict(rows=rows, width=width)
        op = Op(name, inputs, product, ours=name, **LOSSY)
        yield Workload(f"{name}-{rows}x{width}", op, sizes)
        copies = int(2 * LAST_CACHE / (bits / 8 * width**2)) + 1
        yield Workload(f"{name}-{rows}x{width}-cold", op._replace(copies=copies), sizes)


def conversion(name, inputs, truth, options):
    op = Op(name, inputs, truth, ours="convert_ternary", options=options, write=write)
    return Workload(f"{name}-1048576", op, dict(width=1 << 20))


NET = Op("simple_rotor_net", net, logits, ours="simple_rotor_net", write=write)
WORKLOADS = (
    *products("matmul_q8_q8", blocks(q8), 8.5, 4096),
    *products("matmul_q8_q4", blocks(q4), 4.5, 4096),
    *list(products("matmul_i8_ternary", ternary, 2, 2048))[::2],
    conversion("ternary_encode", encoded, planes_of_cells, dict(to="planes")),
    conversion("ternary_decode", decoded, cells_of_planes, dict(to="values", n=1 << 20)),
    Workload("simple_rotor_net-32x512", NET, dict(rows=32, widths=(512, 256, 10))),
)
