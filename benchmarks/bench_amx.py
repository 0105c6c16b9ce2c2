"""Times attention on this machine's processor against PyTorch's ``scaled_dot_product_attention``, call by call in turn.

    python benchmarks/bench_amx.py [--threads 1 16] [--rounds 9] [--csv benchmarks/results/amx.csv]

bf16 runs on AMX where the processor has it; ``--isa`` lowers the choice. fp32 is there to compare with. One row per
case: GFLOPS (4 b h len_q len_kv d forward, 10 backward, halved when causal) of the best call of either side, the median
over the rounds of SDPA's time divided by ours, and what the tiles or the FMA units of the same number of cores do in
registers (peak_amx.c, peak.c; needs gcc).
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

from flash_attn import flash_attn_func

FIELDS = "date processor torch isa threads dtype pass d causal len heads gflops sdpa_gflops ratio peak_gflops".split()


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


def measure(args, threads, dtype, d, backward, causal):
    heads = args.heads or (2 if threads == 1 else 16)
    torch.set_num_threads(threads)
    ours, theirs = make_calls(args, heads, d, dtype, backward, causal)
    times = []
    for _ in range(args.rounds + 1):
        times.append((seconds_of(ours), seconds_of(theirs)))
        if threads > 1:
            time.sleep(0.005)  # PyTorch's threads spin for a while
    times = times[1:]  # the first warms up
    flops = (10 if backward else 4) * heads * args.len**2 * d / (2 if causal else 1)
    best = [flops / min(column) * 1e-9 for column in zip(*times)]
    return heads, best[0], best[1], statistics.median(sdpa / own for own, sdpa in times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--len", type=int, default=2048)
    parser.add_argument("--heads", type=int, help="default: 2 for one thread, 16 for more")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", help="no better instruction set than this one")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    engine.set_cpu_isa(args.isa)
    tiles, fma = load_peak("peak_amx.c", "peak_tiles"), load_peak("peak.c", "peak_fma")
    peaks = {(t, name): peak_gflops(f, t) for t in args.threads for name, f in (("bfloat16", tiles), ("float32", fma))}
    print("peak GFLOPS:", {key: round(value) for key, value in peaks.items()}, flush=True)
    rows = []
    cases = itertools.product(args.threads, args.dtypes, args.dims, (False, True), (False, True))
    for threads, dtype, d, backward, causal in cases:
        heads, own, sdpa, ratio = measure(args, threads, getattr(torch, dtype), d, backward, causal)
        isa = best_isa(dtype, args.isa)
        row = [datetime.date.today().isoformat(), processor(), torch.__version__, isa, threads, dtype]
        row += ["bwd" if backward else "fwd", d, int(causal), args.len, heads]
        rows.append([*row, round(own, 1), round(sdpa, 1), round(ratio, 2), round(peaks[threads, dtype])])
        print(*rows[-1][3:], sep="  ", flush=True)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([FIELDS, *rows])


if __name__ == "__main__":
    main()
