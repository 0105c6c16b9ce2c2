"""Forward on a GPU beside cuDNN, PyTorch's own flash attention and FlexAttention, in alternation in one process.

16k tokens, hidden size 2048: for head_dim d there are 2048 / d heads, for length s 16k / s sequences. TFLOPS count
4 b h len_q len_kv d operations, half of them when causal. Input is N(0, 1) in bf16.

Timing: CUDA events around single launches, the L2 flushed before each; the median over 100 ms after 30 ms of warm-up,
then the next kernel, `--rounds` times; the table shows the median of the rounds. The SM clock is read while the kernel
runs: boards throttle, so compare kernels within one line.

    python benchmarks/bench_fwd.py                     the table of csrc/cuda/README.md
    python benchmarks/bench_fwd.py --dims 128 --lengths 4096 --flex
    python benchmarks/bench_fwd.py --packed            packed sequences of mixed lengths against dense ones

Writes benchmarks/results/fwd_<device>.csv and, with matplotlib, one plot for each head_dim beside it.
"""

import argparse
import csv
import datetime
import subprocess
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func, flash_attn_varlen_func

RESULTS = Path(__file__).resolve().parent / "results"
TOKENS, HIDDEN = 16384, 2048
COLUMNS = ["date", "device", "torch", "cudnn", "kernel", "d", "b", "h", "length", "causal", "ms", "tflops", "mhz"]


def times(fn, flush, warmup_ms=30, total_ms=100):
    """Milliseconds of single launches."""
    fn()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        flush.zero_()
        fn()
    end.record()
    torch.cuda.synchronize()
    estimate = start.elapsed_time(end) / 5
    for _ in range(max(1, int(warmup_ms / estimate))):
        fn()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(max(5, int(total_ms / estimate)))]
    for begin, finish in pairs:
        flush.zero_()
        begin.record()
        fn()
        finish.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(finish) for begin, finish in pairs]


def clock_under_load(fn, ms):
    """The SM clock in MHz while fn runs, or None where nvidia-smi does not say."""
    for _ in range(int(300 / ms) + 1):
        fn()
    try:
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", "0"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        return int(said.split()[0])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None
    finally:
        torch.cuda.synchronize()


def dense_kernels(b, h, s, d, causal, flex):
    """{name: a call without arguments} on the same tensors."""
    q, k, v = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def sdpa(backend):
        def call():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads_first, is_causal=causal)

        return call

    kernels = {
        "ours": lambda: flash_attn_func(q, k, v, causal=causal),
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "FA2": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, s, s) if causal else None
        compiled = torch.compile(flex_attention)
        kernels["Flex"] = lambda: compiled(*heads_first, block_mask=mask)
    return kernels


def packed_kernels(h, d, causal):
    """24 sequences of 64 .. 4096 tokens, and as many operations in dense ones."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 4097, (24,), generator=generator)
    cu = F.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    total, longest = int(lengths.sum()), int(lengths.max())
    q, k, v = (torch.randn(total, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    operations = 4 * h * d * int((lengths**2).sum()) * (0.5 if causal else 1)
    return operations, {"ours": lambda: flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=causal)}


def measure(kernels, operations, rounds, flush):
    """{name: (ms, TFLOPS, MHz)}; a kernel that refuses the problem is left out."""
    found = {name: [] for name in kernels}
    for _ in range(rounds):
        for name, fn in kernels.items():
            try:
                with torch.no_grad():
                    found[name].append(median(times(fn, flush)))
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0]}")
    result = {}
    for name, ms in found.items():
        if ms:
            with torch.no_grad():
                result[name] = (median(ms), operations / median(ms) / 1e9, clock_under_load(kernels[name], median(ms)))
    return result


def plot(rows, d, path):
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, causal in zip(axes, (False, True)):
        for name in dict.fromkeys(row["kernel"] for row in rows):
            of_name = [r for r in rows if r["kernel"] == name and r["d"] == d and r["causal"] == causal]
            axis.plot([r["length"] for r in of_name], [r["tflops"] for r in of_name], marker="o", label=name)
        axis.set(title=f"head_dim {d}{', causal' if causal else ''}", xlabel="length", xscale="log", ylabel="TFLOPS")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flex", action="store_true", help="FlexAttention too; it compiles first")
    parser.add_argument("--packed", action="store_true", help="packed sequences instead of dense ones")
    options = parser.parse_args()

    device = torch.cuda.get_device_name().replace(" ", "_")
    base = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    rows = []
    print(f"{device}, torch {base['torch']}, cuDNN {base['cudnn']}: TFLOPS (MHz)")
    for d in options.dims:
        h = HIDDEN // d
        for causal in (False, True):
            for s in ["packed"] if options.packed else options.lengths:
                b = 24 if options.packed else TOKENS // s
                if options.packed:
                    operations, kernels = packed_kernels(h, d, causal)
                else:
                    operations = 4 * b * h * s * s * d * (0.5 if causal else 1)
                    kernels = dense_kernels(b, h, s, d, causal, options.flex)
                result = measure(kernels, operations, options.rounds, flush)
                for name, (ms, tflops, mhz) in result.items():
                    values = {"kernel": name, "d": d, "b": b, "h": h, "length": s, "causal": causal, "mhz": mhz}
                    rows.append({**base, **values, "ms": round(ms, 4), "tflops": round(tflops, 1)})
                line = "  ".join(f"{name} {tflops:4.0f} ({mhz})" for name, (_, tflops, mhz) in result.items())
                print(f"d {d:3}  length {s:>6}  {'causal' if causal else 'full  '}  {line}", flush=True)

    RESULTS.mkdir(exist_ok=True)
    stem = f"fwd_{device}{'_packed' if options.packed else ''}"
    with open(RESULTS / f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    if not options.packed:
        for d in options.dims:
            plot(rows, d, RESULTS / f"{stem}_d{d}.svg")


if __name__ == "__main__":
    main()
