"""The transforms of torch.func, and torch.autograd's batches of gradients, around every function with its options.

Each test compares with a loop. ``vmap`` makes one call of the op, and warns of nothing.
"""

import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness_vmap import WRONG, cached_step
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import (
    _ops,
    _vmap,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    merge_attention,
)
from flash_attn.flex_attention import flex_attention

pytestmark = pytest.mark.filterwarnings("error", "ignore:`torch.jit.script")
INT = torch.int32
N = 3  # entries of a mapped dimension
CU_Q, CU_K = torch.tensor([0, 4, 4, 9], dtype=INT), torch.tensor([0, 5, 7, 11], dtype=INT)  # and a last row, or two
SLOPES = torch.tensor([0.1, 0.3, 0.2, 0.4])


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


MASK = {"causal": True, "window_size": (4, 0), "softcap": 5.0, "softmax_scale": 0.4}
FUNCTIONS = {
    "dense": (lambda q, k, v: flash_attn_func(q, k, v, **MASK), [(2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)]),
    "slopes": (
        lambda q, k, v: flash_attn_func(q, k, v, alibi_slopes=SLOPES.to(q.device).expand(2, 4).contiguous()),
        [(2, 5, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)],
    ),
    "kvpacked": (lambda q, kv: flash_attn_kvpacked_func(q, kv, **MASK), [(2, 5, 4, 8), (2, 6, 2, 2, 8)]),
    "qkvpacked": (lambda qkv: flash_attn_qkvpacked_func(qkv, **MASK), [(2, 5, 3, 4, 8)]),
    "varlen": (
        lambda q, k, v: flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 5, 5, alibi_slopes=SLOPES.expand(3, 4), **MASK),
        [(10, 4, 8), (13, 2, 8), (13, 2, 8)],
    ),
    "varlen kvpacked": (
        lambda q, kv: flash_attn_varlen_kvpacked_func(q, kv, CU_Q, CU_K, 5, 5, **MASK),
        [(10, 4, 8), (13, 2, 2, 8)],
    ),
    "varlen qkvpacked": (lambda qkv: flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 5, **MASK), [(10, 3, 4, 8)]),
}


@pytest.fixture(params=FUNCTIONS)
def case(request):
    function, shapes = FUNCTIONS[request.param]
    return function, [randn(*shape) for shape in shapes], [randn(N, *shape) for shape in shapes]


