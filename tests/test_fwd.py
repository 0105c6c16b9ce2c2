"""Dense forward: every case of the table on every instruction set, in every dtype."""

import math
import re

import fresh_python
import pytest
import torch
from cases import BOTH, DENSE, DTYPES, TILES, TINY, WINDOWS, Case, each, in_dtypes, in_turns
from harness import ISAS, verify
from oracle import attention

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_with_kvcache,
)


@pytest.mark.parametrize("case", in_dtypes(DENSE) + in_turns(TILES + WINDOWS + TINY), ids=repr)
def test_dense(case, isa):
    verify(case)


@pytest.mark.parametrize("case", each(Case(300, 517, b=1, h=3, h_kv=1, d=64), dtype=DTYPES, causal=BOTH), ids=repr)
def test_many_tiles(case, isa):
    """Several query tiles and several key blocks, of which the last ones are not full."""
    verify(case)


@pytest.mark.parametrize("size", (2**41, 2**63 - 1))
def test_windows_beyond_every_tensor(size, isa):
    q, k = torch.randn(1, 60, 2, 32), torch.randn(1, 80, 2, 32)
    for near, far in (((-1, -1), (size, size)), ((-1, 5), (size, 5)), ((5, -1), (5, size))):
        assert torch.equal(flash_attn_func(q, k, k, window_size=far), flash_attn_func(q, k, k, window_size=near))


@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("softmax_scale", (1e6, 1e12, -1e30))
def test_scores_beyond_the_digits_of_fp32(softmax_scale, dtype, causal, isa):
    """One key has all the weight."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64).to(dtype) for n in (190, 300, 300))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.ones(190, 300).tril(110) == 0, -math.inf)
    want = torch.einsum("bhij,bjhd->bihd", torch.nn.functional.one_hot(scores.argmax(-1), 300).double(), v.double())
    assert torch.equal(flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal).double(), want)


@pytest.mark.parametrize("case", each(Case(65, 80, d=64), dtype=DTYPES, softcap=(3e4, 0.1)), ids=repr)
def test_softcap_far_from_the_scores(case, isa):
    """tanh keeps its digits near 0. Where it is saturated, it is 1 and its slope is 0."""
    verify(case)


@pytest.mark.parametrize("isa_name", [name for name in ISAS if name not in ("reference", "scalar")])
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_long(dtype, isa_name):
    """With many key blocks the running maximum and the running sum change often."""
    import flash_attn_2_cuda

    flash_attn_2_cuda.set_cpu_isa(isa_name)
    try:
        verify(Case(70, 5000, b=1, h=1, d=64, dtype=dtype, causal=True))
        verify(Case(2000, 33, b=1, h=1, d=64, dtype=dtype, window=(9, 5)))
    finally:
        flash_attn_2_cuda.set_cpu_isa(None)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_nan_and_inf_stay_in_their_row(dtype, isa):
    """A bad query changes only its own row of its own head. There out and lse are NaN, and all other rows are exact."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 24).to(dtype) for _ in range(3))
    clean, clean_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    q[0, 33, 1, 5] = math.nan
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out[0, 33, 1].isnan().all() and lse[0, 1, 33].isnan()
    out[0, 33, 1], lse[0, 1, 33] = clean[0, 33, 1], clean_lse[0, 1, 33]
    assert torch.equal(out, clean) and torch.equal(lse, clean_lse)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
