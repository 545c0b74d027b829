"""Mamba and Mamba-2 language models by transformers, and mere reads of their weights, as worker.py times them."""

import json
from itertools import cycle

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from common import host_clock, read_tensors
from mamba import MODEL, TOKENS

clock = host_clock


def prepare(name, op, folder, device, threads):
    """Returns the call to time and a way to read its results."""
    torch.set_num_threads(threads)
    if name in READS:
        return read_of(READS[name], folder)
    tokens = json.loads((folder / TOKENS).read_text())
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    made = FORMS[name](model)
    if op == "prefill":
        return prefill(made, ids(tokens["prompt"])), lambda first: logits([first])
    step = decode(model, made, tokens)
    others = range(len(tokens["steps"]) - 1)
    return step, lambda first: logits([first, *(step() for _ in others)])


FORMS = {
    "transformers/eager": lambda model: model,
    "transformers_compiled/default": torch.compile,
}


def ids(tokens):
    return torch.tensor([tokens])


def logits(results):
    """One row for each result."""
    return dict(y=torch.cat([result.logits[:, -1] for result in results]).numpy())


@torch.inference_mode()
def run(model, tokens, cache=None):
    return model(tokens, cache_params=cache, use_cache=True, logits_to_keep=1)


def prefill(model, prompt):
    return lambda: run(model, prompt)


def decode(model, made, tokens):
    """Takes the next token in, in a cache that stays as large as it is."""
    cache = run(model, ids(tokens["prompt"])).cache_params
    following = cycle([ids([token]) for token in tokens["steps"]])
    return lambda: run(made, next(following), cache)


READS = {
    "read/torch": lambda flat: torch.dot(flat, flat),
    "read/numpy": lambda flat: np.dot(flat.numpy(), flat.numpy()),
}


def read_of(squares, folder):
    tensors = read_tensors(folder / MODEL).values()
    flat = torch.cat([torch.from_numpy(value).flatten() for value in tensors])
    return lambda: squares(flat), lambda y: dict(y=np.array([y], np.float32))
