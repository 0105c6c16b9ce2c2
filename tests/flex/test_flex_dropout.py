"""Dropout beside attn_bias, attn_mask, return_lse with gradients and mods, against plain arithmetic in fp64.

The elements that it keeps are those of oracle.dropout_keep for the seed and offset that the call draws.
"""

import contextlib
import functools
import math

import pytest
import torch
from compare import DTYPES
from oracle import dropout_keep
from oracle_attention import TOLERANCES, close
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flash_attn import (
    _calls,
    _extended,
    _extended_directly,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    prebuild_call,
)
from flash_attn.flex import graph
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
DEVICES = ["cpu", GPU]
P = 0.3
STATE = 0x3141592653589793, 77  # seed and offset


@pytest.fixture
def known_state(monkeypatch):
    """Every call draws STATE."""
    for module in (graph, _extended_directly):
        monkeypatch.setattr(module, "rng_state_of", lambda dropout_p, device: state(device) if dropout_p else None)


def state(device):
    return torch.tensor(STATE, dtype=torch.int64).to(device)


def kept(b, h, len_q, len_kv, p=P):
    """The factors of dropout, ``[b, h, len_q, len_kv]``."""
    return torch.stack([dropout_keep(*STATE, i, h, len_q, len_kv, p) for i in range(b)]).double() / (1 - p)


def exact(q, k, v, bias=None, mask=None, sinks=None, causal=False, softcap=0.0, z=1.0):
    """out and lse of ``[b, len, h, d]`` in fp64."""
    rows, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in (keys, values))
    scores = rows @ keys.mT * q.shape[-1] ** -0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    sees = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2] if causal else 999)
    scores = scores.masked_fill(~(sees if mask is None else sees & mask), -math.inf)
    everything = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    is_empty = (everything == -math.inf).all(-1, keepdim=True)
    everything = torch.where(is_empty, 0.0, everything)
    weights = torch.where(is_empty, 0.0, everything.softmax(-1))[..., : scores.shape[-1]]
    lse = torch.where(is_empty[..., 0], -math.inf, everything.logsumexp(-1))
    return (weights * z @ values).transpose(1, 2), lse


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# b, len_q, len_kv, h, h_kv, d: one query, few rows, borders of the generator's patches of 16 x 32, more than a tile
SHAPES = [
    (2, 1, 65, 4, 2, 16),
    (2, 16, 16, 2, 2, 40),
    (3, 17, 33, 3, 3, 8),
    (1, 49, 49, 4, 4, 32),
    (2, 150, 300, 4, 2, 64),
]
OPTIONS = {
    "lse": {},
    "bias": {"bias": "bhqk"},
    "bias of heads": {"bias": "1hqk"},
    "bias of keys": {"bias": "b11k"},
    "mask": {"mask": "b1qk"},
    "causal bias": {"bias": "1hqk", "causal": True},
    "all": {"bias": "11qk", "mask": "b11k", "sinks": True, "causal": True, "softcap": 2.0},
}


def inputs(shape, option, dtype):
    """Tensors by name, and the other options."""
    b, len_q, len_kv, h, h_kv, d = shape
    sizes = {"b": b, "h": h, "q": len_q, "k": len_kv, "1": 1}
    found = {name: randn(b, n, heads, d, dtype=dtype, seed=i) for i, (name, n, heads) in enumerate(
        (("q", len_q, h), ("k", len_kv, h_kv), ("v", len_kv, h_kv))
    )}  # fmt: skip
    rest = dict(OPTIONS[option])
    if "bias" in rest:
        found["bias"] = randn(*(sizes[x] for x in rest.pop("bias")), dtype=dtype, seed=5)
    if rest.pop("sinks", False):
        found["sinks"] = randn(h, seed=6)
    if "mask" in rest:
        rest["mask"] = randn(*(sizes[x] for x in rest["mask"]), seed=7) > -0.5
    return found, rest


