"""Packing and padding against loops over the batch."""

import einops
import pytest
import torch

from flash_attn import bert_padding
from flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = [[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]]  # padding on both sides and an empty sequence
UNUSED = [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


def rows(x, mask):
    """The tokens of a mask, one loop per axis."""
    kept = [x[i, j] for i in range(len(mask)) for j in range(len(mask[i])) if mask[i][j]]
    return torch.stack(kept) if kept else x.new_empty(0, *x.shape[2:])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("tail", [(), (5,), (2, 3)])
def test_unpad_and_pad(tail, dtype):
    x = torch.randn(3, 4, *tail)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, torch.tensor(MASK).to(dtype))
    assert tokens.equal(rows(x, MASK))
    assert indices.tolist() == [0, 1, 9, 10, 11] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 2, 2, 5] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 3 and type(max_seqlen) is int
    assert seqused.tolist() == [2, 0, 3] and seqused.dtype == torch.int32
    padded = pad_input(tokens, indices, 3, 4)
    kept = torch.tensor(MASK, dtype=torch.bool)
    assert padded[kept].equal(x[kept]) and not padded[~kept].any()
    assert pad_input(tokens, indices.int(), 3, 4).equal(padded)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unused_tokens_take_up_room(dtype):
    x = torch.randn(3, 4, 2)
    mask, unused = torch.tensor(MASK).to(dtype), torch.tensor(UNUSED).to(dtype)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert tokens.equal(rows(x, (mask.int() + unused.int()).tolist()))
    assert cu_seqlens.tolist() == [0, 3, 3, 7] and max_seqlen == 4
    assert seqused.tolist() == [2, 0, 3]
    assert len(indices) == 7


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_to_pack(shape):
    x = torch.randn(*shape, 6)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, torch.zeros(shape, dtype=torch.bool))
    assert tokens.shape == (0, 6) and max_seqlen == 0
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1) and seqused.tolist() == [0] * shape[0]
    assert pad_input(tokens, indices, *shape).equal(torch.zeros_like(x))


@pytest.mark.parametrize("unpad", [unpad_input, unpad_input_for_concatenated_sequences])
@pytest.mark.parametrize("shape", [(3, 5), (3, 3), (2, 4), (4, 3), (12,)])
def test_masks_of_another_shape(shape, unpad):
    """Flattened indices of another mask shape would name other tokens."""
    with pytest.raises(RuntimeError, match="mask must have shape"):
        unpad(torch.randn(3, 4, 5), torch.ones(shape, dtype=torch.int32))


def test_too_few_indices_are_named():
    with pytest.raises(RuntimeError, match="indices must have an index for each row .* has 5 rows, indices has 4"):
        pad_input(torch.ones(5, 2), torch.arange(4), 2, 4)


def test_concatenated_sequences():
    x = torch.randn(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]])
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 11, 12, 13, 14] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 6 and type(max_seqlen) is int
    assert tokens.equal(rows(x, [[1] * 5 + [0], [1] * 6, [1] * 3 + [0] * 3]))
    assert pad_input(tokens, indices, 3, 6)[2, 3:].eq(0).all()


def test_gradients():
    x = torch.randn(3, 4, 2, dtype=torch.double, requires_grad=True)
    mask = torch.tensor(MASK)
    indices = unpad_input(x, mask)[1]
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, mask)[0], x)
    tokens = torch.randn(5, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: pad_input(t, indices, 3, 4), tokens)
    assert torch.autograd.gradgradcheck(lambda t: pad_input(t, indices, 3, 4).sin(), tokens)
    flat = torch.randn(6, 2, dtype=torch.double, requires_grad=True)
    some = torch.tensor([4, 0, 3])
    assert torch.autograd.gradcheck(lambda f: index_first_axis(f, some), flat)
    assert torch.autograd.gradcheck(lambda v: index_put_first_axis(v, some, 6), flat[:3].detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda f: index_first_axis_residual(f, some)[0], flat)


def test_residual_gradients_add_up():
    x = torch.randn(4, 3, requires_grad=True)
    taken, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    assert residual.equal(x) and taken.equal(x[[2, 0]])
    (2 * taken).sum().backward(retain_graph=True)
    (3 * residual).sum().backward()
    assert x.grad[:, 0].tolist() == [5.0, 3.0, 5.0, 3.0]


def test_einops_names():
    assert bert_padding.rearrange is einops.rearrange and bert_padding.repeat is einops.repeat
