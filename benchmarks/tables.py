"""The tables and pictures of the documents, made from the files in benchmarks/results.

    python benchmarks/tables.py                    prints every table
    python benchmarks/tables.py --write            replaces the tables in the documents
    python benchmarks/tables.py --pictures         draws the pictures beside the files
    python benchmarks/tables.py --folder FOLDER    reads the files in another folder
    python benchmarks/tables.py --take FOLDER      puts the rows of another folder's files into benchmarks/results

A document contains "<!-- table: NAME -->" and "<!-- end of table -->". This program writes the text between them, and
tests/guards/test_docs.py checks it. A table whose files are absent stays as it is.
"""

import argparse
import re
import textwrap
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from statistics import mean

import _compare_tables
import _cpu_tables
import _mod_tables
import _pictures
from _cpu_tables import grid
from _results import RESULTS, merge, read

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = ROOT / "csrc" / "cuda" / "measurements"
DEVICE = "NVIDIA_H100_80GB_HBM3"
LENGTHS = 1024, 4096, 16384
DTYPES = "bf16", "fp16"
PASSES = "forward", "backward"
MASKS = "False", "True"  # causal, as the files say it
FLOPS_OF_A_CLOCK = 132 * 4096  # 132 SMs of an H100 or H200, dense products of 16 bits


class Missing(Exception):
    """The files of a table are absent."""


def rows_of(source, name):
    """The rows of a file. source: its folder and the device."""
    folder, device = source
    path = folder / name.replace("<device>", device)
    if not path.exists():
        raise Missing(path.name)
    return read(path)


def title(kernel, rows):
    number = next((row["cudnn"] for row in rows if row.get("cudnn")), "0")
    version = f"{int(number) // 10000}.{int(number) // 100 % 100}"
    return {"cuDNN": f"cuDNN {version}", "FA2": "PyTorch's flash (FA2)"}.get(kernel, kernel)


def caption(name, rows, text=""):
    """A line below the table: date and machine, rule of timing, and file."""
    if "turns" in text and not any(row.get("rule") for row in rows):
        text = text.replace("turns", "turns of a fixed sequence")  # files from before the random order
    with_ours = {row["command"] for row in rows if row["kernel"] in ("ours", "packed") and "command" in row}
    apart = {row["kernel"] for row in rows if "command" in row and row["command"] not in with_ours}
    others = f"{' and '.join(sorted(apart))}: another run. " if apart and with_ours else ""
    devices, torches, dates = (sorted({row[key] for row in rows}) for key in ("device", "torch", "date"))
    words = [*(x.removeprefix("NVIDIA_").replace("_", " ") for x in devices), *(f"torch {x}" for x in torches), *dates]
    clocks = [int(row["mhz"]) for row in rows if row.get("mhz")]
    clock = f" SM clock {between(clocks)} MHz." if clocks else ""
    return ["", f"{text}{others}{', '.join(words)}; `{name.replace('<device>', devices[0])}`.{clock}"]


def tflops(rows):
    """{(kernel, d, length, causal): TFLOPS, the mean of a cell's runs}."""
    runs = {}
    for row in rows:
        key = row["kernel"], int(row["d"]), row["length"], row["causal"] == "True"
        runs.setdefault(key, []).append(float(row["tflops"]))
    return {key: mean(of_cell) for key, of_cell in runs.items()}


def spread(rows):
    """The largest difference between two runs of a cell, in percent of their mean."""
    runs = {}
    for row in rows:
        runs.setdefault(tuple(row[x] for x in ("kernel", "d", "length", "causal")), []).append(float(row["tflops"]))
    return max(100 * (max(of_cell) - min(of_cell)) / mean(of_cell) for of_cell in runs.values())


def cell(found, kernel, d, lengths):
    """TFLOPS at these lengths, causal in brackets."""
    parts = []
    for length in lengths:
        full, causal = (found.get((kernel, d, str(length), mask)) for mask in (False, True))
        brackets = f" ({causal:.0f})" if causal else ""
        parts += [f"{full:.0f}{brackets}"] if full else []
    return " / ".join(parts)


