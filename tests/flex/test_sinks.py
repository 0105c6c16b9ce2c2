"""Learned sinks: their digits, their gradients, and who may look at them."""

import functools

import fresh_python
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

INF, NAN = float("inf"), float("nan")
ALL = torch.ones(1, 1, dtype=torch.bool)
WAYS = {
    "plain": {}, "mask": {"attn_mask": ALL}, "bias": {"attn_bias": torch.zeros(1)}, "lse": {"return_lse": True},
    "slopes": {"alibi_slopes": torch.zeros(2)},
}  # fmt: skip


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def watched(function, *args, **options):
    with Watcher():
        return function(*args, **options)


def compiled(function, *args, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*args, **options)


def exported(function, *args, **options):
    """By an exported program, whose inputs are the tensors by position and sinks."""

    class Model(torch.nn.Module):
        def forward(self, sinks, *args):
            return function(*args, sinks=sinks, **rest)

    rest = {name: x for name, x in options.items() if name != "sinks"}
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    inputs = options["sinks"], *args
    with torch.set_grad_enabled(any(x.requires_grad for x in (options["sinks"], *tensors))):
        return torch.export.export(Model(), inputs, strict=False).module()(*inputs)


CALLERS = {
    "eager": lambda function, *args, **options: function(*args, **options), "watched": watched, "compiled": compiled,
    "exported": exported,
}  # fmt: skip


