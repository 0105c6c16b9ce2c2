"""Tables of comparisons with PyTorch's attention: those and the picture of docs/compare.md, from the rows of
compare_sdpa.py, and the training steps of docs/clients.md, from those of bench_llama.py."""

import _pictures
from _cpu_tables import grid
from _results import read

PASSES = "forward", "backward"


def number(text):
    """Three digits, without an exponent."""
    value = float(text)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ordered(rows, column, convert=str):
    return list(dict.fromkeys(convert(row[column]) for row in rows))


def cell(row, column):
    if row is None:
        return ""
    return row["status"] or (number(row[column]) if row[column] else "")


def table(rows, column):
    """A line for each length, a column for each kernel."""
    kernels, lengths = ordered(rows, "kernel"), sorted(ordered(rows, "length", int))
    found = {(row["kernel"], int(row["length"])): row for row in rows}
    return grid(["length", *kernels], [[str(n), *(cell(found.get((k, n)), column) for k in kernels)] for n in lengths])


def errors(rows):
    """The range over the lengths."""
    body = []
    for column in "out_error", "dq_error":
        cells = []
        for kernel in ordered(rows, "kernel"):
            values = [float(row[column]) for row in rows if row["kernel"] == kernel and row.get(column)]
            cells.append(f"{min(values):.1e} to {max(values):.1e}" if values else "")
        body.append([column.removesuffix("_error"), *cells])
    return grid(["relative error", *ordered(rows, "kernel")], body)


def tables_of(name, rows):
    """All tables of a file, and below them where its rows come from."""
    lines = []
    for causal in ordered(rows, "causal"):
        of_mask = [row for row in rows if row["causal"] == causal]
        word = "causal" if causal == "True" else "without a mask"
        for which in PASSES:
            of_pass = [row for row in of_mask if row["pass"] == which]
            for column, unit in (("ms", "milliseconds"), ("mib", "MiB at the peak")) if of_pass else ():
                lines += [f"**{which.capitalize()}, {word}: {unit}**", "", *table(of_pass, column), ""]
        lines += [*errors(of_mask), ""]
    first = rows[0]
    machines = ordered(rows, "cpu") if first["device"] == "cpu" else ordered(rows, "device")
    machines = [x.removeprefix("NVIDIA_").replace("_", " ") for x in machines]
    shape = f"{first['dtype']}, {first['h']} heads of {first['d']} columns"
    torches, dates = (ordered(rows, column) for column in ("torch", "date"))
    facts = [*machines, shape, *(f"torch {x}" for x in torches), *dates]
    return [*lines, f"{', '.join(facts)}; `{name}`."]


def comparison(pattern):
    """A table for tables.py: the picture, then the tables. ``pattern``: the file's name with <device>."""

    def make(source):
        folder, device = source
        name = pattern.replace("<device>", device)
        rows = read(folder / name)
        picture = name.replace(".csv", ".svg")
        shown = [f"![milliseconds and MiB over the length](../benchmarks/results/{picture})", ""]
        return [*(shown if (folder / picture).exists() else []), *tables_of(name, rows)]

    return make


def llama(source):
    """A line for each implementation, for each problem the milliseconds of a step, of its attention, and the share."""
    name = f"llama_{source[1]}.csv"
    rows = read(source[0] / name)
    problems = list(dict.fromkeys((row["h"], row["d"], row["length"]) for row in rows))
    found = {(row["implementation"], row["h"], row["d"], row["length"]): row for row in rows}
    body = []
    for way in ordered(rows, "implementation"):
        cells = (found[(way, *problem)] for problem in problems)
        words = (f"{number(row['step_ms'])}, {number(row['attention_ms'])}, {float(row['share']):.0%}" for row in cells)
        body.append([way, *words])
    header = [f"{h} heads of {d}, {length} tokens" for h, d, length in problems]
    machines = [x.removeprefix("NVIDIA_").replace("_", " ") for x in ordered(rows, "device")]
    facts = ", ".join([*machines, *(f"torch {x}" for x in ordered(rows, "torch")), *ordered(rows, "date")])
    return [*grid(["", *header], body), "", f"{facts}; `{name}`."]


MODES = {"no_grad": "without gradients", "grad": "with gradients to come", "backward": "its backward"}


def sdpa_on_the_host(source):
    """Microseconds of scaled_dot_product_attention on the host, of PyTorch's own and of ours in its place."""
    rows = [row for row in read(source[0] / "host.csv") if row["call"].startswith("sdpa")]
    found = {(row["machine"], row["device"], row["mode"], row["call"]): row for row in rows}
    body, used = [], []
    for machine, device, mode, call in found:
        ours = found.get((machine, device, mode, "sdpa, registered"))
        if call == "sdpa" and ours and ours["sdpa_us"] == found[machine, device, mode, call]["us"]:  # one run
            body.append([f"{device}, {MODES[mode]}", f"{float(ours['us']):.1f}", f"{float(ours['sdpa_us']):.1f}"])
            used.append(ours)
    machines = [x.removeprefix("NVIDIA ") for x in ordered(used, "machine")]
    facts = machines, [f"torch {x}" for x in ordered(used, "torch")], ordered(used, "date")
    origin = ", ".join(x for fact in facts for x in fact)
    return [*grid(["us of the host", "registered", "PyTorch's own"], body), "", f"{origin}; `host.csv`."]


TABLES = {
    "sdpa, host": sdpa_on_the_host,
    "Llama on a GPU": llama,
    "comparison on a GPU": comparison("compare_<device>.csv"),
    "comparison on a CPU": comparison("compare_cpu.csv"),
}


def draw(rows, path):
    """Milliseconds of both passes and MiB of the backward, over the length."""
    try:
        plt = _pictures.pyplot()
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    causal, kernels = ordered(rows, "causal")[-1], ordered(rows, "kernel")
    word = ", causal" if causal == "True" else ""
    panels = (
        ("forward", "ms", f"forward{word}: milliseconds"),
        ("backward", "ms", f"backward{word}: milliseconds"),
        ("backward", "mib", f"both passes{word}: MiB at the peak"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.3))
    for axis, (which, column, label) in zip(axes, panels):
        points = {
            kernel: sorted(
                (int(row["length"]), float(row[column]))
                for row in rows
                if (row["kernel"], row["pass"], row["causal"]) == (kernel, which, causal)
                and float(row[column] or 0) > 0
            )
            for kernel in kernels
        }
        _pictures.curves(axis, points)
        axis.set(title=label, yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(kernels), frameon=False)
    _pictures.save(figure, path, bottom=0.07)
    plt.close(figure)
