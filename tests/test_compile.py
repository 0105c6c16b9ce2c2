"""The ops under PyTorch's tracers. Fakes equal real results, one graph serves all lengths, and no result is lost.

Most tests compile with the backend aot_eager_decomp_partition. It does everything that torch.compile does except code
generation.
"""

import re
import shutil

import pytest
import torch
from harness import offsets, randn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

TRACED = "aot_eager_decomp_partition"
HAS_CXX = any(map(shutil.which, ("c++", "g++", "clang++")))
needs_cxx = pytest.mark.skipif(not HAS_CXX, reason="Inductor needs a C++ compiler")
BACKENDS = [TRACED, pytest.param("inductor", marks=needs_cxx)]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def run(function, tensors, *args):
    """Results and gradients, with the same dropout mask and the same dout for the same shapes."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(0)
    results = function(*tensors, *args)
    results = list(results) if isinstance(results, tuple) else [results]
    return results + list(torch.autograd.grad(results[0], tensors, randn(*results[0].shape)))


def assert_same(got, want, exact=True):
    """Equal in values, shapes and strides. Generated code may round differently in operations around an op."""
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}))


# ---- fakes ---------------------------------------------------------------------------------------------------------


def heads_first(x):
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


DENSE = {
    "plain": (randn(2, 5, 4, 16), *randn(2, 2, 6, 2, 16)),
    "heads_first": (heads_first(randn(2, 5, 4, 16)), *heads_first(randn(2, 2, 6, 2, 16))),
    "packed": randn(2, 5, 3, 4, 16).unbind(2),
    "last_outside_of_out": (randn(2, 16, 5, 4).permute(0, 2, 3, 1).contiguous(), *randn(2, 2, 6, 2, 16)),
    "one": randn(3, 1, 1, 1, 1),
    "expanded": (randn(2, 1, 1, 16).expand(2, 5, 4, 16), *randn(2, 2, 6, 2, 16)),
    "no_queries": (randn(2, 0, 4, 16), *randn(2, 2, 6, 2, 16)),
    "no_keys": (randn(2, 5, 4, 16), *randn(2, 2, 0, 2, 16)),
    "no_batch": (randn(0, 5, 4, 16), *randn(2, 0, 6, 2, 16)),
}
MASK = (False, 2, 1, 0.0, None)
CU_Q, CU_K = offsets([5, 0, 4]), offsets([2, 4, 3])
LENGTHS = (CU_Q, CU_K, 5, 4)
PACKED = (randn(9, 4, 16), *randn(2, 9, 2, 16))


OPS = torch.ops.flash_attn
OPCHECK = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


def opcheck(op, args, dropout_p=0.0):
    """Schema and mutations are as declared, and the fake equals the op, also with symbolic sizes.

    Two calls with dropout differ, so their values cannot be compared.
    """
    torch.library.opcheck(op.default, args, test_utils=OPCHECK[:3] if dropout_p else OPCHECK)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("name", DENSE)
def test_fake_forward(name, dropout_p):
    q, k, v = DENSE[name]
    args = (dropout_p, 0.25, *MASK, dropout_p > 0)
    opcheck(OPS._flash_attn_forward, (q, k, v, *args), dropout_p)


def test_fake_forward_into_a_given_tensor():
    q, k, v = DENSE["plain"]
    opcheck(OPS.fwd, (q, k, v, torch.empty_like(q), 0.0, 0.25, *MASK, False))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_fake_varlen_forward(dropout_p):
    args = (dropout_p, 0.25, *MASK, dropout_p > 0)
    opcheck(OPS._flash_attn_varlen_forward, (*PACKED, *LENGTHS, *args), dropout_p)
    opcheck(OPS.varlen_fwd, (*PACKED, torch.empty_like(PACKED[0]), *LENGTHS, *args), dropout_p)


@pytest.mark.parametrize("name", DENSE)
def test_fake_backward(name):
    q, k, v = DENSE[name]
    out, lse, _, rng_state = OPS._flash_attn_forward(q, k, v, 0.0, 0.25, *MASK, False)
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    for kept in ((0, 1, 2), (1,)):
        given = [grads[i] if i in kept else None for i in range(3)]
        args = (out, q, k, v, out, lse, *given, 0.0, 0.25, *MASK, False, rng_state)
        opcheck(OPS._flash_attn_backward, args)


def test_fake_varlen_backward():
    out, lse, *_ = OPS._flash_attn_varlen_forward(*PACKED, *LENGTHS, 0.0, 0.25, *MASK)
    grads = [torch.zeros(x.shape) for x in PACKED]
    opcheck(OPS._flash_attn_varlen_backward, (out, *PACKED, out, lse, *grads, *LENGTHS, 0.0, 0.25, *MASK, False))


@pytest.mark.parametrize("append", [False, True])
def test_fake_kvcache(append):
    q, k_cache, v_cache = randn(2, 1, 4, 16), randn(2, 8, 2, 16), randn(2, 8, 2, 16)
    new = randn(2, 2, 1, 2, 16).unbind(0) if append else (None, None)
    used = torch.tensor([3, 7], dtype=torch.int32)
    args = (q, k_cache, v_cache, *new, used, *[None] * 6, torch.empty_like(q), 0.25, False, -1, -1, 0.0, True, 0)
    opcheck(OPS.fwd_kvcache, args)


@pytest.mark.parametrize("name", ["_flash_attn_forward", "_flash_attn_varlen_forward"])
def test_gradients_of_the_ops(name):
    varlen = "varlen" in name
    tensors = [x.clone().requires_grad_() for x in (PACKED if varlen else DENSE["plain"])]
    args = (*tensors, *(LENGTHS if varlen else ()), 0.0, 0.25, *MASK, False)
    torch.library.opcheck(getattr(OPS, name).default, args)


def test_fake_of_a_wrong_rank():
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="q must have 4 dimensions"):
        q = torch.empty(3, 2, 16)
        flash_attn_func(q, q, q)


KINDS = {
    "cpu": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "fake": torch._subclasses.FakeTensorMode,
}


def table():
    return torch.zeros(2, 1, dtype=torch.int32)


ZERO_SIZES = {
    "head_size": (lambda: flash_attn_func(*torch.zeros(3, 2, 5, 4, 0)), "q must have a head_size of at least 1"),
    "key heads": (
        lambda: flash_attn_func(torch.zeros(2, 5, 0, 8), *torch.zeros(2, 2, 5, 0, 8)),
        "k must have at least one head; it has num_heads_k = 0",
    ),
    "packed head_size": (
        lambda: flash_attn_varlen_func(*torch.zeros(3, 5, 4, 0), *[torch.tensor([0, 5], dtype=torch.int32)] * 2, 5, 5),
        "q must have a head_size of at least 1; it has shape ending in 0",
    ),
    "packed key heads": (
        lambda: flash_attn_varlen_func(
            *torch.zeros(3, 5, 0, 8), *[torch.tensor([0, 5], dtype=torch.int32)] * 2, 5, 5, return_lse=True
        ),
        "k must have at least one head; it has num_heads_k = 0",
    ),
    "cached head_size": (
        lambda: flash_attn_with_kvcache(torch.zeros(2, 1, 4, 0), *torch.zeros(2, 2, 5, 4, 0)),
        "q must have a head_size of at least 1; it has shape ending in 0",
    ),
    "cached key heads": (
        lambda: flash_attn_with_kvcache(torch.zeros(2, 1, 0, 8), *torch.zeros(2, 2, 5, 0, 8), sinks=torch.zeros(0)),
        "k_cache must have at least one head; it has num_heads_k = 0",
    ),
    "page": (
        lambda: flash_attn_with_kvcache(torch.zeros(2, 1, 4, 8), *torch.zeros(2, 3, 0, 4, 8), block_table=table()),
        "k_cache must have a page size (dimension 1) of at least 1; it has 0",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ZERO_SIZES)
def test_sizes_that_must_not_be_zero(name, kind):
    call, words = ZERO_SIZES[name]
    with KINDS[kind](), pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
        call()


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_may_be_zero(kind):
    with KINDS[kind]():
        for b, len_q, h, len_kv in ((0, 5, 4, 5), (2, 0, 4, 5), (2, 5, 0, 5), (2, 5, 4, 0)):
            q, kv = torch.zeros(b, len_q, h, 8), torch.zeros(2, b, len_kv, 2, 8)
            assert flash_attn_func(q, *kv).shape == q.shape
            assert flash_attn_with_kvcache(q, *kv).shape == q.shape
        pages = torch.zeros(2, 0, 4, 2, 8)
        q, lengths = torch.zeros(2, 1, 4, 8), torch.zeros(2, dtype=torch.int32)
        assert flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, block_table=table()).shape == q.shape


# ---- torch.compile -------------------------------------------------------------------------------------------------


def dense(q, k, v):
    return flash_attn_func(q.sin(), k, v, causal=True, window_size=(4, 0), return_attn_probs=True)


def dense_self(q, k, v):
    x = q + k + v
    return flash_attn_func(x, x, x).cos()


def kvpacked(q, kv):
    return flash_attn_kvpacked_func(q, kv.sin(), causal=True).cos()


def qkvpacked(qkv):
    return flash_attn_qkvpacked_func(qkv.sin(), causal=True).cos()


def varlen(q, k, v, cu, longest):
    return flash_attn_varlen_func(q.sin(), k, v, cu, cu, longest, longest, causal=True).cos()


def varlen_kvpacked(q, kv, cu, longest):
    return flash_attn_varlen_kvpacked_func(q, kv.sin(), cu, cu, longest, longest, causal=True).cos()


def varlen_qkvpacked(qkv, cu, longest):
    return flash_attn_varlen_qkvpacked_func(qkv.sin(), cu, longest, causal=True).cos()


def inputs(function, n):
    """Tensors of n rows. Packed forms split the rows into two sequences."""
    rows = (n,) if "varlen" in function.__name__ else (2, n)
    if "qkvpacked" in function.__name__:
        tensors = [randn(*rows, 3, 4, 16)]
    elif "kvpacked" in function.__name__:
        tensors = [randn(*rows, 4, 16), randn(*rows, 2, 4, 16)]
    else:
        tensors = [randn(*rows, 4, 16) for _ in range(3)]
    return tensors, ((offsets([n // 3, n - n // 3]), n) if "varlen" in function.__name__ else ())


FUNCTIONS = [dense, dense_self, kvpacked, qkvpacked, varlen, varlen_kvpacked, varlen_qkvpacked]


def check_lengths(function, backend, exact):
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    tensors, args = inputs(function, 5)
    assert_same(run(compiled, tensors, *args), run(function, tensors, *args), exact)
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (7, 130):
            tensors, args = inputs(function, n)
            assert_same(run(compiled, tensors, *args), run(function, tensors, *args), exact)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_graph_for_all_lengths(function):
    # dense_self adds three gradients in another order than eager PyTorch.
    check_lengths(function, TRACED, exact=function is not dense_self)


@needs_cxx
@pytest.mark.parametrize("function", [dense, qkvpacked, varlen_kvpacked])
def test_one_graph_for_all_lengths_in_generated_code(function):
    check_lengths(function, "inductor", exact=False)


@pytest.mark.parametrize("needed", [(0,), (1, 2)])
def test_only_some_gradients(needed):
    compiled = torch.compile(dense, backend=TRACED, fullgraph=True)
    results = []
    for function in (dense, compiled):
        tensors = [x.requires_grad_(i in needed) for i, x in enumerate(inputs(dense, 6)[0])]
        wanted = [tensors[i] for i in needed]
        out = function(*tensors)[0]
        results.append([out.detach(), *torch.autograd.grad(out, wanted, randn(*out.shape))])
    assert_same(*results)


def test_max_seqlen_as_a_tensor():
    tensors, (cu, longest) = inputs(varlen, 9)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(varlen, backend=TRACED, fullgraph=True)
        assert_same(run(compiled, tensors, cu, torch.tensor(longest)), run(varlen, tensors, cu, longest))


def test_no_grad_inside_a_graph():
    compiled = torch.compile(torch.no_grad()(qkvpacked), backend=TRACED, fullgraph=True)
    (qkv,), _ = inputs(qkvpacked, 6)
    assert torch.equal(compiled(qkv.requires_grad_()), qkvpacked(qkv))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_views", [False, True])
def test_kvcache_is_written_from_a_graph(as_views, backend):
    q, new = randn(2, 1, 4, 16), randn(2, 2, 1, 2, 16)
    options = {"causal": True, "return_softmax_lse": True}
    compiled = torch.compile(flash_attn_with_kvcache, backend=backend, fullgraph=True)
    results = []
    for function in (flash_attn_with_kvcache, compiled):
        caches = randn(2, 2, 8, 2, 16)
        k_cache, v_cache = caches if as_views else [x.clone() for x in caches]
        steps = []
        for step in range(3):
            used = torch.tensor([step, 4 + step], dtype=torch.int32)
            steps += function(q + step, k_cache, v_cache, *(new + step), cache_seqlens=used, **options)
        results.append([*steps, k_cache, v_cache])
    assert_same(results[1], results[0])


# ---- dropout in graphs ---------------------------------------------------------------------------------------------


def twice(qkv):
    return flash_attn_qkvpacked_func(qkv, 0.5), flash_attn_qkvpacked_func(qkv, 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_equal_calls_draw_twice(backend):
    qkv = randn(2, 16, 3, 4, 16).requires_grad_()
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    results = []
    for function in (twice, compiled):
        torch.manual_seed(0)
        first, second = function(qkv)
        assert not torch.equal(first, second)
        results.append([first.detach(), second.detach(), *torch.autograd.grad(first.sum() + 2 * second.sum(), qkv)])
    assert_same(results[1], results[0], exact=False)


def with_dropout(x):
    return flash_attn_qkvpacked_func(x.sin(), 0.5)


@pytest.mark.parametrize("save_out", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_in_a_graph_repeats_the_dropout(backend, save_out):
    def policy():
        return create_selective_checkpoint_contexts([OPS._flash_attn_forward.default] if save_out else [])

    def block(qkv):
        return checkpoint(with_dropout, qkv, use_reentrant=False, context_fn=policy)

    (qkv,), _ = inputs(qkvpacked, 16)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    assert_same(run(compiled, [qkv]), run(with_dropout, [qkv]), exact=False)


# ---- torch.export --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_length(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, kv):
            return flash_attn_kvpacked_func(q, kv, causal=True)

    len_q, len_kv = torch.export.Dim("len_q", min=2), torch.export.Dim("len_kv", min=2)
    q, kv = randn(2, 5, 4, 16), randn(2, 7, 2, 2, 16)
    program = torch.export.export(
        Attention(), (q, kv), dynamic_shapes={"q": {1: len_q}, "kv": {1: len_kv}}, strict=strict
    )
    ops = [node.target for node in program.graph.nodes]
    assert ops.count(OPS._flash_attn_forward.default) == 1
    for n, m in ((5, 7), (130, 9), (3, 64)):
        q, kv = randn(2, n, 4, 16), randn(2, m, 2, 2, 16)
        assert torch.equal(program.module()(q, kv), Attention()(q, kv))
