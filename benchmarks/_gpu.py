"""What the benchmarks on a GPU share: problems, the rule of timing, the files they write, the tables of the README.

Problems: 16k tokens, hidden size 2048: for head_dim d there are 2048 / d heads, for length s 16k / s sequences. Packed:
24 sequences of 64 .. 4096 tokens, 54,368 in all; beside them a dense batch of as many operations (0.04% fewer) that
fills its tiles: 21 sequences of 2688, 3.8% more tokens. Input is N(0, 1) in bf16. TFLOPS count what the formula needs,
half of it when causal.

Timing: the kernels of a problem run in turns, one launch each, so that the board's clock, which wanders, is the same
for all of them: CUDA events around every launch, the L2 flushed before it, the median of as many turns as fill
--seconds after a tenth of them as warm-up. The SM clock is read in the middle. Compare within a problem only.
"""

import csv
import datetime
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

RESULTS = Path(__file__).resolve().parent / "results"
TOKENS, HIDDEN = 16384, 2048
LENGTHS = torch.randint(64, 4097, (24,), generator=torch.Generator().manual_seed(0))
EQUAL = 21, 2688  # sequences, length
COLUMNS = [
    "date",
    "device",
    "torch",
    "cudnn",
    "kernel",
    "d",
    "b",
    "h",
    "length",
    "causal",
    "ms",
    "tflops",
    "mhz",
    "mib",
]


def device_name():
    """This GPU's, or that of the tables where there is none."""
    return torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "NVIDIA_H100_80GB_HBM3"


def add_options(parser, dims=(64, 128, 256), lengths=(1024, 4096, 16384), seconds=0.4):
    parser.add_argument("--dims", type=int, nargs="+", default=dims)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--seconds", type=float, default=seconds, help="for all kernels of a problem together")
    parser.add_argument(
        "--packed", action="store_true", help="packed sequences beside dense ones of as many operations"
    )
    parser.add_argument("--csv", type=Path, help="where to write the figures, or what --table reads")
    parser.add_argument(
        "--table", action="store_true", help="measure nothing, print the table of the file: its --lengths"
    )


def problems(options):
    """(d, heads, causal, length or "packed") in the order of the table."""
    for d in options.dims:
        for causal in (False, True):
            for length in ["packed"] if options.packed else options.lengths:
                yield d, HIDDEN // d, causal, length


def offsets():
    """cu_seqlens of the packed problem."""
    return torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)).to("cuda", torch.int32)


def compiled_flex():
    """FlexAttention for one problem: of nine kinds of tensors in one process torch would compile no more than eight."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def area(length, b):
    """Scores of one head in all sequences."""
    return int((LENGTHS**2).sum()) if length == "packed" else b * length**2


def clock():
    """Asks for the SM clock without waiting for the answer."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        return None


