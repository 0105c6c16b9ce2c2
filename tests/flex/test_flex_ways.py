"""The short way and the long way of flex_attention, and what a program that is kept must notice."""

import enum
import gc
import types
import weakref

import pytest
import torch
from harness_flex import causal, make
from oracle_attention import check, close
from torch.nn.attention.flex_attention import BlockMask

from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention, or_masks

# ---- the short way and the long way ---------------------------------------------------------------------------------

DOCUMENT, TABLE, SLOPES = torch.arange(33) // 7, torch.randn(2, 65), torch.tensor([0.5, 0.25])
WAYS = {
    "nothing": {},
    "heads in groups": {"enable_gqa": True, "scale": 0.3},
    "causal block mask": {"block_mask": (causal, 33)},
    "documents": {"block_mask": (lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j], 33)},
    "softcap in documents": {
        "block_mask": (lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (i >= j), 33),
        "score_mod": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    },
    "a table with a gradient": {"score_mod": lambda s, b, h, i, j: s + TABLE[h, i - j + 32]},
    "lse": {"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i), "return_aux": AuxRequest(lse=True)},
    "all results": {"mask_mod": None, "return_aux": AuxRequest(lse=True, max_scores=True)},
    "a window by mask_mod": {"mask_mod": lambda b, h, i, j: (i - j < 9) & (i >= j)},
}


@pytest.mark.parametrize("grads", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", WAYS)
def test_both_ways_are_the_same(name, grads, monkeypatch):
    from flash_attn.flex import attention

    arguments = dict(WAYS[name])
    if "block_mask" in arguments:
        mod, n = arguments["block_mask"]
        arguments["block_mask"] = create_block_mask(mod, None, None, n, n, "cpu", BLOCK_SIZE=16)
    q, k, v = make(2, 2, 1 if "enable_gqa" in arguments else 2, 33, 33, 16)
    q = torch.nn.Parameter(q.transpose(1, 2).contiguous().transpose(1, 2))
    monkeypatch.setitem(globals(), "TABLE", TABLE.clone().requires_grad_(grads))
    leaves = [q, k.requires_grad_(grads), v, *([TABLE] if "table" in name else [])]
    directly, taken = attention._directly, []

    def counted(*args):
        taken.append(directly(*args))
        return taken[-1]

    def results(way):
        monkeypatch.setattr(attention, "_directly", way)
        with torch.set_grad_enabled(grads):
            found = flex_attention(q, k, v, **arguments)
        out, aux = found if isinstance(found, tuple) else (found, None)
        found = [out, *([] if aux is None else [x for x in aux if x is not None])]
        if not grads:
            assert not any(x.requires_grad for x in found)
            return found, []
        total = sum(x.sin().sum() for x in found if x.requires_grad)
        return found, [*torch.autograd.grad(total, [x for x in leaves if x.requires_grad])]

    want = results(lambda *args: None)  # and the mods are traced now
    got = results(counted)
    assert len(taken) == 1 and taken[0] is not None
    for wants, gots in zip(want, got):
        for x, y in zip(wants, gots, strict=True):
            assert torch.equal(x, y) and x.stride() == y.stride() and type(x) is type(y) is torch.Tensor


INT32 = {"dtype": torch.int32}
OFFSET, USED, PAGES = (
    torch.tensor([4, 9], **INT32),
    torch.tensor([33, 12], **INT32),
    torch.tensor([[2, 0], [1, 1]], **INT32),
)
ALIBI = lambda s, b, h, i, j: s + SLOPES[h] * (j - i)  # noqa: E731
NEAR = lambda b, h, i, j: (i - j < 9) & (DOCUMENT[i] == DOCUMENT[j])  # noqa: E731
PLACES = {
    "lengths": ({"kv_len": USED}, True),
    "lengths and lse": ({"kv_len": USED, "return_aux": AuxRequest(lse=True)}, True),
    "offsets": ({"q_offset": OFFSET, "score_mod": ALIBI}, True),
    "offsets and lengths": ({"q_offset": OFFSET, "kv_len": USED, "score_mod": ALIBI, "mask_mod": NEAR}, True),
    "a window": ({"q_offset": USED - 5, "kv_len": USED, "mask_mod": lambda b, h, i, j: (i - j < 9) & (i >= j)}, True),
    "pages": ({"block_table": PAGES, "kv_len": USED, "score_mod": ALIBI}, True),
    "numbers": ({"q_offset": 3, "kv_len": 20, "mask_mod": NEAR}, False),
    "int64": ({"q_offset": OFFSET.long(), "mask_mod": NEAR}, False),
    "one for all": ({"kv_len": torch.tensor(20, **INT32)}, False),
    "a block mask": ({"q_offset": OFFSET, "block_mask": (NEAR, 33)}, False),
    "a subclass": ({"kv_len": USED.as_subclass(type("Lengths", (torch.Tensor,), {}))}, False),
    "every second": ({"kv_len": torch.stack([USED, USED], 1)[:, 0]}, False),
}


@pytest.mark.parametrize("name", PLACES)
def test_both_ways_are_the_same_with_places(name, monkeypatch):
    from flash_attn.flex import attention

    arguments, is_short = dict(PLACES[name][0]), PLACES[name][1]
    if "block_mask" in arguments:
        mod, n = arguments["block_mask"]
        arguments["block_mask"] = create_block_mask(mod, None, None, n, n, "cpu", BLOCK_SIZE=16)
    q, k, v = make(2, 2, 2, 5, 33, 16)
    if "block_table" in arguments:
        k, v = torch.randn(2, 3, 2, 20, 16).unbind()
    directly, taken = attention._directly, []
    monkeypatch.setattr(attention, "_directly", lambda *args: None)
    want = flex_attention(q, k, v, **arguments)
    monkeypatch.setattr(attention, "_directly", lambda *args: taken.append(directly(*args)) or taken[-1])
    found = flex_attention(q, k, v, **arguments)
    assert len(taken) == 1 and (taken[0] is not None) == is_short
    want, found = ([x[0], x[1].lse] if isinstance(x, tuple) else [x] for x in (want, found))
    assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(want, found, strict=True))