def test_masked_keys_may_be_anything(dtype, isa):
    """NaN and inf in keys and values never reach a row that does not see them, inside a tile and outside."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 32).to(dtype) for n in (40, 100, 100))
    out, lse = attention(q[0].double(), k[0].double(), v[0].double(), window=(20, 10))
    first = (100 - 40) + 11  # the first key that row 0 does not see
    got, got_lse, _ = flash_attn_func(q, k, v, window_size=(20, 10), return_attn_probs=True)
    k[0, first:], v[0, first:] = math.nan, math.inf
    spoiled, spoiled_lse, _ = flash_attn_func(q, k, v, window_size=(20, 10), return_attn_probs=True)
    assert torch.equal(spoiled[0, 0], got[0, 0]) and torch.equal(spoiled_lse[..., 0], got_lse[..., 0])
    torch.testing.assert_close(spoiled[0, 0].double(), out[0], rtol=2e-2, atol=2e-2)
    assert spoiled[0, 1:].isnan().all()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
def test_nonfinite_values_reach_the_rows_that_see_them(bad, dtype, isa):
    """One element of v is bad. Its column gets this value in every row that sees the key, and nothing else changes."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 32).to(dtype) for _ in range(3))
    want = flash_attn_func(q, k, v, causal=True)
    v[0, 70, 1, 9] = bad
    out = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out[0, 70:, 1, 9].nan_to_num(nan=7.0), torch.full((30,), bad, dtype=dtype).nan_to_num(nan=7.0))
    out[0, 70:, 1, 9] = want[0, 70:, 1, 9]
    assert torch.equal(out, want)


def test_a_long_sum_in_one_split():
    """A chain of 2^25 additions in fp32 stops growing at 2^24."""
    k = torch.ones(1, 1, 1, 8).expand(1, 2**25, 1, 8)
    out = flash_attn_with_kvcache(torch.zeros(1, 1, 1, 8), k, k, num_splits=1)
    torch.testing.assert_close(out, torch.ones(1, 1, 1, 8))


