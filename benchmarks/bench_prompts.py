"""Prompts on a GPU: many queries over a KV cache, causal, in bf16. The keys lie in rows of a cache or in pages.

Beside flash_attn_with_kvcache run flash_attn_func over as many contiguous keys ("keys") and the kernels that serve what
Hopper's kernels leave ("generic"). The kernels run in turns (_gpu.py). TFLOPS count 4 d operations for each pair of a
query and a key that it sees.

    python benchmarks/bench_prompts.py
    python benchmarks/bench_prompts.py --fa3 PATH      and the library _C.so of FlashAttention-3, as xformers has it
    python benchmarks/bench_prompts.py --few           few queries over pages of 64 keys
    python benchmarks/bench_prompts.py --before-hopper the kernels of GPUs before Hopper

With --before-hopper "sm80" is what the planner chooses on such a GPU, in tiles for the shared memory of this one, and
"generic" is attn_fwd_any.
With --few "decode" is attn_decode_sm90, "forward" attn_fwd_sm90 and "one part" the latter with num_splits = 1, and
"ours" is as the planner chooses. Writes prompts_<device>.csv, few_queries_<device>.csv or prompts_sm80_<device>.csv to
the folder --out, and prints the table. With --added the figures are what a call adds to a stream of flushes (_gpu.py),
and "_added" stands before the device.
"""

import argparse
import random

import torch
from _gpu import added, by_kernels, flusher, in_turns, machine, ready
from _results import add_out, command, need_gpu, save
from cases import BENCH_FEW, BENCH_PROMPTS
from tables import print_tables

from flash_attn import explain, flash_attn_func, flash_attn_with_kvcache

LAYOUTS = "dense", 1, 16, 64, 256
PROBLEM = "kernel", "layout", "b", "len_q", "cache", "h", "h_kv", "d"
COLUMNS = "date", "device", "torch", "rule", *PROBLEM, "name", "ms", "tflops", "mhz", "command"
FEW_COLUMNS = *COLUMNS[: COLUMNS.index("ms")], "num_splits", "tile_heads", *COLUMNS[COLUMNS.index("ms") :]


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cache_of(case, layout):
    """(k, v, options of a call, name of the layout)."""
    used = torch.full((case.b,), case.len_kv, dtype=torch.int32, device="cuda")
    pages, size, table = case.b, case.len_kv, None
    if layout != "dense":
        pages, size = case.b * case.len_kv // layout, layout
        table = torch.randperm(pages, device="cuda").view(case.b, -1).to(torch.int32)
    k, v = (randn(pages, size, case.h_kv, case.d) for _ in range(2))
    where = layout if layout == "dense" else f"pages of {layout}"
    return k, v, {"cache_seqlens": used, "block_table": table, "causal": True}, where


def fa3_of(q, k, v, asked):
    used, table = asked["cache_seqlens"], asked["block_table"]
    return lambda: torch.ops.flash_attn_3.fwd(q, k, v, seqused_k=used, page_table=table, is_causal=True)


def few_queries_of(case, options):
    """{(kernel, layout): (call, our plan)}."""
    q = randn(case.b, case.len_q, case.h, case.d)
    k, v, asked, where = cache_of(case, 64)
    choices = {"ours": (None, 0), "decode": ("decode_sm90", 0), "forward": ("fwd_sm90", 0), "one part": ("fwd_sm90", 1)}
    found = {}
    for kernel, (words, num_splits) in choices.items():
        if kernel not in options.kernels:
            continue
        whole = (flash_attn_with_kvcache, q, k, v), asked | {"num_splits": num_splits}
        plan = by_kernels(words, lambda whole=whole: explain(*whole[0], **whole[1]))()
        call = by_kernels(words, lambda whole=whole: whole[0][0](*whole[0][1:], **whole[1]))
        if plan.kernel:
            found[kernel, where] = call, plan
    if options.fa3:
        found["FA3", where] = fa3_of(q, k, v, asked), None
    return found


def kernels_of(case, options):
    """{(kernel, layout): (call, our plan)}."""
    q = randn(case.b, case.len_q, case.h, case.d)
    found = {}
    for layout in LAYOUTS:
        k, v, asked, where = cache_of(case, layout)

        def ours(k=k, v=v, asked=asked):
            return flash_attn_with_kvcache(q, k, v, **asked)

        found["ours", where] = ours, explain(flash_attn_with_kvcache, q, k, v, **asked)
        if "generic" in options.kernels:
            found["generic", where] = by_kernels("any,fwd_sm80", ours), None
        if options.fa3:
            found["FA3", where] = fa3_of(q, k, v, asked), None
        if layout == "dense":
            found["ours", "keys"] = (
                lambda k=k, v=v: flash_attn_func(q, k, v, causal=True),
                explain(flash_attn_func, q, k, v, causal=True),
            )
    return found


