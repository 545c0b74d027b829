"""A Mamba language model: its random checkpoint, what transformers make of it, the workloads."""

import json

import numpy as np

from common import Op, Workload, write_tensors

MODEL = "model.safetensors"
CONFIG = "config.json"
TOKENS = "tokens.json"


def weights(random, layers, width, inner, state, rank, conv, vocabulary, **_tokens):
    """By Hugging Face's names, of the usual sizes of initial weights; each of its own value."""

    def matrix(*shape):
        unit = 2 * random.random(shape, np.float32) - 1
        return unit / np.sqrt(np.float32(shape[-1]))

    def around_one(*shape):
        return random.uniform(0.5, 1.5, shape)

    def layer():
        step = np.exp(random.uniform(np.log(0.001), np.log(0.1), inner))
        decay = np.arange(1, state + 1) * random.uniform(0.9, 1.1, (inner, state))
        return {
            "norm.weight": around_one(width),
            "mixer.in_proj.weight": matrix(2 * inner, width),
            "mixer.conv1d.weight": matrix(inner, 1, conv),
            "mixer.conv1d.bias": random.uniform(-0.5, 0.5, inner),
            "mixer.x_proj.weight": matrix(rank + 2 * state, inner),
            "mixer.dt_proj.weight": matrix(inner, rank),
            "mixer.dt_proj.bias": step + np.log(-np.expm1(-step)),  # inverse softplus
            "mixer.A_log": np.log(decay),
            "mixer.D": around_one(inner),
            "mixer.out_proj.weight": matrix(width, inner),
        }

    return {
        "backbone.embeddings.weight": matrix(vocabulary, width),
        **{
            f"backbone.layers.{i}.{name}": value
            for i in range(layers)
            for name, value in layer().items()
        },
        "backbone.norm_f.weight": around_one(width),
    }


def config(layers, width, inner, state, rank, conv, vocabulary, **_tokens):
    return dict(
        architectures=["MambaForCausalLM"],
        model_type="mamba",
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        expand=inner // width,
        state_size=state,
        time_step_rank=rank,
        conv_kernel=conv,
        vocab_size=vocabulary,
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
    )


def tokens(vocabulary, prompt, steps, **_model):
    """What is taken in at once, and what follows one by one, as often as wanted."""
    some = [i * 7919 % vocabulary for i in range(prompt + steps)]
    return dict(prompt=some[:prompt], steps=some[prompt:])


def write(folder, tensors, sizes):
    """The folder as models are published, and the tokens beside."""
    write_tensors(folder / MODEL, tensors)
    (folder / CONFIG).write_text(json.dumps(config(**sizes)))
    (folder / TOKENS).write_text(json.dumps(tokens(**sizes)))
    return folder


def truth(folder, _tensors):
    """The logits by transformers, in float32 as they compute them."""
    import peer_mamba  # only here: the rest works without PyTorch

    op = "decode" if json.loads((folder / TOKENS).read_text())["steps"] else "prefill"
    call, read = peer_mamba.prepare("transformers/eager", op, folder, "cpu", 2)
    return read(call())


def squares(_folder, tensors):
    """Merely reads all weights once."""
    flat = (value.ravel() for value in tensors.values())
    return dict(y=np.array([sum(float(np.dot(v, v)) for v in flat)]))


MAMBA_130M = dict(
    layers=24, width=768, inner=1536, state=16, rank=48, conv=4, vocabulary=50280
)
PREFILL = Op(
    "prefill",
    weights,
    truth,
    ours="prefill",
    example="time_model",
    write=write,
    rtol=1e-4,
)
DECODE = PREFILL._replace(
    name="decode",
    ours="decode",
    limit=squares,
    moves=lambda tensors: sum(value.nbytes for value in tensors.values()),
)
WORKLOADS = (
    Workload("mamba-130m-prefill-512", PREFILL, dict(MAMBA_130M, prompt=512, steps=0)),
    Workload("mamba-130m-decode", DECODE, dict(MAMBA_130M, prompt=16, steps=8)),
)
READ = WORKLOADS[1]._replace(op=DECODE._replace(name="read", ours="read"))
