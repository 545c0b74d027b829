"""Writes priv/samples/mamba_layer.safetensors: what reaches a Mamba layer's scan.

A layer with the paper's initial values (Gu and Dao, 2023), run by PyTorch over the
bytes of a sentence. The inputs carry the contract's names; `out.y` and `out.last_state`
are what PyTorch's own float32 loop made of them. This PyTorch on an equal CPU
writes equal bytes.
"""

import json
import math

import torch
from torch.nn import functional as F

from common import ROOT, write_tensors

SOURCE = "Abraham Lincoln, Gettysburg Address, 1863 (Bliss copy); public domain"
TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, "
    "a new nation, conceived in Liberty, and dedicated to the proposition "
    "that all men are created equal."
)
WIDTH, INNER, STATE, TAPS, RANK = 32, 64, 16, 4, 2


def uniform(*shape, bound):
    return torch.empty(shape).uniform_(-bound, bound)


def step_bias():
    """Inverse softplus of step sizes spread evenly, in logarithm, over 0.001 to 0.1."""
    v = torch.empty(INNER).uniform_(math.log(0.001), math.log(0.1)).exp()
    v = v.clamp(min=1e-4)
    return v + torch.log(-torch.expm1(-v))


def initial_values():
    return dict(
        embedding=torch.randn(256, WIDTH),
        in_proj=uniform(2 * INNER, WIDTH, bound=WIDTH**-0.5),
        conv_w=uniform(INNER, TAPS, bound=TAPS**-0.5),
        conv_b=uniform(INNER, bound=TAPS**-0.5),
        x_proj=uniform(RANK + 2 * STATE, INNER, bound=INNER**-0.5),
        dt_w=uniform(INNER, RANK, bound=RANK**-0.5),
        dt_b=step_bias(),
        A_log=torch.log(torch.arange(1.0, STATE + 1)).repeat(INNER, 1),
        D=torch.ones(INNER),
    )


def causal_conv(u, w, b):
    """Depthwise over time [B, L, D]: the last tap multiplies the current sample."""
    padded = F.pad(u.transpose(1, 2), (w.shape[1] - 1, 0))
    return F.conv1d(padded, w[:, None], b, groups=w.shape[0]).transpose(1, 2)


def scan_inputs(p, text):
    """The layer from the bytes up to the scan."""
    tokens = torch.tensor(list(text.encode()))[None]
    v = F.rms_norm(p["embedding"][tokens], (WIDTH,), eps=1e-5)
    u, z = F.linear(v, p["in_proj"]).split(INNER, dim=-1)
    x = F.silu(causal_conv(u, p["conv_w"], p["conv_b"]))
    rank, B, C = F.linear(x, p["x_proj"]).split([RANK, STATE, STATE], dim=-1)
    dt = F.linear(rank, p["dt_w"])
    A = -torch.exp(p["A_log"])
    return dict(x=x, dt=dt, A=A, B=B, C=C, D=p["D"], z=z, dt_bias=p["dt_b"])


def selective_scan(x, dt, A, B, C, D, z, dt_bias):
    """The plain loop: y [B, L, D] and the last state [B, D, N]."""
    dt = F.softplus(dt + dt_bias)
    h = A.new_zeros(x.shape[0], *A.shape)
    ys = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        ys.append((h * C[:, t, None]).sum(-1) + D * x[:, t])
    return torch.stack(ys, dim=1) * F.silu(z), h


def difference(name, narrow, wide):
    """Says how far float32 lies from float64, so that readers can judge a tolerance."""
    error, scale = (narrow - wide).abs().max().item(), wide.abs().max().item()
    print(f"{name}: float32 is off by {error:.2e}, largest value {scale:.3g}")


def main():
    torch.manual_seed(1863)
    torch.set_num_threads(1)
    inputs = scan_inputs(initial_values(), TEXT)
    outputs = dict(zip(("y", "last_state"), selective_scan(**inputs)))
    exact = selective_scan(**{name: value.double() for name, value in inputs.items()})
    for (name, value), wide in zip(outputs.items(), exact):
        difference(name, value, wide)
    tensors = inputs | {f"out.{name}": value for name, value in outputs.items()}
    version = torch.__version__.split("+")[0]  # without the build's suffix
    about = dict(
        op="selective_scan",
        attrs=json.dumps({"dt_softplus": True}),
        source=SOURCE,
        made_by=f"bench/peers/mamba_layer.py, torch {version}",
    )
    path = ROOT / "priv" / "samples" / "mamba_layer.safetensors"
    write_tensors(path, {name: value.numpy() for name, value in tensors.items()}, about)


if __name__ == "__main__":
    main()