def first(results):
    return results[0] if isinstance(results, tuple) else results


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def expected(q, k, v, sinks, causal=False, slopes=None, softcap=0.0):
    """Plain arithmetic in fp64. The sink is one more key."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    away = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if slopes is None else scores - slopes.double()[:, None, None] * away.abs()
    scores = scores.masked_fill(away < 0, -INF) if causal else scores
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


# ---- digits ---------------------------------------------------------------------------------------------------------


def one_key(score, dtype, d=8):
    """A query and a key of this score, whose value is 1."""
    q, k, v = (torch.zeros(1, 1, 2, d, dtype=dtype) for _ in range(3))
    q[..., 0], k[..., 0], v[:] = score, 1, 1
    return q, k, v


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("score, caller", [
    *((score, caller) for score in (1024.0, -1e5, 1e7) for caller in ("eager", "watched")),
    *((1.6e7, caller) for caller in CALLERS)
])  # fmt: skip
def test_a_sink_that_equals_a_large_score(score, way, caller):
    """It takes half of the row. fp32 lse has no digit for it beside 1e7."""
    q, k, v = one_key(score, torch.float32)
    sinks = torch.full((2,), score).requires_grad_()
    out = first(CALLERS[caller](flash_attn_func, q, k, v, softmax_scale=1.0, sinks=sinks, **WAYS[way]))
    torch.testing.assert_close(out, torch.full_like(out, 0.5), rtol=0, atol=1e-6)
    (grad,) = torch.autograd.grad(out[..., 0].sum(), sinks)
    torch.testing.assert_close(grad, torch.full((2,), -0.25), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"attn_mask": ALL}, {"return_lse": True}, {"causal": 1}], ids=str)
@pytest.mark.parametrize("score", [2.0**19, 2.0**22, 1.25 * 2.0**23])
def test_a_sink_that_equals_large_scores_in_bf16(score, options):
    """Products are rounded to units of log2 in some calls, and the sink with them."""
    q, k, v = one_key(1, torch.bfloat16)
    q[..., 0], sinks = score, torch.full((2,), score).requires_grad_()
    out = first(flash_attn_func(q, k, v, softmax_scale=1.0, sinks=sinks, **options))
    (grad,) = torch.autograd.grad(out[..., 0].sum(), sinks)
    torch.testing.assert_close(out.float(), torch.full(out.shape, 0.5), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, torch.full((2,), -0.25), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("keys", [1, 300])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_sink_is_a_key_of_value_0(rows, keys, dtype):
    """Beside scores of 30000, too, where lse alone would tell nothing of it. Few rows are a decode."""
    q, k = torch.zeros(2, rows, 2, 16, dtype=dtype), torch.zeros(2, keys, 2, 16, dtype=dtype)
    q[..., 0], k[..., 0] = 128, 256
    v, sinks = numbers(2, keys, 2, 16, dtype=dtype), torch.full((2,), 32768.0)
    k_more, v_more = torch.cat([k, k[:, :1]], 1), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    want = flash_attn_func(q.double(), k_more.double(), v_more.double(), softmax_scale=1.0)
    for out in (
        flash_attn_func(q, k, v, softmax_scale=1.0, sinks=sinks),
        flash_attn_func(q, k, v, softmax_scale=1.0, sinks=sinks, attn_mask=ALL),
        flash_attn_with_kvcache(q, k, v, softmax_scale=1.0, sinks=sinks),
    ):
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), want, rtol=2 * unit, atol=4 * unit)


SINKS = {"finite": [0.3, -1.0], "high": [1e6, 700.0], "low": [-1e6, -700.0], "infinite": [INF, -INF], "nan": [NAN, 0.5]}


@pytest.mark.parametrize("caller", ["eager", "watched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SINKS)
def test_sinks_of_every_size(name, dtype, caller):
    """A row that sees no key has the lse of its sink."""
    q, k, v = (numbers(1, n, 2, 8, dtype=dtype, seed=n) for n in (9, 6, 6))
    sinks = torch.tensor(SINKS[name], dtype=dtype)
    want = expected(*(x.double() for x in (q, k, v)), sinks.double(), causal=True)
    for options in ({}, {"attn_mask": ALL}):
        with torch.no_grad():
            out, lse = CALLERS[caller](
                flash_attn_func, q, k, v, causal=True, sinks=sinks, return_lse=True, **options
            )  # fmt: skip
        for head, sink in enumerate(SINKS[name]):
            if sink == sink:
                assert not out[:, :3, head].any() and (lse[:, head, :3] == torch.tensor(sink)).all()
                good = 0.0 if sink == INF else want[:, 3:, head]
                torch.testing.assert_close(out[:, 3:, head].double() - good, torch.zeros(1, 6, 8).double(),
                                           rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)  # fmt: skip
            else:
                assert out[:, 3:, head].isnan().all() and lse[:, head].isnan().all()


OPTIONS = [{}, {"causal": True}, {"softcap": 2.0}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.7, 0.3])}]


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: next(iter(x), "plain"))
def test_fp64_has_the_digits_of_fp64(options, caller):
    q, k, v, sinks = numbers(2, 30, 4, 16), numbers(2, 40, 2, 16), numbers(2, 40, 2, 16, seed=1), numbers(4)
    named = {"slopes" if name == "alibi_slopes" else name: x for name, x in options.items()}
    want = expected(q, k, v, sinks, **named)
    for way in ({}, {"attn_mask": ALL}, {"attn_bias": torch.zeros(1, dtype=torch.float64)}):
        out = CALLERS[caller](flash_attn_func, q, k, v, sinks=sinks, **options, **way)
        torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)
    if caller == "eager":
        out = flash_attn_with_kvcache(q, k, v, sinks=sinks, **options)
        torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)


def test_fp64_beside_dropout():
    """Dropout leaves a row's sum as it is, so the sink scales the row."""
    q, k, v, sinks = numbers(1, 30, 2, 16), numbers(1, 40, 2, 16), numbers(1, 40, 2, 16, seed=1), numbers(2)
    torch.manual_seed(0)
    plain = flash_attn_func(q, k, v, 0.3)
    torch.manual_seed(0)
    out = flash_attn_func(q, k, v, 0.3, sinks=sinks)
    ones = torch.ones_like(v)
    torch.testing.assert_close(out, plain * expected(q, k, ones, sinks), rtol=1e-13, atol=1e-13)


def test_sinks_beside_low_biases_of_fp64():
    """The shift of such a row is a number of fp32, as sinks get it."""
    q, k, v = numbers(1, 5, 2, 8), numbers(1, 6, 2, 8), numbers(1, 6, 2, 8, seed=1)
    low = -1e8 / 3 + numbers(5, 6)
    sinks = torch.full((2,), -1e8 / 3, dtype=torch.float64)
    want = expected_with_bias(q, k, v, low + 1e8 / 3, sinks + 1e8 / 3)
    out = flash_attn_func(q, k, v, attn_bias=low, sinks=sinks)
    torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-7)  # low has 8 digits behind its point
    torch.testing.assert_close(compiled(flash_attn_func, q, k, v, attn_bias=low, sinks=sinks), out)


