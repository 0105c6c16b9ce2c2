"""Backward on a GPU beside cuDNN and PyTorch's own flash attention, in alternation in one process.

The problems, the timing and the peers of bench_fwd.py; the time is that of dq, dk and dv from saved tensors, helper
kernels included. TFLOPS count 10 b h len_q len_kv d operations, half of them when causal.

    python benchmarks/bench_bwd.py                     the table of csrc/cuda/README.md
    python benchmarks/bench_bwd.py --dims 128 --lengths 4096 --fa2
    python benchmarks/bench_bwd.py --step              forward and backward together, and the peak of memory
    python benchmarks/bench_bwd.py --packed            packed sequences of mixed lengths

Writes benchmarks/results/bwd_<device>.csv (or --csv) and, with matplotlib, one plot for each head_dim beside it; prints
the README's table.
"""

import argparse
import csv
import datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_fwd import COLUMNS, HIDDEN, RESULTS, TOKENS, measure, plot
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func, flash_attn_varlen_func


def calls(forward, leaves, dout, step):
    """The backward alone, or with its forward."""
    if step:

        def call():
            with torch.enable_grad():
                return torch.autograd.grad(forward(), leaves, dout)

        return call
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def dense_kernels(b, h, s, d, causal, fa2, step):
    """{name: a call without arguments} on the same tensors."""
    q, k, v, dout = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    heads_first = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]

    def sdpa(backend):
        def forward():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads_first, is_causal=causal)

        return calls(forward, heads_first, dout.transpose(1, 2), step)

    def ours(deterministic):
        return calls(lambda: flash_attn_func(*leaves, causal=causal, deterministic=deterministic), leaves, dout, step)

    kernels = {"ours": ours(False), "ours, in order": ours(True), "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if fa2:
        kernels["FA2"] = sdpa(SDPBackend.FLASH_ATTENTION)
    return kernels


def packed_kernels(h, d, causal, step):
    """24 sequences of 64 .. 4096 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 4097, (24,), generator=generator)
    cu = F.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    total, longest = int(lengths.sum()), int(lengths.max())
    q, k, v, dout = (torch.randn(total, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward():
        return flash_attn_varlen_func(*leaves, cu, cu, longest, longest, causal=causal)

    operations = 10 * h * d * int((lengths**2).sum()) * (0.5 if causal else 1)
    return operations, {"ours": calls(forward, leaves, dout, step)}


def peak_memory(fn):
    """MiB that a call needs beyond what it finds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def print_table(rows, lengths):
    """One line for each head_dim: TFLOPS at each length, causal in brackets."""
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    print(f"\n| head_dim | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    found = {(r["d"], r["kernel"], r["length"], r["causal"]): r["tflops"] for r in rows}
    for d in dict.fromkeys(row["d"] for row in rows):
        cells = [
            " / ".join(f"{found.get((d, n, s, False), 0):.0f} ({found.get((d, n, s, True), 0):.0f})" for s in lengths)
            for n in names
        ]
        print(f"| {d} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fa2", action="store_true", help="PyTorch's flash attention too")
    parser.add_argument("--packed", action="store_true", help="packed sequences instead of dense ones")
    parser.add_argument("--csv", type=Path, help="where to write the figures")
    parser.add_argument("--step", action="store_true", help="the forward too")
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
    print(f"{device}, torch {base['torch']}, cuDNN {base['cudnn']}: TFLOPS (MHz), MiB of memory")
    for d in options.dims:
        h = HIDDEN // d
        for causal in (False, True):
            for s in ["packed"] if options.packed else options.lengths:
                b = 24 if options.packed else TOKENS // s
                if options.packed:
                    operations, kernels = packed_kernels(h, d, causal, options.step)
                else:
                    operations = 10 * b * h * s * s * d * (0.5 if causal else 1)
                    kernels = dense_kernels(b, h, s, d, causal, options.fa2, options.step)
                if options.step:
                    operations *= 1.4
                result = measure(kernels, operations, options.rounds, flush)
                line = ""
                for name, (ms, tflops, mhz) in result.items():
                    mib = peak_memory(kernels[name])
                    values = {"kernel": name, "d": d, "b": b, "h": h, "length": s, "causal": causal, "mhz": mhz}
                    rows.append({**base, **values, "ms": round(ms, 4), "tflops": round(tflops, 1), "mib": round(mib)})
                    line += f"  {name} {tflops:4.0f} ({mhz}) {mib:.0f} MiB"
                print(f"d {d:3}  length {s:>6}  {'causal' if causal else 'full  '}{line}", flush=True)

    stem = f"bwd_{device}{'_step' if options.step else ''}{'_packed' if options.packed else ''}"
    path = options.csv or RESULTS / f"{stem}.csv"
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "mib"])
        writer.writeheader()
        writer.writerows(rows)
    print_table(rows, ["packed"] if options.packed else options.lengths)
    if not options.packed and not options.step:
        for d in options.dims:
            plot(rows, d, path.with_name(f"{path.stem}_d{d}.svg"))


if __name__ == "__main__":
    main()