def between(values, form="{:.0f}"):
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def cost_of_order(rows):
    """How much slower the fixed order is, as a sentence."""
    found = tflops(rows)
    costs = {False: [], True: []}
    for (kernel, d, length, causal), speed in found.items():
        if kernel == "ours" and ("ours, in order", d, length, causal) in found:
            costs[causal].append(100 * (1 - found["ours, in order", d, length, causal] / speed))
    if not costs[False] or not costs[True]:
        return ""  # the run did not include the kernel
    full, causal = (between(costs[mask], "{:.1f}") for mask in (False, True))
    return f"In order costs {full}% of the TFLOPS without a mask, {causal}% with a causal mask."


def memory(rows):
    """MiB beyond the inputs, as a sentence."""
    kernels = [kernel for kernel in ("ours", "cuDNN", "FA2") if any(row["kernel"] == kernel for row in rows)]
    needs = [f"{kernel} {between([int(row['mib']) for row in rows if row['kernel'] == kernel])}" for kernel in kernels]
    return f"MiB beyond the inputs: {', '.join(needs)}."


def speed(name, word, rule, *sentences):
    """A line for each head_dim, a column for each kernel, and sentences(rows) below the table."""

    def table(source):
        rows = rows_of(source, name)
        rows = [row for row in rows if row["length"] in map(str, LENGTHS)]
        found = tflops(rows)
        kernels = list(dict.fromkeys(kernel for kernel, *_ in found))
        order = ["ours", "ours, in order", "cuDNN", "FA2", "FlexAttention"]
        kernels.sort(key=order.index)
        body = [
            [f"d = {d}", *(cell(found, kernel, d, LENGTHS) for kernel in kernels)]
            for d in sorted({d for _, d, *_ in found})
        ]
        text = f"{rule}. "
        if any(row.get("run") for row in rows):
            text = f"{rule}; runs of a cell differ by {spread(rows):.1f}% at most. "
        lines = grid([word, *(title(kernel, rows) for kernel in kernels)], body) + caption(name, rows, text)
        return [*lines, *filter(None, (sentence(rows) for sentence in sentences))]

    return table


def packed(source):
    """Packed sequences beside a dense batch, forward and backward."""
    files = "fwd_<device>_packed.csv", "bwd_<device>_packed.csv"
    both = [rows_of(source, name) for name in files]
    found = [tflops(rows) for rows in both]
    kernels = {"packed": "packed", "dense": "2688", "PyTorch's varlen_attn": "packed"}
    body = [
        [str(d), *(cell(of_pass, kernel, d, [length]) for of_pass in found for kernel, length in kernels.items())]
        for d in sorted({d for _, d, *_ in found[0]})
    ]
    columns = ["packed", "dense", "PyTorch's"]
    header = ["head_dim", *(f"{word} {x}" for word in ("forward:", "backward:") for x in columns)]
    lines = grid(header, body)
    for word, name, rows, speeds in zip(("forward", "backward"), files, both, found):
        pairs = [
            (speeds["packed", d, "packed", mask], speeds["dense", d, "2688", mask])
            for kernel, d, _, mask in speeds
            if kernel == "packed"
        ]
        losses = between([100 * (1 - ragged / dense) for ragged, dense in pairs])
        lines += caption(name, rows, f"The {word} loses {losses}% to dense. In turns. ")
    return lines


def power(source):
    """Each kernel alone at length 16k: TFLOPS, watts, clock, and the share of the tensor cores' peak at that clock."""
    lines, body, captions = [], [], []
    kernels = ["ours", "ours, in order", "cuDNN", "FA2"]
    for word, name in (("forward", "fwd_sustained_<device>.csv"), ("backward", "bwd_sustained_<device>.csv")):
        rows = [row for row in rows_of(source, name) if row["length"] == "16384"]
        if not rows:
            raise Missing(f"row of length 16384 in {name}")
        captions += caption(name, rows, "Sustained. ")
        for d in sorted({int(row["d"]) for row in rows}):
            for causal in "False", "True":
                cells = []
                for kernel in kernels:
                    runs = [r for r in rows if (r["kernel"], int(r["d"]), r["causal"]) == (kernel, d, causal)]
                    units = {"tflops": "", "watts": " W", "mhz": " MHz"}
                    values = {x: [float(run[x]) for run in runs if run[x]] for x in units}
                    words = [f"{mean(values[x]):.0f}{unit}" for x, unit in units.items() if values[x]]
                    if values["mhz"]:
                        peak = FLOPS_OF_A_CLOCK * mean(values["mhz"]) / 1e6
                        words.append(f"{mean(values['tflops']) / peak:.0%}")
                    cells.append(", ".join(words))
                body.append([f"{word}, d = {d}{', causal' if causal == 'True' else ''}", *cells])
    used = [i for i in range(len(kernels) + 1) if any(line[i] for line in body)]
    body = [[line[i] for i in used] for line in body]
    lines += grid([["", *(title(kernel, rows) for kernel in kernels)][i] for i in used], body)
    return lines + captions


