"""flash_attn.integrations.transformers with the real library, unchanged, on the CPU.

Each model is compared with the attention that the library has of its own, forward, backward and in generation. Counters
say which kernels were called, because another attention would give the same numbers.
"""

from types import SimpleNamespace

import fresh_python
import pytest
import torch
from harness_clients import close, counted
from harness_transformers import DECODERS, LENGTHS, models, ours, tokens, trained, transformers, watch
from transformers import masking_utils, modeling_utils
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.generation.continuous_batching import initialization
from transformers.utils import import_utils

from flash_attn import flash_attn_func

SOFT = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def registered():
    with ours.register(ours.KNOWN) as registration:
        yield registration


@pytest.fixture
def calls(monkeypatch):
    return watch(monkeypatch)


# ---- registration --------------------------------------------------------------------------------------------------


def test_nothing_is_imported():
    code = "import sys, flash_attn.integrations; print({'transformers', 'diffusers'} & set(sys.modules))"
    assert fresh_python.python(code).stdout == "set()\n"


def registries():
    functions, masks = modeling_utils.AttentionInterface._global_mapping, masking_utils.AttentionMaskInterface
    hooks = vars(modeling_utils.PreTrainedModel)[HOOK], *(vars(masking_utils)[name] for name in ours.LOOK_AT_POSITIONS)
    return dict(functions), dict(masks._global_mapping), hooks


HOOK = "_check_and_adjust_attn_implementation"


def test_transformers_is_as_before():
    before = registries()
    with pytest.raises(ValueError, match="flash_attn"):
        models("Llama")
    registration = ours.register()
    assert 'attn_implementation="flash_attn" runs on the kernels of flash_attn' in str(registration)
    assert "a GPU is asked whether position_ids begin again" in str(registration)
    assert not {*registries()[2]} & {*before[2]}
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


@pytest.mark.parametrize("name", ours.LOOK_AT_POSITIONS)
def test_transformers_without_a_look_at_positions(monkeypatch, name):
    with monkeypatch.context() as patch:
        patch.delattr(masking_utils, name)
        with ours.register() as registration:
            assert "position_ids" not in str(registration)


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
    config = transformers.GPTNeoConfig(
        vocab_size=97, hidden_size=64, num_heads=4, num_layers=1, attention_types=[[["global"], 1]]
    )
    config._attn_implementation = name
    with pytest.raises(ValueError, match='GPTNeoForCausalLM has a flash attention of its own, .* use "eager"'):
        transformers.GPTNeoForCausalLM(config)


# ---- models of transformers ----------------------------------------------------------------------------------------


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
def test_positions_are_looked_at_before_the_layers(registered, calls, monkeypatch, use_cache):
    """Once, by transformers or by us, and for models of registered names. A buffer of positions may be written again.

    The CPU stands for a GPU here.
    """
    looks, can_ask = [], lambda positions: positions is not None and len(positions) == 1

    class Answer(ours._Answer):
        def __init__(self, flag):
            looks.append(bool(flag))
            super().__init__(flag)

    monkeypatch.setattr(ours, "_can_ask", can_ask)
    monkeypatch.setattr(ours, "_Answer", Answer)
    theirs, mine = models("Llama")
    ids, mask = tokens()
    ids = ids[mask.bool()][None]
    positions = torch.arange(ids.shape[1])[None]
    expected = theirs(ids, position_ids=positions.clone(), use_cache=True).logits
    assert looks == []
    close(mine(ids, position_ids=positions, use_cache=use_cache).logits, expected)
    assert looks == [False] * use_cache and "flash_attn_varlen_func" not in calls
    positions.copy_(torch.cat([torch.arange(n) for n in LENGTHS]))
    layers = [layer.register_forward_pre_hook(lambda *_: looks.append("layer")) for layer in mine.model.layers]
    out = mine(ids, position_ids=positions, use_cache=use_cache).logits[0]
    assert len(layers) == 2 and looks[use_cache:] == [True, "layer", "layer"]
    assert calls[-2:] == ["flash_attn_varlen_func"] * 2
    close(out, torch.cat([theirs(row[None]).logits[0] for row in ids[0].split(LENGTHS)]))