class Ops(TorchDispatchMode):
    """Counts the calls of attention."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash_attn":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def square(function):
    return lambda *tensors: (function(*tensors) * torch.arange(1, 9)).square().sum()


def gradients(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(square(function)(*leaves), leaves)


def stacked(rows):
    return [torch.stack(x) for x in zip(*rows)]


def close(got, want):
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert y.any()
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_grad_and_vjp(case):
    function, tensors, _ = case
    argnums = tuple(range(len(tensors)))
    close(grad(square(function), argnums)(*tensors), gradients(function, tensors))
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, pull = vjp(function, *tensors)
    dout = randn(*out.shape)
    close(out, function(*tensors))
    close(pull(dout), torch.autograd.grad(function(*leaves), leaves, dout))


def test_vmap_is_one_call(case):
    function, _, batch = case
    with Ops() as ops:
        got = vmap(function)(*batch)
    assert len(ops.names) == 1
    close(got, torch.stack([function(*x) for x in zip(*batch)]))
    last = [x.movedim(0, -1) for x in batch]
    close(vmap(function, -1, 1)(*last).movedim(1, 0), got)


def test_vmap_of_no_entries(case):
    function, tensors, batch = case
    none = [x[:0] for x in batch]
    assert vmap(function)(*none).shape == (0, *function(*tensors).shape)
    grads = vmap(grad(square(function), tuple(range(len(none)))))(*none)
    assert [x.shape for x in grads] == [x.shape for x in none]


def test_vmap_over_grad_is_two_calls(case):
    function, _, batch = case
    argnums = tuple(range(len(batch)))
    with Ops() as ops:
        got = vmap(grad(square(function), argnums))(*batch)
    assert len(ops.names) == 2
    want = stacked([gradients(function, x) for x in zip(*batch)])
    close(got, want)
    close(grad(lambda *x: vmap(square(function))(*x).sum(), argnums)(*batch), want)


def test_vmap_of_some_arguments(case):
    """Gradients of per sample, with a tensor that all samples share."""
    function, tensors, batch = case
    for i in range(len(tensors)):
        mixed = [batch[j] if i == j else tensors[j] for j in range(len(tensors))]
        dims = tuple(0 if i == j else None for j in range(len(tensors)))
        rows = [[batch[j][n] if i == j else tensors[j] for j in range(len(tensors))] for n in range(N)]
        close(vmap(function, dims)(*mixed), torch.stack([function(*x) for x in rows]))
        got = vmap(grad(square(function), tuple(range(len(tensors)))), dims)(*mixed)
        close(got, stacked([gradients(function, x) for x in rows]))


def test_vmaps_in_each_other(case):
    function, _, batch = case
    twice = [torch.stack([x, -x]) for x in batch]
    with Ops() as ops:
        got = vmap(vmap(function), in_dims=0)(*twice)
    assert len(ops.names) == 1
    close(got, torch.stack([vmap(function)(*[x[i] for x in twice]) for i in range(2)]))
    across = vmap(vmap(function, (None,) * (len(batch) - 1) + (0,)), (0,) * (len(batch) - 1) + (None,))
    got = across(*batch[:-1], batch[-1]) if len(batch) > 1 else None
    if got is not None:
        rows = [[function(*[x[i] for x in batch[:-1]], batch[-1][j]) for j in range(N)] for i in range(N)]
        close(got, torch.stack([torch.stack(row) for row in rows]))


def test_jacrev_and_batches_of_gradients(case):
    function, tensors, _ = case
    out = function(*tensors)
    with Ops() as ops:
        got = jacrev(function, tuple(range(len(tensors))))(*tensors)
    assert len(ops.names) == 2
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    basis = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    rows = [torch.autograd.grad(out, leaves, unit, retain_graph=True) for unit in basis]
    want = stacked(rows)
    close([x.flatten(0, out.dim() - 1) for x in got], want)
    with Ops() as ops:
        batch = torch.autograd.grad(out, leaves, basis, is_grads_batched=True, retain_graph=True)
    assert len(ops.names) == 1
    close(batch, want)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"sinks": torch.ones(4)}, {"attn_bias": torch.ones(5)}])
def test_slopes_of_their_own(dim, options):
    """A slope of another entry may lie beside a slope: the caller does not see this."""
    q, slopes = randn(1, 5, 4, 8), SLOPES * torch.arange(1, N + 1)[:, None]

    def first(slopes):
        results = flash_attn_func(q, q, q, alibi_slopes=slopes, **options)
        return results[0] if isinstance(results, tuple) else results

    mapped = slopes.movedim(0, dim).contiguous()
    close(vmap(first, dim)(mapped), torch.stack([first(x) for x in slopes]))


def test_lengths_of_their_own():
    """Each entry of the mapped dimension has lengths of its own."""
    q, k = randn(N, 10, 4, 8), randn(N, 13, 2, 8)
    cu_q = torch.tensor([[0, 4, 9], [0, 0, 10], [0, 7, 7]], dtype=INT)
    cu_k = torch.tensor([[0, 13, 13], [0, 1, 12], [0, 6, 7]], dtype=INT)

    def function(q, k, cu_q, cu_k):
        out, lse, _ = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 10, 13, causal=True, return_attn_probs=True)
        return out, lse

    rows = [function(*x) for x in zip(q, k, cu_q, cu_k)]
    for i, (_, lse) in enumerate(rows):
        assert torch.all(lse[:, cu_q[i, -1] :] == -torch.inf)
    got = vmap(function)(q, k, cu_q, cu_k)
    for x, y in zip(got, stacked(rows)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
    loss = square(lambda *x: function(*x)[0])
    got = vmap(grad(loss, (0, 1)))(q, k, cu_q, cu_k)
    close(got, stacked([gradients(lambda *x, i=i: function(*x, cu_q[i], cu_k[i])[0], (q[i], k[i])) for i in range(N)]))


def test_rows_of_no_sequence_may_hold_anything():
    q, k = randn(N, 10, 4, 8), randn(N, 13, 2, 8)
    q[:, 9:], k[:, 11:] = torch.nan, torch.nan
    got = vmap(grad(square(lambda q, k: flash_attn_varlen_func(q, k, k, CU_Q, CU_K, 5, 5)[:9]), (0, 1)))(q, k)
    assert not got[0][:, 9:].any() and not got[1][:, 11:].any() and all(x.isfinite().all() for x in got)


@pytest.mark.parametrize("maps_pages", [False, True])
def test_pages(maps_pages):
    q, pages = randn(N, 10, 4, 8), randn(N, 6, 4, 2, 8)
    tables = torch.tensor([[[0, 1], [2, 2], [3, 0]], [[5, 1], [4, 2], [0, 0]], [[1, 0], [3, 2], [5, 4]]], dtype=INT)

    def function(q, pages, table):
        return flash_attn_varlen_func(q, pages, pages, CU_Q, CU_K, 5, 5, block_table=table, causal=True)

    pages = pages if maps_pages else pages[0]
    dims = 0, 0 if maps_pages else None, 0
    want = [function(q[i], pages[i] if maps_pages else pages, tables[i]) for i in range(N)]
    with Ops() as ops:
        close(vmap(function, dims)(q, pages, tables), torch.stack(want))
    assert len(ops.names) == 1
    want = [function(q[i], pages[i] if maps_pages else pages, tables[0]) for i in range(N)]
    close(vmap(function, (0, dims[1], None))(q, pages, tables[0]), torch.stack(want))


# ---- decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maps_cache", [False, True])
@pytest.mark.parametrize("name", ["plain", "rows", "pages", "pages and rows"])
def test_decoding(name, maps_cache):
    q, cache = randn(N, 2, 1, 4, 8), randn(N, 4, 8, 2, 8)
    used = torch.tensor([[3, 8], [1, 2], [5, 4]], dtype=INT)
    options = {}
    if "rows" in name:
        options["cache_batch_idx"] = torch.tensor([1, 0], dtype=INT)
    if "pages" in name:
        options["block_table"] = torch.tensor([[3, 1], [0, 2]], dtype=INT)
    cache = cache if maps_cache else cache[0]

    def function(q, cache, used):
        return flash_attn_with_kvcache(q, cache, cache.flip(0), cache_seqlens=used, return_softmax_lse=True, **options)

    want = [function(q[i], cache[i] if maps_cache else cache, used[i]) for i in range(N)]
    with Ops() as ops:
        got = vmap(function, (0, 0 if maps_cache else None, 0))(q, cache, used)
    assert len(ops.names) == 1
    close(got, stacked(want))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_appending(dim):
    """Also where the mapped dimension is no neighbour of the batch, and joins it in a copy."""
    q, new, cos = randn(N, 2, 1, 4, 16), randn(N, 2, 1, 2, 16), randn(8, 8)
    caches = randn(N, 2, 8, 2, 16), randn(N, 2, 8, 2, 16) + 1
    used = torch.tensor([[3, 7], [0, 2], [5, 4]], dtype=INT)

    def function(q, k_cache, v_cache, new, used):
        return flash_attn_with_kvcache(q, k_cache, v_cache, new, -new, cos, cos.cos(), cache_seqlens=used)

    want_caches = [x.clone() for x in caches]
    want = [function(*x) for x in zip(q, *want_caches, new, used)]
    got_caches = [x.movedim(0, dim).contiguous() for x in caches]
    got = vmap(function, (0, dim, dim, 0, 0))(q, *got_caches, new, used)
    close(got, torch.stack(want))
    close([x.movedim(dim, 0) for x in got_caches], want_caches)
    with pytest.raises(RuntimeError, match="k_cache is written, so it must be mapped"):
        vmap(function, (0, None, None, 0, 0))(q, caches[0][0], caches[1][0], new, used)


def test_steps_of_no_entries():
    q, cache, used = randn(0, 2, 1, 4, 8), randn(0, 2, 8, 2, 8), torch.zeros(0, 2, dtype=INT)

    def function(q, cache, new, used, **options):
        return flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=used, **options)

    assert vmap(function)(q, cache, cache[:, :, :1], used).shape == q.shape
    table = torch.zeros(0, 2, 1, dtype=INT)
    paged = vmap(lambda q, cache, used, table: function(q, cache, None, used, block_table=table))
    assert paged(q, cache, used, table).shape == q.shape


def test_rotary_tables_of_their_own():
    q, new, cos, cache = randn(N, 2, 1, 4, 16), randn(N, 2, 1, 2, 16), randn(N, 8, 8), randn(N, 2, 8, 2, 16)

    def function(q, cache, new, cos):
        return flash_attn_with_kvcache(q, cache, cache.clone(), new, -new, cos, cos.cos(), cache_seqlens=3)

    want_cache = cache.clone()
    want = [function(*x) for x in zip(q, want_cache, new, cos)]
    close(vmap(function)(q, cache, new, cos), torch.stack(want))
    close(cache, want_cache)


# ---- wrong numbers of an entry -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_refused_as_in_a_call(name, at):
    function, tensors = WRONG[name](at)
    before = [x.clone() for x in tensors]
    with pytest.raises(RuntimeError) as of_entry:
        function(*[x[at] for x in tensors])
    for transformed, given in ((vmap(function), tensors), (vmap(vmap(function)), [x[None] for x in tensors])):
        with pytest.raises(RuntimeError) as found:
            transformed(*given)
        assert str(found.value) == str(of_entry.value)
    assert all(map(torch.equal, tensors, before))
    assert not _ops.flash_attn_2_cuda.only_plans()


CLAMPED = [name for name in WRONG if "[0, 3, 2]" not in name and name[:11] + name[-6:] != "block_tableappend"]


@pytest.mark.parametrize("name", CLAMPED)
def test_unchecked_numbers_reach_no_other_entry(monkeypatch, name):
    """As on a GPU, where the numbers are not read. The op on the CPU takes these numbers once they are clamped."""
    monkeypatch.setattr(_vmap, "_is_checked", lambda x: False)
    at = 1
    function, tensors = WRONG[name](at)
    results, written = [], []
    for value in (1.0, torch.nan):
        now = [x.clone() for x in tensors]
        now[1][1 - at] = value
        results.append(vmap(function)(*now)[at])
        written.append(now[1])
    assert torch.equal(*results)
    assert torch.equal(*(x[at] for x in written))
    good = vmap(function)(*tensors)[1 - at]
    monkeypatch.undo()
    torch.testing.assert_close(good, function(*[x[1 - at] for x in tensors]), rtol=1e-9, atol=1e-12)


def test_numbers_that_no_sequence_needs_may_be_wrong():
    function, tensors = cached_step("block_table", 0, 0, appends=False)
    table = torch.cat([tensors[3], torch.full_like(tensors[3], 7)], -1)
    close(vmap(function)(*tensors[:3], table), torch.stack([function(*x) for x in zip(*tensors)]))


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("seqlens", [3, "tensor", None])
@pytest.mark.parametrize("has_leftpad", [False, True])
def test_entries_share_lengths(b, seqlens, has_leftpad):
    q, cache = randn(N, b, 1, 4, 8), randn(N, b, 8, 2, 8)
    seqlens = torch.full((b,), 5, dtype=INT) if seqlens == "tensor" else seqlens
    leftpad = torch.full((b,), 2, dtype=INT) if has_leftpad else None

    def function(q, cache):
        return flash_attn_with_kvcache(q, cache, cache, cache_seqlens=seqlens, cache_leftpad=leftpad)

    close(vmap(function)(q, cache), torch.stack([function(*x) for x in zip(q, cache)]))


# ---- dropout -------------------------------------------------------------------------------------------------------


def dropped(x):
    return flash_attn_qkvpacked_func(x, 0.4, causal=True)


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("outer", [None, "same", "different"])
def test_the_backward_drops_what_the_forward_dropped(randomness, outer):
    """The loss is linear in v, so the sum of v times its gradient is the loss."""
    qkv = randn(N, 2, 9, 3, 2, 8)
    qkv = qkv if outer is None else torch.stack([qkv, qkv + 1])

    def loss(v, q_and_k):
        out = dropped(torch.cat([q_and_k, v], 2))
        return (out * torch.arange(1, 9)).sum()

    def pair(x):
        dv, value = torch.func.grad_and_value(loss)(x[:, :, 2:], x[:, :, :2])
        return value, (dv * x[:, :, 2:]).sum()

    function = vmap(pair, randomness=randomness)
    function = function if outer is None else vmap(function, randomness=outer)
    torch.manual_seed(0)
    values, sums = function(qkv)
    torch.testing.assert_close(values, sums, rtol=1e-6, atol=1e-5)  # the kept share is a float


def test_a_batch_of_gradients_has_one_mask():
    qkv = randn(2, 9, 3, 2, 8).requires_grad_()
    torch.manual_seed(1)
    out = dropped(qkv)
    douts = randn(N, *out.shape)
    want = torch.stack([torch.autograd.grad(out, qkv, dout, retain_graph=True)[0] for dout in douts])
    (got,) = torch.autograd.grad(out, qkv, douts, is_grads_batched=True)
    close(got, want)
    torch.manual_seed(1)
    close(vmap(vjp(dropped, qkv.detach())[1])(douts)[0], want)


# ---- ops ------------------------------------------------------------------------------------------------------------

OF_OP = 0.0, 0.4, True, 4, -1, 5.0
OPS = torch.ops.flash_attn


def op_with_used_rows(q, k, v):
    used = torch.tensor([4, 1, 4], dtype=INT)
    return OPS._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 5, 5, *OF_OP, seqused_k=used)[:2]


FUNCTIONAL_OPS = {
    "dense": (lambda q, k, v: OPS._flash_attn_forward(q, k, v, *OF_OP, SLOPES, False)[:2], "dense", 1),
    "varlen": (lambda q, k, v: OPS._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, 5, 5, *OF_OP)[:2], "varlen", 1),
    "used rows": (op_with_used_rows, "varlen", N),
}


@pytest.mark.parametrize("name", FUNCTIONAL_OPS)
@pytest.mark.parametrize("maps_keys", [False, True])
def test_ops(name, maps_keys, capfd):
    function, of, num = FUNCTIONAL_OPS[name]
    q, k, v = (randn(N, *shape) for shape in FUNCTIONS[of][1])
    k = k if maps_keys else k[0]
    with Ops() as ops:
        got = vmap(function, (0, 0 if maps_keys else None, 0))(q, k, v)
    assert len(ops.names) == num
    close(got, stacked([function(q[i], k[i] if maps_keys else k, v[i]) for i in range(N)]))
    assert "performance drop" not in capfd.readouterr().err


def test_op_with_dropout():
    q = randn(N, 2, 5, 4, 8)
    function = lambda q: OPS._flash_attn_forward(q, q, q, 0.5, *OF_OP[1:], None, False)[0]  # noqa: E731
    torch.manual_seed(0)
    one = function(q[0])
    torch.manual_seed(0)
    same = vmap(function, randomness="same")(q[:1].expand(N, -1, -1, -1, -1))
    close(same, torch.stack([one] * N))
    different = vmap(function, randomness="different")(q[:1].expand(N, -1, -1, -1, -1))
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="refused by randomness='error'"):
        vmap(function)(q)


def test_op_of_merging(capfd):
    outs, lses = randn(N, 3, 2, 5, 4, 8).float(), randn(N, 3, 2, 4, 5).float().transpose(-1, -2)
    with Ops() as ops:
        got = vmap(OPS._combine)(outs, lses)
    assert len(ops.names) == 1
    for x, y in zip(got, stacked([OPS._combine(*x) for x in zip(outs, lses)])):
        torch.testing.assert_close(x, y)
    assert "performance drop" not in capfd.readouterr().err


def forward_op(q, k):
    out = torch.empty_like(q)
    OPS.fwd(q, k, k, out, *OF_OP, None, False)
    return out


def kvcache_op(q, k):
    out = torch.empty_like(q)
    OPS.fwd_kvcache(q, k, k, *[None] * 9, out, *OF_OP[1:], True, 0)
    return out


def backward_op(q, k):
    out, lse = OPS._flash_attn_forward(k, k, k, *OF_OP, None, False)[:2]
    dq = torch.empty_like(q)
    OPS._flash_attn_backward(q, k, k, k, out, lse, dq, None, None, *OF_OP, None, False)
    return dq


WRITING_OPS = {
    "fwd": forward_op,
    "fwd of C": lambda q, k: _ops.flash_attn_2_cuda.fwd(q, k, k, None, None, *OF_OP, False, None)[0],
    "fwd_kvcache": kvcache_op,
    "_flash_attn_backward": backward_op,
}
TRANSFORMS = {
    "vmap": lambda f, q: vmap(f)(q),
    "grad": lambda f, q: grad(lambda q: f(q).sum())(q[0]),
    "vjp": lambda f, q: vjp(f, q[0])[1](q[0]),
    "functionalize": lambda f, q: functionalize(f)(q[0]),
    "jvp": lambda f, q: jvp(f, (q[0],), (q[0],)),
    "jacfwd": lambda f, q: jacfwd(f)(q[0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", WRITING_OPS)
def test_ops_that_write_are_refused(name, transform):
    """The transform would see results without a tangent or gradient."""
    q = randn(N, 2, 5, 4, 8)
    in_forward_mode = transform in ("jvp", "jacfwd")
    words = (
        "flash_attn has no jvp" if in_forward_mode else "torch.func .vmap, grad and the like. takes no op that writes"
    )
    with pytest.raises(NotImplementedError, match=f"^{words}"):
        TRANSFORMS[transform](lambda x: WRITING_OPS[name](x, q[0]), q)


@pytest.mark.parametrize("transform", ["vmap", "grad", "vjp", "jvp", "jacfwd"])
@pytest.mark.parametrize("name", ["fwd", "fwd of C", "fwd_kvcache"])
def test_ops_that_write_may_be_constants_of_a_transform(name, transform):
    """Within grad new tensors are of grad, such as out. An op that writes must take them."""
    q = randn(N, 2, 5, 4, 8)
    op, want = WRITING_OPS[name], WRITING_OPS[name](q[0], q[1])
    got = TRANSFORMS[transform](lambda x: x * op(q[0], q[1]), q)
    if transform == "jacfwd":
        got = got.flatten(0, 3).flatten(1).diagonal().view_as(want)
    if transform in ("vjp", "jvp"):
        got, want = got[-1], want * q[0]
    close(got, want * q if transform == "vmap" else want)


def test_gradients_of_ops_are_refused_in_our_words():
    q, parts, lses = randn(2, 5, 4, 8), randn(2, 1, 5, 4, 8).float(), randn(2, 1, 4, 5).float().transpose(-1, -2)
    calls = {
        "_flash_attn_forward": lambda: grad(lambda q: OPS._flash_attn_forward(q, q, q, *OF_OP, None, False)[0].sum())(
            q
        ),
        "_combine": lambda: grad(lambda x: OPS._combine(x, lses)[0].sum())(parts),
    }
    for name, call in calls.items():
        with pytest.raises(
            NotImplementedError, match=f"^torch.func takes gradients of the public .* flash_attn::{name}$"
        ):
            call()


@pytest.mark.parametrize("name", ["plain", "packed", "lse", "merge", "cache"])
def test_functionalize_is_refused(name):
    attend = ATTENTIONS.get(name, lambda x: flash_attn_with_kvcache(x, x, x))
    with pytest.raises(NotImplementedError, match="^flash_attn cannot be called inside torch.func.functionalize"):
        functionalize(attend)(randn(1, 5, 2, 8))


# ---- what does not exist -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian"])
def test_forward_mode_is_refused(case, transform):
    function, tensors, _ = case
    calls = {
        "jvp": lambda: jvp(function, tuple(tensors), tuple(tensors)),
        "jacfwd": lambda: jacfwd(function)(*tensors),
        "hessian": lambda: hessian(square(function))(*tensors),
    }
    with pytest.raises(NotImplementedError, match="^flash_attn has no jvp: there is no forward-mode derivative"):
        calls[transform]()


def test_forward_mode_of_decoding_is_refused():
    q, cache = randn(2, 1, 4, 8), randn(2, 8, 4, 8)
    with pytest.raises(NotImplementedError, match="^flash_attn has no jvp"):
        jvp(lambda q: flash_attn_with_kvcache(q, cache, cache), (q,), (q,))


def test_tangents_of_sinks():
    """The sinks of a step of decoding are torch's own operators, which know forward mode."""
    q, cache, sinks = randn(2, 1, 4, 8), randn(2, 8, 4, 8), randn(4)

    def function(sinks):
        return flash_attn_with_kvcache(q, cache, cache, sinks=sinks, return_softmax_lse=True)

    want, wanted = jvp(function, (sinks,), (SLOPES.double(),))
    with forward_ad.dual_level():
        got = [forward_ad.unpack_dual(x) for x in function(forward_ad.make_dual(sinks, SLOPES.double()))]
    close([x.primal for x in got], want)
    close([x.tangent for x in got], wanted)
    step = 0.02 * SLOPES.double()
    for x, after, before in zip(wanted, function(sinks + step), function(sinks - step)):
        torch.testing.assert_close(x, (after - before) / 0.04, rtol=1e-3, atol=1e-4)