def peers(source):
    """Every cell divided by cuDNN's TFLOPS at 16k with the same head_dim and mask, in the same run."""
    theirs = rows_of((MEASUREMENTS, source[1]), "peers_<device>.csv")
    body, drift = [], []
    for word, name in (("forward", "fwd_<device>.csv"), ("backward", "bwd_<device>.csv")):
        ours = tflops(rows_of(source, name))
        for d in sorted({d for _, d, *_ in ours}):
            of_d = [row for row in theirs if (row["pass"], int(row["head_dim"])) == (word, d)]
            if not of_d:
                continue
            cells = [[], []]
            for length in LENGTHS:
                ratios = [[], []]
                for causal, suffix in ((False, ""), (True, "_causal")):
                    best = max(float(row[f"tflops_{length // 1024}k{suffix}"]) for row in of_d)
                    ratios[0].append(best / float(of_d[0][f"cudnn_16k{suffix}"]))
                    cudnn = ours["cuDNN", d, "16384", causal]
                    ratios[1].append(ours["ours", d, str(length), causal] / cudnn)
                    drift.append(100 * (cudnn / float(of_d[0][f"cudnn_16k{suffix}"]) - 1))
                for i, (full, masked) in enumerate(ratios):
                    cells[i].append(f"{full:.2f} ({masked:.2f})")
            body.append([f"{word}, {d}", *(" / ".join(parts) for parts in cells)])
    text = f"cuDNN at 16k differs from their run by {between(drift, '{:+.0f}')}%: the columns compare no closer."
    return [*grid(["", "best of FA3, FA4", "ours"], body), "", text]


def beside(name, rule, source):
    """The time of each peer divided by ours, causal in brackets. The kernels of a problem are of one run."""
    rows = rows_of(source, name)
    runs = {}
    for row in rows:
        problem = tuple(row[x] for x in ("problem", "dtype", "d", "causal"))
        runs.setdefault(problem, set()).add((row["date"], row["commit"], row["command"]))
    if any(len(of_problem) > 1 for of_problem in runs.values()):
        raise Missing(f"run of all kernels of a problem in {name}")
    num_runs = len(set.union(*runs.values()))
    times = {tuple(row[x] for x in ("pass", "kernel", "problem", "d", "causal")): float(row["ms"]) for row in rows}

    def ratios(which, kernel, *problem):
        pairs = [(times.get((which, kernel, *problem, c)), times.get((which, "ours", *problem, c))) for c in MASKS]
        words = [f"{theirs / ours:.2f}" if theirs and ours else "" for theirs, ours in pairs]
        return words[0] + (f" ({words[1]})" if words[1] else "")

    body = []
    for problem, d in dict.fromkeys((row["problem"], row["d"]) for row in rows):
        passes = [[ratios(which, kernel, problem, d) for kernel in ("FA3", "cuDNN")] for which in PASSES]
        body.append([problem, d, *(", ".join(filter(None, words)) for words in passes)])
    text = f"Time of FlashAttention-3 and of cuDNN divided by ours. {rule}. "
    text += f"Problems of {num_runs} runs. " if num_runs > 1 else ""
    return grid(["problem", "columns", *(f"{which}: FA3, cuDNN" for which in PASSES)], body) + caption(name, rows, text)