def compare(device, tensors, options, tolerance, attend):
    """Compares out, lse and all gradients. attend: of the leaves by name and the mask, on the device."""
    wide = {name: x.double().requires_grad_() for name, x in tensors.items()}
    ours = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
    (b, len_q, h, _), len_kv = tensors["q"].shape, tensors["k"].shape[1]
    want = exact(**wide, **options, z=kept(b, h, len_q, len_kv))
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = attend(**ours, **options)
    upstream = randn(*want[0].shape, seed=8), randn(*want[1].shape, seed=9).masked_fill(want[1] == -math.inf, 0)
    for x, y in zip(got, want, strict=True):
        close(x.cpu(), y, tolerance)
    want = torch.autograd.grad(want, list(wide.values()), [x.double() for x in upstream])
    got = torch.autograd.grad(got, list(ours.values()), [x.to(device, y.dtype) for x, y in zip(upstream, got)])
    for x, y in zip(got, want, strict=True):
        close(x.cpu(), y, 4 * tolerance)


def attend(q, k, v, bias=None, mask=None, sinks=None, **options):
    return flash_attn_func(q, k, v, P, attn_bias=bias, attn_mask=mask, sinks=sinks, return_lse=True, **options)


@pytest.fixture
def short_way(monkeypatch):
    """Fails if C does not take the eager call as it is."""
    monkeypatch.setattr(_extended, "attend", lambda *_: pytest.fail("the short way was not taken"))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_on_every_instruction_set(dtype, shape, option, isa, short_way, known_state):
    dtype = DTYPES[dtype]
    compare("cpu", *inputs(shape, option, dtype), TOLERANCES[dtype], attend)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 300, 300, 2, 1, 128), (1, 200, 600, 2, 2, 192)], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("device", [GPU])
def test_on_gpus(device, dtype, shape, option, short_way, known_state):
    dtype = DTYPES[dtype]
    compare(device, *inputs(shape, option, dtype), TOLERANCES[dtype], attend)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_long_way(device, shape, option, monkeypatch, known_state):
    monkeypatch.setattr(_calls, "_short_way", lambda: lambda *_: None)
    compare(device, *inputs(shape, option, torch.float32), 2e-5, attend)


@pytest.mark.parametrize("option", OPTIONS)
def test_fp64(option, short_way, known_state):
    """lse is fp32."""
    compare("cpu", *inputs(SHAPES[-1], option, torch.float64), 1e-6, attend)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_layouts_and_sequences(device, known_state):
    """Packed sequences are one batch of the tensors' rows and keys, and dropout counts these."""
    lengths, h, d = (5, 0, 33, 20), 2, 16
    total, ends = sum(lengths), torch.tensor(lengths).cumsum(0)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int().to(device)
    tensors = {name: randn(1, total, h, d, seed=i) for i, name in enumerate("qkv")}
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    bias = {"bias": randn(1, h, max(lengths), max(lengths))}
    place = torch.cat([torch.arange(n) for n in lengths])
    wide = [x.double().requires_grad_() for x in (*tensors.values(), bias["bias"])]
    ours = [x.to(device).requires_grad_() for x in (*tensors.values(), bias["bias"])]
    dense = wide[3][:, :, place[:, None], place[None]]
    want = exact(*wide[:3], dense, of[:, None] == of[None], z=kept(1, h, total, total))[0]
    packed = [x.squeeze(0) for x in ours[:3]]
    lens = cu_seqlens, cu_seqlens, max(lengths), max(lengths)
    got = flash_attn_varlen_func(*packed, *lens, P, attn_bias=ours[3])
    close(got.cpu(), want.squeeze(0), 2e-5)
    dout = randn(*want.shape)
    for x, y in zip(torch.autograd.grad(got, ours, dout.squeeze(0).to(device)),
                    torch.autograd.grad(want, wide, dout.double()), strict=True):  # fmt: skip
        close(x.cpu(), y, 1e-4)
    q, k, v = (x.detach().to(device) for x in tensors.values())
    want = flash_attn_func(q, k, v, P, attn_bias=dense.detach().float().to(device))
    for function, parts in ((flash_attn_qkvpacked_func, [torch.stack([q, k, v], 2)]),
                            (flash_attn_kvpacked_func, [q, torch.stack([k, v], 2)])):  # fmt: skip
        assert function(*parts, P, attn_bias=dense.detach().float().to(device)).equal(want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["score_mod", "mask_mod", "block_mask", "plain", "all"])
