"""The masks of flash_attn.integrations.transformers beside those of ``sdpa``, and masks that are kept, on the CPU."""

import contextlib

import pytest
import torch
from harness_clients import close, counted
from harness_transformers import models, ours, tokens, watch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import masking_utils

from flash_attn import flash_attn_func
from flash_attn import flex_attention as our_flex
from flash_attn._remembered import MANY, once, remembered
from flash_attn.integrations import _attend


@pytest.fixture
def registered():
    with ours.register(ours.KNOWN) as registration:
        yield registration


@pytest.fixture
def calls(monkeypatch):
    return watch(monkeypatch)


def test_masks_that_are_refused():
    module, x = torch.nn.Module(), torch.randn(2, 2, 5, 16)
    with pytest.raises(
        ValueError, match=r"an attention_mask \(b, len_kv\) must be bool or integers; it is torch.float32"
    ):
        ours.attention(module, x, x, x, torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"attention_mask must have 2 or 4 dimensions.*\(2, 5, 5\)"):
        ours.attention(module, x, x, x, torch.ones(2, 5, 5).bool())


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_mask_with_holes(registered, name):
    theirs, mine = models(name)
    ids, mask = tokens()
    mask[2, 5] = mask[2, 0] = 0
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (mine, theirs))
        close(out, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_packed_sequences_beside_padding(grad):
    module, ids = torch.nn.Module(), torch.tensor([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2]])
    padding = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1, 1]]).bool()
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids)
    )
    q, k, v = torch.randn(3, 2, 2, 7, 16, requires_grad=grad)
    mask = ours.mask_for_flash(2, 7, 7, mask_function=function, attention_mask=padding)
    dense = masking_utils.sdpa_mask(
        batch_size=2, q_length=7, kv_length=7, mask_function=function, attention_mask=padding,
        allow_is_causal_skip=False, device="cpu",
    )  # fmt: skip
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense).transpose(1, 2)
    close(ours.attention(module, q, k, v, mask)[0][padding], expected[padding])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (-1, 1), (-1, -1)])
def test_fewer_keys_than_rows(window, grad):
    """The last row is beside the last key. The first rows see no key, or those of a window to the right."""
    q, k, v = (torch.randn(2, n, 2, 16, requires_grad=grad) for n in (8, 5, 5))
    for holes in ([1, 1, 0, 1, 1], [1, 1, 1, 1, 0]):
        mask = torch.tensor([holes, [1] * 5]).bool()
        own = torch.nn.functional.pad(mask, (3, 0), value=True) if window != (-1, -1) else torch.ones(2, 8).bool()
        expected = flash_attn_func(q, k, v, attn_mask=mask[:, None, None], window_size=window)
        close(_attend.attend(q, k, v, mask, scale=None, window=window)[own], expected[own])


@torch.no_grad()
def test_keys_with_strides_of_their_columns():
    q, k, v = torch.randn(3, 2, 5, 2, 16)
    k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (k, v))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5]).bool()
    close(_attend.attend(q, k, v, mask, scale=None), flash_attn_func(q, k, v, attn_mask=mask[:, None, None]))


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


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_rule_beside_positions_that_begin_again(is_causal):
    """The module of some models knows no window, and a causal module may get a mask that is not causal."""
    positions = torch.cat([torch.arange(n) for n in (6, 9, 2)])[None]
    rule = ours.Rule(2, 0) if is_causal else ours.Rule(-1, -1)
    mask = torch.ones(1, 17, dtype=torch.bool)
    mask.flash_attn_rule = rule
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(3, 1, 2, 17, 16, generator=torch.Generator().manual_seed(0))
    sequences = (positions == 0).cumsum(-1)[0]
    distance = torch.arange(17) - torch.arange(17)[:, None]
    near = (sequences == sequences[:, None]) & (distance <= 0) & (distance >= -2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, near if is_causal else None)
    close(ours.attention(module, q, k, v, mask, position_ids=positions)[0], expected.transpose(1, 2))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (2, 0)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)])
def test_padding_under_autocast(dtypes, window, grad):
    """Rotary embeddings can make q and k fp32 under autocast, and v stays in bf16."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, 2, 16, generator=draw).to(x) for x in (dtypes[0], dtypes[0], dtypes[1]))
    q.requires_grad_(grad)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]).bool()
    with torch.autocast("cpu", torch.bfloat16):
        out = _attend.attend(q, k, v, mask, scale=0.25, window=window)
        expected = flash_attn_func(q, k, v, softmax_scale=0.25, window_size=window, attn_mask=mask[:, None, None])
    assert out.dtype == expected.dtype == torch.bfloat16
    close(out[mask].float(), expected[mask].float(), 0.02)


def test_a_mask_of_a_client_gets_no_rule():
    """A client may give the same mask to another module, which is not causal and has no function for masks."""
    client = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    made = ours.mask_for_flash(2, 4, 4, attention_mask=client)
    module = torch.nn.Module()
    module.is_causal = False
    q, k, v = torch.randn(3, 2, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, client[:, None, None]).transpose(1, 2)
    close(ours.attention(module, q, k, v, client)[0], expected)
    assert made.equal(client)


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
    words = torch.ones(2, MANY, dtype=torch.bool)
    num = words.numel()
    assert once(words).shape == (num // 8,) and once(words[:, 8:]).shape == (2, MANY - 8)
    assert once(words.view(-1)[1 : MANY + 1]).shape == (MANY,)  # a word would begin between words of the memory
    assert once(words.view(num).as_strided((num, 1, 1), (1, 1, 1)).transpose(0, 2)).shape == (num // 8,)
    assert once(words[:1, 8:]).shape == (1, MANY - 8)  # few are compared as they are
    numbers = torch.full((2, 6), float("nan"))
    assert torch.equal(once(numbers), once(numbers.clone()))


def test_a_mask_with_any_strides_of_sizes_of_one():
    q = k = v = torch.randn(1, 136, 2, 16)
    mask = torch.rand(136) > 0.5
    odd = mask.as_strided((1, 1, 1, 136), (1, 3, 1, 1))
    assert odd.is_contiguous()
    want = flash_attn_func(q, k, v, attn_mask=mask)
    for _ in range(2):
        assert flash_attn_func(q, k, v, attn_mask=odd).equal(want)


def test_blocks_of_a_dense_mask_are_found_once(monkeypatch):
    from flash_attn.flex import ops

    looks = []
    monkeypatch.setattr(ops, "find_lists", counted(ops.find_lists, looks))
    q = k = v = torch.randn(1, 200, 2, 16)
    mask = torch.rand(1, 1, 200, 200) > 0.5
    first = [flash_attn_func(q, k, v, attn_mask=mask) for _ in range(3)]
    assert len(looks) == 1 and first[0].equal(first[2])
    mask.logical_not_()
    assert not flash_attn_func(q, k, v, attn_mask=mask).equal(first[0]) and len(looks) == 2
    flash_attn_func(q, k, v, attn_mask=mask, window_size=(5, 5))
    assert len(looks) == 3