def faster_than_fa3(source):
    """README's sentence: the ranges of FlashAttention-3's time divided by ours, at 4096 tokens."""
    found = {}
    for row in rows_of(source, "peers_<device>.csv"):
        if row["problem"] == "4096 tokens":
            found[row["pass"], row["kernel"], int(row["d"]), row["causal"]] = float(row["ms"])
    ranges = []
    for dims in (32, 72, 80, 160), (64, 128, 256):
        for which in PASSES:
            pairs = [[found.get((which, x, d, mask)) for x in ("FA3", "ours")] for d in dims for mask in MASKS]
            if not all(map(all, pairs)):
                raise Missing("row of every head dimension in peers_<device>.csv")
            ranges.append(between([theirs / ours for theirs, ours in pairs], "{:.2f}"))
    text = (
        "FlashAttention-3 was timed by turns with ours on the H100, in bf16 with 4096 tokens, with and without a "
        f"causal mask. At head dimensions 32, 72, 80 and 160 our forward is {ranges[0]} times as fast, and our "
        f"backward {ranges[1]} times. At 64, 128 and 256 our forward is {ranges[2]} times as fast, and our backward "
        f"{ranges[3]} times."
    )
    return textwrap.wrap(text, 120)


def decode(source):
    """TB/s of cache, and microseconds."""
    name = "decode_<device>.csv"
    rows = [row for row in rows_of(source, name) if not row["layout"].startswith("host")]
    found = {}
    for row in rows:
        if row["num_splits"] == "0":
            case = tuple(int(row[x]) for x in ("b", "cache", "h", "h_kv", "d"))
            found[case, row["layout"], row["kernel"]] = f"{float(row['tb_s']):.2f} ({float(row['us']):.1f} us)"
    columns = {"dense": ("dense", "ours"), "a key appended, rotary": ("appends", "ours")}
    columns |= {f"pages of {n}" if n == 1 else str(n): (f"pages of {n}", "ours") for n in (1, 16, 64, 256)}
    columns |= {x: ("dense", x) for x in ("SDPA cuDNN", "SDPA FA2", "FlexAttention")}
    columns = {name: key for name, key in columns.items() if any((layout, k) == key for _, layout, k in found)}
    body = []
    for case in dict.fromkeys(case for case, *_ in found):
        cells = [found.get((case, *key), "") for key in columns.values()]
        b, cache, h, h_kv, d = case
        if any(cells):
            body.append([f"{b} x {cache}, {h}/{h_kv}, {d}", *cells])
    copies = [float(row["copy"]) for row in rows if row["copy"] and row["kernel"] == "ours"]
    text = f"A copy of memory in the same run: {min(copies):.2f} to {max(copies):.2f} TB/s. "
    return grid(["batch x cache, heads, head_dim", *columns], body) + caption(name, rows, text)


def decode_turns(source):
    """Microseconds in turns, beside FlashAttention-3 on the same caches."""
    name = "decode_turns_<device>.csv"
    rows = rows_of(source, name)
    found = {}
    for row in rows:
        case = tuple(int(row[x]) for x in ("b", "cache", "h", "h_kv", "d"))
        us = float(row["us"])
        found[case, row["layout"], row["kernel"], row["flush"]] = f"{us:.0f}" if us >= 100 else f"{us:.1f}"
    columns = {"dense": ("dense", ["ours", "FA3"])}
    columns |= {f"pages of {n}" if n == 1 else str(n): (f"pages of {n}", ["ours", "FA3"]) for n in (1, 16, 64, 256)}
    columns |= {x: ("dense", [x]) for x in ("SDPA cuDNN", "SDPA FA2")}

    def cell(case, layout, kernels):
        words = [", ".join(found.get((case, layout, k, flush), "") for k in kernels) for flush in ("write", "read")]
        return f"{words[0]} ({words[1]})" if words[0].strip(", ") else ""

    body = [
        [f"{b} x {cache}, {h}/{h_kv}, {d}", *(cell((b, cache, h, h_kv, d), *key) for key in columns.values())]
        for b, cache, h, h_kv, d in dict.fromkeys(case for case, *_ in found)
    ]
    text = "Microseconds in turns: ours, FlashAttention-3. The L2 was filled by writing, and by reading in brackets. "
    return grid(["batch x cache, heads, head_dim", *columns], body) + caption(name, rows, text)