@pytest.mark.parametrize("slope", (2.4e38, 3.4e38))
@pytest.mark.parametrize("len_q", (3, 40))
def test_slopes_that_overflow_in_log2(len_q, slope, isa):
    """Each row has its own key at distance 0, and this key has all the weight."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 16, requires_grad=True) for n in (len_q, 50, 50))
    out = flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.tensor([slope]))
    want = v[:, -len_q:]
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    zeros = torch.zeros_like(q), torch.zeros_like(k)
    torch.testing.assert_close((out, *got), (want, *zeros, *torch.autograd.grad(want, v, dout)))


def test_key_minus_infinity_scores(isa):
    """A key with a score of -inf without a mask (an overflowing key) has weight zero."""
    q, k, v = torch.ones(1, 3, 1, 8), torch.zeros(1, 70, 1, 8), torch.randn(1, 70, 1, 8)
    k[0, 10:, 0, 0] = -math.inf
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out[0], v[0, :10].mean(0, keepdim=True).expand(3, 1, 8))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(10)))


@pytest.mark.parametrize("h_kv", (4, 2, 1))
def test_packed_forms_are_the_same_function(h_kv):
    torch.manual_seed(0)
    q, kv = torch.randn(2, 33, 4, 16), torch.randn(2, 50, 2, h_kv, 16)
    options = {"causal": True, "window_size": (20, 0), "softcap": 3.0}
    want = flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **options)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, **options), want)
    qkv = torch.randn(2, 33, 3, h_kv, 16)
    want = flash_attn_func(*qkv.unbind(2), **options)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, **options), want)


def test_returns():
    q, k = torch.randn(2, 5, 4, 16, dtype=torch.float16), torch.randn(2, 7, 2, 16, dtype=torch.float16)
    assert isinstance(flash_attn_func(q, k, k), torch.Tensor)
    out, lse, s_dmask = flash_attn_func(q, k, k, return_attn_probs=True)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert s_dmask.shape == (0,) and s_dmask.dtype == q.dtype
    for window in ([3, 2], torch.tensor([3, 2]), (torch.tensor(3), 2)):
        assert torch.equal(flash_attn_func(q, k, k, window_size=window), flash_attn_func(q, k, k, window_size=(3, 2)))


# Upstream's own grid and rule: E(x) against fp32 rounded to the dtype, E(ours) <= 2 E(plain) + a.
GRID = [
    Case(*lengths, b=2, h=6, h_kv=h_kv, d=d, dtype=dtype, causal=causal, window=window)
    for lengths, d, h_kv in (
        ((113, 203), 59, 6), ((128, 217), 128, 1), ((211, 113), 64, 2), ((108, 256), 40, 6), ((256, 512), 32, 2),
        ((239, 1), 80, 6), ((3, 799), 96, 6), ((1, 339), 111, 1), ((127, 513), 160, 2), ((113, 203), 224, 1),
        ((128, 128), 256, 6),
    )
    for dtype in ("bf16", "fp16")
    for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (50, 31)))
]  # fmt: skip


@pytest.mark.parametrize("case", GRID, ids=repr)
def test_upstream_grid(case):
    from compare import error
    from harness import expected, join, ours

    ref, plain, _ = expected(case, False)
    got = ours(case, False)
    out, simple = join(got.out), join(plain.out)
    rounded = join(ref.out).to(out.dtype)
    assert error(out, rounded) <= 2 * error(simple, rounded) + 1e-5


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("values", (1.0, math.inf))
def test_scores_of_minus_infinity_alone(values, dtype, isa):
    """A row without another score counts as a row that sees no key, whatever v holds. Tiles of such scores change
    nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 32).to(dtype) for n in (70, 300, 300))
    q[..., 0], k[..., 0], v[..., 0] = 1, 0, values
    k[:, 128:, 0, 0] = -math.inf  # head 0: scores of the last tiles
    k[:, :256, 1, 0] = -math.inf  # head 1: scores of the first tiles
    k[:, 256:, 1] -= 90  # the remaining scores are far below 0
    q[:, :35, 1, 0], k[:, 256:, 1, 0] = math.inf, -1.0  # half of the rows of head 1: all scores
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out[0, :35, 1] == 0).all() and (lse[0, 1, :35] == math.inf).all()
    assert lse[0, 0].isfinite().all() and lse[0, 1, 35:].isfinite().all()
    for head, rows, keys in ((0, slice(0, 70), slice(0, 128)), (1, slice(35, 70), slice(256, 300))):
        want, want_lse = attention(*(x[0, at, head : head + 1].double() for x, at in ((q, rows), (k, keys), (v, keys))))
        torch.testing.assert_close(out[0, rows, head, 1:].double(), want[:, 0, 1:], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[0, head, rows].double(), want_lse[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("b", (10**9, 2**40))
def test_more_sequences_than_can_be_counted(b):
    """Expanded tensors. A call without work returns at once, and sequences beyond int32 are refused."""
    x = torch.zeros(1, 1, 1, 8)
    empty, one, no_heads = x[:, :0].expand(b, 0, 1, 8), x.expand(b, 1, 1, 8), x[:, :, :0].expand(b, 1, 0, 8)
    for q, k in ((empty, one), (empty, empty), (no_heads, one)):
        if b < 2**31:
            assert flash_attn_func(q, k, k).shape == q.shape
            q = q.clone().requires_grad_()
            flash_attn_func(q, q[..., :1, :], q[..., :1, :]).sum().backward() if q.shape[2] else None
        else:
            with pytest.raises(RuntimeError, match="q must have at most 2147483647 sequences"):
                flash_attn_func(q, k, k)


def test_no_memory_to_work_in():
    """The test runs in a process of its own with a limited address space."""
    program = """
import resource, torch
from flash_attn.flash_attn_interface import _flash_attn_backward
torch.set_num_threads(1)
n = 2**21
q, lse = torch.zeros(1, 64, 1, 256), torch.zeros(1, 1, 64)
k = torch.zeros(1, 1, 1, 256).expand(1, n, 1, 256)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 2**28,) * 2)
try:
    _flash_attn_backward(
        q, q, k, k, q, lse, torch.empty_like(q), None, None, 0.0, 1.0, False, -1, -1, 0.0, None, False, None
    )
except (MemoryError, RuntimeError) as error:
    print(error)
"""
    done = fresh_python.python(program)
    assert re.search(r"there are no \d{9,} bytes of memory to work in", done.stdout), done.stdout + done.stderr
