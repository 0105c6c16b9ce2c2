"""Typical uses, for type checkers (tests/guards/test_types.py). Nothing runs this file."""

from typing import Any, Optional, Union

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import flash_attn
from flash_attn import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    kernel_root,
    merge_attention,
    prebuild_call,
)
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.explain import Plan
from flash_attn.flash_attn_interface import _flash_attn_forward
from flash_attn.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.mha import MHA, get_alibi_slopes
from flash_attn.modules.mlp import GatedMlp
from flash_attn.ops.activations import swiglu
from flash_attn.ops.fused_dense import FusedDense, fused_dense_func
from flash_attn.ops.layer_norm import DropoutAddLayerNorm, dropout_add_layer_norm
from flash_attn.ops.rms_norm import RMSNorm, dropout_add_rms_norm_parallel_residual, rms_norm
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from flash_attn.ops.triton.linear import triton_linear_act
from flash_attn.utils.benchmark import benchmark_forward
from flash_attn.utils.distributed import all_gather
from flash_attn.utils.generation import DecoderOutput, GenerationMixin, InferenceParams, sample
from flash_attn.utils.pretrained import state_dict_from_pretrained
from flash_attn.utils.testing import attention_ref
from flash_attn.utils.torch import custom_bwd, custom_fwd

Pair = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, cu_seqlens: Optional[Tensor] = None, max_seqlen: int = 0) -> Any:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        dropout_p = self.dropout if self.training else 0.0
        if cu_seqlens is None:
            out = flash_attn_qkvpacked_func(qkv, dropout_p, causal=True)
        else:
            out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p, causal=True)
        return self.out(out.flatten(-2))


def dense(q: Tensor, k: Tensor, v: Tensor, slopes: Optional[Tensor], wants_lse: bool) -> Tensor:
    out = flash_attn_func(q, k, v, 0.1, softmax_scale=None, causal=True, window_size=(256, 0), softcap=30)
    assert_type(out, Tensor)
    out = out + flash_attn_kvpacked_func(q, torch.stack([k, v], 2), window_size=[4, 0], alibi_slopes=slopes)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn_func(q, k, v, 0.0, return_lse=True, sinks=slopes), Pair)
    assert_type(flash_attn_func(q, k, v, return_max_logits=True), Pair)
    assert_type(flash_attn_func(q, k, v, return_lse=True, return_max_logits=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn_func(q, k, v, return_lse=wants_lse), Union[Tensor, tuple[Tensor, ...]])
    results, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    parts, lses = zip(*(flash_attn_func(q, x, x, return_lse=True) for x in k.chunk(2, 1)))
    assert_type(merge_attention(list(parts), list(lses)), Pair)
    _, lse, _, _ = _flash_attn_forward(q, k, v, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    return out + results + lse.sum() + attention_ref(q, k, v, causal=True, window_size=(None, 3))[0]


def packed(rows: Tensor, cu_seqlens: Tensor, longest: Tensor, batch: Tensor, mask: Tensor) -> Tensor:
    out = flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, 23, longest, deterministic=True)
    assert_type(out, Tensor)
    kv = torch.stack([rows, rows], 1)
    _, lse = flash_attn_varlen_kvpacked_func(rows, kv, cu_seqlens, cu_seqlens, 23, 23, return_lse=True)
    tokens, indices, cu_seqlens, length, _ = unpad_input(batch, mask)
    assert_type(length, int)
    return out + lse.sum() + pad_input(index_first_axis(tokens, indices), indices, *batch.shape[:2])


def decode(q: Tensor, cache: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
    out, lse = flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lengths, return_softmax_lse=True)
    more = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7, num_splits=2)
    assert_type(more, Tensor)
    return out + more + lse.sum()


