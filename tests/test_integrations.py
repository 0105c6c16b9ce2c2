"""flash_attn.integrations with the real libraries, unchanged, on the CPU: tiny models with random weights.

Each is compared with the attention that the library has of its own, forward, backward and in generation. Counters say
which kernels were called, because another attention would give the same numbers.
"""

import contextlib
import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention as torchs_flex
from harness import need
from torch.multiprocessing.reductions import StorageWeakRef

from flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn import flex_attention as our_flex
from flash_attn._remembered import once, remembered
from flash_attn.integrations import _attend
from flash_attn.integrations import flex as flex_integration

need("transformers")
import transformers  # noqa: E402
from transformers import masking_utils, modeling_utils  # noqa: E402

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
    "DeepSeek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA, "sdpa"),
    "Llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**GROUPED, **EXPERTS, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 6,
         "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"]}, "eager",
    ),
}  # fmt: skip
DECODERS = ["Llama", "Mistral", "Qwen3", "GPT-2", "Gemma2", "gpt-oss"]
SOFT = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def registered():
    with ours.register(ours.KNOWN) as registration:
        yield registration


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


def close(mine, theirs, limit=1e-6):
    torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


@pytest.fixture
def calls(monkeypatch):
    """The names of our functions in the order of their calls."""
    found = []
    for module in (_attend, ours):
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(getattr(module, name), found))
    return found


def counted(function, found):
    @functools.wraps(function)
    def call(*args, **kwargs):
        found.append(function.__name__)
        return function(*args, **kwargs)

    return call


# ---- registration --------------------------------------------------------------------------------------------------


def test_nothing_is_imported():
    code = "import sys, flash_attn.integrations; print({'transformers', 'diffusers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def registries():
    functions, masks = modeling_utils.AttentionInterface._global_mapping, masking_utils.AttentionMaskInterface
    return dict(functions), dict(masks._global_mapping), vars(modeling_utils.PreTrainedModel)[HOOK]


HOOK = "_check_and_adjust_attn_implementation"


def test_transformers_is_as_before():
    before = registries()
    with pytest.raises(ValueError, match="flash_attn"):
        models("Llama")
    registration = ours.register()
    assert 'attn_implementation="flash_attn" runs on the kernels of flash_attn' in str(registration)
    assert models("Llama")[1].config._attn_implementation == "flash_attn"
    assert ours.register(["flash_attn"]) is not registration and not registration.is_active
    assert "undone" in str(registration)
    assert models("Llama")[1].config._attn_implementation == "flash_attn"
    ours.unregister()
    ours.unregister()
    assert registries() == before


def test_what_somebody_else_registered_since_stays():
    functions = modeling_utils.AttentionInterface._global_mapping
    theirs = functions["flex_attention"]
    try:
        with ours.register():
            functions["flex_attention"] = registries
        assert functions["flex_attention"] is registries and "flash_attn" not in functions
    finally:
        functions["flex_attention"] = theirs


@pytest.mark.parametrize("place, name", [
    (masking_utils, "sdpa_mask"), (masking_utils, "AttentionMaskInterface"), (modeling_utils, "AttentionInterface"),
    (modeling_utils.PreTrainedModel, "_check_and_adjust_attn_implementation"),
])  # fmt: skip
def test_transformers_of_another_version(monkeypatch, place, name):
    monkeypatch.delattr(place, name)
    with pytest.raises(ImportError, match=r"needs transformers whose mask functions .*5\.\d+\.\d+ is installed"):
        ours.register()


@torch.no_grad()
def test_transformers_without_a_mask_function(registered, monkeypatch):
    """Its mask is made by the other functions, or is a dense mask."""
    ours._names.cache_clear()
    for name in ("sliding_window_bidirectional_overlay", "remap_positions_for_packed_sequence"):
        monkeypatch.delattr(masking_utils, name)
    theirs, mine = models("Mistral")
    ids, mask = tokens()
    close(mine(ids, attention_mask=mask).logits[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])
    assert sorted(ours._names().values()) == ["all", "and", "causal", "left", "sequences"]
    ours._names.cache_clear()


@pytest.mark.parametrize("names", ["flash_attn", ["flash"], ["flash_attn", "sdpa"]])
def test_other_names_are_refused(names):
    with pytest.raises(ValueError, match="names must be some of"):
        ours.register(names)


def test_a_model_without_flash_attention(registered):
    assert models("T5")[1].config._attn_implementation == ours.BY_DENSE_MASKS
    with pytest.raises(ValueError, match='no attn_implementation="flash_attention_2" for T5For.*use "flash_attn"'):
        models("T5", "flash_attention_2")


