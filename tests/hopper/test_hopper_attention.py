"""flash_attn_func, flash_attn_varlen_func and flash_attn_qkvpacked_func of flash_attn_3 against the formula in fp64."""

from itertools import product

import pytest
import torch
from flash_attn_3 import _C
from flash_attn_3.flash_attn_interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from oracle3 import INF, assert_close, assert_lse, attention
from tensors3 import E4M3, i32, make, sums
from torch.testing import assert_close as assert_equal

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MASKS = [
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"window": (0, -1)},
    {"causal": True, "window": (5, 0)},
    {"chunk": 7},
    {"chunk": 5, "causal": True},
    {"chunk": 2**62},
]


def options_of(mask):
    return {
        "causal": mask.get("causal", False),
        "window_size": mask.get("window", (-1, -1)),
        "attention_chunk": mask.get("chunk", 0),
    }


def by_sequence(q, k, v, qv=None, **options):
    """The formula over a dense batch."""
    rows = [attention(q[i], k[i], v[i], None if qv is None else qv[i], **options) for i in range(len(q))]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (13, 40), (65, 64), (40, 13), (1, 70)], ids=str)
def test_func(engine, sizes, mask, dtype):
    len_q, len_kv = sizes
    q, k, v = (
        make(2, len_q, 4, 32, dtype=dtype),
        make(2, len_kv, 2, 32, dtype=dtype),
        make(2, len_kv, 2, 32, dtype=dtype),
    )
    out, lse = flash_attn_func(q, k, v, **options_of(mask), return_attn_probs=True)
    truth, true_lse = by_sequence(q, k, v, **mask)
    assert out.is_contiguous() and out.dtype == dtype and lse.dtype == torch.float32
    assert_close(out, truth, by_sequence(q, k, v, dtype=dtype, **mask)[0])
    assert_lse(lse, true_lse)
    assert_equal(flash_attn_func(q, k, v, **options_of(mask)), out, rtol=0, atol=0)


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("h_kv", [1, 2, 6])
@pytest.mark.parametrize(
    "sizes", [(192, 128), (192, 64), (64, 256), (64, 512), (32, 96), (64, 8), (256, 256), (96, 96)]
)
def test_widths_of_v(engine, sizes, h_kv, softcap):
    d, d_v = sizes
    dtype = torch.bfloat16
    q, k, v = make(2, 9, 6, d, dtype=dtype), make(2, 21, h_kv, d, dtype=dtype), make(2, 21, h_kv, d_v, dtype=dtype)
    if softcap:
        q = q * softcap
    out, lse = flash_attn_func(q, k, v, softcap=softcap, causal=True, return_attn_probs=True)
    options = {"softcap": softcap, "causal": True}
    truth, true_lse = by_sequence(q, k, v, **options)
    assert_close(out, truth, by_sequence(q, k, v, dtype=dtype, **options)[0], m=3 if softcap else 2)
    assert_lse(lse, true_lse)


@pytest.mark.parametrize("d_v", [256, 512])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"chunk": 6}], ids=str)
def test_qv(engine, mask, d_v):
    dtype = torch.float16
    q, k = make(2, 7, 4, 64, dtype=dtype), make(2, 19, 1, 64, dtype=dtype)
    v, qv = make(2, 19, 1, d_v, dtype=dtype), make(2, 7, 4, d_v, dtype=dtype)
    out, lse = flash_attn_func(q, k, v, qv=qv, **options_of(mask), return_attn_probs=True)
    truth, true_lse = by_sequence(q, k, v, qv, **mask)
    assert_close(out, truth, by_sequence(q, k, v, qv, dtype=dtype, **mask)[0])
    assert_lse(lse, true_lse)


