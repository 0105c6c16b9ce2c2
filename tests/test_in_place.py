"""Tensors that are written in place, as autograd must know them: caches, a given out, dq, dk, dv. Tests use the ops and
the direct functions.

Versions advance, leaves that require grad are refused in PyTorch's words, and a decode that drops gradients warns.
"""

import random
import warnings

import flash_attn_2_cuda as raw
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import _ops, flash_attn_func, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface

OPS = torch.ops.flash_attn
MASK = (0.3, False, -1, -1, 0.0)
ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not ON_GPU, reason="no GPU of 8.0 or newer"))]


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=DEVICES)
def tensors(request):
    def make(*shape):
        torch.manual_seed(0)
        return torch.randn(shape, device=request.param)

    return make


@pytest.fixture(params=["direct", "op"])
def route(request):
    """The direct functions refuse a call that a mode watches."""
    if request.param == "direct":
        yield
    else:
        with Watcher():
            yield


def versions(*tensors):
    return [x._version for x in tensors]


def append(q, caches, new):
    return flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=3)


def test_caches(tensors, route):
    q, new, caches = tensors(2, 1, 4, 16), tensors(2, 1, 2, 16), [tensors(2, 8, 2, 16) for _ in range(2)]
    flash_attn_with_kvcache(q, *caches, cache_seqlens=3)
    assert versions(q, new, *caches) == [0, 0, 0, 0]  # no tensor was written
    append(q, caches, new)
    assert versions(q, new, *caches) == [0, 0, 1, 1]


