"""Multi-head attention with its projections, rotary embedding and KV cache, on one device or split over ranks.

    x -> Wqkv (or Wq, Wkv) -> [depthwise convolution] -> [rotary] -> attention -> out_proj

Self attention with as many heads of k as of q keeps qkv packed. Grouped and cross attention pack k and v only. During
generation, ``inference_params.key_value_memory_dict[layer_idx]`` keeps the keys and values, ``[b, s, 2, h_kv, d]``.
"""

from functools import partial
from typing import Any, Optional, Union

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flash_attn._types import Device, Group, Window
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.ops.fused_dense import ColumnParallelLinear, RowParallelLinear
from flash_attn.utils.distributed import get_dim_for_local_rank
from flash_attn.utils.generation import InferenceParams

__all__ = [
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "LinearResidual",
    "MHA",
    "ParallelMHA",
    "SelfAttention",
    "get_alibi_slopes",
]


class LinearResidual(nn.Linear):
    """``nn.Linear`` that returns (output, input). The arguments are those of ``nn.Linear``.

    >>> y, x = LinearResidual(8, 16)(torch.randn(2, 8))
    >>> y.shape, x.shape
    (torch.Size([2, 16]), torch.Size([2, 8]))
    """

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., in]`` -> (``[..., out]``, the input). Gradients for the input, weight and bias."""
        return super().forward(input), input


class _Attention(nn.Module):
    """The code between the projections, which both classes below share."""

    def __init__(
        self,
        alibi_slopes,
        dropout,
        softmax_scale,
        causal,
        layer_idx,
        rotary_emb_dim,
        rotary_emb_base,
        rotary_emb_scale_base,
        rotary_emb_interleaved,
        window_size,
        use_flash_attn,
        checkpointing,
        device,
    ):
        super().__init__()
        assert use_flash_attn or alibi_slopes is None, "use_alibi needs use_flash_attn"
        assert use_flash_attn or tuple(window_size) == (-1, -1), "window_size needs use_flash_attn"
        self.causal, self.layer_idx, self.rotary_emb_dim = causal, layer_idx, rotary_emb_dim
        self.use_flash_attn, self.checkpointing = use_flash_attn, checkpointing
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        options = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        if use_flash_attn:
            options.update(window_size=window_size, alibi_slopes=alibi_slopes)
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**options)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**options)

    def _attend(self, qkv, kv=None, inference_params=None, **options):
        """Rotary, cache and attention: qkv ``[..., 3, h, d]``, or q and kv ``[..., 2, h_kv, d]`` -> ``[..., h, d]``."""
        if inference_params is not None and self._cache_rotates(inference_params):
            q, kv = (qkv[:, :, 0], qkv[:, :, 1:]) if kv is None else (qkv, kv)
            return self._append_and_attend(q, kv, inference_params, rotate=True)
        if self.rotary_emb_dim > 0:
            offset, longest = 0, None
            if inference_params is not None:
                offset, longest = _tokens_in_cache(inference_params, qkv.shape[0]), inference_params.max_seqlen
            rotated = self.rotary_emb(qkv, kv, seqlen_offset=offset, max_seqlen=longest)
            qkv, kv = (rotated, None) if kv is None else rotated
        if inference_params is None:
            attend = partial(self.inner_attn if kv is None else self.inner_cross_attn, **options)
            inputs = (qkv,) if kv is None else (qkv, kv)
            return checkpoint(attend, *inputs, use_reentrant=False) if self.checkpointing else attend(*inputs)
        q, kv = (qkv[:, :, 0], qkv[:, :, 1:]) if kv is None else (qkv, kv)
        if inference_params.seqlen_offset == 0 or not self.use_flash_attn:
            return self.inner_cross_attn(q, self._update_kv_cache(kv, inference_params))
        return self._append_and_attend(q, kv, inference_params, rotate=False)

    def _cache_rotates(self, inference_params):
        """Can cached attention rotate? Only plain rotary of 16 n dimensions, and only behind the first tokens."""
        return (
            self.use_flash_attn
            and inference_params.seqlen_offset > 0
            and self.rotary_emb_dim > 0
            and self.rotary_emb_dim % 16 == 0
            and self.rotary_emb.scale_base is None
        )

    def _append_and_attend(self, q, kv, inference_params, rotate):
        """Append kv to the cache and attend over it in one call, which also rotates q and k if asked."""
        batch = q.shape[0]
        rows = slice(inference_params.batch_size_offset, inference_params.batch_size_offset + batch)
        cache = self._cache(kv, inference_params)[rows]
        cos = sin = None
        if rotate:
            self.rotary_emb._update_cos_sin_cache(cache.shape[1], device=q.device, dtype=q.dtype)
            cos, sin = self.rotary_emb._cos_cached, self.rotary_emb._sin_cached
        slopes = self.inner_cross_attn.alibi_slopes
        return flash_attn_with_kvcache(
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            kv[:, :, 0],
            kv[:, :, 1],
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=_tokens_in_cache(inference_params, batch),
            softmax_scale=self.inner_cross_attn.softmax_scale,
            causal=self.inner_cross_attn.causal,
            window_size=self.inner_cross_attn.window_size,
            rotary_interleaved=self.rotary_emb.interleaved if rotate else False,
            alibi_slopes=None if slopes is None else slopes.float(),
        )

    def _cache(self, kv, inference_params):
        """This layer's cache ``[b_max, s_max, 2, h_kv, d]``, made at first use."""
        assert self.layer_idx is not None, "generation needs layer_idx in the constructor"
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            sizes = inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:]
            caches[self.layer_idx] = kv.new_empty(sizes)
        return caches[self.layer_idx]

    def _update_kv_cache(self, kv, inference_params):
        """Write kv ``[b, s, 2, h_kv, d]`` behind the cached tokens, and return the cache up to its end."""
        cache = self._cache(kv, inference_params)
        first_row, first = inference_params.batch_size_offset, inference_params.seqlen_offset
        last_row, last = first_row + kv.shape[0], first + kv.shape[1]
        assert last_row <= cache.shape[0] and last <= cache.shape[1], (
            f"cache of {cache.shape[0]} x {cache.shape[1]} tokens has no room for {last_row} x {last}"
        )
        cache[first_row:last_row, first:last] = kv
        return cache[first_row:last_row, :last]


