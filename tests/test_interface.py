"""The Python interface: names and orders that clients rely on, and the work before and after an op.

The results of the ops are tested elsewhere. Here results are compared with another way to make the same call.
"""

import inspect

import flash_attn_2_cuda
import pytest
import torch
from harness import offsets, randn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flash_attn
from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn import flash_attn_interface as interface
from flash_attn.flex_attention import flex_attention

# ---- names ---------------------------------------------------------------------------------------------------------

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
EXTENDED = "*, attn_bias=None, attn_mask=None, sinks=None, return_lse=False, return_max_logits=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
PASS = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
SAVED = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {OPTIONS}, {EXTENDED}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}, {EXTENDED}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}, {EXTENDED}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {OPTIONS}, block_table=None, {EXTENDED}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {OPTIONS}, {EXTENDED}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}, {EXTENDED}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False, *, sinks=None"
    ),
    "_flash_attn_forward": f"q, k, v, {PASS}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": f"{SAVED}, {PASS}, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": f"{SAVED}, {LENGTHS}, {PASS}, deterministic, rng_state=None, zero_tensors=False",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    function = getattr(interface, name)
    assert inspect.isfunction(function)
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=empty)) == f"({SIGNATURES[name]})"
    assert function.__doc__
    if not name.startswith("_"):
        assert getattr(flash_attn, name) is function and name in flash_attn.__all__