def masks(source):
    """Milliseconds of dense masks and biases, ours and, in brackets, those of PyTorch's faster backend."""
    name = "masks_NVIDIA_H200.csv"
    rows, found, body = rows_of(source, name), {}, []
    for row in rows:
        case = tuple(int(row[x]) for x in ("b", "h", "length", "d"))
        found.setdefault((row["mask"], case, row["pass"]), {})[row["kernel"]] = float(row["ms"])
    cases = list(dict.fromkeys(case for _, case, _ in found))
    for mask in dict.fromkeys(mask for mask, *_ in found):
        cells = []
        for case in cases:
            of = [found[mask, case, step] for step in PASSES]
            pairs = [(ms["ours"], min(x for kernel, x in ms.items() if kernel != "ours")) for ms in of]
            cells.append(", ".join(f"{own:.3f} ({other:.3f})" for own, other in pairs))
        body.append([mask, *cells])
    header = ["mask", *("{} x {} heads, {} tokens, {}".format(*case) for case in cases)]
    text = (
        "Milliseconds in turns, forward and backward; in brackets the faster one of cuDNN and the efficient backend. "
    )
    return grid(header, body) + caption(name, rows, text)


def of_many(name, columns, words):
    """A table of microseconds of thousands of sequences, forward and backward. words: a case, made of its columns."""
    return lambda source: _of_many(rows_of(source, name), name, columns, words)


def _of_many(rows, name, columns, words):
    found = {}
    for row in rows:
        case = words.format(*(row[x] for x in columns))
        found.setdefault(case, {})[row["kernel"], row["pass"]] = f"{1e3 * float(row['ms']):.0f}"
    kernels = [x for x in dict.fromkeys(row["kernel"] for row in rows) if x != "copy"]
    body = [
        [
            case,
            us["copy", "forward"],
            *(", ".join(us[kernel, step] for step in PASSES if (kernel, step) in us) for kernel in kernels),
        ]
        for case, us in found.items()
    ]
    text = "Microseconds in turns, forward and backward. Copy: as many bytes as q, k, v and out have. "
    return grid(["", "copy", *kernels], body) + caption(name, rows, text)


def prompts_of(name, kernel, other, words):
    """A table of TFLOPS of prompts over caches, by one kernel, and by another in brackets."""
    return lambda source: _prompts(rows_of(source, name), name, (kernel, other), words)


def _prompts(rows, name, kernels, words):
    columns = {"keys": "contiguous keys", "dense": "dense cache"}
    columns |= {f"pages of {n}": f"pages of {n}" for n in (1, 16, 64, 256)}
    found = {}
    for row in rows:
        case = tuple(int(row[x]) for x in ("b", "len_q", "cache", "h", "h_kv", "d"))
        found[case, row["layout"], row["kernel"]] = f"{float(row['tflops']):.0f}"
    body = []
    for case in dict.fromkeys(case for case, *_ in found):
        b, len_q, cache, h, h_kv, d = case
        cells = []
        for layout in columns:
            of = [found.get((case, layout, kernel), "") for kernel in kernels]
            cells.append(of[0] + (f" ({of[1]})" if of[1] else ""))
        body.append([f"{b} x {len_q} over {cache}, {h}/{h_kv}, {d}", *cells])
    header = ["sequences x queries over keys, heads, head_dim", *columns.values()]
    return grid(header, body) + caption(name, rows, f"TFLOPS of visible pairs in turns, {words} in brackets. ")