def test_a_cache_that_a_backward_needs(tensors, route):
    q, new, caches = tensors(2, 1, 4, 16), tensors(2, 1, 2, 16), [tensors(2, 8, 2, 16) for _ in range(2)]
    w = torch.ones_like(caches[0], requires_grad=True)
    y = (caches[0] * w).sum()
    append(q, caches, new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_given_out(tensors):
    q, k = tensors(2, 5, 4, 16), tensors(2, 7, 2, 16)
    out = torch.empty_like(q)
    OPS.fwd(q, k, k, out, 0.0, *MASK, None, False)
    raw.fwd(q, k, k, out, None, 0.0, *MASK, False, None)
    assert versions(q, k, out) == [0, 0, 2]
    part = tensors(3, 5, 4, 16)
    OPS.fwd(q, k, k, part[1:], 0.0, *MASK, None, False)
    assert part._version == 1  # the version counter belongs to the whole memory


@pytest.mark.parametrize("missing", [None, 0, 2])
def test_gradients(missing, tensors, route):
    q, k = tensors(2, 5, 4, 16), tensors(2, 7, 2, 16)
    out, lse, *_ = interface._flash_attn_forward(q, k, k, 0.0, *MASK, None, False)
    grads = [torch.empty_like(x) for x in (q, k, k)]
    wanted = [x for i, x in enumerate(grads) if i != missing]
    given = [x if i != missing else None for i, x in enumerate(grads)]
    interface._flash_attn_backward(out, q, k, k, out, lse, *given, 0.0, *MASK, None, False)
    assert versions(out, lse, q, k, *wanted) == [0] * 4 + [1] * len(wanted)


@pytest.mark.parametrize("is_view", [False, True])
def test_leaves_that_require_grad(is_view, tensors, route):
    """As in PyTorch, a write is an error with PyTorch's words while gradients are recorded."""

    def leaf(like):
        x = torch.zeros_like(like).requires_grad_()
        return x[:] if is_view else x

    words = (
        "a view of " if is_view else ""
    ) + "a leaf Variable that requires grad is being used in an in-place operation: "
    with pytest.raises(RuntimeError, match=words[:-2]):
        leaf(tensors(3)).zero_()
    q, k, new = tensors(2, 5, 4, 16), tensors(2, 7, 2, 16), tensors(2, 1, 2, 16)
    out, lse = torch.empty_like(q), tensors(2, 4, 5)
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    calls = {
        "k_cache": lambda: append(q, (leaf(k), k.clone()), new),
        "v_cache": lambda: append(q, (k.clone(), leaf(k)), new),
        "out": lambda: OPS.fwd(q, k, k, leaf(q), 0.0, *MASK, None, False),
        "dq": lambda: interface._flash_attn_backward(
            out, q, k, k, out, lse, leaf(q), *grads[1:], 0.0, *MASK, None, False
        ),
        "dk": lambda: interface._flash_attn_backward(
            out, q, k, k, out, lse, None, leaf(k), None, 0.0, *MASK, None, False
        ),
        "dv": lambda: interface._flash_attn_backward(
            out, q, k, k, out, lse, None, None, leaf(k), 0.0, *MASK, None, False
        ),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match=f"{words}{name} is written"):
            warnings.simplefilter("ignore")
            call()
        with torch.no_grad():
            call()


def test_a_computed_tensor_that_requires_grad(tensors):
    """Autograd would not see that the value is lost, so a result is never written to such a tensor."""
    q, k = tensors(2, 5, 4, 16), tensors(2, 7, 2, 16)
    lse, computed = tensors(2, 4, 5), [torch.zeros_like(x, requires_grad=True) * 1 for x in (q, k, k)]
    words = "is written and must not require grad while gradients are recorded: detach it, or use torch.no_grad"
    with pytest.raises(RuntimeError, match=f"out {words}"):
        OPS.fwd(q, k, k, computed[0], 0.0, *MASK, None, False)
    for i, name in enumerate(("dq", "dk", "dv")):
        given = [x if i == j else None for j, x in enumerate(computed)]
        with pytest.raises(RuntimeError, match=f"{name} {words}"):
            interface._flash_attn_backward(q, q, k, k, q, lse, *given, 0.0, *MASK, None, False)
    with torch.no_grad():
        OPS.fwd(q, k, k, computed[0], 0.0, *MASK, None, False)
    OPS.fwd(q, k, k, computed[0].detach(), 0.0, *MASK, None, False)


def test_tensors_of_inference_mode(tensors, route):
    """Tensors of inference mode have no version, and may be written outside of that mode."""
    q, new = tensors(2, 1, 4, 16), tensors(2, 1, 2, 16)
    with torch.inference_mode():
        caches = [torch.zeros_like(tensors(2, 8, 2, 16)) for _ in range(2)]
        append(q, caches, new)
    append(q, caches, 2 * new)
    assert torch.equal(caches[0][:, 3:4], 2 * new)


def test_dropped_gradients(tensors, route, monkeypatch):
    """One warning in a process names the way out. A call without gradients does not warn."""
    monkeypatch.setattr(_ops, "_has_warned", False)
    q, cache = tensors(2, 1, 4, 16).requires_grad_(), tensors(2, 8, 2, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            flash_attn_with_kvcache(q, cache, cache)
        flash_attn_with_kvcache(q.detach(), cache, cache)
    with pytest.warns(UserWarning, match="flash_attn_with_kvcache has no backward") as told:
        for _ in range(2):
            out = flash_attn_with_kvcache(q, cache, cache)
    assert len(told) == 1 and told[0].filename == __file__ and not out.requires_grad


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v"])
def test_any_input_may_require_grad(name, tensors, monkeypatch):
    monkeypatch.setattr(_ops, "_has_warned", False)
    inputs = {"q": tensors(2, 1, 4, 16), "k": tensors(2, 1, 2, 16), "v": tensors(2, 1, 2, 16)}
    inputs = {**inputs, "k_cache": tensors(2, 8, 2, 16), "v_cache": tensors(2, 8, 2, 16)}
    inputs[name] = inputs[name].requires_grad_() * 1  # not a leaf
    with pytest.warns(UserWarning, match="flash_attn_with_kvcache has no backward"):
        flash_attn_with_kvcache(**inputs, cache_seqlens=2)


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "alibi_slopes", "softcap", "sinks"])
def test_a_table_may_require_grad(name, tensors, monkeypatch):
    monkeypatch.setattr(_ops, "_has_warned", False)
    q, k, cache = tensors(2, 1, 4, 16), tensors(2, 1, 2, 16), tensors(2, 8, 2, 16)
    options = {x: torch.rand(8, 8) for x in ("rotary_cos", "rotary_sin")}
    options.update(alibi_slopes=torch.rand(4), softcap=torch.tensor(3.0))
    options.update({"sinks": torch.rand(4)} if name == "sinks" else {})
    options[name] = options[name].requires_grad_()
    with pytest.warns(UserWarning, match="flash_attn_with_kvcache has no backward"):
        flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=2, **options)