def test_places_with_gradients_go_the_long_way():
    q, k, v = (x.requires_grad_() for x in make(2, 2, 2, 5, 33, 16))
    out = flex_attention(q, k, v, ALIBI, q_offset=OFFSET)
    rows = [flex_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], ALIBI, q_offset=int(OFFSET[i])) for i in range(2)]
    for x, y in zip(
        torch.autograd.grad(out.sin().sum(), (q, k, v)), torch.autograd.grad(torch.cat(rows).sin().sum(), (q, k, v))
    ):
        close(x, y, 1e-5)
    with pytest.raises(NotImplementedError, match="no gradients with kv_len"):
        flex_attention(q, k, v, kv_len=USED)


def _steps(i, num, step):
    for _ in range(num):
        i = step(i)
    return i


WIDTH = 2.5
LIKE_WINDOWS = {
    "a float made an integer": (None, lambda b, h, i, j: i - j <= torch.full_like(j, WIDTH)),
    "a number made a bool": (None, lambda b, h, i, j: (i >= j) & (i - j <= torch.full_like(j, 3).bool().long())),
    "an integer that fp32 lacks": (
        None,
        lambda b, h, i, j: i - j + 33554430 <= torch.full_like(j, 33554435).float().long(),
    ),
    "a cap made an integer": (
        lambda s, b, h, i, j: torch.full_like(j, WIDTH) * torch.tanh(s / torch.full_like(j, WIDTH)),
        None,
    ),
    "many steps": (None, lambda b, h, i, j: _steps(i, 1500, lambda x: x + 1) >= j + 1500),
    "doubled again and again": (
        None,
        lambda b, h, i, j: _steps(i, 40, lambda x: x + x) >= _steps(j, 40, lambda x: x + x),
    ),
    "masks in masks": (None, lambda b, h, i, j: _steps(i >= j, 40, lambda x: (x & (i - j < 9)) & (x & (j >= 0)))),
}


@pytest.mark.parametrize("name", LIKE_WINDOWS)
def test_what_looks_like_a_window_or_a_softcap(name):
    """Whether or not the plain kernels take the call, the results are those of kernels with mods."""
    score_mod, mask_mod = LIKE_WINDOWS[name]
    q, k, v = make(1, 2, 2, 33, 33, 16)
    want, _ = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_aux=AuxRequest(max_scores=True))
    close(flex_attention(q, k, v, score_mod, mask_mod=mask_mod), want, 1e-5)


# ---- what a cached program must notice ------------------------------------------------------------------------------


class Mode(enum.Enum):
    CAUSAL = 1
    FULL = 2


class Reach:
    width = 3

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __eq__(self, other):
        return self.items == other.items


module = types.ModuleType("module_of_a_user")
module.width, module.function = 2, lambda i, j: i - j <= module.width
bin = 3


def window(width):
    return lambda b, h, i, j: (i - j).abs() <= width


def by_mode(mode):
    return lambda b, h, i, j: i >= j if mode is Mode.CAUSAL and mode == Mode.CAUSAL else i == i


def by_length(items, other):
    return lambda b, h, i, j: i >= j if items else (i == j if items == other else i - j <= 1)