def few_queries(source):
    """Microseconds of few queries over caches, and the least time that reading the keys once and the products take."""
    name = "few_queries_<device>.csv"
    rows = rows_of(source, name)
    bytes_of_a_us, flops_of_a_us = 3.0e6, 800e6  # what the memory and the tensor cores give at best
    dims = sorted({int(row["d"]) for row in rows})
    found, limit = {}, {}
    for row in rows:
        *case, d, ms = tuple(int(row[x]) for x in ("b", "len_q", "cache", "h", "h_kv", "d")) + (float(row["ms"]),)
        b, _, cache, _, h_kv = case
        found[tuple(case), d, row["kernel"]] = ms * 1000
        operations = float(row["tflops"]) * ms * 1e9
        limit[tuple(case), d] = max(4 * b * cache * h_kv * d / bytes_of_a_us, operations / flops_of_a_us)
    body = []
    for case in dict.fromkeys(case for case, *_ in found):
        b, len_q, cache, h, h_kv = case
        cells = []
        for d in dims:
            ours, fa3 = (found.get((case, d, kernel)) for kernel in ("ours", "FA3"))
            before = [x for x in (found.get((case, d, kernel)) for kernel in ("one part", "decode")) if x]
            cells.append(f"{ours:.0f} ({min(before):.0f}), {fa3:.0f}; {limit[case, d]:.0f}")
        body.append([f"{b} x {len_q} over {cache}, {h}/{h_kv}", *cells])
    header = ["sequences x queries over keys, heads", *(f"head_dim {d}" for d in dims)]
    text = "Microseconds in turns: ours (the better of one part and the decode kernel), FlashAttention-3; the limit. "
    return grid(header, body) + caption(name, rows, text)


def shapes(source):
    """TFLOPS of shapes that are in no other table."""
    name = "shapes_<device>.csv"
    rows = rows_of(source, name)
    kernels = ["ours", "generic", "cuDNN", "FA2", "efficient", "math"]
    found = {(row["shape"], row["kernel"]): f"{float(row['tflops']):.3g}" for row in rows}
    kernels = [kernel for kernel in kernels if any(kernel == k for _, k in found)]
    shapes = dict.fromkeys(shape for shape, _ in found)
    body = [[shape, *(found.get((shape, kernel), "") for kernel in kernels)] for shape in shapes]
    return grid(["shape", *kernels], body) + caption(name, rows, "TFLOPS in turns. ")


def exactness(source):
    """Relative errors: the range over head dimensions and masks, and the worst ratio to cuDNN in one cell."""
    name = "exactness_<device>.csv"
    rows = rows_of(source, name)
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    body = []
    for inputs in dict.fromkeys(row["inputs"] for row in rows):
        for dtype in DTYPES:
            for tensor in "out", "dq", "dk", "dv":
                found = {}
                for row in rows:
                    if (row["inputs"], row["dtype"]) == (inputs, dtype) and row[tensor]:
                        found.setdefault(row["kernel"], {})[row["d"], row["causal"]] = float(row[tensor])
                if not found:
                    continue
                cells = []
                for kernel in kernels:
                    low, high = (f(found[kernel].values()) if kernel in found else None for f in (min, max))
                    cells.append("" if low is None else f"{low:.2e} to {high:.2e}")
                theirs = found.get("cuDNN", {})  # exactly zero if one key dominates
                ratios = [error / theirs[x] for x, error in found.get("ours", {}).items() if theirs.get(x)]
                worst = f"{max(ratios):.3f}" if ratios and max(ratios) < 100 else ""
                body.append([f"{inputs}, {dtype}: {tensor}", *cells, worst])
    header = ["", *(title(kernel, rows) for kernel in kernels), "worst ratio of ours to cuDNN"]
    return grid(header, body) + caption(name, rows)


# The origin of rows from before rows told their origin.
ORIGINS = {
    "train_gpt_cuda.csv": {
        "date": "2026-11-22", "device": "H100 80GB HBM3", "command": "python benchmarks/train_gpt.py"
    },
}  # fmt: skip


def rows_with_origin(path):
    return [{**row, **ORIGINS.get(path.name, {})} for row in read(path)]


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def named():
    """(name or pattern of a file, document, heading above) of every file of results that a document names."""
    texts = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "csrc").rglob("*.md"))]
    for path in [ROOT / "README.md", *texts, ROOT / "hopper" / "README.md"]:
        heading = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            heading = line.lstrip("# ") if re.match("#+ ", line) else heading
            for name in re.findall(r"[\w*]+\.(?:csv|svg)", line):
                yield name, path, heading


