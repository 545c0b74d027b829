#!/usr/bin/env python3
"""Times of Sidewinder's custom calls in JAX beside XLA's own programs, in one run.

    cargo build --release -p sidewinder_xla --example handlers        (in native/)
    python3 bench/xla.py native/target/release/examples/libhandlers.so cpu|gpu RESULT.json

The selective scan and its gradient beside `lax.scan`, `associative_scan` and (on GPUs) a Triton kernel of Pallas, a small
call by itself, and a training step of four Mamba layers. Medians; a peer that cannot run is in the file with its reason.
Needs jax and numpy.
"""

import json
import pathlib
import platform
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path += [str(ROOT / "native" / "xla" / "python"), str(ROOT / "bench" / "peers")]

import jax
import jax.numpy as jnp
import scan_jax
import sidewinder_jax
from sidewinder_jax import call, op

SCANS = [(32, 60, 512, 16), (8, 2048, 2048, 16), (1, 2048, 1536, 16)]
ROUNDS, AT_LEAST = 5, 0.4
REPEATS = {"cpu": 1, "gpu": 10}

## Scans


def sidewinder_scan(x, dt, a, b, c):
    return op("selective_scan", lambda inputs: {"y": inputs["x"]})({"x": x, "dt": dt, "A": a, "B": b, "C": c})["y"]


def in_f32(scan):
    """The scan in the arithmetic of the kernels, whatever its inputs' types are."""
    return lambda x, *others: scan(*(t.astype(jnp.float32) for t in (x, *others))).astype(x.dtype)


loop_scan, associative_scan = in_f32(scan_jax.scan_per_step), in_f32(scan_jax.associative_scan)


def pallas_scan(x, dt, a, b, c):
    """One program of Triton for 64 channels of a batch, with its state in registers; forward only."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (batch, length, channels), states, block = x.shape, a.shape[1], 64

    def kernel(x, dt, a, b, c, y):
        decay = a[...]

        def step(t, h):
            now = dt[0, t, :]
            h = jnp.exp(now[:, None] * decay) * h + (now * x[0, t, :])[:, None] * b[0, t, :][None, :]
            y[0, t, :] = jnp.sum(h * c[0, t, :][None, :], axis=1)
            return h

        jax.lax.fori_loop(0, length, step, jnp.zeros((block, states), jnp.float32))

    wide = pl.BlockSpec((1, length, block), lambda i, j: (i, 0, j))
    narrow = pl.BlockSpec((1, length, states), lambda i, j: (i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(batch, channels // block),
        in_specs=[wide, wide, pl.BlockSpec((block, states), lambda i, j: (j, 0)), narrow, narrow],
        out_specs=wide,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=2),
    )(x, dt, a, b, c)


WAYS = {"sidewinder": sidewinder_scan, "lax.scan": loop_scan, "associative_scan": associative_scan}


def scan_inputs(batch, length, channels, states):
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (batch, length, channels))
    dt = jax.random.uniform(keys[1], x.shape, minval=0.001, maxval=0.1)
    a = -jax.random.uniform(keys[2], (channels, states), minval=0.5, maxval=2.0)
    return x, dt, a, *(jax.random.normal(key, (batch, length, states)) for key in keys[3:])


def repeated(fun):
    """Several runs in one program on GPUs, each on what the one before gives, so that Python's part is not measured."""

    def run(*args):
        for _ in range(REPEATS[jax.default_backend()]):
            results = jax.tree.leaves(fun(*args))
            args = *results, *args[len(results) :]
        return args

    return run


def scans(sizes):
    args, label = scan_inputs(*sizes), " x ".join(map(str, sizes))
    gradient = lambda scan: jax.grad(lambda *args: jnp.sum(jnp.sin(scan(*args))), argnums=range(5))
    forward = WAYS | ({"pallas (Triton)": pallas_scan} if jax.default_backend() == "gpu" else {})
    backward = {way: gradient(scan) for way, scan in WAYS.items()}
    for kind, ways in (("forward", forward), ("forward and gradient", backward)):
        for row in compared(f"selective_scan {label}, {kind}", ways, args, timed=repeated):
            yield {key: of_one(value) if key == "median_ms" else value for key, value in row.items()}


