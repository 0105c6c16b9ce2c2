"""Attention between projections. These modules take packed q, k, v and hold scale, mask and dropout.

``Flash*`` call the attention functions. ``SelfAttention`` and ``CrossAttention`` compute the same in plain PyTorch,
with a key padding mask. Dropout acts in training mode only.
"""

import math
from typing import Optional

import torch
import torch.nn as nn
from torch import Tensor

from flash_attn._types import Window
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = ["CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention", "get_alibi_slopes"]


def get_alibi_slopes(nheads: int) -> list[float]:
    """Slopes of ALiBi (arXiv 2108.12409) as a list: ``2^(-8 k / n)``, k = 1 .. n, for n a power of two.

    n is nheads, at least 1. Otherwise the slopes of the next lower power come first. Every second slope of the next
    higher power follows.

    >>> get_alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** int(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * k / power) for k in range(1, power + 1)]
    return slopes if power == nheads else slopes + get_alibi_slopes(2 * power)[0::2][: nheads - power]


class _FlashAttention(nn.Module):
    """The members that the two flash modules share."""

    def __init__(self, causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic):
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def _options(self, causal):
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """Attention of packed qkv.

        causal     x . .      window     x . .
                   x x .      (1, 0)     x x .
                   x x x                 . x x

    Args:
        causal: as of ``flash_attn_func``. forward may say otherwise for one call.
        softmax_scale: factor of ``q @ k.T``; ``1 / sqrt(d)`` if None.
        attention_dropout: probability to drop an attention weight, in training mode only.
        window_size, alibi_slopes, deterministic: as of ``flash_attn_func``. The slopes become a buffer that is not
            saved.
    Source: FlashAttention-2, arXiv 2307.08691.

    >>> attention = FlashSelfAttention(causal=True, window_size=(128, 0))
    >>> attention(torch.randn(2, 5, 3, 4, 16)).shape
    torch.Size([2, 5, 4, 16])
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: Optional[float] = None,
        attention_dropout: float = 0.0,
        window_size: Window = (-1, -1),
        alibi_slopes: Optional[Tensor] = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        qkv: Tensor,
        causal: Optional[bool] = None,
        cu_seqlens: Optional[Tensor] = None,
        max_seqlen: Optional[int] = None,
    ) -> Tensor:
        """``[b, s, 3, h, d]`` -> ``[b, s, h, d]``; with int32 cu_seqlens and int max_seqlen ``[t, 3, h, d]``.

        Args:
            qkv: dtypes and head dimensions are those of ``flash_attn_func``.
            causal: None is the module's.
            cu_seqlens, max_seqlen: int32 ``[b + 1]`` starts of the packed sequences, and the longest sequence's length.
        Returns:
            ``[b, s, h, d]``, or packed ``[t, h, d]``, in the dtype of qkv.
        Raises:
            AssertionError: cu_seqlens is not int32, or max_seqlen is not an int.
            RuntimeError: as of ``flash_attn_qkvpacked_func`` and ``flash_attn_varlen_qkvpacked_func``.
        Gradients for qkv.
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal))
        _check_lengths("cu_seqlens", cu_seqlens, "max_seqlen", max_seqlen)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal))


class FlashCrossAttention(_FlashAttention):
    """Attention of q over packed kv. The order of alibi_slopes and window_size differs from FlashSelfAttention's.

    Masks are aligned to the bottom right corner. Causal with fewer queries than keys, and with more:

        x x x .      . .
        x x x x      . .
                     x .
                     x x

    Args:
        causal: as of ``flash_attn_func``. forward may say otherwise for one call.
        softmax_scale: factor of ``q @ k.T``; ``1 / sqrt(d)`` if None.
        attention_dropout: probability to drop an attention weight, in training mode only.
        alibi_slopes, window_size, deterministic: as of ``flash_attn_func``. The slopes become a buffer that is not
            saved.
    Source: FlashAttention-2, arXiv 2307.08691.

    >>> attention = FlashCrossAttention(causal=True)
    >>> attention(torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 2, 16)).shape
    torch.Size([2, 3, 4, 16])
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: Optional[float] = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Optional[Tensor] = None,
        window_size: Window = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: Optional[bool] = None,
        cu_seqlens: Optional[Tensor] = None,
        max_seqlen: Optional[int] = None,
        cu_seqlens_k: Optional[Tensor] = None,
        max_seqlen_k: Optional[int] = None,
    ) -> Tensor:
        """q ``[b, s_q, h, d]``, kv ``[b, s_k, 2, h_kv, d]`` -> ``[b, s_q, h, d]``; packed with both cu_seqlens.

        Args:
            q, kv: dtypes and head dimensions are those of ``flash_attn_func``. h is a multiple of h_kv.
            causal: None is the module's.
            cu_seqlens, max_seqlen: int32 ``[b + 1]`` starts of q's packed sequences, and the longest sequence's length.
                q is then ``[t_q, h, d]``.
            cu_seqlens_k, max_seqlen_k: the same of kv, which is then ``[t_k, 2, h_kv, d]``.
        Returns:
            ``[b, s_q, h, d]``, or packed ``[t_q, h, d]``, in the dtype of q. Rows that see no key are 0.
        Raises:
            AssertionError: batch or d of q and kv differ, a cu_seqlens is not int32, or a max_seqlen is not an int.
            RuntimeError: as of ``flash_attn_kvpacked_func`` and ``flash_attn_varlen_kvpacked_func``.
        Gradients for q and kv.
        """
        if cu_seqlens is None:
            assert q.shape[0] == kv.shape[0] and q.shape[3] == kv.shape[4], f"q {q.shape} does not fit kv {kv.shape}"
            return flash_attn_kvpacked_func(q, kv, **self._options(causal))
        _check_lengths("cu_seqlens", cu_seqlens, "max_seqlen", max_seqlen)
        _check_lengths("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k)
        lengths = cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k
        return flash_attn_varlen_kvpacked_func(q, kv, *lengths, **self._options(causal))


class CrossAttention(nn.Module):
    """softmax(scale q k^T + mask) v in plain PyTorch, softmax in fp32.

    The causal mask is aligned to the bottom right corner. Fewer queries than keys, and more:

        x x x .      . .
        x x x x      . .
                     x .
                     x x

    A query that sees no key gets the mean of all values.

    Args:
        causal: apply the causal mask. forward may say otherwise for one call.
        softmax_scale: factor of ``q @ k.T``; ``1 / sqrt(d)`` if None.
        attention_dropout: probability to drop an attention weight, in training mode only.

    >>> q, kv = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 2, 2, 16)
    >>> out = CrossAttention(causal=True)(q, kv)
    >>> torch.allclose(out, FlashCrossAttention(causal=True)(q, kv), atol=1e-5)
    True
    """

    def __init__(
        self, causal: bool = False, softmax_scale: Optional[float] = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)

    def forward(
        self, q: Tensor, kv: Tensor, causal: Optional[bool] = None, key_padding_mask: Optional[Tensor] = None
    ) -> Tensor:
        """q ``[b, s_q, h, d]``, kv ``[b, s_k, 2, h_kv, d]``, key_padding_mask ``[b, s_k]`` true where a key is kept.

        The causal mask is aligned to the bottom right corner. With a padding mask, this is the corner of the kept keys.
        causal None is the module's. h is a multiple of h_kv.

        Returns:
            ``[b, s_q, h, d]`` in the dtype of q and kv.
        Raises:
            AssertionError: batch or d of q and kv differ.
        Gradients for q and kv.
        """
        assert q.shape[0] == kv.shape[0] and q.shape[3] == kv.shape[4], f"q {q.shape} does not fit kv {kv.shape}"
        k, v = kv.repeat_interleave(q.shape[2] // kv.shape[3], dim=3).unbind(2)
        hidden = _hidden_by_padding(key_padding_mask)
        if self.causal if causal is None else causal:
            len_k = k.shape[1] if key_padding_mask is None else key_padding_mask.sum(-1)[:, None, None, None]
            hidden = hidden | _hidden_by_causality(q.shape[1], k.shape[1], len_k - q.shape[1], q.device)
        return _attention(q, k, v, self.softmax_scale, hidden, self.drop)


class SelfAttention(nn.Module):
    """``CrossAttention`` of packed qkv. The causal mask is the lower triangle.

        x . .
        x x .
        x x x

    The arguments are those of ``CrossAttention``.

    >>> attention = SelfAttention(causal=True)
    >>> kept = torch.tensor([[True, True, False], [True, True, True]])
    >>> attention(torch.randn(2, 3, 3, 4, 16), key_padding_mask=kept).shape
    torch.Size([2, 3, 4, 16])
    """

    def __init__(
        self, causal: bool = False, softmax_scale: Optional[float] = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)

    def forward(self, qkv: Tensor, causal: Optional[bool] = None, key_padding_mask: Optional[Tensor] = None) -> Tensor:
        """``[b, s, 3, h, d]``, key_padding_mask ``[b, s]`` -> ``[b, s, h, d]``.

        The mask is true where a key is kept. causal None is the module's. The result has the dtype of qkv.
        Gradients for qkv.
        """
        q, k, v = qkv.unbind(2)
        hidden = _hidden_by_padding(key_padding_mask)
        if self.causal if causal is None else causal:
            hidden = hidden | _hidden_by_causality(q.shape[1], q.shape[1], 0, q.device)
        return _attention(q, k, v, self.softmax_scale, hidden, self.drop)


def _check_lengths(offsets_name, offsets, longest_name, longest):
    assert offsets is not None and offsets.dtype == torch.int32, f"{offsets_name} must be an int32 tensor"
    assert isinstance(longest, int), f"{longest_name} must be an int, got {type(longest).__name__}"


def _hidden_by_padding(kept):
    """Returns True for keys outside ``kept`` ``[b, s_k]``, broadcast over heads and queries. None hides no key."""
    return torch.tensor(False) if kept is None else ~kept.bool()[:, None, None]


def _hidden_by_causality(len_q, len_k, shift, device):
    """Returns key > query + shift, ``[len_q, len_k]``, or with a tensor shift ``[b, 1, len_q, len_k]``."""
    return torch.arange(len_k, device=device) > torch.arange(len_q, device=device)[:, None] + shift


def _attention(q, k, v, softmax_scale, hidden, dropout):
    """q ``[b, s_q, h, d]``, k and v ``[b, s_k, h, d]``. A query that sees no key gets the mean of all values."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k * scale)
    scores = scores.masked_fill(hidden.to(scores.device), torch.finfo(scores.dtype).min)
    p = torch.softmax(scores, dim=-1, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", dropout(p), v)