def files(source):
    """Every file of the folder, with the documents that name it, and the origin of its rows."""
    folder, _ = source
    mentions = list(named())
    body = []
    for path in sorted(folder.glob("*.csv")):
        rows = rows_with_origin(path)
        machines = {row.get(key) or "" for row in rows for key in ("device", "machine", "cpu", "processor")}
        machines = {x.removeprefix("NVIDIA").replace("_", " ").strip() for x in machines} - {"", "cpu", "cuda"}
        dates = {row["date"] for row in rows}
        commands = sorted({row["command"] for row in rows})
        commands = [text.replace("|", "\\|") for text in commands]  # a bar would end the cell
        commands = ["several, in the rows"] if len(commands) > 3 else [f"`{text}`" for text in commands]
        links = dict.fromkeys(
            f"[{document.relative_to(ROOT)}](../../{document.relative_to(ROOT)}#{anchor(heading)})"
            for name, document, heading in mentions
            if fnmatch(path.name, name)
        )
        cells = links, sorted(machines), sorted(dates)
        body.append([f"`{path.name}`", *map(", ".join, cells), "; ".join(commands)])
    return grid(["file", "named in", "machine", "date", "command"], body)


TABLES = {
    "forward, sustained": speed("fwd_sustained_<device>.csv", "forward", "Sustained"),
    "backward, sustained": speed("bwd_sustained_<device>.csv", "backward", "Sustained"),
    "power": power,
    "forward, in turns": speed("fwd_<device>.csv", "forward", "In turns"),
    "backward, in turns": speed("bwd_<device>.csv", "backward", "In turns", cost_of_order),
    "forward and backward, in turns": speed("step_<device>.csv", "forward and backward", "In turns", memory),
    "grouped heads": speed("bwd_gqa4_<device>.csv", "backward, four query heads to a key head", "In turns", memory),
    "96 columns": speed("bwd_96_<device>.csv", "backward", "In turns"),
    "packed": packed,
    "peers": peers,
    "beside": partial(beside, "peers_<device>.csv", "In turns"),
    "faster than FA3": faster_than_fa3,
    "beside, H200": partial(beside, "peers_NVIDIA_H200.csv", "In turns"),
    "beside, added": partial(beside, "peers_added_<device>.csv", "Added to a stream"),
    "decode": decode,
    "decode, in turns": decode_turns,
    "prompts": prompts_of("prompts_<device>.csv", "ours", "FA3", "FlashAttention-3"),
    "prompts, H200": prompts_of("prompts_NVIDIA_H200.csv", "ours", "FA3", "FlashAttention-3"),
    "prompts before Hopper": prompts_of("prompts_sm80_<device>.csv", "sm80", "generic", "the generic kernels"),
    "few queries": few_queries,
    "masks": masks,
    "short": of_many("short_NVIDIA_H200.csv", ("b", "h", "length", "d"), "{} x {} heads, {} tokens, {}"),
    "short masks": of_many(
        "short_masks_NVIDIA_H200.csv", ("b", "h", "length", "d", "mask"), "{} x {} heads, {} tokens, {}, {}"
    ),
    "many packed": of_many(
        "packed_NVIDIA_H200.csv",
        ("b", "h", "lengths", "mean", "d"),
        "{} x {} heads, {} tokens, {} in the mean, {}",
    ),
    "other shapes": shapes,
    "exactness": exactness,
    **_cpu_tables.TABLES,
    **_compare_tables.TABLES,
    **_mod_tables.TABLES,
    "files": files,
}
BLOCK = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end of table -->)", re.S)


def made(name, folder=RESULTS, device=DEVICE):
    """The text of a table; raises Missing."""
    try:
        return "\n".join(TABLES[name]((folder, device))) + "\n"
    except FileNotFoundError as error:
        raise Missing(Path(error.filename or str(error)).name) from error


def documents():
    """Documents with tables. The list of files comes last, because the other documents name the files."""
    own = ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "csrc").rglob("*.md"))
    return [*own, ROOT / "hopper" / "README.md", RESULTS / "README.md"]


def write_documents(folder):
    def block(match):
        try:
            return f"{match[1]}{made(match[2], folder)}{match[4]}"
        except Missing as missing:
            print(f"{match[2]}: stays as it is, there is no {missing}")
            return match[0]

    for path in documents():
        old = path.read_text(encoding="utf-8")
        path.write_text(BLOCK.sub(block, old), encoding="utf-8")