@pytest.mark.parametrize("lse", [False, True], ids=["out", "out_and_lse"])
@pytest.mark.parametrize("trained", [(3,), (0, 1, 2, 3)], ids=["qv", "all"])
def test_forward_of_a_qv_that_requires_grad(trained, lse):
    q, k, v, qv = make(1, 7, 4, 64), make(1, 9, 1, 64), make(1, 9, 1, 256), make(1, 7, 4, 256)
    plain = flash_attn_func(q, k, v, qv=qv)
    for i in trained:
        (q, k, v, qv)[i].requires_grad_()
    out = flash_attn_func(q, k, v, qv=qv, return_attn_probs=lse)
    out = out[0] if lse else out
    assert torch.equal(out, plain) and out.requires_grad
    with pytest.raises(RuntimeError, match="flash_attn_3 has no backward with qv"):
        out.sum().backward()
    with torch.no_grad():
        assert not flash_attn_func(q, k, v, qv=qv).requires_grad


@pytest.mark.parametrize("d", [64, 80, 256])
@pytest.mark.parametrize("given", [(), ("q",), ("k",), ("v",), ("q", "k", "v")], ids=str)
def test_fp8(engine, d, given):
    """Descales of any strides; inputs are rounded to e4m3 first, and plain PyTorch also rounds the probabilities."""
    q, k, v = (make(2, n, h, d).to(E4M3) for n, h in ((11, 4), (30, 2), (30, 2)))
    descales = {f"{name}_descale": torch.rand(2, 2).T * 2 for name in given}
    factors = [descales.get(f"{name}_descale", torch.ones(2, 2))[:, None, :, None] for name in "qkv"]
    factors[0] = factors[0].repeat_interleave(2, 2)
    wide = [x.double() * factor for x, factor in zip((q, k, v), factors)]
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **descales)
    truth, true_lse = by_sequence(*wide, causal=True)
    plain, _ = by_sequence(*[x.bfloat16() for x in wide], causal=True, dtype=torch.bfloat16, rounds_p=E4M3)
    assert out.dtype == torch.bfloat16
    assert_close(out, truth, plain)
    assert_lse(lse, true_lse)


@pytest.mark.parametrize("other", sorted(set(_C.cpu_isas()) - {"reference"}))
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("len_q", [1, 40], ids=["decode", "forward"])
def test_extreme_descales(set_isa, len_q, softcap, other):
    """The scale and the descales of q and k are one factor of sums that cannot overflow. Only the factor and the scores
    can. All engines agree where they do, because whole numbers have exact sums."""
    sizes = (len_q, 4), (50, 2), (50, 2)
    q, k, v = (torch.randint(-2, 3, (2, length, h, 32)).float().to(E4M3) for length, h in sizes)
    seen = set()
    for scale, q_factor, k_factor, v_factor in product(
        (1e-30, 0.125, 1e30), (2e-38, 1.0, 3e38, INF, 0.0), (2e-38, 1e30, INF), (1e-30, 1e36)
    ):
        if softcap and scale > 1e30 * softcap:
            continue
        descales = {f"{x}_descale": torch.full((2, 2), y) for x, y in zip("qkv", (q_factor, k_factor, v_factor))}
        descales["q_descale"][1, 0] = descales["k_descale"][1, 0] = 1
        results = []
        for name in ("reference", other):
            set_isa(name)
            results.append(
                flash_attn_func(
                    q, k, v, softmax_scale=scale, softcap=softcap, causal=True, return_attn_probs=True, **descales
                )
            )
        (out, lse), (fast, fast_lse) = results
        assert_equal(fast_lse, lse, rtol=1e-5, atol=1e-4, equal_nan=True)
        assert_equal(fast.float(), out.float(), rtol=2e-2, atol=1e-2 * v_factor, equal_nan=True)
        seen |= {"nan" if lse[0].isnan().any() else "huge" if (lse[0].abs() > 1e5).any() else "plain"}
    assert seen == {"nan", "plain"} | ({"huge"} if not softcap else set())


