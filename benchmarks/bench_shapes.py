"""Forward on a GPU for shapes that are in no other table: short, odd, unequal, grouped, other head dimensions, fp32.

Timing: _gpu.py, every kernel of PyTorch that takes the problem in turns with ours. "generic" is ours with
FLASH_ATTN_CUDA_KERNEL=any, "ours" without. TFLOPS count 4 b h d operations for each score that the mask leaves.

    python benchmarks/bench_shapes.py
    python benchmarks/bench_shapes.py --only d=40 fp32
    python benchmarks/bench_shapes.py --table          the table from the file, nothing measured

Writes benchmarks/results/shapes_<device>.csv (or --csv) and prints the table.
"""

import argparse
import os
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from _gpu import RESULTS, device_name, machine, measure, peak_memory, read, ready, write
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func

# name, sizes, causal, dtype
SHAPES = [
    ("len 17", (64, 17, 17, 16, 16, 64), False, "bf16"),
    ("len 128", (64, 128, 128, 16, 16, 64), True, "bf16"),
    ("len 512", (32, 512, 512, 16, 16, 128), True, "bf16"),
    ("len 1000", (16, 1000, 1000, 16, 16, 128), False, "bf16"),
    ("len 1000, causal", (16, 1000, 1000, 16, 16, 128), True, "bf16"),
    ("len 4095, causal", (4, 4095, 4095, 16, 16, 128), True, "bf16"),
    ("1000 queries, 3000 keys", (8, 1000, 3000, 16, 16, 128), False, "bf16"),
    ("4096 queries, 77 keys", (8, 4096, 77, 16, 16, 64), False, "bf16"),
    ("one sequence, 2 heads", (1, 4096, 4096, 2, 2, 128), True, "bf16"),
    ("32 heads to 8", (4, 4096, 4096, 32, 8, 128), True, "bf16"),
    ("32 heads to 1", (4, 4096, 4096, 32, 1, 128), True, "bf16"),
    ("d = 32", (4, 4096, 4096, 32, 32, 32), False, "bf16"),
    ("d = 40", (4, 4096, 4096, 32, 32, 40), False, "bf16"),
    ("d = 72", (4, 4096, 4096, 16, 16, 72), False, "bf16"),
    ("d = 80", (4, 4096, 4096, 16, 16, 80), False, "bf16"),
    ("d = 96", (4, 4096, 4096, 16, 16, 96), False, "bf16"),
    ("d = 160", (4, 4096, 4096, 8, 8, 160), False, "bf16"),
    ("d = 192", (4, 4096, 4096, 8, 8, 192), False, "bf16"),
    ("d = 192, causal", (4, 4096, 4096, 8, 8, 192), True, "bf16"),
    ("d = 128, fp16", (4, 4096, 4096, 16, 16, 128), True, "fp16"),
    ("d = 36: generic", (4, 2048, 2048, 16, 16, 36), False, "bf16"),
    ("d = 64, fp32: generic", (4, 2048, 2048, 16, 16, 64), False, "fp32"),
    ("d = 128, fp32: generic", (4, 2048, 2048, 16, 16, 128), True, "fp32"),
]
WITH_GENERIC = {"len 1000", "len 1000, causal", "d = 40", "d = 192", "d = 128, fp16"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FA2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SIZES = "b", "len_q", "len_kv", "h", "h_kv", "d"
COLUMNS = "date", "device", "torch", "cudnn", "kernel", "shape", *SIZES, "causal", "dtype", "ms", "tflops", "mhz", "mib"


def tensors(shape, dtype):
    b, len_q, len_kv, h, h_kv, d = shape
    sizes = (b, len_q, h, d), (b, len_kv, h_kv, d), (b, len_kv, h_kv, d)
    return [torch.randn(size, device="cuda", dtype=DTYPES[dtype]) for size in sizes]


def sdpa(backend, shape, causal, dtype):
    """Heads first, as strides of [b, s, h, d]."""
    heads_first = [x.transpose(1, 2) for x in tensors(shape, dtype)]
    grouped = shape[3] != shape[4]

    def call():
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel does not take the problem
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=grouped)

    return call


def ours(shape, causal, dtype):
    return partial(flash_attn_func, *tensors(shape, dtype), causal=causal)


def generic(shape, causal, dtype):
    call = ours(shape, causal, dtype)

    def generic_call():
        os.environ["FLASH_ATTN_CUDA_KERNEL"] = "any"
        try:
            return call()
        finally:
            del os.environ["FLASH_ATTN_CUDA_KERNEL"]

    return generic_call


def kernels_of(name, *problem):
    kernels = {"ours": partial(ours, *problem)}
    if name in WITH_GENERIC:
        kernels["generic"] = partial(generic, *problem)
    for backend, number in BACKENDS.items():
        if backend != "math" or "generic" in name:
            kernels[backend] = partial(sdpa, number, *problem)
    return kernels


def scores(len_q, len_kv, causal):
    """That the mask leaves, of one head. Only equal lengths are causal here: PyTorch aligns other masks differently."""
    return len_q * (len_q + 1) // 2 if causal else len_q * len_kv


def run(options):
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for name, shape, causal, dtype in SHAPES:
        if options.only and not any(word in name.replace(" ", "") for word in options.only):
            continue
        calls = ready(kernels_of(name, shape, causal, dtype))
        times, mhz = measure(calls, options.seconds, flush)
        b, len_q, len_kv, h, _, d = shape
        operations = 4 * b * h * d * scores(len_q, len_kv, causal)
        print(f"{name:24} " + "  ".join(f"{kernel} {ms:.3f} ms" for kernel, ms in times.items()), flush=True)
        for kernel, ms in times.items():
            yield {
                **machine(),
                **dict(zip(("kernel", "shape", *SIZES, "causal", "dtype"), (kernel, name, *shape, causal, dtype))),
                "ms": round(ms, 4),
                "tflops": round(operations / ms / 1e9, 1),
                "mhz": mhz,
                "mib": round(peak_memory(calls[kernel])),
            }


def print_table(path):
    rows = read(path)
    kernels = ["ours", "generic", *BACKENDS]
    print(f"\n{rows[0]['device']}, {rows[0]['date']}, {path.name}: TFLOPS")
    print(f"| shape | {' | '.join(kernels)} |\n|{'---|' * (len(kernels) + 1)}")
    for name in dict.fromkeys(row["shape"] for row in rows):
        found = {row["kernel"]: float(row["tflops"]) for row in rows if row["shape"] == name}
        cells = [f"{found[kernel]:.3g}" if kernel in found else "" for kernel in kernels]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="shapes whose names, without spaces, hold one of these words")
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a shape together")
    parser.add_argument("--csv", type=Path, default=RESULTS / f"shapes_{device_name()}.csv")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of the file")
    options = parser.parse_args()
    if not options.table:
        with torch.no_grad():
            write(run(options), options.csv, COLUMNS)
    print_table(options.csv)