def kernels_before_hopper(case, options):
    """{(kernel, layout): (call, plan of "sm80")}."""
    q = randn(case.b, case.len_q, case.h, case.d)
    found = {}
    for kernel, words in (("sm80", "any,sm80"), ("generic", "any")):
        for layout in LAYOUTS:
            k, v, asked, where = cache_of(case, layout)
            calls = {where: (flash_attn_with_kvcache, asked)}
            if layout == "dense":
                calls["keys"] = flash_attn_func, {"causal": True}
            for name, (function, options_of_call) in calls.items():
                whole = function, q, k, v
                plan = by_kernels(words, lambda whole=whole, o=options_of_call: explain(*whole, **o))()
                call = by_kernels(words, lambda whole=whole, o=options_of_call: whole[0](*whole[1:], **o))
                found[kernel, name] = call, plan
    return found


def seen(len_q, len_kv):
    """Pairs of a head."""
    return sum(len_kv - len_q + 1 + i for i in range(len_q))


def run(options):
    flush, rng = flusher(), random.Random(0)
    rule, measure = ("added", added) if options.added else ("turns", in_turns)
    said = command().replace(options.fa3 or "PATH", "PATH")
    for case in BENCH_FEW if options.few else BENCH_PROMPTS:
        if case.d not in options.dims or case.b not in options.batches:
            continue
        kernels = options.make(case, options)
        calls = ready({key: lambda call=call: call for key, (call, _) in kernels.items()})
        times, mhz = measure(calls, options.seconds, flush, rng)
        operations = 4 * case.b * case.h * case.d * seen(case.len_q, case.len_kv)
        sizes = case.b, case.len_q, case.len_kv, case.h, case.h_kv, case.d
        rows = []
        for (kernel, layout), ms in times.items():
            figures = {"ms": round(ms, 4), "tflops": round(operations / ms / 1e9, 1), "mhz": mhz}
            problem = dict(zip(PROBLEM, (kernel, layout, *sizes)))
            plan = kernels[kernel, layout][1]
            ours = {"name": plan.kernel, "num_splits": plan.num_splits, "tile_heads": plan.tile_heads} if plan else {}
            rows.append({**machine(), "rule": rule, "command": said, **problem, **ours, **figures})
        if options.few:
            words = (f"{row['kernel']} {row['ms'] * 1000:.1f} ({row.get('num_splits', '')})" for row in rows)
        else:
            words = (f"{row['kernel']} {row['layout']} {row['tflops']:.0f}" for row in rows)
        print(sizes, "  ".join(words), flush=True)
        yield rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a problem together")
    parser.add_argument("--added", action="store_true", help="what a call adds to a stream of flushes (_gpu.py)")
    parser.add_argument("--fa3", help="path of FlashAttention-3's library")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--few", action="store_true", help="few queries, in microseconds")
    what.add_argument("--before-hopper", action="store_true", help="the kernels of GPUs before Hopper")
    kernels = ["ours", "generic", "decode", "forward", "one part"]
    parser.add_argument(
        "--kernels", nargs="+", choices=kernels, help="beside FA3 (default: all); not with --before-hopper"
    )
    dims, batches = (sorted({getattr(x, name) for x in BENCH_FEW + BENCH_PROMPTS}) for name in ("d", "b"))
    parser.add_argument("--dims", type=int, nargs="+", default=dims)
    parser.add_argument("--batches", type=int, nargs="+", default=batches)
    add_out(parser)
    options = parser.parse_args()
    if options.before_hopper and (options.fa3 or options.kernels):
        parser.error("--before-hopper has kernels of its own: leave out --fa3 and --kernels")
    options.kernels = options.kernels or kernels
    need_gpu()
    if options.fa3:
        torch.ops.load_library(options.fa3)
    name, options.make = "prompts", kernels_of
    if options.few:
        name, options.make = "few_queries", few_queries_of
    if options.before_hopper:
        name, options.make = "prompts_sm80", kernels_before_hopper
    path = options.out / f"{name}{'_added' if options.added else ''}_{machine()['device']}.csv"
    with torch.no_grad():
        for rows in run(options):
            save(rows, path, FEW_COLUMNS if options.few else COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, machine()["device"])