@pytest.mark.parametrize("factor", [INF, -INF, float("nan"), 0.0, -1.5, 2.0**-90])
@pytest.mark.parametrize("len_q", [1, 40], ids=["decode", "forward"])
def test_special_descales_of_v(engine, len_q, factor):
    """The descale multiplies the sum over v, and rows that see no key are 0 with every descale."""
    q, k, v = (torch.randint(-2, 3, (1, n, 2, 32)).float() for n in (len_q, 30, 30))
    v[..., :8], v[..., 8:16], v[..., 16:24] = 1, -2, 0
    options = {"v_descale": torch.full((1, 2), factor), "window_size": (-1, 0) if len_q > 1 else (-1, -1)}
    out = flash_attn_func(*(x.to(E4M3) for x in (q, k, v)), softmax_scale=1 / 64, **options).float()
    empty = max(len_q - 30, 0)
    assert (out[:, :empty] == 0).all()
    sums = torch.tensor([1.0, -2.0, 0.0]).repeat_interleave(8)
    assert_equal(
        out[:, empty:, :, :24], (sums * factor).expand(1, len_q - empty, 2, 24), rtol=1e-2, atol=0, equal_nan=True
    )


def test_descales_are_ignored_unless_fp8():
    q = make(1, 4, 2, 32)
    wrong = torch.zeros(7, dtype=torch.int64)
    expected = flash_attn_func(q, q, q)
    assert torch.equal(flash_attn_func(q, q, q, q_descale=wrong, k_descale=wrong, v_descale=wrong), expected)


def test_strides_are_free():
    """Views of one memory, a transposed layout, and a last dimension that is not contiguous."""
    memory = make(2, 4, 3, 20, 64)
    q, k, v = (x.transpose(1, 2) for x in memory.unbind(2))
    expected = flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True)
    assert torch.equal(flash_attn_func(q, k, v, causal=True), expected)
    torn = v.transpose(1, 3).contiguous().transpose(1, 3)
    assert torn.stride(-1) != 1
    out = flash_attn_func(q, k, torn, causal=True)
    assert out.is_contiguous() and torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(0, 5, 4, 32), (2, 0, 4, 32)], ids=str)
def test_empty_queries(shape):
    q = make(*shape)
    k = make(shape[0], 3, 2, 32)
    out, lse = flash_attn_func(q, k, k, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (shape[0], 4, shape[1])


def test_no_keys_at_all():
    q, k = make(2, 3, 4, 32), make(2, 0, 2, 32)
    out, lse = flash_attn_func(q, k, k, return_attn_probs=True)
    assert (out == 0).all() and (lse == INF).all()


# ---- varlen ----------------------------------------------------------------------------------------------------------


def sequences(x, cu, used=None):
    lengths = (cu[1:] - cu[:-1]).tolist() if used is None else used.tolist()
    return [x[first : first + length] for first, length in zip(cu.tolist(), lengths)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("is_used", [False, True], ids=["all", "seqused"])
def test_varlen(engine, is_used, mask, dtype):
    cu_q, cu_k = sums(5, 0, 1, 17, 3), sums(9, 4, 0, 12, 30)
    used_q = i32(3, 0, 1, 11, 0) if is_used else None
    used_k = i32(9, 2, 0, 0, 21) if is_used else None
    q, k, v = make(26, 4, 32).to(dtype), make(55, 2, 32).to(dtype), make(55, 2, 32).to(dtype)
    out, lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 17, 30, seqused_q=used_q, seqused_k=used_k, **options_of(mask), return_attn_probs=True
    )
    low, rounds_p = (torch.bfloat16, E4M3) if dtype == E4M3 else (dtype, None)
    parts = zip(sequences(q, cu_q, used_q), sequences(k, cu_k, used_k), sequences(v, cu_k, used_k))
    for first, part in zip(cu_q.tolist(), parts):
        rows = slice(first, first + len(part[0]))
        truth, true_lse = attention(*(x.double() for x in part), **mask)
        plain, _ = attention(*(x.to(low) for x in part), dtype=low, rounds_p=rounds_p, **mask)
        assert_close(out[rows], truth, plain)
        assert_lse(lse[:, rows], true_lse)


def test_rows_not_in_use_are_not_written():
    from flash_attn_3.flash_attn_interface import _flash_attn_forward

    q, cu = make(10, 2, 32), sums(6, 4)
    out = torch.full_like(q, 7.0)
    used = i32(2, 3)
    result = _flash_attn_forward(
        q, q, q, out_=out, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6, seqused_q=used
    )
    assert result[0].data_ptr() == out.data_ptr()
    assert (out[2:6] == 7).all() and (out[9:] == 7).all() and not (out[:2] == 7).any()


def test_packed_queries_of_dense_keys():
    q, k = make(7, 4, 32), make(3, 11, 2, 32)
    cu, used = sums(4, 0, 3), i32(11, 5, 2)
    out = flash_attn_varlen_func(q, k, k, cu, None, 4, None, seqused_k=used, causal=True)
    for i, part in enumerate(sequences(q, cu)):
        truth, _ = attention(part, k[i, : used[i]], k[i, : used[i]], causal=True)
        assert_close(out[cu[i] : cu[i + 1]], truth, truth)


def test_lengths_as_tensors():
    q, cu = make(9, 2, 32), sums(4, 5)
    expected = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5)
    assert torch.equal(flash_attn_varlen_func(q, q, q, cu, cu, torch.tensor(5), torch.tensor(5)), expected)
    window = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, window_size=(1, 0))
    assert torch.equal(flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, window_size=torch.tensor([1, 0])), window)


