"""Times attention on this machine's processor against PyTorch's ``scaled_dot_product_attention``, in alternating calls.

    python benchmarks/bench_amx.py [--threads 1 16] [--rounds 3]     under a minute; writes amx.csv to the folder --out

bf16 runs on AMX if the processor has AMX, and ``--isa`` lowers the choice. fp32 is there for comparison. A row is a
case. GFLOPS (4 b h len_q len_kv d forward, 10 backward, halved when causal) count the best call of either side.
The ratio is the median over the rounds of SDPA's time divided by ours. The peak is the best result of a probe on as
many cores: tiles or multiply-adds in registers (peak_amx.c, peak.c; needs gcc). Probes run first, because PyTorch's
threads keep the cores busy for a while after each call. Of two calls in a row the second is timed, so neither side
wakes the threads.

The rows "product" are not attention. They are products of tiles with the loads and stores that scores need (K Q^T, d
long), all in the first-level cache. Their share of the peak is the upper bound of a forward without softmax.

Decode is one query of 32 heads on 8 against a cache of 16384 keys, d = 128. GB/s count the cache once. SDPA takes the
heads of a group as rows, or enable_gqa (decode-gqa). The peak is the rate at which the same cores read memory (read.c).
"""

import argparse
import ctypes
import datetime
import itertools
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _cpu_tables
import flash_attn_2_cuda as engine
import torch
import torch.nn.functional as F
from _results import add_out, save

from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn._measure import cpu_name

FIELDS = "date processor torch isa threads dtype pass d causal len heads unit ours sdpa ratio peak".split()


def best_isa(dtype, limit):
    isas = engine.cpu_isas()
    isas = isas[: isas.index(limit) + 1] if limit in isas else isas
    return [isa for isa in isas if dtype == "bfloat16" or isa not in ("avx512bf16", "amx")][-1]


def load_peak(source, name, argtypes=(ctypes.c_size_t,), restype=ctypes.c_double):
    library = Path(tempfile.mkdtemp()) / "peak.so"
    command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, Path(__file__).with_name(source)]
    subprocess.run(command, check=True)
    function = getattr(ctypes.CDLL(str(library)), name)
    function.argtypes, function.restype = argtypes, restype
    return function


def gflops(pool, threads, function, *args):
    start = time.perf_counter()
    flops = sum(pool.map(lambda _: function(*args), range(threads)))
    return flops / (time.perf_counter() - start) * 1e-9


def gbs(pool, threads, function, data):
    share = data.nbytes // threads // 256 * 256
    start = time.perf_counter()
    list(pool.map(lambda i: function(data.data_ptr() + i * share, share), range(threads)))
    return share * threads / (time.perf_counter() - start) * 1e-9


def probe(threads, dims, rounds=8):
    """The best rates of this number of cores, all at once, in rounds of 10 ms: {dtype: GFLOPS, "read": GB/s, d:
    GFLOPS}."""
    tiles, fma = load_peak("peak_amx.c", "peak_tiles"), load_peak("peak.c", "peak_fma")
    product = load_peak("peak_amx.c", "peak_product", (ctypes.c_size_t, ctypes.c_size_t))
    read = load_peak("read.c", "read_all", (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64)
    data = torch.ones(1 << 26)
    with ThreadPoolExecutor(threads) as pool:
        probes = {
            "bfloat16": lambda: gflops(pool, threads, tiles, 400_000),
            "float32": lambda: gflops(pool, threads, fma, 4_000_000),
            "read": lambda: gbs(pool, threads, read, data),
            **{d: lambda d=d: gflops(pool, threads, product, 400_000 * 32 // d, d) for d in dims},
        }
        return {name: max(call() for _ in range(rounds)) for name, call in probes.items()}


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def make_calls(args, heads, d, dtype, backward, causal):
    """Our call and SDPA's, on the same numbers. Each gets the layout that suits it best."""
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
    own, sdpa, ratio = compare(*make_calls(args, heads, d, getattr(torch, dtype), backward, causal), args.rounds)
    flops = (10 if backward else 4) * heads * args.len**2 * d / (2 if causal else 1)
    name = "bwd" if backward else "fwd"
    return name, d, int(causal), args.len, heads, "GFLOPS", flops / own * 1e-9, flops / sdpa * 1e-9, ratio


def measure_decode(args, dtype, length=16384, heads=32, heads_kv=8, d=128):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--len", type=int, default=2048)
    parser.add_argument("--heads", type=int, help="default: 2 for one thread, 16 for more")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", help="no better instruction set than this one")
    add_out(parser)
    args = parser.parse_args()
    engine.set_cpu_isa(args.isa)
    peaks = {threads: probe(threads, args.dims) for threads in args.threads}
    path = args.out / "amx.csv"

    def add_row(threads, dtype, name, d, causal, length, heads, unit, own, sdpa, ratio):
        row = [
            datetime.date.today().isoformat(),
            cpu_name(),
            torch.__version__,
            best_isa(dtype, args.isa),
            threads,
        ]
        row += [dtype, name, d, causal, length, heads, unit, round(own, 1), sdpa and round(sdpa, 1)]
        row += [ratio and round(ratio, 2), round(peaks[threads]["read" if unit == "GB/s" else dtype], 1)]
        save([dict(zip(FIELDS, row))], path, FIELDS, FIELDS[1:12])
        print(*row[3:], sep="  ", flush=True)

    for threads in args.threads:
        torch.set_num_threads(threads)
        for d in args.dims if peaks[threads]["bfloat16"] else ():
            add_row(threads, "bfloat16", "product", d, 0, 0, 0, "GFLOPS", peaks[threads][d], "", "")
        for dtype in args.dtypes:
            for d, backward, causal in itertools.product(args.dims, (False, True), (False, True)):
                add_row(threads, dtype, *measure(args, threads, dtype, d, backward, causal))
            for row in measure_decode(args, getattr(torch, dtype)):
                add_row(threads, dtype, *row)
    print(*_cpu_tables.amx((args.out, None)), sep="\n")


if __name__ == "__main__":
    main()
