"""Decoding on a GPU: how fast flash_attn_with_kvcache reads a KV cache, beside a copy of memory and PyTorch's SDPA.

One new query per sequence, bf16 N(0, 1). TB/s count every cached key and value once. The copy moves 1 GB with
torch.Tensor.copy_, reads and writes counted, in the same run. Pages lie in random order.

Timing: each call captured in a CUDA graph, as a server runs it, over as many caches in turn as fill 1 GB, so that none
waits in L2 (`warm`: one cache, again and again); the median of the replays, then the next kernel, `--rounds` times; the
table shows the median of the rounds. Host time: 1000 calls in a row, nothing captured, while the GPU has little to do.

    python benchmarks/bench_decode.py                  the table of csrc/cuda/README.md
    python benchmarks/bench_decode.py --splits 0 1 4   other num_splits

Writes benchmarks/results/decode_<device>.csv and, with matplotlib, a plot beside it.
"""

import argparse
import csv
import datetime
import functools
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_with_kvcache

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = [
    "date", "device", "torch", "kernel", "layout", "b", "cache", "h", "h_kv", "d", "num_splits", "us", "tb_s", "copy",
]  # fmt: skip
DENSE, PAGES = "dense", (1, 16, 64, 256)
# b, cache, h, h_kv, d, layouts
CASES = [
    (64, 8192, 32, 8, 128, (DENSE, *PAGES)),
    (1, 131072, 32, 8, 128, (DENSE, 16)),
    (4, 16384, 64, 8, 128, (DENSE, 16)),
    (64, 8192, 16, 1, 128, (DENSE, 16)),
    (16, 2048, 32, 32, 128, (DENSE, 16)),
    (8, 1024, 32, 8, 128, (DENSE, "warm", 16)),
    (1, 1024, 32, 8, 128, (DENSE,)),
    (64, 8192, 32, 8, 64, (DENSE, 16)),
    (64, 4096, 16, 8, 96, (DENSE,)),
    (32, 4096, 16, 8, 192, (DENSE,)),
    (32, 4096, 16, 8, 256, (DENSE, 16)),
]
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


def captured(calls):
    """A graph of all the calls, or None if one cannot run."""
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


