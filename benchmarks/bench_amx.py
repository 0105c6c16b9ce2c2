"""Times attention on this machine's processor against PyTorch's ``scaled_dot_product_attention``, call by call in turn.

    python benchmarks/bench_amx.py [--threads 1 16] [--rounds 5] [--csv benchmarks/results/amx.csv]

bf16 runs on AMX where the processor has it; ``--isa`` lowers the choice. fp32 is there to compare with. One row per
case: GFLOPS (4 b h len_q len_kv d forward, 10 backward, halved when causal) of the best call of either side, the median
over the rounds of SDPA's time divided by ours, and what the tiles or the FMA units of the same number of cores do in
registers (peak_amx.c, peak.c; needs gcc). Of two calls in a row the second is timed, so neither side wakes the threads.

Decode is one query of 32 heads on 8 against a cache of 16384 keys, d = 128: GB/s of cache read, beside SDPA with the
heads of a group as rows, or with enable_gqa (decode-gqa), and what the same cores read from memory (read.c).

The last lines are the table of csrc/cpu/README.md.
"""

import argparse
import csv
import ctypes
import datetime
import itertools
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flash_attn_2_cuda as engine
import torch
import torch.nn.functional as F

from flash_attn import flash_attn_func, flash_attn_with_kvcache

FIELDS = "date processor torch isa threads dtype pass d causal len heads unit ours sdpa ratio peak".split()


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def best_isa(dtype, limit):
    isas = engine.cpu_isas()
    isas = isas[: isas.index(limit) + 1] if limit in isas else isas
    return [isa for isa in isas if dtype == "bfloat16" or isa not in ("avx512bf16", "amx")][-1]


def load_peak(source, name):
    library = Path(tempfile.mkdtemp()) / "peak.so"
    command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, Path(__file__).with_name(source)]
    subprocess.run(command, check=True)
    function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_double
    return function


def load_read():
    """Reads a part of a tensor; each thread has its own."""
    function = load_peak("read.c", "read_all")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    return function


def peak_gbs(function, threads, rounds=5):
    data = torch.ones(1 << 26)
    share = data.nbytes // threads // 256 * 256
    with ThreadPoolExecutor(threads) as pool:
        best = 0.0
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(lambda i: function(data.data_ptr() + i * share, share), range(threads)))
            best = max(best, share * threads / (time.perf_counter() - start) * 1e-9)
        return best