# ---- gradients -------------------------------------------------------------------------------------------------------


def gradients(out, inputs, dout):
    return torch.autograd.grad((out * dout.to(out.dtype)).sum(), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS[:5], ids=str)
@pytest.mark.parametrize("sizes", [(32, 32), (192, 128), (64, 256), (48, 16)], ids=str)
def test_gradients(engine, sizes, mask, dtype):
    d, d_v = sizes
    q, k, v = (make(2, n, h, x, dtype=dtype, grad=True) for n, h, x in ((12, 4, d), (19, 2, d), (19, 2, d_v)))
    dout = torch.randn(2, 12, 4, d_v).to(dtype)
    ours = gradients(flash_attn_func(q, k, v, **options_of(mask), deterministic=True), (q, k, v), dout)
    truth = gradients(by_sequence(q, k, v, **mask)[0], (q, k, v), dout.double())
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth = gradients(by_sequence(*wide, **mask)[0], wide, dout.double())
    plain = gradients(by_sequence(q, k, v, dtype=dtype, **mask)[0], (q, k, v), dout)
    for x, y, z in zip(ours, truth, plain):
        assert x.dtype == dtype
        assert_close(x, y, z)


@pytest.mark.parametrize("is_used", [False, True], ids=["all", "seqused"])
def test_varlen_gradients(engine, is_used):
    cu_q, cu_k = sums(5, 0, 8), sums(3, 4, 12)
    used_q = i32(3, 0, 8) if is_used else None
    used_k = i32(0, 4, 9) if is_used else None
    q, k, v = make(15, 4, 32, grad=True), make(21, 2, 32, grad=True), make(21, 2, 16, grad=True)
    dout = torch.randn(15, 4, 16)
    rows = [slice(first, first + len(x)) for first, x in zip(cu_q.tolist(), sequences(q, cu_q, used_q))]
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 8, 12, used_q, used_k, causal=True)
    ours = torch.autograd.grad(sum((out[r] * dout[r]).sum() for r in rows), (q, k, v))
    parts = zip(rows, sequences(q, cu_q, used_q), sequences(k, cu_k, used_k), sequences(v, cu_k, used_k))
    loss = sum((attention(*part, causal=True)[0] * dout[r]).sum() for r, *part in parts)
    for x, y in zip(ours, torch.autograd.grad(loss, (q, k, v))):
        assert_equal(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("h", [2, 0])
def test_gradients_of_rows_of_no_sequence_are_zero(h):
    dirty = [torch.full((64, 2, 32), float("nan")) for _ in range(50)]
    del dirty  # memory that a gradient may get
    q, k, v = make(2, 4, h, 32, grad=True), make(64, 2, 32, grad=True), make(64, 2, 32, grad=True)
    flash_attn_varlen_func(q, k, v, None, sums(3, 5), None, 5).sum().backward()
    assert (k.grad[8:] == 0).all() and (v.grad[8:] == 0).all()


@pytest.mark.parametrize("num_heads_q", [None, 6])
def test_qkvpacked(num_heads_q):
    qkv = make(2, 14, 10, 32, grad=True) if num_heads_q else make(2, 14, 3, 4, 32, grad=True)
    q, k, v = qkv.split([6, 2, 2], 2) if num_heads_q else qkv.unbind(2)
    out = flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=num_heads_q)
    dout = torch.randn_like(out)
    truth = by_sequence(q, k, v, causal=True)[0]
    assert_close(out, truth, truth, a=1e-5)
    (ours,), (grad,) = gradients(out, (qkv,), dout), gradients(truth, (qkv,), dout)
    assert ours.shape == qkv.shape
    assert_equal(ours, grad, rtol=1e-4, atol=1e-5)
    assert len(flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q, return_attn_probs=True)) == 2