@SOFT
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_packed_sequences_with_checkpoints(registered, num_rows, use_reentrant):
    """The backward computes a layer again, and GPT-2's with a detached mask."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(num_rows, -1)
    ids = torch.randint(1, 97, positions.shape, generator=torch.Generator().manual_seed(1))
    grads = []
    for model in models("GPT-2"):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        model(ids, position_ids=positions, use_cache=False).logits.square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for theirs, mine in zip(*grads):
        close(mine, theirs)


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


@SOFT
@pytest.mark.parametrize("is_theirs", [False, True])
def test_continuous_batching_with_pages(calls, monkeypatch, is_theirs):
    """transformers asks for pages if it finds a GPU. It believes that there is one, and computes on the CPU: with our
    attention, and with its own over the functions of this package."""
    monkeypatch.setattr(initialization, "is_torch_xpu_available", lambda: True)
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    matrix = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    monkeypatch.setitem(matrix, 2, {**matrix[2], "supported_devices": ((lambda: True, "cuda"),)})
    import_utils.is_flash_attn_2_available.cache_clear()
    flash_utils.lazy_import_flash_attention("flash_attention_2")
    for name in ("_flash_varlen_fn", "_flash_with_kvcache_fn") if is_theirs else ():
        monkeypatch.setattr(flash_utils, name, counted(getattr(flash_utils, name), calls))
    with ours.register([] if is_theirs else ["flash_attention_2"]):
        theirs, mine = models("Llama", "flash_attention_2")
        torch.manual_seed(3)
        prompts = [torch.randint(1, 97, (n,)).tolist() for n in (9, 4, 13, 17)]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, page_size=8, max_blocks_per_request=8, auto_switch_to_flash=False
        )
        found = mine.generate_batch(
            prompts, generation_config=transformers.GenerationConfig(**options), continuous_batching_config=batching
        )
    import_utils.is_flash_attn_2_available.cache_clear()
    order = sorted(found, key=lambda request: int(request.rpartition("_")[2]))
    expected = [theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    assert [found[request].generated_tokens for request in order] == expected
    assert set(calls) == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}


class Pages:
    """A cache of continuous batching whose attention function appends to the pages."""

    def __init__(self, k_cache, v_cache):
        self.caches = {"k_cache": k_cache, "v_cache": v_cache}

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs.update(self.caches, cu_seq_lens_k=kwargs["cu_seq_lens_k"]["full"], max_length_k=1)
        return key_states, value_states


@pytest.mark.parametrize("is_one_pool", [False, True])
def test_pages_of_continuous_batching(calls, is_one_pool):
    """transformers asks for this on a GPU only. Its layers share a pool, and a layer's values lie behind its keys."""
    torch.manual_seed(0)
    lengths, page, sinks = [5, 9, 1], 4, torch.randn(4)
    q, (k, v) = torch.randn(1, 4, 3, 16), torch.randn(2, 1, 2, 3, 16)
    if is_one_pool:
        pool = torch.randn(49, page, 2, 16)
        caches = pool[:-1], pool[1:]
        table = 4 * torch.randperm(12, dtype=torch.int32)[:9].view(3, 3)  # two layers
    else:
        pool = caches = torch.randn(2, 12, page, 2, 16)
        table = torch.randperm(12, dtype=torch.int32)[:9].view(3, 3)
    before, old_pool = [cache[table.long()].flatten(1, 2) for cache in caches], pool.clone()
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
    assert (pool != old_pool).flatten(-2).any(-1).sum() == 6  # the new keys and values, and nothing else


