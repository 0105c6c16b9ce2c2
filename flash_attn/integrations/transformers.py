"""transformers with this package: ``attn_implementation="flash_attn"``, on every device, in fp16, bf16 and fp32.

    import flash_attn.integrations.transformers as ours
    ours.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_attn")

transformers calls two functions of a name. The first makes a mask, once in a forward pass. The second is the attention
of a layer, and gets this mask:

    None                the causal mask of the module with its last row at the last key, or no mask
    [b, len_kv]         padding, with a Rule: causal or not, a window, packed sequences, the offset of the rows
    [b, 1, len_q, len_kv], bool or float    any other mask
    BlockMask           any other mask, if the name is "flex_attention"

A rule is an attribute of the mask, and noted for its memory, because a checkpoint of activations detaches the mask. A
model that takes the mask apart loses the rule. Then the module says what is causal.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Sequence
from typing import Optional

import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_attn._remembered import note, noted, remembered
from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention
from flash_attn.integrations import _registration
from flash_attn.integrations._attend import attend, attend_under, keys_of

__all__ = ["NAME", "register", "unregister"]

NAME = "flash_attn"
BY_DENSE_MASKS = "fa_dense"  # NAME in models that know no masks [b, len_kv]; a name with "flash" would ask for them
WITHOUT_GPU = ("flash_attention_2", "flash_attention_3", "flex_attention")
KNOWN = (NAME, *WITHOUT_GPU)
# Functions of transformers that see position_ids before the layers do. Without them the first layer asks the GPU.
LOOK_AT_POSITIONS = "_preprocess_mask_arguments", "find_packed_sequence_indices"
# Decoders whose modules say that they are not causal. So their causal mask is never left out.
SAY_NOT_CAUSAL = ("aimv2_text_model", "pegasus_x")
# Models whose layers index a mask (b, 1, len_q, len_kv), also under "flex_attention".
INDEX_MASKS = ("doge", "pix2struct_text_model")


# ---- the mask of a forward pass ------------------------------------------------------------------------------------


class Rule:
    """Row i sees key j iff ``-left <= j - (i + shift) <= right``, and in the same sequence. -1 lifts a bound."""

    def __init__(self, left, right, sequences=None):
        self.left, self.right, self.sequences, self.shift = left, right, sequences, 0

    def is_same(self, other):
        numbers = ((rule.left, rule.right, rule.shift) for rule in (self, other))
        return next(numbers) == next(numbers) and self.sequences is other.sequences

    def and_also(self, other):
        """The rule that allows what both allow, or None."""
        if self.sequences is not None and other.sequences is not None:
            return None
        left, right = _nearer(self.left, other.left), _nearer(self.right, other.right)
        return Rule(left, right, other.sequences if self.sequences is None else self.sequences)


def _nearer(bound, other):
    return max(bound, other) if min(bound, other) < 0 else min(bound, other)


def _rule_at(mask):
    """The rule of a mask that was made here, or None."""
    rule = getattr(mask, "flash_attn_rule", None)
    if rule is None and isinstance(mask, torch.Tensor) and not torch.compiler.is_compiling():
        rule = noted(mask)
    return rule


@functools.cache
def _names():
    """Names of transformers' own mask functions, by their code objects.

    A program may have replaced a function, and another version may lack one or count otherwise. So each must say what
    its name says.
    """
    from transformers import masking_utils as made

    j = torch.arange(9, device="cpu")
    i = j[:, None]
    sequences = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2]], device="cpu")
    positions = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 2, 3]], device="cpu")
    is_causal, is_near = j <= i, j > i - 3

    def causal(b, h, i, j):
        return j <= i

    def near(b, h, i, j):
        return j > i - 3

    functions = {  # the name here and there, the arguments that make it, and what it says
        "and": ("and_masks", (causal, near), is_causal & is_near),
        "causal": ("causal_mask_function", None, is_causal),
        "all": ("bidirectional_mask_function", None, i >= 0),
        "left": ("sliding_window_overlay", (3,), is_near),
        "both": ("sliding_window_bidirectional_overlay", (3,), (i - j).abs() <= 3),
        "sequences": ("packed_sequence_mask_function", (sequences,), sequences[0, i] == sequences[0, j]),
        "positions": (
            "remap_positions_for_packed_sequence", (causal, positions), positions[0, j] <= positions[0, i]
        ),
    }  # fmt: skip
    nothing, names = torch.zeros((), dtype=torch.int64, device="cpu"), {}
    for name, (there, args, says) in functions.items():
        function = getattr(made, there, None)
        if function is not None and args is not None:
            function = function(*args)
        if function is not None and torch.equal(function(nothing, nothing, i, j).expand(9, 9), says.expand(9, 9)):
            names[function.__code__] = name
    return names


def rule_of(mask_function):
    """The rule of a mask function of transformers, or None for any other function."""
    code = getattr(mask_function, "__code__", None)
    name = _names().get(code)
    held = {}
    if code is not None and mask_function.__closure__:
        held = dict(zip(code.co_freevars, (cell.cell_contents for cell in mask_function.__closure__)))
    if name == "causal":
        return Rule(-1, 0)
    if name == "all":
        return Rule(-1, -1)
    if name == "left":
        return Rule(held["sliding_window"] - 1, -1)
    if name == "both":
        return Rule(held["sliding_window"], held["sliding_window"])
    if name == "sequences":
        return Rule(-1, -1, held["packed_sequence_mask"])
    if name != "and":
        return None
    parts = held["mask_functions"]
    names = [_names().get(getattr(part, "__code__", None)) for part in parts]
    # Positions count from the start of each sequence. So differences of positions in a sequence are those of places.
    are_packed = "sequences" in names
    rule = Rule(-1, -1)
    for name, part in zip(names, parts):
        if are_packed and name == "positions":
            part = part.__closure__[part.__code__.co_freevars.index("mask_function")].cell_contents
        more = rule_of(part)
        rule = None if more is None else rule.and_also(more)
        if rule is None:
            return None
    return rule


def mask_for_flash(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    allow_is_causal_skip=True,
    allow_is_bidirectional_skip=False,
    use_vmap=False,
    device="cpu",
    **others,
):
    """The mask function of NAME. Where ``sdpa`` has no mask, it returns None, too."""
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    allow_is_causal_skip = allow_is_causal_skip and _says_what_is_causal(others.get("config"))
    if attention_mask is not None and torch.jit.is_tracing():
        raise NotImplementedError(
            'torch.jit.trace would keep this attention_mask for all later calls: use attn_implementation="sdpa" for '
            "it, or torch.export"
        )
    rule = None if use_vmap or torch.compiler.is_compiling() else rule_of(mask_function)
    if rule is None:
        if attention_mask is not None and attention_mask.shape[-1] == kv_length and int(kv_offset):
            # generate() asked for it before, outside torch.compile. It begins at the first key of the cache.
            attention_mask = torch.nn.functional.pad(attention_mask, (int(kv_offset), 0))
        return dense_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, use_vmap=use_vmap, device=device, **others,
        )  # fmt: skip
    rule.shift = int(q_offset) - int(kv_offset)
    made = _rule_at(attention_mask)
    if made is not None and made.is_same(rule) and attention_mask.shape == (batch_size, kv_length):
        return attention_mask  # generate() asked for it before
    padding = prepare_padding_mask(attention_mask, kv_length, int(kv_offset))
    if padding is not None:
        padding = padding[:, int(kv_offset) : int(kv_offset) + kv_length]
    has_no_window = rule.sequences is None and not 0 <= rule.left < kv_length and rule.right <= 0
    skips_causal = allow_is_causal_skip and q_length in (1, kv_length)  # without a mask the last row is at the last key
    may_skip = skips_causal if rule.right == 0 else allow_is_bidirectional_skip
    if may_skip and has_no_window and (padding is None or bool(padding.all())):
        return None
    # It has dense strides, because a copy that a client makes would have no rule. It has memory of its own, because the
    # rule is noted for this memory, and the caller's attention_mask has no rule.
    mask = torch.empty(batch_size, kv_length, dtype=torch.bool, device=device)
    mask.copy_(torch.ones_like(mask) if padding is None else padding.bool())
    mask.flash_attn_rule = rule
    note(mask, rule)
    return mask


def _says_what_is_causal(config):
    return getattr(config, "model_type", None) not in SAY_NOT_CAUSAL


def dense_mask(q_length, kv_length, allow_is_causal_skip=True, **others):
    """The mask of ``sdpa``. It is left out only where it says the same at the first and at the last key."""
    from transformers.masking_utils import sdpa_mask

    skips = allow_is_causal_skip and q_length in (1, kv_length) and _says_what_is_causal(others.get("config"))
    return sdpa_mask(q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skips, **others)


def mask_for_flex(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, use_vmap=False, **others
):
    """The mask function of "flex_attention": a block mask in place of a dense mask, if the function can be traced."""
    from transformers.masking_utils import add_offsets_to_mask_function, causal_mask_function

    mask_function = causal_mask_function if mask_function is None else mask_function
    options = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, "use_vmap": use_vmap}
    if getattr(others.get("config"), "model_type", None) in INDEX_MASKS:
        return dense_mask(q_length, kv_length, batch_size=batch_size, **options, **others)
    if torch.compiler.is_compiling() or (not use_vmap and rule_of(mask_function) is not None):
        return mask_for_flash(batch_size, q_length, kv_length, **options, **others)
    padding = others.get("attention_mask")
    function = add_offsets_to_mask_function(mask_function, int(q_offset), int(kv_offset))
    if padding is not None:
        length = kv_length + int(kv_offset)
        padding = torch.nn.functional.pad(padding.bool(), (0, max(length - padding.shape[-1], 0)))[:, int(kv_offset) :]
        inner = function

        def function(b, h, i, j):
            return inner(b, h, i, j) & padding[b, j]

    try:
        return create_block_mask(function, batch_size, None, q_length, kv_length, others.get("device", "cpu"))
    except (NotImplementedError, RuntimeError, TypeError, AttributeError):  # not what a tracer can follow
        return mask_for_flash(batch_size, q_length, kv_length, **options, **others)


# ---- the attention of a layer --------------------------------------------------------------------------------------


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    cache=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    block_table=None,
    position_ids=None,
    **kwargs,
):
    """The attention function of NAME: query ``[b, h, len_q, d]``, out ``[b, len_q, h, d]`` and no weights."""
    if kwargs.get("output_attentions"):
        warnings.warn(f'attn_implementation="{NAME}" has no attention weights: "eager" has them', stacklevel=2)
    if cache is not None:  # continuous batching: the keys and values of all sequences, whose lengths say everything
        lengths = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, "block_table": block_table, **kwargs}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=lengths)
        cu_seq_lens_k, max_length_k = lengths["cu_seq_lens_k"], lengths["max_length_k"]
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    columns, columns_of_values = q.shape[-1], v.shape[-1]
    scale = columns**-0.5 if scaling is None else scaling
    if columns != columns_of_values:
        most = max(columns, columns_of_values)
        q, k, v = (torch.nn.functional.pad(x, (0, most - x.shape[-1])) for x in (q, k, v))
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    side = -1 if sliding_window is None else int(sliding_window) - 1
    window = side, 0 if is_causal else side
    options = {"scale": scale, "softcap": softcap or 0.0, "dropout": dropout, "sinks": s_aux}
    if block_table is not None:
        out = _with_pages(q, k, v, lengths, window, **options)
    elif isinstance(attention_mask, BlockMask):
        out = _under_blocks(query, key, value, attention_mask, position_bias, **options)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None and (cache or _hides_nothing(attention_mask)):
        lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        out = _packed(q, k, v, lengths, window, **options)
    elif is_causal and position_bias is None and _are_packed(attention_mask, position_ids, q, k):
        window = _window_of(_rule_at(attention_mask), window)
        out = _in_sequences(q, k, v, position_ids, window, **options, are_positions=True)
    elif attention_mask is None or attention_mask.dim() == 2:
        out = _under_rule(q, k, v, attention_mask, window, position_bias, options)
    elif attention_mask.dim() == 4:
        _check_mask(attention_mask, q, k)
        out = attend_under(q, k, v, attention_mask, bias=_keys_of_bias(position_bias, k.shape[1]), **options)
    else:
        raise ValueError(
            "attention_mask must have 2 or 4 dimensions, (b, len_kv) or (b, h, len_q, len_kv); "
            f"it has the shape {tuple(attention_mask.shape)}"
        )
    return (out if columns <= columns_of_values else out[..., :columns_of_values]).contiguous(), None


def _check_mask(mask, q, k):
    wanted = len(q), q.shape[2], q.shape[1], k.shape[1]
    if any(has not in (1, want) for has, want in zip(mask.shape, wanted)):
        raise ValueError(
            f"attention_mask must have the shape (b, h, len_q, len_kv) = {wanted}, or 1 in place of a size; "
            f"it has the shape {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"an attention_mask (b, h, len_q, len_kv) must be bool or floating; it is {mask.dtype}")


def _hides_nothing(mask):
    """Whether a mask hides no padding. Then lengths of sequences say more than the mask."""
    if mask is None:
        return True
    return _rule_at(mask) is not None and keys_of(mask).is_full


def _are_packed(mask, position_ids, q, k):
    """Whether positions begin again in a batch of one row. Some models make their mask without a look at positions.

    They begin again where the least position comes back. Any other step is a position that a client chose.
    """
    len_q = q.shape[1]
    if len_q == 1 or len(q) != 1 or k.shape[1] != len_q or position_ids is None or position_ids.shape != (1, len_q):
        return False
    if torch.compiler.is_compiling():
        return False
    rule = _rule_at(mask)
    if not _hides_nothing(mask) or (rule is not None and (rule.sequences is not None or rule.right != 0)):
        return False
    return bool(_begin_again(position_ids))


class _Answer:
    """A bool that a GPU computes. Its way to the host begins at once, and only ``bool()`` waits for it."""

    def __init__(self, flag):
        self.flag, self.event = flag, None
        if flag.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(flag.device))

    def __bool__(self):
        event = self.event
        if event is not None:
            event.synchronize()
            self.event = None
        return bool(self.flag)


def _begin_again(position_ids):
    return remembered(position_ids, "begin", lambda: _Answer((position_ids[:, 1:] == position_ids.min()).any()))


def _asks_early(preprocess, names):
    """transformers' function before each mask, which sees position_ids before the layers do. Here the GPU is asked.

    So the first layer finds the answer. If the layer asked itself, the host would wait until the GPU has nothing left
    to do.
    """
    parameters = list(inspect.signature(preprocess).parameters)

    @functools.wraps(preprocess)
    def preprocess_and_ask(*args, **kwargs):
        results = preprocess(*args, **kwargs)
        given = {**dict(zip(parameters, args)), **kwargs}
        positions = given.get("position_ids")
        if _can_ask(positions) and getattr(given.get("config"), "_attn_implementation", None) in names:
            _begin_again(positions)
        return results

    return preprocess_and_ask


def _notes_answer(find):
    """transformers' own look at positions, which waits for the GPU. None says that each position is one more than the
    one before, so none begins again. Then nobody asks a second time."""

    @functools.wraps(find)
    def find_and_note(position_ids):
        found = find(position_ids)
        if found is None and _can_ask(position_ids):
            remembered(position_ids, "begin", bool)
        return found

    return find_and_note


def _can_ask(positions):
    """Whether a GPU may be asked early, and about positions that may be packed sequences.

    Tensors of inference mode are looked at in each layer, because they do not tell whether they were changed.
    """
    return (
        type(positions) is torch.Tensor
        and not torch.compiler.is_compiling()
        and positions.is_cuda
        and not positions.is_inference()
        and positions.dim() == 2
        and len(positions) == 1 < positions.shape[1]
        and not torch.cuda.is_current_stream_capturing()
    )


# NOTE: a slice takes 2 us, as long as the rest of what happens here for a token. So nothing is cut to its own size.


def _first_keys(x, num_keys):
    return x if x is None or x.shape[1] == num_keys else x[:, :num_keys]


def _keys_of_bias(bias, num_keys):
    return bias if bias is None or bias.shape[-1] == num_keys else bias[..., :num_keys]


def _under_rule(q, k, v, mask, window, bias, options):
    """Padding ``[b, len_kv]`` with its rule, or no mask. Without a rule the window of the module is at the end."""
    b, len_q, *_ = q.shape
    len_kv = k.shape[1]
    rule, shift = _rule_at(mask), len_kv - len_q
    if mask is not None:
        if mask.is_floating_point():
            raise ValueError(f"an attention_mask (b, len_kv) must be bool or integers; it is {mask.dtype}")
        num_masks, num_keys = mask.shape
        if num_masks not in (1, b) or num_keys > len_kv:
            raise ValueError(
                f"attention_mask must have the shape (b, len_kv) = {(b, len_kv)}, or 1 in place of b; "
                f"it has the shape {tuple(mask.shape)}"
            )
        mask = mask if mask.dtype == torch.bool else mask != 0
        mask = mask if num_masks == b else mask.expand(b, -1)
        len_kv = num_keys
        shift = len_kv - len_q
    if rule is not None:  # it knows what is causal and its window; a module may know one if the mask has none
        shift = rule.shift
        window = _window_of(rule, window)
    elif mask is None and len_q == 1 and window[1] == 0:
        window = window[0], -1
    left, right = window
    if right >= 0:  # rows see no keys behind these
        len_kv = max(min(len_kv, len_q + shift + right), 0)
    left = -1 if left >= len_q - 1 + shift else left
    right = -1 if 0 < right >= len_kv - 1 - shift else right
    k, v, mask, bias = *(_first_keys(x, len_kv) for x in (k, v, mask)), _keys_of_bias(bias, len_kv)
    if rule is not None and rule.sequences is not None:
        if bias is None and shift == 0 and len_q == len_kv == rule.sequences.shape[1] and keys_of(mask).is_full:
            return _in_sequences(q, k, v, rule.sequences, (left, right), **options)
        ids = rule.sequences
        same = (ids[:, shift : shift + len_q, None] == ids[:, None, :len_kv]) & mask[:, None]
        return attend_under(q, k, v, (same & _sees(left, right, shift, q, k))[:, None], bias=bias, **options)
    beyond = len_kv - len_q - shift  # keys behind the one beside the last row
    if bias is None and (beyond == 0 or (left < 0 and right < 0)):
        return attend(q, k, v, mask, window=(left, right), **options)
    window = left if left < 0 else left + beyond, right if right < 0 else right - beyond
    mask = None if mask is None else mask[:, None, None]
    if min(*window) < -1 or (left >= 0 > window[0]) or (right >= 0 > window[1]):  # no window of the kernels
        seen = _sees(left, right, shift, q, k)[None, None]
        return attend_under(q, k, v, seen if mask is None else seen & mask, bias=bias, **options)
    if bias is None and (mask is None or keys_of(mask[:, 0, 0]).is_full):
        return attend(q, k, v, None, window=window, **options)
    return attend_under(q, k, v, mask, window=window, bias=bias, **options)


def _window_of(rule, window):
    """The window of a rule, or the module's if the rule has none or there is no rule. The rule says what is causal."""
    if rule is None:
        return window
    if rule.left < 0 and (window[0] >= 0 or window[1] > 0):
        rule = rule.and_also(Rule(window[0], window[1] or -1))
    return rule.left, rule.right


def _sees(left, right, shift, q, k):
    """``[len_q, len_kv]``: the window as a mask."""
    distance = torch.arange(k.shape[1], device=q.device) - torch.arange(q.shape[1], device=q.device)[:, None] - shift
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def _options_of(scale, softcap, dropout, sinks, window):
    options = {"softmax_scale": scale, "softcap": softcap, "dropout_p": dropout, "window_size": window}
    return options if sinks is None else {**options, "sinks": sinks}


def _in_sequences(q, k, v, sequences, window, scale, softcap, dropout, sinks, are_positions=False):
    """Packed sequences ``[b, len]``: the number of the sequence of each token, or its position in the sequence."""
    cu_seqlens, longest = _lengths_of(sequences, are_positions)
    lengths = cu_seqlens, cu_seqlens, longest, longest
    return _packed(q, k, v, lengths, window, scale, softcap, dropout, sinks)


def _lengths_of(sequences, are_positions):
    """cu_seqlens and the longest length."""

    def lengths():
        begins = torch.ones_like(sequences, dtype=torch.bool)
        begins[:, 1:] = sequences[:, 1:] == sequences.min() if are_positions else sequences.diff() != 0
        begins = begins.flatten().nonzero().flatten()
        cu_seqlens = torch.cat([begins, begins.new_tensor([sequences.numel()])]).int()
        return cu_seqlens, int(cu_seqlens.diff().max())

    return remembered(sequences, ("sequences", are_positions), lengths)


def _packed(q, k, v, lengths, window, scale, softcap, dropout, sinks):
    """``lengths``: cu_seqlens of rows and of keys, and the longest lengths, or None."""
    cu_seqlens = [x.to(torch.int32) for x in lengths[:2]]
    longest = [int(cu.diff().max()) if most is None else most for cu, most in zip(cu_seqlens, lengths[2:])]
    options = _options_of(scale, softcap, dropout, sinks, window)
    out = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *cu_seqlens, *longest, **options)
    return out.unflatten(0, q.shape[:2])


def _with_pages(q, k, v, lengths, window, scale, softcap, dropout, sinks):
    """One step of decoding of continuous batching: the new token of each sequence is appended to its pages."""
    q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v))
    num_keys = lengths["cu_seq_lens_k"].diff()[: len(q)]
    options = {"softmax_scale": scale, "window_size": window, "softcap": softcap}
    options.update(cache_seqlens=(num_keys - 1).to(torch.int32), block_table=lengths["block_table"])
    if sinks is not None:
        options["sinks"] = sinks
    return flash_attn_with_kvcache(q, lengths["k_cache"], lengths["v_cache"], k, v, **options).transpose(0, 1)


def _under_blocks(query, key, value, block_mask, bias, scale, softcap, dropout, sinks):
    def score_mod(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[b, h, i, j]

    changes = score_mod if softcap or bias is not None else None
    aux = None if sinks is None else AuxRequest(lse=True)
    out = flex_attention(
        query, key, value, changes, block_mask, scale, enable_gqa=True, return_aux=aux, dropout_p=dropout
    )
    if sinks is not None:
        out, aux = out
        share = torch.sigmoid(aux.lse - sinks.float()[:, None])
        out = out * share[..., None].to(out.dtype)
    return out.transpose(1, 2)


# ---- registration --------------------------------------------------------------------------------------------------

_active = None


def register(names: Optional[Sequence[str]] = None) -> _registration.Registration:
    """Makes ``attn_implementation="flash_attn"`` work on every device, by transformers' public registries.

    The registries have the attention of a layer and the mask of a forward pass. A hook of ``PreTrainedModel`` lets
    names pass that transformers would look up as packages for a GPU, or on its hub.

    Args:
        names: what models may be given as ``attn_implementation``: "flash_attn", "flash_attention_2",
            "flash_attention_3" and "flex_attention", of which any run here then. Default: all of them without a GPU,
            "flash_attn" with one.
    Returns:
        A Registration. Its text says what was changed. ``unregister()``, or the end of ``with register():``, undoes it.
    Raises:
        ImportError: transformers is missing or too old.
        ValueError: a name is none of the four.

    >>> with register() as changes:
    ...     print('attn_implementation="flash_attn"' in str(changes))
    True
    """
    global _active
    masking, modeling = _transformers()
    if names is None:
        names = (NAME,) if torch.cuda.is_available() else KNOWN
    unknown = [name for name in names if name not in KNOWN]
    if unknown or isinstance(names, str):
        raise ValueError(f"names must be some of {KNOWN}, as a list; {names!r} came")
    with _registration.lock:
        unregister()
        made = _registration.Registration("transformers")
        functions, masks = modeling.AttentionInterface._global_mapping, masking.AttentionMaskInterface._global_mapping
        for name in names:
            made.set(functions, name, attention, f'attn_implementation="{name}" runs on the kernels of flash_attn')
            made.set(masks, name, mask_for_flex if name == "flex_attention" else mask_for_flash)
        if NAME in names:
            made.set(functions, BY_DENSE_MASKS, attention)
            made.set(masks, BY_DENSE_MASKS, dense_mask)
        taken = {name for name in names if name != "flex_attention"}
        check = modeling.PreTrainedModel._check_and_adjust_attn_implementation

        @functools.wraps(check)
        def check_ours(self, attn_implementation, *args, **kwargs):
            if attn_implementation not in taken:
                return check(self, attn_implementation, *args, **kwargs)
            if _has_own_flash_attention(type(self)):
                instead = "sdpa" if self._supports_sdpa else "eager"
                raise ValueError(
                    f"{type(self).__name__} has a flash attention of its own, for GPUs only, in place of "
                    f'attn_implementation="{attn_implementation}": use "{instead}"'
                )
            if self._supports_flash_attn:
                return attn_implementation
            if attn_implementation == NAME and self._supports_sdpa:
                return BY_DENSE_MASKS
            instead = NAME if self._supports_sdpa else "eager"
            raise ValueError(
                f'transformers has no attn_implementation="{attn_implementation}" for {type(self).__name__}: '
                f'use "{instead}"'
            )

        sentence = "PreTrainedModel takes these names without a look for a package or a GPU"
        made.set(modeling.PreTrainedModel, check.__name__, check_ours, sentence)
        preprocess, find = (getattr(masking, name, None) for name in LOOK_AT_POSITIONS)
        if preprocess is not None and find is not None:
            sentence = "where masks are made, a GPU is asked whether position_ids begin again"
            made.set(masking, LOOK_AT_POSITIONS[0], _asks_early(preprocess, {*names, BY_DENSE_MASKS}), sentence)
            made.set(masking, LOOK_AT_POSITIONS[1], _notes_answer(find))
        _active = made
    return made


def unregister() -> None:
    """Undoes the last ``register()``, if there is one.

    >>> changes = register()
    >>> unregister()
    """
    global _active
    with _registration.lock:
        if _active is not None:
            _active.unregister()
        _active = None


def _has_own_flash_attention(model):
    """Whether a model calls transformers' functions for a GPU, not the registry, and they are not there.

    Models of this kind have classes such as ``FalconFlashAttention2`` for each implementation.
    """
    places = [vars(sys.modules[cls.__module__]) for cls in model.__mro__ if cls.__module__ in sys.modules]
    return any(
        "is_flash_attn_available" in names
        and "_flash_attention_forward" not in names
        and any(name.endswith("FlashAttention2") for name in names)
        for names in places
    )


def _transformers():
    try:
        import transformers.masking_utils as masking
        import transformers.modeling_utils as modeling
    except ImportError as error:
        raise ImportError(f"flash_attn.integrations.transformers needs transformers: {error}") from error
    needed = {
        masking: ("AttentionMaskInterface", "add_offsets_to_mask_function", "prepare_padding_mask", "sdpa_mask"),
        modeling: ("AttentionInterface", "PreTrainedModel"),
    }
    has_all = all(hasattr(place, name) for place, names in needed.items() for name in names)
    if (
        not has_all
        or "q_offset" not in inspect.signature(masking.sdpa_mask).parameters
        or not hasattr(modeling.PreTrainedModel, "_check_and_adjust_attn_implementation")
    ):
        import transformers

        raise ImportError(
            "flash_attn.integrations.transformers needs transformers whose mask functions take q_length and q_offset, "
            f"such as 5.23; {transformers.__version__} is installed"
        )
    return masking, modeling
