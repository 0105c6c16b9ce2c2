"""transformers with this package as its flash attention. Tiny models with random weights are compared with eager
attention.

transformers asks whether the package is there, and whether there is a GPU. The installed package answers the first
question. The fixture answers the second question and changes nothing else.
"""

import importlib
import importlib.metadata

import pytest
import torch
from harness_transformers import LENGTHS, SMALL, tokens
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, ModernBertConfig, ModernBertModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.utils import import_utils

import flash_attn


@pytest.fixture
def any_device(monkeypatch):
    """transformers believes that there is a GPU, while it looks for flash attention."""
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    matrix = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    monkeypatch.setitem(matrix, 2, {**matrix[2], "supported_devices": ((lambda: True, "cuda"),)})
    import_utils.is_flash_attn_2_available.cache_clear()
    yield
    import_utils.is_flash_attn_2_available.cache_clear()


def models(cls, config, dtype=torch.float32):
    """(eager, flash) with the same random weights."""
    torch.manual_seed(0)
    config.dtype = dtype
    config._attn_implementation = "eager"
    eager = cls(config).to(dtype).eval()
    with_flash = type(config).from_dict(config.to_dict())
    with_flash._attn_implementation = "flash_attention_2"
    flash = cls(with_flash).to(dtype).eval()
    flash.load_state_dict(eager.state_dict())
    assert flash.config._attn_implementation == "flash_attention_2"
    return eager, flash


def llama(dtype=torch.float32, **changes):
    return models(LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2, **changes), dtype)


def counted(monkeypatch, name):
    """The number of times that transformers calls one of our functions."""
    calls = []
    function = getattr(flash_utils, name)
    monkeypatch.setattr(flash_utils, name, lambda *args, **kwargs: calls.append(kwargs) or function(*args, **kwargs))
    return calls


def close(flash, eager, exact=None):
    """fp32: a few roundings. Otherwise our distance from fp32 is at most twice that of eager attention in the same
    dtype."""
    if exact is None:
        torch.testing.assert_close(flash, eager, rtol=1e-4, atol=1e-5)
    else:
        ours, theirs = (flash.float() - exact).abs().max(), (eager.float() - exact).abs().max()
        assert ours <= 2 * theirs, f"{ours} from fp32, eager is {theirs}"


# ---- names that clients look for -----------------------------------------------------------------------------------


def test_distribution():
    assert [name.replace("_", "-") for name in importlib.metadata.packages_distributions()["flash_attn"]] == [
        "flash-attn"
    ]
    for name in ("flash_attn", "flash-attn"):
        assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
    for version in ("2.1.0", "2.3.3", "2.4.1", "2.6.3"):
        assert import_utils.is_flash_attn_greater_or_equal(version)
    assert not import_utils.is_flash_attn_greater_or_equal("2.8.4")


def test_available_where_a_device_is(any_device):
    assert import_utils.is_flash_attn_2_available()
    functions, _ = flash_utils.lazy_import_flash_attention("flash_attention_2")
    from flash_attn.bert_padding import pad_input, unpad_input

    ours = flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, pad_input, unpad_input
    assert (*functions[:2], *functions[3:]) == ours


