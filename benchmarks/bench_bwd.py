"""Backward on a GPU beside cuDNN and PyTorch's own flash attention (FA2): in turns, and each alone.

_gpu.py describes the problems and the two rules of timing. The time is the time of dq, dk and dv from saved tensors,
with helper kernels. "in order" is deterministic=True. TFLOPS count 10 b h len_q len_kv d operations, 14 with the
forward.

    python benchmarks/bench_bwd.py                     both rules: about three and a half minutes
    python benchmarks/bench_bwd.py --rules turns       only in turns: half a minute
    python benchmarks/bench_bwd.py --packed            packed sequences
    python benchmarks/bench_bwd.py --step              forward and backward together
    python benchmarks/bench_bwd.py --gqa 4             four query heads to a key head
    python benchmarks/bench_bwd.py --dims 128 --lengths 4096 --kernels ours cuDNN

Writes bwd_<device>.csv (in turns) and bwd_sustained_<device>.csv to the folder --out; step.., bwd_gqa4.. and
.._packed.csv with these options. Each row has the peak of memory beyond the memory in use before. Prints the tables.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from _gpu import EQUAL, LENGTHS, TOKENS, add_options, main, offsets
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func, flash_attn_varlen_func


def gradients(forward, leaves, dout, step):
    """The backward alone, or with its forward."""
    if step:
        return lambda: torch.autograd.grad(forward(), leaves, dout)
    out = forward()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def inputs(shape, gqa):
    """q, k, v and the gradient of the output. k and v have fewer heads."""
    kv_shape = *shape[:-2], max(1, shape[-2] // gqa), shape[-1]
    return [randn(*s).requires_grad_() for s in (shape, kv_shape, kv_shape)], randn(*shape)


def ours(step, forward, shape, gqa=1, **options):
    leaves, dout = inputs(shape, gqa)
    return gradients(lambda: forward(*leaves, **options), leaves, dout, step)


def sdpa(step, backend, shape, gqa, causal):
    """Heads first, as strides of [b, s, h, d]."""
    leaves, dout = inputs(shape, gqa)
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]

    def forward():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=gqa > 1)

    return gradients(forward, leaves, dout.transpose(1, 2), step)


def pytorch_varlen(*args, causal):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*args, window_size=(-1, 0 if causal else -1))


KERNELS = ["ours", "ours, in order", "cuDNN", "FA2"]


def dense_kernels(names, step, gqa, d, h, causal, s):
    shape = TOKENS // s, s, h, d
    kernels = {
        "ours": partial(ours, step, flash_attn_func, shape, gqa, causal=causal),
        "ours, in order": partial(ours, step, flash_attn_func, shape, gqa, causal=causal, deterministic=True),
        "cuDNN": partial(sdpa, step, SDPBackend.CUDNN_ATTENTION, shape, gqa, causal),
        "FA2": partial(sdpa, step, SDPBackend.FLASH_ATTENTION, shape, gqa, causal),
    }
    return {name: (TOKENS // s, s, kernels[name]) for name in names}


def packed_kernels(step, gqa, d, h, causal, _length):
    cu, longest, shape = offsets(), int(LENGTHS.max()), (int(LENGTHS.sum()), h, d)

    def packed(function, **options):
        def forward(*leaves):
            return function(*leaves, cu, cu, longest, longest, causal=causal, **options)

        return len(LENGTHS), "packed", partial(ours, step, forward, shape, gqa)

    def dense(**options):
        return *EQUAL, partial(ours, step, flash_attn_func, (*EQUAL, h, d), gqa, causal=causal, **options)

    return {
        "packed": packed(flash_attn_varlen_func),
        "dense": dense(),
        "packed, in order": packed(flash_attn_varlen_func, deterministic=True),
        "dense, in order": dense(deterministic=True),
        "PyTorch's varlen_attn": packed(pytorch_varlen),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, KERNELS, KERNELS)
    parser.add_argument("--gqa", type=int, default=1, help="query heads of each key head")
    parser.add_argument("--step", action="store_true", help="the forward too")
    options = parser.parse_args()

    def kernels_of(*problem):
        if options.packed:
            return packed_kernels(options.step, options.gqa, *problem)
        return dense_kernels(options.kernels, options.step, options.gqa, *problem)

    stem = ("step" if options.step else "bwd") + (f"_gqa{options.gqa}" if options.gqa > 1 else "")
    main(options, stem, kernels_of, 14 if options.step else 10)
