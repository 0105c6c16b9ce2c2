"""Forward in 8 bits on a GPU: flash_attn_3 in FP8 and in bf16, and another build of FlashAttention-3, by both rules.

_gpu.py describes the problems and the two rules of timing. Inputs are N(0, 1), rounded to e4m3, without descales.
TFLOPS count 4 b h len_q len_kv d operations, half of them when causal.

    python benchmarks/bench_fwd_fp8.py                              flash_attn_3 in FP8 and bf16
    python benchmarks/bench_fwd_fp8.py --fa3 NAME --rules turns     and the flash_attn_func of a module of that name

The other build must not register ops in the namespace flash_attn_3, which the package of this project has. Writes
fwd_e4m3_<device>.csv (in turns) and fwd_e4m3_sustained_<device>.csv to the folder --out.
"""

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path

import torch
from _gpu import TOKENS, add_options, main

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hopper"))


NAMES = ["FP8", "bf16", "FA3 FP8"]


def attend(module, dtype, shape, causal):
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
    return partial(importlib.import_module(module).flash_attn_func, q, k, v, causal=causal)


def kernels_of(options, d, h, causal, s):
    b = TOKENS // s
    ours = "flash_attn_3.flash_attn_interface"
    kernels = {"FP8": (ours, torch.float8_e4m3fn), "bf16": (ours, torch.bfloat16)}
    if options.fa3:
        kernels["FA3 FP8"] = (options.fa3, torch.float8_e4m3fn)
    shape = (b, s, h, d)
    return {
        name: (b, s, partial(attend, *of, shape, causal)) for name, of in kernels.items() if name in options.kernels
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, NAMES, NAMES, dims=(64, 128, 192, 256))
    parser.add_argument("--fa3", help="the import name of a module with the flash_attn_func of FlashAttention-3")
    options = parser.parse_args()
    if options.packed:
        parser.error("the problems are dense")
    with torch.no_grad():
        main(options, "fwd_e4m3", partial(kernels_of, options), 4)
