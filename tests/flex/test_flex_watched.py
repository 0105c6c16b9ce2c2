"""Calls with mods that something watches go by the ops, and give the same numbers: modes, profilers, fake tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

pytestmark = pytest.mark.filterwarnings("ignore:return_lse is deprecated")


class Seen(TorchDispatchMode):
    """Notes the names of the ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("flash_attn::"))
        return func(*args, **(kwargs or {}))


B, LEN_Q, LEN_K, H, H_KV, D = 2, 37, 150, 4, 2, 16


def inputs():
    torch.manual_seed(0)
    shapes = {"q": (B, LEN_Q, H, D), "k": (B, LEN_K, H_KV, D), "v": (B, LEN_K, H_KV, D), "bias": (H, LEN_Q, LEN_K)}
    found = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    found["sinks"], found["cap"] = torch.randn(H, requires_grad=True), torch.rand((), requires_grad=True)
    return found


MASK = torch.rand(B, 1, LEN_Q, LEN_K, generator=torch.Generator().manual_seed(0)) < 0.7
SUMS_Q, SUMS_K = torch.tensor([0, 20, 30], dtype=torch.int32), torch.tensor([0, 70, 150], dtype=torch.int32)
CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, LEN_Q, LEN_K, "cpu")


def of_flex(x, **options):
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    return flex_attention(q, k, v, enable_gqa=True, **options)


def packed(x, **options):
    tensors = [x[name].flatten(0, 1) for name in "qkv"]
    return flash_attn_varlen_func(*tensors, SUMS_Q, SUMS_K, 20, 80, causal=True, **options)


def with_numbers(x):
    """Captures of every kind: int, bool, float and a tensor with gradient."""
    shift, doubles, factor, cap = 3, True, 0.25, x["cap"]
    return of_flex(x, score_mod=lambda s, b, h, i, j: s * factor + cap * (i - j + shift) if doubles else s)


CALLS = {
    "bias": lambda x: flash_attn_func(x["q"], x["k"], x["v"], attn_bias=x["bias"], softcap=3.0),
    "bias and sinks": lambda x: flash_attn_func(x["q"], x["k"], x["v"], attn_bias=x["bias"], sinks=x["sinks"]),
    "mask and window": lambda x: flash_attn_func(x["q"], x["k"], x["v"], attn_mask=MASK, window_size=(20, 3)),
    "lse": lambda x: flash_attn_func(x["q"], x["k"], x["v"], return_lse=True, causal=True),
    "largest": lambda x: flash_attn_func(x["q"], x["k"], x["v"], return_max_logits=True),
    "packed": lambda x: packed(x, attn_bias=x["bias"][:, :20, :80]),
    "plain": lambda x: of_flex(x),
    "plain window": lambda x: of_flex(x, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < 9)),
    "plain softcap": lambda x: of_flex(x, score_mod=lambda s, b, h, i, j: 2 * torch.tanh(s / 2), block_mask=CAUSAL),
    "score": lambda x: of_flex(x, score_mod=lambda s, b, h, i, j: s + x["bias"][h, i, j], return_lse=True),
    "numbers": with_numbers,
    "blocks": lambda x: of_flex(x, score_mod=lambda s, b, h, i, j: s * x["cap"], block_mask=CAUSAL),
    "largest of flex": lambda x: of_flex(x, return_aux=AuxRequest(max_scores=True))[1].max_scores,
    "offset": lambda x: of_flex(x, mask_mod=lambda b, h, i, j: i >= j, q_offset=torch.tensor([100, 3])),
}
KEY_LENGTH = torch.tensor([9, 140])
TABLE = torch.arange(6).view(2, 3)
DECODING = {
    "kv_len": lambda x: of_flex(x, mask_mod=lambda b, h, i, j: i + 100 >= j, kv_len=KEY_LENGTH),
    "pages": lambda x: flex_attention(
        x["q"].transpose(1, 2), *(x[n].unflatten(1, (3, 50)).flatten(0, 1).transpose(1, 2) for n in "kv"),
        score_mod=lambda s, b, h, i, j: s + j, enable_gqa=True, block_table=TABLE, kv_len=KEY_LENGTH,
    ),
}  # fmt: skip


