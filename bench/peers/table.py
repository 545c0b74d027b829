"""Renders a result file as the tables of bench/RESULTS.md: table.py RESULT.json.

A family of peers counts with its fastest variant; the result file holds them all.
"""

import json
import sys
from pathlib import Path

SCANS = {
    "ours": "**Sidewinder**",
    "jax_sequential": "JAX, `lax.scan` or `fori_loop`",
    "jax_associative": "JAX, `associative_scan`",
    "torch_compile": "PyTorch loop, compiled step",
    "torch_eager": "PyTorch loop, eager",
    "mamba_ssm": "mamba-ssm CUDA kernel",
}
TRANSFORMER = {
    "ours": "Sidewinder",
    "torch_eager": "PyTorch",
    "torch_compile": "`torch.compile`",
    "jax": "JAX",
    "numpy": "NumPy",
    "candle": "candle",
}
MAMBA = {
    "ours": "Sidewinder",
    "transformers": "transformers on PyTorch",
    "transformers_compiled": "by `torch.compile`",
    "jax": "JAX",
    "candle": "candle",
}
MM_REC = {
    "ours": "Sidewinder",
    "torch_eager": "PyTorch loop",
    "torch_compile": "PyTorch loop, compiled step",
    "torch_graph": "as one CUDA graph",
    "jax": "JAX",
    "gru": "PyTorch's GRU (another op)",
}
QUANT = {
    "ours": "Sidewinder",
    "candle": "candle",
    "ggml": "ggml",
    "torch_eager": "PyTorch, unquantized",
    "numpy": "NumPy, unquantized",
}
BF16 = {"ours": "Sidewinder", "torch_bf16": "PyTorch"}
SSD = {
    "ours": "Sidewinder",
    "torch_eager": "PyTorch, chunks",
    "torch_compile": "by `torch.compile`",
    "mamba_ssm_triton": "mamba-ssm, Triton",
    "mamba_ssm_graph": "as one CUDA graph",
}
FLA = {
    "ours": "Sidewinder",
    "fla_triton": "flash-linear-attention, Triton",
    "fla_graph": "as one CUDA graph",
}
ATTENTION = {
    "ours": "Sidewinder",
    "torch_cudnn": "cuDNN, by PyTorch",
    "torch_flash": "FlashAttention-2, by PyTorch",
}
# A measure beside the race.
OTHER_OPS = ("gru",)
# A suite's titles, and the family of contenders that shows its limit.
ABOUT = {
    "bf16": (BF16, None),
    "transformer": (TRANSFORMER, "copy"),
    "mamba": (MAMBA, "read"),
    "mamba2": (MAMBA, "read"),
    "mm_rec": (MM_REC, None),
    "quant": (QUANT, None),
    "ssd": (SSD, None),
    "gated_delta_rule": (FLA, None),
    "linear_attention": (FLA, None),
    "gla": (FLA, None),
    "attention": (ATTENTION, None),
}
TOOLS = {
    "bf16": ("torch",),
    "attention": ("torch",),
    "selective_scan": ("torch", "jax"),
    "ssd": ("torch", "mamba_ssm"),
    "gated_delta_rule": ("torch", "triton", "flash-linear-attention"),
    "linear_attention": ("torch", "triton", "flash-linear-attention"),
    "gla": ("torch", "triton", "flash-linear-attention"),
    "transformer": ("torch", "jax", "numpy", "candle"),
    "mamba": ("transformers", "torch", "numpy", "candle"),
    "mamba2": ("transformers", "torch", "jax", "numpy"),
    "mm_rec": ("torch", "jax"),
    "quant": ("candle", "ggml_python", "torch", "numpy"),
}


def family(row):
    return row["contender"].split("/")[0]


def present(titles, rows):
    """The families that ran, in the order of the titles."""
    return [name for name in titles if any(family(row) == name for row in rows)]


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


def count(threads):
    return f"{threads} thread{'s' * (threads > 1)}"


def heading(row, device, lanes):
    s = row["shape"]
    sizes = f"{s['batch']} x {s['length']} x {s['channels']}, state {s['state']}"
    columns = [device] if device != "cpu" else [count(lane) for lane in lanes]
    return [f"{row['workload']}: {sizes}", *columns]


def grid(head, body):
    """The lines of a table whose cells are numbers but for the first column."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_workload(rows):
    """The rows of each workload."""
    names = dict.fromkeys(row["workload"] for row in rows)
    return [[row for row in rows if row["workload"] == name] for name in names]


def scan_table(rows, device):
    """One workload's lines: a family each."""
    lanes = sorted({row["threads"] for row in rows})
    names = present(SCANS, rows)
    body = [
        [SCANS[n], *(cell(fastest(rows, n, lane)) for lane in lanes)] for n in names
    ]
    if "ours" in names:
        body.append(["best peer / ours", *(ratio(rows, names, lane) for lane in lanes)])
    return grid(heading(rows[0], device, lanes), body)


def bandwidth(rows, threads, limit):
    """The bytes that ours moves in a second, and their share of what merely moving them reaches."""
    ours, alone = (fastest(rows, name, threads) for name in ("ours", limit))
    if not (ours and alone):
        return ["", ""]
    return [f"{rows[0]['bytes'] / ours / 1e6:.1f} GB/s", f"{alone / ours:.0%}"]


def workload_line(rows, names, threads, limit):
    times = [cell(fastest(rows, name, threads)) for name in names]
    label = rows[0]["workload"].replace("-", " ")
    moved = bandwidth(rows, threads, limit) if limit else []
    raced = [name for name in names if name not in OTHER_OPS]
    return [label, *times, ratio(rows, raced, threads), *moved]


def workloads_table(rows, device, threads, titles, limit):
    """A line for each workload, and for ours its share of a limit if there is one."""
    names = present(titles, rows)
    columns = [titles[name] for name in names]
    first = count(threads) if device == "cpu" else device.upper()
    limits = ["memory", f"of a {limit}"] if limit else []
    head = [first, *columns, "best peer / ours", *limits]
    body = [workload_line(some, names, threads, limit) for some in by_workload(rows)]
    return grid(head, body)


def tables(suite, rows, device, titles=None):
    """A suite's tables, with other titles than its own where some are given."""
    if suite == "selective_scan":
        return [scan_table(some, device) for some in by_workload(rows)]
    lanes = sorted({row["threads"] for row in rows})
    own, limit = ABOUT[suite]
    return [workloads_table(rows, device, lane, titles or own, limit) for lane in lanes]


def footer(result, suite):
    m, v = result["machine"], result["versions"]
    place = m["gpu"] if result["device"] != "cpu" else f"{m['cpu']}, {m['cores']} cores"
    tools = [f"{name} {v[name]}" for name in TOOLS[suite] if name in v]
    tools += filter(None, [v["rustc"]])  # a machine that a built program was carried to may have no compiler
    narrow = suite in ("bf16", "attention", "gated_delta_rule", "linear_attention", "gla")
    narrow = narrow or (suite == "ssd" and result["device"] != "cpu")
    dtype = "bfloat16" if narrow else "float32"
    return f"{place}; {', '.join(tools)}; {dtype}; {result['date']}."


def main():
    result = json.loads(Path(sys.argv[1]).read_text())
    suite = result.get("suite", "selective_scan")  # older files have no other
    for table in tables(suite, result["rows"], result["device"]):
        print(table, end="\n\n")
    print(footer(result, suite))


if __name__ == "__main__":
    main()