def answer(asked):
    """MHz, or None where nvidia-smi does not say."""
    try:
        return int(asked.communicate(timeout=10)[0].split()[0])
    except (AttributeError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def launch(fn, flush):
    """The events around one launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    fn()
    end.record()
    return begin, end


def ready(kernels):
    """{name: call} of those that take the problem."""
    calls = {}
    for name, make in kernels.items():
        try:
            calls[name] = make()
            calls[name]()
        except (RuntimeError, TypeError, ImportError) as error:
            calls.pop(name, None)
            print(f"  {name}: {str(error).splitlines()[0]}")
    return calls


def measure(calls, seconds, flush):
    """{name: milliseconds}, and MHz."""
    pairs = [launch(call, flush) for call in calls.values() for _ in range(3)]
    torch.cuda.synchronize()
    turns = max(5, int(seconds * 1000 / (sum(begin.elapsed_time(end) for begin, end in pairs) / 3)))
    pairs = {name: [] for name in calls}
    asked = None
    for turn in range(-max(1, turns // 10), turns):
        if turn == turns // 2:
            torch.cuda.synchronize()  # nvidia-smi looks while the second half runs
            asked = clock()
        for name, call in calls.items():
            pair = launch(call, flush)
            if turn >= 0:
                pairs[name].append(pair)
    torch.cuda.synchronize()
    return {name: median(begin.elapsed_time(end) for begin, end in found) for name, found in pairs.items()}, answer(
        asked
    )


def peak_memory(fn):
    """MiB that a call needs beyond what it finds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def machine():
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def run(options, kernels_of, per_score):
    """Measures every problem: the rows, as they come.

    kernels_of(d, h, causal, length): {name: (b, length, what makes a call without arguments)}.
    per_score: operations for each score and column of a head.
    """
    base = machine()
    print(f"{base['device']}, torch {base['torch']}, cuDNN {base['cudnn']}: TFLOPS, MiB of memory")
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for d, h, causal, length in problems(options):
        kernels = kernels_of(d, h, causal, length)
        calls = ready({name: make for name, (_, _, make) in kernels.items()})
        times, mhz = measure(calls, options.seconds, flush)
        line = ""
        for name, ms in times.items():
            b, own_length, _ = kernels[name]
            tflops = per_score * h * d * area(own_length, b) * (0.5 if causal else 1) / ms / 1e9
            row = {"kernel": name, "d": d, "b": b, "h": h, "length": own_length, "causal": causal, "mhz": mhz}
            row.update(ms=round(ms, 4), tflops=round(tflops, 1), mib=round(peak_memory(calls[name])))
            yield {**base, **row}
            line += f"  {name} {tflops:4.0f}, {row['mib']}"
        print(f"d {d:3}  length {length:>6}  {'causal' if causal else 'full  '}  {mhz} MHz{line}", flush=True)


def write(rows, path, columns=COLUMNS):
    """The rows, as they come, each with the command that made them; returns them."""
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    if "--csv" in words:  # where they go says nothing about them
        at = words.index("--csv")
        del words[at : at + 2]
    command = " ".join(words)
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "command"], lineterminator="\n")
        writer.writeheader()
        written = []
        for row in rows:
            writer.writerow({**row, "command": command})
            file.flush()
            written.append(row)
    return written


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def print_table(path, wanted):
    """The README's: a line for each head_dim, a column for each kernel, TFLOPS at these lengths, causal in brackets."""
    rows = read(path)
    names, dims = (list(dict.fromkeys(row[key] for row in rows)) for key in ("kernel", "d"))
    lengths = sorted({int(row["length"]) for row in rows if row["length"] != "packed"} & {*wanted, EQUAL[1]})
    found = {(r["d"], r["kernel"], r["length"], r["causal"]): float(r["tflops"]) for r in rows}
    print(f"\n{rows[0]['device']}, {rows[0]['date']}, {path.name}")
    print(f"| head_dim | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for d in dims:
        cells = []
        for name in names:
            pairs = [
                tuple(found.get((d, name, s, c)) for c in ("False", "True")) for s in ["packed", *map(str, lengths)]
            ]
            cells.append(" / ".join(f"{full:.0f} ({causal or 0:.0f})" for full, causal in pairs if full is not None))
        print(f"| {d} | {' | '.join(cells)} |")


def plot(rows, path):
    """One picture for each head_dim: TFLOPS over length."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        return
    for d in dict.fromkeys(row["d"] for row in rows):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
        for axis, causal in zip(axes, (False, True)):
            for name in dict.fromkeys(row["kernel"] for row in rows):
                of_name = [r for r in rows if (r["kernel"], r["d"], r["causal"]) == (name, d, causal)]
                axis.plot([r["length"] for r in of_name], [r["tflops"] for r in of_name], marker="o", label=name)
            axis.set(
                title=f"head_dim {d}{', causal' if causal else ''}", xlabel="length", xscale="log", ylabel="TFLOPS"
            )
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0].legend()
        figure.tight_layout()
        figure.savefig(path.with_name(f"{path.stem}_d{d}.svg"))
        plt.close(figure)


def main(options, stem, kernels_of, per_score):
    """What every such benchmark does: measure, write, draw, and print the table; or only print it."""
    suffix = "_packed" if options.packed else ""
    path = options.csv or RESULTS / f"{stem}_{device_name()}{suffix}.csv"
    if not options.table:
        rows = write(run(options, kernels_of, per_score), path)
        if not options.packed:
            plot(rows, path)
    print_table(path, options.lengths)
