"""Writes the workloads' inputs, the same for every contender: inputs.py FOLDER."""

import argparse
from pathlib import Path

import numpy as np

from common import write_tensors

# batch, length, channels, state
WORKLOADS = {
    "reference": (32, 60, 512, 16),
    "mamba-130m": (1, 2048, 1536, 16),
}


def step_sizes(random, batch, length, channels):
    """softplus(noise + bias), the bias such that dt lies around 0.001 to 0.1."""
    typical = np.exp(random.uniform(np.log(0.001), np.log(0.1), channels))
    bias = typical + np.log(-np.expm1(-typical))  # inverse softplus
    noise = 0.5 * random.standard_normal((batch, length, channels))
    return np.logaddexp(0, noise + bias)


def decay(random, channels, state):
    """-(1..N) as in the paper, times random factors: no structure to exploit."""
    return -np.arange(1, state + 1) * random.uniform(0.9, 1.1, (channels, state))


def make(batch, length, channels, state, seed=20231201):
    random = np.random.default_rng(seed)
    tensors = dict(
        x=random.standard_normal((batch, length, channels)),
        dt=step_sizes(random, batch, length, channels),
        A=decay(random, channels, state),
        B=random.standard_normal((batch, length, state)),
        C=random.standard_normal((batch, length, state)),
        dy=random.standard_normal((batch, length, channels)),
    )
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, sizes in WORKLOADS.items():
        write_tensors(folder / f"{name}.safetensors", make(*sizes))


if __name__ == "__main__":
    main()
