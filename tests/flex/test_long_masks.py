"""mask_mods of many operations, and long sequences: Hopper's kernels read bits that another kernel makes once for all
heads (csrc/cuda/flex_hidden.cu)."""

import re

import pytest
import torch
from oracle_attention import TOLERANCES, attention, close
from torch.nn.attention.flex_attention import BlockMask

import flash_attn
from flash_attn.flex_attention import create_block_mask, create_mask, flex_attention

GENERIC = "attn_fwd_any_bf16_d128_q128kv64_of3_flex_#"
HOPPER = "attn_fwd_sm90_bf16_d128_q128kv128_flex_#"
HOPPER_BACKWARD = ["attn_bwd_prep_bf16_d128_q64kv128", "attn_bwd_sm90_bf16_d128_q64kv128_flex_#"]


def neighbours(width, reach):
    def mask_mod(b, h, q, kv):
        return ((q // width - kv // width).abs() <= reach) & ((q % width - kv % width).abs() <= reach)

    return mask_mod


def tiles_of_three(t, y, x):
    """Sliding tiles in three dimensions: where a tile lies, and which tiles its queries see."""

    def place(i):
        return i // (y * x), i % (y * x) // x, i % x

    def mask_mod(b, h, q, kv):
        (q_t, q_y, q_x), (kv_t, kv_y, kv_x) = place(q), place(kv)
        middle = (q_t // 2).clamp(1, t // 2 - 2), (q_y // 4).clamp(1, y // 4 - 2), (q_x // 4).clamp(1, x // 4 - 2)
        near = [(a // n - c).abs() <= 1 for a, n, c in zip((kv_t, kv_y, kv_x), (2, 4, 4), middle)]
        return near[0] & near[1] & near[2]

    return mask_mod


def of_many_operations(b, h, q, kv):
    seen = q >= kv
    for i in range(8):
        seen = seen | (torch.sin(q * 0.1 + i) > torch.cos(kv * 0.2 - i))
    return seen


def names_of(tensors, mask, archs="sm_90a"):
    """The names of attention's kernels, and of flex_hidden; the hashes of mods become #."""
    kernels = flash_attn.prebuild_call(flex_attention, *tensors, None, mask, archs=archs, compiles=False)
    names = [re.sub(r"_[0-9a-f]{16}$", "_#", kernel.name) for kernel in kernels]
    return [name for name in names if name not in ("flex_walks", "flex_blocks")]


def absent(heads, length, grad=False):
    return [
        torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta", requires_grad=grad) for _ in range(3)
    ]


@pytest.mark.parametrize("mask_mod", [neighbours(64, 8), tiles_of_three(8, 16, 16), of_many_operations])
def test_hoppers_kernels_take_them(mask_mod):
    mask = create_block_mask(mask_mod, None, None, 2048, 2048, "cpu")
    assert names_of(absent(8, 2048, grad=True), mask) == ["flex_hidden_flex_#", HOPPER, *HOPPER_BACKWARD]


@pytest.mark.parametrize(
    ("mask_mod", "heads", "length", "want"),
    [
        (neighbours(64, 8), 9, 65536, ["flex_hidden_flex_#", HOPPER]),  # a little less than q, k, v and out
        (neighbours(64, 8), 7, 65536, [HOPPER]),  # the attention kernel computes a short mask
        (of_many_operations, 7, 65536, [GENERIC]),
        (of_many_operations, 1, 16384, ["flex_hidden_flex_#", HOPPER]),
    ],
)
def test_bits_take_no_more_memory_than_the_tensors(mask_mod, heads, length, want):
    blocks = torch.zeros(1, 1, length // 128, length // 128, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(blocks[..., 0], blocks, mask_mod=mask_mod, seq_lengths=(length, length))
    assert names_of(absent(heads, length), mask) == want


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("kernel", [None, "any"])
@pytest.mark.parametrize("make", ["neighbours", "tiles", "operations"])
def test_numbers_on_a_gpu(make, kernel, d):
    import flash_attn_2_cuda

    length = {"neighbours": 500, "tiles": 8 * 16 * 16, "operations": 300}[make]
    mask_mod = {"neighbours": neighbours(20, 3), "tiles": tiles_of_three(8, 16, 16), "operations": of_many_operations}
    generator = torch.Generator().manual_seed(d)
    tensors = [torch.randn(1, 2, length, d, generator=generator).to(torch.bfloat16) for _ in range(3)]
    on_gpu = [x.cuda().requires_grad_() for x in tensors]
    mask = create_block_mask(mask_mod[make], None, None, length, length, "cuda")
    flash_attn_2_cuda.set_cuda_kernels(kernel)
    try:
        out = flex_attention(*on_gpu, None, mask)
        dout = torch.randn(out.shape, generator=generator)
        found = torch.autograd.grad(out, on_gpu, dout.to(out))
    finally:
        flash_attn_2_cuda.set_cuda_kernels(None)
    exact = [x.double().requires_grad_() for x in tensors]
    seen = create_mask(mask_mod[make], None, None, length, length, "cpu")
    want = attention(*exact, None, seen)[0]
    close(out.cpu(), want, TOLERANCES[torch.bfloat16])
    for has, wants in zip(found, torch.autograd.grad(want, exact, dout.to(torch.bfloat16).double()), strict=True):
        assert (has.cpu().double() - wants).abs().max() <= 0.02 * wants.abs().max()
