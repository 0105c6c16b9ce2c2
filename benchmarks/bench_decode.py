"""Decoding on a GPU: how fast flash_attn_with_kvcache reads a KV cache, beside a copy of memory, PyTorch's SDPA and
FlexAttention.

There is one new query per sequence, bf16 N(0, 1). TB/s count every cached key and value once. The copy moves 1 GB with
torch.Tensor.copy_ in the same run, and counts reads and writes. Pages lie in random order. In `appends` the last key
comes with the call, and rotary embedding rotates the key and the query.

Each call is captured in a CUDA graph, as a server runs it. The graph walks over as many caches as fill 1 GB, so that no
cache waits in L2 (`warm`: one cache, again and again). A time is the median of the replays of a graph. The kernels of a
case alternate in random order, `--rounds` times, and a figure is the median of the rounds. For the host time 1000 calls
run in a row without a graph, while the GPU has little work.

    python benchmarks/bench_decode.py
    python benchmarks/bench_decode.py --kernels ours cudnn --cases 0 5      without FlexAttention, which compiles first
    python benchmarks/bench_decode.py --splits 0 1 4   other num_splits
    python benchmarks/bench_decode.py --kernels ours sm80 generic fa2    on Hopper beside the kernel before Hopper, and
                                                       beside the kernels that serve what the decode kernels leave
    python benchmarks/bench_decode.py --turns write read --fa3 PATH    launch by launch instead of by graphs

Writes decode_<device>.csv to the folder --out, prints the table and, with matplotlib, draws a picture beside the file.

With --turns the kernels of a case run launch by launch, in a random order in every turn. Before each launch 256 MB are
written or read, so the L2 is full of lines that others wrote or read. PATH is the library _C.so of FlashAttention-3, as
xformers has it. It reads the same caches. Writes decode_turns_<device>.csv.
"""

import argparse
import datetime
import functools
import random
import time
from statistics import median

import flash_attn_2_cuda
import torch
import torch.nn.functional as F
from _gpu import by_kernels, compiled_flex, flusher, in_turns, machine, ready, shuffled
from _results import add_out, command, need_gpu, pictures, read, save
from cases import BENCH_DECODE
from tables import print_tables
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_with_kvcache

COLUMNS = [
    "date", "device", "torch", "kernel", "layout", "b", "cache", "h", "h_kv", "d", "num_splits", "us", "tb_s", "copy",
    "command",
]  # fmt: skip
KEY = ("device", "kernel", "layout", "b", "cache", "h", "h_kv", "d", "num_splits")
TURNS_COLUMNS = [
    "date", "device", "torch", "flush", "kernel", "layout", "b", "cache", "h", "h_kv", "d", "us", "tb_s", "mhz",
    "command",
]  # fmt: skip
TURNS_KEY = ("device", "flush", "kernel", "layout", "b", "cache", "h", "h_kv", "d")
DENSE, APPENDS = "dense", "appends"
HOST_CASE = (1, 64, 8, 2, 64)
# Our kernels: the words of FLASH_ATTN_CUDA_KERNEL, None for all.
OURS = {"ours": None, "sm80": "any,sm80", "generic": "any,fwd_sm80"}
PEERS = {"cudnn": "SDPA cuDNN", "fa2": "SDPA FA2", "flex": "FlexAttention"}
SOME_BYTES = 1 << 30


def replay_us(graph, calls):
    """Microseconds of one of the calls in a graph."""
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return median(times)


def captured(calls, kernels=None):
    """A graph of all the calls, or None if a call cannot run."""
    flash_attn_2_cuda.set_cuda_kernels(kernels)
    try:
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph
    except RuntimeError as error:
        print(f"  {str(error).splitlines()[0]}")
        return None
    finally:
        flash_attn_2_cuda.set_cuda_kernels(None)


