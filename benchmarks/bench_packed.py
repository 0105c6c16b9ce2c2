"""Thousands of packed sequences on a GPU: flash_attn_varlen_func beside PyTorch's varlen_attn (FA2), forward and
backward, in bf16.

    python benchmarks/bench_packed.py

The lengths of a batch are drawn evenly from a range, or so that their logarithms are normal ("spread"), as the lengths
of sentences are. The kernels run in turns (_gpu.py). "others" is our call without the kernels of short sequences, and
"copy" copies as many bytes as q, k, v and out have. An error is the norm of the difference to fp64, divided by the norm
of the exact result. It is that of the first 64 sequences. Writes packed_<device>.csv to the folder --out, and prints
the table.
"""

import argparse
import random
from functools import partial

import torch
from _gpu import by_kernels, flusher, in_turns, machine, offsets, ready
from _results import add_out, command, need_gpu, save
from cases import BENCH_PACKED
from tables import print_tables
from torch.nn.attention.varlen import varlen_attn

from flash_attn import flash_attn_varlen_func

PROBLEM = "kernel", "pass", "lengths", "mean", "b", "h", "d"
COLUMNS = "date", "device", "torch", "rule", *PROBLEM, "ms", "error", "mhz", "command"
KINDS = {"ours": flash_attn_varlen_func, "PyTorch": varlen_attn}
NUM_EXACT = 64
OTHERS = "decode,sm90,sm80,any"


def lengths_of(kind, b):
    drawn = torch.Generator().manual_seed(0)
    if kind == "spread":
        return (torch.randn(b, generator=drawn) * 0.8 + 3.5).exp().clamp(4, 512).long()
    least, most = (int(x) for x in kind.split(" to "))
    return torch.randint(least, most + 1, (b,), generator=drawn)


def error_of(out, tensors, ends):
    error = size = 0
    for begin, end in zip(ends[:NUM_EXACT], ends[1:]):
        q, k, v = (x.detach()[begin:end].double().transpose(0, 1) for x in tensors)
        want = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        error += (out[begin:end].transpose(0, 1) - want).square().sum()
        size += want.square().sum()
    return (error / size).sqrt().item()


def on_ends(function, ends, longest, *tensors):
    return function(*tensors, ends, ends, longest, longest)


def calls_of(function, tensors, dout):
    """{pass: call}, and out."""
    recorded = function(*tensors)

    def forward():
        with torch.no_grad():
            return function(*tensors)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(recorded, tensors, dout, retain_graph=True),
    }, recorded.detach()


def copy_of(total, h, d):
    source, target = (torch.empty(2, total, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: target.copy_(source)


def run(options):
    flush, rng = flusher(), random.Random(0)
    for kind, b, h, d in BENCH_PACKED:
        lengths = lengths_of(kind, b)
        ends, longest, total = offsets(lengths), int(lengths.max()), int(lengths.sum())
        *tensors, dout = (torch.randn(total, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        tensors = [x.requires_grad_() for x in tensors]
        calls, errors = {}, {}
        for kernel, function in KINDS.items():
            of_batch = partial(on_ends, function, ends, longest)
            of, out = calls_of(of_batch, tensors, dout)
            errors[kernel] = error_of(out, tensors, ends.tolist())
            calls.update({(kernel, step): lambda call=call: call for step, call in of.items()})
            if kernel == "ours":
                calls.update({("others", x): lambda call=call: by_kernels(OTHERS, call) for x, call in of.items()})
        calls["copy", "forward"] = partial(copy_of, total, h, d)
        times, mhz = in_turns(ready(calls), options.seconds, flush, rng)
        rows = []
        for (kernel, step), ms in times.items():
            problem = dict(zip(PROBLEM, (kernel, step, kind, round(total / b), b, h, d)))
            error = f"{errors[kernel]:.1e}" if kernel in errors else ""
            figures = {"ms": round(ms, 4), "error": error, "mhz": mhz}
            rows.append({**machine(), "rule": "turns", "command": command(), **problem, **figures})
        words = (f"{row['kernel']} {row['pass']} {row['ms']:.3f}" for row in rows)
        print(kind, b, h, d, "  ".join(words), flush=True)
        yield rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a problem together")
    add_out(parser)
    options = parser.parse_args()
    need_gpu()
    path = options.out / f"packed_{machine()['device']}.csv"
    for rows in run(options):
        save(rows, path, COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, machine()["device"])
