"""Checks all contenders against float64, then times them in interleaved rounds.

A contender is a function
`(file, threads, seconds, gradient, out) -> (command, environment)`.
Every timing is a process of its own, and a round runs each contender once: a machine
that slows down for a while slows all of them, not one.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, check, machine, read_tensors, shape_of, truth, versions

HERE = Path(__file__).resolve().parent
EXAMPLE = (
    "cargo run --quiet --release --manifest-path native/Cargo.toml"
    " -p sidewinder_kernels --example time_op --"
).split()


def ops(gradient):
    return "selective_scan" + ",selective_scan_backward" * gradient


def peer_command(name, file, device, threads, seconds, gradient, out):
    """The command line of one peer."""
    options = ["--device", device, "--threads", str(threads), "--seconds", str(seconds)]
    options += ["--gradient"] * gradient
    return [sys.executable, HERE / "worker.py", name, file, *options, *out_option(out)]


def our_command(file, options, seconds, gradient, out):
    """The command line of our own kernel; cargo builds it on the first call."""
    timing = ["--seconds", str(seconds)]
    return [*EXAMPLE, ops(gradient), file, *options, *timing, *out_option(out)]


def out_option(out):
    return ["--out", out] if out else []


def measure(command, environment):
    """Runs the command; its last line is the result."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def verify(contenders, file, threads, gradient, want):
    """Every contender's largest error; one out of tolerance ends the run, untimed."""
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "y.safetensors"
        for name, contender in contenders.items():
            out.unlink(missing_ok=True)
            measure(*contender(file, threads, 0.1, gradient, out))
            got = read_tensors(out)
            errors[name] = max(check(f"{name} {k}", got[k], v) for k, v in want.items())
    return errors


def rounds(contenders, file, threads, args):
    """All results by contender, gathered round by round."""
    results = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name, contender in contenders.items():
            result = measure(
                *contender(file, threads, args.seconds, args.gradient, None)
            )
            print(f"{number + 1} {name} {result['median_ms']:.2f} ms", file=sys.stderr)
            results[name].append(result)
    return results


def summary(results):
    """The median of the rounds' medians, and what they were."""
    medians = [result["median_ms"] for result in results]
    return dict(
        level=results[0].get("level"),
        median_ms=statistics.median(medians),
        min_ms=min(result["min_ms"] for result in results),
        host_ms=statistics.median(r.get("host_ms", r["median_ms"]) for r in results),
        runs=sum(result["runs"] for result in results),
        rounds_ms=medians,
    )


def race(contenders, file, threads, args):
    """One row per contender for this workload and this number of threads."""
    inputs = read_tensors(file)
    print(f"{file.stem}, threads {threads}", file=sys.stderr)
    want = truth(inputs, args.gradient)
    errors = verify(contenders, file, threads, args.gradient, want)
    timed = rounds(contenders, file, threads, args)
    about = dict(workload=file.stem, shape=shape_of(inputs), threads=threads)
    return [
        dict(about, contender=name, error=errors[name], **summary(results))
        for name, results in timed.items()
    ]


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="what inputs.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument(
        "--skip", action="append", default=[], help="a contender or a family"
    )
    parser.add_argument("--workload", action="append", help="only this one")
    parser.add_argument("--threads", type=int, action="append", help="only this many")
    parser.add_argument("--gradient", action="store_true", help="forward and backward")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="per contender and round"
    )
    return parser.parse_args()


def kept(contenders, skip):
    return {
        name: value
        for name, value in contenders.items()
        if name not in skip and name.split("/")[0] not in skip
    }


def run(device, contenders, threads, args):
    """The whole race: every workload, every number of threads, one result file."""
    contenders = kept(contenders, args.skip)
    files = sorted(args.folder.glob("*.safetensors"), reverse=True)
    files = [f for f in files if not args.workload or f.stem in args.workload]
    rows = [row for f in files for t in threads for row in race(contenders, f, t, args)]
    result = dict(
        op=ops(args.gradient),
        device=device,
        date=datetime.date.today().isoformat(),
        machine=machine(),
        versions=versions(),
        method=dict(rounds=args.rounds, seconds=args.seconds, order="interleaved"),
        rows=rows,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
