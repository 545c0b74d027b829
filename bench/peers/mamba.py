"""Mamba and Mamba-2 language models: their random checkpoints, what transformers make of them, the workloads."""

import json

import numpy as np

from common import Op, Workload, write_tensors

MODEL = "model.safetensors"
CONFIG = "config.json"
TOKENS = "tokens.json"


def matrix(random, *shape):
    unit = 2 * random.random(shape, np.float32) - 1
    return unit / np.sqrt(np.float32(shape[-1]))


def around_one(random, *shape):
    return random.uniform(0.5, 1.5, shape)


def dt_bias(random, count):
    """The inverse softplus of usual step sizes."""
    step = np.exp(random.uniform(np.log(0.001), np.log(0.1), count))
    return step + np.log(-np.expm1(-step))


def mixer(random, width, inner, state, rank, conv, **_model):
    decay = np.arange(1, state + 1) * random.uniform(0.9, 1.1, (inner, state))
    return {
        "in_proj.weight": matrix(random, 2 * inner, width),
        "conv1d.weight": matrix(random, inner, 1, conv),
        "conv1d.bias": random.uniform(-0.5, 0.5, inner),
        "x_proj.weight": matrix(random, rank + 2 * state, inner),
        "dt_proj.weight": matrix(random, inner, rank),
        "dt_proj.bias": dt_bias(random, inner),
        "A_log": np.log(decay),
        "D": around_one(random, inner),
        "out_proj.weight": matrix(random, width, inner),
    }


def mixer2(random, width, inner, state, heads, conv, **_model):
    convolved = inner + 2 * state
    return {
        "in_proj.weight": matrix(random, inner + convolved + heads, width),
        "conv1d.weight": matrix(random, convolved, 1, conv),
        "conv1d.bias": random.uniform(-0.5, 0.5, convolved),
        "dt_bias": dt_bias(random, heads),
        "A_log": np.log(random.uniform(1, 16, heads)),
        "D": around_one(random, heads),
        "norm.weight": around_one(random, inner),
        "out_proj.weight": matrix(random, width, inner),
    }


def weights(random, layers, width, vocabulary, **sizes):
    """By Hugging Face's names, of the usual sizes of initial weights; each of its own value."""

    def layer():
        own = (mixer2 if "heads" in sizes else mixer)(random, width, **sizes)
        mixed = {f"mixer.{name}": value for name, value in own.items()}
        return {"norm.weight": around_one(random, width), **mixed}

    return {
        "backbone.embeddings.weight": matrix(random, vocabulary, width),
        **{
            f"backbone.layers.{i}.{name}": value
            for i in range(layers)
            for name, value in layer().items()
        },
        "backbone.norm_f.weight": around_one(random, width),
    }


def kind(inner, rank=None, heads=None):
    """What is only in the configuration of a Mamba-2, or of a Mamba."""
    if heads:
        return dict(
            architectures=["Mamba2ForCausalLM"],
            model_type="mamba2",
            num_heads=heads,
            head_dim=inner // heads,
            n_groups=1,
        )
    return dict(
        architectures=["MambaForCausalLM"],
        model_type="mamba",
        intermediate_size=inner,
        time_step_rank=rank,
    )


def config(layers, width, inner, state, conv, vocabulary, prompt, steps, **own):
    return dict(
        kind(inner, **own),
        num_hidden_layers=layers,
        hidden_size=width,
        expand=inner // width,
        state_size=state,
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
MAMBA2_130M = dict(
    layers=24, width=768, inner=1536, state=128, heads=24, conv=4, vocabulary=50288
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


def workloads(name, sizes):
    return (
        Workload(f"{name}-prefill-512", PREFILL, dict(sizes, prompt=512, steps=0)),
        Workload(f"{name}-decode", DECODE, dict(sizes, prompt=16, steps=8)),
    )


WORKLOADS = workloads("mamba-130m", MAMBA_130M)
SECOND = workloads("mamba2-130m", MAMBA2_130M)


def read(workload):
    """What `workload` is to merely read its weights."""
    return workload._replace(op=DECODE._replace(name="read", ours="read"))
