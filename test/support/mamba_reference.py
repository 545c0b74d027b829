#!/usr/bin/env python3
"""Small Mamba language models of random weights, and what they compute, in float64 and plain NumPy.

Writes a checkpoint (`config.json`, `model.safetensors`) and `expected.safetensors`: tokens, the logits of whole
sequences, and the states behind the first of them. The name of the folder says which model:

* `mamba`, as Hugging Face's `MambaForCausalLM` writes it
* `falcon_mamba`, as `FalconMambaForCausalLM`, with a head of its own
* `mamba2`, as the `mamba_ssm` package, with one group and bounds of the step size
* `mamba2_groups`, as `Mamba2ForCausalLM`, with two groups, biases and a head of its own

    python3 test/support/mamba_reference.py test/golden/mamba
"""

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

EPS, BATCH, LENGTH, VOCABULARY = 1e-5, 2, 17, 37

COMMON = dict(width=20, inner=40, conv=4, tied=True, bias=False, embedding="embeddings")
MODELS = {
    "mamba": dict(COMMON, seed=20, layers=3, state=5, rank=3),
    "falcon_mamba": dict(COMMON, seed=21, layers=2, state=5, rank=3, tied=False, mixer_eps=0.01),
    "mamba2": dict(COMMON, seed=22, layers=2, state=6, heads=5, groups=1, limit=(0.05, 0.4), embedding="embedding"),
    "mamba2_groups": dict(
        COMMON, seed=23, layers=2, state=3, heads=4, groups=2, limit=(0.0, np.inf), conv=3, tied=False, bias=True
    ),
}


def model_of(name):
    return SimpleNamespace(**{"mixer_eps": None, "heads": None, "name": name, **MODELS[name]})


def write(path, tensors):
    names = {np.dtype("float32"): "F32", np.dtype("float64"): "F64", np.dtype("uint8"): "U8"}
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def weights(random, m):
    def uniform(bound, *shape):
        return random.uniform(-bound, bound, shape).astype(np.float32)

    def dt_bias(count):
        dt = np.exp(random.uniform(np.log(0.01), np.log(0.5), count))
        return lambda: np.log(np.expm1(dt)).astype(np.float32)

    def mamba(bias):
        return {
            "norm.weight": 1 + uniform(0.3, m.width),
            "mixer.in_proj.weight": uniform(3 / np.sqrt(m.width), 2 * m.inner, m.width),
            "mixer.conv1d.weight": uniform(1, m.inner, 1, m.conv),
            "mixer.conv1d.bias": uniform(0.5, m.inner),
            "mixer.x_proj.weight": uniform(3 / np.sqrt(m.inner), m.rank + 2 * m.state, m.inner),
            "mixer.dt_proj.weight": uniform(1 / np.sqrt(m.rank), m.inner, m.rank),
            "mixer.dt_proj.bias": bias(),
            "mixer.A_log": np.log(np.arange(1, m.state + 1) + uniform(0.3, m.inner, m.state)).astype(np.float32),
            "mixer.D": 1 + uniform(0.5, m.inner),
            "mixer.out_proj.weight": uniform(3 / np.sqrt(m.inner), m.width, m.inner),
        }

    def mamba2(bias):
        channels = m.inner + 2 * m.groups * m.state
        rows = m.inner + channels + m.heads
        all = {
            "norm.weight": 1 + uniform(0.3, m.width),
            "mixer.in_proj.weight": uniform(3 / np.sqrt(m.width), rows, m.width),
            "mixer.conv1d.weight": uniform(1, channels, 1, m.conv),
            "mixer.conv1d.bias": uniform(0.5, channels),
            "mixer.dt_bias": bias(),
            "mixer.A_log": np.log(np.arange(1, m.heads + 1) + uniform(0.3, m.heads)).astype(np.float32),
            "mixer.D": 1 + uniform(0.5, m.heads),
            "mixer.norm.weight": 1 + uniform(0.3, m.inner),
            "mixer.out_proj.weight": uniform(3 / np.sqrt(m.inner), m.width, m.inner),
        }
        biases = {"mixer.in_proj.bias": rows, "mixer.out_proj.bias": m.width} if m.bias else {}
        return all | {name: uniform(0.3, size) for name, size in biases.items()}

    tensors = {f"backbone.{m.embedding}.weight": random.normal(0, 1, (VOCABULARY, m.width)).astype(np.float32)}
    for layer in range(m.layers):
        own = mamba2(dt_bias(m.heads)) if m.heads else mamba(dt_bias(m.inner))
        tensors |= {f"backbone.layers.{layer}.{name}": value for name, value in own.items()}
    tensors["backbone.norm_f.weight"] = 1 + uniform(0.3, m.width)
    if not m.tied:
        tensors["lm_head.weight"] = uniform(3 / np.sqrt(m.width), VOCABULARY, m.width)
    return tensors


def silu(v):
    return v / (1 + np.exp(-v))


def rms_norm(x, w=1.0, eps=EPS):
    return w * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def convolve(u, w, m):
    """The activated convolution of a sequence, and its last samples."""
    padded = np.concatenate([np.zeros((m.conv - 1, u.shape[1])), u])
    kernel = w["mixer.conv1d.weight"][:, 0]
    c = np.array([np.sum(padded[t : t + m.conv].T * kernel, axis=1) for t in range(len(u))])
    return silu(c + w["mixer.conv1d.bias"]), padded[len(u) :]


