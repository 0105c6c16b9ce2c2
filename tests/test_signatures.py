"""Names, order and defaults of the arguments around attention. Clients call by position and inspect signatures."""

import importlib
import inspect

import pytest

NORM = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
    "prenorm=False, residual_in_fp32=False, zero_centered_weight=False, "
)
LOSS = "label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, "
FLASH = "causal=False, softmax_scale=None, attention_dropout=0.0, "
SIGNATURES = {
    "bert_padding": {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "index_first_axis": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim",
        "index_first_axis_residual": "input, indices",
    },
    "ops.triton.rotary": {
        "apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, "
        "inplace=False, conjugate=False",
    },
    "layers.rotary": {
        "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "rotate_half": "x, interleaved=False",
        "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
        "num_heads_q=None",
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
        "RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    },
    "ops.triton.cross_entropy": {
        "cross_entropy_loss": f"logits, labels, precomputed_lse=None, {LOSS}ignore_index=-100, "
        "inplace_backward=False, process_group=None",
    },
    "losses.cross_entropy": {
        "CrossEntropyLoss": f"ignore_index=-100, reduction='mean', {LOSS}inplace_backward=False, process_group=None, "
        "return_z_loss=False",
        "CrossEntropyLoss.forward": "self, input, target, precomputed_lse=None",
    },
    "ops.triton.layer_norm": {
        "layer_norm_fn": f"{NORM}is_rms_norm=False, return_dropout_mask=False, out_dtype=None, out=None, "
        "residual_out=None",
        "rms_norm_fn": f"{NORM}return_dropout_mask=False, out_dtype=None, out=None, residual_out=None",
        "RMSNorm": "hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None",
        "RMSNorm.forward": "self, x, residual=None, prenorm=False, residual_in_fp32=False",
    },
    "ops.rms_norm": {
        "rms_norm": "x, weight, epsilon",
        "RMSNorm": "hidden_size, eps=1e-05, device=None, dtype=None",
    },
    "modules.mha": {
        "FlashSelfAttention": f"{FLASH}window_size=(-1, -1), alibi_slopes=None, deterministic=False",
        "FlashSelfAttention.forward": "self, qkv, causal=None, cu_seqlens=None, max_seqlen=None",
        "FlashCrossAttention": f"{FLASH}alibi_slopes=None, window_size=(-1, -1), deterministic=False",
        "FlashCrossAttention.forward": "self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, "
        "cu_seqlens_k=None, max_seqlen_k=None",
        "MHA": "embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, "
        "dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, "
        "rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False, "
        "window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=False, return_residual=False, "
        "checkpointing=False, device=None, dtype=None",
    },
}
CASES = [(module, name) for module, names in SIGNATURES.items() for name in names]


@pytest.mark.parametrize("module, name", CASES, ids=map(".".join, CASES))
def test_signature(module, name):
    found = importlib.import_module(f"flash_attn.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    assert str(inspect.signature(found)) == f"({SIGNATURES[module][name]})"
