"""Times the selective scan on the CPU, peers and ours, with one thread and with two."""

import os
from functools import partial

from race import arguments, our_command, peer_command, run

PEERS = (
    "torch_eager/mamba_ref",
    "torch_eager/per_step",
    "torch_compile/per_step",
    "jax_sequential/scan_precomputed",
    "jax_sequential/scan_per_step",
    "jax_sequential/scan_channels_last",
    "jax_sequential/fori_channels_last",
    "jax_associative/associative_scan",
)


def pinned(command, threads):
    """The command held to as many cores as it may have threads."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return ["taskset", "-c", ",".join(map(str, cores)), *command]


def environment(threads):
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    eigen = "true" if threads > 1 else "false"
    return {
        "JAX_PLATFORMS": "cpu",
        # PyTorch's pool of compilers would start up on the timed cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={eigen}",
        **{name: str(threads) for name in pools},
    }


def peer(name, file, threads, seconds, gradient, out):
    command = peer_command(name, file, "cpu", threads, seconds, gradient, out)
    return pinned(command, threads), environment(threads)


def ours(file, threads, seconds, gradient, out):
    command = our_command(file, ["--threads", str(threads)], seconds, gradient, out)
    return pinned(command, threads), environment(threads)


def main():
    args = arguments(__doc__)
    contenders = {"ours": ours, **{name: partial(peer, name) for name in PEERS}}
    run("cpu", contenders, args.threads or (1, 2), args)


if __name__ == "__main__":
    main()
