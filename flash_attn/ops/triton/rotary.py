"""Rotary position embedding of one tensor: the first r of d dimensions of each head are rotated pair by pair,

    (x0, x1) -> (x0 cos - x1 sin,  x0 sin + x1 cos),        cos, sin [s_ro, r / 2]

Pair i is (i, r / 2 + i), or (2 i, 2 i + 1) when interleaved. A token at position p uses row p of cos and sin. A token
at a position outside the table is not rotated (cos 1, sin 0). Products and sums are fp32 (fp64 for fp64), rounded once.
"""

from typing import Optional

import torch
from torch import Tensor

from flash_attn._dispatch import is_exporting
from flash_attn._types import Offset

__all__ = ["apply_rotary", "rotary_kernel"]


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: Offset = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate ``x`` by its positions.

    Args:
        x: ``[b, s, h, d]``, or packed ``[t, h, d]`` with ``cu_seqlens`` and ``max_seqlen``; d <= 256. Any floating
            dtype.
        cos, sin: ``[s_ro, r / 2]``, r <= d and s_ro >= s. Any floating dtype.
        seqlen_offsets: position of the first token, an int >= 0 or int32/int64 ``[b]``.
        cu_seqlens: ``[b + 1]`` starts of the packed sequences; tokens after the last one are left as they are.
        max_seqlen: number of tokens of the longest packed sequence.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, r / 2), (1, r / 2 + 1), ...
        inplace: write into ``x`` and return it.
        conjugate: rotate backwards.
    Returns:
        Shape, dtype and layout of ``x``.
    Raises:
        AssertionError: a shape or dtype that does not fit, a negative int offset, or a table with too few rows.
    Gradients for x, cos and sin, but not in place. ``layers.rotary.apply_rotary_emb`` has gradients in place.
    Source: arXiv 2104.09864.

    >>> x, angles = torch.randn(2, 5, 4, 16), torch.randn(5, 8)
    >>> y = apply_rotary(x, angles.cos(), angles.sin())
    >>> torch.allclose(apply_rotary(y, angles.cos(), angles.sin(), conjugate=True), x, atol=1e-6)
    True
    """
    assert cos.dim() == 2 and sin.shape == cos.shape, f"cos {cos.shape} and sin {sin.shape} must be [s_ro, r / 2]"
    rotary_dim = 2 * cos.shape[1]
    assert rotary_dim <= x.shape[-1] <= 256, f"rotary dim {rotary_dim} <= head dim {x.shape[-1]} <= 256 does not hold"
    if cu_seqlens is None:
        assert x.dim() == 4, f"x must be [b, s, h, d], got {tuple(x.shape)}"
        batch, seqlen = x.shape[:2]
    else:
        assert x.dim() == 3, f"x must be [t, h, d] with cu_seqlens, got {tuple(x.shape)}"
        assert max_seqlen is not None, "cu_seqlens needs max_seqlen"
        batch, seqlen = cu_seqlens.shape[0] - 1, max_seqlen
    if isinstance(seqlen_offsets, torch.Tensor):
        assert seqlen_offsets.shape == (batch,), f"seqlen_offsets must be ({batch},), got {tuple(seqlen_offsets.shape)}"
        assert seqlen_offsets.dtype in (torch.int32, torch.int64), "seqlen_offsets must be int32 or int64"
        last = seqlen
    else:
        assert seqlen_offsets >= 0, f"seqlen_offsets is {seqlen_offsets}, it must not be negative"
        last = seqlen + seqlen_offsets
    assert cos.shape[0] >= last, f"cos and sin have {cos.shape[0]} rows, {last} positions are needed"

    cos, sin = _rows_of_tokens(x, cos, sin, seqlen_offsets, cu_seqlens)
    sin = -sin if conjugate else sin
    if not inplace:
        return _rotate(x, cos, sin, interleaved, torch.empty_like(x))
    if is_exporting():  # an exported program would not see a write to x.data, and would leave x as it is
        return x.copy_(_rotate(x, cos, sin, interleaved, torch.empty_like(x)))
    # NOTE: autograd does not see this write, as it would not see a kernel's write. Otherwise autograd would refuse a
    # leaf that requires grad. If two views of one projection are rotated, autograd would refuse the second view.
    with torch.no_grad():
        unseen = x.data
        _rotate(unseen, cos, sin, interleaved, unseen)
    return x


def _rows_of_tokens(x, cos, sin, offsets, cu_seqlens):
    """Returns cos and sin of each token of ``x``, broadcastable to ``[..., h, r / 2]``, in the arithmetic's dtype."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(compute_dtype), sin.to(compute_dtype)
    if cos.shape[0] == 0 or (cu_seqlens is not None and cu_seqlens.shape[0] == 1):  # no token has a row in the table
        return cos.new_ones(1, cos.shape[1]), sin.new_zeros(1, sin.shape[1])
    if cu_seqlens is None and not isinstance(offsets, torch.Tensor):
        rows = slice(offsets, offsets + x.shape[1])
        return cos[rows, None], sin[rows, None]

    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device) + offsets[:, None]
    else:
        tokens = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
        inside = sequence < cu_seqlens.shape[0] - 1
        sequence = torch.where(inside, sequence, 0)
        first = offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets
        positions = torch.where(inside, tokens - cu_seqlens[sequence] + first, -1)
    in_table = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
    rows = torch.where(in_table.squeeze(-1), positions, 0)
    cos, sin = torch.where(in_table, cos[rows], 1.0), torch.where(in_table, sin[rows], 0.0)
    return cos.unsqueeze(-2), sin.unsqueeze(-2)


def _rotate(x, cos, sin, interleaved, out):
    """The formula. ``out`` may be ``x``, so both members of a pair are computed before a member is written."""
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    x0, x1 = x[..., first].to(cos.dtype), x[..., second].to(cos.dtype)
    y0, y1 = x0 * cos - x1 * sin, x0 * sin + x1 * cos
    out[..., first] = y0
    out[..., second] = y1
    if out is not x:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _NotATritonKernel:
    """Replaces a Triton kernel that clients expect. Any use raises an error that names the function to call."""

    _words = "rotary_kernel is not a Triton kernel in this package; call apply_rotary instead"

    def __getitem__(self, grid):
        raise NotImplementedError(self._words)

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(self._words)

    def __getattr__(self, name):
        raise AttributeError(f"{self._words} (no attribute {name!r})")


rotary_kernel = _NotATritonKernel()