@pytest.mark.parametrize("compiles", [False, True])
def test_flex_attention(kind, compiles, device, known_state):
    b, len_q, len_kv, h, d = 2, 130, 140, 2, 32
    tensors = {name: randn(b, n, h, d, seed=i) for i, (name, n) in enumerate(zip("qkv", (len_q, len_kv, len_kv)))}
    rows, keys = torch.arange(len_q)[:, None], torch.arange(len_kv)
    options = {}
    if kind in ("score_mod", "all"):
        tensors["bias"] = randn(h, seed=11)
    if kind in ("mask_mod", "block_mask", "all"):
        options["mask"] = (rows + keys) % 3 != 0

    def call(q, k, v, bias=None, mask=None):
        def score_mod(score, b, h, i, j):
            return score + bias[h] * (i - j).abs()

        def mask_mod(b, h, i, j):
            return (i + j) % 3 != 0

        options = {} if bias is None else {"score_mod": score_mod}
        if kind in ("mask_mod", "all"):
            options["mask_mod"] = mask_mod
        if kind == "block_mask":
            options["block_mask"] = create_block_mask(mask_mod, None, None, len_q, len_kv, device, 64)
        aux = None if kind == "plain" else AuxRequest(lse=True)
        out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options, dropout_p=P, return_aux=aux)
        return (out.transpose(1, 2),) if aux is None else (out[0].transpose(1, 2), out[1].lse)

    torch._dynamo.reset()
    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiles else call
    wide = {name: x.double().requires_grad_() for name, x in tensors.items()}
    ours = {name: x.to(device).requires_grad_() for name, x in tensors.items()}
    dense = None if "bias" not in wide else wide["bias"][:, None, None] * (rows - keys).abs()
    want = exact(*(wide[x] for x in "qkv"), dense, options.get("mask"), z=kept(b, h, len_q, len_kv))
    got = function(**ours)
    upstream = randn(*want[0].shape, seed=8), randn(*want[1].shape, seed=9)
    for x, y in zip(got, want):
        close(x.cpu(), y, 2e-5)
    got = torch.autograd.grad(got, list(ours.values()), [x.to(device) for x in upstream[: len(got)]])
    want = torch.autograd.grad(
        want[: 1 if kind == "plain" else 2], list(wide.values()),
        [x.double() for x in upstream[: 1 if kind == "plain" else 2]],
    )  # fmt: skip
    for x, y in zip(got, want, strict=True):
        close(x.cpu(), y, 1e-3 if kind in ("score_mod", "all") else 1e-4)


def test_a_probability_that_drops_nothing():
    q, k, v = (randn(1, 40, 2, 8, seed=i) for i in range(3))
    bias = randn(2, 40, 40)
    want = flash_attn_func(q, k, v, attn_bias=bias)
    torch.testing.assert_close(flash_attn_func(q, k, v, 1e-30, attn_bias=bias), want, rtol=1e-6, atol=1e-6)


# ---- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_seeds(device):
    """The generator of PyTorch decides, and each call draws anew. Gradients belong to the same numbers."""
    q, k, v, bias = (x.to(device) for x in (*(randn(1, 40, 2, 8, seed=i) for i in range(3)), randn(2, 40, 40)))
    q.requires_grad_()
    for function in (
        functools.partial(flash_attn_func, q, k, v, 0.5, attn_bias=bias),
        lambda: flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), lambda s, b, h, i, j: s * 2, dropout_p=0.5),
    ):
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append([function(), function()])
        assert found[0][0].equal(found[1][0]) and found[0][1].equal(found[1][1])
        assert not found[0][0].equal(found[0][1]) and not found[0][0].equal(found[2][0])
        want = torch.autograd.grad(found[0][0].sum(), q)[0]
        for use_reentrant in (False, True):
            torch.manual_seed(1)
            out = checkpoint(lambda _: function(), q, use_reentrant=use_reentrant)  # noqa: B023
            assert out.equal(found[0][0])
            if not use_reentrant:  # the other kind has backward() alone: test_each_call_draws_once_.. has it
                assert torch.autograd.grad(out.sum(), q)[0].equal(want)