class MHA(_Attention):
    """Multi-head self or cross attention.

    Args:
        embed_dim: n, the width of x. Each head has d = embed_dim / num_heads dimensions.
        num_heads_kv: heads of k and v, default ``num_heads``; fewer for grouped queries.
        cross_attn: keys and values come from another sequence, ``x_kv``.
        qkv_proj_bias, out_proj_bias: whether the projections before and after attention have a bias.
        dropout: probability to drop an attention weight, in training mode only.
        softmax_scale: factor of ``q @ k.T``; ``1 / sqrt(d)`` if None.
        causal: apply the causal mask, aligned to the bottom right corner.
        layer_idx: key of this layer's cache while generating.
        dwconv: depthwise causal convolution of width 3 over q, k, v after the projections.
        rotary_emb_dim: rotated dimensions of each head, 0 for none.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: as of ``RotaryEmbedding``.
        use_alibi: add the biases of ``get_alibi_slopes`` to the scores.
        window_size: ``(left, right)`` as of ``flash_attn_func``.
        fused_bias_fc: without effect.
        use_flash_attn: use the attention functions of this package. ALiBi, windows and packed input need them.
        return_residual: return (output, x).
        checkpointing: compute the attention again in the backward.
        device, dtype: of the parameters.
    Raises:
        AssertionError: num_heads is not a multiple of num_heads_kv, or embed_dim is not a multiple of num_heads. Also
            if cross_attn meets a rotary embedding, or use_alibi or window_size lacks use_flash_attn.
    Source: arXiv 1706.03762; grouped queries, arXiv 2305.13245; ALiBi, arXiv 2108.12409.

    >>> mha = MHA(64, num_heads=4, num_heads_kv=2, causal=True, rotary_emb_dim=16, use_flash_attn=True)
    >>> mha(torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: Optional[int] = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: Optional[float] = None,
        causal: bool = False,
        layer_idx: Optional[int] = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: Optional[float] = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
        super().__init__(
            slopes,
            dropout,
            softmax_scale,
            causal,
            layer_idx,
            rotary_emb_dim,
            rotary_emb_base,
            rotary_emb_scale_base,
            rotary_emb_interleaved,
            window_size,
            use_flash_attn,
            checkpointing,
            device,
        )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        assert num_heads % self.num_heads_kv == 0, f"{num_heads} heads are no multiple of {self.num_heads_kv} of k"
        assert embed_dim % num_heads == 0, f"embed_dim {embed_dim} is not a multiple of {num_heads} heads"
        assert not (cross_attn and rotary_emb_dim > 0), "rotary embedding is for self attention"
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.dwconv, self.return_residual = cross_attn, dwconv, return_residual
        layout = {"device": device, "dtype": dtype}

        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **layout)
            self.Wkv = nn.Linear(embed_dim, kv_dim, bias=qkv_proj_bias, **layout)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **layout)
        if dwconv:
            widths = {"dwconv_q": embed_dim, "dwconv_kv": kv_dim} if cross_attn else {"dwconv_qkv": embed_dim + kv_dim}
            for name, width in widths.items():
                setattr(self, name, nn.Conv1d(width, width, kernel_size=3, padding=2, groups=width, **layout))
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **layout)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Optional[torch.dtype] = None) -> Tensor:
        """An empty cache ``[batch_size, max_seqlen, 2, h_kv, d]``.

        dtype is by default the dtype of ``out_proj.weight``. The cache is on the device of this weight.
        """
        weight = self.out_proj.weight
        sizes = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        return torch.empty(sizes, dtype=dtype or weight.dtype, device=weight.device)

    def forward(
        self,
        x: Tensor,
        x_kv: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        cu_seqlens: Optional[Tensor] = None,
        max_seqlen: Optional[int] = None,
        mixer_subset: Any = None,
        inference_params: Optional[InferenceParams] = None,
        **kwargs: Any,
    ) -> Union[Tensor, tuple[Tensor, Tensor]]:
        """Attend.

        Args:
            x: ``[b, s, n]``, or packed ``[t, n]`` with cu_seqlens and max_seqlen.
            x_kv: cross attention's ``[b, s_kv, n]``, default x.
            key_padding_mask: ``[b, s]`` (of x_kv: ``[b, s_kv]``), true where a key is kept; without use_flash_attn
                only.
            cu_seqlens, max_seqlen: int32 ``[b + 1]`` starts of the packed sequences, and the longest sequence's length.
            mixer_subset: index of the tokens whose queries are wanted; cross attention only.
            inference_params: the caches of generation, see ``utils.generation``.
            kwargs: further arguments of the attention, such as causal, cu_seqlens_k and max_seqlen_k.
        Returns:
            The shape of x; with ``return_residual`` (output, x).
        Raises:
            AssertionError: arguments that exclude each other or need an option of the constructor, or a cache without
                room.
            RuntimeError: as of ``flash_attn_func`` and ``flash_attn_with_kvcache``, with use_flash_attn.
        Gradients for x, x_kv and the parameters, without inference_params.
        """
        if cu_seqlens is not None:
            assert max_seqlen is not None, "cu_seqlens needs max_seqlen"
            assert self.use_flash_attn and key_padding_mask is None, "packed input needs use_flash_attn and no mask"
            assert not self.dwconv and self.rotary_emb_dim == 0, "packed input excludes dwconv and rotary embedding"
            kwargs.update(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if key_padding_mask is not None:
            assert not self.use_flash_attn, "key_padding_mask needs use_flash_attn=False; pack the tokens instead"
            kwargs.update(key_padding_mask=key_padding_mask)
        if inference_params is not None:
            assert not kwargs and not self.dwconv, "generation takes neither masks nor packed input nor dwconv"

        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
            if self.dwconv:
                q, kv = _convolve(self.dwconv_q, q), _convolve(self.dwconv_kv, kv)
        else:
            assert x_kv is None and mixer_subset is None, "x_kv and mixer_subset are for cross attention"
            qkv = self.Wqkv(x)
            if self.dwconv:
                qkv = _convolve(self.dwconv_qkv, qkv)
            if self.num_heads_kv == self.num_heads:
                q, kv = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)), None
            else:
                q, kv = qkv[..., : self.embed_dim], qkv[..., self.embed_dim :]
        if kv is not None:
            q = q.unflatten(-1, (self.num_heads, self.head_dim))
            kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        if cu_seqlens is not None and kv is not None:
            kwargs.setdefault("cu_seqlens_k", cu_seqlens)
            kwargs.setdefault("max_seqlen_k", max_seqlen)
        out = self.out_proj(self._attend(q, kv, inference_params=inference_params, **kwargs).flatten(-2))
        return (out, x) if self.return_residual else out


class ParallelMHA(_Attention):
    """Self attention with the heads split over the ranks of a process group.

    ``Wqkv`` is column parallel, and ``out_proj`` is row parallel. With ``sequence_parallel`` the tokens are split
    between layers. The arguments are those of ``MHA``. Each rank gets whole heads of k and v with their query heads.

    Raises:
        AssertionError: num_heads is not a multiple of num_heads_kv, embed_dim is not a multiple of num_heads, or
            use_alibi or window_size lacks use_flash_attn.
    Source: tensor parallelism, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> mha = ParallelMHA(64, 4, torch.distributed.group.WORLD, causal=True, use_flash_attn=True)
    >>> mha(torch.randn(10, 64), seqlen=5).shape
    torch.Size([10, 64])
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        process_group: Group,
        num_heads_kv: Optional[int] = None,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: Optional[float] = None,
        causal: bool = False,
        layer_idx: Optional[int] = None,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: Optional[float] = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: Window = (-1, -1),
        use_flash_attn: bool = False,
        checkpointing: bool = False,
        sequence_parallel: bool = True,
        device: Device = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        assert num_heads % num_heads_kv == 0, f"{num_heads} heads are no multiple of {num_heads_kv} of k"
        assert embed_dim % num_heads == 0, f"embed_dim {embed_dim} is not a multiple of {num_heads} heads"
        world_size, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
        group = num_heads // num_heads_kv
        heads_kv = [get_dim_for_local_rank(num_heads_kv, world_size, r) for r in range(world_size)]
        slopes = None
        if use_alibi:
            first, last = sum(heads_kv[:rank]) * group, sum(heads_kv[: rank + 1]) * group
            slopes = torch.tensor(get_alibi_slopes(num_heads)[first:last], device=device)
        super().__init__(
            slopes,
            dropout,
            softmax_scale,
            causal,
            layer_idx,
            rotary_emb_dim,
            rotary_emb_base,
            rotary_emb_scale_base,
            rotary_emb_interleaved,
            window_size,
            use_flash_attn,
            checkpointing,
            device,
        )
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim, self.process_group = embed_dim // num_heads, process_group
        self.num_heads_kv_per_rank, self.num_heads_per_rank = heads_kv[rank], heads_kv[rank] * group
        parallel = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        qkv_dim = self.head_dim * (num_heads + 2 * num_heads_kv)
        unit = self.head_dim * group
        self.Wqkv = ColumnParallelLinear(
            embed_dim, qkv_dim, process_group, bias=qkv_proj_bias, multiple_of=unit + 2 * self.head_dim, **parallel
        )
        self.out_proj = RowParallelLinear(
            embed_dim, embed_dim, process_group, bias=out_proj_bias, multiple_of=unit, **parallel
        )

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: Optional[torch.dtype] = None) -> Tensor:
        """An empty cache ``[batch_size, max_seqlen, 2, h_kv of this rank, d]``.

        dtype is by default the dtype of ``out_proj.weight``. The cache is on the device of this weight.
        """
        weight = self.out_proj.weight
        sizes = batch_size, max_seqlen, 2, self.num_heads_kv_per_rank, self.head_dim
        return torch.empty(sizes, dtype=dtype or weight.dtype, device=weight.device)

    def forward(
        self, x: Tensor, seqlen: Optional[int] = None, inference_params: Optional[InferenceParams] = None, **kwargs: Any
    ) -> Tensor:
        """``[b, s, n]``, or with ``seqlen`` s ``[b s, n]`` (this rank's rows, if sequence parallel); same shape out.

        Args:
            inference_params: the caches of generation, see ``utils.generation``.
            kwargs: further arguments of the attention, such as causal.
        Raises:
            AssertionError: generation without layer_idx, a cache without room, or rows that do not divide over the
                ranks.
            RuntimeError: as of ``flash_attn_func`` and ``flash_attn_with_kvcache``, with use_flash_attn.
        Gradients for x and the parameters, without inference_params, summed over the ranks for x.
        """
        qkv = self.Wqkv(x)
        if seqlen is not None:
            qkv = qkv.unflatten(0, (-1, seqlen))
        if self.num_heads_kv == self.num_heads:
            q, kv = qkv.unflatten(-1, (3, self.num_heads_per_rank, self.head_dim)), None
        else:
            width = self.num_heads_per_rank * self.head_dim
            q = qkv[..., :width].unflatten(-1, (self.num_heads_per_rank, self.head_dim))
            kv = qkv[..., width:].unflatten(-1, (2, self.num_heads_kv_per_rank, self.head_dim))
        context = self._attend(q, kv, inference_params=inference_params, **kwargs).flatten(-2)
        return self.out_proj(context if seqlen is None else context.flatten(0, 1))


def _tokens_in_cache(inference_params, batch):
    """Cached tokens of each sequence, one int or ``[b]``."""
    lengths = inference_params.lengths_per_sample
    first = inference_params.batch_size_offset
    return inference_params.seqlen_offset if lengths is None else lengths[first : first + batch]


def _convolve(convolution, x):
    """Causal depthwise convolution over the sequence, ``[b, s, n]``."""
    return convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2).contiguous()
