"""Attention on the CPU beside PyTorch's scaled_dot_product_attention and beside the peak of the machine.

    python benchmarks/bench_cpu.py                              every case, with one thread and with all: a few minutes
    python benchmarks/bench_cpu.py --only "plain fp32" --threads 1
    python benchmarks/bench_cpu.py --list

tests/cases.py has the cases. In each round of a case a probe of the machine, our call, and the calls for comparison run
one after the other. ``ratio`` is the speed of our call divided by the other speed, as the median over the rounds of
adjacent calls. Rates are those of the best round. ``share`` is our rate divided by the probe's rate (for a decode the
median, too).

For arithmetic the probe is peak.c: independent multiply-adds in registers, of fp32, or of bf16 pairs if our kernel
multiplies bf16 pairs. For a decode the probe is read.c: one pass over the bytes of the cache. GFLOPS count 4 d
operations for each visible pair of query and key forward and 10 d backward, and a causal square as a half. GB/s count
the cache once.

With one thread the clock is the thread's processor time, which other programs on the core hardly lengthen. With more
threads it is the wall clock, and PyTorch's spinning workers get a few ms to go to sleep before the next call. Inputs
are random.

Writes cpu.csv and cpu.png to the folder --out. A row replaces the older row of the same case.
"""

import argparse
import ctypes
import mmap
import re
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Callable, Optional

import flash_attn_2_cuda as engine
import torch
import torch.nn.functional as F
from _results import add_out, pictures, save
from cases import BENCH_CPU
from cases import Case as Sizes

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn._measure import machine

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# ---- the cases -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A row of the table. ``build`` makes its tensors and calls shortly before the measurement."""

    kind: str
    sizes: Sizes
    h: int
    build: Callable
    isa: Optional[str] = None  # the strongest instruction set for our call; None: the machine's
    passes: tuple = ("fwd", "bwd")

    def __getattr__(self, name):
        return getattr(self.sizes, name)

    @property
    def len(self):
        return self.sizes.len_kv

    def __str__(self):
        return f"{self.kind} {self.dtype} d{self.d} len{self.len}{' causal' if self.causal else ''}"


@dataclass
class Calls:
    """The timed calls. ``ours`` and ``others`` take no arguments, and the backward differentiates them for ``leaves``.

    ``work`` is a number of visible pairs times heads, or bytes of a cache. ``kernel`` is the call for explain().
    ``agree`` turns an output of the others into an output that must equal ours. Without ``agree`` nothing is compared.
    """

    ours: Callable
    others: dict
    leaves: list
    work: float
    kernel: tuple
    agree: Optional[Callable] = None


def chosen_cases(threads):
    """The cases of tests/cases.py, with what is special about their kind."""
    special = {
        "avx2": {"isa": "avx2"},
        "logits spread by 200": {"build": unusual(spread=200)},
        "denormal values": {"build": unusual(values=1e-39)},
        "256 sequences of 32 to 128": {"build": packed},
        "batch": {"passes": ("fwd",)},
        "bias of pairs": {"build": biased(lambda h, n: (1, h, n, n))},
        "bias of pairs of all heads": {"build": biased(lambda h, n: (1, 1, n, n))},
        "bias of keys": {"build": biased(lambda h, n: (1, h, 1, n))},
        "bias of windows": {"build": biased(lambda h, n: (1, h, n, n))},
        "decode": {"build": decode(), "passes": ("fwd",)},
        "decode, huge pages": {"build": decode(in_huge_pages), "passes": ("fwd",)},
    }
    for kind, sizes in BENCH_CPU.items():
        if kind.startswith("decode") and threads > 1:
            continue  # PyTorch's spinning workers would occupy the cores that the memory probe needs
        for size in sizes:
            case = Case(kind, size, **{"h": size.h, "build": dense, **special.get(kind, {})})
            if kind == "plain":
                case.h = max(threads, size.h)  # PyTorch's backward has at most one thread for each head
                if size.dtype == "fp16" and size.len_q == 8192:
                    case.passes = ("fwd",)  # PyTorch's backward takes ten seconds
            yield case


def random(case, *shapes):
    return [torch.randn(*shape).to(DTYPES[case.dtype]) for shape in shapes]


