"""Times a suite on an NVIDIA GPU, peers and ours.

PyTorch and our kernel are timed by CUDA events, JAX by the host's clock until the
result is there; `host_ms` holds the host's clock for all. (Not named cuda.py: that
would hide the Python package `cuda`, which PyTorch imports.)
"""

from importlib.util import find_spec

import attention
import gated_delta_rule
import linear_attention
import mm_rec
import scan
import ssd
from race import Restarted, Served, Suite, arguments, our_command, peer_command, run

SCANS = (
    "torch_eager/mamba_ref",
    "torch_eager/per_step",
    "torch_compile/per_step",
    "jax_sequential/scan_per_step",
    "jax_sequential/scan_channels_last",
    "jax_sequential/fori_channels_last",
    "jax_associative/associative_scan",
)
SSD = tuple(
    f"mamba_ssm_{form}/chunk{chunk}" for form in ("triton", "graph") for chunk in (128, 256)
)
MM_REC = {
    "block_recurrence": (
        "torch_eager/per_step",
        "torch_compile/per_step",
        "torch_graph/per_step",
        "jax/scan",
        "gru/torch",
    ),
    "cumprod_scan": ("torch_eager/plain", "torch_compile/plain", "jax/cumprod"),
}
ATTENTION = {op.name: ("torch_cudnn/sdpa", "torch_flash/sdpa") for op in attention.OPS}
FLA = ("fla_triton/chunk64", "fla_graph/chunk64")
# Without this JAX takes most of the GPU's memory at once.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def peer(name, job, out):
    return Served(peer_command(name, job, "cuda", out), job.environment)


def ours(job, out):
    command = our_command(job, ["--backend", "cuda"])
    return Restarted(command, job.environment, job.seconds, out)


def main():
    names = SCANS + ("mamba_ssm/selective_scan_fn",) * bool(find_spec("mamba_ssm"))
    suites = {
        "selective_scan": Suite(scan.WORKLOADS, {"selective_scan": names}, ENVIRONMENT),
        "mm_rec": Suite(mm_rec.ON_GPU, MM_REC, ENVIRONMENT),
        "gated_delta_rule": Suite(
            gated_delta_rule.ON_GPU, {"gated_delta_rule": FLA}, ENVIRONMENT
        ),
        "linear_attention": Suite(
            linear_attention.ON_GPU, {"linear_attention": FLA}, ENVIRONMENT
        ),
        "gla": Suite(linear_attention.BY_KEY_ON_GPU, {"gla": FLA}, ENVIRONMENT),
        "attention": Suite(attention.ON_GPU, ATTENTION, ENVIRONMENT),
        "ssd": Suite(ssd.ON_GPU, {"ssd": SSD}, ENVIRONMENT),
    }
    args = arguments(__doc__, suites)
    run("cuda", suites[args.suite], ours, peer, (1,), args)


if __name__ == "__main__":
    main()
