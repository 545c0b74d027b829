"""Times a suite on the CPU, peers and ours, with one thread and with two."""

import os

import bf16
import mamba
import mm_rec
import quant
import scan
import ssd
import transformer
from race import Restarted, Served, Suite, arguments, our_command, peer_command, run

SCANS = (
    "torch_eager/mamba_ref",
    "torch_eager/per_step",
    "torch_compile/per_step",
    "jax_sequential/scan_precomputed",
    "jax_sequential/scan_per_step",
    "jax_sequential/scan_channels_last",
    "jax_sequential/fori_channels_last",
    "jax_associative/associative_scan",
)
PLAIN = (
    "torch_eager/plain",
    "torch_compile/plain",
    "jax/plain",
    "numpy/plain",
    "candle/plain",
)
COPIES = ("copy/torch", "copy/numpy")
TRANSFORMER = {
    **{op.name: PLAIN + COPIES for op in transformer.STREAMING},
    "linear": PLAIN + ("jax/weights_in_out",),
    "attention": PLAIN + ("jax/nn", "candle/flash"),
}
MODELS = ("transformers/eager", "candle/plain")
READS = ("read/ours", "read/torch", "read/numpy")
# Compiled for a prefill, 24 layers are not ready after a quarter of an hour; one is 1.35 times faster.
MAMBA = {
    "prefill": MODELS,
    "decode": MODELS + ("transformers_compiled/default",) + READS,
}
MAMBA2 = {
    "prefill": ("transformers/eager", "jax/plain"),
    "decode": ("transformers/eager", "jax/plain") + READS,
}
RECURRENCE = ("torch_eager/per_step", "torch_compile/per_step", "jax/scan", "gru/torch")
MM_REC = {
    "block_recurrence": RECURRENCE,
    "cumprod_scan": (
        "torch_eager/plain",
        "torch_compile/plain",
        "jax/cumprod",
        "jax/associative_scan",
    ),
}
# As if large results were allocated once: glibc keeps their memory. Without this it gives
# it back after every call, and peers mostly wait for the kernel to clear the next call's.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
BLOCKS = ("candle/plain", "ggml/plain", "ggml/repacked")
DENSE = ("torch_eager/f32", "torch_eager/bf16", "numpy/f32")
QUANT = {
    "matmul_q8_q8": BLOCKS + DENSE,
    "matmul_q8_q4": BLOCKS,
    "matmul_i8_ternary": ("ggml/plain", *DENSE),
    "ternary_encode": ("numpy/packbits",),
    "ternary_decode": ("numpy/unpackbits",),
    "simple_rotor_net": ("torch_eager/f32", "numpy/f32"),
}
BF16 = {op: ("torch_bf16/plain",) for op in bf16.SIZES}
SUITES = {
    "bf16": Suite(bf16.WORKLOADS, BF16, KEEP_MEMORY),
    "selective_scan": Suite(scan.WORKLOADS, {"selective_scan": SCANS}),
    "ssd": Suite(ssd.ON_CPU, {"ssd": ("torch_eager/chunked", "torch_compile/chunked")}, KEEP_MEMORY),
    "transformer": Suite(transformer.WORKLOADS, TRANSFORMER, KEEP_MEMORY),
    "mamba": Suite(mamba.WORKLOADS, MAMBA, KEEP_MEMORY),
    "mamba2": Suite(mamba.SECOND, MAMBA2, KEEP_MEMORY),
    "quant": Suite(quant.WORKLOADS, QUANT, KEEP_MEMORY),
    "mm_rec": Suite(mm_rec.ON_CPU, MM_REC, KEEP_MEMORY),
}


def pinned(command, threads):
    """The command held to as many cores as it may have threads."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def environment(job):
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    eigen = "true" if job.threads > 1 else "false"
    return {
        "JAX_PLATFORMS": "cpu",
        # PyTorch's pool of compilers would start up on the timed cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={eigen}",
        **{name: str(job.threads) for name in pools},
        **job.environment,
    }


def peer(name, job, out):
    if name == "read/ours":
        return ours(job._replace(workload=mamba.read(job.workload)), out)
    command = pinned(peer_command(name, job, "cpu", out), job.threads)
    return Served(command, environment(job))


def ours(job, out):
    command = pinned(our_command(job, ["--threads", job.threads]), job.threads)
    return Restarted(command, environment(job), job.seconds, out)


def main():
    args = arguments(__doc__, SUITES)
    run("cpu", SUITES[args.suite], ours, peer, (1, 2), args)


if __name__ == "__main__":
    main()
