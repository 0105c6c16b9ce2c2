"""Prompts on a GPU: many queries over a KV cache, causal, in bf16. The keys lie in rows of a cache or in pages.

Beside flash_attn_with_kvcache run flash_attn_func over as many contiguous keys ("keys") and the kernels that serve what
Hopper's kernels leave ("generic"). The kernels run in turns (_gpu.py). TFLOPS count 4 d operations for each pair of a
query and a key that it sees.

    python benchmarks/bench_prompts.py
    python benchmarks/bench_prompts.py --fa3 PATH      and the library _C.so of FlashAttention-3, as xformers has it

Writes prompts_<device>.csv to the folder --out and prints the table.
"""

import argparse
import random

import torch
from _gpu import by_kernels, in_turns, machine, ready
from _results import add_out, command, need_gpu, save
from cases import BENCH_PROMPTS
from tables import print_tables

from flash_attn import explain, flash_attn_func, flash_attn_with_kvcache

LAYOUTS = "dense", 1, 16, 64, 256
PROBLEM = "kernel", "layout", "b", "len_q", "cache", "h", "h_kv", "d"
COLUMNS = "date", "device", "torch", "rule", *PROBLEM, "name", "ms", "tflops", "mhz", "command"


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def kernels_of(case, options):
    """{(kernel, layout): (call, our kernel's name)}."""
    q = randn(case.b, case.len_q, case.h, case.d)
    used = torch.full((case.b,), case.len_kv, dtype=torch.int32, device="cuda")
    found = {}
    for layout in LAYOUTS:
        pages, size, table = case.b, case.len_kv, None
        if layout != "dense":
            pages, size = case.b * case.len_kv // layout, layout
            table = torch.randperm(pages, device="cuda").view(case.b, -1).to(torch.int32)
        k, v = (randn(pages, size, case.h_kv, case.d) for _ in range(2))
        where = layout if layout == "dense" else f"pages of {layout}"
        asked = {"cache_seqlens": used, "block_table": table, "causal": True}

        def ours(k=k, v=v, asked=asked):
            return flash_attn_with_kvcache(q, k, v, **asked)

        def fa3(k=k, v=v, table=table):
            return torch.ops.flash_attn_3.fwd(q, k, v, seqused_k=used, page_table=table, is_causal=True)

        found["ours", where] = ours, explain(flash_attn_with_kvcache, q, k, v, **asked).kernel
        found["generic", where] = by_kernels("any,fwd_sm80", ours), ""
        if options.fa3:
            found["FA3", where] = fa3, ""
        if layout == "dense":
            found["ours", "keys"] = (
                lambda k=k, v=v: flash_attn_func(q, k, v, causal=True),
                explain(flash_attn_func, q, k, v, causal=True).kernel,
            )
    return found


def seen(len_q, len_kv):
    """Pairs of a head."""
    return sum(len_kv - len_q + 1 + i for i in range(len_q))


def run(options):
    flush, rng = torch.empty(256 << 20, dtype=torch.int8, device="cuda"), random.Random(0)
    said = command().replace(options.fa3 or "PATH", "PATH")
    for case in BENCH_PROMPTS:
        kernels = kernels_of(case, options)
        calls = ready({key: lambda call=call: call for key, (call, _) in kernels.items()})
        times, mhz = in_turns(calls, options.seconds, flush, rng)
        operations = 4 * case.b * case.h * case.d * seen(case.len_q, case.len_kv)
        sizes = case.b, case.len_q, case.len_kv, case.h, case.h_kv, case.d
        rows = []
        for (kernel, layout), ms in times.items():
            figures = {"ms": round(ms, 4), "tflops": round(operations / ms / 1e9, 1), "mhz": mhz}
            problem = dict(zip(PROBLEM, (kernel, layout, *sizes)))
            name = kernels[kernel, layout][1]
            rows.append({**machine(), "rule": "turns", "command": said, **problem, "name": name, **figures})
        print(sizes, "  ".join(f"{row['kernel']} {row['layout']} {row['tflops']:.0f}" for row in rows), flush=True)
        yield rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a problem together")
    parser.add_argument("--fa3", help="path of FlashAttention-3's library")
    add_out(parser)
    options = parser.parse_args()
    need_gpu()
    if options.fa3:
        torch.ops.load_library(options.fa3)
    path = options.out / f"prompts_{machine()['device']}.csv"
    with torch.no_grad():
        for rows in run(options):
            save(rows, path, COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, machine()["device"])
