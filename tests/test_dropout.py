"""Dropout: the exact mapping from the generator to the mask, the seed, S_dmask, and agreement of forward and
backward."""

import pytest
import torch
from cases import OPTIONS, PACKED, Case
from compare import check
from harness import drawn_seed, join, ours, problem
from oracle import attention, dropout_keep
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flash_attn import _ops, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_forward

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def rounded(n):
    return -(-n // 128) * 128


@pytest.mark.parametrize("dropout_p", (0.17, 0.5, 0.9))
@pytest.mark.parametrize("len_q, len_kv", [(1, 1), (15, 33), (129, 200), (40, 17)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_s_dmask(len_q, len_kv, dropout_p, dtype, isa):
    """Signs are the mask, bit for bit, and magnitudes are exp(s - row max)."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 16).to(dtype) for n, h in ((len_q, 4), (len_kv, 2), (len_kv, 2)))
    out, lse, s_dmask, rng = _flash_attn_forward(q, k, v, dropout_p, 0.25, False, -1, -1, 0.0, None, True)
    assert s_dmask.shape == (2, 4, rounded(len_q), rounded(len_kv)) and s_dmask.dtype == dtype
    assert rng.shape == (2,) and rng.dtype == torch.int64 and rng[1] == 0
    s_dmask = s_dmask[:, :, :len_q, :len_kv]
    for n in range(2):
        keep = dropout_keep(int(rng[0]), 0, n, 4, len_q, len_kv, dropout_p)
        assert torch.equal(~torch.signbit(s_dmask[n]), keep)
        kd = k[n].double().repeat_interleave(2, dim=1)
        s = 0.25 * torch.einsum("ihd,jhd->hij", q[n].double(), kd)
        want = (s - s.amax(-1, keepdim=True)).exp()
        torch.testing.assert_close(
            s_dmask[n].abs().double(), want, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-3
        )
        ref, _ = attention(q[n].double(), k[n].double(), v[n].double(), 0.25, keep=keep, dropout_p=dropout_p)
        plain, _ = attention(q[n], k[n], v[n], 0.25, keep=keep, dropout_p=dropout_p)
        check("out", out[n], ref, plain)


def test_s_dmask_with_masks_and_packed(isa):
    torch.manual_seed(3)
    len_q, len_kv = (20, 0, 70), (33, 5, 129)
    q, k = torch.randn(90, 2, 16), torch.randn(167, 2, 16)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (len_q, len_kv))
    _, _, s_dmask, rng = _flash_attn_varlen_forward(q, k, k, cu_q, cu_k, 70, 129, 0.3, 0.25, True, return_softmax=True)
    assert s_dmask.shape == (3, 2, 128, 256)
    for n in range(3):
        keep = dropout_keep(int(rng[0]), 0, n, 2, len_q[n], len_kv[n], 0.3)
        see = torch.ones(len_q[n], len_kv[n], dtype=torch.bool).tril(len_kv[n] - len_q[n])
        got = ~torch.signbit(s_dmask[n, :, : len_q[n], : len_kv[n]])
        assert torch.equal(got[:, see], keep[:, see])


@pytest.mark.parametrize("case", [c for c in OPTIONS + PACKED if c.dropout], ids=repr)
def test_seed_is_drawn_once_from_the_default_generator(case):
    """The same manual_seed gives the same bits. The generator advances by one draw, whatever the size."""
    first, second = ours(case, True), ours(case, True)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(join(getattr(first, name)), join(getattr(second, name)))
    drawn_seed(case)
    after = torch.randint(1 << 30, ())
    p = problem(case)
    torch.manual_seed(case.seed)
    options = (case.dropout, case.scale, case.causal, case.window, case.softcap, p.slopes)
    if case.packed:
        flash_attn_varlen_func(p.q, p.k, p.v, p.cu_q, p.cu_k, p.max_q, p.max_k, *options)
    else:
        flash_attn_func(p.q, p.k, p.v, *options)
    assert torch.equal(torch.randint(1 << 30, ()), after), "one draw a call, whatever its size"


def test_no_dropout_draws_nothing():
    q = torch.randn(1, 3, 1, 8, requires_grad=True)
    state = torch.get_rng_state()
    out = flash_attn_func(q, q, q)
    out.sum().backward()
    rng = _flash_attn_forward(q.detach(), q.detach(), q.detach(), 0.0, 1.0, False, -1, -1, 0.0, None, False)[3]
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(rng, torch.zeros(2, dtype=torch.int64))


def test_every_call_draws_anew():
    q = torch.randn(1, 64, 2, 8)
    a, b = (flash_attn_func(q, q, q, 0.5) for _ in range(2))
    assert not torch.equal(a, b)
    with torch.random.fork_rng():
        c = flash_attn_func(q, q, q, 0.5)
    assert torch.equal(c, flash_attn_func(q, q, q, 0.5))


def test_checkpoint_sees_the_same_mask():
    torch.manual_seed(0)
    qkv = torch.randn(2, 40, 3, 2, 16, requires_grad=True)
    dout = torch.randn(2, 40, 2, 16)
    torch.manual_seed(1)
    (want,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv, 0.3), qkv, dout)
    torch.manual_seed(1)
    (got,) = torch.autograd.grad(checkpoint(flash_attn_qkvpacked_func, qkv, 0.3, use_reentrant=False), qkv, dout)
    assert torch.equal(got, want)


def test_backward_rebuilds_the_mask_from_rng_state(isa):
    """Any seed and offset, also values that carry into the high half of the counter, which CPU calls do not
    draw."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, 2, 16) for n in (33, 70, 70, 33))
    for seed, offset in ((1, 0), (2**63 - 1, 4), (-(2**63), 0), (0x123456789ABCDEF, 2**32 - 8), (7, 2**40 + 3)):
        rng = torch.tensor([seed, offset])
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        outs = []
        for n in range(2):
            keep = dropout_keep(seed % 2**64, offset, n, 2, 33, 70, 0.4)
            outs.append(attention(*(x[n] for x in leaves), keep=keep, dropout_p=0.4)[0])
        out = torch.stack(outs)
        want = torch.autograd.grad(out, leaves, dout.double())
        lse = torch.stack([attention(*(x[n].double() for x in (q, k, v)))[1] for n in range(2)]).float()
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        _flash_attn_backward(
            dout, q, k, v, out.detach().float(), lse, *grads, 0.4, 0.25, False, -1, -1, 0.0, None, True, rng
        )  # fmt: skip
        for got, ref in zip(grads, want):
            torch.testing.assert_close(got.double(), ref, rtol=1e-5, atol=1e-5)


def test_dropout_with_softcap_and_negligible_p(isa):
    """A dropout of 1e-30 drops nothing, and return_softmax is legal with it (diffusers asks for lse in this way)."""
    torch.manual_seed(0)
    q = torch.randn(1, 40, 2, 16)
    out, lse, s_dmask, rng = _flash_attn_forward(q, q, q, 1e-30, 0.25, True, -1, -1, 2.0, None, True)
    want, want_lse, _, _ = _flash_attn_forward(q, q, q, 0.0, 0.25, True, -1, -1, 2.0, None, False)
    assert s_dmask.shape == (1, 2, 128, 128) and torch.equal(lse, want_lse)
    torch.testing.assert_close(out, want)


def test_share_dropped():
    case = Case(300, 300, dropout=0.17)
    torch.manual_seed(0)
    p = problem(case)
    s_dmask = flash_attn_func(p.q, p.k, p.v, 0.17, return_attn_probs=True)[2][:, :, :300, :300]
    assert abs(torch.signbit(s_dmask).double().mean().item() - (1 - 212 / 256)) < 5e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_vmap_says_how_random_numbers_are_drawn(device):
    one, others = torch.randn(1, 40, 2, 16, device=device), torch.zeros(3, 1, device=device)
    q = one.expand(3, *one.shape)

    def attend(q, other, p=0.5):
        return flash_attn_func(q, q, q, p) + other

    for x, dim in ((q, 0), (one, None)):
        same = torch.vmap(attend, (dim, 0), randomness="same")(x, others)
        assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
        for other in (torch.vmap(attend, (dim, 0)), torch.vmap(attend, (dim, 0), randomness="error")):
            with pytest.raises(RuntimeError, match="randomness='error'"):
                other(x, others)
        without = torch.vmap(lambda q, other: attend(q, other, 0.0), (dim, 0))(x, others)
        assert torch.equal(without[0], without[2])
    different = torch.vmap(attend, randomness="different")(q, others)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="where no argument is batched"):
        torch.vmap(attend, (None, 0), randomness="different")(one, others)


def test_vmap_asks_the_generator_of_the_tensors_gpu(monkeypatch):
    """The GPU of the tensors need not be the current GPU."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": asked.append(str(device)))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device="cuda": asked.append(str(device)))
    device = "cuda:0" if torch.cuda.device_count() == 1 else "cuda:1"  # a fake tensor needs its device
    with FakeTensorMode():
        get_rng_state, set_rng_state = _ops.rng_of(torch.empty(3, device=device).device)
    set_rng_state(get_rng_state())
    assert asked == [device] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("inner", ["same", "different", "error"])
@pytest.mark.parametrize("outer", ["same", "different", "error"])
@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_each_vmap_says_how_random_numbers_are_drawn(device, inner, outer):
    q = torch.randn(1, 40, 2, 16, device=device).expand(2, 2, 1, 40, 2, 16)

    def attend():
        rows = torch.vmap(lambda q: flash_attn_func(q, q, q, 0.5), randomness=inner)
        return torch.vmap(rows, randomness=outer)(q)

    if "error" in (inner, outer):
        with pytest.raises(RuntimeError, match="randomness='error'"):
            attend()
        return
    out = attend()
    assert torch.equal(out[0, 0], out[1, 0]) == (outer == "same")
    assert torch.equal(out[0, 0], out[0, 1]) == (inner == "same")
