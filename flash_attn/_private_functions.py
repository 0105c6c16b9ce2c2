"""Private functions and classes that clients of flash-attn 2 call, with the same names and arguments."""

from typing import Any, Optional

import torch
from torch import Tensor

from flash_attn import _attention
from flash_attn._attention import backward
from flash_attn._calls import on_ranks
from flash_attn._dispatch import call
from flash_attn._ops import flash_attn_2_cuda

_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys that share one row maximum in ``S_dmask``: all of them, on every device."""
    return 1 << 30


# ---- autograd classes ----------------------------------------------------------------------------------------------
# In every ``apply`` these arguments follow the tensors and lengths: dropout_p, softmax_scale, causal, window_size,
# softcap, alibi_slopes, deterministic, return_softmax, (FlashAttnVarlenFunc: block_table,) is_grad_enabled. The node
# of the result is of another class (_attention.py), which the transforms of torch.func know.


def _apply(tensors, lengths, *options):
    *options, is_grad_enabled = options
    if is_grad_enabled:
        return on_ranks(_attention.attend, tensors, lengths, options)
    with torch.no_grad():
        return on_ranks(_attention.attend, tensors, lengths, options)


class FlashAttnFunc:
    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        return _apply((q, k, v), (), *options)


class FlashAttnKVPackedFunc:
    @staticmethod
    def apply(q: Tensor, kv: Tensor, *options: Any) -> Any:
        return _apply((q, kv), (), *options)


class FlashAttnQKVPackedFunc:
    @staticmethod
    def apply(qkv: Tensor, *options: Any) -> Any:
        return _apply((qkv,), (), *options)


class FlashAttnVarlenFunc:
    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *options: Any,
    ) -> Any:
        return _apply((q, k, v), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *options)


class FlashAttnVarlenKVPackedFunc:
    @staticmethod
    def apply(
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *options: Any,
    ) -> Any:
        return _apply((q, kv), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), *options)


class FlashAttnVarlenQKVPackedFunc:
    @staticmethod
    def apply(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any) -> Any:
        return _apply((qkv,), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), *options)


# ---- functions -----------------------------------------------------------------------------------------------------


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the forward op on tensors of any strides and returns ``(out, softmax_lse, S_dmask, rng_state)``.

    The arguments are those of ``flash_attn_func``. softmax_scale must be a number. return_softmax returns S_dmask and
    needs dropout. rng_state, int64 ``[2]``, makes the backward draw the same dropout mask. It is zero without dropout.
    """
    return call(
        flash_attn_2_cuda.direct_flash_attn_forward, _wrapped_flash_attn_forward, 3,
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the varlen forward op on tensors of any strides and returns ``(out, softmax_lse, S_dmask, rng_state)``.

    The arguments are those of ``flash_attn_varlen_func`` and ``_flash_attn_forward``, and:
        leftpad_k: int32 ``[b]``: leading keys of each sequence to skip.
        seqused_k: int32 ``[b]``: keys of each sequence to use; masks are aligned to these keys.
        zero_tensors: fill rows that belong to no sequence, out with 0 and softmax_lse with -inf.
        num_splits: 0: the plan decides; 1: the keys of a row are not split; more: refused with block_table. On the CPU
            results never depend on the batch. On a GPU they may, because the lengths choose the kernel.
    """
    return call(
        flash_attn_2_cuda.direct_flash_attn_varlen_forward, _wrapped_flash_attn_varlen_forward, 3,
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, return_softmax, block_table, leftpad_k,
        seqused_k, zero_tensors, num_splits,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
) -> Tensor:
    """Runs the backward op, writes dq, dk, dv in place, and returns ``softmax_d``, the row sums of ``dout * out``.

    dq, dk, dv: views of the shapes and dtype of q, k, v with a contiguous last dimension. A None is not computed.
    softmax_d: fp32 ``[b, h, len_q rounded up to 128]``. rng_state comes from the forward, like all other arguments.
    """
    return backward(
        False, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Runs the varlen backward op, writes dq, dk, dv in place, returns ``softmax_d``, the row sums of ``dout * out``.

    The arguments are those of ``_flash_attn_backward``. softmax_d is fp32 ``[h, total_q + 128 b]``. Rows that belong to
    no sequence are not written, unless zero_tensors fills the gradients with 0 first.
    """
    return backward(
        True, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic, rng_state, zero_tensors,
    )  # fmt: skip
