"""Converts padded batches to packed tokens and back. The varlen functions attend over packed tokens.

A batch of two sequences of 2 and 3 tokens, padded to 4 (x marks a token):

    x x . .        indices    = [0, 1, 4, 5, 6]   rows of the flattened [b * s] axis
    x x x .        cu_seqlens = [0, 2, 5]         where each sequence starts in the packed tokens

``unpad_input`` gathers the rows at ``indices``, and ``pad_input`` scatters them back into zeros. Two autograd functions
below do these moves. The backward of each move is the other move. A third function gathers and also returns the padded
tensor as a residual.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from flash_attn._dispatch import is_exporting, recorded

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "repeat",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


class IndexFirstAxis(torch.autograd.Function):
    """rows = input[indices]. The backward scatters into zeros, and a repeated index keeps one of its gradients.

    >>> IndexFirstAxis.apply(torch.arange(8.0).view(4, 2), torch.tensor([3, 0]))
    tensor([[6., 7.],
            [0., 1.]])
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows = input.shape[0]
        return input[indices.long()]

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Optional[Tensor], ...]:
        (indices,) = ctx.saved_tensors
        return index_put_first_axis(grad_rows, indices, ctx.num_rows), None


class IndexPutFirstAxis(torch.autograd.Function):
    """out = zeros; out[indices] = values. The backward gathers.

    >>> IndexPutFirstAxis.apply(torch.ones(2, 3), torch.tensor([3, 0]), 4)
    tensor([[1., 1., 1.],
            [0., 0., 0.],
            [0., 0., 0.],
            [1., 1., 1.]])
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        out = values.new_zeros(first_axis_dim, *values.shape[1:])
        out[indices.long()] = values
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Optional[Tensor], ...]:
        (indices,) = ctx.saved_tensors
        return index_first_axis(grad_out, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """(input[indices], input). The backward adds the gradient of the rows to the gradient of the residual.

    >>> rows, residual = IndexFirstAxisResidual.apply(torch.randn(4, 2), torch.tensor([3, 0]))
    >>> rows.shape, residual.shape
    (torch.Size([2, 2]), torch.Size([4, 2]))
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(indices)
        return input[indices.long()], input.detach()

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_residual: Tensor) -> tuple[Optional[Tensor], ...]:
        (indices,) = ctx.saved_tensors
        return grad_residual.index_add(0, indices.long(), grad_rows), None


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of the first axis: ``input`` [n, ...], ``indices`` [k] integers -> [k, ...]. Differentiable in ``input``.

    >>> index_first_axis(torch.arange(4), torch.tensor([3, 0]))
    tensor([3, 0])
    """
    return recorded(IndexFirstAxis, input, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with ``values`` [k, ...] at ``indices`` [k]. Differentiable in ``values``.

    >>> index_put_first_axis(torch.tensor([5, 7]), torch.tensor([3, 0]), 4)
    tensor([7, 0, 0, 5])
    """
    return recorded(IndexPutFirstAxis, values, indices, first_axis_dim)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Does ``index_first_axis`` and also returns ``input``, so a residual branch needs no second gradient buffer.

    >>> rows, residual = index_first_axis_residual(torch.arange(4.0), torch.tensor([3, 0]))
    >>> rows, residual
    (tensor([3., 0.]), tensor([0., 1., 2., 3.]))
    """
    if is_exporting():  # detach would drop a gradient
        return index_first_axis(input, indices), input
    return IndexFirstAxisResidual.apply(input, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch.

    Args:
        hidden_states: ``[b, s, ...]``.
        attention_mask: ``[b, s]`` bool or int, nonzero for tokens to attend to.
        unused_mask: ``[b, s]`` or None, nonzero for tokens that take up room in the packed tensor but are not used.
    Returns:
        Five values, where t counts the tokens in either mask:
        the tokens ``[t, ...]``; their ``indices`` in the flattened batch, int64 ``[t]``; ``cu_seqlens`` int32
        ``[b + 1]``; the longest length, an int (reads the device); ``seqused`` int32 ``[b]``, the number of tokens in
        ``attention_mask``.
    Gradients for hidden_states.

    >>> mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    >>> tokens, indices, cu_seqlens, longest, seqused = unpad_input(torch.randn(2, 4, 16), mask)
    >>> tokens.shape, indices, cu_seqlens
    (torch.Size([5, 16]), tensor([0, 1, 4, 5, 6]), tensor([0, 2, 5], dtype=torch.int32))
    >>> longest, seqused
    (3, tensor([2, 3], dtype=torch.int32))
    """
    used = attention_mask != 0
    stored = used if unused_mask is None else used | (unused_mask != 0)
    tokens, indices, cu_seqlens, max_seqlen = _pack(hidden_states, stored, stored.sum(-1, dtype=torch.int32))
    return tokens, indices, cu_seqlens, max_seqlen, used.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a padded batch whose rows hold several short sequences one after the other.

    Args:
        hidden_states: ``[b, s, ...]``.
        attention_mask_in_length: ``[b, s]`` int. A row starts with the lengths of its sequences, and zeros follow.
            ``[[2, 1, 0, 0], [3, 0, 0, 0]]`` has sequences of 2 and 1 tokens in row 0, and of 3 tokens in row 1.
    Returns:
        Four values as of ``unpad_input``: tokens, indices, ``cu_seqlens`` over all sequences, the longest length.
    Gradients for hidden_states.

    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 4, 16), lengths)
    >>> indices, cu_seqlens, longest
    (tensor([0, 1, 2, 4, 5, 6]), tensor([0, 2, 3, 6], dtype=torch.int32), 3)
    """
    positions = torch.arange(attention_mask_in_length.shape[-1], device=attention_mask_in_length.device)
    stored = positions < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _pack(hidden_states, stored, lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Scatter packed tokens ``[t, ...]`` to ``[batch, seqlen, ...]`` with zeros elsewhere. Undoes ``unpad_input``.

    Raises:
        RuntimeError: indices has another number of elements than hidden_states has rows.

    >>> x = torch.randn(2, 4, 16)
    >>> tokens, indices, *_ = unpad_input(x, torch.ones(2, 4))
    >>> torch.equal(pad_input(tokens, indices, 2, 4), x)
    True
    """
    if not torch.compiler.is_compiling() and hidden_states.shape[0] not in (1, indices.shape[0]):
        raise RuntimeError(
            f"indices must have an index for each row of hidden_states; hidden_states has {hidden_states.shape[0]} "
            f"rows, indices has {indices.shape[0]}"
        )
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _pack(hidden_states, stored, lengths):
    """Returns the tokens for which ``stored`` [b, s] is true, their indices, and the offsets for ``lengths``."""
    if stored.shape != hidden_states.shape[:2]:
        came = f"it has {tuple(stored.shape)}, hidden_states {tuple(hidden_states.shape)}"
        raise RuntimeError(f"the mask must have shape (batch_size, seqlen) of hidden_states; {came}")
    indices = stored.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen
