"""Rotary position embedding with gradients, in place on q and k of packed tensors, and as a module.

The rotation itself is ``flash_attn.ops.triton.rotary.apply_rotary``. Its backward is its transpose, the rotation by the
opposite angles. Gradients are rotated into new memory, because autograd may pass the same tensor to other functions.
Source: RoFormer, arXiv 2104.09864; XPos, arXiv 2212.10554.
"""

from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.compiler import is_compiling

from flash_attn._dispatch import is_unseen, recorded
from flash_attn._types import Device, Offset
from flash_attn._vmap import is_batch_of_gradients
from flash_attn.ops.triton.rotary import apply_rotary

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (x0, x1) becomes (-x1, x0).

    Args:
        x: ``[..., r]``, r even.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, r / 2), (1, r / 2 + 1), ...
    Returns:
        Shape and dtype of x.
    Gradients for x.

    >>> rotate_half(torch.tensor([1, 2, 3, 4]))
    tensor([-3, -4,  1,  2])
    >>> rotate_half(torch.tensor([1, 2, 3, 4]), interleaved=True)
    tensor([-2,  1, -4,  3])
    """
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((-x1, x0), dim=-1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The definition, for tests. x is ``[b, s, h, d]``, cos and sin are ``[s, r / 2]`` or ``[b, s, r / 2]``.

    interleaved is that of ``apply_rotary_emb``. Returns the shape of x, in the dtype to which x and cos promote.

    Raises:
        AssertionError: r exceeds d.
    Gradients for x, cos and sin.

    >>> x, angles = torch.randn(2, 5, 4, 16), torch.randn(5, 8)
    >>> y = apply_rotary_emb_torch(x, angles.cos(), angles.sin())
    >>> torch.allclose(y.norm(dim=-1), x.norm(dim=-1))
    True
    """
    rotary_dim = 2 * cos.shape[-1]
    assert rotary_dim <= x.shape[-1], f"rotary dim {rotary_dim} exceeds head dim {x.shape[-1]}"
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else t.repeat(*[1] * (t.dim() - 1), 2) for t in (cos, sin))
    turned, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = turned * cos.unsqueeze(-2) + rotate_half(turned, interleaved) * sin.unsqueeze(-2)
    return torch.cat((turned, kept), dim=-1)


def _turn_back(dx, grad, cos, sin, offsets, interleaved):
    """Writes the gradient ``grad`` of a rotated tensor into ``dx``, which is a copy of ``grad``."""
    # Autograd has to see the rotation if it records this backward for a second derivative. A vmap has to see it, too.
    if torch.is_grad_enabled() or not is_unseen() or is_batch_of_gradients(grad):
        dx.copy_(apply_rotary(grad, cos, sin, offsets, interleaved=interleaved, conjugate=True))
    else:
        apply_rotary(dx, cos, sin, offsets, interleaved=interleaved, inplace=True, conjugate=True)


# NOTE: the in-place functions return their input without mark_dirty. mark_dirty would refuse a leaf that requires grad,
# and views made by unbind or split. Only the returned tensor has the right history. Autograd does not see the write. So
# do not rotate a tensor that an earlier operation has saved for its backward.