@pytest.mark.parametrize("name", ["flash_attn", "flash_attention_2"])
def test_a_model_with_a_flash_attention_of_its_own(registered, name):
    """It would call a function that transformers imports for a GPU only."""
    config = transformers.FalconConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, alibi=False
    )  # fmt: skip
    config._attn_implementation = name
    with pytest.raises(ValueError, match='FalconForCausalLM has a flash attention of its own, .* use "sdpa"'):
        transformers.FalconForCausalLM(config)
    config = transformers.GPTJConfig(vocab_size=97, n_embd=64, n_layer=1, n_head=4, n_positions=64, rotary_dim=8)
    config._attn_implementation = name
    with pytest.raises(ValueError, match='GPTJForCausalLM has a flash attention of its own, .* use "eager"'):
        transformers.GPTJForCausalLM(config)


# ---- models of transformers ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch_trains(registered, calls, name, side):
    theirs, mine = models(name)
    ids, mask = tokens(side=side)
    losses, grads = trained(mine, ids, mask)
    assert set(calls) == {"flash_attn_varlen_func"} and len(calls) == 4
    expected_losses, expected = trained(theirs, ids, mask)
    close(losses, expected_losses)
    for grad, want in zip(grads, expected):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch_without_gradients(registered, calls, name, side):
    theirs, mine = models(name)
    ids, mask = tokens(side=side)
    out = mine(ids, attention_mask=mask).logits[mask.bool()]
    assert set(calls) == {"flash_attn_with_kvcache"}
    close(out, theirs(ids, attention_mask=mask).logits[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(registered, calls, name):
    """Position ids tell where sequences begin. Each gives the same as alone."""
    theirs, mine = models(name)
    ids, mask = tokens()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    out = mine(ids[mask.bool()][None], position_ids=positions, use_cache=False).logits[0]
    assert calls == ["flash_attn_varlen_func"] * 2
    close(out, torch.cat([theirs(row[:n][None]).logits[0] for row, n in zip(ids, LENGTHS)]))


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
def test_positions_with_gaps_are_one_sequence(registered, use_cache):
    """A client may stretch positions, or begin late. Only positions that begin again are packed sequences."""
    theirs, mine = models("Llama")
    ids, mask = tokens((13,))
    for positions in (torch.arange(13)[None] * 2, (torch.arange(13)[None] + 3) * 3 // 2, torch.arange(13)[None] + 7):
        options = {"attention_mask": mask, "position_ids": positions, "use_cache": use_cache}
        close(mine(ids, **options).logits, theirs(ids, **options).logits)


@torch.no_grad()
def test_lengths_of_a_collator(registered, calls):
    theirs, mine = models("Llama")
    ids, mask = tokens()
    cu_seqlens = torch.tensor([0, 9, 13, 26], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 13, "max_length_k": 13}
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    out = mine(ids[mask.bool()][None], position_ids=positions, use_cache=False, **lengths).logits[0]
    assert calls == ["flash_attn_varlen_func"] * 2
    close(out, torch.cat([theirs(row[:n][None]).logits[0] for row, n in zip(ids, LENGTHS)]))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(registered, calls, name, cache):
    """Prompts padded on the left, then a token at a time."""
    theirs, mine = models(name)
    ids, mask = tokens(side="left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    options.update(return_dict_in_generate=True, output_logits=True, disable_compile=True)
    out, expected = mine.generate(ids, **options), theirs.generate(ids, **options)
    assert out.sequences.equal(expected.sequences)
    close(torch.stack(out.logits), torch.stack(expected.logits))
    assert "flash_attn_with_kvcache" in calls and len(calls) == 12


@torch.no_grad()
def test_a_prompt_in_pieces(registered):
    """Rows of a second piece lie at the end of the keys."""
    theirs, mine = models("Mistral")
    ids, _ = tokens((13,))
    for model in (theirs, mine):
        cache = model(ids[:, :4], use_cache=True).past_key_values
        model.found = model(ids[:, 4:9], past_key_values=cache).logits, model(ids[:, 9:], past_key_values=cache).logits
    for out, expected in zip(mine.found, theirs.found):
        close(out, expected)


@SOFT
@pytest.mark.parametrize("attention", ["flash_attn", "flash_attention_2"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "gpt-oss"])
def test_continuous_batching(registered, calls, name, attention):
    theirs, mine = models(name, attention)
    torch.manual_seed(3)
    prompts = [torch.randint(1, 97, (n,)).tolist() for n in (9, 4, 13, 17)]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    batching = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, auto_switch_to_flash=False)
    found = mine.generate_batch(
        prompts, generation_config=transformers.GenerationConfig(**options), continuous_batching_config=batching
    )
    order = sorted(found, key=lambda request: int(request.rpartition("_")[2]))
    expected = [theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    assert [found[request].generated_tokens for request in order] == expected
    assert set(calls) == {"flash_attn_varlen_func"}


class Pages:
    """A cache of continuous batching whose attention function appends to the pages."""

    def __init__(self, k_cache, v_cache):
        self.caches = {"k_cache": k_cache, "v_cache": v_cache}

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs.update(self.caches, cu_seq_lens_k=kwargs["cu_seq_lens_k"]["full"], max_length_k=1)
        return key_states, value_states


def test_pages_of_continuous_batching(calls):
    """transformers asks for this on a GPU only."""
    torch.manual_seed(0)
    lengths, page, sinks = [5, 9, 1], 4, torch.randn(4)
    q, (k, v) = torch.randn(1, 4, 3, 16), torch.randn(2, 1, 2, 3, 16)
    caches = torch.randn(2, 12, page, 2, 16)
    table = torch.randperm(12, dtype=torch.int32)[:9].view(3, 3)
    before = [cache[table.long()].flatten(1, 2) for cache in caches]
    module = torch.nn.Module()
    module.is_causal, module.layer_idx = True, 0
    lengths_k = {"full": torch.tensor([0, *lengths]).cumsum(0).int()}
    out, _ = ours.attention(
        module, q, k, v, None, cache=Pages(*caches), cu_seq_lens_q=torch.arange(4, dtype=torch.int32),
        cu_seq_lens_k=lengths_k, max_length_q=1, max_length_k={"full": 9}, block_table=table, s_aux=sinks,
        sliding_window=4,
    )  # fmt: skip
    assert calls == ["flash_attn_with_kvcache"]
    for n, length in enumerate(lengths):
        keys, values = (torch.cat([old[n, : length - 1], new[0, :, n][None]]) for old, new in zip(before, (k, v)))
        want = flash_attn_func(q[:, :, n][:, None], keys[None], values[None], window_size=(3, 0), sinks=sinks)
        close(out[:, n], want[:, 0])


@pytest.mark.parametrize("attention", ours.KNOWN)
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "BART"])
def test_encoders(registered, name, attention):
    theirs, mine = models(name, attention)
    ids, mask = tokens((40, 21) if name == "ModernBERT" else LENGTHS)
    more = {"decoder_input_ids": ids.flip(1)} if name == "BART" else {}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out, expected = (model(ids, attention_mask=mask, **more)[0] for model in (mine, theirs))
        kept = mask.bool() if name == "ModernBERT" else torch.ones_like(mask).bool()
        close(out[kept], expected[kept])


def test_cross_attention_of_equal_lengths(registered):
    """Padding of the encoder hides no row of the decoder, even if both have as many."""
    theirs, mine = models("BART")
    ids, mask = tokens()
    others = ids.flip(0, 1) + (ids.flip(0, 1) == 0)
    out, expected = (model(ids, attention_mask=mask, decoder_input_ids=others).logits for model in (mine, theirs))
    close(out, expected)


@pytest.mark.parametrize("attention", ["flash_attn", "flex_attention"])
def test_a_bias_of_positions(registered, calls, attention):
    theirs, mine = models("T5", attention)
    ids, mask = tokens()
    losses = []
    for model in (mine, theirs):
        loss = model(ids, attention_mask=mask, labels=ids.flip(1)).loss
        loss.backward()
        losses.append(loss.detach())
    close(*losses)
    assert calls
    for parameter, other in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert mine.generate(ids, **options).equal(theirs.generate(ids, **options))


def test_values_of_another_width(registered):
    """MLA: keys have 24 columns, and values 12."""
    theirs, mine = models("DeepSeek")
    ids, mask = tokens(side="left")
    close(mine(ids, attention_mask=mask).logits[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])


def test_windows_of_pictures(registered, calls):
    """A vision model tells the lengths of its windows to a name with "flash", and calls ``sdpa`` once for each."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl

    found = []
    for attention in ("flash_attn", "sdpa"):
        config = configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=16, patch_size=4,
            window_size=16, fullatt_block_indexes=[1],
        )  # fmt: skip
        config._attn_implementation = attention
        torch.manual_seed(0)
        model = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config)
        found.append(model(torch.randn(112, 96), grid_thw=torch.tensor([[1, 8, 8], [1, 4, 12]]))[0])
    close(*found)
    assert calls == ["flash_attn_varlen_func"] * 2


def test_masks_that_are_refused():
    module, x = torch.nn.Module(), torch.randn(2, 2, 5, 16)
    with pytest.raises(
        ValueError, match=r"an attention_mask \(b, len_kv\) must be bool or integers; it is torch.float32"
    ):
        ours.attention(module, x, x, x, torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"attention_mask must have 2 or 4 dimensions.*\(2, 5, 5\)"):
        ours.attention(module, x, x, x, torch.ones(2, 5, 5).bool())


@torch.no_grad()
def test_is_causal(registered):
    """A model, and a call, may say that nothing is causal."""
    theirs, mine = models("Llama")
    ids, mask = tokens()
    causal = mine(ids).logits
    for model in (theirs, mine):
        model.config.is_causal = False
    close(mine(ids, attention_mask=mask).logits[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])
    out = mine(ids, is_causal=False).logits
    close(out, theirs(ids, is_causal=False).logits)
    assert (out - causal).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_window_of_a_model_that_is_not_causal(registered, side):
    """sdpa's window reaches as many keys to the left as to the right. The module tells one key less."""
    theirs, mine = models("Mistral")
    for model in (theirs, mine):
        model.config.is_causal = False
    for lengths in (LENGTHS, (13, 13)):
        ids, mask = tokens(lengths, side)
        out, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (mine, theirs))
        close(out, expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_mask_with_holes(registered, name):
    theirs, mine = models(name)
    ids, mask = tokens()
    mask[2, 5] = mask[2, 0] = 0
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (mine, theirs))
        close(out, expected)


@pytest.mark.parametrize("attention", ["flash_attn", "flex_attention"])
@pytest.mark.parametrize("kind", ["bool", "float", "blocks"])
def test_a_mask_of_rows_and_keys(registered, calls, kind, attention):
    theirs, mine = models("Llama", attention)
    ids, _ = tokens()
    seen = (torch.rand(3, 1, 13, 13) > 0.3) | torch.eye(13).bool()
    numbers = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    mask = {"bool": seen, "float": numbers}.get(kind)
    if kind == "blocks":
        mask = our_flex.create_block_mask(lambda b, h, i, j: seen[b, 0, i, j], 3, None, 13, 13, "cpu")
    out = mine(ids, attention_mask=mask).logits
    close(out, theirs(ids, attention_mask=seen).logits)
    assert calls == ["flex_attention" if kind == "blocks" else "flash_attn_func"] * 2
    out.sum().backward()


@pytest.mark.parametrize(
    "attention, function", [("flash_attn", "flash_attn_func"), ("flex_attention", "flex_attention")]
)
def test_chunks(registered, calls, attention, function):
    """A pattern that is no window is a dense mask, or a block mask that is made without a dense one."""
    theirs, mine = models("Llama4", attention)
    ids, mask = tokens(side="left")
    out, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (mine, theirs))
    close(out, expected)
    assert calls[0] == ("flex_attention" if attention == "flex_attention" else "flash_attn_func")


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_keys_for_the_whole_batch(is_causal, needs_grad):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=needs_grad) for _ in range(3))
    module, mask = torch.nn.Module(), torch.arange(9)[None] >= 4
    module.is_causal = is_causal
    seen = mask & torch.ones(9, 9, dtype=torch.bool).tril() if is_causal else mask.expand(9, 9)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    close(ours.attention(module, q, k, v, mask)[0][:, 4:], expected.transpose(1, 2)[:, 4:])
    for shape in ((3, 9), (2, 10)):
        with pytest.raises(ValueError, match=r"attention_mask must have the shape \(b, len_kv\) = \(2, 9\), or 1"):
            ours.attention(module, q, k, v, torch.ones(shape, dtype=torch.bool))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["flash_attn", "flex_attention"])
