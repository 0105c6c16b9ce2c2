"""Captured tensors whose values for neighbouring keys lie apart are copied before the kernels (flex/key_order.py)."""

import pytest
import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flex import key_order
from flash_attn.flex_attention import flex_attention


@pytest.fixture
def copies(monkeypatch):
    """CPUs copy, too, and small tensors. The fixture lists the tensors that were copied, with their copies."""
    made, copied = [], key_order.copied

    def spy(tensor, dim, rows):
        found = copied(tensor, dim, rows)
        if found is not tensor:
            made.append((tensor, found))
        return found

    monkeypatch.setitem(key_order.LEAST, "cpu", 2)
    monkeypatch.setattr(key_order, "copied", spy)
    return made


LEN_Q, LEN_KV, H, D = 33, 50, 4, 16


def inputs(b=2, len_q=LEN_Q, len_kv=LEN_KV, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(b, len_q, H, D), (b, len_kv, 2, D), (b, len_kv, 2, D)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def of_t5(*sizes, dtype=torch.float32):
    """A bias as T5 makes it: heads lie side by side."""
    torch.manual_seed(1)
    return torch.randn(*sizes, dtype=dtype).requires_grad_()


def run(function, leaves, *, is_recorded=True):
    """The output and the gradients of a function of the leaves."""
    if not is_recorded:
        with torch.no_grad():
            return [function(*leaves)]
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


WAYS = ["short", "watched", "compiled"]


def way_of(function, way):
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)
    if way == "short":
        return function

    def watched(*args):
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            return function(*args)

    return watched


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_recorded", (False, True))
def test_bias_of_t5(copies, way, is_recorded):
    """The same bits as from a contiguous bias. The gradient has the shape and the strides that it had."""

    def attend(q, k, v, values):
        return flash_attn_func(q, k, v, causal=True, attn_bias=values.permute(2, 0, 1).unsqueeze(0))

    def attend_plainly(q, k, v, values):
        return flash_attn_func(q, k, v, causal=True, attn_bias=values.permute(2, 0, 1).contiguous().unsqueeze(0))

    leaves = [*inputs(), of_t5(LEN_Q, LEN_KV, H)]
    expected = run(attend_plainly, leaves, is_recorded=is_recorded)
    assert not copies
    for got, want in zip(run(way_of(attend, way), leaves, is_recorded=is_recorded), expected, strict=True):
        assert torch.equal(got, want) and got.stride() == want.stride()
    assert len(copies) == 1 + is_recorded
    for tensor, copy in copies:
        assert tensor.stride()[-1] == H and copy.stride()[-1] == 1 and not copy.requires_grad


@pytest.mark.parametrize("way", WAYS)
def test_bias_that_is_a_leaf(copies, way):
    values = of_t5(LEN_Q, LEN_KV, H).detach()
    leaves = [*inputs(), values.permute(2, 0, 1)[None].requires_grad_()]

    def function(q, k, v, bias):
        return flash_attn_func(q, k, v, attn_bias=bias)

    got = run(way_of(function, way), leaves)
    num = len(copies)
    want = run(function, [*leaves[:3], leaves[3].detach().contiguous().requires_grad_()])
    assert num == 2 == len(copies)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert got[-1].stride() == leaves[3].stride()


@pytest.mark.parametrize("way", WAYS)
def test_mask(copies, way):
    mask = (torch.rand(LEN_Q, LEN_KV, H) > 0.3).permute(2, 0, 1)[None]

    def attend(mask):
        return lambda q, k, v: flash_attn_func(q, k, v, attn_mask=mask)

    want = run(attend(mask.contiguous()), inputs())
    assert not copies
    for a, b in zip(run(way_of(attend(mask), way), inputs()), want, strict=True):
        assert torch.equal(a, b)
    assert len(copies) == 2