def results_of(call, with_gradients=True):
    x = inputs()
    found = call(x)
    found = found if isinstance(found, tuple) else (found,)
    outs = [y for y in found if y.requires_grad]
    if outs and with_gradients:
        sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in outs).backward()
    return *found, *(y.grad for y in x.values())


@pytest.mark.parametrize("name", [*CALLS, *DECODING])
def test_watched_calls_have_the_same_results(name):
    call = {**CALLS, **DECODING}[name]
    with torch.no_grad() if name in DECODING else nullcontext():
        want = results_of(call)
        with Seen() as seen:
            got = results_of(call)
    assert "flex_forward" in seen.names
    assert ("flex_backward" in seen.names) == any(x is not None for x in want[-6:])
    for x, y in zip(got, want):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)
            assert x.stride() == y.stride()


@pytest.mark.parametrize("device", ["fake", "meta"])
@pytest.mark.parametrize("name", ["bias", "bias and sinks", "mask and window", "lse", "largest", "packed"])
def test_tensors_without_memory(name, device):
    want = results_of(CALLS[name])

    def to(x):
        return mode.from_tensor(x) if device == "fake" else x.detach().to("meta").requires_grad_(x.requires_grad)

    mode = FakeTensorMode()
    names = globals()
    kept = {name: names[name] for name in ("MASK", "SUMS_Q", "SUMS_K")}
    made = {name: to(x) for name, x in inputs().items()}
    try:
        names.update({name: to(x) for name, x in kept.items()})
        with mode if device == "fake" else nullcontext():
            found = CALLS[name](made)
            found = found if isinstance(found, tuple) else (found,)
            sum(x.sum() for x in found if x.requires_grad).backward()
    finally:
        names.update(kept)
    for x, y in zip((*found, *(x.grad for x in made.values())), want):
        assert (x is None) == (y is None)
        assert x is None or (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_a_recorded_graph_takes_another_mask():
    """Its blocks must not be those of the mask that was recorded."""
    x = {name: y.detach() for name, y in inputs().items()}

    def function(q, mask):
        return flash_attn_func(q, x["k"], x["v"], attn_mask=mask)

    graph = make_fx(function)(x["q"], torch.zeros_like(MASK))
    torch.testing.assert_close(graph(2 * x["q"], MASK), function(2 * x["q"], MASK))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of shapes
def test_jit_trace_is_refused():
    x = {name: y.detach() for name, y in inputs().items()}
    bias = x["bias"][..., :LEN_Q]
    with pytest.raises(NotImplementedError, match="torch.jit.trace cannot record attention with mods, attn_bias"):
        torch.jit.trace(lambda q: flash_attn_func(q, q, q, attn_bias=bias), (x["q"],))


def test_profilers_see_the_ops():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        results_of(CALLS["bias"])
    rows = {row.key: row.input_shapes for row in profile.key_averages(group_by_input_shape=True)}
    for op in ("flex_forward", "flex_backward"):
        assert rows[f"flash_attn::{op}"][:2] == [[B, H, LEN_Q, D], [B, H_KV, LEN_K, D]]


def test_a_recorded_graph_finds_blocks():
    def lists(ends):
        mask = create_block_mask(lambda b, h, i, j: (ends[i] == ends[j]) & (i >= j), 1, 1, 300, 300, device="cpu")
        return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks

    first, second = (torch.randint(0, n, (300,)).sort().values for n in (3, 5))
    graph = make_fx(lists)(first)
    assert all(torch.equal(a, b) for a, b in zip(graph(second), lists(second), strict=True))


def test_a_dense_mask_is_not_recorded():
    with pytest.raises(RuntimeError, match="create_mask cannot be recorded"):
        make_fx(lambda x: create_mask(lambda b, h, i, j: x[i] > j, 1, 1, 30, 30, device="cpu"))(torch.arange(30))
