"""Biases of each query and key, which Hopper's kernels load in pairs, in eights, or before the scores are there."""

import re

import pytest
import torch
from oracle_attention import TOLERANCES, attention, close, gradients

import flash_attn
from flash_attn import flash_attn_func
from flash_attn.flex_attention import flex_attention

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")),
]
SIZES = {
    "even": (300, 422), "odd": (299, 421), "square": (256, 256), "short": (70, 300), "eights": (300, 1000)
}  # fmt: skip


def draw(h, h_kv, len_q, len_kv, d, device, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(len_q + d)
    shapes = (2, h, len_q, d), (2, h_kv, len_kv, d), (2, h_kv, len_kv, d)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def laid(values, layout):
    """The same values in another place of a larger tensor, or with other strides."""
    *shape, rows, columns = values.shape
    if layout == "shifted":  # begins between two pairs
        return torch.cat([values.new_zeros(1), values.flatten()])[1:].view_as(values)
    if layout == "padded":
        wide = values.new_full((*shape, rows, columns + columns % 2 + (8 if columns % 8 == 0 else 6)), float("nan"))
        wide[..., :columns] = values
        return wide[..., :columns]
    if layout == "transposed":
        return values.mT.contiguous().mT
    return values


def verify(out, leaves, bias, exact_bias, score_mod=None, mask=None):
    """out and gradients against fp64. leaves: ``[b, h, len, d]``, and perhaps the bias."""
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves[:3]]
    wide = exact_bias.detach().cpu().double().expand(2, -1, -1, -1).requires_grad_(len(leaves) > 3)
    add = score_mod or (lambda s, b, h, i, j: s + wide[b, h % wide.shape[1], i, j])
    want = attention(*exact, add, mask)[0]
    tolerance = TOLERANCES[out.dtype]
    close(out.detach().cpu(), want, tolerance)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    found = torch.autograd.grad(out, leaves, dout)
    wants = gradients([want], exact, [dout.cpu().double()])
    for has, wanted in zip(found, wants, strict=False):
        assert (has.cpu().double() - wanted).abs().max() <= max(tolerance * wanted.abs().max(), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("layout", ["dense", "shifted", "padded", "transposed"])
@pytest.mark.parametrize("sizes", list(SIZES))
def test_layouts(sizes, layout, d, device):
    len_q, len_kv = SIZES[sizes]
    leaves = draw(4, 2, len_q, len_kv, d, device)
    values = torch.randn(1, 4, len_q, len_kv, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = laid(values.to(device), layout)
    out = flash_attn_func(*(x.transpose(1, 2) for x in leaves), attn_bias=bias).transpose(1, 2)
    verify(out, leaves, bias, values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_of_biases(bias_dtype, device):
    leaves = draw(2, 2, 200, 330, 64, device, torch.float16)
    values = torch.randn(2, 1, 200, 330, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(bias_dtype)
    out = flash_attn_func(*(x.transpose(1, 2) for x in leaves), attn_bias=values.to(device)).transpose(1, 2)
    verify(out, leaves, None, values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("low", [-2000.0, -1e9, torch.finfo(torch.bfloat16).min])
def test_rows_of_low_biases(low, d, device):
    """Their largest bias is subtracted, and rows are told apart: every third row has low biases."""
    len_q, len_kv = 260, 304
    leaves = draw(2, 2, len_q, len_kv, d, device)
    values = torch.randn(1, 1, len_q, len_kv, generator=torch.Generator().manual_seed(1)).bfloat16()
    values[:, :, ::3] = low
    exact = values.clone()
    exact[:, :, ::3] = 0
    out = flash_attn_func(*(x.transpose(1, 2) for x in leaves), attn_bias=values.to(device)).transpose(1, 2)
    is_lost = (torch.arange(len_q) % 3 == 0) & (low < -1e20)  # no digit of the scores is left

    def add(s, b, h, i, j):
        with_gradient = s - torch.where(is_lost[i], s.detach(), 0.0)
        return with_gradient + exact.double()[0, 0, i, j]

    verify(out, leaves, None, exact, add)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 5.0}, {"window_size": (60, 30)}])
@pytest.mark.parametrize("len_kv", [340, 600])
@pytest.mark.parametrize("d", [64, 128])
def test_beside_other_options(d, len_kv, options, device):
    len_q = 270
    leaves = draw(2, 2, len_q, len_kv, d, device)
    values = torch.randn(1, 2, len_q, len_kv, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = flash_attn_func(*(x.transpose(1, 2) for x in leaves), attn_bias=values.to(device), **options).transpose(1, 2)
    wide, cap = values.double(), options.get("softcap")
    row, key = torch.arange(len_q)[:, None] + len_kv - len_q, torch.arange(len_kv)
    left, right = (10**6, 0) if "causal" in options else options.get("window_size", (10**6, 10**6))

    def add(s, b, h, i, j):
        return (s if cap is None else cap * torch.tanh(s / cap)) + wide[0, h, i, j]

    verify(out, leaves, None, values, add, (key >= row - left) & (key <= row + right))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128])
def test_the_gradient_of_a_bias(d, device):
    len_q, len_kv = 200, 260
    leaves = draw(2, 2, len_q, len_kv, d, device)
    bias = torch.randn(1, 2, len_q, len_kv, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    bias.requires_grad_()
    out = flash_attn_func(*(x.transpose(1, 2) for x in leaves), attn_bias=bias).transpose(1, 2)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    found = torch.autograd.grad(out, [*leaves, bias], dout)
    exact = [x.detach().cpu().double().requires_grad_() for x in (*leaves, bias)]
    scores = exact[0] @ exact[1].mT * d**-0.5 + exact[3]
    wants = torch.autograd.grad(scores.softmax(-1) @ exact[2], exact, dout.cpu().double())
    for has, wanted in zip(found, wants, strict=True):
        assert (has.cpu().double() - wanted).abs().max() <= 0.02 * wanted.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("len_kv", [296, 301])
def test_a_table_may_have_more_keys_and_fewer_queries(len_kv, d, device):
    leaves = draw(2, 2, 150, len_kv, d, device)
    table = torch.randn(140, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
    table[:, len_kv:] = float("nan")
    on_device = table.to(device)
    out = flex_attention(*leaves, lambda s, b, h, i, j: s + on_device[i, j])
    verify(out, leaves, None, table[torch.arange(150).clamp(max=139)][:, :len_kv][None, None])


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_with_fewer_keys_is_clamped(device):
    """The last column stands for all later keys, also for the second key of a pair."""
    leaves = draw(2, 2, 150, 301, 64, device)
    table = torch.randn(150, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    on_device = table.to(device)
    out = flex_attention(*leaves, lambda s, b, h, i, j: s + on_device[i, j])
    verify(out, leaves, None, table[:, torch.arange(301).clamp(max=199)][None, None])


# ---- plans -----------------------------------------------------------------------------------------------------------


def names_of(bias, grad=False, d=128):
    q = torch.empty(1, bias.shape[-2], 8, d, dtype=torch.bfloat16, requires_grad=grad)
    k = torch.empty(1, bias.shape[-1], 8, d, dtype=torch.bfloat16, requires_grad=grad)
    kernels = flash_attn.prebuild_call(flash_attn_func, q, k, k, attn_bias=bias, archs="sm_90a", compiles=False)
    return [kernel.name for kernel in kernels]


def test_a_tensor_without_memory_lies_as_it_would():
    """Whether pairs are aligned is a part of the kernel's name, and known before the call."""
    for layout in ("dense", "shifted", "padded"):
        bias = laid(torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16), layout)
        wide = torch.zeros(bias.untyped_storage().nbytes() // 2, dtype=torch.bfloat16, device="meta")
        assert names_of(wide.as_strided(bias.shape, bias.stride(), bias.storage_offset())) == names_of(bias)


def test_pairs_have_a_text_of_their_own():
    """Only where each pair of keys lies in one aligned place."""
    dense = torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16)
    with_pairs = names_of(dense)
    assert names_of(laid(dense, "padded")) == with_pairs
    for layout in ("shifted", "transposed"):
        other = names_of(laid(dense, layout))
        assert other != with_pairs and [re.sub("_[0-9a-f]{16}$", "", x) for x in other] == [
            re.sub("_[0-9a-f]{16}$", "", x) for x in with_pairs
        ]
    assert names_of(torch.zeros(1, 1, 256, 255, dtype=torch.bfloat16)) == other
