"""Forward and backward on a GPU beside FlashAttention-3 and cuDNN: every shape and element type in one run.

The kernels of a problem run in turns (_gpu.py), as calls that allocate their results. One packed problem is that of
_gpu.py, the other has short sequences. TFLOPS count 4 d operations for each pair of a query and a key that it sees, and
10 d in the backward.

    python benchmarks/bench_peers.py --fa3 PATH      and the library _C.so of FlashAttention-3, as xformers has it
    python benchmarks/bench_peers.py --only "64 columns"
    python benchmarks/bench_peers.py --added         what a call adds to a stream of flushes (_gpu.py)

With --added there are dense problems of few work tiles, too. In turns the host binds their figures.

Writes peers_<device>.csv, or peers_added_<device>.csv, to the folder --out and prints the table.
"""

import argparse
import random
import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from _gpu import LENGTHS, added, flusher, in_turns, machine, offsets, ready
from _results import add_out, command, need_gpu, save
from cases import BENCH_FEW_TILES, BENCH_PEERS
from tables import print_tables
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func, flash_attn_varlen_func

PACKED = {24: LENGTHS, 256: torch.randint(1, 129, (256,), generator=torch.Generator().manual_seed(0))}
FLOPS = {"forward": 4, "backward": 10}  # of a pair and column
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = "b", "len_q", "len_kv", "h", "h_kv", "d"
PROBLEM = "kernel", "pass", "problem", "dtype", *SIZES, "causal"
COLUMNS = "date", "device", "torch", "cudnn", "rule", *PROBLEM, "ms", "tflops", "mhz", "command"


def tensors(case):
    """q, k, v and the gradient of the output."""
    sizes = [(case.b, case.len_q, case.h, case.d), *[(case.b, case.len_kv, case.heads_kv, case.d)] * 2]
    if case.packed:
        sizes = [(sum(case.len_q), case.h, case.d)] * 3
    made = [torch.randn(size, device="cuda", dtype=DTYPES[case.dtype]) for size in (*sizes, sizes[0])]
    return made[:3], made[3]


def passes(forward, leaves, dout):
    """A call of one pass, by default of both. forward(*leaves) is differentiable."""
    out = forward(*leaves)

    def call(*which):
        with torch.no_grad():
            if "backward" not in which:
                forward(*leaves)
        if "forward" not in which:
            torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return call


def ours(case):
    leaves, dout = tensors(case)
    leaves = [x.requires_grad_() for x in leaves]
    options = {"causal": case.causal, "window_size": case.window}
    if case.packed:
        cu, longest = offsets(case.len_q), max(case.len_q)
        return passes(lambda *x: flash_attn_varlen_func(*x, cu, cu, longest, longest, **options), leaves, dout)
    return passes(lambda *x: flash_attn_func(*x, **options), leaves, dout)


def fa3(case):
    leaves, dout = tensors(case)
    left, right = case.window
    options = {"is_causal": case.causal, "window_size_left": left, "window_size_right": right}
    if case.packed:
        cu, longest = offsets(case.len_q), max(case.len_q)
        options.update(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
    ops = torch.ops.flash_attn_3
    out, lse, *_ = ops.fwd(*leaves, **options)

    def call(*which):
        if "backward" not in which:
            ops.fwd(*leaves, **options)
        if "forward" not in which:
            ops.bwd(dout, *leaves, out, lse, **options)

    return call


def cudnn(case):
    """Heads first, as strides of [b, s, h, d]."""
    if case.packed or case.window != (-1, -1) or (case.causal and case.len_q != case.len_kv):
        raise RuntimeError("PyTorch passes no such problem to cuDNN")
    leaves, dout = tensors(case)
    leaves = [x.transpose(1, 2).requires_grad_() for x in leaves]

    def forward(*x):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns why cuDNN does not take the problem
            return F.scaled_dot_product_attention(*x, is_causal=case.causal, enable_gqa=case.h != case.heads_kv)

    return passes(forward, leaves, dout.transpose(1, 2))


def seen(case):
    """Pairs of a head in all sequences."""
    total = 0
    for len_q, len_kv in case.lengths:
        left, right = (len_kv if size < 0 else size for size in case.window)
        at = torch.arange(len_q, dtype=torch.int64) + len_kv - len_q  # the key on the diagonal
        last = (at + (0 if case.causal else right)).clamp(max=len_kv - 1)
        total += int((last - (at - left).clamp(min=0) + 1).clamp(min=0).sum())
    return total


def run(options):
    flush, rng = flusher(), random.Random(0)
    rule, measure = ("added", added) if options.added else ("turns", in_turns)
    said = command().replace(options.fa3 or "PATH", "PATH")
    makers = {"ours": ours, **({"FA3": fa3} if options.fa3 else {}), "cuDNN": cudnn}
    for problem, case in BENCH_PEERS + (BENCH_FEW_TILES if options.added else []):
        if options.only and not any(word in f"{problem}, {case.d} columns" for word in options.only):
            continue
        if case.packed:
            lengths = tuple(PACKED[case.b].tolist())
            case = replace(case, len_q=lengths, len_kv=lengths)
        made = ready({name: partial(make, case) for name, make in makers.items()})
        rows = []
        for which, factor in ((name, FLOPS[name]) for name in options.passes):
            times, mhz = measure(
                {name: partial(calls, which) for name, calls in made.items()}, options.seconds, flush, rng
            )
            operations = factor * case.h * case.d * seen(case)
            packed = {24: "64..4096", 256: "1..128"}.get(case.b)
            lengths = (packed,) * 2 if case.packed else (case.len_q, case.len_kv)
            sizes = len(case.lengths), *lengths, case.h, case.heads_kv, case.d
            for kernel, ms in times.items():
                figures = {"ms": round(ms, 4), "tflops": round(operations / ms / 1e9, 1), "mhz": mhz}
                values = kernel, which, problem, case.dtype, *sizes, case.causal
                rows.append({**machine(), "rule": rule, "command": said, **dict(zip(PROBLEM, values)), **figures})
        figures = "  ".join(f"{row['pass']} {row['kernel']} {row['tflops']:.0f}" for row in rows)
        print(f"{problem}, {case.d} columns{', causal' if case.causal else ''}: {figures}", flush=True)
        yield rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="problems with one of these texts in 'NAME, D columns'")
    parser.add_argument("--passes", nargs="+", default=list(FLOPS), choices=FLOPS, help="default: both")
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a problem and pass together")
    parser.add_argument("--added", action="store_true", help="what a call adds to a stream of flushes (_gpu.py)")
    parser.add_argument("--fa3", help="path of FlashAttention-3's library")
    add_out(parser)
    options = parser.parse_args()
    need_gpu()
    if options.fa3:
        torch.ops.load_library(options.fa3)
    path = options.out / f"peers{'_added' if options.added else ''}_{machine()['device']}.csv"
    for rows in run(options):
        save(rows, path, COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, machine()["device"])
