"""What the scripts here share: ops and their forms, tensor files, the machine."""

import json
import os
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "avx2 fma avx512f avx512vl avx512_vnni avx512_bf16 amx_int8 amx_bf16 asimd".split()
# What ops give, where it is not `y`.
OUTPUTS = {"block_recurrence": "h", "matmul": "c", "simple_rotor_net": "logits"}
DTYPES = {"float32": "F32", "float64": "F64", "uint8": "U8", "int8": "I8"}


def write_inputs(folder, tensors, _sizes):
    write_tensors(folder / "inputs.safetensors", tensors)
    return folder / "inputs.safetensors"


class Op(NamedTuple):
    """What contenders compute: random inputs of given sizes, and the true results."""

    name: str
    inputs: Callable  # (random, **sizes) -> tensors, maybe a cotangent for gradients
    truth: Callable  # (file, tensors) -> results
    ours: str  # its name in our example
    options: dict = {}  # and its options there
    type: str | None = None  # the type that inputs are rounded to there
    example: str = "time_op"
    write: Callable = write_inputs  # (folder, tensors, sizes) -> what contenders get
    rtol: float = 1e-5  # the error that is allowed, relative to the largest result
    moves: Callable | None = None  # (tensors) -> bytes, where the memory is the limit
    copies: int = 1  # of the inputs, which take turns: more than caches hold
    limit: Callable | None = None  # (file, tensors) -> outputs of merely moving them


class Workload(NamedTuple):
    """An op on inputs of one size."""

    name: str
    op: Op
    sizes: dict

    def inputs(self, gradient, seed=20231201):
        tensors = self.op.inputs(np.random.default_rng(seed), **self.sizes)
        if not gradient:
            tensors.pop(f"d{OUTPUTS.get(self.op.name, 'y')}", None)
        return {name: value.astype(np.float32) for name, value in tensors.items()}


class Form(NamedTuple):
    """One way to compute an op; it may want some tensors with two axes exchanged."""

    call: Callable
    names: tuple = ()
    axes: tuple = (1, 2)
    dtype: object = None  # the type that its inputs are rounded to, once
    recorded: bool = False  # whether its launches are replayed as one CUDA graph

    def turned(self, tensors):
        """The tensors as the form takes them, or the other way round."""
        swapped = {
            k: v.swapaxes(*self.axes) for k, v in tensors.items() if k in self.names
        }
        return {k: np.ascontiguousarray(v) for k, v in (tensors | swapped).items()}


def host_clock(call, device="cpu"):
    """(milliseconds, twice), where the device has no clock of its own."""
    start = time.perf_counter()
    call()
    ms = (time.perf_counter() - start) * 1e3
    return ms, ms


def write_tensors(path, tensors, about=None):
    """Writes safetensors by hand: the library promises no order of the metadata."""
    header = {"__metadata__": about} if about else {}
    offset = 0
    for name, value in tensors.items():
        span = [offset, offset + value.nbytes]
        dtype = DTYPES[value.dtype.name]
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": span}
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data that follows stays 8-byte aligned
    data = [np.ascontiguousarray(value).tobytes() for value in tensors.values()]
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def read_tensors(path):
    return load_file(path)


def check(name, got, want, rtol):
    """The largest error relative to the largest output; above `rtol` the run ends."""
    error = float(np.abs(got - want).max() / np.abs(want).max())
    if got.shape != want.shape or not error <= rtol:  # a NaN must fail as well
        raise SystemExit(f"{name}: relative error {error:.2e}, allowed {rtol:.0e}")
    return error


def machine():
    """The CPU as Linux describes it, and the GPU where there is one."""
    info = dict(
        (part.strip() for part in line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    known = info.get("flags", info.get("Features", "")).split()
    return dict(
        cpu=info.get("model name", platform.machine()),
        family=f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        cores=len(os.sched_getaffinity(0)),
        flags=[flag for flag in FLAGS if flag in known],
        gpu=first_line(
            "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
        ),
    )


def versions():
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    names = (
        "numpy",
        "scipy",
        "torch",
        "jax",
        "jaxlib",
        "mamba_ssm",
        "triton",
        "flash-linear-attention",
        "transformers",
        "ggml_python",
    )
    return dict(
        python=platform.python_version(),
        **{name: found[name] for name in names if name in found},
        candle=candle_version(),
        rustc=first_line("rustc", "--version"),
    )


def candle_version():
    lock = tomllib.loads((ROOT / "bench/peers/candle/Cargo.lock").read_text())
    return next(p["version"] for p in lock["package"] if p["name"] == "candle-core")


def first_line(*command):
    """What the command says, or None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