def sdpa(q, k, v, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def dense(case):
    """flash_attn_func. Options are compared with our own plain call and with the nearest option of PyTorch."""
    b, n, h, d, h_kv = case.b, case.len, case.h, case.d, case.h_kv or case.h
    q, k, v = leaves = random(case, (b, n, h, d), (b, n, h_kv, d), (b, n, h_kv, d))
    row, key = torch.arange(n)[:, None], torch.arange(n)
    pairs, kwargs, name, theirs = n * n / (2 if case.causal else 1), {}, "SDPA", {"is_causal": case.causal}
    if h_kv < h:
        name, theirs = "SDPA enable_gqa", {"is_causal": case.causal, "enable_gqa": True}
    if case.window != (-1, -1):
        kwargs, name = {"window_size": case.window}, "SDPA mask"
        theirs = {"attn_mask": (row - case.window[0] <= key) & (key <= row)}
        pairs = theirs["attn_mask"].sum().item()
    if case.alibi:
        slopes = 2 ** (-8 * (1 + torch.arange(h)) / h)
        kwargs, name = {"alibi_slopes": slopes}, "SDPA bias"
        theirs = {"attn_mask": (-slopes[:, None, None] * (row - key).abs()).to(q.dtype)}
    if case.dropout:
        kwargs, name, theirs = {"dropout_p": case.dropout}, "SDPA dropout", {"dropout_p": case.dropout}
    if case.softcap:
        kwargs = {"softcap": case.softcap}
    ours = lambda **kwargs: flash_attn_func(q, k, v, causal=case.causal, **kwargs)  # noqa: E731
    others = {} if case.softcap else {name: lambda: sdpa(q, k, v, **theirs)}
    if case.alibi or case.dropout or case.softcap:
        others["ours, plain"] = ours
    comparable = name in others and not case.dropout
    kernel = (flash_attn_func, (q, k, v), {"causal": case.causal, **kwargs})
    return Calls(lambda: ours(**kwargs), others, leaves, b * h * pairs, kernel, (lambda x: x) if comparable else None)


def unusual(spread=None, values=1.0):
    """Numbers that could be slow, compared with our own time for normal numbers."""

    def build(case):
        shape = (case.b, case.len, case.h, case.d)
        q, k, v = random(case, shape, shape, shape)
        # Scores are normal with a deviation of 1, so nearly all of 1024 keys lie within 3 of 0.
        hard = (q * (spread / 6 if spread else 1), k.clone(), v * values)
        others = {"ours, normal numbers": lambda: flash_attn_func(q, k, v)}
        pairs = case.b * case.h * case.len**2
        return Calls(lambda: flash_attn_func(*hard), others, [*hard, q, k, v], pairs, (flash_attn_func, hard, {}))

    return build


def biased(shape):
    """attn_bias with its gradient, beside SDPA with the same tensor."""

    def build(case):
        rows = (case.b, case.len, case.h, case.d)
        q, k, v, bias = leaves = random(case, rows, rows, rows, shape(case.h, case.len))
        kernel = (flash_attn_func, (q, k, v), {"attn_bias": bias})
        others = {"SDPA bias": lambda: sdpa(q, k, v, attn_mask=bias)}
        pairs = case.b * case.h * case.len**2
        return Calls(lambda: flash_attn_func(q, k, v, attn_bias=bias), others, leaves, pairs, kernel, lambda x: x)

    return build


def packed(case):
    """Sequences of 32 to case.len tokens, 64 on average, beside SDPA on the padded batch with a mask. The times
    contain neither padding nor packing."""
    b, n, h, d = case.b, case.len, case.h, case.d
    lengths = (32 + (n - 32) * torch.rand(b) ** 2).round().long()
    total, exists = int(lengths.sum()), torch.arange(n) < lengths[:, None]
    q, k, v = leaves = random(case, *[(total, h, d)] * 3)
    padded = [torch.zeros(b, n, h, d, dtype=q.dtype) for _ in range(3)]
    for full, x in zip(padded, leaves):
        full[exists] = x
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    kernel = (flash_attn_varlen_func, (q, k, v, cu_seqlens, cu_seqlens, n, n), {})
    others = {"SDPA padded": lambda: sdpa(*padded, attn_mask=exists[:, None, None])}
    work = h * int((lengths**2).sum())
    return Calls(lambda: flash_attn_varlen_func(*kernel[1]), others, leaves + padded, work, kernel, lambda x: x[exists])


def in_huge_pages(x):
    """A copy in pages of 2 MiB, if the system has them. Tensors have pages of 4 KiB."""
    memory = mmap.mmap(-1, x.numel() * x.element_size())
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=x.dtype).view_as(x).copy_(x)