def peak_gflops(function, threads, steps=200_000, rounds=5):
    """All threads at once, best round."""
    with ThreadPoolExecutor(threads) as pool:
        best = 0.0
        for _ in range(rounds):
            start = time.perf_counter()
            flops = sum(pool.map(function, [steps] * threads))
            best = max(best, flops / (time.perf_counter() - start) * 1e-9)
        return best


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def make_calls(args, heads, d, dtype, backward, causal):
    """Ours and SDPA's, on the same numbers; the layout is the one that each of them likes best."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, args.len, heads, d).to(dtype) for _ in range(4))
    rows_first = [x.requires_grad_(backward) for x in (q, k, v)]
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_(backward) for x in (q, k, v)]
    dout_heads_first = dout.transpose(1, 2).contiguous()
    if not backward:
        return (
            lambda: flash_attn_func(*rows_first, causal=causal),
            lambda: F.scaled_dot_product_attention(*heads_first, is_causal=causal),
        )
    ours = flash_attn_func(*rows_first, causal=causal)
    theirs = F.scaled_dot_product_attention(*heads_first, is_causal=causal)
    return (
        lambda: torch.autograd.grad(ours, rows_first, dout, retain_graph=True),
        lambda: torch.autograd.grad(theirs, heads_first, dout_heads_first, retain_graph=True),
    )


def compare(ours, theirs, rounds):
    """Seconds of the best call of either side, and the median ratio."""
    times = []
    for _ in range(rounds):
        pair = []
        for call in (ours, theirs):
            call()
            pair.append(seconds_of(call))
        times.append(pair)
    return *map(min, zip(*times)), statistics.median(sdpa / own for own, sdpa in times)


def measure(args, threads, dtype, d, backward, causal):
    heads = args.heads or (2 if threads == 1 else 16)
    torch.set_num_threads(threads)
    own, sdpa, ratio = compare(*make_calls(args, heads, d, dtype, backward, causal), args.rounds)
    flops = (10 if backward else 4) * heads * args.len**2 * d / (2 if causal else 1)
    return heads, flops / own * 1e-9, flops / sdpa * 1e-9, ratio


def measure_decode(args, threads, dtype, length=16384, heads=32, heads_kv=8, d=128):
    torch.set_num_threads(threads)
    q = torch.randn(1, 1, heads, d).to(dtype)
    k, v = (torch.randn(1, length, heads_kv, d).to(dtype) for _ in range(2))
    k_heads, v_heads, q_heads = (x.transpose(1, 2) for x in (k, v, q))
    as_rows = q.view(1, heads_kv, heads // heads_kv, d)
    calls = {
        "decode": lambda: F.scaled_dot_product_attention(as_rows, k_heads, v_heads),
        "decode-gqa": lambda: F.scaled_dot_product_attention(q_heads, k_heads, v_heads, enable_gqa=True),
    }
    for name, sdpa_call in calls.items():
        own, sdpa, ratio = compare(lambda: flash_attn_with_kvcache(q, k, v), sdpa_call, args.rounds)
        gigabytes = (k.nbytes + v.nbytes) * 1e-9
        yield name, d, 0, length, heads, "GB/s", gigabytes / own, gigabytes / sdpa, ratio


def print_table(rows):
    """Causal in brackets: GFLOPS, ratio to SDPA, share of the peak of so many cores."""
    cells, order = {}, []
    for row in rows:
        threads, dtype, name, d, causal, own, ratio, peak = (row[i] for i in (4, 5, 6, 7, 8, 12, 14, 15))
        key = (dtype, name, d, row[11])
        if key not in cells:
            order.append(key)
        cells.setdefault(key, {})[threads, causal] = (
            f"{own:.0f}",
            f"{ratio:.2f}",
            f"{100 * own / peak:.0f}%" if peak else "-",
        )
    threads = sorted({t for cell in cells.values() for t, _ in cell})
    print("| case |" + "".join(f" {t} threads | ratio | peak |" for t in threads))
    print("|---|" + "---|---|---|" * len(threads))
    for key in order:
        line = "| {} {} d {}, {} |".format(*key)
        for t in threads:
            full, causal = cells[key].get((t, 0)), cells[key].get((t, 1))
            for i in range(3):
                line += f" {full[i]} ({causal[i]}) |" if causal else f" {full[i]} |"
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--len", type=int, default=2048)
    parser.add_argument("--heads", type=int, help="default: 2 for one thread, 16 for more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", help="no better instruction set than this one")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    engine.set_cpu_isa(args.isa)
    tiles, fma, read = load_peak("peak_amx.c", "peak_tiles"), load_peak("peak.c", "peak_fma"), load_read()
    units = {"bfloat16": tiles, "float32": fma}
    peaks = {(t, name): peak_gflops(f, t) for t in args.threads for name, f in units.items()}
    reads = {t: peak_gbs(read, t) for t in args.threads}
    rows = []

    def add_row(threads, dtype, name, d, causal, length, heads, unit, own, sdpa, ratio):
        row = [datetime.date.today().isoformat(), processor(), torch.__version__, best_isa(dtype, args.isa), threads]
        row += [dtype, name, d, causal, length, heads, unit, round(own, 1), round(sdpa, 1), round(ratio, 2)]
        rows.append(row)
        print(*row[3:], sep="  ", flush=True)

    for threads, dtype in itertools.product(args.threads, args.dtypes):
        for d, backward, causal in itertools.product(args.dims, (False, True), (False, True)):
            heads, *figures = measure(args, threads, getattr(torch, dtype), d, backward, causal)
            name = "bwd" if backward else "fwd"
            add_row(threads, dtype, name, d, int(causal), args.len, heads, "GFLOPS", *figures)
        for row in measure_decode(args, threads, getattr(torch, dtype)):
            add_row(threads, dtype, *row)
    for (threads, dtype), peak in peaks.items():  # once more: the machine may have been busy
        peaks[threads, dtype] = round(max(peak, peak_gflops(units[dtype], threads)))
    print("peak GFLOPS:", peaks, " read GB/s:", {t: round(x, 1) for t, x in reads.items()})
    for row in rows:
        threads, dtype, unit = row[4], row[5], row[11]
        row.append(peaks[threads, dtype] if unit == "GFLOPS" else round(reads[threads], 1))
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([FIELDS, *rows])
    print_table(rows)


if __name__ == "__main__":
    main()