class ApplyRotaryEmb(torch.autograd.Function):
    """Rotates one tensor, dense or packed. The public form is ``apply_rotary_emb``, with the same arguments.

    >>> x, angles = torch.randn(2, 5, 4, 16), torch.randn(5, 8)
    >>> y = ApplyRotaryEmb.apply(x, angles.cos(), angles.sin())
    >>> torch.allclose(y, apply_rotary_emb_torch(x, angles.cos(), angles.sin()), atol=1e-6)
    True
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: Offset = 0,
        cu_seqlens: Optional[Tensor] = None,
        max_seqlen: Optional[int] = None,
    ) -> Tensor:
        offsets = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
        ctx.save_for_backward(cos, sin, cu_seqlens, offsets)
        ctx.seqlen_offsets = None if offsets is not None else seqlen_offsets
        ctx.interleaved, ctx.max_seqlen = interleaved, max_seqlen
        return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        cos, sin, cu_seqlens, offsets = ctx.saved_tensors
        offsets = ctx.seqlen_offsets if offsets is None else offsets
        dx = apply_rotary(grad, cos, sin, offsets, cu_seqlens, ctx.max_seqlen, ctx.interleaved, conjugate=True)
        return (dx,) + (None,) * 7


def _heads_of_q_and_k(qkv, num_heads_q):
    """Returns views of q and k in ``[b, s, 3, h, d]`` or ``[b, s, h_q + 2 h_kv, d]``."""
    if qkv.dim() == 5:
        assert qkv.shape[2] == 3, f"qkv must be [b, s, 3, h, d], got {tuple(qkv.shape)}"
        return qkv[:, :, 0], qkv[:, :, 1]
    assert qkv.dim() == 4, f"qkv must be [b, s, 3, h, d] or [b, s, h_q + 2 h_kv, d], got {tuple(qkv.shape)}"
    assert num_heads_q is not None, "qkv of [b, s, h_q + 2 h_kv, d] needs num_heads_q"
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    assert qkv.shape[2] == num_heads_q + 2 * num_heads_k, f"{qkv.shape[2]} heads are not {num_heads_q} + 2 h_kv"
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


class ApplyRotaryEmbQKV_(torch.autograd.Function):
    """Rotates q and k of a packed qkv in place. k may have a table of its own (XPos).

    The public form is ``apply_rotary_emb_qkv_``, with the same arguments.

    >>> qkv, angles = torch.randn(2, 5, 3, 4, 16), torch.randn(5, 8)
    >>> out = ApplyRotaryEmbQKV_.apply(qkv, angles.cos(), angles.sin())
    >>> out.data_ptr() == qkv.data_ptr()
    True
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cos_k: Optional[Tensor] = None,
        sin_k: Optional[Tensor] = None,
        interleaved: bool = False,
        seqlen_offsets: Offset = 0,
        num_heads_q: Optional[int] = None,
    ) -> Tensor:
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        offsets = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
        ctx.save_for_backward(cos, sin, cos_k, sin_k, offsets)
        ctx.seqlen_offsets = None if offsets is not None else seqlen_offsets
        ctx.interleaved, ctx.num_heads_q = interleaved, num_heads_q
        q, k = _heads_of_q_and_k(qkv, num_heads_q)
        apply_rotary(q, cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
        apply_rotary(k, cos_k, sin_k, seqlen_offsets, interleaved=interleaved, inplace=True)
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        cos, sin, cos_k, sin_k, offsets = ctx.saved_tensors
        offsets = ctx.seqlen_offsets if offsets is None else offsets
        dqkv = grad.clone(memory_format=torch.contiguous_format)
        (dq, dk), (of_q, of_k) = (_heads_of_q_and_k(x, ctx.num_heads_q) for x in (dqkv, grad))
        _turn_back(dq, of_q, cos, sin, offsets, ctx.interleaved)
        _turn_back(dk, of_k, cos_k, sin_k, offsets, ctx.interleaved)
        return (dqkv,) + (None,) * 7


class ApplyRotaryEmbKV_(torch.autograd.Function):
    """Rotates k of a packed kv in place. The public form is ``apply_rotary_emb_kv_``, with the same arguments.

    >>> kv, angles = torch.randn(2, 5, 2, 4, 16), torch.randn(5, 8)
    >>> out = ApplyRotaryEmbKV_.apply(kv, angles.cos(), angles.sin())
    >>> out.data_ptr() == kv.data_ptr()
    True
    """

    @staticmethod
    def forward(
        ctx: Any, kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offset = 0
    ) -> Tensor:
        assert kv.dim() == 5 and kv.shape[2] == 2, f"kv must be [b, s, 2, h, d], got {tuple(kv.shape)}"
        offsets = seqlen_offsets if isinstance(seqlen_offsets, torch.Tensor) else None
        ctx.save_for_backward(cos, sin, offsets)
        ctx.seqlen_offsets = None if offsets is not None else seqlen_offsets
        ctx.interleaved = interleaved
        apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
        return kv

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], ...]:
        cos, sin, offsets = ctx.saved_tensors
        offsets = ctx.seqlen_offsets if offsets is None else offsets
        dkv = grad.clone(memory_format=torch.contiguous_format)
        _turn_back(dkv[:, :, 0], grad[:, :, 0], cos, sin, offsets, ctx.interleaved)
        return (dkv,) + (None,) * 4


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offset = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
) -> Tensor:
    """Rotate the first r dimensions of each head of ``x`` by its token's position.

    Args:
        x: ``[b, s, h, d]``, or packed ``[t, h, d]`` with ``cu_seqlens`` ``[b + 1]`` and ``max_seqlen``. d is at most
            256. Any floating dtype.
        cos, sin: ``[s_ro, r / 2]``, r <= d, s_ro >= s. Any floating dtype.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, r / 2), (1, r / 2 + 1), ...
        inplace: write into ``x``, also if it is a leaf that requires grad; use the returned tensor.
        seqlen_offsets: position of the first token, an int or int32/int64 ``[b]`` (a KV cache's lengths).
        cu_seqlens, max_seqlen: starts of the packed sequences, and number of tokens of the longest sequence.
    Returns:
        Shape and dtype of ``x``.
    Raises:
        AssertionError: a shape or dtype that does not fit, a negative int offset, or a table with too few rows.
    Gradients for x.
    Source: arXiv 2104.09864.

    >>> angles = torch.outer(torch.arange(32), 0.5 ** torch.arange(8))  # 32 positions, 16 rotated dimensions
    >>> x = torch.randn(2, 5, 4, 64)
    >>> y = apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=torch.tensor([0, 27]))
    >>> y.shape, torch.equal(y[..., 16:], x[..., 16:])
    (torch.Size([2, 5, 4, 64]), True)
    """
    return recorded(ApplyRotaryEmb, x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Optional[Tensor] = None,
    sin_k: Optional[Tensor] = None,
    interleaved: bool = False,
    seqlen_offsets: Offset = 0,
    num_heads_q: Optional[int] = None,
) -> Tensor:
    """Rotate q and k of ``[b, s, 3, h, d]`` or, with ``num_heads_q``, ``[b, s, h_q + 2 h_kv, d]`` in place.

    If ``cos_k`` and ``sin_k`` are given, k uses them. The other arguments are those of ``apply_rotary_emb``. Returns
    qkv. Autograd does not see the write, so use the returned tensor.

    Raises:
        AssertionError: as of ``apply_rotary_emb``; also if qkv has neither shape, or if num_heads_q is missing or does
            not fit.
    Gradients for qkv.
    Source: arXiv 2104.09864; a table for k, arXiv 2212.10554.

    >>> qkv, angles = torch.randn(2, 5, 3, 4, 16), torch.randn(5, 8)
    >>> q = apply_rotary_emb(qkv[:, :, 0], angles.cos(), angles.sin())
    >>> torch.equal(apply_rotary_emb_qkv_(qkv, angles.cos(), angles.sin())[:, :, 0], q)
    True
    """
    return recorded(ApplyRotaryEmbQKV_, qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offset = 0
) -> Tensor:
    """Rotate k of ``[b, s, 2, h, d]`` in place and return kv. The arguments are those of ``apply_rotary_emb``.

    Autograd does not see the write, so use the returned tensor.

    Raises:
        AssertionError: as of ``apply_rotary_emb``; also if kv has another shape.
    Gradients for kv.
    Source: arXiv 2104.09864.

    >>> kv, angles = torch.randn(2, 5, 2, 4, 16), torch.randn(5, 8)
    >>> v = kv[:, :, 1].clone()
    >>> torch.equal(apply_rotary_emb_kv_(kv, angles.cos(), angles.sin())[:, :, 1], v)
    True
    """
    return recorded(ApplyRotaryEmbKV_, kv, cos, sin, interleaved, seqlen_offsets)


