"""The tables of what the CPU computes and what a call costs the host, from cpu.csv, amx.csv and host.csv."""

import itertools

from _results import read

CPU = "AMD EPYC"  # the machine of the documents: Zen 5. Newer rows tell the family and the model.
DTYPES = "fp32", "bf16", "fp16"
BATCHES = 16, 32, 64, 128, 256  # lengths of short sequences
DIRECTIONS = "forward, d = 64", "forward, d = 128", "backward, d = 64", "backward, d = 128"
PASSES = "fp32 forward", "fp32 backward", "bf16 forward", "bf16 backward"
NAMES = {"fp32": "fp32, AVX-512", "bf16": "bf16, AVX512-BF16", "fp16": "fp16, AVX-512"}
LINES = {  # names of rows, and their cases
    "32 heads on 8, d 128, length 1024, causal": {"case": "gqa"},
    "window of 256, d 64, length 1024, beside a mask": {"case": "window 256"},
    "dropout 0.1, d 64, length 1024": {"case": "dropout 0.1"},
    "ALiBi, d 64, length 1024, beside a bias": {"case": "alibi"},
    "256 sequences of 32 to 128 tokens, 64 on average, 12 heads, d 64, beside padding and a mask": {
        "case": "256 sequences of 32 to 128"
    },
    "AVX2, d 64, length 2048 (share of the AVX2 peak)": {"case": "avx2", "d": 64, "causal": 0},
}
LINES.update({f"batch of {16384 // n} x {n} tokens, 12 heads, d 64": {"case": "batch", "len": n} for n in BATCHES})
OURS = ("dropout 0.1", "alibi", "softcap 30", "logits spread by 200", "denormal values")


def times(ratio):
    return f"{float(ratio):.1f}" if float(ratio) < 20 else f"{float(ratio):.0f}"


def share(row):
    return f"{float(row['share']):.0%}"


def the_row(rows, against, threads=1, **wanted):
    """The row of that name, or None if such a case is not measured."""
    wanted = {name: str(value) for name, value in {"threads": threads, **wanted}.items()}
    fits = [r for r in rows if r["against"].startswith(against) and all(r.get(k) == v for k, v in wanted.items())]
    assert len(fits) < 2, f"{len(fits)} rows are {wanted}"
    return fits[0] if fits else None


def squares(rows, names, form, **wanted):
    """One row for each dtype. Columns are forward and backward at d 64 and 128; a cell has the full and the causal
    square."""
    for dtype, name in names.items():
        cells = []
        for pas, d in itertools.product(("fwd", "bwd"), (64, 128)):
            case = {"case": "plain", "dtype": dtype, "pass": pas, "d": d, **wanted}
            full, causal = (the_row(rows, "SDPA", causal=causal, **case) for causal in (0, 1))
            cells.append(form(full, causal) if full and causal else "-")
        yield [name, *cells]


def option_rows(rows, lines, against, form):
    for name, wanted in lines.items():
        cells = []
        for dtype, pas in itertools.product(("fp32", "bf16"), ("fwd", "bwd")):
            row = the_row(rows, against, **{"dtype": dtype, "pass": pas, **wanted})
            cells.append(form(row) if row else "")
        yield [name, *cells]


def decodes(rows):
    for pages in ("decode", "decode, huge pages"):
        for dtype, n in itertools.product(DTYPES, (8192, 16384)):
            case = {"case": pages, "dtype": dtype, "len": n}
            gqa, ours = the_row(rows, "SDPA enable_gqa", **case), the_row(rows, "SDPA heads as rows", **case)
            if ours:
                name = f"{dtype}, {n}{', pages of 2 MiB' if pages != 'decode' else ''}"
                yield [name, ours["roof"], ours["ours"], share(ours), times(ours["ratio"]), times(gqa["ratio"])]


def ratios(full, causal):
    return f"{times(full['ratio'])} ({times(causal['ratio'])})"


def shares(full, causal):
    return f"{share(full)} ({share(causal)}), {ratios(full, causal)}"


def rates(full, causal):
    return f"{float(full['ours']):.0f} ({float(causal['ours']):.0f}), {shares(full, causal)}"