def test_a_repeated_forward_draws_numbers_of_its_own():
    """A checkpoint that keeps no state of generators repeats the forward. The gradients are those of the repetition."""
    q, v, bias = randn(1, 8, 1, 8).requires_grad_(), torch.eye(8)[None, :, None].requires_grad_(), torch.zeros(8, 8)
    drawn = []

    def function(q):
        drawn.append(flash_attn_func(q, q.detach(), v, 0.5, attn_bias=bias))
        return drawn[-1]

    with set_checkpoint_early_stop(False):
        out = checkpoint(function, q, use_reentrant=False, preserve_rng_state=False)
    grad = torch.autograd.grad(out.sum(), v)[0].squeeze()  # of key j: the sum of column j of the kept weights
    first, again = (x.detach().squeeze() for x in drawn)
    assert not first.equal(again)
    torch.testing.assert_close(grad[:, 0], again.sum(0))


CALLS = {
    "return_lse": lambda q, v: flash_attn_func(q, q, v, 0.5, return_lse=True)[0],
    "sinks and lse": lambda q, v: flash_attn_func(q, q, v, 0.5, sinks=torch.zeros(2), return_lse=True)[0],
    "bias": lambda q, v: flash_attn_func(q, q, v, 0.5, attn_bias=torch.ones(40, 40)),
    "mask": lambda q, v: flash_attn_func(q, q, v, 0.5, attn_mask=torch.ones(40, dtype=torch.bool)),
    "strided": lambda q, v: flash_attn_func(q.mT.contiguous().mT, q, v, 0.5, attn_bias=torch.ones(40, 40)),
    "tensor scale": lambda q, v: flash_attn_func(q, q, v, 0.5, torch.tensor(0.2), attn_bias=torch.ones(40, 40)),
    "packed": lambda q, v: flash_attn_qkvpacked_func(torch.stack([q, q, v], 2), 0.5, attn_bias=torch.ones(40, 40)),
    "packed, strided": lambda q, v: flash_attn_kvpacked_func(
        q, torch.stack([q, v], 2).mT.contiguous().mT, 0.5, attn_bias=torch.ones(40, 40)
    ),
    "no keys": lambda q, v: flash_attn_func(q, q[:, :0], v[:, :0], 0.5, attn_bias=torch.ones(1)),
    "varlen": lambda q, v: flash_attn_varlen_func(
        q[0], q[0], v[0], *[torch.tensor([0, 9, 40], dtype=torch.int32)] * 2, 31, 31, 0.5, attn_bias=torch.ones(31)
    )[None],
}