def _unrounded(buffer, compute, device):
    """A buffer in fp32. Where it holds what ``compute`` makes, rounded to another dtype, the values are exact again."""
    values = buffer.to(device)
    if values.dtype == torch.float32:
        return values
    exact = compute(device)
    if values.shape != exact.shape:
        return values.float()
    return torch.where(values == exact.to(values.dtype), exact, values.float())


class RotaryEmbedding(torch.nn.Module):
    """Rotates q and k in place and keeps the tables of cos and sin, made in fp32 and stored in the dtype of q.

    With ``scale_base`` (XPos), scores fade with distance. Row p of q's tables is multiplied by
    ``scale ** ((p - s // 2) / scale_base)``, where ``scale = (2 i + 0.4 dim) / (1.4 dim)``. Row p of k's tables is
    divided by the same factor.

    The buffers ``inv_freq`` and ``scale`` stay fp32 where a conversion such as ``module.half()`` would round them. A
    program may assign another ``inv_freq`` ``[dim / 2]`` before the first call, for longer sequences.

    Args:
        dim: rotated dimensions r of each head, even.
        base: pair i turns by ``base ** (-2 i / dim)`` per position.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, r / 2), (1, r / 2 + 1), ...
        scale_base: strength of XPos, None for plain rotary.
        device: of the frequencies. The tables are on the device of q.
    Source: arXiv 2104.09864; XPos, arXiv 2212.10554.

    >>> rotary = RotaryEmbedding(16)
    >>> rotary(torch.randn(2, 5, 3, 4, 64), seqlen_offset=7).shape
    torch.Size([2, 5, 3, 4, 64])
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: Optional[float] = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = None
        self._cos_k_cached = self._sin_k_cached = None

    def _compute_inv_freq(self, device=None):
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _compute_scale(self, device=None):
        return (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) + 0.4 * self.dim) / (1.4 * self.dim)

    # NOTE: positions in the thousands need the fp32 frequencies. So module.half() must not round them, because a
    # module.float() afterwards would keep them rounded.
    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, compute in (("inv_freq", self._compute_inv_freq), ("scale", self._compute_scale)):
            made, old = self._buffers.get(name), before.get(name)
            if made is None or old is None:  # a program has put something else there
                continue
            if old.is_meta and not made.is_meta:  # to_empty leaves any numbers, and no state dict has others
                self._buffers[name] = compute(made.device)
            elif made.dtype != old.dtype:
                self._buffers[name] = _unrounded(old, compute, made.device)
        return self

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        """Make the tables for at least ``seqlen`` positions, unless the present tables serve."""
        cached = self._cos_cached
        if (
            cached is not None
            and seqlen <= self._seq_len_cached
            and cached.device == torch.device(device or cached.device)
            and cached.dtype == (dtype or cached.dtype)
            and not (self.training and cached.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = self._tables(seqlen, device, dtype)

    def _tables(self, seqlen, device, dtype):
        """cos and sin of q and of k. Those of k are None if q and k share tables."""
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, _unrounded(self.inv_freq, self._compute_inv_freq, device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None:
            return cos.to(dtype), sin.to(dtype), None, None
        power = (positions - seqlen // 2) / self.scale_base
        scale = _unrounded(self.scale, self._compute_scale, device) ** power[:, None]
        return tuple(x.to(dtype) for x in (cos * scale, sin * scale, cos / scale, sin / scale))

    def forward(
        self,
        qkv: Tensor,
        kv: Optional[Tensor] = None,
        seqlen_offset: Offset = 0,
        max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """Rotate in place.

        Args:
            qkv: ``[b, s, 3, h, d]`` or ``[b, s, h_q + 2 h_kv, d]`` with ``num_heads_q``; with kv, q ``[b, s, h, d]``.
            kv: ``[b, s, 2, h_kv, d]`` or None.
            seqlen_offset: position of the first token, an int or ``[b]``.
            max_seqlen: number of positions that the tables must cover. If None, a tensor ``seqlen_offset`` is read.
            num_heads_q: heads of q, for a qkv of four dimensions.
        Returns:
            qkv, or (q, kv). Autograd does not see the write, so use the returned tensors.
        Raises:
            AssertionError: a shape does not fit, or max_seqlen is too small.
        Gradients for qkv, or for q and kv.
        """
        if max_seqlen is None:
            largest = int(seqlen_offset.max()) if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset
            max_seqlen = largest + max(qkv.shape[1], 0 if kv is None else kv.shape[1])
        # A graph keeps no tables, because it would be made again for each length. Those of XPos depend on the longest
        # length so far, so they are kept, and torch.compile leaves them to Python.
        if is_compiling() and self.scale is None:
            first = 0 if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset
            least = first + max(qkv.shape[1], 0 if kv is None else kv.shape[1])
            *tables, cos_k, sin_k = self._tables(max(max_seqlen, least), qkv.device, qkv.dtype)
        else:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
            tables, cos_k, sin_k = (self._cos_cached, self._sin_cached), self._cos_k_cached, self._sin_k_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv,
                *tables,
                cos_k,
                sin_k,
                interleaved=self.interleaved,
                seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
            )
        q = apply_rotary_emb(qkv, *tables, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        of_k = tables if cos_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *of_k, self.interleaved, seqlen_offset)
