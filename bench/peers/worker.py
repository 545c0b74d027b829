"""Times one peer in its own process; prints one JSON line, as our example does."""

import argparse
import importlib
import json
import statistics
import time

from common import read_tensors, shape_of, write_tensors


def samples(peer, call, device, seconds, at_least=5):
    """Clock readings for about `seconds`; the caller has warmed up."""
    end = time.perf_counter() + seconds
    times = []
    while len(times) < at_least or time.perf_counter() < end:
        times.append(peer.clock(call, device))
    return times


def report(name, shape, threads, times):
    device_ms, host_ms = zip(*times)
    return dict(
        shape=shape,
        level=name,
        threads=threads,
        median_ms=statistics.median(device_ms),
        min_ms=min(device_ms),
        host_ms=statistics.median(host_ms),
        runs=len(times),
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="family/variant")
    parser.add_argument("file", help="inputs, safetensors")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--gradient", action="store_true", help="forward and backward")
    parser.add_argument("--out", help="where to write the results")
    return parser.parse_args()


def main():
    args = arguments()
    peer = importlib.import_module(
        "peer_jax" if args.name.startswith("jax") else "peer_torch"
    )
    inputs = read_tensors(args.file)
    if not args.gradient:
        del inputs["dy"]
    call, to_numpy = peer.prepare(args.name, inputs, args.device, args.threads)
    results = to_numpy(call())  # compiles
    if args.out:
        write_tensors(args.out, results)
    call()
    times = samples(peer, call, args.device, args.seconds)
    print(json.dumps(report(args.name, shape_of(inputs), args.threads, times)))


if __name__ == "__main__":
    main()