@pytest.mark.parametrize("call", CALLS)
def test_each_call_draws_once_and_a_checkpoint_draws_the_same(call, monkeypatch):
    """Whatever watches the call, and however many ways to the kernels refuse it. v is the identity, so the gradient of
    value j of a sum is the sum of column j of what is kept."""
    drawn, draw = [], graph.rng_state_of
    for module in (graph, _extended_directly):
        monkeypatch.setattr(module, "rng_state_of", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    q, v = randn(1, 40, 2, 40).requires_grad_(), torch.eye(40)[None, :, None].repeat(1, 1, 2, 1).requires_grad_()
    found = []
    profiled = torch.profiler.profile
    for around in (contextlib.nullcontext, torch.no_grad, profiled, lambda: torch.autocast("cpu", torch.bfloat16)):
        torch.manual_seed(7)
        drawn.clear()
        with around():
            found.append(CALLS[call](q, v))
        assert len(drawn) == 1
        torch.testing.assert_close(found[-1].float(), found[0], rtol=0.02, atol=0.02)
    if call == "no keys":
        return
    for use_reentrant in (False, True):
        out = checkpoint(CALLS[call], q, v, use_reentrant=use_reentrant)
        (grad,) = torch.autograd.grad(out.sum(), v) if not use_reentrant else (None,)
        if use_reentrant:
            v.grad = None
            out.sum().backward()
            grad = v.grad
        torch.testing.assert_close(grad[..., 0], out.sum(1).mT, rtol=1e-4, atol=1e-5)


def test_planning_draws_nothing():
    q, bias = randn(1, 40, 2, 8).requires_grad_(), torch.zeros(40, 40)
    torch.manual_seed(1)
    want = torch.rand(1)
    for plan in (explain, functools.partial(prebuild_call, archs="sm_90a", compiles=False)):
        torch.manual_seed(1)
        plan(flash_attn_func, q.bfloat16(), q.bfloat16(), q.bfloat16(), 0.5, attn_bias=bias)
        assert torch.rand(1).equal(want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_draw_anew(backend):
    """And another probability or length needs no other numbers in the graph than its own."""
    torch._dynamo.reset()
    q, bias = randn(1, 24, 2, 8).requires_grad_(), torch.zeros(24, 24)
    v = torch.eye(24)[None, :, None, :].expand(1, 24, 2, 24)

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def function(q, v, p):
        q = torch.nn.functional.pad(q, (0, 16))
        return flash_attn_func(q, q, v, p, attn_bias=bias)

    torch.manual_seed(3)
    found = [function(q, v, p) for p in (0.5, 0.5, 0.25)]
    assert not found[0].equal(found[1])
    for out, p in zip(found, (0.5, 0.5, 0.25)):
        weights = torch.softmax((q.transpose(1, 2) @ q.transpose(1, 2).mT) * 24**-0.5, -1).transpose(1, 2)
        is_kept = out != 0
        torch.testing.assert_close(out, torch.where(is_kept, weights / (1 - p), 0.0), rtol=1e-4, atol=1e-5)
        assert abs(is_kept.float().mean() - (1 - p)) < 0.1
    torch.manual_seed(3)
    assert backend != "aot_eager" or function(q, v, 0.5).equal(found[0])


def test_an_exported_program_has_gradients():
    class Dropped(torch.nn.Module):
        def forward(self, q, bias):
            return flash_attn_func(q, q, q, 0.5, attn_bias=bias)

    q, bias = randn(2, 12, 2, 8).requires_grad_(), randn(2, 12, 12).requires_grad_()
    program = torch.export.export(Dropped(), (q, bias)).module()
    torch.manual_seed(4)
    got = program(q, bias)
    torch.manual_seed(4)
    want = flash_attn_func(q, q, q, 0.5, attn_bias=bias)
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got.sum(), (q, bias)), torch.autograd.grad(want.sum(), (q, bias))):
        torch.testing.assert_close(x, y)


def test_vmap_asks_about_randomness():
    q, bias = randn(3, 1, 12, 2, 8), randn(12, 12)
    call = lambda q: flash_attn_func(q, q, q, 0.5, attn_bias=bias)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q)
    same = torch.vmap(call, randomness="same")(q[:1].expand_as(q))
    assert same[0].equal(same[1])
    different = torch.vmap(call, randomness="different")(q[:1].expand_as(q))
    assert not different[0].equal(different[1])


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, math.nan, 2])
def test_a_probability_out_of_range_is_named(dropout_p):
    q, bias = randn(1, 9, 2, 8), torch.zeros(9, 9)
    with pytest.raises(RuntimeError, match="dropout_p must be at least 0 and below 1"):
        flash_attn_func(q, q, q, dropout_p, attn_bias=bias)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and below 1"):
        flex_attention(q, q, q, dropout_p=dropout_p)


def test_the_ops_name_a_state_that_does_not_fit():
    q = randn(1, 2, 9, 8)
    mods = *("", [], [], []) * 2, [], [], [], False
    op = functools.partial(torch.ops.flash_attn.flex_forward, q, q, q, 1.0, False, *mods, False, dropout_p=0.5)
    for bad, match in ((None, "rng_state must be given"), (torch.zeros(2), "rng_state must have dtype int64"),
                       (torch.zeros(3, dtype=torch.int64), "rng_state must have shape"),
                       (torch.zeros(4, dtype=torch.int64)[::2], "rng_state must be contiguous")):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError), match=match):
            op(rng_state=bad)