def grid(header, body):
    """A table's lines, of cells."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *body)]
    return [lines[0].replace("|  |", "| |"), "|" + "---|" * len(header), *lines[1:]]


def origin(rows, name):
    """A line below a table: machine, versions, date and file."""
    facts = (sorted({row.get(key) or "" for row in rows} - {""}) for key in ("cpu", "processor", "torch", "date"))
    words = ", ".join(x if i != 2 else f"torch {x}" for i, fact in enumerate(facts) for x in fact)
    return ["", f"{words}; `{name}`."]


def of_cpu(table):
    """A table from the rows of the documents' machine in cpu.csv."""

    def made(source):
        path = source[0] / "cpu.csv"
        rows = [row for row in read(path) if row["cpu"] == CPU] if path.exists() else []
        if not rows:
            raise FileNotFoundError(path)
        return table(rows)

    return made


@of_cpu
def summary(rows):
    body = squares(rows, {x: x for x in DTYPES}, ratios, len=2048)
    return grid(["", *DIRECTIONS], body) + origin([row for row in rows if row["case"] == "plain"], "cpu.csv")


@of_cpu
def one_thread(rows):
    return grid(["GFLOPS, share of peak, ratio", *DIRECTIONS], squares(rows, NAMES, rates, len=2048))


@of_cpu
def two_threads(rows):
    two = {name: NAMES[name] for name in ("fp32", "bf16")}
    return grid(["two threads, length 8192", *DIRECTIONS], squares(rows, two, shares, len=8192, threads=2))


@of_cpu
def options(rows):
    body = option_rows(rows, LINES, "SDPA", lambda row: f"{times(row['ratio'])}, {share(row)}")
    return grid(["Ratio to SDPA, share of peak", *PASSES], body)


@of_cpu
def beside_plain(rows):
    body = option_rows(rows, {x: {"case": x} for x in OURS}, "ours", lambda row: f"{float(row['ratio']):.2f}")
    return grid(["Speed beside our own plain call", *PASSES], body)


@of_cpu
def decode(rows):
    columns = ["read probe GB/s", "ours GB/s", "share", "times as fast as g heads as rows", "as `enable_gqa`"]
    return grid(["dtype, keys", *columns], decodes(rows))


def amx(source):
    """GFLOPS or GB/s, ratio to SDPA, share of the probe; causal in brackets."""
    rows, cells = read(source[0] / "amx.csv"), {}
    for row in rows:
        of_probe = f"{100 * float(row['ours']) / float(row['peak']):.0f}%" if float(row["peak"]) else "-"
        figures = f"{float(row['ours']):.0f}", row["ratio"], of_probe
        key = row["dtype"], row["pass"], row["d"], row["unit"]
        cells.setdefault(key, {})[row["threads"], row["causal"]] = figures
    threads = sorted({row["threads"] for row in rows}, key=int)
    body = []
    for (dtype, name, d, unit), cell in cells.items():
        line = [f"{dtype} {name} d {d}, {unit}"]
        for t in threads:
            full, causal = cell.get((t, "0"), ("-",) * 3), cell.get((t, "1"))
            line += [f"{x} ({y})" for x, y in zip(full, causal)] if causal else full
        body.append(line)
    header = [words for t in threads for words in (f"{t} thread{'s' * (t != '1')}", "ratio", "share")]
    return grid(["", *header], body) + origin(rows, "amx.csv")


def host(source):
    """Microseconds of a call on the host."""
    rows = read(source[0] / "host.csv")
    columns = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "sdpa"]
    names = {"cpu": "CPU tensors, one thread", "cuda": "CUDA tensors"}
    body, used = [], []
    for device, machine in (("cpu", CPU), ("cuda", "NVIDIA H100 80GB HBM3")):
        for mode, name in (("no_grad", names[device]), ("grad", "the same, with gradients to come")):
            of = {
                row["call"]: row
                for row in rows
                if (row["device"], row["machine"], row["mode"]) == (device, machine, mode)
            }
            used += of.values()
            body.append([name, *(f"{float(of[x]['us']):.1f}" if x in of else "" for x in columns)])
    machines = " and ".join(dict.fromkeys(row["machine"].removeprefix("NVIDIA ") for row in used))
    dates = ", ".join(sorted({row["date"] for row in used}))
    header = ["us", "`flash_attn_func`", "`.._varlen_func`", "`.._with_kvcache`", "PyTorch's attention"]
    return [*grid(header, body), "", f"{machines}, {dates}; `host.csv`."]


TABLES = {
    "CPU": summary,
    "CPU, one thread": one_thread,
    "CPU, two threads": two_threads,
    "CPU, options": options,
    "CPU, beside a plain call": beside_plain,
    "CPU, decode": decode,
    "AMX": amx,
    "host": host,
}