def test_second_derivatives_are_refused(case):
    function, tensors, _ = case
    first = grad(square(function))
    for second in (grad(lambda *x: first(*x).sum()), jacrev(first)):
        with pytest.raises(RuntimeError, match="^flash_attn has no second derivatives"):
            second(*tensors)


NOT_TRACED = "flash_attn cannot be compiled inside grad, vmap"
ATTENTIONS = {
    "plain": lambda x: flash_attn_func(x, x, x),
    "packed": lambda x: flash_attn_qkvpacked_func(torch.stack([x, x, x], 2)),
    "lse": lambda x: flash_attn_func(x, x, x, return_lse=True)[0],
    "sinks": lambda x: flash_attn_func(x, x, x, sinks=x[0, 0, :, 0]),
    "bias": lambda x: flash_attn_func(x, x, x, attn_bias=x[:, :, 0, :1]),
    "merge": lambda x: merge_attention([x.float()], [x[..., 0].float().transpose(1, 2)])[0],
    "flex": lambda x: flex_attention(x, x, x),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_graphs_of_gradients_are_refused(name, fullgraph):
    """Dynamo's own transforms would give wrong gradients. Its tensors cannot pass a graph break inside of grad."""
    torch._dynamo.reset()
    attend = ATTENTIONS[name]
    function = grad(lambda x: (attend(2 * x) ** 2).sum())
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=NOT_TRACED):
        torch.compile(lambda x: function(x + 1) + 1, backend="eager", fullgraph=fullgraph)(randn(1, 5, 2, 8))