def expected_with_bias(q, k, v, bias, sinks):
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.einsum("bhij,bjhd->bihd", torch.cat([scores, column], -1).softmax(-1)[..., :-1], v)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_with_kvcache])
def test_torch_jit_records_sinks(function, dtype):
    k, v = numbers(1, 6, 2, 8, dtype=dtype), numbers(1, 6, 2, 8, seed=1, dtype=dtype)
    example = numbers(1, 5, 2, 8, dtype=dtype), torch.zeros(2)
    traced = torch.jit.trace(lambda q, sinks: function(q, k, v, sinks=sinks), example, check_trace=False)
    given = numbers(1, 5, 2, 8, seed=2, dtype=dtype), torch.ones(2)
    want = expected(given[0].double(), k.double(), v.double(), given[1].double())
    torch.testing.assert_close(traced(*given).double(), want, rtol=1e-5, atol=1e-5)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, "packed", "packed mask", "grouped heads", "watched"])
def test_gradcheck(way):
    heads, heads_kv = 2, 1 if way == "grouped heads" else 2
    lengths = [torch.tensor([0, 2, 5], dtype=torch.int32)] * 2
    leaves = [numbers(5, n, 4, seed=n + i).requires_grad_() for i, n in enumerate((heads, heads_kv, heads_kv))]
    leaves.append(numbers(heads).requires_grad_())

    def dense(q, k, v, sinks):
        caller = CALLERS[way if way == "watched" else "eager"]
        return first(caller(flash_attn_func, q[None], k[None], v[None], sinks=sinks, **WAYS.get(way, {})))

    def packed(q, k, v, sinks):
        options = {"attn_mask": ALL} if way == "packed mask" else {}
        return flash_attn_varlen_func(q, k, v, *lengths, 3, 3, sinks=sinks, causal=True, **options)

    assert torch.autograd.gradcheck(packed if "packed" in way else dense, leaves)


ROWS_BEHIND = {**WAYS, "lse and mask": {"return_lse": True, "attn_mask": ALL}}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("way", ROWS_BEHIND)
@pytest.mark.parametrize("leaves", ["all", "sinks alone"])
def test_rows_of_no_sequence_have_no_part_in_the_gradient(leaves, way, caller):
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    tensors = [numbers(12, 2, 8, seed=i, dtype=torch.float32) for i in range(3)]
    found = []
    for rest in (0.0, 7.0, INF, NAN) if caller in ("eager", "watched") else (0.0, NAN):  # graphs are made anew
        q, k, v = (x.clone().requires_grad_(leaves == "all") for x in tensors)
        sinks = torch.zeros(2, requires_grad=True)
        results = CALLERS[caller](flash_attn_varlen_func, q, k, v, cu, cu, 6, 6, sinks=sinks, **ROWS_BEHIND[way])
        results = results if isinstance(results, tuple) else (results,)
        grads = [torch.ones_like(x) for x in results]
        grads[0][9:] = rest
        if len(grads) > 1:
            grads[1][:, 9:] = rest
        wanted = (sinks, q, k, v) if leaves == "all" else (sinks,)
        found.append(torch.autograd.grad(results, wanted, grads))
    for other in found[1:]:
        for has, wants in zip(other, found[0]):
            torch.testing.assert_close(has, wants, rtol=0, atol=0)
    dense = [flash_attn_func(*(x[None, a:b] for x in tensors), sinks=sinks) for a, b in ((0, 3), (3, 9))]
    if not ROWS_BEHIND[way].get("return_lse"):
        (want,) = torch.autograd.grad([x.sum() for x in dense], sinks)
        torch.testing.assert_close(found[0][0], want)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

CU = torch.tensor([0, 40, 150], dtype=torch.int32)
KEPT = {
    "sinks": lambda q, k, v, sinks: flash_attn_func(q, k, v, sinks=sinks),
    "mods": lambda q, k, v, sinks: flash_attn_func(q, k, v, sinks=sinks, attn_mask=numbers(150, 150) < 0.5),
    "lse": lambda q, k, v, sinks: sum(x.sum() for x in flash_attn_func(q, k, v, sinks=sinks, return_lse=True)),
    "dropout": lambda q, k, v, sinks: flash_attn_func(q, k, v, 0.3, sinks=sinks),
    "packed": lambda q, k, v, sinks: flash_attn_varlen_func(
        q[0], k[0], v[0], CU, CU, 150, 150, sinks=sinks, causal=True
    ),
    "packed mods": lambda q, k, v, sinks: flash_attn_varlen_func(
        q[0], k[0], v[0], CU, CU, 150, 150, sinks=sinks, attn_mask=ALL
    ),
}