def print_tables(folder, device=DEVICE):
    """Prints all tables whose files are there."""
    for name in [name for name in TABLES if name != "files"]:
        try:
            print(f"\n{name}\n\n{made(name, folder, device)}")
        except Missing:
            pass


def draw(folder):
    """TFLOPS in turns over the length, a picture for each pass and head_dim."""
    plt = _pictures.pyplot()
    for stem, word in ("fwd", "forward"), ("bwd", "backward"):
        path = folder / f"{stem}_{DEVICE}.csv"
        if not path.exists():
            continue
        rows = read(path)
        found = tflops(rows)
        for d in sorted({d for _, d, *_ in found}):
            figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
            for axis, causal in zip(axes, (False, True)):
                points = {
                    title(kernel, rows): sorted(
                        (int(length), speed)
                        for (of, dim, length, mask), speed in found.items()
                        if (of, dim, mask) == (kernel, d, causal)
                    )
                    for kernel in dict.fromkeys(kernel for kernel, *_ in found)
                }
                _pictures.curves(axis, points)
                axis.set(title=f"{word}, head_dim {d}{', causal' if causal else ''}", ylabel="TFLOPS, H100, bf16")
                axis.set_ylim(bottom=0)
            axes[0].legend()
            _pictures.save(figure, path.with_name(f"{path.stem}_d{d}.svg"))
            plt.close(figure)


def draw_speed(folder):
    """README's picture: TFLOPS back to back at length 16k, of all kernels and head dimensions."""
    plt = _pictures.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3), sharey=True)
    kernels = {"ours": "#d1495b", "cuDNN": "#8d99ae", "FA2": "#c8ced9"}
    for axis, (stem, word) in zip(axes, (("fwd", "forward"), ("bwd", "backward"))):
        rows = rows_of((folder, DEVICE), f"{stem}_sustained_<device>.csv")
        found = tflops(rows)
        places = [(d, causal) for d in (64, 128, 256) for causal in (False, True)]
        for i, (kernel, colour) in enumerate(kernels.items()):
            heights = [found[kernel, d, "16384", causal] for d, causal in places]
            at = [x + 0.27 * (i - 1) for x in range(len(places))]
            bars = axis.bar(at, heights, 0.25, color=colour, label=title(kernel, rows))
            axis.bar_label(bars, fmt="%.0f", fontsize=6)
        axis.set_xticks(range(len(places)), [f"d {d}{chr(10)}causal" if causal else f"d {d}" for d, causal in places])
        axis.set(title=word)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("TFLOPS, H100, bf16, length 16k")
    axes[1].legend(frameon=False, fontsize=8, ncol=3, loc="upper right")
    axes[0].set_ylim(0, 850)
    _pictures.save(figure, folder / f"speed_{DEVICE}.svg")
    plt.close(figure)


MEASURED = (
    "date commit python torch flash_attn cudnn rule ms tflops mhz watts mib us tb_s copy command out dq dk dv sdpa_us "
    "status out_error dq_error"
).split()


def take(folder):
    """Rows replace rows of the same problem, kernel and machine. All other rows stay."""
    for path in sorted(folder.glob("*.csv")):
        rows, known = read(path), RESULTS / path.name
        old = read(known) if known.exists() else []
        if not rows:
            continue
        # A column that one of the files lacks cannot tell its rows apart.
        shared = set(rows[0]) & set(old[0]) if old else set(rows[0])
        hidden = {"cpu"} if shared & {"device", "machine", "processor"} else set()  # the processor of a GPU's host
        merge(rows, known, list(rows[0]), [name for name in rows[0] if name in shared - hidden - set(MEASURED)])
        print(f"{len(rows)} rows into {known.relative_to(ROOT)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="put another folder's rows into benchmarks/results")
    parser.add_argument("--write", action="store_true", help="replace the tables in the documents")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures into the folder")
    options = parser.parse_args()
    if options.take:
        take(options.take)
    if options.write:
        write_documents(options.folder)
    if options.pictures:
        draw(options.folder)
        draw_speed(options.folder)
    if not options.write and not options.pictures and not options.take:
        print_tables(options.folder)


if __name__ == "__main__":
    main()