T_CU = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
T_PASS = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes"
)
T_SAVED = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, "
    "Tensor(c!)? dv"
)
T_VARLEN = (
    f"{T_CU}, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    "SymInt num_splits=0"
)
SCHEMAS = {
    "_flash_attn_forward": (
        f"(Tensor q, Tensor k, Tensor v, {T_PASS}, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "_flash_attn_varlen_forward": f"(Tensor q, Tensor k, Tensor v, {T_VARLEN}) -> (Tensor, Tensor, Tensor, Tensor)",
    "_flash_attn_backward": f"({T_SAVED}, {T_PASS}, bool deterministic, Tensor? rng_state=None) -> Tensor",
    "_flash_attn_varlen_backward": (
        f"({T_SAVED}, {T_CU}, {T_PASS}, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor"
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(name):
    packet = getattr(torch.ops.flash_attn, name)
    assert str(packet.default._schema) == f"flash_attn::{name}{SCHEMAS[name]}"
    assert getattr(interface, f"_wrapped{name}") is packet


def test_other_names():
    assert interface.flash_attn_gpu is flash_attn_2_cuda
    assert interface.USE_TRITON_ROCM is False
    assert [interface.round_multiple(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
    for device in (torch.device("cpu"), torch.device("cuda"), "cuda:0"):  # the device itself is not asked
        assert interface._get_block_size_n(device, 64, True, False) >= 1 << 20


# ---- the same call in another form ---------------------------------------------------------------------------------


def run(function, tensors, *args, dout=None, **options):
    """Results and gradients, with the same dropout mask and the same dout for the same shapes."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(0)
    results = function(*tensors, *args, **options)
    results = results if isinstance(results, tuple) else (results,)
    dout = randn(*results[0].shape) if dout is None else dout
    grads = torch.autograd.grad(results[0], tensors, dout)
    return [x.detach() for x in results], list(grads)


def assert_same(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert torch.equal(x, y)


LONGEST = 7
CU_Q, CU_K = offsets([5, 0, 7]), offsets([5, 4, 3])
EVERYTHING = {
    "dropout_p": 0.3, "softmax_scale": 0.3, "causal": True, "window_size": (3, -1), "softcap": 5.0,
    "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "deterministic": True, "return_attn_probs": True,
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_packed_forms_are_the_same_call(varlen, options):
    rows = (12,) if varlen else (2, 6)
    q, kv, qkv = randn(*rows, 4, 16), randn(*rows, 2, 2, 16), randn(*rows, 3, 4, 16)
    lengths = (CU_Q, CU_K, LONGEST, LONGEST) if varlen else ()
    unpacked = flash_attn_varlen_func if varlen else flash_attn_func

    k, v = kv.unbind(-3)
    want, (dq, dk, dv) = run(unpacked, (q, k, v), *lengths, **options)
    kvpacked = flash_attn_varlen_kvpacked_func if varlen else flash_attn_kvpacked_func
    got, grads = run(kvpacked, (q, kv), *lengths, **options)
    assert_same([*got, *grads], [*want, dq, torch.stack((dk, dv), -3)])

    want, grads = run(unpacked, qkv.unbind(-3), *((CU_Q, CU_Q, LONGEST, LONGEST) if varlen else ()), **options)
    qkvpacked = flash_attn_varlen_qkvpacked_func if varlen else flash_attn_qkvpacked_func
    got, (dqkv,) = run(qkvpacked, (qkv,), *((CU_Q, LONGEST) if varlen else ()), **options)
    assert_same([*got, dqkv], [*want, torch.stack(grads, -3)])


@pytest.mark.parametrize("name", ["", "KVPacked", "QKVPacked", "Varlen", "VarlenKVPacked", "VarlenQKVPacked"])
def test_autograd_classes(name):
    varlen = "Varlen" in name
    rows = (12,) if varlen else (2, 6)
    if name.endswith("QKVPacked"):
        tensors, lengths = [randn(*rows, 3, 4, 16)], (CU_Q, LONGEST)
    else:
        kv = randn(*rows, 2, 2, 16)
        tensors = [randn(*rows, 4, 16), *([kv] if name.endswith("KVPacked") else kv.unbind(-3))]
        lengths = (CU_Q, CU_K, LONGEST, LONGEST)
    lengths = lengths if varlen else ()
    public = {"": "", "KVPacked": "kvpacked_", "QKVPacked": "qkvpacked_"}[name.replace("Varlen", "")]
    function = getattr(interface, f"flash_attn_{'varlen_' if varlen else ''}{public}func")
    want, want_grads = run(function, tensors, *lengths, **EVERYTHING)
    tail = (None, True) if name == "Varlen" else (True,)  # (block_table,) is_grad_enabled
    apply = getattr(interface, f"FlashAttn{name}Func").apply
    got, grads = run(apply, tensors, *lengths, *EVERYTHING.values(), *tail)
    assert_same([*got, *grads], [*want, *want_grads])


@pytest.mark.parametrize(
    "window",
    [[3, 1], torch.tensor([3, 1]), (torch.tensor(3), torch.tensor(1)), torch.Size((3, 1))],
    ids=["list", "tensor", "tensors", "size"],
)
def test_window_size_of_any_kind(window):
    tensors = [randn(1, 9, 2, 16)] * 3
    want = run(flash_attn_func, tensors, window_size=(3, 1))
    got = run(flash_attn_func, tensors, window_size=window)
    assert_same([*got[0], *got[1]], [*want[0], *want[1]])
    q = tensors[0]
    assert torch.equal(flash_attn_with_kvcache(q, q, q, window_size=window), want[0][0])


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), [], 4, None, torch.tensor(1)])
def test_window_size_that_is_no_pair(window):
    q = randn(1, 4, 2, 16)
    for call in (flash_attn_func, flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=r"window_size must be \(left, right\), two integers; it is"):
            call(q, q, q, window_size=window)


def test_max_seqlen_as_a_tensor():
    q, kv = randn(12, 4, 16), randn(12, 2, 2, 16)
    longest = torch.tensor(LONGEST)
    want = run(flash_attn_varlen_kvpacked_func, (q, kv), CU_Q, CU_K, LONGEST, LONGEST)
    for m in (longest, longest.to(torch.int32), longest[None]):
        got = run(flash_attn_varlen_kvpacked_func, (q, kv), CU_Q, CU_K, m, m)
        assert_same([*got[0], *got[1]], [*want[0], *want[1]])
    k, v = kv.unbind(1)
    out = interface._flash_attn_varlen_forward(q, k, v, CU_Q, CU_K, longest, longest, 0.0, 0.25, False)[0]
    assert torch.equal(out, want[0][0])


def test_default_scale_is_of_the_head_dim():
    for d in (1, 7, 16, 33):
        q, k, v = randn(3, 1, 5, 2, d)
        assert torch.equal(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=d**-0.5))
        assert torch.equal(flash_attn_with_kvcache(q, k, v), flash_attn_func(q, k, v))


def test_int_cache_seqlens_is_every_sequence_of_q():
    q, cache, new = randn(3, 1, 2, 16), randn(2, 5, 8, 2, 16), randn(2, 3, 1, 2, 16)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    results = []
    for lengths in (3, torch.full((3,), 3, dtype=torch.int32)):
        k_cache, v_cache = cache.clone()
        options = {"cache_seqlens": lengths, "cache_batch_idx": rows, "return_softmax_lse": True}
        results.append([*flash_attn_with_kvcache(q, k_cache, v_cache, *new, **options), k_cache, v_cache])
    assert_same(*results)
    assert torch.equal(results[0][2][rows.long(), 3], new[0, :, 0])


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_caches_are_never_copied(name):
    caches = {"k_cache": randn(1, 8, 2, 16), "v_cache": randn(1, 8, 2, 16)}
    caches[name] = randn(1, 8, 16, 2).transpose(2, 3)
    with pytest.raises(AssertionError, match=f"{name} must have contiguous last dimension"):
        flash_attn_with_kvcache(randn(1, 1, 2, 16), **caches)


# ---- memory --------------------------------------------------------------------------------------------------------


def torn(x):
    """The same values, with a last dimension that is not contiguous."""
    return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_a_last_dimension_that_is_not_contiguous_is_copied():
    q, k, v, qkv = randn(1, 5, 2, 16), randn(1, 6, 2, 16), randn(1, 6, 2, 16), randn(1, 5, 3, 2, 16)
    for function, tensors in ((flash_attn_func, (q, k, v)), (flash_attn_qkvpacked_func, (qkv,))):
        want, want_grads = run(function, tensors, dout=q)
        got, grads = run(function, [torn(x) for x in tensors], dout=torn(q))
        assert_same([*got, *grads], [*want, *want_grads])
    assert torch.equal(flash_attn_with_kvcache(torn(q), k, v), flash_attn_with_kvcache(q, k, v))


def test_the_private_functions_copy_too():
    q, k, v, dout = randn(4, 1, 5, 2, 16)
    mask = (False, -1, -1, 0.0, None)
    (want,), want_grads = run(flash_attn_func, (q, k, v), dout=dout)
    out, lse, *_ = interface._flash_attn_forward(torn(q), torn(k), torn(v), 0.0, 0.25, *mask, False)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(*map(torn, (dout, q, k, v, out)), lse, *grads, 0.0, 0.25, *mask, False)
    assert_same([out, *grads], [want, *want_grads])


def test_results_and_gradients_are_laid_out_like_the_inputs():
    q, k, v = heads_first(randn(2, 5, 4, 16)), heads_first(randn(2, 6, 2, 16)), randn(2, 6, 2, 16)
    (out, lse, s_dmask), grads = run(flash_attn_func, (q, k, v), return_attn_probs=True)
    assert out.stride() == q.stride() and [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]
    assert lse.shape == (2, 4, 5) and lse.is_contiguous() and lse.dtype == torch.float32
    assert s_dmask.shape == (0,) and s_dmask.dtype == q.dtype
    part = randn(2, 5, 3, 4, 16)[:, :, 1]
    assert flash_attn_func(part, k, v).is_contiguous()
    last_outside = randn(2, 16, 5, 4).permute(0, 2, 3, 1)
    assert flash_attn_func(last_outside, k, v).is_contiguous()


def test_overlapping_rows_have_results_and_gradients_apart():
    """Windows of one sequence. ``torch.empty_like`` would give the result another last dimension."""
    q, k, v = (randn(400 + i).as_strided((1, 5, 2, 16), (0, 1, 1, 1)) for i in range(3))
    assert torch.empty_like(q).stride(-1) != 1
    want, want_grads = run(flash_attn_func, [x.contiguous() for x in (q, k, v)])
    got, grads = run(flash_attn_func, (q, k, v))
    assert_same([*got, *grads], [*want, *want_grads])
    with Ops():
        assert_same([flash_attn_with_kvcache(q, k, v)], want)


class Ops(TorchDispatchMode):
    """Records the ops that run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def names(self):
        return [func.name().split("::")[1].split(".")[0] for func, _ in self.calls]


def short_calls():
    """Calls without dropout or gradients, and the op that watchers see for each."""
    q, k, v, rows = randn(2, 5, 4, 16), randn(2, 6, 2, 16), randn(2, 6, 2, 16), randn(9, 4, 16)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    slopes = torch.rand(4)
    dense, varlen = "_flash_attn_forward", "_flash_attn_varlen_forward"
    return [
        (dense, lambda: flash_attn_func(q, k, v)),
        (dense, lambda: flash_attn_func(q, k, v, softmax_scale=0.3, window_size=[2, 0], softcap=3.0)),
        (dense, lambda: flash_attn_func(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2), causal=True)),
        (dense, lambda: flash_attn_func(q.mT.contiguous().mT, k, v, alibi_slopes=slopes)),  # q is copied, by the op
        (dense, lambda: flash_attn_func(q, k, v, return_attn_probs=True)),
        (dense, lambda: interface._flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, slopes, False)),
        (varlen, lambda: flash_attn_varlen_func(rows, rows, rows, cu, cu, 5, 5, causal=True)),
        (varlen, lambda: flash_attn_varlen_func(rows, rows, rows, cu, cu, 5, 5, return_attn_probs=True)),
        (varlen, lambda: interface._flash_attn_varlen_forward(rows, rows, rows, cu, cu, 5, 5, 0.0, 0.25, False)),
        (dense, lambda: flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), causal=True)),
        (dense, lambda: flash_attn_func(negative(q), negative(k), negative(v))),
    ]


def negative(x):
    """``-x`` as a view. Only a flag says that its elements are negated."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


@pytest.mark.parametrize("i", range(len(short_calls())))
def test_watched_calls_are_the_same_calls_by_the_name_of_the_op(i):
    torch.manual_seed(0)
    name, call = short_calls()[i]
    want = call()
    with Ops() as ops:
        got = call()
    assert ops.names().count(name) == 1 and not [
        x for x in ops.names() if x.endswith(("attention", "_forward")) and x != name
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = call()
    assert [event.name for event in profile.events()].count(f"flash_attn::{name}") == 1
    for results in (got, profiled):
        for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (results, want))):
            assert x.shape == y.shape and x.stride() == y.stride() and torch.equal(x, y)


@pytest.mark.parametrize(
    "function",
    [
        flash_attn_qkvpacked_func,
        lambda qkv: flash_attn_func(*qkv.unbind(2), alibi_slopes=torch.tensor([0.1, 0.2])),
        lambda qkv: flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), offsets([5]), offsets([5]), 5, 5)[None],
    ],
    ids=["packed", "slopes", "varlen"],
)
def test_a_checkpoint_may_be_watched_when_it_repeats(function):
    """Slopes and lengths are saved last. The recomputation must save the same tensors at these places."""
    qkv = randn(1, 5, 3, 2, 16).requires_grad_()
    want = run(function, (qkv,), dout=torch.ones(1, 5, 2, 16))[1][0]
    out = checkpoint(function, qkv, use_reentrant=False)
    with Ops() as ops:
        (got,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert torch.equal(got, want)
    assert sum(name in ("_flash_attn_forward", "_flash_attn_varlen_forward") for name in ops.names()) == 1


def test_unowned_rows_of_the_private_varlen_forward_are_zero():
    x = randn(9, 2, 16)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    for watched in (False, True):
        torch.full_like(x, float("nan"))  # the allocator returns this memory next
        with Ops() if watched else torch.no_grad():
            out, lse, *_ = interface._flash_attn_varlen_forward(x, x, x, cu, cu, 4, 4, 0.0, 0.25, False)
        assert torch.all(out[4:] == 0) and torch.all(lse[:, 4:] == float("-inf"))


@pytest.mark.parametrize("packed", [flash_attn_qkvpacked_func, flash_attn_kvpacked_func])
def test_a_packed_gradient_is_written_in_place(packed):
    tensors = [randn(1, 5, 2, 16), randn(1, 5, 2, 2, 16)]
    if packed is flash_attn_qkvpacked_func:
        tensors = [randn(1, 5, 3, 2, 16)]
    tensors = [x.requires_grad_() for x in tensors]
    out = packed(*tensors)
    dout = torch.ones_like(out)
    with Ops() as ops:
        grads = torch.autograd.grad(out, tensors, dout)
    assert set(ops.names()) <= {"empty_like", "select", "_flash_attn_backward", "detach"}  # no op copies
    (args,) = [args for func, args in ops.calls if "backward" in func.name()]
    packed_grad = grads[-1]
    assert args[8].untyped_storage().data_ptr() == packed_grad.untyped_storage().data_ptr()


def test_a_gradient_that_nobody_needs_is_not_computed():
    q, k, v = randn(3, 1, 5, 2, 16)
    k.requires_grad_()
    out = flash_attn_func(q, k, v)
    with Ops() as ops:
        out.sum().backward()
    (args,) = [args for func, args in ops.calls if "backward" in func.name()]
    assert args[6] is None and args[7] is not None and args[8] is None
    assert q.grad is None and v.grad is None
    assert torch.equal(k.grad, run(flash_attn_func, (q, k, v), dout=torch.ones_like(out))[1][1])


def saved_by(call):
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return saved


def test_what_is_saved_for_backward():
    q, k, v = randn(3, 1, 512, 2, 16)

    def without_grad():
        with torch.no_grad():
            flash_attn_func(q.requires_grad_(), k, v)

    assert saved_by(lambda: flash_attn_func(q, k, v)) == []
    assert saved_by(without_grad) == []
    saved = saved_by(lambda: flash_attn_func(q.requires_grad_(), k, v, causal=True))
    assert sum(x.numel() for x in saved) == 4 * q.numel() + 2 * 512  # q, k, v, out; lse
    qkv = randn(1, 512, 3, 2, 16).requires_grad_()
    assert sum(x.numel() for x in saved_by(lambda: flash_attn_qkvpacked_func(qkv))) == qkv.numel() * 4 // 3 + 1024
    saved = saved_by(lambda: flash_attn_qkvpacked_func(qkv, 0.5))
    assert sum(x.numel() for x in saved) == qkv.numel() * 4 // 3 + 1024 + 2  # and rng_state


# ---- autograd ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("globally", [False, True])
def test_deterministic_reaches_the_backward(globally):
    q = randn(1, 5, 2, 16).requires_grad_()
    torch.use_deterministic_algorithms(globally)
    try:
        out = flash_attn_func(q, q, q, deterministic=not globally)
    finally:
        torch.use_deterministic_algorithms(False)
    with Ops() as ops:
        out.sum().backward()
    (args,) = [args for func, args in ops.calls if "backward" in func.name()]
    assert args[16] is True


def test_only_out_carries_a_gradient():
    q = randn(1, 5, 2, 16).requires_grad_()
    out, lse, _ = flash_attn_func(q, q, q, return_attn_probs=True)
    want = torch.autograd.grad(out.sum(), q, retain_graph=True)
    assert_same(torch.autograd.grad(out.sum() + lse.sum(), q), want)


@pytest.mark.parametrize("dout_requires_grad", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: flash_attn_func(x, x, x),
        lambda x: flash_attn_func(x, x, x, dropout_p=0.1),
        lambda x: flash_attn_qkvpacked_func(torch.stack((x, x, x), 2)),
        lambda x: torch.ops.flash_attn._flash_attn_forward(x, x, x, 0.0, 0.25, False, -1, -1, 0.0, None, False)[0],
        lambda x: flash_attn_varlen_func(x[0], x[0], x[0], CU_Q, CU_Q, LONGEST, LONGEST)[None],
        lambda x: checkpoint(lambda x: flash_attn_func(x, x, x), x, use_reentrant=False),
        lambda x: flash_attn_func(x, x, x, attn_bias=torch.ones(12, 12)),
        lambda x: flex_attention(x, x, x),
        torch.compile(lambda x: flex_attention(x, x, x, lambda s, b, h, i, j: s + j), backend="eager"),
    ],
    ids=["dense", "dropout", "packed", "op", "varlen", "checkpoint", "bias", "flex", "flex in a graph"],
)
def test_second_derivatives_are_refused(function, dout_requires_grad):
    """The error also comes if only weights before the attention need gradients, as in a gradient penalty."""
    x, weight = randn(1, 12, 2, 16).requires_grad_(), randn(16, 16).requires_grad_()
    dout = randn(1, 12, 2, 16).requires_grad_(dout_requires_grad)
    torch.manual_seed(0)
    (dx,) = torch.autograd.grad(function(x @ weight), x, dout, create_graph=True)
    torch.manual_seed(0)
    assert torch.equal(dx, *torch.autograd.grad(function(x @ weight), x, dout))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(dx.square().sum(), weight)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: flash_attn_func(x, x, x),
        lambda x: flash_attn_qkvpacked_func(torch.stack((x, x, x), 2)),
        lambda x: flash_attn_varlen_func(x[0], x[0], x[0], CU_Q, CU_Q, LONGEST, LONGEST),
        lambda x: flash_attn_with_kvcache(x, x.detach(), x.detach()),
        lambda x: flash_attn_with_kvcache(x[:, :1], randn(1, 20, 2, 16), randn(1, 20, 2, 16), x, x, cache_seqlens=3),
        lambda x: interface._flash_attn_forward(x, x, x, 0.0, 0.25, False, -1, -1, 0.0, None, False),
    ],
    ids=["dense", "packed", "varlen", "cache", "append", "private"],
)
def test_forward_derivatives_are_refused(function):
    x = randn(1, 12, 2, 16)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        function(forward_ad.make_dual(x, x))


def test_ops_that_write_into_given_results_have_no_gradients():
    """Autograd accepts these ops. It neither warns nor looks for a backward."""
    q, out = randn(1, 5, 2, 16).requires_grad_(), torch.empty(1, 5, 2, 16)
    mask, ops = (0.25, False, -1, -1, 0.0), torch.ops.flash_attn
    results = [
        *ops.fwd(q, q, q, out, 0.0, *mask, None, False),
        *ops.varlen_fwd(q[0], q[0], q[0], out[0], offsets([5]), offsets([5]), 5, 5, 0.0, *mask),
        ops.fwd_kvcache(q, q, q, *[None] * 9, out, *mask, True, 0),
    ]
    assert not any(x.requires_grad for x in (out, *results))


def test_kvcache_carries_no_gradient():
    q, cache = randn(1, 1, 2, 16).requires_grad_(), randn(1, 8, 2, 16).requires_grad_()
    out, lse = flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_the_ops_themselves_are_differentiable(varlen):
    q, k, v = randn(3, 12, 4, 16) if varlen else randn(3, 1, 12, 4, 16)
    lengths = (CU_Q, CU_K, LONGEST, LONGEST) if varlen else ()
    function = flash_attn_varlen_func if varlen else flash_attn_func
    private = interface._flash_attn_varlen_forward if varlen else interface._flash_attn_forward
    want, want_grads = run(function, (q, k, v), *lengths, 0.2, 0.25, True, return_attn_probs=True)
    got, grads = run(private, (q, k, v), *lengths, 0.2, 0.25, True, -1, 0, 0.0, None, True)
    assert_same([*got[:3], *grads], [*want, *want_grads])


def test_the_varlen_op_refuses_gradients_it_does_not_have():
    q = randn(5, 2, 16).requires_grad_()
    cu = offsets([5])
    with pytest.raises(RuntimeError, match="no gradients with leftpad_k or seqused_k"):
        interface._flash_attn_varlen_forward(
            q, q, q, cu, cu, 5, 5, 0.0, 0.25, False, seqused_k=torch.tensor([3], dtype=torch.int32)
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_the_dropout(reentrant):
    def block(x):
        return flash_attn_qkvpacked_func(x.sin(), 0.4, causal=True)

    def checkpointed(x):
        return checkpoint(block, x, use_reentrant=reentrant)

    def backward(function):
        qkv = randn(2, 6, 3, 2, 16).requires_grad_()
        torch.manual_seed(0)
        out = function(qkv)
        torch.rand(1)  # another draw comes before the backward
        out.backward(randn(*out.shape))
        return out.detach(), qkv.grad

    assert_same(backward(checkpointed), backward(block))


def test_selective_checkpoint_can_name_the_op():
    def policy():
        return create_selective_checkpoint_contexts([torch.ops.flash_attn._flash_attn_forward.default])

    def block(x):
        return flash_attn_qkvpacked_func(x.sin(), 0.4)

    def checkpointed(x):
        return checkpoint(block, x, use_reentrant=False, context_fn=policy)

    qkv = randn(2, 6, 3, 2, 16)
    want = run(block, (qkv,))
    with Ops() as ops:
        got = run(checkpointed, (qkv,))
    assert_same([*got[0], *got[1]], [*want[0], *want[1]])
    assert ops.names().count("_flash_attn_forward") == 1 and ops.names().count("sin") == 2


# ---- before the checks of an op ------------------------------------------------------------------------------------

TAIL = (0.0, None, False, (-1, -1), 0.0, None, False, False, True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: flash_attn_qkvpacked_func(x), "qkv must have 5 dimensions .*it has 4"),
        (lambda x: interface.FlashAttnQKVPackedFunc.apply(x, *TAIL), "qkv must have 5 dimensions .*it has 4"),
        (lambda x: flash_attn_qkvpacked_func(x[None]), r"qkv must have shape .*3, .*it has \(1, 2, 4, 3, 16\)"),
        (lambda x: flash_attn_kvpacked_func(x, x), "kv must have 5 dimensions .*it has 4"),
        (lambda x: flash_attn_kvpacked_func(x, x[None]), r"kv must have shape .*2, .*it has \(1, 2, 4, 3, 16\)"),
        (lambda x: flash_attn_varlen_qkvpacked_func(x[0], CU_Q, 7), "qkv must have 4 dimensions .*it has 3"),
        (lambda x: flash_attn_varlen_qkvpacked_func(x, CU_Q, 7), r"qkv must have shape .*3, .*it has \(2, 4, 3, 16\)"),
        (lambda x: flash_attn_varlen_kvpacked_func(x[0], x[0], CU_Q, CU_Q, 7, 7), "kv must have 4 dimensions"),
        (lambda x: flash_attn_func(x[0], x[0], x[0]), "q must have 4 dimensions .*it has 3"),
        (lambda x: flash_attn_func(x.sum(), x, x), "q must have 4 dimensions .*it has 0"),
        (lambda x: flash_attn_with_kvcache(x.sum(), x, x), "q must have 4 dimensions .*it has 0"),
        (lambda x: flash_attn_with_kvcache(x, x.sum(), x), "k_cache must have 4 dimensions .*it has 0"),
    ],
)
def test_wrong_ranks(call, words):
    with pytest.raises(RuntimeError, match=words):
        call(randn(2, 4, 3, 16))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: flash_attn_func(None, x, x), "q"),
        (lambda x: flash_attn_func(x, x.tolist(), x), "k"),
        (lambda x: flash_attn_func(x, x, None), "v"),
        (lambda x: flash_attn_kvpacked_func(x, None), "kv"),
        (lambda x: flash_attn_qkvpacked_func(None), "qkv"),
        (lambda x: flash_attn_varlen_qkvpacked_func(None, CU_Q, 7), "qkv"),
        (lambda x: flash_attn_with_kvcache(None, x, x), "q"),
        (lambda x: flash_attn_with_kvcache(x, None, x), "k_cache"),
        (lambda x: flash_attn_with_kvcache(x, x, None), "v_cache"),
        (lambda x: flash_attn_with_kvcache(x, x, x, cache_seqlens=[1, 1]), "cache_seqlens"),
    ],
)
def test_what_is_no_tensor(call, name):
    with pytest.raises(
        TypeError, match=f"^{name} must be a tensor(, an integer or None)?; it is of type (NoneType|list)"
    ):
        call(randn(2, 4, 3, 16))


def test_max_seqlen_that_is_many():
    qkv = randn(12, 3, 2, 16)
    with pytest.raises(RuntimeError, match=r"max_seqlen must be one integer; it is a tensor of shape \(3,\)"):
        flash_attn_varlen_qkvpacked_func(qkv, CU_Q, torch.tensor([5, 0, 7]))
    q, k, v = qkv.unbind(1)
    for name, lengths in ("max_seqlen_q", (torch.tensor([5, 7]), 7)), ("max_seqlen_k", (7, torch.tensor([5, 7]))):
        for options in {}, {"return_lse": True}:
            with pytest.raises(RuntimeError, match=rf"^{name} must be one integer; it is a tensor of shape \(2,\)"):
                flash_attn_varlen_func(q, k, v, CU_Q, CU_Q, *lengths, **options)