def test_a_mask_of_one_column(registered, attention):
    """A size of 1 stands for all keys."""
    theirs, mine = models("Llama", attention)
    ids, _ = tokens((13, 13))
    mask = torch.ones(2, 1, 13, 1, dtype=torch.bool)
    close(mine(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask).logits)


@torch.no_grad()
def test_a_mask_of_too_few_keys(registered):
    """The mask of a second piece must tell of the keys of the first, too."""
    mine = models("Llama")[1]
    ids, _ = tokens((13, 13))
    cache = mine(ids[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must have the shape .* \(2, 4, 5, 13\).*\(2, 1, 5, 5\)"):
        mine(ids[:, 8:], attention_mask=torch.ones(2, 1, 5, 5, dtype=torch.bool), past_key_values=cache)
    with pytest.raises(ValueError, match=r"an attention_mask \(b, h, len_q, len_kv\) must be bool.*torch.int64"):
        mine(ids, attention_mask=torch.ones(2, 1, 13, 13, dtype=torch.long))


@torch.no_grad()
def test_a_function_of_a_user_is_part_of_the_mask(registered):
    theirs, mine = models("Llama")
    inputs = torch.zeros(2, 9, 64)
    made = [
        masking_utils.create_causal_mask(
            model.config, inputs, None, None, or_mask_function=lambda b, h, i, j: (i < 4) & (j < 4)
        )
        for model in (theirs, mine)
    ]
    assert made[0].equal(made[1]) and made[1].shape == (2, 1, 9, 9)


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_mask_function_that_a_program_replaced(registered, monkeypatch, when):
    """transformers' names say what they say in transformers. Other functions of these names are other masks."""
    theirs, mine = models("Llama")
    ids, mask = tokens((13, 9))
    expected = mine(ids, attention_mask=mask).logits
    if when == "before":  # the first look at transformers' functions
        ours._names.cache_clear()
    monkeypatch.setattr(masking_utils, "causal_mask_function", lambda b, h, i, j: (j <= i) | (j < 4))
    out = mine(ids, attention_mask=mask).logits
    close(out[mask.bool()], theirs(ids, attention_mask=mask).logits[mask.bool()])
    assert (out - expected)[mask.bool()].abs().max() > 0.01
    ours._names.cache_clear()


@pytest.mark.parametrize("make", [ours.mask_for_flash, ours.dense_mask, ours.mask_for_flex])
@pytest.mark.parametrize("offset", [0, 2])
def test_a_prompt_at_the_start_of_a_longer_cache(make, offset):
    """sdpa leaves this mask out, and cuts the keys instead."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 2, 4, 16), torch.randn(2, 1, 2, 9, 16)
    mask = make(
        batch_size=1, q_length=4, kv_length=9, q_offset=offset, mask_function=masking_utils.causal_mask_function
    )
    module = torch.nn.Module()
    module.is_causal = True
    seen = torch.ones(4, 9, dtype=torch.bool).tril(offset)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
    close(ours.attention(module, q, k, v, mask)[0], expected.transpose(1, 2))


@pytest.mark.parametrize("seed", range(60))
def test_rules(seed):
    """Any window, offset of the rows, and padding, beside a dense mask of the same rule."""
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    len_q, len_kv = number(1, 9), number(9, 14)
    rule = ours.Rule(*[(-1, -1), (-1, 0), (3, 0), (2, 2), (4, 1), (0, 3)][seed % 6])
    rule.shift = number(0, 14 - len_q) if number(0, 2) == 0 else len_kv - len_q
    mask = torch.ones(3, len_kv, dtype=torch.bool)
    kind = number(0, 3)
    if kind:
        places = torch.arange(len_kv)
        mask[1] = [places >= 3, places < 7, (places != 4) & (places != 1)][kind - 1]
    distance = torch.arange(len_kv) - torch.arange(len_q)[:, None] - rule.shift
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if rule.left < 0 else seen & (distance >= -rule.left)
    seen = (seen if rule.right < 0 else seen & (distance <= rule.right)) & mask[:, None]
    needs_grad = bool(number(0, 1))
    q = torch.randn(3, 2, len_q, 16, generator=draw).requires_grad_(needs_grad)
    k, v = (torch.randn(3, 2, len_kv, 16, generator=draw).requires_grad_(needs_grad) for _ in range(2))
    padding = mask.clone()
    padding.flash_attn_rule = rule
    module = torch.nn.Module()
    module.is_causal = bool(seed % 2)  # the rule knows better
    out = ours.attention(module, q, k, v, padding)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen[:, None]).nan_to_num(0).transpose(1, 2)
    position = rule.shift + torch.arange(len_q)
    is_token = (rule.left < 0 and rule.right < 0) | (position >= len_kv) | mask[:, position.clamp(max=len_kv - 1)]
    close(out[is_token], expected[is_token], 1e-5)
    if needs_grad:
        dout = torch.randn(out.shape, generator=draw) * is_token[..., None, None]
        grads, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, expected))
        for grad, want in zip(grads, wanted):
            close(grad, want.nan_to_num(0), 1e-4)


def test_dropout(registered):
    _, mine = models("Llama", attention_dropout=0.3)
    ids, mask = tokens()
    mine.train()
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(mine(ids, attention_mask=mask).logits[mask.bool()])
    assert found[0].equal(found[1]) and not found[0].equal(found[2])
    with pytest.raises(NotImplementedError, match="dropout under a mask of rows and keys.*0.3: set it to 0"):
        mine(ids, attention_mask=torch.rand(3, 1, 13, 13) > 0.5)


def test_half_precision_and_autocast(registered):
    ids, mask = tokens()
    exact = models("Llama")[1](ids, attention_mask=mask).logits[mask.bool()]
    theirs, mine = (model.bfloat16() for model in models("Llama"))
    errors = [(model(ids, attention_mask=mask).logits[mask.bool()] - exact).abs().max() for model in (mine, theirs)]
    assert errors[0] <= 2 * errors[1]
    theirs, mine = models("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(m(ids, attention_mask=mask).logits[mask.bool()] - exact).abs().max() for m in (mine, theirs)]
    assert errors[0] <= 2 * errors[1]


def test_dynamo(registered):
    theirs, mine = models("Mistral", num_hidden_layers=1)
    ids, mask = tokens()
    torch._dynamo.reset()
    compiled = torch.compile(mine, backend="eager")
    out = compiled(ids, attention_mask=mask).logits[mask.bool()]
    close(out, theirs(ids, attention_mask=mask).logits[mask.bool()])


@SOFT
@torch.no_grad()
def test_a_trace_keeps_no_mask(registered):
    """A trace without a mask is for any input. One with a mask would be right for this mask only."""
    theirs, mine = models("BERT")
    ids, mask = tokens((13, 13))
    mine.config.return_dict = False
    traced = torch.jit.trace(mine, (ids,), strict=False, check_trace=False)
    close(traced(ids.flip(1))[0], theirs(ids.flip(1))[0])
    with pytest.raises(NotImplementedError, match="torch.jit.trace would keep this attention_mask"):
        torch.jit.trace(mine, (ids, mask), strict=False, check_trace=False)


def test_generation_with_a_compiled_step_and_a_window(registered):
    """generate() makes the mask outside the compiled step, from the first key that the cache still has."""
    theirs, mine = models("Mistral", num_hidden_layers=1)
    ids, mask = tokens(side="left")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options.update(return_dict_in_generate=True, output_logits=True)
    compiled = transformers.CompileConfig(fullgraph=False, mode=None, backend="eager")
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    out = mine.generate(ids, compile_config=compiled, **options)
    close(torch.stack(out.logits), torch.stack(theirs.generate(ids, disable_compile=True, **options).logits))


# ---- masks that are kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
def test_a_mask_is_looked_at_once(mode):
    looks = []
    with mode():
        mask = torch.ones(3, 4, dtype=torch.bool)
        for _ in range(3):
            remembered(mask.view(3, 4), "x", lambda: looks.append(1))
        assert len(looks) == 1
        remembered(mask[:2], "x", lambda: looks.append(1))
        mask[0, 0] = False
        remembered(mask, "x", lambda: looks.append(1))
        assert len(looks) == 3
        place = mask.data_ptr()
        del mask
        other = torch.ones(3, 4, dtype=torch.bool)
        remembered(other, "x", lambda: looks.append(1))
        assert len(looks) == 4, place


@torch.no_grad()
@pytest.mark.parametrize("write", ["numpy", "data"])
def test_uncounted_writes_into_a_mask(registered, write):
    """PyTorch counts no writes of NumPy and through .data."""
    theirs, mine = models("Llama")
    ids, _ = tokens((13, 13))
    for shape in ((2, 13), (2, 1, 13, 13)):
        mask = torch.ones(shape, dtype=torch.bool)
        mask[0, ..., :3] = False
        changed = mask.numpy() if write == "numpy" else mask.data
        for _ in range(2):
            out, expected = (model(ids, attention_mask=mask).logits[:, 6:] for model in (mine, theirs))
            close(out, expected)
            changed[1, ..., :5] = False


def test_memory_of_a_mask_is_not_held(registered):
    _, mine = models("Llama", num_hidden_layers=1)
    ids, _ = tokens((13, 13))
    for shape in ((2, 13), (2, 1, 13, 13)):
        mask = torch.ones(shape, dtype=torch.bool)
        mask[0, ..., 3] = False  # a hole
        memory = StorageWeakRef(mask.untyped_storage())
        mine(ids, attention_mask=mask)
        del mask
        assert memory.expired()


@torch.no_grad()
def test_a_mask_that_repeats_rows_is_copied_once():
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool).expand(2, 4, 7, 9)
    assert once(mask).shape == (2, 1, 1, 9)
    words = torch.ones(2, 24, dtype=torch.bool)
    assert once(words).shape == (2, 3) and once(words[:, 1:9]).shape == (2, 8)
    assert once(words.view(-1)[1:17]).shape == (16,)  # a word would begin between words of the memory


def test_blocks_of_a_dense_mask_are_found_once(monkeypatch):
    from flash_attn.flex import attention as flex

    looks = []
    monkeypatch.setattr(flex, "find_blocks", counted(flex.find_blocks, looks))
    q = k = v = torch.randn(1, 200, 2, 16)
    mask = torch.rand(1, 1, 200, 200) > 0.5
    first = [flash_attn_func(q, k, v, attn_mask=mask) for _ in range(3)]
    assert len(looks) == 1 and first[0].equal(first[2])
    mask.logical_not_()
    assert not flash_attn_func(q, k, v, attn_mask=mask).equal(first[0]) and len(looks) == 2
    flash_attn_func(q, k, v, attn_mask=mask, window_size=(5, 5))
    assert len(looks) == 3


# ---- torch's flex_attention ----------------------------------------------------------------------------------------


def test_flex_of_torch():
    theirs = torchs_flex.flex_attention, torchs_flex.create_block_mask
    q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    with flex_integration.register() as registration:
        assert "flex_attention is that of flash_attn" in str(registration)
        mask = torchs_flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 100, 100, "cpu")
        out = torchs_flex.flex_attention(q, k, v, block_mask=mask)
        out.sum().backward()  # PyTorch has no backward on the CPU
        with pytest.raises(Exception, match=r"(?i)cpu|triton|flex") as caught:
            torchs_flex.flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "TRITON"})
        assert not isinstance(caught.value, RecursionError)
    assert (torchs_flex.flex_attention, torchs_flex.create_block_mask) == theirs
    close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 1e-5)


# ---- Diffusers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diffusers():
    need("diffusers")
    import diffusers
    import diffusers.models.attention_dispatch as dispatch

    from flash_attn.integrations import diffusers as integration

    return SimpleNamespace(models=diffusers, dispatch=dispatch, ours=integration)


@pytest.fixture
def backends(diffusers):
    with diffusers.ours.register():
        yield diffusers


FLUX = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 64, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
QWEN = {
    "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 3, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
}  # fmt: skip


def inputs_of(name):
    if name == "FluxTransformer2DModel":
        return FLUX, {
            "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 7, 32),
            "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 2.0]),
            "img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(7, 3),
        }  # fmt: skip
    if name == "WanTransformer3DModel":
        inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 16)}
        return WAN, {**inputs, "timestep": torch.tensor([3])}
    mask = torch.ones(2, 7, dtype=torch.long)  # of the text, which stands before the image: a hole
    mask[0, 4:] = 0
    return QWEN, {
        "hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states_mask": mask, "timestep": torch.tensor([1.0, 2.0]), "img_shapes": [[(1, 4, 4)]] * 2,
    }  # fmt: skip


def step(diffusers, name, backend):
    """A training step: the output, the loss's gradient of the input, and those of the parameters."""
    torch.manual_seed(0)
    options, inputs = inputs_of(name)
    model = getattr(diffusers.models, name)(**options)
    inputs["hidden_states"].requires_grad_()
    with diffusers.dispatch.attention_backend(backend):
        out = model(**inputs).sample
        out.square().mean().backward()
    return out.detach(), inputs["hidden_states"].grad, [x.grad for x in model.parameters() if x.grad is not None]


def same_step(mine, theirs):
    close(mine[0], theirs[0])
    for grad, want in zip([mine[1], *mine[2]], [theirs[1], *theirs[2]]):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6)


BACKENDS = ["flash", "flash_varlen", "_flash_3", "_flash_varlen_3", "flex"]
PICTURES = ["FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"]


@pytest.mark.parametrize("name", PICTURES)
def test_training_steps_of_diffusers(backends, monkeypatch, name):
    found = []
    for function in ("attend", "attend_under"):
        monkeypatch.setattr(backends.ours, function, counted(getattr(backends.ours, function), found))
    expected = step(backends, name, "native")
    assert not found
    for backend in BACKENDS:
        same_step(step(backends, name, backend), expected)
        assert found
        found.clear()


@pytest.mark.parametrize("backend", ["flash", "flash_varlen"])
@pytest.mark.parametrize("name", PICTURES[:2])
def test_diffusers_takes_this_package_as_it_is(diffusers, name, backend):
    """Without any registration, on the CPU."""
    same_step(step(diffusers, name, backend), step(diffusers, name, "native"))


def test_diffusers_is_as_before(diffusers):
    registry = diffusers.dispatch._AttentionBackendRegistry

    def state():
        tables = registry._backends, registry._constraints, registry._supported_arg_names
        return [dict(table) for table in tables], diffusers.dispatch._CAN_USE_FLASH_ATTN_3

    before = state()
    with diffusers.ours.register(["_flash_3"]) as registration:
        assert 'backend "_flash_3" runs on the kernels of flash_attn' in str(registration)
        assert state() != before
    assert state() == before
    with pytest.raises(ValueError, match="backends must be some of"):
        diffusers.ours.register(["native"])


@pytest.mark.parametrize("name", ["_AttentionBackendRegistry", "_check_device", "_CAN_USE_FLASH_ATTN_3"])
def test_diffusers_of_another_version(diffusers, monkeypatch, name):
    monkeypatch.delattr(diffusers.dispatch, name)
    with pytest.raises(ImportError, match="needs Diffusers 0.36 or newer; this one lacks"):
        diffusers.ours.register()


MASKS = {
    "none": None,
    "keys": (2, 11),
    "keys of all": (1, 1, 1, 11),
    "keys, one dimension": (11,),
    "rows and keys": (7, 11),
    "batch, rows and keys": (2, 7, 11),
    "heads": (2, 4, 7, 11),
    "keys of a batch": (2, 1, 1, 11),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_diffusers(backends, backend, kind, dtype):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 7, 4, 16), torch.randn(2, 2, 11, 2, 16)
    mask = whole = None
    if MASKS[kind]:
        mask = torch.rand(MASKS[kind]) > 0.4
        mask[..., 3] = True  # every row sees a key
        mask = mask if dtype == torch.bool else torch.where(mask, 0.5, -3.0)
        shapes = {"keys": (2, 1, 1, 11), "keys, one dimension": (1, 11), "batch, rows and keys": (2, 1, 7, 11)}
        whole = mask.view(shapes.get(kind, mask.shape))
    dispatch = functools.partial(backends.dispatch.dispatch_attention_fn, q, k, v, mask, scale=0.3)
    with backends.dispatch.attention_backend(backend):
        out = dispatch()
        again, lse = dispatch(attention_kwargs={"return_lse": True})
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, whole, scale=0.3, enable_gqa=True)
    close(out, expected.transpose(1, 2))
    close(again, out)
    scores = 0.3 * heads[0] @ heads[1].repeat_interleave(2, 1).transpose(2, 3)
    if whole is not None:
        scores = scores.masked_fill(~whole, -float("inf")) if dtype == torch.bool else scores + whole
    close(lse if backend != "_flash_3" else lse.transpose(1, 2), scores.logsumexp(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_in_diffusers(backends, backend):
    """flex counts from the first key, as PyTorch, and the others from the last, as flash-attn."""
    q, (k, v) = torch.randn(2, 7, 4, 16), torch.randn(2, 2, 11, 4, 16)
    with backends.dispatch.attention_backend(backend):
        out = backends.dispatch.dispatch_attention_fn(q, k, v, is_causal=True)
        with pytest.raises(ValueError, match=r"attn_mask must be .* it has the shape \(3, 11\)"):
            backends.dispatch.dispatch_attention_fn(q, k, v, torch.ones(3, 11, dtype=torch.bool))
    seen = torch.ones(7, 11, dtype=torch.bool).tril(0 if backend == "flex" else 4)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), seen)
    close(out, expected.transpose(1, 2))


