"""What the scripts here share: tensor files, the float64 truth, the machine."""

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "avx2 fma avx512f avx512vl avx512_vnni avx512_bf16 asimd".split()
DTYPES = {"float32": "F32", "float64": "F64"}


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


def shape_of(inputs):
    """The workload's sizes by name."""
    batch, length, channels = inputs["x"].shape
    state = inputs["A"].shape[1]
    return dict(batch=batch, length=length, channels=channels, state=state)


def reference(x, dt, A, B, C):
    """The plain selective scan in float64: one step of time after the other."""
    x, dt, A, B, C = (v.astype(np.float64) for v in (x, dt, A, B, C))
    h = np.zeros((x.shape[0], *A.shape))  # [B, D, N]
    y = np.empty_like(x)
    for t in range(x.shape[1]):
        h *= np.exp(dt[:, t, :, None] * A)
        h += (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None]
        y[:, t] = (h @ C[:, t, :, None])[..., 0]
    return y


def reference_gradient(x, dt, A, B, C, dy):
    """The gradients of that scan in float64, for the cotangent `dy` of its output."""
    x, dt, A, B, C, dy = (v.astype(np.float64) for v in (x, dt, A, B, C, dy))
    h = np.zeros((x.shape[1] + 1, x.shape[0], *A.shape))  # [L + 1, B, D, N]
    for t in range(x.shape[1]):
        h[t + 1] = np.exp(dt[:, t, :, None] * A) * h[t]
        h[t + 1] += (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None]
    to = {name: np.zeros_like(v) for name, v in dict(x=x, dt=dt, A=A, B=B, C=C).items()}
    carry = np.zeros_like(h[0])
    for t in reversed(range(x.shape[1])):
        g = dy[:, t, :, None] * C[:, t, None] + carry
        carry = np.exp(dt[:, t, :, None] * A) * g
        log_decay = carry * h[t]
        from_b = (g @ B[:, t, :, None])[..., 0]
        to["x"][:, t] = from_b * dt[:, t]
        to["dt"][:, t] = (log_decay * A).sum(-1) + from_b * x[:, t]
        to["A"] += (log_decay * dt[:, t, :, None]).sum(0)
        to["B"][:, t] = (g * (dt[:, t] * x[:, t])[..., None]).sum(1)
        to["C"][:, t] = (dy[:, t, :, None] * h[t + 1]).sum(1)
    return {f"d{name}": gradient for name, gradient in to.items()}


def truth(inputs, gradient):
    """All that a contender gives, in float64."""
    forward = {name: v for name, v in inputs.items() if name != "dy"}
    gradients = reference_gradient(**inputs) if gradient else {}
    return dict(y=reference(**forward), **gradients)


def check(name, got, want, rtol=1e-5):
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
    names = ("numpy", "torch", "jax", "jaxlib", "mamba_ssm")
    return dict(
        python=platform.python_version(),
        **{name: found[name] for name in names if name in found},
        rustc=first_line("rustc", "--version"),
    )


def first_line(*command):
    """What the command says, or None where it is missing or fails."""
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