def decode(place=lambda x: x):
    """One query token against a long cache. "Heads as rows" is the fastest call that a user gets by rewriting."""

    def build(case):
        b, n, h, h_kv, d = case.b, case.len, case.h, case.h_kv, case.d
        q, k, v = random(case, (b, 1, h, d), (b, n, h_kv, d), (b, n, h_kv, d))
        k, v = place(k), place(v)
        k_heads, v_heads, rows = k.transpose(1, 2), v.transpose(1, 2), q.view(b, h_kv, h // h_kv, d)
        others = {
            "SDPA enable_gqa": lambda: sdpa(q, k, v, enable_gqa=True),
            "SDPA heads as rows": lambda: F.scaled_dot_product_attention(rows, k_heads, v_heads),
        }
        kernel = (flash_attn_with_kvcache, (q, k, v), {})
        work = 2 * k.numel() * k.element_size()
        return Calls(
            lambda: flash_attn_with_kvcache(q, k, v), others, [k, v], work, kernel, lambda x: x.reshape(q.shape)
        )

    return build


# ---- the machine -----------------------------------------------------------------------------------------------------


class Probes:
    """peak.c and read.c as libraries of this machine, compiled once."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        wide, narrow = self.build("peak.c"), self.build("peak.c", "-mno-avx512f")
        self.peaks = {"fma": wide.peak_fma, "bf16": wide.peak_bf16, "avx2": narrow.peak_fma}
        for function in self.peaks.values():
            function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_double
        self.read_all = self.build("read.c").read_all
        self.read_all.argtypes, self.read_all.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64

    def build(self, source, *flags):
        library = Path(self.folder.name) / f"{source}{''.join(flags)}.so"
        command = ["gcc", "-O3", "-march=native", *flags, "-shared", "-fPIC", "-o", library]
        subprocess.run([*command, ROOT / "benchmarks" / source], check=True)
        return ctypes.CDLL(str(library))

    def peak(self, isa):
        """A call of one thread that computes for about 2 ms, and its number of operations."""
        function = self.peaks[isa if isa == "avx2" else "bf16" if isa in ("avx512bf16", "amx") else "fma"]
        return lambda: function(1_000_000), function(1)  # the number of operations is proportional to the argument

    def read(self, tensors, threads):
        """A call that reads the tensors, in which each thread reads its share."""
        shares = []
        for x in tensors:
            share = x.numel() * x.element_size() // threads // 256 * 256
            shares += [(x.data_ptr() + i * share, share) for i in range(threads)]
        if threads == 1:
            return lambda: [self.read_all(*share) for share in shares]
        pool = ThreadPoolExecutor(threads)
        return lambda: list(pool.map(lambda share: self.read_all(*share), shares))


# ---- the measurement -------------------------------------------------------------------------------------------------


def alternate(calls, threads, seconds, least=3, most=25):
    """Times of each call in each round. One round before is not measured."""
    clock, pause = (time.thread_time, 0.0) if threads == 1 else (time.perf_counter, 0.005)
    times, until = {name: [] for name in calls}, 0.0
    for i in range(1 + most):
        for name, call in calls.items():
            time.sleep(pause)
            start = clock()
            call()
            times[name].append(clock() - start)
        if i == 0:
            times, until = {name: [] for name in calls}, time.perf_counter() + seconds
        elif i >= least and time.perf_counter() > until:
            break
    return times


def measure(case, probes, threads, seconds):
    """Rows of the case: one for each pass and each comparison."""
    engine.set_cpu_isa(case.isa)
    work = case.build(case)
    if work.agree:
        limit = 1e-4 if case.dtype == "fp32" else 0.05
        for name, other in work.others.items():
            if name.startswith("SDPA"):
                error = (work.ours().float() - work.agree(other()).float()).abs().max().item()
                assert error < limit, f"{case}: ours and {name} differ by {error}"
    if "bwd" in case.passes:
        for x in work.leaves:
            x.requires_grad_()
    plan = explain(work.kernel[0], *work.kernel[1], **work.kernel[2])
    for direction in case.passes:
        calls = {"ours": work.ours, **work.others}
        used = plan if direction == "fwd" else plan.backward
        if direction == "bwd":
            calls = {name: backward_of(call, work.leaves) for name, call in calls.items()}
        if case.kind.startswith("decode"):
            unit, amount, probe, probed = "GB/s", work.work, probes.read(work.leaves, threads), work.work
        else:
            probe, one = probes.peak(used.isa)
            unit, amount, probed = "GFLOPS", (4 if direction == "fwd" else 10) * case.d * work.work, 1e6 * one * threads
        times = alternate({"probe": probe, **calls}, threads, seconds)
        roof, ours = probed / min(times["probe"]) / 1e9, amount / min(times["ours"]) / 1e9
        share = ours / roof
        if unit == "GB/s":  # other programs use the memory, too, so only adjacent calls compare
            share = median(a / b for a, b in zip(times["probe"], times["ours"]))
        for name in work.others:
            yield {
                **machine(), "isa": used.isa, "threads": threads, "case": case.kind, "dtype": case.dtype,
                "pass": direction, "d": case.d, "len": case.len, "causal": int(case.causal),
                "b": case.b, "h": case.h, "h_kv": case.h_kv or case.h, "kernel": used.kernel, "unit": unit,
                "ours": round(ours, 1), "against": name, "theirs": round(amount / min(times[name]) / 1e9, 2),
                "ratio": round(median(b / a for a, b in zip(times["ours"], times[name])), 2),
                "roof": round(roof, 1), "share": round(share, 3), "rounds": len(times["ours"]),
            }  # fmt: skip
    engine.set_cpu_isa(None)


def backward_of(call, leaves):
    out = call()
    dout = torch.randn_like(out)
    # Some calls do not use every leaf, because a padded batch has leaves of its own.
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True, allow_unused=True)


# ---- the results -----------------------------------------------------------------------------------------------------

KEY = ("cpu", "threads", "case", "dtype", "pass", "d", "len", "causal", "isa", "against")


def draw(rows, path):
    """Ratio to PyTorch, with one panel for each pass and one bar for each case of one thread, in the order of the
    file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        {**row, "ratio": float(row["ratio"]), "share": float(row["share"])}
        for row in rows
        if row["threads"] == "1" and row["against"].startswith("SDPA")
    ]
    if not rows:
        return
    panels = {pas: [row for row in rows if row["pass"] == pas][::-1] for pas in ("fwd", "bwd")}
    height = 0.2 * max(map(len, panels.values())) + 1.4
    figure, axes = pyplot.subplots(1, 2, figsize=(13, height), layout="constrained")
    colours = {"fp32": "tab:blue", "bf16": "tab:orange", "fp16": "tab:green"}
    for axis, (pas, bars) in zip(axes, panels.items()):
        at = range(len(bars))
        drawn = axis.barh(at, [r["ratio"] for r in bars], color=[colours[r["dtype"]] for r in bars])
        axis.set_yticks(at, [bar_name(r) for r in bars], fontsize=7)
        axis.bar_label(drawn, [f"{r['ratio']:.1f}x, {r['share']:.0%}" for r in bars], padding=3, fontsize=7)
        axis.set_xscale("log")
        axis.set_xlim(0.6, 3 * max([r["ratio"] for r in bars], default=1))
        axis.set_ylim(-0.6, len(bars) - 0.4)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title({"fwd": "forward", "bwd": "backward"}[pas])
    figure.supxlabel(
        "times as fast as PyTorch's SDPA, one thread; share of the machine's peak, or of its read rate", fontsize=8
    )
    figure.savefig(path, dpi=110)


