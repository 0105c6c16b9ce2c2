"""Forward on a GPU beside cuDNN, PyTorch's own flash attention (FA2) and FlexAttention: in turns, and each alone.

_gpu.py describes the problems and the two rules of timing. TFLOPS count 4 b h len_q len_kv d operations, half of them
when causal.

    python benchmarks/bench_fwd.py                     both rules: about two and a half minutes
    python benchmarks/bench_fwd.py --rules turns       only in turns: half a minute
    python benchmarks/bench_fwd.py --packed            packed sequences beside dense ones of as many operations
    python benchmarks/bench_fwd.py --kernels ours FlexAttention --dims 128 --lengths 4096
    python benchmarks/bench_fwd.py --kernels "ours dropout" "FA2 dropout" "ours softcap" "ours ALiBi"

FlexAttention compiles for every problem first. This takes seconds, or one second if torch finds the cache of an earlier
run. Writes fwd_<device>.csv (in turns) and fwd_sustained_<device>.csv, with --packed .._packed.csv, to the folder
--out. Each row has the peak of memory beyond the memory in use before. Prints the tables. tables.py draws the pictures.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from _gpu import EQUAL, LENGTHS, TOKENS, add_options, compiled_flex, main, offsets
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn import flash_attn_func, flash_attn_varlen_func


def tensors(*shape):
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def sdpa(backend, shape, causal, dropout=0.0):
    """Heads first, as strides of [b, s, h, d]."""
    heads_first = [x.transpose(1, 2) for x in tensors(*shape)]

    def call():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, dropout_p=dropout)

    return call


def flex(shape, causal):
    length = shape[1]
    mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, length, length) if causal else None
    heads_first = [x.transpose(1, 2) for x in tensors(*shape)]
    return partial(compiled_flex(), *heads_first, block_mask=mask)


def dense(shape, causal, **options):
    return partial(flash_attn_func, *tensors(*shape), causal=causal, **options)


def alibi(shape, causal):
    return dense(shape, causal, alibi_slopes=torch.rand(shape[2], device="cuda"))


def packed(function, h, d, **options):
    cu, longest = offsets(), int(LENGTHS.max())
    return partial(function, *tensors(int(LENGTHS.sum()), h, d), cu, cu, longest, longest, **options)


def pytorch_varlen(*args, causal):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*args, window_size=(-1, 0 if causal else -1))


def packed_kernels(d, h, causal, _length):
    return {
        "packed": (len(LENGTHS), "packed", partial(packed, flash_attn_varlen_func, h, d, causal=causal)),
        "dense": (*EQUAL, partial(dense, (*EQUAL, h, d), causal)),
        "PyTorch's varlen_attn": (len(LENGTHS), "packed", partial(packed, pytorch_varlen, h, d, causal=causal)),
    }


DENSE = {
    "ours": dense,
    "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "FA2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "FlexAttention": flex,
    "ours dropout": partial(dense, dropout_p=0.1),
    "FA2 dropout": partial(sdpa, SDPBackend.FLASH_ATTENTION, dropout=0.1),
    "ours softcap": partial(dense, softcap=20.0),
    "ours ALiBi": alibi,
}


def dense_kernels(names, d, h, causal, s):
    b = TOKENS // s
    return {name: (b, s, partial(DENSE[name], (b, s, h, d), causal)) for name in names}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, list(DENSE), ["ours", "cuDNN", "FA2"])
    options = parser.parse_args()
    with torch.no_grad():
        main(options, "fwd", packed_kernels if options.packed else partial(dense_kernels, options.kernels), 4)