def of_one(milliseconds):
    return round(milliseconds / REPEATS[jax.default_backend()], 5)


## A call by itself


def chains(calls=200):
    """Chains of calls that take next to no time themselves: what a call costs in a program."""
    x = jnp.ones((8, 64))
    relu = lambda graph: lambda x: call("activations", {"x": x}, {"y": x}, graph=graph, fn="relu")["y"]
    own = lambda x: jax.lax.optimization_barrier(jnp.maximum(x, 0))

    def chain(step):
        def run(x):
            for _ in range(calls):
                x = step(x)
            return x

        return run

    ways = {"sidewinder": relu(False), "sidewinder, for command buffers": relu(True), "XLA's own relu": own}
    for row in compared(f"a chain of {calls} small calls", {w: chain(f) for w, f in ways.items()}, (x,)):
        yield row | ({"us_per_call": row["median_ms"] * 1000 / calls} if "median_ms" in row else {})


## A training step

LAYERS, WIDTH, INNER, STATES, RANK, TAPS, BATCH, LENGTH = 4, 512, 1024, 16, 32, 4, 32, 256


def weights(dtype):
    def layer(key):
        keys = jax.random.split(key, 6)
        matrix = lambda i, rows, columns: (jax.random.normal(keys[i], (rows, columns)) * rows**-0.5).astype(dtype)
        return {
            "norm": jnp.ones(WIDTH),
            "in": matrix(0, WIDTH, 2 * INNER),
            "taps": jax.random.normal(keys[1], (INNER, TAPS)) * TAPS**-0.5,
            "bias": jnp.zeros(INNER),
            "x": matrix(2, INNER, RANK + 2 * STATES),
            "dt": matrix(3, RANK, INNER),
            "dt_bias": jnp.full(INNER, -4.0),
            "A": jnp.log(jnp.tile(jnp.arange(1.0, STATES + 1), (INNER, 1))),
            "D": jnp.ones(INNER),
            "out": matrix(4, INNER, WIDTH),
        }

    return [layer(key) for key in jax.random.split(jax.random.key(1), LAYERS)]


class Kernels:
    """A layer's parts as custom calls."""

    @staticmethod
    def norm(x, w):
        return op("rms_norm", lambda inputs: {"y": inputs["x"]}, eps=1e-5)({"x": x, "w": w})["y"]

    @staticmethod
    def conv(x, w, bias):
        conv = op("causal_conv1d", lambda inputs: {"y": inputs["x"]}, activation="silu")
        return conv({"x": x, "w": w, "bias": bias})["y"]

    @staticmethod
    def scan(x, dt, a, b, c, d, z, dt_bias):
        inputs = {"x": x, "dt": dt, "A": a, "B": b, "C": c, "D": d, "z": z, "dt_bias": dt_bias}
        return op("selective_scan", lambda inputs: {"y": inputs["x"]}, dt_softplus=True)(inputs)["y"]


class Plain:
    """The work as XLA's own operations."""

    plain_scan = staticmethod(loop_scan)

    @staticmethod
    def norm(x, w):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * w).astype(x.dtype)

    @staticmethod
    def conv(x, w, bias):
        length, padded = x.shape[1], jnp.pad(x, ((0, 0), (TAPS - 1, 0), (0, 0))).astype(jnp.float32)
        sums = sum(padded[:, tap : tap + length] * w[:, tap] for tap in range(TAPS))
        return jax.nn.silu(sums + bias).astype(x.dtype)

    @classmethod
    def scan(cls, x, dt, a, b, c, d, z, dt_bias):
        dt = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        y = cls.plain_scan(x.astype(jnp.float32), dt, a, b, c) + d * x
        return (y * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)


class Associative(Plain):
    plain_scan = staticmethod(associative_scan)


def mamba(parts, w, x):
    xz = parts.norm(x, w["norm"]) @ w["in"]
    u, z = xz[..., :INNER], xz[..., INNER:]
    u = parts.conv(u, w["taps"], w["bias"])
    projected = u @ w["x"]
    dt, b, c = jnp.split(projected, [RANK, RANK + STATES], axis=-1)
    return x + parts.scan(u, dt @ w["dt"], -jnp.exp(w["A"]), b, c, w["D"], z, w["dt_bias"]) @ w["out"]


