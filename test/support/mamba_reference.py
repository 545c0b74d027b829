#!/usr/bin/env python3
"""A small Mamba language model of random weights, and what it computes, in float64 and plain NumPy.

Writes a checkpoint as Hugging Face's `MambaForCausalLM` would (`config.json`, `model.safetensors`) and
`expected.safetensors`: tokens, the logits of whole sequences, and the states behind the first of them.

    python3 test/support/mamba_reference.py test/golden/mamba
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

WIDTH, LAYERS, VOCABULARY, INNER, STATE, RANK, CONV, EPS = 20, 3, 37, 40, 5, 3, 4, 1e-5
BATCH, LENGTH = 2, 17


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


def weights(random):
    def uniform(bound, *shape):
        return random.uniform(-bound, bound, shape).astype(np.float32)

    tensors = {"backbone.embeddings.weight": random.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32)}
    for layer in range(LAYERS):
        dt = np.exp(random.uniform(np.log(0.01), np.log(0.5), INNER))
        tensors |= {
            f"backbone.layers.{layer}.{name}": value
            for name, value in {
                "norm.weight": 1 + uniform(0.3, WIDTH),
                "mixer.in_proj.weight": uniform(3 / np.sqrt(WIDTH), 2 * INNER, WIDTH),
                "mixer.conv1d.weight": uniform(1, INNER, 1, CONV),
                "mixer.conv1d.bias": uniform(0.5, INNER),
                "mixer.x_proj.weight": uniform(3 / np.sqrt(INNER), RANK + 2 * STATE, INNER),
                "mixer.dt_proj.weight": uniform(1 / np.sqrt(RANK), INNER, RANK),
                "mixer.dt_proj.bias": np.log(np.expm1(dt)).astype(np.float32),
                "mixer.A_log": np.log(np.arange(1, STATE + 1) + uniform(0.3, INNER, STATE)).astype(np.float32),
                "mixer.D": 1 + uniform(0.5, INNER),
                "mixer.out_proj.weight": uniform(3 / np.sqrt(INNER), WIDTH, INNER),
            }.items()
        }
    tensors["backbone.norm_f.weight"] = 1 + uniform(0.3, WIDTH)
    return tensors


def silu(v):
    return v / (1 + np.exp(-v))


def rms_norm(x, w):
    return w * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)


def block(x, w):
    """One sequence (L, WIDTH): its outputs, and the last samples and state of its convolution and scan."""
    u, z = np.split(x @ w["mixer.in_proj.weight"].T, 2, axis=-1)
    padded = np.concatenate([np.zeros((CONV - 1, INNER)), u])
    kernel = w["mixer.conv1d.weight"][:, 0]
    c = np.array([np.sum(padded[t : t + CONV].T * kernel, axis=1) for t in range(len(x))])
    c = silu(c + w["mixer.conv1d.bias"])
    delta, b, c_out = np.split(c @ w["mixer.x_proj.weight"].T, [RANK, RANK + STATE], axis=-1)
    dt = np.logaddexp(0, delta @ w["mixer.dt_proj.weight"].T + w["mixer.dt_proj.bias"])
    a = -np.exp(w["mixer.A_log"])
    h, y = np.zeros((INNER, STATE)), np.zeros((len(x), INNER))
    for t in range(len(x)):
        h = np.exp(dt[t][:, None] * a) * h + (dt[t] * c[t])[:, None] * b[t]
        y[t] = h @ c_out[t] + w["mixer.D"] * c[t]
    return (y * silu(z)) @ w["mixer.out_proj.weight"].T, padded[len(x) :], h


def model(tokens, tensors):
    x = tensors["backbone.embeddings.weight"][tokens]
    states = []
    for layer in range(LAYERS):
        start = f"backbone.layers.{layer}."
        w = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
        y, *state = block(rms_norm(x, w["norm.weight"]), w)
        x = x + y
        states.append(state)
    logits = rms_norm(x, tensors["backbone.norm_f.weight"]) @ tensors["backbone.embeddings.weight"].T
    return logits, [np.stack(state) for state in zip(*states)]


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(20)
    stored = weights(random)
    wide = {name: value.astype(np.float64) for name, value in stored.items()}
    tokens = random.integers(0, VOCABULARY, (BATCH, LENGTH))
    results = [model(sequence, wide) for sequence in tokens]
    conv, ssm = results[0][1]
    config = {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "state_size": STATE,
        "time_step_rank": RANK,
        "conv_kernel": CONV,
        "layer_norm_epsilon": EPS,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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