def scan(x, dt, a, b, c, d):
    """Channels (L, D) with decays (D, N), and B and C for each channel, (L, D, N)."""
    h, y = np.zeros(a.shape), np.zeros(x.shape)
    for t in range(len(x)):
        h = np.exp(dt[t][:, None] * a) * h + (dt[t] * x[t])[:, None] * b[t]
        y[t] = np.sum(h * c[t], axis=1) + d * x[t]
    return y, h


def mamba(x, w, m):
    """One sequence (L, width): its outputs, and the last samples and state of its convolution and scan."""
    u, z = np.split(x @ w["mixer.in_proj.weight"].T, 2, axis=-1)
    c, samples = convolve(u, w, m)
    parts = np.split(c @ w["mixer.x_proj.weight"].T, [m.rank, m.rank + m.state], axis=-1)
    delta, b, c_out = parts if m.mixer_eps is None else [rms_norm(part, eps=m.mixer_eps) for part in parts]
    dt = np.logaddexp(0, delta @ w["mixer.dt_proj.weight"].T + w["mixer.dt_proj.bias"])
    a = -np.exp(w["mixer.A_log"])
    y, h = scan(c, dt, a, b[:, None], c_out[:, None], w["mixer.D"])
    return (y * silu(z)) @ w["mixer.out_proj.weight"].T, samples, h


def mamba2(x, w, m):
    """A layer of Mamba-2 as `mamba` computes one of Mamba, whose heads are spread to channels."""
    states, head = m.groups * m.state, m.inner // m.heads
    projected = x @ w["mixer.in_proj.weight"].T + w.get("mixer.in_proj.bias", 0.0)
    z, xbc, dt = np.split(projected, [m.inner, 2 * m.inner + 2 * states], axis=-1)
    xbc, samples = convolve(xbc, w, m)
    u, b, c = np.split(xbc, [m.inner, m.inner + states], axis=-1)
    dt = np.clip(np.logaddexp(0, dt + w["mixer.dt_bias"]), *m.limit)
    of_heads = lambda v: np.repeat(v, head, axis=-1)
    of_groups = lambda v: np.repeat(v.reshape(len(x), m.groups, m.state), m.inner // m.groups, axis=1)
    a = np.repeat(of_heads(-np.exp(w["mixer.A_log"]))[:, None], m.state, axis=1)
    y, h = scan(u, of_heads(dt), a, of_groups(b), of_groups(c), of_heads(w["mixer.D"]))
    parts = (y * silu(z)).reshape(len(x), m.groups, -1)
    y = w["mixer.norm.weight"] * rms_norm(parts).reshape(len(x), -1)
    return y @ w["mixer.out_proj.weight"].T + w.get("mixer.out_proj.bias", 0.0), samples, h


def model(tokens, tensors, m):
    table = tensors[f"backbone.{m.embedding}.weight"]
    x, states = table[tokens], []
    for layer in range(m.layers):
        start = f"backbone.layers.{layer}."
        w = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        y, *state = (mamba2 if m.heads else mamba)(rms_norm(x, w["norm.weight"]), w, m)
        x = x + y
        states.append(state)
    logits = rms_norm(x, tensors["backbone.norm_f.weight"]) @ tensors.get("lm_head.weight", table).T
    return logits, [np.stack(state) for state in zip(*states)]


def config_of(m):
    hugging_face = {
        "vocab_size": VOCABULARY,
        "hidden_size": m.width,
        "intermediate_size": m.inner,
        "num_hidden_layers": m.layers,
        "state_size": m.state,
        "time_step_rank": getattr(m, "rank", "auto"),
        "conv_kernel": m.conv,
        "layer_norm_epsilon": EPS,
        "hidden_act": "silu",
        "use_bias": m.bias,
        "use_conv_bias": True,
        "tie_word_embeddings": m.tied,
    }
    names = lambda model, kind: {"architectures": [f"{model}ForCausalLM"], "model_type": kind}
    match m.name:
        case "mamba":
            return names("Mamba", "mamba") | hugging_face
        case "falcon_mamba":
            return names("FalconMamba", "falcon_mamba") | hugging_face | {"mixer_rms_eps": m.mixer_eps}
        case "mamba2_groups":
            heads = {"num_heads": m.heads, "head_dim": m.inner // m.heads, "n_groups": m.groups, "expand": 2}
            return names("Mamba2", "mamba2") | hugging_face | heads | {"time_step_limit": list(m.limit)}
        case "mamba2":
            layer = {"layer": "Mamba2", "d_state": m.state, "headdim": m.inner // m.heads, "dt_limit": list(m.limit)}
            return {
                "d_model": m.width,
                "d_intermediate": 0,
                "n_layer": m.layers,
                "vocab_size": VOCABULARY,
                "ssm_cfg": layer,
                "attn_layer_idx": [],
                "attn_cfg": {},
                "rms_norm": True,
                "residual_in_fp32": True,
                "fused_add_norm": True,
                "pad_vocab_size_multiple": 1,
                "tie_embeddings": m.tied,
            }


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    m = model_of(folder.name)
    random = np.random.default_rng(m.seed)
    stored = weights(random, m)
    wide = {name: value.astype(np.float64) for name, value in stored.items()}
    tokens = random.integers(0, VOCABULARY, (BATCH, LENGTH))
    results = [model(sequence, wide, m) for sequence in tokens]
    conv, ssm = results[0][1]
    (folder / "config.json").write_text(json.dumps(config_of(m), indent=2) + "\n")
    write(folder / "model.safetensors", stored)
    write(
        folder / "expected.safetensors",
        {
            "tokens": tokens.astype(np.uint8),
            "logits": np.stack([logits for logits, _ in results]),
            "conv_state": conv,
            "ssm_state": ssm,
        },
    )


if __name__ == "__main__":
    main()