def test_vmap_breaks_graphs():
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # for this test: Dynamo instantiates an autograd function, and torch warns
    x = randn(3, 1, 5, 2, 8)
    function = lambda x: vmap(ATTENTIONS["packed"])(2 * x) + 1  # noqa: E731
    close(torch.compile(function, backend="eager")(x), function(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=NOT_TRACED):
        torch.compile(function, backend="eager", fullgraph=True)(x)


def test_a_disabled_transform_works_beside_a_graph():
    torch._dynamo.reset()
    x = randn(1, 5, 2, 8)
    function = grad(lambda x: (ATTENTIONS["packed"](2 * x) ** 2).sum())
    disabled = torch.compiler.disable(function)
    close(torch.compile(lambda x: disabled(x + 1) + 1, backend="eager")(x), function(x + 1) + 1)


def test_gradients_of_decoding_do_not_exist(monkeypatch):
    monkeypatch.setattr(_ops, "_has_warned", False)
    q, cache = randn(2, 1, 4, 8), randn(2, 8, 4, 8)
    with pytest.warns(UserWarning, match="flash_attn_with_kvcache has no backward"):
        got = grad(lambda q: flash_attn_with_kvcache(q, cache, cache).sum() + q.sum())(q)
    assert torch.equal(got, torch.ones_like(q))
