"""Checks all contenders against the truth, then times them in interleaved rounds.

A contender is made by a function `(job, out) -> Served or Restarted` and leaves its
results in the file `out`. Every contender is a process of its own, and a round gives
each one turn: a machine that slows down for a while slows all of them, not one.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common import ROOT, Workload, check, machine, read_tensors, versions

HERE = Path(__file__).resolve().parent
CANDLE = os.environ.get("PEERS_CANDLE")
# They only move what others compute with, the limit where that is the memory's; or
# compute something else of the same size.
LIMITS = ("copy", "read", "gru")
SLOPPY = 1e-2  # a single sum over all weights in float32 is not exact


class Suite(NamedTuple):
    """Workloads that are raced together."""

    workloads: tuple
    peers: dict  # names by op
    environment: dict = {}


class Job(NamedTuple):
    """What every contender is to do."""

    workload: Workload
    file: Path
    threads: int
    seconds: float
    gradient: bool
    environment: dict


class Ended(SystemExit):
    """A peer's process ended; whoever can do without it goes on."""


class Served:
    """A peer's process, which is stopped but for its turns: its threads wait for none."""

    def __init__(self, command, environment):
        self.command = command
        self.process = started(command, environment, stdin=subprocess.PIPE)

    def prepare(self):
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Ended(f"It ended: {' '.join(map(str, self.command))}")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def turn(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.kill()
        self.process.communicate()


class Restarted:
    """Our process, which is started anew for every turn."""

    def __init__(self, command, environment, seconds, out):
        self.run = lambda *more: measure([*command, *more], environment)
        self.seconds = seconds
        self.out = out

    def prepare(self):
        self.run("--seconds", 0.1, "--out", self.out)

    def turn(self):
        return self.run("--seconds", self.seconds)

    def close(self):
        pass


def started(command, environment, **more):
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        **more,
    )


def measure(command, environment):
    """Runs the command; its last line is the result."""
    process = started(command, environment)
    lines = process.communicate()[0].splitlines()
    if process.returncode:
        raise SystemExit(f"It failed: {' '.join(map(str, command))}")
    return json.loads(lines[-1])


def family(name):
    return name.split("/")[0]


def peer_command(name, job, device, out):
    """The command line of one peer."""
    candle = family(name) == "candle"
    program = [CANDLE] if candle else [sys.executable, HERE / "worker.py"]
    options = ["--threads", job.threads, "--seconds", job.seconds, "--out", out]
    options += ["--copies", job.workload.op.copies]
    options += [] if candle else ["--device", device]
    return [*program, name, job.workload.op.name, job.file, *options]


def our_example(name):
    """The command line of our example; cargo builds it on the first call."""
    return shlex.split(
        os.environ.get(f"PEERS_{name.upper()}")
        or "cargo run --quiet --release --manifest-path native/Cargo.toml"
        f" --example {name} --"
    )


def our_command(job, options):
    """The command line of our own kernel."""
    op = job.workload.op
    names = f"{op.ours},{op.ours}_backward" if job.gradient else op.ours
    given = ["--options", json.dumps(op.options)] if op.options else []
    given += ["--copies", op.copies] if op.copies > 1 else []
    given += ["--type", op.type] if op.type else []
    return [*our_example(op.example), names, job.file, *given, *options]


def prepared(makers, job, inputs, folder, stack):
    """All contenders that can do it and their largest errors; one out of tolerance ends the run."""
    op = job.workload.op
    truth = op.truth(job.file, inputs)
    limit = op.limit and op.limit(job.file, inputs)

    def enter(number, name):
        out = folder / f"{number}.safetensors"
        contender = makers[name](job, out)
        stack.callback(contender.close)
        try:
            contender.prepare()
        except Ended as ended:
            print(f"{ended}. It is left out.", file=sys.stderr)
            return None
        got = read_tensors(out)
        mere = family(name) in LIMITS
        want, rtol = (limit, SLOPPY) if mere else (truth, op.rtol)
        errors = [check(f"{name} {k}", got[k], v, rtol) for k, v in want.items()]
        return contender, max(errors)

    # Two at a time: most of it is starting up.
    with ThreadPoolExecutor(2) as pool:
        ready = list(pool.map(enter, range(len(makers)), makers))
    return {name: contender for name, contender in zip(makers, ready) if contender}


def rounds(contenders, count):
    """All results by contender, gathered round by round."""
    results = {name: [] for name in contenders}
    for number in range(count):
        for name, (contender, _) in contenders.items():
            result = contender.turn()
            print(f"{number + 1} {name} {result['median_ms']:.3f} ms", file=sys.stderr)
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


def race(makers, workload, threads, environment, args):
    """One row per contender for this workload and this number of threads."""
    print(f"{workload.name}, threads {threads}", file=sys.stderr)
    inputs = workload.inputs(args.gradient)
    about = dict(workload=workload.name, shape=workload.sizes, threads=threads)
    if workload.op.moves:
        about["bytes"] = workload.op.moves(inputs)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        file = workload.op.write(folder, inputs, workload.sizes)
        job = Job(workload, file, threads, args.seconds, args.gradient, environment)
        contenders = prepared(makers, job, inputs, folder, stack)
        timed = rounds(contenders, args.rounds)
    return [
        dict(about, contender=name, error=error, **summary(timed[name]))
        for name, (_, error) in contenders.items()
    ]


def arguments(description, suites):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--suite", choices=suites, default="selective_scan")
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
    args = parser.parse_args()
    if args.gradient and args.suite in ("transformer", "mamba", "mamba2", "quant"):
        parser.error(f"{args.suite} is raced without gradients")
    return args


def entrants(ours, peer, names, skip):
    """What makes each contender, by name."""
    makers = {"ours": ours, **{name: partial(peer, name) for name in names}}
    skip = [*skip, *([] if CANDLE else ["candle"])]
    return {k: v for k, v in makers.items() if k not in skip and family(k) not in skip}


def run(device, suite, ours, peer, threads, args):
    """The whole race: every workload, every number of threads, one result file."""
    rows = []
    for workload in suite.workloads:
        if args.workload and workload.name not in args.workload:
            continue
        makers = entrants(ours, peer, suite.peers[workload.op.name], args.skip)
        for count in args.threads or threads:
            rows += race(makers, workload, count, suite.environment, args)
    result = dict(
        suite=args.suite,
        gradient=args.gradient,
        device=device,
        date=datetime.date.today().isoformat(),
        machine=machine(),
        versions=versions(),
        method=dict(rounds=args.rounds, seconds=args.seconds, order="interleaved"),
        rows=rows,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
