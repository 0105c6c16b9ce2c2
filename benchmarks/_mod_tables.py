"""The tables of flex_attention and of quantize, from flex_*.csv, fp8_accuracy.csv and quantize_*.csv."""

from _cpu_tables import grid
from _results import read

CASES = {  # the cases of bench_flex.py, in the order of the tables
    "none": "no mod",
    "softcap": "softcap",
    "causal": "causal",
    "document": "causal documents",
    "window": "window of 1024",
    "neighbourhood": "neighbourhood of 17 x 17 in rows of 64",
    "alibi": "ALiBi, causal",
    "table": "a table `[h, 2 len]` with its gradient",
    "sinks": "causal, a sink for each head",
}
METHODS = {
    "bf16": "bf16",
    "fp8, one descale a tensor": "FP8, one factor a tensor",
    "fp8, a descale a head": "FP8, a factor a head",
    "fp8, a descale a head, hadamard": "FP8, a factor a head, `hadamard`",
}
DATA = {"normal": "N(0, 1)", "outliers": "with outliers"}
FACTORS = {  # (per, hadamard): heading
    ("head", "0"): "a descale a head",
    ("head", "1"): "a descale a head, Hadamard",
    ("tensor", "0"): "a descale a tensor",
}


def origin(rows, name):
    """A line below a table: machine, version, date and file."""
    facts = (sorted({row[key] for row in rows}) for key in ("device", "torch", "date"))
    devices, torches, dates = facts
    words = [*(x.removeprefix("NVIDIA_").replace("_", " ") for x in devices), *(f"torch {x}" for x in torches), *dates]
    return ["", f"{', '.join(words)}; `{name}`."]


def by(rows, *keys):
    """{the values of these columns: the row}, each of one row."""
    found = {tuple(row[key] for key in keys): row for row in rows}
    assert len(found) == len(rows), f"{len(rows) - len(found)} rows are there twice"
    return found


def measured(rows):
    """(case, words) of the cases that have rows."""
    there = {row["case"] for row in rows}
    return [(case, words) for case, words in CASES.items() if case in there]


def flex_gpu(source):
    """TFLOPS of visible pairs, ours and PyTorch's, and their ratio, by both rules."""
    name = f"flex_{source[1]}.csv"
    rows = [row for row in read(source[0] / name) if (row["length"], row["d"]) == ("16384", "128") and row.get("rule")]
    if not rows:
        raise FileNotFoundError(f"row of length 16384 in {name}")
    found, body = by(rows, "case", "pass", "kernel", "rule"), []
    columns = [(which, rule) for rule in ("turns", "sustained") for which in ("fwd", "bwd")]
    for case, words in measured(rows):
        cells = []
        for which, rule in columns:
            both = [found.get((case, which, kernel, rule)) for kernel in ("flash_attn", "flex")]
            ours, theirs = (float(row["tflops"]) if row else 0 for row in both)
            cells.append(f"{ours:.0f}, {theirs:.0f}: {ours / theirs:.2f}" if theirs else f"{ours:.0f}, -")
        body.append([words, *cells])
    header = ["", "in turns: forward", "backward", "alone: forward", "backward"]
    return grid(header, body) + origin(rows, name)


def flex_cpu(source):
    """Milliseconds of ours, of PyTorch's flex_attention and of SDPA, of two threads."""
    rows = [row for row in read(source[0] / "flex_cpu.csv") if row["threads"] == "2"]
    columns = [("fwd", "flash_attn"), ("fwd", "flex"), ("fwd", "sdpa"), ("bwd", "flash_attn"), ("bwd", "sdpa")]
    found, body = by(rows, "case", "pass", "kernel"), []
    for case, words in measured(rows):
        cells = (found.get((case, *column)) for column in columns)
        body.append([words, *(f"{float(row['ms']):.0f}" if row else "-" for row in cells)])
    return grid(["", "forward: ours", "flex", "SDPA", "backward: ours", "SDPA"], body) + origin(rows, "flex_cpu.csv")


def percent(row):
    """Two digits."""
    return f"{100 * float(row['relative_error']):#.2g}".rstrip(".")


def accuracy(source):
    """Relative errors in percent, without a mask and causal."""
    rows = read(source[0] / "fp8_accuracy.csv")
    found, body = by(rows, "data", "d", "method", "causal"), []
    for data, words in DATA.items():
        for d in sorted({row["d"] for row in rows}, key=int):
            cells = (" / ".join(percent(found[data, d, method, causal]) for causal in "01") for method in METHODS)
            body.append([words, d, *cells])
    return grid(["q, k and v", "d", *METHODS.values()], body) + origin(rows, "fp8_accuracy.csv")


def quantize(device=None):
    """Microseconds and the share of a copy's rate, of one device or of the tables' device."""

    def table(source):
        name = f"quantize_{device or source[1]}.csv"
        rows = read(source[0] / name)
        shape = "b", "length", "h", "h_kv", "d"
        found, body = by(rows, *shape, "per", "hadamard"), []
        for case in dict.fromkeys(tuple(row[key] for key in shape) for row in rows):
            b, length, h, h_kv, d = case
            cells = (found[(*case, *factor)] for factor in FACTORS)
            words = (f"{float(row['us']):.0f}, {float(row['share_of_copy']):.2f}" for row in cells)
            body.append([f"{b} x {length}, {h} and {h_kv}, {d}", *words])
        return grid(["tokens, heads of q and k, head_dim", *FACTORS.values()], body) + origin(rows, name)

    return table


TABLES = {
    "flex, GPU": flex_gpu,
    "flex, CPU": flex_cpu,
    "FP8, accuracy": accuracy,
    "quantize": quantize(),
    "quantize, before": quantize("NVIDIA_H200"),
}
