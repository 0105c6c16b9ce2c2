"""Decode on the CPU, one query token against a long cache, beside PyTorch and the memory's read rate.

    python benchmarks/bench_decode_cpu.py                        one thread, then all of them
    python benchmarks/bench_decode_cpu.py --len 8192 --rounds 9

Per case and round, one after the other: a read probe over as many bytes as the cache has (read.c), our
flash_attn_with_kvcache, and PyTorch's scaled_dot_product_attention twice: with the g query heads of a key/value head
as g rows, the fastest that a user gets by rewriting the call, and with enable_gqa. Each figure is a median over the
rounds: GB/s of cache read, and the ratios of adjacent calls. With one thread the clock is the thread's processor time,
with more it is the wall's, and PyTorch's spinning workers are given a few ms to go to sleep. b = 1, cache
[1, len, h_kv, d].

Writes benchmarks/results/decode_cpu.csv.
"""

import argparse
import csv
import ctypes
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from flash_attn import flash_attn_with_kvcache

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_probe(threads):
    """Reads a tensor, each thread its share."""
    library = Path(tempfile.mkdtemp()) / "read.so"
    source = ROOT / "benchmarks" / "read.c"
    subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
    read_all = ctypes.CDLL(str(library)).read_all
    read_all.argtypes, read_all.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    pool = ThreadPoolExecutor(threads)

    def read(*tensors):
        for x in tensors:
            share = x.numel() * x.element_size() // threads // 256 * 256
            parts = [(x.data_ptr() + i * share, share) for i in range(threads)]
            if threads == 1:
                read_all(*parts[0])
            else:
                list(pool.map(lambda part: read_all(*part), parts))

    return read


def measure(dtype, n, h, h_kv, d, threads, rounds):
    torch.set_num_threads(threads)
    q = torch.randn(1, 1, h, d).to(DTYPES[dtype])
    k, v = (torch.randn(1, n, h_kv, d).to(DTYPES[dtype]) for _ in range(2))
    k_heads, v_heads = k.transpose(1, 2), v.transpose(1, 2)
    as_rows, as_heads = q.view(1, h_kv, h // h_kv, d), q.transpose(1, 2)
    read = build_probe(threads)
    calls = {
        "read": lambda: read(k, v),
        "ours": lambda: flash_attn_with_kvcache(q, k, v),
        "rows": lambda: F.scaled_dot_product_attention(as_rows, k_heads, v_heads),
        "gqa": lambda: F.scaled_dot_product_attention(as_heads, k_heads, v_heads, enable_gqa=True),
    }
    clock, pause = (time.thread_time, 0.0) if threads == 1 else (time.perf_counter, 0.005)
    seconds = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            time.sleep(pause)
            start = clock()
            call()
            if i > 0:  # the first round warms up
                seconds[name].append(clock() - start)
    error = (calls["ours"]().view(as_rows.shape).float() - calls["rows"]().float()).abs().max()
    assert error < 0.02, f"ours and PyTorch's differ by {error}"
    gigabytes = 2 * k.numel() * k.element_size() / 1e9

    def ratio(name):
        return median(b / a for a, b in zip(seconds["ours"], seconds[name]))

    return {
        "threads": threads, "dtype": dtype, "h": h, "h_kv": h_kv, "d": d, "len": n,
        "read_gbs": round(gigabytes / median(seconds["read"]), 1),
        "ours_gbs": round(gigabytes / median(seconds["ours"]), 1),
        "share_of_read": round(ratio("read"), 3),
        "ratio_rows": round(ratio("rows"), 2), "ratio_gqa": round(ratio("gqa"), 1),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=list(DTYPES))
    parser.add_argument("--len", type=int, nargs="*", default=[8192, 16384])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], metavar=("H", "H_KV"))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks" / "results" / "decode_cpu.csv")
    options = parser.parse_args()

    rows = []
    for threads in options.threads:
        for dtype in options.dtype:
            for n in options.len:
                rows.append(measure(dtype, n, *options.heads, options.dim, threads, options.rounds))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    options.csv.parent.mkdir(exist_ok=True)
    with open(options.csv, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