def test_gradients_are_exact_again_and_again():
    q, k, v = (make(2, 150, 4, 64, grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    first = gradients(flash_attn_func(q, k, v, causal=True, deterministic=True), (q, k, v), dout)
    for _ in range(3):
        again = gradients(flash_attn_func(q, k, v, causal=True, deterministic=True), (q, k, v), dout)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_the_backward_takes_saved_tensors_of_other_strides():
    q, k, v = (make(2, 15, 4, 32, grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous().mT, lambda x: x):
        out = flash_attn_func(q, k, v, causal=True)
    want = gradients(flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    assert all(torch.equal(x, y) for x, y in zip(gradients(out, (q, k, v), dout), want))


CHANGES = {  # an option, and how the caller may write it between forward and backward
    "window_size": [(lambda: [8, 8], lambda x: x.__setitem__(slice(None), [2, 0])), (lambda: i32(8, 8), torch.zero_)],
    "softmax_scale": [(lambda: torch.tensor(0.3), torch.zero_)],
    "softcap": [(lambda: torch.tensor(5.0), lambda x: x.fill_(1.0))],
    "causal": [(lambda: torch.tensor(True), torch.zero_)],
}


@pytest.mark.parametrize("name, make_option, write", [(name, *x) for name in CHANGES for x in CHANGES[name]])
def test_the_backward_has_the_options_of_the_forward(name, make_option, write):
    q, k, v = (make(1, 40, 2, 32, grad=True) for _ in range(3))
    dout, option = torch.randn_like(q), make_option()
    kept = tuple(option) if isinstance(option, list) else option.tolist()
    out = flash_attn_func(q, k, v, **{name: option})
    write(option)
    expected = gradients(flash_attn_func(q, k, v, **{name: kept}), (q, k, v), dout)
    for x, y in zip(gradients(out, (q, k, v), dout), expected):
        assert_equal(x, y, rtol=1e-5, atol=1e-6)


def test_the_backward_has_the_lengths_of_the_forward():
    q, k, v = (make(40, 2, 32, grad=True) for _ in range(3))
    most, cu = i32(25), sums(25, 15)
    out = flash_attn_varlen_func(q, k, v, cu, cu, most, most)
    most.zero_()
    expected = gradients(flash_attn_varlen_func(q, k, v, cu, cu, 25, 25), (q, k, v), torch.ones_like(q))
    assert all(map(torch.equal, gradients(out, (q, k, v), torch.ones_like(q)), expected))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_number_that_requires_grad_is_refused(name):
    q, number = make(1, 5, 2, 32), torch.tensor(0.5, requires_grad=True)
    with pytest.raises(RuntimeError, match=f"{name} gets no gradient, and it requires grad: detach it"):
        flash_attn_func(q, q, q, **{name: number})
    with torch.no_grad():
        assert torch.equal(flash_attn_func(q, q, q, **{name: number}), flash_attn_func(q, q, q, **{name: 0.5}))


def test_lse_carries_no_gradient():
    q = make(1, 5, 2, 32, grad=True)
    out, lse = flash_attn_func(q, q, q, return_attn_probs=True)
    (grad,) = torch.autograd.grad(out.sum() + 0 * lse.sum(), q)
    (expected,) = torch.autograd.grad(flash_attn_func(q, q, q).sum(), q)
    assert torch.equal(grad, expected)


def test_there_is_no_second_derivative():
    q = make(1, 5, 2, 32, grad=True)
    (grad,) = torch.autograd.grad(flash_attn_func(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()
