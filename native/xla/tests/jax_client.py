#!/usr/bin/env python3
"""The handlers under JAX, another client of XLA, on its CPU or its GPUs.

    cargo build --release -p sidewinder_xla --example handlers        (in native/)
    python3 xla/tests/jax_client.py target/release/examples/libhandlers.so cpu|gpu [OP ...]

Needs jax and numpy. Every op, or those that are named, against the reference values, in f32 and against itself in f64 in
the other types; then calls inside JAX's transformations, in command buffers, from several threads, and wrong ones. Fails
if a value is wrong or a wrong call does not raise. Memory that is given to results holds NaN before, where JAX has a
pool of it.
"""

import copy
import functools
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")
# Two devices on the CPU; command buffers of as little as one call, and files that tell of one.
DUMPS = tempfile.mkdtemp()
FLAGS = f"""--xla_force_host_platform_device_count=2
    --xla_gpu_graph_min_graph_size=1 --xla_dump_to={DUMPS} --xla_dump_hlo_module_re=jit_in_a_graph"""
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS.split()])
ROOT = pathlib.Path(__file__).parents[3]
sys.path += [str(ROOT / "native" / "xla" / "python"), str(ROOT / "bench" / "peers")]

import jax
import jax.numpy as jnp
import numpy as np
import scan_jax
import sidewinder_jax
from jax.sharding import PartitionSpec as P
from sidewinder_jax import call, op

