"""Renders a result file as the README's table: table.py RESULT.json.

A family of peers counts with its fastest variant; the result file holds them all.
"""

import json
import sys
from pathlib import Path

TITLES = {
    "ours": "**Sidewinder**",
    "jax_sequential": "JAX, `lax.scan` or `fori_loop`",
    "jax_associative": "JAX, `associative_scan`",
    "torch_compile": "PyTorch loop, compiled step",
    "torch_eager": "PyTorch loop, eager",
    "mamba_ssm": "mamba-ssm CUDA kernel",
}


def family(row):
    return row["contender"].split("/")[0]


def fastest(rows, name, threads):
    """Milliseconds of the family's best variant, None where it did not run."""
    times = [
        r["median_ms"] for r in rows if family(r) == name and r["threads"] == threads
    ]
    return min(times, default=None)


def cell(ms):
    return "" if ms is None else f"{ms:.3g} ms" if ms < 100 else f"{ms:.0f} ms"


def ratio(rows, names, threads):
    """How many times faster ours is than the best of the peers."""
    ours = fastest(rows, "ours", threads)
    peers = [fastest(rows, name, threads) for name in names if name != "ours"]
    best = min((ms for ms in peers if ms is not None), default=None)
    return f"**{best / ours:.2f}x**" if ours and best else ""


def heading(row, device, lanes):
    s = row["shape"]
    sizes = f"{s['batch']} x {s['length']} x {s['channels']}, state {s['state']}"
    columns = (
        [device] if device != "cpu" else [f"{n} thread{'s' * (n > 1)}" for n in lanes]
    )
    return [f"{row['workload']}: {sizes}", *columns]


def table(rows, device):
    """One workload's lines."""
    lanes = sorted({row["threads"] for row in rows})
    names = [name for name in TITLES if any(family(row) == name for row in rows)]
    body = [
        [TITLES[n], *(cell(fastest(rows, n, lane)) for lane in lanes)] for n in names
    ]
    if "ours" in names:
        body.append(["best peer / ours", *(ratio(rows, names, lane) for lane in lanes)])
    rule = ["---"] + ["---:"] * len(lanes)
    lines = [heading(rows[0], device, lanes), rule, *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def footer(result):
    m, v = result["machine"], result["versions"]
    place = m["gpu"] if result["device"] != "cpu" else f"{m['cpu']}, {m['cores']} cores"
    tools = ", ".join(f"{name} {v[name]}" for name in ("torch", "jax") if name in v)
    return f"{place}; {tools}, {v['rustc']}; float32; {result['date']}."


def main():
    result = json.loads(Path(sys.argv[1]).read_text())
    workloads = dict.fromkeys(row["workload"] for row in result["rows"])
    for workload in workloads:
        rows = [row for row in result["rows"] if row["workload"] == workload]
        print(table(rows, result["device"]), end="\n\n")
    print(footer(result))


if __name__ == "__main__":
    main()