@functools.cache
def copy_buffers():
    return [torch.empty(SOME_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]


def copy_speed():
    """TB/s read and written by torch's copy, not captured: as a node of a graph it takes another, slower way."""
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


def our_calls(layout, b, cache, h, h_kv, d, num_splits, copies):
    q = torch.randn(b, 1, h, d, device="cuda", dtype=torch.bfloat16)
    seqlens = torch.full((b,), cache, dtype=torch.int32, device="cuda")
    calls = []
    for _ in range(copies):
        if isinstance(layout, int):
            pages = b * cache // layout
            k, v = (torch.randn(pages, layout, h_kv, d, device="cuda", dtype=q.dtype) for _ in range(2))
            table = torch.randperm(pages, device="cuda").view(b, -1).to(torch.int32)
        else:
            k, v = (torch.randn(b, cache, h_kv, d, device="cuda", dtype=q.dtype) for _ in range(2))
            table = None
        options = {"cache_seqlens": seqlens, "block_table": table, "num_splits": num_splits}
        calls.append(lambda k=k, v=v, options=options: flash_attn_with_kvcache(q, k, v, **options))
    return calls


def sdpa_calls(backend, b, cache, h, h_kv, d, copies):
    q = torch.randn(b, h, 1, d, device="cuda", dtype=torch.bfloat16)
    calls = []
    for _ in range(copies):
        k, v = (torch.randn(b, h_kv, cache, d, device="cuda", dtype=q.dtype) for _ in range(2))

        def call(k=k, v=v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=h != h_kv)

        calls.append(call)
    return calls


def host_us():
    """Host time of one call from Python: an empty-handed GPU keeps up."""
    call = our_calls(DENSE, 1, 64, 8, 2, 64, 0, 1)[0]
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


def table(rows):
    """The README's: TB/s of cache, and microseconds."""
    columns = [(DENSE, "ours"), *((f"pages of {page}", "ours") for page in PAGES)]
    columns += [(DENSE, "SDPA cuDNN"), (DENSE, "SDPA FA2")]
    print("| batch x cache, heads, head_dim | dense | pages of 1 | 16 | 64 | 256 | SDPA, cuDNN | SDPA, FA2 |")
    print("|---|---|---|---|---|---|---|---|")
    for case in dict.fromkeys(tuple(row[x] for x in ("b", "cache", "h", "h_kv", "d")) for row in rows):
        cells = []
        for layout, kernel in columns:
            found = [
                row
                for row in rows
                if (row["b"], row["cache"], row["h"], row["h_kv"], row["d"]) == case
                and (row["layout"], row["kernel"]) == (layout, kernel)
            ]
            cells.append(f"{float(found[0]['tb_s']):.2f} ({float(found[0]['us']):.1f} us)" if found else "")
        b, cache, h, h_kv, d = case
        print(f"| {b} x {cache}, {h}/{h_kv}, {d} | {' | '.join(cells)} |")


def plot(rows, path):
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        return
    labels = list(dict.fromkeys(f"b{r['b']} x {r['cache']}\n{r['h']}/{r['h_kv']} d{r['d']}" for r in rows))
    kernels = [k for k in dict.fromkeys(f"{r['kernel']} {r['layout']}" for r in rows) if "warm" not in k]
    figure, axis = plt.subplots(figsize=(13, 4.5))
    for i, kernel in enumerate(kernels):
        of = {
            f"b{r['b']} x {r['cache']}\n{r['h']}/{r['h_kv']} d{r['d']}": r["tb_s"]
            for r in rows
            if f"{r['kernel']} {r['layout']}" == kernel
        }
        at = [j + (i - len(kernels) / 2) * 0.8 / len(kernels) for j, label in enumerate(labels) if label in of]
        axis.bar(at, [of[x] for x in labels if x in of], 0.8 / len(kernels), label=kernel)
    axis.axhline(max(r["copy"] for r in rows), color="black", lw=0.8, ls="--", label="copy")
    axis.set_xticks(range(len(labels)), labels, fontsize=7)
    axis.set(ylabel="TB/s of cache")
    axis.legend(fontsize=7, ncol=4, loc="lower center")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--splits", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers of the cases")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--csv", type=Path, help="where the results go; the plot goes beside them")
    parser.add_argument("--table", type=Path, help="print the README's table of these results, and measure nothing")
    options = parser.parse_args()
    if options.table:
        with open(options.table, newline="") as file:
            table(list(csv.DictReader(file)))
        return

    device = torch.cuda.get_device_name().replace(" ", "_")
    base = {"date": datetime.date.today().isoformat(), "device": device, "torch": torch.__version__}
    print(f"{device}, torch {base['torch']}; host {host_us():.1f} us a call")
    rows = []
    for number in options.cases:
        b, cache, h, h_kv, d, layouts = CASES[number]
        cache_bytes = 4 * b * cache * h_kv * d
        copy = copy_speed()
        line = []
        for layout in (*layouts, *(() if options.no_peers else ("cuDNN", "FA2"))):
            copies = 8 if layout == "warm" else max(1, -(-SOME_BYTES // cache_bytes))
            for num_splits in options.splits:
                if layout in ("cuDNN", "FA2"):
                    if num_splits != options.splits[0]:
                        continue
                    backend = SDPBackend.CUDNN_ATTENTION if layout == "cuDNN" else SDPBackend.FLASH_ATTENTION
                    calls = sdpa_calls(backend, b, cache, h, h_kv, d, copies)
                    kernel, where = f"SDPA {layout}", DENSE
                else:
                    calls = our_calls(layout, b, cache, h, h_kv, d, num_splits, 1 if layout == "warm" else copies)
                    calls *= copies if layout == "warm" else 1
                    kernel, where = "ours", layout if isinstance(layout, str) else f"pages of {layout}"
                graph = captured(calls)
                if graph is None:
                    continue
                us = median(replay_us(graph, copies) for _ in range(options.rounds))
                del graph, calls
                speed = cache_bytes / us / 1e6
                sizes = {"b": b, "cache": cache, "h": h, "h_kv": h_kv, "d": d, "num_splits": num_splits}
                values = {"kernel": kernel, "layout": where, "us": round(us, 2), "tb_s": round(speed, 3)}
                rows.append({**base, **sizes, **values, "copy": round(copy, 3)})
                line.append(f"{kernel if kernel != 'ours' else where} {speed:.3f} ({us:.1f} us)")
        print(f"b{b} x {cache} {h}/{h_kv} d{d}, copy {copy:.3f}: " + ", ".join(line), flush=True)

    path = options.csv or RESULTS / f"decode_{device}.csv"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
