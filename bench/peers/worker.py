"""Times one peer in its own process: worker.py FAMILY/VARIANT OP INPUTS [options].

It computes once, writes the results and says so in a line of JSON. Then it times the
op after each line that it is given, and answers with another. candle/ does the same.
"""

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

from common import write_tensors


def samples(peer, call, device, seconds):
    """Clock readings for about `seconds`; the caller has warmed up."""
    end = time.perf_counter() + seconds
    times = []
    while not times or time.perf_counter() < end:
        times.append(peer.clock(call, device))
    return times


def report(name, times):
    device_ms, host_ms = zip(*times)
    return dict(
        level=name,
        median_ms=statistics.median(device_ms),
        min_ms=min(device_ms),
        host_ms=statistics.median(host_ms),
        runs=len(times),
    )


def say(answer):
    print(json.dumps(answer), flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="family/variant")
    parser.add_argument("op")
    parser.add_argument(
        "file",
        type=Path,
        help="inputs, safetensors, gradients too if there is dy; or a model's folder",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--copies", type=int, default=1, help="of the inputs, which take turns"
    )
    parser.add_argument("--out", help="where to write the results")
    return parser.parse_args()


def module(name, op):
    if op in ("prefill", "decode"):
        return importlib.import_module("peer_mamba_jax" if "jax" in name else "peer_mamba")
    library = next((word for word in ("jax", "numpy", "ggml") if word in name), "torch")
    return importlib.import_module(f"peer_{library}")


def main():
    args = arguments()
    peer = module(args.name, args.op)
    given = (args.name, args.op, args.file, args.device, args.threads)
    prepared = [peer.prepare(*given) for _ in range(args.copies)]
    turns = itertools.cycle(call for call, _ in prepared)
    call, read = lambda: next(turns)(), prepared[0][1]
    results = [read(call()) for _ in prepared][0]  # compiles
    if args.out:
        write_tensors(args.out, results)
    del results
    say(dict(level=args.name))
    for _turn in sys.stdin:
        call()
        say(report(args.name, samples(peer, call, args.device, args.seconds)))


if __name__ == "__main__":
    main()
