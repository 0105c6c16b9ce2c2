"""Attention on the CPU beside PyTorch's scaled_dot_product_attention: GFLOPS, share of the machine's peak, ratio.

    python benchmarks/bench_cpu.py                        one thread, then all of them
    python benchmarks/bench_cpu.py --dtype fp32 --rounds 3

Per case and round, one after the other: the peak probe (independent multiply-adds, peak.c), our call, PyTorch's. The
ratio is the median over the rounds of adjacent calls; GFLOPS are the best round's. With one thread the clock is the
thread's processor time, which other programs on the core hardly lengthen; with more it is the wall's, and PyTorch's
spinning workers are given a few ms to go to sleep before the next call. Random inputs, b = 1, q, k, v contiguous
[b, len, h, d]. Operations: 4 b h len^2 d forward, 10 backward, half of that when causal.

Writes benchmarks/results/cpu.csv and cpu.png.
"""

import argparse
import csv
import ctypes
import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from flash_attn import flash_attn_func
from flash_attn._measure import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {512: 8, 2048: 2, 8192: 1}  # about the same work each


def build_probe():
    """peak.c as a library of this machine."""
    library = Path(tempfile.mkdtemp()) / "peak.so"
    source = ROOT / "benchmarks" / "peak.c"
    subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
    probe = ctypes.CDLL(str(library))
    for function in (probe.peak_fma, probe.peak_bf16):
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_double
    return probe


class Timer:
    """Seconds of a call: processor time of the only thread, or wall time of several."""

    def __init__(self, threads):
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.pause = 0.0 if threads == 1 else 0.005

    def __call__(self, function, *args):
        time.sleep(self.pause)
        start = self.clock()
        result = function(*args)
        return self.clock() - start, result


def sdpa(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def measure(probe, dtype, d, n, causal, rounds, threads):
    """Rows for the forward and the backward of one case."""
    timer, h = Timer(threads), HEADS[n]
    q, k, v = (torch.randn(1, n, h, d).to(DTYPES[dtype]).requires_grad_() for _ in range(3))
    dout = torch.randn(1, n, h, d).to(DTYPES[dtype])
    functions = {"ours": lambda: flash_attn_func(q, k, v, causal=causal), "torch": lambda: sdpa(q, k, v, causal)}
    seconds = {(name, pas): [] for name in functions for pas in ("fwd", "bwd")}
    peaks = []
    peak = probe.peak_bf16 if dtype == "bf16" and probe.peak_bf16(1) else probe.peak_fma
    for i in range(rounds + 1):
        took, flops = timer(peak, 2_000_000)
        peaks.append(flops / took / 1e9)
        for name, function in functions.items():
            forward, out = timer(function)
            backward, _ = timer(torch.autograd.grad, out, (q, k, v), dout)
            if i > 0:  # the first round warms up
                seconds[name, "fwd"].append(forward)
                seconds[name, "bwd"].append(backward)
    for pas, factor in (("fwd", 4), ("bwd", 10)):
        ours, theirs = seconds["ours", pas], seconds["torch", pas]
        gflop = factor * h * n * n * d / (2 if causal else 1) / 1e9
        yield {
            "dtype": dtype, "pass": pas, "d": d, "len": n, "h": h, "causal": int(causal),
            "ours_gflops": round(gflop / min(ours), 1), "torch_gflops": round(gflop / min(theirs), 1),
            "ratio": round(median(b / a for a, b in zip(ours, theirs)), 2),
            "peak_gflops": round(max(peaks) * threads, 1),
            "share_of_peak": round(gflop / min(ours) / (max(peaks) * threads), 3),
        }  # fmt: skip


def write_csv(rows, path):
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw(rows, path):
    """Ratio to PyTorch, one panel a pass, one bar a case of one thread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["threads"] == 1]
    if not rows:
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.24 * len(rows) / 2 + 1.4), layout="constrained")
    colours = {"fp32": "tab:blue", "bf16": "tab:orange", "fp16": "tab:green"}
    for axis, pas in zip(axes, ("fwd", "bwd")):
        bars = [row for row in rows if row["pass"] == pas][::-1]
        names = [f"{r['dtype']} d{r['d']} len {r['len']}{' causal' if r['causal'] else ''}" for r in bars]
        drawn = axis.barh(names, [r["ratio"] for r in bars], color=[colours[r["dtype"]] for r in bars])
        labels = [f"{r['ratio']:.1f}x, {r['share_of_peak']:.0%} of peak" for r in bars]
        axis.bar_label(drawn, labels, padding=3, fontsize=7)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlim(0, 1.55 * max(r["ratio"] for r in bars))
        axis.set_title({"fwd": "forward", "bwd": "backward"}[pas])
        axis.set_xlabel("times as fast as PyTorch's SDPA, one thread")
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=list(DTYPES))
    parser.add_argument("--len", type=int, choices=HEADS, nargs="*", default=[512, 2048])
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path, default=RESULTS / "cpu.csv")
    parser.add_argument("--picture", type=Path, default=RESULTS / "cpu.png")
    options = parser.parse_args()

    torch.manual_seed(0)
    probe, rows = build_probe(), []
    command = " ".join(["python benchmarks/bench_cpu.py", *sys.argv[1:]])
    print("threads dtype pass   d  len causal    ours   torch  ratio  of peak")
    for threads, *case in itertools.product(options.threads, options.dtype, (64, 128), options.len, (False, True)):
        torch.set_num_threads(threads)
        for row in measure(probe, *case, options.rounds, threads):
            rows.append({**machine(), **row, "command": command})
            print(
                f"{threads:7} {row['dtype']:>5} {row['pass']:>4} {row['d']:3} {row['len']:4} {row['causal']:6}"
                f" {row['ours_gflops']:7.0f} {row['torch_gflops']:7.0f} {row['ratio']:6.2f}"
                f" {row['share_of_peak']:8.0%}",
                flush=True,
            )
    write_csv(rows, options.csv)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
