"""Times the selective scan on an NVIDIA GPU, peers and ours.

PyTorch and our kernel are timed by CUDA events, JAX by the host's clock until the
result is there; `host_ms` holds the host's clock for all. (Not named cuda.py: that
would hide the Python package `cuda`, which PyTorch imports.)
"""

from functools import partial
from importlib.util import find_spec

from race import arguments, our_command, peer_command, run

PEERS = (
    "torch_eager/mamba_ref",
    "torch_eager/per_step",
    "torch_compile/per_step",
    "jax_sequential/scan_per_step",
    "jax_sequential/scan_channels_last",
    "jax_sequential/fori_channels_last",
    "jax_associative/associative_scan",
)
# Without this JAX takes most of the GPU's memory at once.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def peer(name, file, threads, seconds, gradient, out):
    command = peer_command(name, file, "cuda", threads, seconds, gradient, out)
    return command, ENVIRONMENT


def ours(file, threads, seconds, gradient, out):
    command = our_command(file, ["--backend", "cuda"], seconds, gradient, out)
    return command, ENVIRONMENT


def main():
    args = arguments(__doc__)
    names = list(PEERS) + ["mamba_ssm/selective_scan_fn"] * bool(find_spec("mamba_ssm"))
    contenders = {"ours": ours, **{name: partial(peer, name) for name in names}}
    run("cuda", contenders, args.threads or (1,), args)


if __name__ == "__main__":
    main()
