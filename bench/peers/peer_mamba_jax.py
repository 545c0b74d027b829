"""Mamba-2 language models in plain JAX, whole prompts in chunks and token by token, as worker.py times them."""

import json
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np

from common import host_clock, read_tensors
from mamba import CONFIG, MODEL, TOKENS

clock = host_clock
CHUNK = 64


def prepare(_name, op, folder, device, _threads):
    """Returns the call to time and a way to read its results."""
    config, tokens = (json.loads((folder / name).read_text()) for name in (CONFIG, TOKENS))
    weights = jax.device_put(read_tensors(folder / MODEL), jax.devices(device)[0])
    model, prompt = partial(logits, config), jnp.array(tokens["prompt"])
    if op == "prefill":
        whole = jax.jit(lambda weights, prompt: model(weights, prompt, empty(config)))
        return lambda: jax.block_until_ready(whole(weights, prompt))[0], rows
    model = partial(jax.jit(model, donate_argnums=2), weights)
    step = decode(model, prompt, tokens["steps"], empty(config))
    others = range(len(tokens["steps"]) - 1)
    return step, lambda first: rows(first, *(step() for _ in others))


def rows(*results):
    return dict(y=np.stack(results))


def decode(model, prompt, steps, states):
    """Takes the next token in, in states that stay as large as they are."""
    _, states = model(prompt, states)
    following = cycle([jnp.array([token]) for token in steps])

    def step():
        nonlocal states
        y, states = jax.block_until_ready(model(next(following), states))
        return y

    return step


def empty(config):
    """Of each layer the last inputs of the convolution and the states of the scan."""
    heads, rows, state = (config[name] for name in ("num_heads", "head_dim", "state_size"))
    convolved = heads * rows + 2 * state
    layer = lambda: (jnp.zeros((config["conv_kernel"] - 1, convolved)), jnp.zeros((heads, rows, state)))
    return [layer() for _ in range(config["num_hidden_layers"])]


def logits(config, weights, tokens, states):
    """The logits after the last token, and the new states."""
    x, after = weights["backbone.embeddings.weight"][tokens], []
    for i, state in enumerate(states):
        layer = f"backbone.layers.{i}."
        y, state = mixer(config, below(weights, f"{layer}mixer."), norm(x, weights[f"{layer}norm.weight"]), *state)
        x, after = x + y, [*after, state]
    last = norm(x[-1], weights["backbone.norm_f.weight"])
    return weights["backbone.embeddings.weight"] @ last, after


def below(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def mixer(config, w, u, conv_state, ssm_state):
    heads, head, state = (config[name] for name in ("num_heads", "head_dim", "state_size"))
    inner, length = heads * head, len(u)
    z, xbc, dt = jnp.split(u @ w["in_proj.weight"].T, [inner, 2 * inner + 2 * state], 1)
    padded = jnp.concatenate([conv_state, xbc])
    taps = w["conv1d.weight"][:, 0].T
    c = sum(padded[i : i + length] * tap for i, tap in enumerate(taps)) + w["conv1d.bias"]
    x, B, C = jnp.split(jax.nn.silu(c), [inner, inner + state], 1)
    x, dt = x.reshape(length, heads, head), jax.nn.softplus(dt + w["dt_bias"])
    scan = one if length == 1 else chunked
    y, ssm_state = scan(x * dt[..., None], -jnp.exp(w["A_log"]) * dt, B, C, ssm_state)
    y = (y + x * w["D"][:, None]).reshape(length, inner)
    y = norm(y * jax.nn.silu(z), w["norm.weight"]) @ w["out_proj.weight"].T
    return y, (padded[length:], ssm_state)


def one(x, decay, B, C, state):
    """A token: x [1, H, P], decay [1, H], B and C [1, N], state [H, P, N]."""
    state = state * jnp.exp(decay[0])[:, None, None] + x[0][..., None] * B[0]
    return (state @ C[0])[None], state


def chunked(x, decay, B, C, state):
    """The scan as products of matrices in chunks (Dao and Gu 2024, listing 1)."""
    length = len(x)
    fill = lambda v: jnp.pad(v, [(0, -length % CHUNK)] + [(0, 0)] * (v.ndim - 1))
    x, decay, B, C = (fill(v).reshape(-1, CHUNK, *v.shape[1:]) for v in (x, decay, B, C))
    sums = jnp.cumsum(decay, 1)  # [c, t, H]
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))[None, :, :, None]
    mask = jnp.exp(jnp.where(lower, sums[:, :, None] - sums[:, None], -jnp.inf))
    y = jnp.einsum("ctn,csn,ctsh,cshp->cthp", C, B, mask, x)
    added = jnp.einsum("csn,csh,cshp->chpn", B, jnp.exp(sums[:, -1:] - sums), x)
    kept = jnp.exp(sums[:, -1])[..., None, None]
    state, before = jax.lax.scan(lambda s, c: (c[0] * s + c[1], s), state, (kept, added))
    y += jnp.einsum("ctn,cth,chpn->cthp", C, jnp.exp(sums), before)
    return y.reshape(-1, *y.shape[2:])[:length], state