NAMES = {
    "flash_attn": "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
    "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache __version__",
    "flash_attn.flash_attn_interface": "flash_attn_func flash_attn_varlen_func flash_attn_varlen_qkvpacked_func "
    "_flash_attn_forward _flash_attn_backward _flash_attn_varlen_forward _flash_attn_varlen_backward "
    "_wrapped_flash_attn_forward _wrapped_flash_attn_backward flash_attn_gpu",
    "flash_attn.bert_padding": "unpad_input pad_input index_first_axis index_put_first_axis index_first_axis_residual "
    "unpad_input_for_concatenated_sequences rearrange repeat IndexFirstAxis IndexPutFirstAxis IndexFirstAxisResidual",
    "flash_attn.layers.rotary": "apply_rotary_emb apply_rotary_emb_func apply_rotary_emb_torch rotate_half "
    "apply_rotary_emb_qkv_ apply_rotary_emb_kv_ RotaryEmbedding ApplyRotaryEmb ApplyRotaryEmbQKV_ ApplyRotaryEmbKV_",
    "flash_attn.ops.triton.rotary": "apply_rotary rotary_kernel",
    "flash_attn.ops.triton.cross_entropy": "cross_entropy_loss CrossEntropyLoss",
    "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn rms_norm_fn RMSNorm layer_norm_linear_fn layer_norm_ref "
    "rms_norm_ref",
    "flash_attn.ops.activations": "swiglu bias_gelu_impl fast_gelu_impl gelu_fwd gelu_bwd sqrelu_fwd sqrelu_bwd "
    "relu_bwd",
    "flash_attn.ops.rms_norm": "rms_norm RMSNorm dropout_add_rms_norm DropoutAddRMSNorm",
    "flash_attn.ops.layer_norm": "dropout_add_layer_norm DropoutAddLayerNorm layer_norm",
    "flash_attn.ops.fused_dense": "FusedDense FusedMLP ColumnParallelLinear RowParallelLinear fused_dense_func "
    "fused_mlp_func",
    "flash_attn.modules.mha": "MHA ParallelMHA FlashSelfAttention FlashCrossAttention SelfAttention CrossAttention "
    "get_alibi_slopes",
    "flash_attn.modules.mlp": "Mlp GatedMlp ParallelMLP ParallelGatedMlp FusedMLP",
    "flash_attn.modules.block": "Block ParallelBlock",
    "flash_attn.modules.embedding": "GPT2Embeddings BertEmbeddings ParallelGPT2Embeddings",
    "flash_attn.utils.distributed": "get_dim_for_local_rank all_gather reduce_scatter all_reduce sync_shared_params "
    "all_gather_raw reduce_scatter_raw all_reduce_raw allreduce_sequence_parallel_grad",
    "flash_attn.utils.generation": "InferenceParams GenerationMixin sample decode",
    "flash_attn.utils.pretrained": "state_dict_from_pretrained",
    "flash_attn.utils.benchmark": "benchmark_forward benchmark_backward benchmark_combined benchmark_all "
    "benchmark_fwd_bwd benchmark_memory pytorch_profiler",
    "flash_attn.utils.torch": "custom_fwd custom_bwd",
    "flash_attn.utils.testing": "attention_ref generate_qkv generate_random_padding_mask",
    "flash_attn.utils.library": "triton_op",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    imported = importlib.import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(imported, name)]
    assert not missing


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_padded(any_device, monkeypatch, dtype):
    eager, flash = llama(dtype)
    ids, mask = tokens()
    calls = counted(monkeypatch, "_flash_varlen_fn")
    out = flash(ids, attention_mask=mask).logits[mask.bool()]
    assert len(calls) == 2 and not mask.all()  # one call for each layer
    expected = eager(ids, attention_mask=mask).logits[mask.bool()]
    exact = None if dtype == torch.float32 else llama()[0](ids, attention_mask=mask).logits[mask.bool()]
    close(out, expected, exact)


def test_llama_without_padding(any_device, monkeypatch):
    eager, flash = llama()
    ids = tokens((13, 13))[0]
    calls = counted(monkeypatch, "_flash_fn")
    close(flash(ids).logits, eager(ids).logits)
    assert len(calls) == 2


def test_llama_packed(any_device, monkeypatch):
    """Three sequences in one row, which position ids separate. Each gives the same as alone."""
    eager, flash = llama()
    ids, mask = tokens()
    packed = ids[mask.bool()][None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    calls = counted(monkeypatch, "_flash_varlen_fn")
    out = flash(packed, position_ids=positions).logits[0]
    assert [call["cu_seqlens_q"].tolist() for call in calls] == [[0, 9, 13, 26]] * 2
    alone = torch.cat([eager(row[:n][None]).logits[0] for row, n in zip(ids, LENGTHS)])
    close(out, alone)


def test_llama_trains(any_device):
    eager, flash = llama()
    ids, mask = tokens()
    labels = ids.masked_fill(mask == 0, -100)
    losses = []
    for model in (eager, flash):
        model.train()
        losses.append(model(ids, attention_mask=mask, labels=labels).loss)
        losses[-1].backward()
    close(losses[1], losses[0])
    for ours, theirs in zip(flash.parameters(), eager.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_llama_generates(any_device):
    """Prompts padded on the left, then one token at a time from transformers' own cache."""
    eager, flash = llama()
    ids, mask = (x.flip(1) for x in tokens())
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "use_cache": True}
    options.update(return_dict_in_generate=True, output_logits=True)
    ours, theirs = flash.generate(ids, **options), eager.generate(ids, **options)
    assert ours.sequences.equal(theirs.sequences)
    close(torch.stack(ours.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bert(any_device, monkeypatch, dtype):
    ids, mask = tokens()
    eager, flash = models(BertModel, BertConfig(**SMALL), dtype)
    calls = counted(monkeypatch, "_flash_varlen_fn")
    out = flash(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert len(calls) == 2 and all(call["causal"] is False for call in calls)
    expected = eager(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    exact = None
    if dtype != torch.float32:
        exact = models(BertModel, BertConfig(**SMALL))[0](ids, attention_mask=mask).last_hidden_state[mask.bool()]
    close(out, expected, exact)


def test_modern_bert_slides_its_window(any_device, monkeypatch):
    """Every second layer sees 4 tokens to each side."""
    config = ModernBertConfig(
        **SMALL, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    eager, flash = models(ModernBertModel, config)
    ids, mask = tokens((40, 21))
    calls = counted(monkeypatch, "_flash_varlen_fn")
    out = flash(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert any(call.get("window_size", (-1, -1))[0] >= 0 for call in calls)
    close(out, eager(ids, attention_mask=mask).last_hidden_state[mask.bool()])
