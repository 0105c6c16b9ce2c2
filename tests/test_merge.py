"""merge_attention against attention over all keys, forward and backward."""

import math

import pytest
import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func, merge_attention

INF = math.inf
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
CASES = [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]


def formula(outs, lses):
    """The specification, in fp64: lses of infinity count for nothing."""
    outs, lses = torch.stack([x.double() for x in outs]), torch.stack([x.double() for x in lses])
    lses = torch.where(lses == INF, -INF, lses)
    top = lses.amax(0)
    top = torch.where(top == -INF, 0.0, top)
    weights = (lses - top).exp()
    total = weights.sum(0)
    p = (weights / torch.where(total == 0, 1.0, total)).transpose(-1, -2)[..., None]
    return torch.where(p == 0, 0.0, p * outs).sum(0), total.log() + top


def parts(n, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(n)]
    lses = [4 * torch.randn((*shape[:-3], shape[-2], shape[-3]), generator=generator) for _ in range(n)]
    return outs, lses


@pytest.mark.parametrize(("dtype", "tolerance"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (7, 2, 16), (0, 2, 16), (1, 4, 0, 8)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 33])
@pytest.mark.parametrize("device", DEVICES)
def test_merged_parts_follow_the_formula(device, n, shape, dtype, tolerance):
    outs, lses = parts(n, shape, dtype)
    out, lse = (x.cpu() for x in merge_attention([x.to(device) for x in outs], [x.to(device) for x in lses]))
    want, want_lse = formula(outs, lses)
    assert out.dtype == dtype and out.shape == outs[0].shape and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (7, 2, 16)], ids=str)
def test_gradients_of_merged_parts(shape):
    outs, lses = parts(3, shape, torch.float32)
    lses[0].view(-1)[0], lses[1].view(-1)[1], lses[2].view(-1)[2] = -INF, INF, -INF
    inputs = [x.requires_grad_() for x in (*outs, *lses)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    (out, lse), (want, want_lse) = merge_attention(inputs[:3], inputs[3:]), formula(wide[:3], wide[3:])
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    wants = torch.autograd.grad([want, want_lse], wide, [dout.double(), dlse.double()])
    for has, wanted in zip(got, wants):
        torch.testing.assert_close(has.double(), torch.nan_to_num(wanted), atol=1e-5, rtol=1e-5)


def test_halves_of_the_keys_have_the_gradients_of_all():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, requires_grad=True) for n, h in ((9, 4), (20, 2), (20, 2)))
    halves = [flash_attn_func(q, k[:, own], v[:, own], return_lse=True) for own in (slice(0, 13), slice(13, 20))]
    out, lse = merge_attention(*zip(*halves))
    want, want_lse = flash_attn_func(q, k, v, return_lse=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    got, wants = (
        torch.autograd.grad(x.sin().sum() + y.cos().sum(), (q, k, v)) for x, y in ((out, lse), (want, want_lse))
    )
    for has, wanted in zip(got, wants):
        torch.testing.assert_close(has, wanted, atol=3e-5, rtol=3e-5)


def test_packed_halves_of_the_keys():
    torch.manual_seed(0)
    cu_q, cu_k = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 13], dtype=torch.int32)
    q, k, v = torch.randn(9, 4, 16), torch.randn(13, 4, 16), torch.randn(13, 4, 16)
    used = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([0, 4, 11], dtype=torch.int32)
    keys = [torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])]  # sequence 1 is in the second
    halves = [flash_attn_varlen_func(q, k[own], v[own], cu_q, cu, 5, 7, return_lse=True) for own, cu in zip(keys, used)]
    out, lse = merge_attention(*zip(*halves))
    want, want_lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, return_lse=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("unseen", [-INF, INF])
def test_a_part_without_keys_may_hold_anything(unseen):
    outs, lses = parts(2, (1, 3, 2, 8), torch.float32)
    outs[1].fill_(math.nan), lses[1].fill_(unseen)
    outs[1].requires_grad_()
    out, lse = merge_attention(outs, lses)
    torch.testing.assert_close(out, outs[0])
    torch.testing.assert_close(lse, lses[0])
    assert not torch.autograd.grad(out.sum() + lse.sum(), outs[1])[0].any()
    lses[0].fill_(unseen)
    out, lse = merge_attention(outs, lses)
    assert not out.any() and (lse == -INF).all()


def test_merge_attention_in_one_graph():
    outs, lses = parts(2, (1, 3, 2, 8), torch.float32)
    merged = torch.compile(merge_attention, fullgraph=True, backend="aot_eager")(outs, lses)
    for has, want in zip(merged, merge_attention(outs, lses)):
        torch.testing.assert_close(has, want, rtol=0, atol=0)
    torch.library.opcheck(
        torch.ops.flash_attn._combine,
        (torch.stack(outs).requires_grad_(), torch.stack(lses).transpose(-1, -2).requires_grad_()),
    )


def test_merge_attention_in_a_graph_for_all_lengths():
    merged = torch.compile(merge_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (3, 4, 9):
        outs, lses = parts(2, (2, length, 2, 8), torch.float32)
        for has, want in zip(merged(outs, lses), merge_attention(outs, lses)):
            torch.testing.assert_close(has, want, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e4, 1e7, 3e38, -3e38])
def test_gradients_of_large_lses(size):
    """The weights of the parts depend on differences of lses, which have digits where the merged lse has none."""
    outs, lses = parts(3, (1, 3, 2, 8), torch.float32)
    lses = [torch.full_like(x, size) for x in lses]
    inputs = [x.requires_grad_() for x in (*outs, *lses)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    (out, lse), (want, want_lse) = merge_attention(inputs[:3], inputs[3:]), formula(wide[:3], wide[3:])
    got = torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)
    wants = torch.autograd.grad(want.sin().sum() + want_lse.sum(), wide)
    for has, wanted in zip(got, wants):
        torch.testing.assert_close(has.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda outs, lses: (outs[0], lses), "outs must be a list of tensors; it is of type Tensor"),
        (lambda outs, lses: (outs, None), "lses must be a list of tensors; it is of type NoneType"),
        (lambda outs, lses: ([], []), "1 to 256 tensors each; they have 0"),
        (lambda outs, lses: (outs, lses[:1]), "lses must have a tensor for each tensor of outs; outs has 2, lses 1"),
        (lambda outs, lses: (outs, [lses[0], 1.5]), r"lses\[1\] must be a tensor"),
        (lambda outs, lses: (outs, [lses[0], lses[1].double()]), r"lses\[1\] torch.float64"),
        (lambda outs, lses: ([outs[0], outs[1].half()], lses), r"outs\[1\] must have the device and dtype"),
        (lambda outs, lses: ([outs[0], outs[1][:, :2]], lses), r"outs\[1\] must have shape"),
        (lambda outs, lses: (outs, [lses[0], lses[1].transpose(1, 2)]), r"lses\[1\] must have shape \(1, 2, 3\)"),
        (lambda outs, lses: ([x[0, 0] for x in outs], lses), r"outs\[0\] must be \[b, len, h, d\] or"),
    ],
)
def test_what_cannot_be_merged(change, words):
    with pytest.raises((TypeError, RuntimeError), match=words):
        merge_attention(*change(*parts(2, (1, 3, 2, 8), torch.float32)))
