"""``quantize``."""

from collections.abc import Sequence
from typing import Literal, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_attn_3._arguments import call_named, call_op, check_tensors, maybe_contiguous
from flash_attn_3._kinds import came
from flash_attn_3._ops import ops, refuse_tangents


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Union[Tensor, Sequence[Tensor], None] = None,
    per: Literal["head", "tensor"] = "head",
    hadamard: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Makes float8_e4m3fn tensors of q, k and v, with the descales that the functions above take.

        descale = max |x| / 448 of a sequence and key head;  1 if all x are 0
        result = x / descale, rounded to nearest even

    Args:
        q: ``[b, len_q, h, d]`` in fp16, bf16 or fp32; with cu_seqlens ``[total_q, h, d]``.
        k, v: ``[b, len_k, h_kv, d]`` in the dtype of q; packed ``[total_k, h_kv, d]``. v may have another width.
        cu_seqlens: int32 ``[b + 1]``, the rows where the sequences of packed tensors begin and end. One tensor serves
            q, k and v, a pair is ``(cu_seqlens_q, cu_seqlens_k)``. Rows that belong to no sequence become 0.
        per: "head": a descale for every sequence and key head. The query heads of a key head share a descale. "tensor":
            one descale each for q, k and v.
        hadamard: multiplies q and k along d by the same orthogonal matrix, which spreads outliers over the columns.
            Scores stay the same. The matrix is a Hadamard matrix with random signs, and depends on d alone. So it is
            the same in every call, and a cache of rotated keys stays usable. Where d is no power of two, the matrix
            has blocks of powers of two: 192 = 128 + 64. The signs are the first outputs of SplitMix64 with seed 0:
            column c changes its sign if bit ``c % 64`` of output ``c // 64`` is set.
    Returns:
        ``(q8, k8, v8, q_descale, k_descale, v_descale)``: contiguous tensors of the inputs' shapes, and fp32
        ``[b, h_kv]``. A NaN becomes NaN and leaves the descale alone. An infinity becomes NaN, and its descale is
        infinite. Magnitudes below 2^-126 count as 0, and a descale is at least 2^-126.
    Raises:
        RuntimeError, TypeError, ValueError: the message names the argument that does not fit, or the tensor that
            requires grad.
    There are no gradients. All arithmetic is fp32, and the CPU and the GPU give the same bits.
    Source: csrc/quantization.h.

    >>> q, k, v = torch.randn(3, 1, 128, 2, 64)
    >>> q8, k8, v8, *descales = quantize(q, k, v, hadamard=True)
    >>> q8.dtype, descales[0].shape
    (torch.float8_e4m3fn, torch.Size([1, 2]))
    >>> out = flash_attn_func(q8, k8, v8, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])
    >>> out.dtype, out.shape
    (torch.bfloat16, torch.Size([1, 128, 2, 64]))
    """
    if not isinstance(per, str) or per not in ("head", "tensor"):
        raise ValueError(f'per must be "head" or "tensor"; {came(per)}')
    sums = cu_seqlens if isinstance(cu_seqlens, (tuple, list)) else (cu_seqlens, cu_seqlens)
    if len(sums) != 2:
        raise ValueError(f"cu_seqlens must be a tensor, a pair of tensors or None; it has {len(sums)} elements")

    def named():
        changed = {"cu_seqlens": cu_seqlens} if isinstance(cu_seqlens, Tensor) else dict(zip(_SUMS, sums))
        return {"q": q, "k": k, "v": v, **changed, "hadamard": hadamard}

    return call_named(
        lambda: _quantize(q, k, v, *sums, per == "tensor", hadamard),
        named,
        optional=("cu_seqlens", *_SUMS),
        flags=(hadamard,),
        renamed=dict.fromkeys(_SUMS, "cu_seqlens") if isinstance(cu_seqlens, Tensor) else None,
    )


_SUMS = "cu_seqlens_q", "cu_seqlens_k"


def _quantize(q, k, v, cu_seqlens_q, cu_seqlens_k, per_tensor, hadamard):
    check_tensors(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"quantize has no gradient, and {name} requires grad: detach it, or use torch.no_grad()")
    if forward_ad._current_level >= 0:
        refuse_tangents((q, k, v))
    *tensors, q_descale, k_descale, v_descale = call_op(
        ops.quantize.default, *map(maybe_contiguous, (q, k, v)), cu_seqlens_q, cu_seqlens_k, per_tensor, hadamard
    )
    descales = (q_descale, k_descale, v_descale)
    if per_tensor:
        b = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        descales = [x.expand(b, k.shape[-2]) for x in descales]
    return *tensors, *descales
