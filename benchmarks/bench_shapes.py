"""Forward on a GPU for shapes that are in no other table: short, odd, unequal, grouped, other head dimensions, fp32.

Every kernel of PyTorch that takes the problem runs in turns with ours (_gpu.py). "generic" is our call with
FLASH_ATTN_CUDA_KERNEL=any, "ours" is our call without this variable. TFLOPS count 4 b h d operations for each unmasked
score.

    python benchmarks/bench_shapes.py
    python benchmarks/bench_shapes.py --only d=40 fp32

Writes shapes_<device>.csv to the folder --out and prints the table.
"""

import argparse
import random
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from _gpu import by_kernels, flusher, in_turns, machine, peak_memory, ready
from _results import add_out, command, need_gpu, save
from cases import BENCH_SHAPES
from tables import print_tables
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func

WITH_GENERIC = {"len 1000", "len 1000, causal", "d = 36", "d = 40", "d = 192", "d = 128, fp16"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FA2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SIZES = "b", "len_q", "len_kv", "h", "h_kv", "d"
PROBLEM = "kernel", "shape", *SIZES, "causal", "dtype"
COLUMNS = "date", "device", "torch", "cudnn", "rule", *PROBLEM, "ms", "tflops", "mhz", "mib", "command"


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
            warnings.simplefilter("ignore")  # PyTorch warns why a kernel does not take the problem
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=grouped)

    return call


def ours(shape, causal, dtype):
    return partial(flash_attn_func, *tensors(shape, dtype), causal=causal)


def generic(*problem):
    return by_kernels("any", ours(*problem))


def kernels_of(name, *problem):
    kernels = {"ours": partial(ours, *problem)}
    if name in WITH_GENERIC:
        kernels["generic"] = partial(generic, *problem)
    for backend, number in BACKENDS.items():
        if backend != "math" or "generic" in name:
            kernels[backend] = partial(sdpa, number, *problem)
    return kernels


def scores(len_q, len_kv, causal):
    """Unmasked scores of one head. Only equal lengths are causal here, because PyTorch aligns other masks
    differently."""
    return len_q * (len_q + 1) // 2 if causal else len_q * len_kv


def run(options):
    flush, rng = flusher(), random.Random(0)
    for name, case in BENCH_SHAPES.items():
        shape, causal, dtype = (case.b, case.len_q, case.len_kv, case.h, case.h_kv, case.d), case.causal, case.dtype
        if options.only and not any(word in name.replace(" ", "") for word in options.only):
            continue
        calls = ready(kernels_of(name, shape, causal, dtype))
        times, mhz = in_turns(calls, options.seconds, flush, rng)
        b, len_q, len_kv, h, _, d = shape
        operations = 4 * b * h * d * scores(len_q, len_kv, causal)
        print(f"{name:24} " + "  ".join(f"{kernel} {ms:.3f} ms" for kernel, ms in times.items()), flush=True)
        for kernel, ms in times.items():
            yield {
                **machine(),
                "rule": "turns",
                "command": command(),
                **dict(zip(PROBLEM, (kernel, name, *shape, causal, dtype))),
                "ms": round(ms, 4),
                "tflops": round(operations / ms / 1e9, 1),
                "mhz": mhz,
                "mib": round(peak_memory(calls[kernel])),
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="shapes whose names, without spaces, hold one of these words")
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a shape together")
    add_out(parser)
    options = parser.parse_args()
    need_gpu()
    path = options.out / f"shapes_{machine()['device']}.csv"
    with torch.no_grad():
        for row in run(options):
            save([row], path, COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, machine()["device"])