@pytest.mark.parametrize("may_mutate", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_keeps_results_of_ops(name, may_mutate):
    """Sinks do not write into them."""

    def policy(context, op, *args, **options):
        return CheckpointPolicy.MUST_SAVE if "flash" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(
        create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=may_mutate
    )  # fmt: skip
    leaves = [numbers(1, 150, 2, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    leaves.append(torch.zeros(2, requires_grad=True))

    def gradients(run):
        torch.manual_seed(3)
        return torch.autograd.grad(run(*leaves).sin().sum(), leaves)

    want = gradients(KEPT[name])
    found = gradients(lambda *x: checkpoint(KEPT[name], *x, use_reentrant=False, context_fn=contexts))
    for has, wants in zip(found, want):
        torch.testing.assert_close(has, wants, rtol=1e-4, atol=1e-5)


FIRST_CALL = """
import functools, torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from flash_attn import flash_attn_varlen_func
lengths = torch.tensor([0, 10, 10, 40], dtype=torch.int32)
leaves = [torch.randn(size).requires_grad_() for size in ((40, 2, 16),) * 3 + ((2,), (3, 2, 30, 30))]
contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
def call(q, k, v, sinks, bias):
    out, lse = flash_attn_varlen_func(
        q, k, v, lengths, lengths, 30, 30, sinks=sinks, attn_bias=bias, return_lse=True
    )
    return out.sin().sum() + lse.cos().sum()
found = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts), leaves)
for has, wants in zip(found, torch.autograd.grad(call(*leaves), leaves)):
    torch.testing.assert_close(has, wants, rtol=1e-4, atol=1e-5)
"""


def test_a_checkpoint_of_a_first_call_keeps_no_result_of_its_tracer():
    """The repeated call knows its mod. Results kept while the mod was traced would come in place of others."""
    done = fresh_python.python(FIRST_CALL)
    assert done.returncode == 0, done.stderr


# ---- caches ---------------------------------------------------------------------------------------------------------


def cache_call(**options):
    """Arguments of a call that appends, and a function that says whether something was written."""
    caches = [numbers(2, 9, 2, 16, seed=i, dtype=torch.float32) for i in range(2)]
    before = [x.clone() for x in caches]
    q, new = numbers(2, 1, 4, 16, dtype=torch.float32), numbers(2, 1, 2, 16, dtype=torch.float32)
    return (q, *caches, new, new), lambda: not all(map(torch.equal, caches, before))


@pytest.mark.parametrize(
    "sinks, message",
    [(torch.zeros(4).to_sparse(), "sinks must be a dense tensor"), (torch.zeros(3), "must have the shape"),
     (torch.zeros(4, dtype=torch.int32), "must be floating")],
    ids=["sparse", "three", "int"],
)  # fmt: skip
def test_wrong_sinks_of_a_cache(sinks, message):
    """Nothing is appended then."""
    args, is_written = cache_call()
    with pytest.raises((RuntimeError, TypeError), match=message):
        flash_attn_with_kvcache(*args, cache_seqlens=4, sinks=sinks)
    assert not is_written()


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("caller", ["eager", "watched"])
def test_sinks_in_the_memory_of_a_written_cache(caller, cache):
    args, is_written = cache_call()
    sinks = args[1 if cache == "k_cache" else 2].view(-1)[:4]
    with pytest.raises(RuntimeError, match=f"{cache} is written and must not share memory with sinks, which is read"):
        CALLERS[caller](flash_attn_with_kvcache, *args, cache_seqlens=4, sinks=sinks)
    assert not is_written()
    flash_attn_with_kvcache(*args[:3], cache_seqlens=4, sinks=sinks)  # nothing is written here


def test_the_flag_of_a_cache_call():
    args, is_written = cache_call()
    with pytest.raises(TypeError, match="return_softmax_lse must be True or False; it is 'x'"):
        flash_attn_with_kvcache(*args, cache_seqlens=4, sinks=torch.zeros(4), return_softmax_lse="x")
    assert not is_written()


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_tangents_are_refused(name):
    """A step of decoding keeps those of sinks (test_transforms.py)."""
    args, is_written = cache_call()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(4), torch.ones(4))
        options = {"sinks": dual} if name == "sinks" else {"sinks": torch.zeros(4), "alibi_slopes": dual}
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            flash_attn_func(args[0], args[0], args[0], **options)
        if name == "slopes":
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                flash_attn_with_kvcache(*args, cache_seqlens=4, **options)
    assert not is_written()
