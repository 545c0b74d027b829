"""Tables of the result files in bench/results: for each kind of file a function from its path to parts of Markdown."""

import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "peers"))

import table
from table import cell, grid

# The sizes to which bench/exla.exs and bench/calls.exs give these names.
SIZES = {
    "reference": "32 x 60 x 512 x 16",
    "mamba-130m layer": "1 x 2048 x 1536 x 16",
    "one token": "one token, 1 x 1536 x 16",
}


def rows_of(path):
    """The rows of a result file, and what it tells of the machine."""
    if path.suffix == ".json":
        result = json.loads(path.read_text())
        return result["rows"], result["machine"]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "device" not in row], rows[0]


def median(rows, **wanted):
    """Milliseconds of the first row with these values, None where there is none."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    time = next((row for row in found if "median_ms" in row or "ms" in row), {})
    return time.get("median_ms", time.get("ms"))


def distinct(rows, key):
    return list(dict.fromkeys(row[key] for row in rows))


def times_faster(ours, others):
    others = [ms for ms in others if ms is not None]
    return f"**{min(others) / ours:.3g}x**" if ours and others else ""


def sized(label):
    for name, size in SIZES.items():
        label = label.replace(name, size)
    return label


def machine(about):
    """Where a file was made, in a line."""
    about = {name: text if name == "device" else ".".join(re.findall(r"\d+", text)) for name, text in about.items()}
    return "; ".join([about.pop("device"), *(f"{name} {text}" for name, text in about.items())]) + "."


## Result files of one kind each


def exla(path):
    rows, about = rows_of(path)
    sums = [row["what"] for row in rows if row["what"].startswith("x + 1")]
    body = []
    for what in distinct(rows, "what"):
        ours, plain, direct = (median(rows, what=what, way=way) for way in ("kernels", "plain", "direct"))
        add = next((name for name in sums if direct and name.split(" of ")[-1] in what), None)
        if ours:
            row = [cell(ours), cell(plain), times_faster(ours, [plain]), cell(direct), cell(median(rows, what=add))]
            body.append([sized(what), *row])
    head = ["CPU", "with kernels", "plain XLA", "plain / ours", "called directly", "`x + 1` in XLA"]
    return [grid(head, body), machine(about)]


def xla(path):
    rows, about = rows_of(path)
    calls = [row for row in rows if "us_per_call" in row]
    programs = [row for row in rows if "us_per_call" not in row]
    peers = [way for way in distinct(programs, "way") if way != "sidewinder"]
    body = []
    for what in distinct(programs, "what"):
        ours, *times = (median(rows, what=what, way=way) for way in ["sidewinder", *peers])
        body.append([what, cell(ours), *map(cell, times), times_faster(ours, times)])
    head = [about["device"], "with kernels", *(f"`{way}`" if "_" in way or "." in way else way for way in peers)]
    costs = grid([calls[0]["what"], "a call", "more than XLA's own"], list(call_costs(calls)))
    return [grid([*head, "best peer / ours"], body), costs, machine(about)]


def call_costs(rows):
    own = next(row["us_per_call"] for row in rows if row["way"].startswith("XLA's own"))
    for row in rows:
        above = row["us_per_call"] - own
        yield [row["way"], f"{row['us_per_call']:.3g} us", f"{above:.2g} us" if above else ""]


def training_step(path):
    rows, about = rows_of(path)
    ours, plain = (median(rows, backend=backend) for backend in ("cpu", "nx"))
    body = [[f"{rows[0]['images']} images", cell(ours), cell(plain), times_faster(ours, [plain])]]
    return [grid(["training step", "kernels", "pure Nx", "pure Nx / ours"], body), machine(about)]


def scan_kernels(*limits):
    """Kernels of the scan on a GPU in f32, and their shares of these limits."""

    def tables(path):
        rows, about = rows_of(path)
        body = [
            [spaced(row["shape"]), cell(row["kernel_ms"]), *(f"{row[limit]:.0%}" for limit in limits)]
            for row in rows
            if row["dtype"] == "f32"
        ]
        names = [f"of the {limit.removeprefix('of_')}' limit".replace("bandwidth'", "memory's") for limit in limits]
        return [grid(["batch x length x channels x state", "kernels", *names], body), machine(about)]

    return tables


def spaced(shape):
    return shape.replace("x", " x ").replace("/", " / ")


def memory_ops(path):
    rows, about = rows_of(path)
    rows = [row | {"label": f"`{row['op']}` {row.get('options', {}).get('fn', '')}".strip()} for row in rows]
    limits = {"copy": "`copy`", "activations_backward": "`activations_backward` silu"}
    shown = [row for row in rows if row["op"] not in ("matmul", "linear")]
    speed = {(row["label"], row["dtype"]): row["gb_s"] for row in rows}

    def shares(label):
        limit = limits["activations_backward" if "_backward" in label else "copy"]
        for dtype in ("f32", "bf16"):
            moved = speed[label, dtype]
            share = f"{moved / 1000:.2f} TB/s" if label == limit else f"{moved / speed[limit, dtype]:.0%}"
            yield f"{cell(median(rows, label=label, dtype=dtype))}, {share}"

    body = [[label, *shares(label)] for label in distinct(shown, "label")]
    return [grid(["op", "f32", "bf16"], body), machine(about)]


def attention(path):
    rows, about = rows_of(path)
    forms = [(dtype, causal) for dtype in ("bf16", "f32") for causal in (False, True)]
    found = {(row["shape"], row["op"], row["dtype"], row["causal"]): row for row in rows}
    whole, decoding = [], []
    for shape, op in dict.fromkeys((row["shape"], row["op"]) for row in rows):
        cells = [found[shape, op, *form] for form in forms]
        if ":" in shape:
            speeds = [f"{cell(row['ms'])}, {row['gb_s'] / 1000:.1f} TB/s" for row in cells[::2]]
            decoding.append([spaced(shape.replace("1:", "")), *speeds])
        else:
            label = spaced(shape) + (", gradient" if op.endswith("_backward") else "")
            whole.append([label, *(f"{row['tflops']:.0f} TFLOP/s" for row in cells)])
    first = grid(["batch x heads x length x width", "bf16", "bf16, causal", "f32", "f32, causal"], whole)
    second = grid(["one query: batch x heads / heads of keys x keys x width", "bf16", "f32"], decoding)
    return [first, second, machine(about)]


def calls(path):
    rows, about = rows_of(path)
    places = {"cpu": "CPU", "cuda_from_host": "CUDA, binary to binary", "cuda_resident": "CUDA, buffer to buffer"}
    times = {(row["call"], row["where"]): row["median_us"] / 1000 for row in rows}
    there = distinct(rows, "where")
    body = [[sized(call), *(cell(times[call, place]) for place in there)] for call in distinct(rows, "call")]
    return [grid(["call", *(places[place] for place in there)], body), machine(about)]


def telemetry(path):
    rows, about = rows_of(path)
    whats = {
        "nobody_listens": "the events of a call, no handler attached",
        "with_a_handler": "the same with a handler",
        "smallest_call": "for comparison: the smallest call of an op",
    }
    times = {row["what"]: row["ns"] for row in rows}
    return [grid(["", "ns"], [[whats[what], str(times[what])] for what in whats]), machine(about)]


def packed(path):
    rows, about = rows_of(path)
    body = []
    for row in rows:
        if "op" in row:
            forms = [[row[form][op]["ms"] for op in (row["op"], row["op"] + "_backward")] for form in ("batch", "packed")]
            ratios = row["packed_over_batch"]
            forward, both = ([cell(of(form)) for form in forms] for of in (lambda ms: ms[0], sum))
            name = f"`{row['op']}`" + (", by key" if row.get("by_key") else "")
            body.append([name, *forward, f"{ratios['forward']:.3g}", *both, f"{ratios['with_gradient']:.3g}"])
    head = ["op", "forward, batch", "packed", "packed / batch", "with gradient, batch", "packed", "packed / batch"]
    return [grid(head, body), machine(about)]


def long(path):
    rows, about = rows_of(path)
    body = []
    for row in rows:
        if "op" in row:
            both = [row[row["op"]], row[row["op"] + "_backward"]]
            errors = [f"{max(call['errors'].values()):.1e}" for call in both]
            memory = [f"{call['workspace_megabytes']} MB" for call in both]
            all_states = f"{row['megabytes_of_all_states']} MB"
            times = [cell(call["ms"]) for call in both]
            body.append([f"`{row['op']}`", row["dtype"], *times, *memory, all_states, *errors])
    head = ["op", "type", "forward", "gradient", "its memory", "the gradient's", "all states", "error", "the gradient's"]
    return [grid(head, body), machine(about)]


def parts(path):
    rows, about = rows_of(path)
    body = []
    for row in rows:
        if "op" in row:
            calls = [row[row["op"]], row[row["op"] + "_backward"]]
            times = [(cell(call["one"]["ms"]), cell(call["parts"]["ms"]), f"{call['times_faster']:.2f}") for call in calls]
            body.append([f"`{row['op']}`", str(row["parts"]), *times[0], *times[1]])
    head = ["op", "parts", "forward, whole", "in parts", "times faster", "gradient, whole", "in parts", "times faster"]
    return [grid(head, body), machine(about)]


def train(path):
    rows, about = rows_of(path)
    body = []
    for row in rows:
        of_one = next(one for one in rows if one["gpus"] == 1 and all(one[k] == row[k] for k in ("model", "batch", "length")))
        sizes = f"{row['model']}, {row['batch']} x {row['length'] - 1}"
        times = [cell(row["ms"]), f"{row['tokens_per_second']:,.0f}", f"{of_one['ms'] / row['ms']:.2f}"]
        body.append([sizes, str(row["gpus"]), *times, *(f"{row['losses'][step]:.5f}" for step in (0, 1, 4))])
    head = ["model, batch", "GPUs", "a step", "tokens a second", "times faster", "loss of step 1", "2", "5"]
    return [grid(head, body), machine(about)]


def sessions(path):
    rows, about = rows_of(path)
    flags = distinct(rows, "flags")
    runs = lambda count, flag: [row["median_ms"] for row in rows if (row["sessions"], row["flags"]) == (count, flag)]
    body = [
        [str(count), *(", ".join(cell(ms) for ms in runs(count, flag)) for flag in flags)]
        for count in distinct(rows, "sessions")
    ]
    return [grid(["sessions", *(f"`{flag}`" if flag else "no flags" for flag in flags)], body), machine(about)]


def mamba_time(path):
    rows, _ = rows_of(path)
    for row in rows:
        row["type"] = f"{row['model']}, {row['dtype']}" if "model" in row else row["dtype"]
    types = distinct(rows, "type")
    prompts = [[name, cell(median(rows, type=name, what="prefill"))] for name in types]
    ways = {"next, greedy": "a token chosen", "next, top_k 50": "drawn with `top_k: 50`"}
    ways["step"] = "logits brought to the host"
    sizes = distinct([row for row in rows if row["what"] == "step"], "size")
    body = [
        [str(size), name, *(cell(median(rows, type=name, size=size, what=way)) for way in ways)]
        for name in types
        for size in sizes
    ]
    head = ["sessions stepped at once", "type", *ways.values()]
    return [grid(["type", "prompt of 512 tokens"], prompts), grid(head, body)]


def mamba_quantized(path):
    rows, _ = rows_of(path)
    names = {None: "bf16", "q8_0": "`Q8_0`", "q4_0": "`Q4_0`", "ternary": "ternary"}
    sizes = distinct([row for row in rows if row["what"] == "step"], "size")
    columns = [("next, greedy", size) for size in sizes] + [("prefill", 512)]
    body = [
        [names[kind], *(cell(median(rows, quantized=kind, what=what, size=size)) for what, size in columns)]
        for kind in distinct(rows, "quantized")
    ]
    return [grid(["matrices", *(f"{n} session{'s' * (n > 1)}" for n in sizes), "prompt of 512"], body)]


def frames(path):
    lines = [line.split() for line in path.read_text().splitlines()]
    head = next(line for line in lines if line[0] == "backend")
    body = [line for line in lines if line[0].startswith(("cpu", "cuda"))]
    return [grid(head, body), path.read_text().splitlines()[0] + "; times in ms."]


PRODUCTS = {
    "linear": "bf16",
    "matmul_q8_q8": "`Q8_0`",
    "matmul_q8_q4": "`Q4_0`",
    "matmul_f32_q8": "`Q8_0`",
    "matmul_f32_q4": "`Q4_0`",
    "matmul_i8_ternary": "ternary",
    "matmul_ternary": "ternary signs",
    "matmul_f32_ternary": "ternary",
}


def quant_products(path):
    rows, about = rows_of(path)
    counts = (1, 4, 32)
    shown = [r for r in rows if "shapes" in r and r["shapes"][0][0] in counts and (r["dtype"] == "bf16") == (r["op"] == "linear")]
    found = {(r["op"], r["shapes"][1][0], r["shapes"][0][0]): r for r in shown}
    body = []
    for op, outputs in sorted({key[:2] for key in found}, key=lambda key: (key[1], list(PRODUCTS).index(key[0]))):
        one, *more = (found.get((op, outputs, count), {}) for count in counts)
        label = f"{outputs} x {one['shapes'][0][1]} {PRODUCTS[op]}, `{op}`"
        body.append([label, cell(one["ms"]), f"{one['gb_s'] / 1000:.1f} TB/s", *(cell(row.get("ms")) for row in more)])
    return [grid(["weights", "one row", "bytes of weights", "4 rows", "32 rows"], body), machine(about)]


# For cumulative products PyTorch needs no loop.
CUMPROD = table.MM_REC | {"torch_eager": "PyTorch", "torch_compile": "PyTorch, compiled"}


def raced(only="", titles=None):
    """A file of bench/peers: the workloads whose names start with `only`."""

    def tables(path):
        result = json.loads(path.read_text())
        suite = result.get("suite", "selective_scan")
        rows = [row for row in result["rows"] if row["workload"].startswith(only)]
        times = "rounds: {rounds}, of {seconds:g} s for each contender.".format(**result["method"])
        where = table.footer(result, suite).removesuffix(".")
        return [*table.tables(suite, rows, result["device"], titles), f"{where}; {times}"]

    return tables
