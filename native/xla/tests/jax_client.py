#!/usr/bin/env python3
"""The handlers under JAX, another client of XLA: every op against the reference values, then the time of a scan.

    cargo build --release -p sidewinder_xla --example handlers        (in native/)
    python3 xla/tests/jax_client.py target/release/examples/libhandlers.so cpu|gpu [RESULT.json]

Needs jax and numpy. Fails if a value is wrong or a wrong call does not raise.
"""

import ctypes
import json
import pathlib
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN = pathlib.Path(__file__).parents[3] / "test" / "golden"
TYPES = {"BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64}
TYPES |= {f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)}


def register(library):
    handlers = ctypes.CDLL(library)
    for platform, symbol in [("cpu", "sidewinder_xla_host"), ("CUDA", "sidewinder_xla_cuda")]:
        capsule = jax.ffi.pycapsule(getattr(handlers, symbol))
        jax.ffi.register_ffi_target("sidewinder_op", capsule, platform=platform)


def attribute(value):
    if isinstance(value, bool) or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return np.float64(value)
    return np.array(value, np.float64)


def call(op, inputs, outputs, options):
    """Outputs by name of a custom call; `outputs` gives their shapes and types."""
    names = list(outputs)
    specs = [jax.ShapeDtypeStruct(*outputs[name]) for name in names]
    attributes = {key: attribute(value) for key, value in options.items() if value is not None}
    target = jax.ffi.ffi_call("sidewinder_op", specs)
    fun = lambda *operands: target(
        *operands, op=op, inputs=",".join(inputs), outputs=",".join(names), **attributes
    )
    results = jax.jit(fun)(*[inputs[name] for name in inputs])
    return dict(zip(names, [np.asarray(result) for result in results]))


def called(op, inputs, outputs, options):
    """The same for the inputs that the op takes and the outputs that it gives, of those that there are."""
    inputs, outputs = dict(inputs), dict(outputs)
    for _ in range(4):
        try:
            return call(op, inputs, outputs, options)
        except Exception as error:
            text = str(error)
            if known := re.search(r"expected one of ([\w, ]+), got", text):
                known = known[1].split(", ")
                inputs = {name: t for name, t in inputs.items() if name in known}
            elif given := re.search(r"results: expected (.*), got ", text):
                given = re.findall(r"(\w+): ", given[1])
                outputs = {name: o for name, o in outputs.items() if name in given}
            else:
                raise
    raise RuntimeError(f"{op}: no call was right")


def read(file):
    bytes_ = file.read_bytes()
    length = int.from_bytes(bytes_[:8], "little")
    header, data = json.loads(bytes_[8 : 8 + length]), bytes_[8 + length :]
    return {
        name: np.frombuffer(data[slice(*about["data_offsets"])], TYPES[about["dtype"]]).reshape(about["shape"])
        for name, about in header.items()
        if name != "__metadata__"
    }


def wrong(name, got, expected, about):
    expected = expected.astype(np.float64)
    got = np.asarray(got, np.float64).reshape(expected.shape)
    infinite = np.isinf(expected)
    with np.errstate(invalid="ignore"):
        off = np.abs(got - expected) - about["atol"] - about["rtol"] * np.abs(expected)
    fine = np.where(infinite, got == expected, off <= 0)
    return [] if fine.all() else [f"{name}: {np.nanmax(np.where(infinite, 0, off))} too far off"]


def check_case(op, case, tensors):
    name = case["name"]
    given = {i: tensors[f"{name}.{i}"] for i in case["inputs"]}
    expected = {o: (tensors[f"{name}.out.{o}"], about) for o, about in case["outputs"].items() if not about.get("exact")}
    inputs = {i: t for i, t in given.items() if not (i[0] == "d" and i[1:] in expected)}
    gradients = {o for o in expected if o[0] == "d" and o[1:] in inputs}
    spec = lambda t: (t.shape, np.float32)
    forward = {o: spec(t) for o, (t, _) in expected.items() if o not in gradients}
    results = called(op, inputs, forward, case["attrs"])
    if gradients:
        saved = {o: t for o, t in results.items() if o not in inputs}
        cotangents = {i: t for i, t in given.items() if i not in inputs}
        wanted = {o: spec(expected[o][0]) for o in sorted(gradients)}
        results |= called(f"{op}_backward", inputs | saved | cotangents, wanted, case["attrs"])
    found = [w for o, t in results.items() for w in wrong(f"{op}/{name}.{o}", t, *expected[o])]
    return len(results), found