@functools.cache
def copy_buffers():
    return [torch.empty(SOME_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]


def copy_speed():
    """TB/s of torch's copy, read and written. It is not captured, because as a node of a graph it takes a slower
    way."""
    source, target = copy_buffers()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * SOME_BYTES / median(times) / 1e9


def cache_of(layout, b, cache, h_kv, d):
    """(k, v, block_table)."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    if not isinstance(layout, int):
        return *(torch.randn(b, cache, h_kv, d, **like) for _ in range(2)), None
    pages = b * cache // layout
    k, v = (torch.randn(pages, layout, h_kv, d, **like) for _ in range(2))
    return k, v, torch.randperm(pages, device="cuda").view(b, -1).to(torch.int32)


def our_calls(layout, b, cache, h, h_kv, d, num_splits, copies):
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(b, 1, h, d, **like)
    new = ()
    if layout == APPENDS:
        new = [torch.randn(b, 1, h_kv, d, **like) for _ in range(2)] + [
            torch.rand(cache, d // 2, **like) for _ in range(2)
        ]
    seqlens = torch.full((b,), cache - bool(new), dtype=torch.int32, device="cuda")
    calls = []
    for _ in range(copies):
        k, v, table = cache_of(layout, b, cache, h_kv, d)
        options = {"cache_seqlens": seqlens, "block_table": table, "num_splits": num_splits}
        calls.append(lambda k=k, v=v, options=options: flash_attn_with_kvcache(q, k, v, *new, **options))
    return calls


def calls_of(kernel, layout, case, num_splits, copies):
    if kernel in PEERS:
        return peer_calls(kernel, *case, copies)
    calls = our_calls(layout, *case, num_splits, 1 if layout == "warm" else copies)
    return calls * copies if layout == "warm" else calls


def peer_calls(peer, b, cache, h, h_kv, d, copies):
    q = torch.randn(b, h, 1, d, device="cuda", dtype=torch.bfloat16)
    flex = compiled_flex() if peer == "flex" else None
    calls = []
    for _ in range(copies):
        k, v = (torch.randn(b, h_kv, cache, d, device="cuda", dtype=q.dtype) for _ in range(2))

        def call(k=k, v=v):
            if peer == "flex":
                return flex(q, k, v, enable_gqa=h != h_kv)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if peer == "cudnn" else SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=h != h_kv)

        calls.append(call)
    return calls


def host_us(call):
    """Host time of one call from Python. The GPU has little work and keeps up."""
    for _ in range(100):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(100):
            call()
        times.append((time.perf_counter() - start) / 100 * 1e6)
        torch.cuda.synchronize()
    return median(times)


def host_calls():
    """(kernel, layout, call) of small problems. SDPA is called without a choice of backend, as its users call it."""
    b, cache, h, h_kv, d = HOST_CASE
    q = torch.randn(b, h, 1, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, h_kv, cache, d, device="cuda", dtype=q.dtype) for _ in range(2))
    for layout in (DENSE, APPENDS, 16):
        yield "ours", layout, our_calls(layout, *HOST_CASE, 0, 1)[0]
    yield "SDPA", DENSE, lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def plot(rows, path):
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        return
    rows = [r for r in rows if not r["layout"].startswith("host") and r["layout"] != "warm"]
    labels = list(dict.fromkeys(f"b{r['b']} x {r['cache']}\n{r['h']}/{r['h_kv']} d{r['d']}" for r in rows))
    kernels = list(dict.fromkeys(f"{r['kernel']} {r['layout']}" for r in rows))
    figure, axis = plt.subplots(figsize=(13, 4.5))
    for i, kernel in enumerate(kernels):
        of = {
            f"b{r['b']} x {r['cache']}\n{r['h']}/{r['h_kv']} d{r['d']}": float(r["tb_s"])
            for r in rows
            if f"{r['kernel']} {r['layout']}" == kernel
        }
        at = [j + (i - len(kernels) / 2) * 0.8 / len(kernels) for j, label in enumerate(labels) if label in of]
        axis.bar(at, [of[x] for x in labels if x in of], 0.8 / len(kernels), label=kernel)
    axis.axhline(max(float(r["copy"]) for r in rows), color="black", lw=0.8, ls="--", label="copy")
    axis.set_xticks(range(len(labels)), labels, fontsize=7)
    axis.set(ylabel="TB/s of cache")
    axis.legend(fontsize=7, ncol=4, loc="lower center")
    figure.tight_layout()
    figure.savefig(path)


def turns_of(layouts, b, cache, h, h_kv, d, options):
    """{(kernel, layout): a function that makes the call}."""
    q = torch.randn(b, 1, h, d, device="cuda", dtype=torch.bfloat16)
    used = torch.full((b,), cache, dtype=torch.int32, device="cuda")
    found = {}
    for layout in layouts:
        if layout in (APPENDS, "warm"):
            continue
        k, v, table = cache_of(layout, b, cache, h_kv, d)
        whole = {"cache_seqlens": used, "block_table": table}
        for kernel in options.kernels:
            if kernel in OURS:
                call = functools.partial(flash_attn_with_kvcache, q, k, v, **whole)
                found[kernel, layout] = functools.partial(by_kernels, OURS[kernel], call)
            elif layout == DENSE and kernel in PEERS:
                call = peer_calls(kernel, b, cache, h, h_kv, d, 1)[0]
                found[PEERS[kernel], layout] = lambda call=call: call
        if options.fa3:
            call = functools.partial(torch.ops.flash_attn_3.fwd, q, k, v, seqused_k=used, page_table=table)
            found["FA3", layout] = lambda call=call: call
    return found


def run_turns(options):
    said, rng = command().replace(options.fa3 or "PATH", "PATH"), random.Random(0)
    base = {**machine(), "command": said}
    rows = []
    for flush in options.turns:
        for number in options.cases:
            sizes, layouts = BENCH_DECODE[number]
            b, cache, h, h_kv, d = case = sizes.b, sizes.len_kv, sizes.h, sizes.h_kv, sizes.d
            times, mhz = in_turns(ready(turns_of(layouts, *case, options)), options.seconds, flusher(flush), rng)
            words = []
            for (kernel, layout), ms in times.items():
                where = layout if isinstance(layout, str) else f"pages of {layout}"
                named = dict(zip(("b", "cache", "h", "h_kv", "d"), case)) | {"kernel": kernel, "layout": where}
                speed = round(4 * b * cache * h_kv * d / ms / 1e9, 3)
                rows.append({**base, **named, "flush": flush, "us": round(1000 * ms, 2), "tb_s": speed, "mhz": mhz})
                words.append(f"{kernel} {where} {1000 * ms:.1f}")
            print(f"{flush} b{b} x {cache} {h}/{h_kv} d{d}: " + ", ".join(words), flush=True)
            save(rows, options.out / f"decode_turns_{base['device']}.csv", TURNS_COLUMNS, TURNS_KEY)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(BENCH_DECODE)), help="numbers of the cases")
    parser.add_argument("--kernels", nargs="*", default=["ours", *PEERS], choices=[*OURS, *PEERS])
    parser.add_argument("--turns", nargs="+", default=[], choices=["write", "read"], help="how the L2 is flushed")
    parser.add_argument("--fa3", help="path of FlashAttention-3's library, for --turns")
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a case together, with --turns")
    add_out(parser)
    options = parser.parse_args()
    need_gpu()
    if options.fa3:
        torch.ops.load_library(options.fa3)
    if options.turns:
        return run_turns(options)

    device = torch.cuda.get_device_name().replace(" ", "_")
    base = {"date": datetime.date.today().isoformat(), "device": device, "torch": torch.__version__}
    base["command"] = command()
    path = options.out / f"decode_{device}.csv"
    rows, rng = [], random.Random(0)

    def note(kernel, layout, case, num_splits, us, **more):
        sizes = dict(zip(("b", "cache", "h", "h_kv", "d"), case))
        where = layout if isinstance(layout, str) else f"pages of {layout}"
        rows.append(
            {**base, **sizes, "kernel": kernel, "layout": where, "num_splits": num_splits, "us": round(us, 2), **more}
        )
        return f"{kernel} {where}"

    print(f"{device}, torch {base['torch']}")
    if "ours" in options.kernels:
        hosts = [(kernel, layout, host_us(call)) for kernel, layout, call in host_calls()]
        print("host: " + ", ".join(f"{kernel} {layout} {us:.1f} us" for kernel, layout, us in hosts))
        for kernel, layout, us in hosts:
            note(kernel, f"host, {layout if isinstance(layout, str) else f'pages of {layout}'}", HOST_CASE, 0, us)
    for number in options.cases:
        sizes, layouts = BENCH_DECODE[number]
        b, cache, h, h_kv, d = case = sizes.b, sizes.len_kv, sizes.h, sizes.h_kv, sizes.d
        cache_bytes = 4 * b * cache * h_kv * d
        copy = copy_speed()
        ours = [kernel for kernel in options.kernels if kernel in OURS]
        jobs = [(kernel, layout, n) for kernel in ours for layout in layouts for n in options.splits]
        jobs += [(peer, DENSE, 0) for peer in options.kernels if peer in PEERS]
        line, graphs = [], {}
        for job in jobs:
            kernel, layout, num_splits = job
            copies = 8 if layout == "warm" else max(1, -(-SOME_BYTES // cache_bytes))
            calls = calls_of(kernel, layout, case, num_splits, copies)
            graph = captured(calls, OURS.get(kernel))
            if graph is not None:
                graphs[job] = graph, calls  # the graph reads memory that belongs to the calls
        times = {job: [] for job in graphs}
        for _ in range(options.rounds):
            for job, (graph, calls) in shuffled(graphs.items(), rng):
                times[job].append(replay_us(graph, len(calls)))
        graphs.clear()
        for (kernel, layout, num_splits), found in times.items():
            us = median(found)
            speed = cache_bytes / us / 1e6
            name = note(
                PEERS.get(kernel, kernel), layout, case, num_splits, us, tb_s=round(speed, 3), copy=round(copy, 3)
            )
            line.append(f"{name} {speed:.3f} ({us:.1f} us)")
        print(f"b{b} x {cache} {h}/{h_kv} d{d}, copy {copy:.3f}: " + ", ".join(line), flush=True)
        save(rows, path, COLUMNS, KEY)
    plot(read(path), pictures(options.out) / f"decode_{device}.svg")
    print_tables(options.out, device)


if __name__ == "__main__":
    main()