def test_a_captured_step_of_continuous_batching_looks_at_no_mask(monkeypatch):
    """A look would wait for the GPU. A mask of packed sequences, which transformers makes then, says no more than the
    lengths."""
    monkeypatch.setattr(ours, "keys_of", None)
    monkeypatch.setattr(ours, "remembered", None)
    q, k, v = torch.randn(3, 1, 2, 13, 16)
    cu_seqlens = torch.tensor([0, 9, 13], dtype=torch.int32)
    mask = torch.ones(1, 13, dtype=torch.bool)
    mask.flash_attn_rule = ours.Rule(-1, 0, torch.tensor([[0] * 9 + [1] * 4]))
    module = torch.nn.Module()
    module.is_causal, module.layer_idx = True, 0
    cache = SimpleNamespace(update=lambda key_states, value_states, layer_idx, kwargs: (key_states, value_states))
    out, _ = ours.attention(
        module, q, k, v, mask, cache=cache, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=9,
        max_length_k=9, position_ids=torch.cat([torch.arange(9), torch.arange(4)])[None],
    )  # fmt: skip
    for part in (slice(0, 9), slice(9, 13)):
        want = flash_attn_func(*(x[:, :, part].transpose(1, 2) for x in (q, k, v)), causal=True)
        close(out[:, part], want)


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


@torch.no_grad()
@pytest.mark.parametrize("attention", ["flash_attn", "flex_attention"])
@pytest.mark.parametrize("name", ["PEGASUS-X", "AIMv2"])
def test_decoders_that_say_that_they_are_not_causal(registered, name, attention):
    """Only the mask says it, so it is made without padding, too."""
    theirs, mine = models(name, attention)
    ids, _ = tokens((16, 16))
    ids[:, -1] = 96
    options = {"decoder_input_ids": ids[:, :9]} if name == "PEGASUS-X" else {"attention_mask": torch.ones_like(ids)}
    out, expected = (model(ids, **options)[0] for model in (mine, theirs))
    close(out, expected)


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


@pytest.mark.parametrize("attention", ["flash_attn", "flex_attention"])
@pytest.mark.parametrize("name", ["Doge", "Pix2Struct"])
def test_layers_that_index_their_mask(registered, calls, name, attention):
    """Doge adds a bias of each key and keeps the 7 largest of a row. Pix2Struct cuts the mask to its keys."""
    theirs, mine = models(name, attention)
    ids, mask = tokens(side="left" if name == "Doge" else "right")
    more = {"encoder_hidden_states": torch.randn(3, 5, 64)} if name == "Pix2Struct" else {}
    found = []
    for model in (mine, theirs):
        logits = model(ids, attention_mask=mask, **more).logits[mask.bool()]
        logits.square().mean().backward()
        found.append(logits.detach())
    close(*found, 1e-5)
    assert calls
    for parameter, other in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)
    if name == "Doge":
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


def test_dropout(registered):
    _, mine = models("Llama", attention_dropout=0.3)
    ids, mask = tokens()
    mine.train()
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(mine(ids, attention_mask=mask).logits[mask.bool()])
    assert found[0].equal(found[1]) and not found[0].equal(found[2])
    square = torch.rand(3, 1, 13, 13) > 0.5
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(mine(ids, attention_mask=square).logits)
    assert found[0].equal(found[1]) and not found[0].equal(found[2])


@pytest.mark.parametrize("attention", ["flash_attn", "flex_attention"])
def test_dropout_beside_a_bias_of_positions(registered, calls, attention):
    """T5 trains with dropout, and its bias learns. The first layer's dropout of weights is the only random one here."""
    theirs, mine = models("T5", attention, dropout_rate=0.0)
    ids, mask = tokens()
    more = {"decoder_input_ids": ids}
    module = next(m for m in mine.modules() if type(m).__name__ == "T5Attention")
    module.dropout = 0.4
    mine.train()
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        mine.zero_grad()
        loss = mine(ids, attention_mask=mask, **more).logits.square().mean()
        loss.backward()
        found.append((loss.detach(), module.relative_attention_bias.weight.grad.clone()))
    assert all(x.equal(y) for x, y in zip(*found[:2])) and not any(x.equal(y) for x, y in zip(*found[1:]))
    assert calls and found[0][1].isfinite().all() and found[0][1].abs().max() > 0
    module.dropout = 0.0
    close(*(x.train()(ids, attention_mask=mask, **more).logits for x in (mine, theirs)), 1e-5)


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
