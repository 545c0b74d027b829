"""Writes bench/RESULTS.md, and README.md's table and picture of speed, from the files in bench/results.

    python3 bench/results.py            writes all three
    python3 bench/results.py --check    exits with 1 if one differs from what would be written

bench/results/notes.md is the text of bench/RESULTS.md; a line {{FILE}} in it stands for the tables of that result file.
"""

import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True

import chart
import tables
from tables import cell, distinct, grid, median, rows_of, sized, times_faster

HERE = Path(__file__).parent
RESULTS, NOTES = HERE / "results", HERE / "results" / "notes.md"


# By what a file's name starts with; the longest counts, and all others are of bench/peers.
KINDS = {
    "": tables.raced(),
    "attention_h200": tables.attention,
    "calls_": tables.calls,
    "cuda_backward_h200": tables.scan_kernels("of_exponentials"),
    "cuda_op_h200": tables.memory_ops,
    "cuda_time_h200": tables.scan_kernels("of_exponentials", "of_bandwidth"),
    "exla_": tables.exla,
    "frames_": tables.frames,
    "long_": tables.long,
    "mamba_quantized_": tables.mamba_quantized,
    "mamba_time_": tables.mamba_time,
    "mm_rec_cuda": tables.raced("recurrence"),
    "mm_rec_gradient_cuda": tables.raced("recurrence"),
    "mm_rec_scans_": tables.raced(titles=tables.CUMPROD),
    "packed_cuda": tables.packed,
    "parts_": tables.parts,
    "quant_h200": tables.quant_products,
    "sessions_": tables.sessions,
    "telemetry_": tables.telemetry,
    "train_": tables.train,
    "training_step_": tables.training_step,
    "xla_": tables.xla,
}


def shown(name):
    """A result file's tables."""
    kind = max((start for start in KINDS if name.startswith(start)), key=len)
    return "\n\n".join(KINDS[kind](RESULTS / name))


def compared():
    """README's programs: the time, those of the peers, and a name, from two result files."""
    for name, ours in (("exla_cpu.json", "kernels"), ("xla_h200.json", "sidewinder")):
        rows, about = rows_of(RESULTS / name)
        place = "EXLA, CPU" if ours == "kernels" else f"JAX, {about['device']}"
        for what in distinct(rows, "what"):
            if re.match(SHOWN[name], what):
                peers = [row.get("median_ms") for row in rows if row["what"] == what and row["way"] not in (ours, "direct")]
                yield f"{place}: {sized(what)}", median(rows, what=what, way=ours), peers


# A short scan and a long one, and whole training steps.
SHOWN = {
    "exla_cpu.json": "selective_scan|training",
    "xla_h200.json": "selective_scan 8 x 2048|training",
}


def summary():
    body = [[name, cell(time), cell(min(filter(None, peers))), times_faster(time, peers)] for name, time, peers in compared()]
    return grid(["program", "Sidewinder", "best XLA program", "ratio"], body)


def picture():
    rows = [(name, min(filter(None, peers)) / time) for name, time, peers in compared()]
    return chart.bars("Times faster than the best program of XLA alone", rows)


def results():
    notes = NOTES.read_text()
    told, made = re.findall(r"^\{\{(.+)\}\}$", notes, re.M), {path.name for path in RESULTS.iterdir()} - {NOTES.name}
    if sorted(told) != sorted(made):
        sys.exit(f"{NOTES} must name each file in {RESULTS} once, which these are not: {sorted(made ^ set(told)) or told}")
    return re.sub(r"^\{\{(.+)\}\}$", lambda found: shown(found[1]), notes, flags=re.M)


def readme(text):
    first, last = "<!-- written by bench/results.py -->\n", "<!-- end -->\n"
    return re.sub(f"(?s)(?<={first}).*(?={last})", lambda _: summary() + "\n", text)


def main(check):
    path = HERE.parent / "README.md"
    written = {HERE / "RESULTS.md": results(), HERE.parent / "assets" / "speed.svg": picture(), path: readme(path.read_text())}
    stale = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        sys.exit("python3 bench/results.py would change " + ", ".join(map(str, stale)))
    for path in stale:
        path.write_text(written[path])


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