def programs(q: Tensor, slopes: Tensor, document: Tensor) -> Tensor:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    both = and_masks(causal, lambda b, h, i, j: document[i] == document[j])
    block_mask = create_block_mask(both, None, 1, 512, 512, device="cpu", BLOCK_SIZE=(128, 64))
    assert_type(block_mask, BlockMask)
    assert_type(create_mask(causal, 1, 1, 8, 8), Tensor)
    out = flex_attention(q, q, q, lambda s, b, h, i, j: s + slopes[h] * (j - i), block_mask, enable_gqa=True)
    assert_type(flex_attention(q, q, q, return_lse=True), Pair)
    assert_type(flex_attention(q, q, q, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    return out + flex_attention(q, q, q, mask_mod=causal, q_offset=7, kv_len=document)


def layers(x: Tensor, weight: Tensor, cos: Tensor, group: Optional[torch.distributed.ProcessGroup]) -> Tensor:
    y = layer_norm_fn(x, weight, None)
    assert_type(y, Tensor)
    assert_type(layer_norm_fn(x, weight, weight, x, prenorm=True), Pair)
    y, residual = rms_norm_fn(x, weight, None, residual=x, eps=1e-5, prenorm=True)
    assert_type(dropout_add_layer_norm(x, None, weight, None, 0.1, 1e-5), Tensor)
    assert_type(dropout_add_layer_norm(x, x, weight, None, 0.1, 1e-5, prenorm=True), Pair)
    y0, y1 = dropout_add_rms_norm_parallel_residual(x, x, x, weight, None, None, None, 0.0, 1e-5)
    assert_type(y1, Optional[Tensor])
    assert_type(rms_norm(x, weight, 1e-5), Tensor)
    assert_type(fused_dense_func(x, weight, return_residual=True), Pair)
    assert_type(triton_linear_act(x, weight, activation="gelu"), Tensor)
    losses, z_losses = cross_entropy_loss(x, x[0].long(), label_smoothing=0.1, process_group=group)
    y = y + residual + swiglu(x, y) + apply_rotary_emb(y0, cos, cos, inplace=True) + losses + z_losses
    return all_gather(apply_rotary_emb_qkv_(y, cos, cos, seqlen_offsets=3), group)


class Model(nn.Module, GenerationMixin):
    def __init__(self, dim: int, device: Optional[torch.device] = None) -> None:
        super().__init__()
        self.mixer = MHA(dim, 8, num_heads_kv=2, causal=True, window_size=(128, 0), layer_idx=0, device=device)
        self.mlp = GatedMlp(dim, activation=nn.functional.silu, device=device, dtype=torch.bfloat16)
        self.norm, self.head = RMSNorm(dim, device="cpu"), FusedDense(dim, 100, bias=False)
        self.add_norm, self.rotary = DropoutAddLayerNorm(dim, prenorm=True, p=0.1), RotaryEmbedding(64, device=device)
        self.loss = CrossEntropyLoss(reduction="mean", label_smoothing=0.1)

    def forward(self, x: Tensor, inference_params: Optional[InferenceParams] = None) -> Any:
        return self.head(self.norm(self.mlp(self.mixer(x, inference_params=inference_params))))


def generate(model: Model, prompt: Tensor) -> Tensor:
    assert_type(model.generate(prompt, 20, top_k=5, temperature=0.7), Tensor)
    assert_type(model.generate(prompt, 20, return_dict_in_generate=True, output_scores=True), DecoderOutput)
    model.load_state_dict(state_dict_from_pretrained("folder", dtype=torch.float16))
    return sample(torch.tensor([get_alibi_slopes(8)]), top_p=0.9)


class Twice(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float16)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


def tools(q: Tensor) -> str:
    assert_type(explain(flash_attn_func, q, q, q), Union[Plan, list[Plan]])
    names = [kernel.name for kernel in prebuild_call(flash_attn_func, q, q, q, archs=["sm_90a"], compiles=False)]
    _, measured = benchmark_forward(flash_attn_func, q, q, q, causal=True, repeats=3)
    return f"{flash_attn.__version__} {kernel_root().name} {names} {measured.median}"