GOLDEN = ROOT / "test" / "golden"
TYPES = {"BOOL": np.bool_, "F16": np.float16, "F32": np.float32, "F64": np.float64}
TYPES |= {f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)}
OURS = {"pred": "u8", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
# How far results may be from those of the same inputs in f64, in units of the largest of them.
TOLERANCES = {"bfloat16": 0.04, "float16": 0.025}


## Calls by trial: what an op takes and gives, the errors of the handlers tell.


def to_numpy_type(name):
    return jnp.dtype(OURS.get(name) or {"i": "int", "u": "uint"}[name[0]] + name[1:])


@functools.cache
def learned(name, key):
    """What errors have told of an op's calls of some kind: each wrong call takes time to be compiled."""
    return {"inputs": None, "outputs": None, "types": {}, "results": {}}


def called(name, inputs, outputs, options, graph=False):
    """Outputs by name, of those inputs that the op takes, in the types that it takes them in."""
    known = learned(name, " ".join(str(t.dtype) for t in outputs.values()))
    asked = learned(name, f"{options} of {list(inputs)}")
    some = lambda tensors, names: {key: t for key, t in tensors.items() if names is None or key in names}
    typed = lambda kind, key, t: known[kind].get(key, t.dtype)
    for _ in range(len(inputs) + 4):
        # NumPy's casts, for JAX compiles those of each shape.
        given = {key: np.asarray(t).astype(typed("types", key, t)) for key, t in some(inputs, known["inputs"]).items()}
        wanted = some(outputs, asked["outputs"])
        wanted = {key: jax.ShapeDtypeStruct(t.shape, typed("results", key, t)) for key, t in wanted.items()}
        try:
            run = jax.jit(lambda inputs: call(name, inputs, wanted, graph, **options))
            # XLA makes a command buffer after the first run.
            return [jax.block_until_ready(run(given)) for _ in range(3 if graph else 1)][-1]
        except Exception as error:
            text = str(error)
            if names := re.search(r"expected one of ([\w, ]+), got", text):
                known["inputs"] = names[1].split(", ")
            elif one := re.search(r"`?(\w+)`?: expected (b?f\d+|[iu]\d+), got (b?f\d+|[iu]\d+)", text):
                known["types"][one[1]] = to_numpy_type(one[2])
            elif results := re.search(r"results: expected (.*), got ", text):
                types = dict(re.findall(r"(\w+): (\w+) ", results[1]))
                asked["outputs"] = list(types)
                known["results"] |= {key: to_numpy_type(of) for key, of in types.items()}
            else:
                raise
    raise RuntimeError(f"{name}: no call was right")


## Reference values


def read(file):
    bytes_ = file.read_bytes()
    length = int.from_bytes(bytes_[:8], "little")
    header, data = json.loads(bytes_[8 : 8 + length]), bytes_[8 + length :]
    return {
        name: np.frombuffer(data[slice(*about["data_offsets"])], TYPES[about["dtype"]]).reshape(about["shape"])
        for name, about in header.items()
        if name != "__metadata__"
    }


class Case:
    """A case of the reference values: calls of the op and of its gradient."""

    def __init__(self, name, case, tensors):
        label = case["name"]
        self.name, self.label, self.options = name, f"{name}/{label}", case["attrs"]
        given = {i: tensors[f"{label}.{i}"] for i in case["inputs"]}
        compared = {o: about for o, about in case["outputs"].items() if not about.get("exact")}
        self.expected = {o: (tensors[f"{label}.out.{o}"], about) for o, about in compared.items()}
        self.inputs = {i: t for i, t in given.items() if not (i[0] == "d" and i[1:] in compared)}
        self.cotangents = {i: t for i, t in given.items() if i not in self.inputs}
        self.gradients = sorted(o for o in compared if o[0] == "d" and o[1:] in self.inputs)

    def rounded(self, dtype):
        """The case with inputs in f64 that the type holds."""
        dtype = jnp.dtype(dtype)
        narrow = lambda t: t.astype(dtype).astype(np.float64) if t.dtype.kind == "f" else t
        other = copy.copy(self)
        other.inputs = {i: narrow(t) for i, t in self.inputs.items()}
        other.cotangents = {i: narrow(t) for i, t in self.cotangents.items()}
        return other

    def results(self, dtype, graph=False):
        dtype = jnp.dtype(dtype)
        cast = lambda t: t.astype(dtype) if t.dtype.kind == "f" else t
        spec = lambda output: jax.ShapeDtypeStruct(self.expected[output][0].shape, dtype)
        inputs = {i: cast(t) for i, t in self.inputs.items()}
        forward = {o: spec(o) for o in self.expected if o not in self.gradients}
        results = called(self.name, inputs, forward, self.options, graph)
        if self.gradients:
            saved = {o: t for o, t in results.items() if o not in inputs}
            given = inputs | saved | {i: cast(t) for i, t in self.cotangents.items()}
            wanted = {o: spec(o) for o in self.gradients}
            results |= called(f"{self.name}_backward", given, wanted, self.options, graph)
        return {o: np.asarray(t, np.float64) for o, t in results.items()}


def cases(names):
    for name, about in json.loads((GOLDEN / "manifest.json").read_text())["ops"].items():
        if not names or name in names:
            tensors = read(GOLDEN / about["file"])
            for case in about["cases"]:
                yield Case(name, case, tensors)


def off_reference(case, output, got):
    expected, about = case.expected[output]
    expected = expected.astype(np.float64)
    infinite = np.isinf(expected)
    with np.errstate(invalid="ignore"):
        off = np.abs(got.reshape(expected.shape) - expected) - about["atol"] - about["rtol"] * np.abs(expected)
    return not np.where(infinite, got.reshape(expected.shape) == expected, off <= 0).all()


def off_truth(expected, got, dtype):
    """How far the result is off beyond the type's tolerance, or nothing."""
    held = np.abs(expected) <= float(jnp.finfo(dtype).max)
    scale = np.abs(expected[held]).max(initial=1e-3)
    off = np.abs(got[held] - expected[held]).max(initial=0) / scale
    return off if not off <= TOLERANCES[dtype] else None


def has_no_f64(error):
    """Whether an op takes no f64, so that it has nothing to be compared with."""
    return "expected f32, bf16 or f16, got f64" in str(error)


def poison():
    """Fills the pool, whose memory the results are then made in, with NaN."""
    if jax.default_backend() == "gpu" and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform":
        limit = jax.devices()[0].memory_stats()["bytes_limit"]
        jax.block_until_ready(jnp.full(int(limit * 0.9) // 4, jnp.nan, jnp.float32))


def check_case(case):
    """How many results were compared in each type, and which are wrong."""
    counts, faults = dict.fromkeys(["float32", *TOLERANCES], 0), []
    try:
        for output, got in case.results(jnp.float32).items():
            counts["float32"] += 1
            faults += [f"{case.label}.{output}"] if off_reference(case, output, got) else []
    except Exception as error:
        return counts, [] if "the name of an op" in str(error) else [f"{case.label}: {str(error)[:300]}"]
    for dtype in TOLERANCES:
        if "float32" not in {str(t.dtype) for t in case.inputs.values()}:
            continue
        try:
            results = case.results(dtype)
            with jax.default_device(jax.devices("cpu")[0]):
                truth = case.rounded(dtype).results(jnp.float64)
        except Exception as error:
            faults += [] if has_no_f64(error) else [f"{case.label} in {dtype}: {str(error)[:300]}"]
            continue
        for output, got in results.items():
            counts[dtype] += 1
            if off := off_truth(truth[output], got.reshape(truth[output].shape), dtype):
                faults.append(f"{case.label}.{output} in {dtype}: {off:.3g} of the largest off")
    return counts, faults


def side_by_side(work, items):
    """In as many threads as there are processors or as THREADS says, since most of the time goes into compiling."""
    # What is too large for a type is infinite in it.
    quiet = lambda: np.seterr(over="ignore")
    with ThreadPoolExecutor(int(os.environ.get("THREADS", os.cpu_count())), initializer=quiet) as pool:
        return list(pool.map(work, items))


def check(names):
    found = side_by_side(check_case, cases(names))
    counts = {dtype: sum(counts[dtype] for counts, _ in found) for dtype in found[0][0]}
    faults = [fault for _, faults in found for fault in faults]
    print("results compared:", counts, "wrong:", len(faults))
    return faults


## Inside JAX


def scan_op(**options):
    return op("selective_scan", lambda inputs: {"y": inputs["x"]}, return_state=False, **options)


def scan_inputs(key, batch, length, channels, states, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(key), 5)
    uniform = lambda k, shape, low, high: jax.random.uniform(keys[k], shape, jnp.float32, low, high)
    return {
        "x": jax.random.normal(keys[0], (batch, length, channels), dtype),
        "dt": uniform(1, (batch, length, channels), 0.001, 0.1).astype(dtype),
        "A": -uniform(2, (channels, states), 0.5, 2.0),
        "B": jax.random.normal(keys[3], (batch, length, states), dtype),
        "C": jax.random.normal(keys[4], (batch, length, states), dtype),
    }


def plain_scan(inputs):
    return scan_jax.scan_per_step(**inputs)


def close(a, b, tolerance=2e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), a, b)


def check_transformations():
    ours, inputs = scan_op(), scan_inputs(0, 3, 37, 5, 7)
    loss = lambda fun: lambda inputs: jnp.sum(jnp.sin(fun(inputs)))
    expected = jax.jit(jax.value_and_grad(loss(plain_scan)))(inputs)
    close(jax.jit(jax.value_and_grad(loss(lambda inputs: ours(inputs)["y"])))(inputs), expected)

    def repeated(inputs):
        step = lambda x, _: (ours(inputs | {"x": x})["y"] * 0.5, jnp.max(x))
        return jax.lax.scan(step, inputs["x"], None, length=5)

    x = inputs["x"]
    for _ in range(5):
        x = plain_scan(inputs | {"x": x}) * 0.5
    close(jax.jit(repeated)(inputs)[0], x)
    either = jax.jit(lambda flag: jax.lax.cond(flag, lambda: ours(inputs)["y"], lambda: inputs["x"]))
    close(either(True), plain_scan(inputs))
    close(either(False), inputs["x"])


def check_graphs():
    """Calls that fit are in a command buffer, and right for each input; others raise."""
    relu = lambda x: call("activations", {"x": x}, {"y": x}, graph=True, fn="relu")["y"]
    norm = lambda x: call("rms_norm", {"x": x, "w": jnp.ones(x.shape[-1])}, {"y": x}, graph=True, eps=1e-6)["y"]

    def in_a_graph(x):
        return norm(relu(norm(x)) + relu(x))

    run = jax.jit(in_a_graph)
    plain = jax.jit(lambda x: (lambda n: n(jax.nn.relu(n(x)) + jax.nn.relu(x)))(
        lambda x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    ))
    for key in range(20):
        x = jax.random.normal(jax.random.key(key), (33, 65))
        close(run(x), plain(x))
    if jax.default_backend() != "gpu":
        return
    thunks = [file.read_text() for file in pathlib.Path(DUMPS).glob("*thunk_sequence*")]
    assert any("kCommandBuffer" in text for text in thunks), f"no command buffer among {thunks}"
    found = side_by_side(check_in_graph, cases([]))
    fit = {name for name, fits, _ in found if fits} - {name for name, fits, _ in found if not fits}
    print(f"ops that a graph holds with their gradients in all cases: {', '.join(sorted(fit))}")
    faults = [fault for _, _, faults in found for fault in faults]
    assert not faults, faults


def check_in_graph(case):
    """Whether a graph holds the case, and what is wrong."""
    try:
        results = case.results(jnp.float32, graph=True)
        return case.name, True, [f"{case.label}.{o} in a graph" for o, t in results.items() if off_reference(case, o, t)]
    except Exception as error:
        known = re.search("CUDA graph|the name of an op", str(error))
        return case.name, False, [] if known else [f"{case.label} in a graph: {str(error)[:300]}"]


def check_devices():
    """A batch that is shared among all devices, and calls on each of them alone."""
    ours, inputs = scan_op(), scan_inputs(0, 2 * len(jax.devices()), 37, 5, 7)
    for device in jax.devices():
        there = ours(jax.device_put(inputs, device))["y"]
        assert there.devices() == {device}, there.devices()
        close(there, plain_scan(inputs))
    parts = {name: P() if name == "A" else P("batch") for name in inputs}
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    shared = jax.shard_map(lambda inputs: ours(inputs)["y"], mesh=mesh, in_specs=(parts,), out_specs=P("batch"), check_vma=False)
    loss = lambda scan: jax.jit(jax.value_and_grad(lambda inputs: jnp.sum(jnp.sin(scan(inputs)))))
    close(loss(shared)(inputs), loss(plain_scan)(inputs))


def check_threads():
    ours = jax.jit(lambda inputs: scan_op()(inputs)["y"])
    given = [scan_inputs(key, 4, 129, 33, 16) for key in range(8)]
    expected = [np.asarray(ours(inputs)) for inputs in given]
    same = lambda pair: sum(np.array_equal(ours(pair[0]), pair[1]) for _ in range(50))
    with ThreadPoolExecutor(len(given)) as pool:
        assert sum(pool.map(same, zip(given, expected))) == 50 * len(given)


def check_refusals():
    x = np.ones((2, 2), np.float32)
    for name, output, options in [
        ("none", x, {}),
        ("activations", x, {"fn": "none"}),
        ("activations", np.ones(3, np.float32), {"fn": "relu"}),
        ("activations", x, {"fn": "relu", "wrong": 1}),
    ]:
        try:
            jax.block_until_ready(jax.jit(lambda x: call(name, {"x": x}, {"y": output}, **options))(x))
        except Exception as error:
            assert "expected" in str(error), error
        else:
            raise AssertionError(f"{name} {options} was taken")
    assert (call("activations", {"x": x}, {"y": x}, fn="relu")["y"] == x).all()


def main(library, platform, *names):
    jax.config.update("jax_platforms", "cuda,cpu" if platform == "gpu" else "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    sidewinder_jax.register(library)
    print(jax.devices()[0].device_kind, "with JAX", jax.__version__)
    poison()
    faults = check(names)
    if not names:
        for part in (check_transformations, check_graphs, check_devices, check_threads, check_refusals):
            part()
            print(part.__name__, "ok")
    print("\n".join(faults[:40]))
    shutil.rmtree(DUMPS)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