def test_packed_bias_and_mask(copies):
    """The key of a packed call is kv_idx less the beginning of its sequence."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 33], [0, 30, 50]))
    mask = (torch.rand(2, 1, 30, 20) > 0.3).mT

    def attend(q, k, v, values, mask):
        bias = values.permute(2, 0, 1).unsqueeze(0)
        bias = bias if mask.stride(-1) > 1 else bias.contiguous()
        return flash_attn_varlen_func(
            q[0], k[0], v[0], cu_q, cu_k, 20, 30, attn_bias=bias, attn_mask=mask, return_lse=True
        )[0]

    leaves = [*inputs(1), of_t5(20, 30, H)]
    want = run(lambda *x: attend(*x, mask.contiguous()), leaves)
    assert not copies
    for a, b in zip(run(lambda *x: attend(*x, mask), leaves), want, strict=True):
        assert torch.equal(a, b)
    assert len(copies) == 4


@pytest.mark.parametrize("way", WAYS)
def test_captured_tensor(copies, way):
    """kv_idx may index any dimension."""
    q, k, v = (x.transpose(1, 2).detach() for x in inputs())
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))

    def attend(q, k, v, by_key):
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + by_key[j, i + 1, h])

    leaves = [q, k, v, of_t5(LEN_KV, LEN_Q + 1, H)]

    def plainly(q, k, v, by_key):
        x = by_key.permute(2, 1, 0).contiguous()
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + x[h, i + 1, j])

    want = run(plainly, leaves)
    assert not copies
    for _ in range(2):  # the second call knows the mod, and goes the short way
        for a, b in zip(run(way_of(attend, way), leaves), want, strict=True):
            assert torch.equal(a, b)
    assert len(copies) == 4 and all(copy.stride(0) == 1 for _, copy in copies)


def test_bare_mask_mod(copies):
    q, k, v = (x.transpose(1, 2).detach()[:, :2] for x in inputs())
    mask = torch.rand(LEN_KV, LEN_Q) > 0.3
    for _ in range(2):
        out = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: mask[j, i])
    num, dense = len(copies), mask.mT.contiguous()
    assert num == 2
    assert torch.equal(out, flex_attention(q, k, v, mask_mod=lambda b, h, i, j: dense[i, j])) and len(copies) == num


def test_indices_that_walk_otherwise(copies):
    """Neighbouring keys that lie apart in any order of the dimensions are left alone."""
    q, k, v = (x.transpose(1, 2).detach()[:, :2] for x in inputs())
    x, order = torch.randn(200, 200), torch.randperm(LEN_KV)
    for mod in (
        lambda s, b, h, i, j: s + x[order[j], i],
        lambda s, b, h, i, j: s + x[2 * j, i],
        lambda s, b, h, i, j: s + x[j, j],
        lambda s, b, h, i, j: s + x[i, j] + x[j, i],
        lambda s, b, h, i, j: s + x[100 - j, i],
    ):
        flex_attention(q, k, v, mod)
    assert not copies


def test_when_a_copy_does_not_pay(copies):
    def is_copied(x, rows=100):
        return key_order.copied(x, x.dim() - 1, rows) is not x

    x = torch.randn(10, 20, 8)
    assert is_copied(x.permute(2, 0, 1))
    assert not is_copied(x)
    assert not is_copied(x.permute(2, 0, 1), rows=16)  # decoding
    assert not is_copied(x[:, :, ::2].permute(2, 0, 1)[..., :1])  # one key
    assert not is_copied(torch.randn(400)[::2])  # two elements apart
    assert not is_copied(torch.randn(10, 1).expand(10, 20))  # all keys share a value
    assert not is_copied(torch.randn(400).as_strided((10, 20), (8, 8)))  # more elements than memory
    assert not is_copied(torch.empty(10, 20, 8, device="meta").permute(2, 0, 1))
    expanded = torch.randn(10, 20, 8).permute(2, 0, 1).unsqueeze(0).expand(5, -1, -1, -1)
    copy = key_order.copied(expanded, 3, 100)
    assert copy.shape == expanded.shape and copy.stride() == (0, 200, 20, 1) and torch.equal(copy, expanded)


def test_a_backward_keeps_no_copy(copies):
    leaves = [*inputs(), of_t5(LEN_Q, LEN_KV, H).detach().permute(2, 0, 1)[None].requires_grad_()]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        flash_attn_func(*leaves[:3], attn_bias=leaves[3])
    (tensor, copy), *rest = copies
    assert not rest and leaves[3].data_ptr() in saved and copy.data_ptr() not in saved


def test_freed_bias_is_named(copies):
    q, k, v = inputs()
    bias = torch.randn(LEN_Q, LEN_KV, H).permute(2, 0, 1)
    bias.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="attn_bias has shape"):
        flash_attn_func(q, k, v, attn_bias=bias)