def test_block_masks_in_diffusers(backends):
    q = k = v = torch.randn(2, 70, 4, 16)
    mask = our_flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70, "cpu")
    with backends.dispatch.attention_backend("flex"):
        out = backends.dispatch.dispatch_attention_fn(q, k, v, mask)
    close(out, flash_attn_func(q, k, v, causal=True))


# ---- x-transformers ------------------------------------------------------------------------------------------------


def test_x_transformers():
    """It takes our function for packed sequences, but for tensors of a GPU only."""
    need("x_transformers")
    from x_transformers.attend import Attend

    attend = Attend(causal=True, flash=True, flash_pack_seq=True)
    assert attend.flash_attn_varlen_func is flash_attn_varlen_func
    q = torch.randn(1, 2, 9, 16)
    lengths = {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_k": torch.tensor([0, 4, 9])}
    with pytest.raises(AssertionError, match="only available on CUDA"):
        attend(q, q, q, flash_pack_seq_kwargs={**lengths, "max_seqlen_q": 5, "max_seqlen_k": 5})


# ---- SimpleTuner ---------------------------------------------------------------------------------------------------


def test_calls_of_simpletuner():
    """It calls packed functions by these names, and again with fewer arguments after a TypeError."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 2, 16)
    expected = flash_attn_func(*qkv.unbind(2), softmax_scale=0.3)
    close(flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=0.3, causal=False), expected)
    close(flash_attn_qkvpacked_func(qkv, causal=False), flash_attn_func(*qkv.unbind(2)))
    cu_seqlens, packed = torch.tensor([0, 9, 18], dtype=torch.int32), qkv.flatten(0, 1)
    out = flash_attn_varlen_qkvpacked_func(packed, cu_seqlens, 9, 0.0, softmax_scale=0.3, causal=False)
    close(out, expected.flatten(0, 1))
    out = flash_attn_varlen_qkvpacked_func(
        qkv=packed, cu_seqlens=cu_seqlens, max_seqlen=9, dropout_p=0.0, softmax_scale=0.3, causal=False
    )
    close(out, expected.flatten(0, 1))
    parts = [x.contiguous() for x in packed.unbind(1)]
    out = flash_attn_varlen_func(*parts, cu_seqlens, cu_seqlens, 9, 9, dropout_p=0.0, softmax_scale=0.3, causal=False)
    close(out, expected.flatten(0, 1))


@pytest.mark.parametrize(
    "change", [lambda x: x.long(), lambda x: x[..., 0], lambda x: x[:, :, :2], lambda x: x.to(torch.complex64)]
)
def test_a_wrong_tensor_is_no_type_error(change):
    """A TypeError would make SimpleTuner try again without dropout and scale."""
    with pytest.raises((RuntimeError, ValueError)):
        flash_attn_qkvpacked_func(change(torch.randn(2, 9, 3, 2, 16)), dropout_p=0.1, softmax_scale=0.3, causal=False)