def check():
    manifest = json.loads((GOLDEN / "manifest.json").read_text())["ops"]
    values, faults, ops = 0, [], []
    for op, about in manifest.items():
        tensors = read(GOLDEN / about["file"])
        for case in about["cases"]:
            try:
                count, found = check_case(op, case, tensors)
            except Exception as error:
                if "the name of an op" in str(error):
                    break
                count, found = 0, [f"{op}/{case['name']}: {str(error)[:300]}"]
            values, faults = values + count, faults + found
        else:
            ops.append(op)
    print(f"{len(ops)} ops, {values} results compared, {len(faults)} wrong")
    print("\n".join(faults[:40]))
    return faults


def check_refusals():
    x = np.ones((2, 2), np.float32)
    y = {"y": (x.shape, x.dtype)}
    for op, inputs, outputs, options in [
        ("none", {"x": x}, y, {}),
        ("activations", {"x": x}, y, {"fn": "none"}),
        ("activations", {"x": x}, {"y": ((3,), x.dtype)}, {"fn": "relu"}),
        ("activations", {"x": x}, y, {"fn": "relu", "wrong": 1}),
    ]:
        try:
            call(op, inputs, outputs, options)
        except Exception as error:
            assert "expected" in str(error), error
        else:
            raise AssertionError(f"{op} {options} was taken")
    assert (call("activations", {"x": x}, y, {"fn": "relu"})["y"] == x).all()


def scan(x, dt, a, b, c):
    """The selective scan as XLA has it."""

    def step(h, t):
        x, dt, b, c = t
        h = jnp.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    start = jnp.zeros((x.shape[0], x.shape[2], a.shape[1]), x.dtype)
    _, y = jax.lax.scan(step, start, tuple(jnp.swapaxes(t, 0, 1) for t in (x, dt, b, c)))
    return jnp.swapaxes(y, 0, 1)


def milliseconds(fun, args, inner=20, outer=15):
    jax.block_until_ready(fun(*args))
    times = []
    for _ in range(outer):
        start = time.perf_counter()
        jax.block_until_ready([fun(*args) for _ in range(inner)])
        times.append((time.perf_counter() - start) / inner * 1000)
    return statistics.median(times)


def measure(sizes):
    batch, length, channels, states = sizes
    key = jax.random.split(jax.random.key(0), 5)
    x, dt = (jax.random.uniform(k, (batch, length, channels), minval=0.001, maxval=0.1) for k in key[:2])
    a = -jax.random.uniform(key[2], (channels, states), minval=0.5, maxval=2.0)
    b, c = (jax.random.normal(k, (batch, length, states)) for k in key[3:])
    args = (x, dt, a, b, c)
    target = jax.ffi.ffi_call("sidewinder_op", jax.ShapeDtypeStruct(x.shape, x.dtype))
    ours = jax.jit(lambda *args: target(*args, op="selective_scan", inputs="x,dt,A,B,C", outputs="y"))
    theirs = jax.jit(scan)
    off = float(jnp.max(jnp.abs(ours(*args) - theirs(*args))))
    assert off < 1e-4, off
    times = {"custom_call_ms": milliseconds(ours, args), "xla_loop_ms": milliseconds(theirs, args)}
    return {"sizes": sizes, **times, "ratio": times["xla_loop_ms"] / times["custom_call_ms"]}


def main(library, platform, *result):
    jax.config.update("jax_platforms", "cuda" if platform == "gpu" else "cpu")
    register(library)
    faults = check()
    check_refusals()
    timed = [measure(sizes) for sizes in [(32, 60, 512, 16), (8, 2048, 1536, 16)]]
    device = jax.devices()[0]
    about = {"device": device.device_kind, "jax": jax.__version__, "times": timed}
    print(json.dumps(about, indent=1))
    for file in result:
        pathlib.Path(file).write_text(json.dumps(about, indent=1) + "\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
