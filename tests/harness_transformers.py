"""Tiny models of transformers with random weights, their inputs, and steps of training."""

from harness import need

need("transformers")
import torch  # noqa: E402
import transformers  # noqa: E402
from harness_clients import counted  # noqa: E402

from flash_attn.integrations import _attend  # noqa: E402
from flash_attn.integrations import transformers as ours  # noqa: E402

LENGTHS = (9, 4, 13)
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
WINDOWED = {**GROUPED, "sliding_window": 5}
NO_DROPOUT = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0, **NO_DROPOUT}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
NUMBERS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
HALVES = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in
          (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))}  # fmt: skip
BART = {"vocab_size": 97, "d_model": 64, "max_position_embeddings": 64, "dropout": 0, "decoder_start_token_id": 1}
T5 = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}
MLA = {
    **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1,
}  # fmt: skip
# Pix2Struct's configuration has no range of initial weights, and the model asks for one.
PIX2STRUCT = {
    "vocab_size": 97, "hidden_size": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0,
    "pad_token_id": 0, "decoder_start_token_id": 0, "initializer_range": 0.02, "initializer_factor": 1.0,
}  # fmt: skip
PEGASUS_X = {**BART, **HALVES, "pad_token_id": 0, "block_size": 8, "num_global_tokens": 4}
MODELS = {  # the configuration, its options, and the attention to compare with
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, "sdpa"),
    "Mistral": ("MistralForCausalLM", "MistralConfig", WINDOWED, "sdpa"),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}, "sdpa"),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}, "sdpa"),
    "Gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**WINDOWED, "head_dim": 16, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}, "eager",
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**WINDOWED, **EXPERTS, "head_dim": 16}, "eager"),
    "BERT": ("BertModel", "BertConfig", {**SMALL, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}, "sdpa"),
    "ModernBERT": (
        "ModernBertModel", "ModernBertConfig",
        {**SMALL, **NUMBERS, "local_attention": 8, "global_attn_every_n_layers": 2}, "sdpa",
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", {**BART, **HALVES, "pad_token_id": 0}, "sdpa"),
    "T5": (
        "T5ForConditionalGeneration", "T5Config", {**T5, "pad_token_id": 0, "decoder_start_token_id": 0}, "sdpa"
    ),
    "PEGASUS-X": ("PegasusXForConditionalGeneration", "PegasusXConfig", PEGASUS_X, "eager"),
    "AIMv2": ("Aimv2TextModel", "Aimv2TextConfig", SMALL, "eager"),
    "Doge": ("DogeForCausalLM", "DogeConfig", {**GROUPED, "keep_window_size": 7}, "sdpa"),
    "Pix2Struct": ("Pix2StructTextModel", "Pix2StructTextConfig", PIX2STRUCT, "sdpa"),
    "DeepSeek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA, "sdpa"),
    "Llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**GROUPED, **EXPERTS, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 6,
         "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}, "eager",
    ),
}  # fmt: skip
DECODERS = ["Llama", "Mistral", "Qwen3", "GPT-2", "Gemma2", "gpt-oss"]


def models(name, attention="flash_attn", **changes):
    """Two models with the same random weights: with the library's own attention, and with ours."""
    cls, config, options, theirs = MODELS[name]
    made = []
    for implementation in (theirs, attention):
        torch.manual_seed(0)
        chosen = getattr(transformers, config)(**{**options, **changes})
        chosen._attn_implementation = implementation
        made.append(getattr(transformers, cls)(chosen).eval())
    made[1].load_state_dict(made[0].state_dict())
    return made


def tokens(lengths=LENGTHS, side="right"):
    """Padded ids and mask [b, s]."""
    torch.manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return torch.randint(1, 97, mask.shape) * mask, mask.long()


def watch(monkeypatch):
    """The names of our functions in the order of their calls."""
    found = []
    for module in (_attend, ours):
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(getattr(module, name), found))
    return found


def trained(model, ids, mask, steps=2):
    """Losses of a few steps, and the gradients of the last step. No loss is of a token behind padding."""
    model.train()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(ids, attention_mask=mask, position_ids=positions, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return torch.stack(losses), [parameter.grad for parameter in model.parameters()]