def training_step(parts):
    def loss(weights, x, target):
        for layer in weights:
            x = mamba(parts, layer, x)
        return jnp.mean((x - target).astype(jnp.float32) ** 2)

    def step(weights, x, target):
        value, gradients = jax.value_and_grad(loss)(weights, x, target)
        return value, jax.tree.map(lambda w, g: w - (1e-3 * g).astype(w.dtype), weights, gradients)

    return step


def training_steps(batch=BATCH):
    ways = {"sidewinder": Kernels, "lax.scan": Plain, "associative_scan": Associative}
    for dtype in (jnp.float32, jnp.bfloat16):
        x, target = (jax.random.normal(jax.random.key(k), (batch, LENGTH, WIDTH), dtype) for k in (2, 3))
        what = f"training step of {LAYERS} Mamba layers, {batch} x {LENGTH} x {WIDTH}, {jnp.dtype(dtype).name}"
        steps = {way: training_step(parts) for way, parts in ways.items()}
        yield from compared(what, steps, (weights(dtype), x, target), tolerance=2e-2)


## Times


def compared(what, ways, args, tolerance=1e-3, timed=lambda fun: fun):
    """Rows of the ways' medians, of what `timed` makes of them. They take turns, and must agree with the first."""
    runs, expected, times = {}, None, {}
    for way, fun in ways.items():
        try:
            result = jax.block_until_ready(jax.jit(fun)(*args))
            run = jax.jit(timed(fun))
            jax.block_until_ready(run(*args))
        except Exception as error:
            yield {"what": what, "way": way, "error": str(error).strip().splitlines()[0][:200]}
            continue
        runs[way], expected = run, result if expected is None else expected
        if off := worst(result, expected, tolerance):
            raise AssertionError(f"{what}, {way}: {off} off")
    for _ in range(ROUNDS):
        for way, run in runs.items():
            times.setdefault(way, []).extend(milliseconds(run, args))
    for way, found in times.items():
        yield {"what": what, "way": way, "median_ms": round(statistics.median(found), 5)}


def worst(a, b, tolerance):
    """How far results are apart, by the largest of each, if beyond the tolerance."""
    off = lambda a, b: float(jnp.max(jnp.abs(a - b).astype(jnp.float32)) / (jnp.max(jnp.abs(b)).astype(jnp.float32) + 1e-6))
    largest = max(jax.tree.leaves(jax.tree.map(off, a, b)))
    return largest if not largest <= tolerance else None


def milliseconds(run, args):
    """Times of calls, several in a row where they are short, so that the device never waits for Python."""
    once = seconds(run, args, 1)
    inner = max(1, min(50, int(0.02 / once)))
    outer = max(2, int(AT_LEAST / (once * inner)))
    return [seconds(run, args, inner) * 1000 for _ in range(min(outer, 20))]


def seconds(run, args, calls):
    start = time.perf_counter()
    jax.block_until_ready([run(*args) for _ in range(calls)])
    return (time.perf_counter() - start) / calls


def processor():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    return text.split("model name")[1].split(":")[1].splitlines()[0].strip()


def main(library, platform_, result):
    gpu = platform_ == "gpu"
    jax.config.update("jax_platforms", "cuda" if gpu else "cpu")
    sidewinder_jax.register(library)
    device = jax.devices()[0].device_kind if gpu else processor()
    about = {"device": device, "jax": jax.__version__, "python": platform.python_version()}
    rows = []
    sizes = SCANS if gpu else [SCANS[0], SCANS[2]]
    parts = [lambda size=size: scans(size) for size in sizes] + [chains, training_steps if gpu else lambda: training_steps(1)]
    for part in parts:
        for row in part():
            print(row, flush=True)
            rows.append(json.dumps(row))
    lines = ",\n    ".join(rows)
    text = f'{{\n  "machine": {json.dumps(about)},\n  "rows": [\n    {lines}\n  ]\n}}\n'
    pathlib.Path(result).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