def bar_name(row):
    name = f"{row['case']} {row['dtype']} d{row['d']} len {row['len']}{' causal' if row['causal'] == '1' else ''}"
    return f"{name}: {row['against'].removeprefix('SDPA ')}" if row["case"].startswith("decode") else name


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose line in --list matches")
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--passes", choices=("fwd", "bwd"), nargs="*", default=["fwd", "bwd"])
    parser.add_argument("--seconds", type=float, default=0.4, help="of each pass of each case, but 3 rounds at least")
    add_out(parser)
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args()

    torch.manual_seed(0)
    chosen = [(threads, case) for threads in options.threads for case in chosen_cases(threads)]
    chosen = [(threads, case) for threads, case in chosen if re.search(options.only, str(case))]
    if options.list or not chosen:
        print(*dict.fromkeys(str(case) for _, case in chosen), sep="\n")
        return
    probes, rows = Probes(), []
    print(f"{'threads':7} {'case':50} {'pass':4} {'ours':>7} {'theirs':>7}        {'ratio':>6} {'share':>6}  against")
    for threads, case in chosen:
        torch.set_num_threads(threads)
        case.passes = [direction for direction in case.passes if direction in options.passes]
        for row in measure(case, probes, threads, options.seconds):
            rows.append(row)
            print(
                f"{threads:7} {case!s:50} {row['pass']:4} {row['ours']:7.1f} {row['theirs']:7.1f} {row['unit']:6}"
                f" {row['ratio']:6.2f} {row['share']:6.0%}  {row['against']}",
                flush=True,
            )
    if rows:
        draw(save(rows, options.out / "cpu.csv", list(rows[0]), KEY), pictures(options.out) / "cpu.png")


if __name__ == "__main__":
    main()