def pairs_of_mods():
    """(mod, the same mask by torch) where the second mod of a kind differs from the first in one place."""
    twice = window(3)
    yield or_masks(twice, twice), lambda i, j: (i - j).abs() <= 3
    yield or_masks(window(0), window(5)), lambda i, j: (i - j).abs() <= 5
    yield by_mode(Mode.CAUSAL), lambda i, j: i >= j
    yield by_mode(Mode.FULL), lambda i, j: i + j >= 0
    yield by_length(Reach(1), Reach()), lambda i, j: i >= j
    yield by_length(Reach(), Reach()), lambda i, j: i == j
    yield by_length(Reach(), Reach(1)), lambda i, j: i - j <= 1
    for module.width in (2, 4):
        yield lambda b, h, i, j: (i - j).abs() <= module.width, lambda i, j: (i - j).abs() <= module.width
        yield lambda b, h, i, j: module.function(i, j) & (i >= j), lambda i, j: (i - j <= module.width) & (i >= j)
    for Reach.width in (3, 6):
        yield lambda b, h, i, j: (i - j).abs() <= Reach.width, lambda i, j: (i - j).abs() <= Reach.width
    for globals()["bin"] in (3, 5):
        yield lambda b, h, i, j: (i - j).abs() <= bin, lambda i, j: (i - j).abs() <= bin
    for n in (2, 4):
        yield lambda b, h, i, j, steps=range(n): (i - j).abs() <= len(steps), lambda i, j, n=n: (i - j).abs() <= n


def test_a_cached_program_is_of_no_other_mod():
    for mod, mask in pairs_of_mods():
        want = mask(torch.arange(9)[:, None], torch.arange(9))
        assert torch.equal(create_mask(mod, 1, 1, 9, 9, device="cpu")[0, 0], want)


def test_detached_values_have_no_gradient():
    table = torch.randn(12, requires_grad=True)
    tensors = make(1, 1, 1, 12, 12, 8)
    check(*tensors, score_mod=lambda s, b, h, i, j: s + 0.5 * s.detach() * s.detach())
    check(*tensors, score_mod=lambda s, b, h, i, j: s + table[j].detach() + table[i], leaves=[table])


def test_no_heads():
    q, k, v = (x.requires_grad_() for x in make(1, 0, 0, 4, 4, 8))
    flex_attention(q, k, v, lambda s, b, h, i, j: s * 2).sum().backward()
    assert q.grad.shape == (1, 0, 4, 8)


def test_masks_made_in_inference_mode():
    with torch.inference_mode():
        block_mask = create_block_mask(causal, None, None, 20, 20, device="cpu")
        tensors = make(1, 1, 1, 20, 20, 8)
        check(*tensors, block_mask=block_mask, mask=create_mask(causal, 1, 1, 20, 20, device="cpu"), backward=False)


def test_a_block_as_large_as_the_mask_is_a_block():
    none, places = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    empty = BlockMask.from_kv_blocks(none, places, BLOCK_SIZE=1 << 30, seq_lengths=(8, 8))
    assert flex_attention(*make(1, 1, 1, 8, 8, 8), block_mask=empty).eq(0).all()


def test_windows_and_caps_beyond_the_plain_kernels():
    tensors, far = make(1, 1, 1, 9, 9, 8), 2**63 - 1
    mod = lambda b, h, i, j: (i + far >= j) & (j >= i - far)  # noqa: E731
    check(*tensors, mask_mod=mod, mask=create_mask(mod, 1, 1, 9, 9, device="cpu"))
    check(*tensors, score_mod=lambda s, b, h, i, j: 1e-30 * torch.tanh(s / 1e-30), scale=2.0, backward=False)


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("least", [1e-45, 1e-40, -1e-45, 0.0])
def test_mods_know_denormals(block, least):
    """Attention runs with denormals as zeros on a CPU. Its mods do not, nor do the bounds of blocks."""
    query, key, value = torch.randn(3, 1, 1, 70, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def mask_mod(b, h, q, k):
        return q.float() / (k + 1).float() >= least

    rows = torch.arange(70)
    seen = mask_mod(0, 0, rows[:, None], rows)
    block_mask = create_block_mask(mask_mod, None, None, 70, 70, "cpu", BLOCK_SIZE=block)
    scores = (query @ key.mT / 4).masked_fill(~seen, -float("inf"))
    wanted = torch.softmax(scores, -1).nan_to_num(0.0) @ value
    for dtype in (torch.float64, torch.float32):
        out = flex_attention(*(x.to(dtype) for x in (query, key, value)), block_mask=block_mask)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def test_a_node_keeps_captured_tensors_only_where_hooks_put_them():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)

    def call():
        slopes = torch.rand(2, requires_grad=True) * 2
        out = flex_attention(q, q, q, lambda score, b, h, i, j: score + slopes[h] * (j - i))
        return out, weakref.ref(slopes)

    for _ in range(3):  # the long way, then the short way
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            out, kept = call()
        gc.collect()  # a trace has cycles
        assert kept() is None
        out.sum().backward()