@pytest.mark.parametrize("wants", [False, True])
def test_dropped_gradients_of_a_compiled_call(wants, tensors, monkeypatch):
    monkeypatch.setattr(_ops, "_has_warned", False)
    q, cache = tensors(2, 1, 4, 16).requires_grad_(wants), tensors(2, 8, 2, 16)
    torch.compiler.reset()
    compiled = torch.compile(lambda q: flash_attn_with_kvcache(q, cache, cache), backend="eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled(q)
    assert ["has no backward" in str(warning.message) for warning in told] == [True] * wants


def test_training_writes_nothing_of_the_callers(tensors):
    q, k = tensors(2, 5, 4, 16).requires_grad_(), tensors(2, 7, 2, 16).requires_grad_()
    out = flash_attn_func(q, k, k)
    out.sum().backward()
    assert versions(q, k, out) == [0, 0, 0]


def test_what_is_written_shares_no_memory():
    """A written tensor must not share memory with a read tensor or with another written tensor. Numbers would be wrong
    silently."""
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    out, lse, *_ = raw.fwd(q, k, v, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    for x, name in ((k, "k"), (v, "v")):
        with pytest.raises(RuntimeError, match=f"out is written and must not share memory with {name}, which is read"):
            raw.fwd(q, k, v, x, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    there = raw.fwd(q.clone(), k, v, (held := q.clone()), None, 0.0, 0.25, False, -1, -1, 0.0, False, None)[0]
    assert there.data_ptr() == held.data_ptr() and torch.equal(there, out)
    held = q.clone()
    for x, given in ((held, held.view(1, 2, 40, 16).transpose(1, 2)), (held[:, :1].expand_as(q), held)):
        with pytest.raises(RuntimeError, match="out is written and must not share memory with q, unless it has q's"):
            raw.fwd(x, k, v, given, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    options = (None, 0.0, 0.25, False, -1, -1, 0.0, True, None, None)
    for given, said in (
        ((dq, dk, dk), "dk and dv are both written"),
        ((dq, dq, dv), "dq and dk are both written"),
        ((q, dk, dv), "dq is written and must not share memory with q, which is read"),
        ((dq, dk, out), "dv is written and must not share memory with out, which is read"),
    ):
        with pytest.raises(RuntimeError, match=said):
            raw.bwd(out, q, k, v, out, lse, *given, *options)
    dout = torch.empty_like(q)
    with pytest.raises(RuntimeError, match="dk is written and must not share memory with dout, which is read"):
        raw.bwd(dout, q, k, v, out, lse, dq, dout, dv, *options)
    with pytest.raises(RuntimeError, match="dq is written and must not overlap itself"):
        raw.bwd(dout, q, k, v, out, lse, dq[:, :, :1].expand_as(q), dk, dv, *options)


def forward_into(out, q, k, v):
    return raw.fwd(q, k, v, out, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)[0]


def test_parts_of_a_packed_tensor_share_no_memory():
    """The parts interleave: each lies between the rows of the others."""
    qkv = torch.randn(2, 9, 3, 4, 16)
    heads = torch.randn(2, 9, 8, 16)
    for q, k, v in (qkv.unbind(2), heads.split([4, 2, 2], 2)):
        expected = flash_attn_func(q, k, v, softmax_scale=0.25)
        assert torch.equal(forward_into(q, q, k, v), expected)
    dqkv, (q, k, v) = torch.empty_like(qkv), torch.randn(2, 9, 3, 4, 16).unbind(2)
    out, lse, *_ = raw.fwd(q, k, v, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
    options = (None, 0.0, 0.25, False, -1, -1, 0.0, True, None, None)
    raw.bwd(out, q, k, v, out, lse, *dqkv.unbind(2), *options)
    for ours, alone in zip(dqkv.unbind(2), raw.bwd(out, q, k, v, out, lse, None, None, None, *options)):
        assert torch.equal(ours, alone)


def test_a_part_is_found_wherever_it_begins():
    memory, q = torch.randn(1, 50, 2, 16), torch.randn(1, 40, 2, 16)
    for k, v, name in ((memory[:, 10:], q, "k"), (q, memory[:, 9:49], "v")):
        with pytest.raises(RuntimeError, match=f"out is written and must not share memory with {name}, which is read"):
            forward_into(memory[:, :40], q, k, v)
    with pytest.raises(RuntimeError, match="out is written and must not share memory with q, unless it has q's"):
        forward_into(memory[:, :40], memory[:, 1:41], q, q)
    with pytest.raises(RuntimeError, match="dk and dv are both written and must not share memory"):
        lse = torch.zeros(1, 2, 40)
        raw.bwd(q, q, q, q, q, lse, None, memory[:, :40], memory[:, 5:45], None, 0.0, 0.25, False, -1, -1, 0.0, True,
                None, None)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_overlap_is_exact(seed):
    """Random views of one memory. Sets of elements say whether two views share one, and whether a view overlaps
    itself."""
    r = random.Random(seed)
    room, size = 4096, (1, r.randrange(1, 5), r.randrange(1, 4), r.choice([1, 4, 8]))
    memory, numbers = torch.randn(room), torch.arange(room)

    def elements(view):
        return set(numbers.as_strided(*view).ravel().tolist())

    def view():
        row, head = r.choice([(64, 16), (16, 64), (r.randrange(8, 99), r.randrange(8, 99))])
        return size, (r.randrange(1, 200), row, head, 1), r.randrange(400)

    answers = []
    for _ in range(200):
        ours, theirs = view(), view()
        shares = bool(elements(ours) & elements(theirs))
        out, k, q = memory.as_strided(*ours), memory.as_strided(*theirs), torch.zeros(size)
        fault = "share memory with k" if shares else None
        if len(elements(ours)) < out.numel():
            fault = "overlap itself"
        if fault:
            with pytest.raises(RuntimeError, match=f"out is written and must not {fault}"):
                forward_into(out, q, k, q)
        else:
            forward_into(out, q, k, q)
        answers.append(fault)
    assert {None, "share memory with k"} <= set(answers)


@pytest.mark.parametrize("seed", range(20))
def test_overlap_of_a_tensor_with_itself_is_exact(seed):
    """Also with strides that are not nested, and interleave perhaps."""
    r = random.Random(seed)
    memory, numbers = torch.zeros(10**6), torch.arange(10**6)
    answers = []
    for _ in range(300):
        b, rows, h, d = r.randrange(1, 4), r.randrange(1, 6), r.randrange(1, 4), r.choice([1, 3, 8])
        strides = [r.choice([d, d + 1, 2 * d, h * d, rows * d, r.randrange(100), 2 * h * d]) for _ in range(3)]
        view = (b, rows, h, d), (*strides, 1)
        out, q = memory.as_strided(*view), torch.zeros(b, rows, h, d)
        overlaps = len(set(numbers.as_strided(*view).ravel().tolist())) < q.numel()
        if overlaps:
            with pytest.raises(
                RuntimeError, match="out is written and must not overlap itself; it has shape .* strides"
            ):
                forward_into(out, q, q, q)
        else:
            forward_into(out, q, q, q)
        answers.append(overlaps)
    assert {True, False} == set(answers)


def test_caches_that_overlap_themselves():
    q, new = torch.randn(1, 1, 2, 8), torch.randn(1, 2, 2, 8)
    windows, cache = torch.zeros(100).as_strided((1, 4, 2, 8), (64, 8, 4, 1)), torch.zeros(1, 4, 2, 8)
    for name, caches in (("k_cache", (windows, cache)), ("v_cache", (cache, windows))):
        with pytest.raises(RuntimeError, match=f"{name} is written and must not overlap itself"):
            flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=0)
    assert not windows.any() and not cache.any()
    assert torch.equal(flash_attn_with_kvcache(q, windows, windows), torch.zeros_like(q))  # nothing is written
    pages = torch.zeros(4, 8, 2, 2, 8).transpose(2, 3)[..., 0, :]  # keys beside values
    flash_attn_with_kvcache(
        q, pages, pages.clone(), new, -new, cache_seqlens=0, block_table=torch.tensor([[2]], dtype=torch.int32)
    )
    assert torch.equal(pages[2, :2], new[0])


def negated(x):
    """``x`` as a view. Only a flag says that its memory holds the negatives of its elements."""
    return torch._neg_view(x.neg())


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache_with_the_negative_bit(name, tensors):
    q, new = tensors(1, 1, 2, 16), tensors(1, 2, 2, 16)
    caches = {"k_cache": tensors(1, 5, 2, 16), "v_cache": tensors(1, 5, 2, 16) + 1}
    before = {key: x.clone() for key, x in caches.items()}
    caches[name] = negated(caches[name])
    with pytest.raises(RuntimeError, match=f"^{name} is written and must not have the negative bit: call resolve_neg"):
        flash_attn_with_kvcache(q, **caches, k=new, v=new, cache_seqlens=1)
    assert all(torch.equal(caches[key], x) for key, x in before.items())
    got = flash_attn_with_kvcache(q, **caches, cache_seqlens=3)  # nothing is written
    assert torch.equal(got, flash_attn_with_kvcache(q, **before, cache_seqlens=3))


@pytest.mark.parametrize("name", ["q", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"])
def test_inputs_with_the_negative_bit(name, tensors):
    q, new, cos = tensors(1, 1, 2, 16), tensors(1, 2, 2, 16), tensors(5, 8)
    given = {
        "q": q, "k": new, "v": -new, "rotary_cos": cos, "rotary_sin": cos.flip(0),
        "cache_seqlens": torch.tensor([2], dtype=torch.int32, device=q.device),
    }  # fmt: skip
    mine, want = ([tensors(1, 5, 2, 16), tensors(1, 5, 2, 16)] for _ in range(2))
    got = flash_attn_with_kvcache(k_cache=mine[0], v_cache=mine[1], **{**given, name: negated(given[name])})
    assert torch.equal(got, flash_attn_with_kvcache(k_cache=want[0], v_cache=want[1], **given))
    assert all(map(torch.equal, mine, want))


def test_results_with_the_negative_bit(tensors):
    q = tensors(1, 3, 2, 16)
    for name, call in {
        "out": lambda x: raw.fwd(q, q, q, x, None, 0.0, 0.25, False, -1, -1, 0.0, False, None),
        "dk": lambda x: OPS._flash_attn_backward(
            q, q, q, q, q, torch.zeros(1, 2, 3, device=q.device), None, x, None, 0.0, *MASK, None, False
        ),
    }.items():
        with pytest.raises(RuntimeError, match=f"^{name} is written and must not have the negative bit"):
            call(negated(q.clone()))


def test_a_pool_of_pages_for_keys_and_values():
    """The block table tells the pages of keys from those of values. On the CPU its numbers are checked."""
    torch.manual_seed(0)
    pool, q, (k, v) = torch.randn(20, 4, 2, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 2, 1, 2, 16)
    lengths, table = torch.tensor([5, 3], dtype=torch.int32), torch.tensor([[4, 8], [0, 12]], dtype=torch.int32)
    for apart in (1, 2, -1, -3):
        mine, caches = pool.clone(), (pool[3:-4].clone(), pool[3 + apart : 16 + apart].clone())
        options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        out = flash_attn_with_kvcache(q, mine[3:-4], mine[3 + apart : 16 + apart], k, v, **options)
        assert torch.equal(out, flash_attn_with_kvcache(q, *caches, k, v, **options))
        for number, row, n in ((8, 1, 0), (0, 3, 1)):
            assert torch.equal(mine[3 + number, row], k[n, 0]) and torch.equal(mine[3 + apart + number, row], v[n, 0])
    with pytest.raises(
        RuntimeError, match=r"gives the memory of page 8 of k_cache to values, too: v_cache lies 4 pages"
    ):
        flash_attn_with_kvcache(q, pool[:13], pool[4:17], k, v, **options)
    half_a_page_behind = pool.view(-1, 2, 16)[2:54].view(13, 4, 2, 16)
    with pytest.raises(RuntimeError, match="k_cache and v_cache are both written and must not share memory"):
        flash_attn_with_kvcache(q, pool[:13], half_a_page_behind, k, v, **options)
    with pytest.raises(RuntimeError, match="k_cache and v_cache are both written and must not share memory"):
        flash_attn_with_kvcache(q, pool[:2], pool[1:3], k, v, cache_seqlens=lengths - 3)


def test_what_is_appended_does_not_lie_in_the_cache():
    caches = [torch.randn(1, 8, 2, 16) for _ in range(2)]
    q, k, v = (torch.randn(1, 1, 2, 16) for _ in range(3))
    for name, given in (
        ("k", (q, *caches, caches[0][:, :1], v)),
        ("k", (q, *caches, caches[1][:, 7:], v)),
        ("v", (q, *caches, k, caches[1][:, :1])),
        ("q", (caches[1][:, 5:6], *caches, k, v)),
    ):
        with pytest.raises(RuntimeError, match=f"_cache is written and must not share memory with {name}, which is"):
            flash_attn_with_kvcache(*given, cache_seqlens=3)


def test_one_cache_for_keys_and_values():
    """One cache for both is correct if both get the same keys, or if nothing is written."""
    cache, new = torch.randn(1, 40, 2, 16), torch.randn(1, 3, 2, 16)
    q = torch.randn(1, 3, 2, 16)
    want = flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=20)
    assert torch.equal(flash_attn_with_kvcache(q, cache, cache, cache_seqlens=20), want)
    want = flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, cache_seqlens=20)
    assert torch.equal(flash_attn_with_kvcache(q, held := cache.clone(), held, new, new, cache_seqlens=20), want)
    for caches, appended in (((cache, cache), (new, new.clone())), ((cache[:, :30], cache[:, 5:35]), (new, new))):
        with pytest.raises(RuntimeError, match="k_cache and v_cache are both written and must not share memory"):
            flash_attn_with_kvcache(q, *caches, *appended, cache_seqlens=20)
    both = torch.randn(1, 40, 4, 16)  # keys and values, side by side in every row
    flash_attn_with_kvcache(q, both[:, :, :2], both[:, :, 2:], new, new, cache_seqlens=20)
    assert torch.equal(both[:, 20:23], torch.cat((new, new), 2))


def test_a_compiled_call_refuses_a_leaf_too():
    q, new = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    leaf, cache = torch.randn(1, 20, 2, 16, requires_grad=True), torch.randn(1, 20, 2, 16)
    append = torch.compile(
        lambda: flash_attn_with_kvcache(q, cache, leaf, new, new, cache_seqlens=3), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is .* v_cache is written"):
        append()
    with torch.no_grad():
        assert append().shape == q.shape
