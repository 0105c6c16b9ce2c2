"""The ops ``flash_attn::flex_*``: programmable attention as PyTorch's tracers see it.

A mod is the text of its program in hexadecimal digits, with its tensors and numbers. Floats are tensors of no
dimension: a compiled graph would be made again for another float. ``graph.py`` calls the ops. Eager calls need no op,
unless something watches the ops (:func:`is_watched`).
"""

import collections
import struct

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from .._flops import FORMULAS_OF_FLEX
from .._flops import register as register_flops
from .._imagined import capability_of, is_imagined, is_on_cpu
from .._ops import (
    empty_like,
    forget_own_kernels,
    refuse_tangents,
    register_gradient,
    register_once,
    without_second_derivative,
)
from .._sinks import gradient_of_sinks
from . import calls
from .kept_walks import FEW_BYTES, KeptWalks, may_keep
from .patterns import keys_within
from .program import BOOL, F64
from .sequences import Sequences, key_length, shift_of

MOD = "str {0}, Tensor[] {0}_tensors, SymInt[] {0}_ints, Tensor[] {0}_floats"
SHARED = (
    f"float? scale, bool may_be_plain, {MOD.format('score')}, {MOD.format('mask')}, SymInt[] block_size, "
    "Tensor[] lists, Tensor?[] sequences, bool blocks_have_offset"
)
# What is beside sinks: see _sinks.py. The last result is their probability in each row. It is empty without sinks, and
# on a GPU.
SINKS = "Tensor? sinks{0}, Tensor? sink_shift{0}, Tensor? sink_ends{0}"
# rng_state holds the seed and the offset of dropout's generator. Without dropout there is none.
DROPOUT = "float dropout_p=0.0, Tensor? rng_state=None"
PARTIAL_AND_FULL = (0, 1, 4, 5)  # the lists of an attention among those of a block mask
SCHEMAS = {
    "flex_forward": f"(Tensor query, Tensor key, Tensor value, {SHARED}, bool wants_max, float[] plain=[], "
    f"{SINKS.format('=None')}, {DROPOUT}) -> (Tensor, Tensor, Tensor, Tensor)",
    "flex_backward": f"(Tensor query, Tensor key, Tensor value, {SHARED}, Tensor out, Tensor lse, Tensor dout, "
    "Tensor? dlse, bool[] wants, str derivative, int[] places, int[] wanted, bool deterministic, "
    f"float[] plain=[], {DROPOUT}) -> Tensor[]",
    "flex_attend": f"(Tensor query, Tensor key, Tensor value, {SHARED}, bool wants_max, {SINKS.format('')}, "
    f"str derivative, int[] places, int[] wanted, bool deterministic, {DROPOUT}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "flex_classify": f"(Tensor like, {MOD.format('mask')}, SymInt[] shape, SymInt[] block_size) -> Tensor[]",
}


Call = collections.namedtuple("Call", "scale score mask blocks plain sequences")


def _params(text):
    """The types of the parameters of a program."""
    _, captures, params, _ = struct.unpack_from("=4I", text)
    return struct.unpack_from(f"={params}I", text, 16 + 8 * captures)


def _bound(digits, tensors, ints, floats):
    """``(text, tensors, numbers)`` as the kernels take them, or None."""
    if not digits:
        return None
    text, ints, floats = bytes.fromhex(digits), iter(ints), iter(floats)
    read = {BOOL: lambda: bool(next(ints)), F64: lambda: float(next(floats).item())}
    return text, tuple(tensors), tuple(read.get(type, lambda: int(next(ints)))() for type in _params(text))


def _call(query, key, scale, may_be_plain, score, mask, block_size, lists, *sequences, given=(), wants_lists=False):
    """A call as ``attention.py`` describes it. Whether the plain kernels serve it is known now: numbers have values.

    ``given``: the window and softcap of plain kernels, if the caller knows already that they serve the call.
    ``wants_lists``: as in :func:`is_few`.
    """
    from . import attention, graph

    sequences = Sequences(*sequences[0], sequences[1]) if sequences[0] else None
    len_kv = key_length(key, sequences)
    score, mask = _bound(*score), _bound(*mask)
    programs = [None if x is None else graph.programs_of_text.get(x[0]) for x in (score, mask)]
    plain, blocks = (-1, -1, 0.0), None
    found = (int(given[0]), int(given[1]), given[2]) if given else None
    if (
        found is None
        and may_be_plain
        and all((x is None) == (program is None) for x, program in zip((score, mask), programs))
    ):
        pairs = [None if x is None else (program, x[1], x[2]) for x, program in zip((score, mask), programs)]
        if not lists or (sequences is None and mask and _lists_say(lists, mask, query.size(-2), len_kv, block_size)):
            found = attention.plain_of(*pairs, lambda: shift_of(query.size(-2), len_kv, *(sequences or ())[:2]))
    if found is not None:
        plain, score, mask = found, None, None
    elif lists:
        blocks = (*map(int, block_size), *lists, *[None] * (4 - len(lists)))
    elif mask is not None and (block_size or is_on_cpu(query)):
        block = tuple(map(int, block_size)) if block_size else BLOCK
        shape = *query.shape[:3], len_kv
        is_decoded = is_few(query, key, len_kv, wants_lists)
        blocks = blocks_of_mask(query.device, shape, mask, programs[1], sequences, block, is_decoded)
    scale = max(query.size(-1), 1) ** -0.5 if scale is None else scale
    return Call(scale, score, mask, blocks, plain, sequences)


BLOCK = (128, 128)
FEW_PAIRS = 1 << 25  # of all heads: a kernel reads the mask of so few sooner than it finds blocks
FEW_PAIRS_ON_CPU = 1 << 13
FEW_ROWS = 64

_kept_blocks = {}  # the oldest first
MOST_KEPT = 16
MOST_KEPT_BYTES = 16 << 20  # of the lists of a mask


def is_few_for_cpu(len_q, len_kv, h, h_kv, dtype):
    """Does the CPU's kernel for few rows take the queries? It needs no lists (csrc/cpu/partition.h, ``fa_decodes``)."""
    most_queries, most_rows = (8, 64) if h > h_kv else (16, 16)
    is_few = len_q <= most_queries and len_q * (h // max(h_kv, 1)) <= most_rows
    return is_few and (len_q <= 4 or len_kv > 128) and dtype != torch.float64


def is_few_for_gpu(len_q, len_kv, h, h_kv, dtype, d):
    """Does the GPU's kernel for few rows take the queries? (csrc/plan/gpu_decode.c, ``plan_decode``)."""
    is_long = len_q * (h // max(h_kv, 1)) <= FEW_ROWS and len_kv >= 256
    return is_long and dtype in (torch.float16, torch.bfloat16) and d % 8 == 0


def is_few(query, key, len_kv, wants_lists):
    """Does a kernel for few rows take the queries, if it gets no lists?

    ``wants_lists``: the call needs lists on a GPU. A backward walks over them, and the kernel for few rows keeps no
    maximum of scores, and takes values as wide as the keys.
    """
    what = query.shape[2], len_kv, query.shape[1], key.shape[1], query.dtype
    return is_few_for_cpu(*what) if is_on_cpu(query) else not wants_lists and is_few_for_gpu(*what, query.shape[3])


FEW_KEYS = 1 << 20  # of all query heads and sequences


def reads_most_keys(program, numbers, shape):
    """Should the GPU's kernel for few rows read all keys of a mask, rather than another kernel the blocks of its lists?

    On an H200 one row of 32 heads on 8 takes 14, 33 and 133 us for 4096, 16384 and 131072 keys in the first kernel.
    With lists it takes 61, 210 and 1650 us where they have most of the keys or a quarter, because few tiles leave SMs
    idle, and 62 to 65 us where they have the blocks of a window of 500. So lists pay if there are many keys, and the
    lists leave out nearly all. Comparisons of indices tell how many keys there can be at most. Behind an "or" that is
    often all of them, and a mask that sees the first keys and the last ones sees few of many. So there lists are made.
    """
    b, h, len_q, len_kv = shape
    if b * h * len_kv <= FEW_KEYS:
        return True
    if program is None or program.reads("bit_or"):
        return False
    first, end = keys_within(program, numbers, len_q, len_kv)
    return 16 * (end - first) > len_kv


MOST_BLOCKS = 1 << 22  # of the lists of a packed mask


def finds_blocks_of_packed(total_q, h, total_kv, max_seqlen_k, attn_mask):
    """Should a packed call on a GPU look for the blocks of its attn_mask, rather than take all of its sequences?

    Bounds tell that blocks of two sequences are empty. So the mask is evaluated for the pairs of one sequence, as in a
    dense call. But the lists have room for the blocks of all rows and keys.
    """
    if not isinstance(attn_mask, torch.Tensor) or type(max_seqlen_k) is not int:
        return False
    if total_q <= FEW_ROWS or h * total_q * max_seqlen_k < FEW_PAIRS:
        return False
    heads = attn_mask.shape[-3] if attn_mask.dim() > 2 else 1
    return heads * (total_q // BLOCK[0] + 1) * (total_kv // BLOCK[1] + 1) <= MOST_BLOCKS


def blocks_of_mask(device, shape, mask, program, sequences=None, block=BLOCK, is_decoded=False):
    """The blocks of a mask without lists, as the kernels take them. None: they do better without.

    The layers of a model have the same window, which reads no tensor. Its lists are kept for one stream. A CUDA graph
    makes lists of its own, because those that are kept may be forgotten. So does inductor's run before a graph. A
    tensor may change without PyTorch's knowledge, so the lists of a mask that reads one are found for each call. On a
    GPU that takes four launches, which a small call does without, unless the mask compares indices, too: a window
    leaves few blocks.

    Args:
        device, shape: of the queries, and ``(b, h, len_q, len_kv)``.
        mask, program: ``(text, tensors, numbers)``, and the object of the program or None.
        sequences: None or where the sequences lie. Beside a q_offset there are few rows, and a block of no more rows
            than there are can be full. On a GPU the kernels of a cache take no lists, and before Hopper the generic
            kernels, which take them, compute many rows.
        is_decoded: what :func:`is_few` says. The kernels for few rows take no lists.
    """
    b, h, len_q, len_kv = map(int, shape)
    q_offset = None if sequences is None else sequences.q_offset
    on_cpu = device.type == "cpu" and not is_imagined()
    if 0 in (b, h, len_q, len_kv) or (on_cpu and is_decoded):
        return None
    if q_offset is not None:
        block = min(block[0], len_q), block[1]
    if not on_cpu:
        if len_q <= block[0] and len_kv <= block[1]:
            return None
        if sequences is not None and (q_offset is not None or len_q <= FEW_ROWS or capability_of(device) == 90):
            return None
        compares = program is not None and (program.reads("lt") or program.reads("le"))
        is_small = len_q <= FEW_ROWS or b * h * len_q * len_kv < FEW_PAIRS
        if mask[1] and is_small and not compares:
            return None
        if is_decoded and reads_most_keys(program, mask[2], (b, h, len_q, len_kv)):
            return None
    b = b if program is None or program.reads("b") or q_offset is not None else 1
    h = h if program is None or program.reads("h") else 1
    num_blocks = b * h * -(-len_q // block[0]) * -(-len_kv // block[1])
    is_kept = not (mask[1] or q_offset is not None or is_imagined()) and 8 * num_blocks <= MOST_KEPT_BYTES
    if on_cpu and not is_kept and int(shape[0]) * int(shape[1]) * len_q * len_kv <= FEW_PAIRS_ON_CPU:
        return None
    if not (is_kept and (on_cpu or may_keep(device))):
        return *block, *find_lists(mask, device, (b, h, len_q, len_kv), block, q_offset)
    stream = None if on_cpu else torch._C._cuda_getCurrentRawStream(device.index)
    key = mask[0], _bits_of(mask[2]), b, h, len_q, len_kv, *block, device, stream
    found = _kept_blocks.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = (*block, *find_lists(mask, device, (b, h, len_q, len_kv), block))
        found = found if on_cpu else (*found, KeptWalks(FEW_BYTES))
        _keep(key, found)
    return found


def _keep(key, found):
    """Keeps lists, and forgets the oldest.

    NOTE: for a lock a signal's handler would wait for ever, or the child of a fork. Each step of a plain dict is done
    before another thread runs. What was kept is dropped behind all steps.
    """
    forgotten = [_kept_blocks.pop(key, None)]
    _kept_blocks[key] = found
    while len(_kept_blocks) > MOST_KEPT:
        try:
            forgotten.append(_kept_blocks.pop(next(iter(_kept_blocks)), None))
        except (StopIteration, RuntimeError):  # another thread has changed the dict since
            pass


def _bits_of(numbers):
    """Numbers as part of a key: 0.0 and -0.0 are not the same, and what a subclass calls equal is not asked."""
    return tuple(struct.pack("d", x) if isinstance(x, float) else int(x) for x in numbers) if numbers else ()


def find_lists(mask, device, shape, block, q_offset=None):
    """The lists of the partial and of the full blocks of rows: two numbers and places each, int32."""
    b, h, len_q, len_kv = shape
    rows, columns = -(-len_q // block[0]), -(-len_kv // block[1])
    sizes = (b, h, rows), (b, h, rows, columns)
    num, places, full_num, full_places = [torch.empty(x, dtype=torch.int32, device=device) for x in sizes * 2]
    calls.classify(*mask, (num, places, None, None, full_num, full_places, None, None), *shape, *block, q_offset)
    return num, places, full_num, full_places


def _lists_say(lists, mask, len_q, len_kv, block_size):
    """Did flex_classify or create_block_mask make the lists of this mask, and is nothing changed since?"""
    said = getattr(lists[0], "lists_of_mask", None)
    if said is None or len(lists) != 4:
        return False
    (text, numbers, *sizes), tensors = said
    now = [(x, None if x.is_inference() else x._version) for x in lists[1:]]
    return (
        (text, numbers) == (mask[0], mask[2])
        and not mask[1]
        and sizes == [len_q, len_kv, *map(int, block_size)]
        and all(a[0] is b[0] and a[1] == b[1] and a[1] is not None for a, b in zip(tensors[1:], now))
        and tensors[0][1] == lists[0]._version
    )


def note_lists(lists, mask, len_q, len_kv, block_size):
    """Notes at the first list of a mask without captures what :func:`_lists_say` asks."""
    if not mask[1] and not any(x.is_inference() for x in lists):
        tensors = [(None, lists[0]._version), *((x, x._version) for x in lists[1:])]
        lists[0].lists_of_mask = ((mask[0], mask[2], len_q, len_kv, *map(int, block_size)), tensors)


def _refuse_tangents(*tensors):
    if forward_ad._current_level >= 0:
        refuse_tangents(tensors)


def _forward(query, key, value, scale, may_be_plain, *rest):
    from . import attention

    score, mask, blocks = rest[:4], rest[4:8], rest[8:12]
    wants_max, plain, *sinks, dropout_p, rng_state = _with_defaults(rest[12:])
    _refuse_tangents(query, key, value, *score[1], *mask[1], sinks[0])
    wants_lists = wants_max or value.size(-1) != query.size(-1)
    call = _call(query, key, scale, may_be_plain, score, mask, *blocks, given=plain, wants_lists=wants_lists)
    out, lse, max_scores, probability = _results_of_forward(query, value, wants_max, sinks[0])
    of_rows = None if sinks[0] is None else (*sinks, probability if is_on_cpu(query) else None)
    calls.forward(
        *map(attention.rows_of, (query, key, value)), out, lse, max_scores if wants_max else None,
        call.scale, call.plain, call.score, call.mask, call.blocks, call.sequences, of_rows,
        _dropout_of(dropout_p, rng_state),
    )  # fmt: skip
    return out, lse, max_scores, probability


def _dropout_of(dropout_p, rng_state):
    return (dropout_p, rng_state) if dropout_p else None


def _with_defaults(given):
    """The last arguments of flex_forward. The dispatcher leaves out those that have their defaults."""
    return *given, *(None, (), None, None, None, 0.0, None)[len(given) :]


def _forward_fake(query, key, value, scale, may_be_plain, *rest):
    wants_max, _, sinks, *_ = _with_defaults(rest[12:])
    return _results_of_forward(query, value, wants_max, sinks)


def _results_of_forward(query, value, wants_max, sinks):
    from . import attention

    out, lse = attention.empty_out(query, value.size(-1)), query.new_empty(query.shape[:3], dtype=torch.float32)
    has_probability = sinks is not None and is_on_cpu(query)
    wanted = wants_max, has_probability
    return out, lse, *(torch.empty_like(lse) if x else query.new_empty(0, dtype=torch.float32) for x in wanted)


def _results_of_backward(query, key, value, wants, tensors, wanted):
    from .attention import sum_dtype

    gradients = [empty_like(x) if want else None for x, want in zip((query, key, value), wants)]
    return gradients, [query.new_zeros(tensors[i].shape, dtype=sum_dtype(tensors[i])) for i in wanted]


def _backward(query, key, value, scale, may_be_plain, *rest):
    from . import attention

    score, mask, blocks = rest[:4], rest[4:8], rest[8:12]
    out, lse, dout, dlse, wants, derivative, places, wanted, deterministic, *others = rest[12:]
    given, *dropout = *others, *((), 0.0, None)[len(others) :]
    _refuse_tangents(query, key, value, *score[1], *mask[1], dout, dlse)
    is_plain = may_be_plain and dlse is None
    call = _call(query, key, scale, is_plain, score, mask, *blocks, given=given, wants_lists=True)
    gradients, sums = _results_of_backward(query, key, value, wants, score[1], wanted)
    at, found = dict(zip(wanted, sums)), None
    if call.score is not None:
        found = (bytes.fromhex(derivative), tuple(score[1][i] for i in places), call.score[2])
    query, key, value, dout = map(attention.rows_of, (query, key, value, dout))
    calls.backward(
        query, key, value, out, lse, dout, None if dlse is None else attention.rows_of(dlse), *gradients,
        torch.empty_like(lse), call.scale, call.plain, call.score, call.mask, call.blocks, found,
        None if found is None else tuple(at.get(i) for i in places),
        deterministic or torch.are_deterministic_algorithms_enabled(), call.sequences, _dropout_of(*dropout),
    )  # fmt: skip
    return [x for x in gradients if x is not None] + sums


def _backward_fake(query, key, value, scale, may_be_plain, *rest):
    wants, _, _, wanted = rest[16:20]
    gradients, sums = _results_of_backward(query, key, value, wants, rest[1], wanted)
    return [x for x in gradients if x is not None] + sums


# ---- exported programs -----------------------------------------------------------------------------------------------
# torch.export drops the backward of an autograd.Function. So an exported program has flex_attend, which has gradients
# of its own. It brings the text of the score_mod's derivative, because whoever loads the program may not know the mod.


def _attend(query, key, value, scale, may_be_plain, *rest):
    return _forward(query, key, value, scale, may_be_plain, *rest[:13], (), *rest[13:16], *rest[20:])


def _attend_fake(query, key, value, scale, may_be_plain, *rest):
    return _results_of_forward(query, value, *rest[12:14])


def _is_list_of_tensors(x):
    return isinstance(x, (list, tuple)) and all(isinstance(element, torch.Tensor) for element in x)


def _save(ctx, inputs, output):
    """The tensors of inputs and output are saved, so that torch checks for changes. ``ctx.rest`` has all else."""
    out, lse, max_scores, probability = output
    Sequences(*(inputs[15] or (None, None, None)), inputs[16]).refuse_gradients()
    leaves, ctx.spec = tree_flatten((list(inputs), [out, lse, probability]))
    ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in leaves))
    ctx.rest = [None if isinstance(x, torch.Tensor) else x for x in leaves]
    ctx.mark_non_differentiable(max_scores, probability)
    ctx.set_materialize_grads(False)


def gradients(inputs, results, dout, dlse, wants, sinks, derivative, places, wanted, deterministic, *dropout):
    """``(of query, key and value; of the wanted tensors of the score_mod by their number; of sinks)``.

    ``inputs``: the arguments that all ops share. ``results``: out, lse and the probability of sinks. ``wants``: are
    there gradients of query, key, value and sinks? ``sinks``: ``(sinks, shift, cu_seqlens_q)``, which may be None each.
    ``dropout``: nothing, or its probability and rng_state.
    """
    (out, lse, probability), (sinks, shift, ends) = results, sinks
    *wants, wants_sinks = wants
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = None if dlse is None else dlse.float()
    found = iter(
        torch.ops.flash_attn.flex_backward(
            *inputs, out, lse, dout, dlse, wants, derivative, places, wanted, deterministic, (), *dropout
        )
    )
    of_inputs = [next(found) if want else None for want in wants]
    of_tensors = {i: next(found).to(inputs[6][i].dtype) for i in wanted}
    if not wants_sinks:
        return of_inputs, of_tensors, None
    out, dout = out.transpose(1, 2), dout.transpose(1, 2)
    of_sinks = gradient_of_sinks(sinks, out, lse, dout, dlse, None, shift, ends, probability)
    return of_inputs, of_tensors, of_sinks


def _gradients_of_attend(ctx, dout, dlse, *unused):
    saved = ctx.saved_tensors
    with torch.no_grad():
        leaves = [x if tensor is None else tensor for x, tensor in zip(ctx.rest, saved)]
        inputs, results = tree_unflatten(leaves, ctx.spec)
        if inputs[5] and not inputs[21]:
            raise RuntimeError("flash_attn::flex_attend has no gradient, because it has a score_mod without derivative")
        wants, found = [ctx.needs_input_grad[i] for i in (0, 1, 2, 18)], [None] * len(inputs)
        found[:3], of_tensors, found[18] = gradients(
            inputs[:17], results, dout, dlse, wants, inputs[18:21], *inputs[21:]
        )
        for i, x in enumerate(inputs):
            if _is_list_of_tensors(x):
                found[i] = [of_tensors.get(at) if i == 6 else None for at in range(len(x))]
    found = found[: len(ctx.needs_input_grad)]  # of the arguments that were given; inputs has the defaults, too
    flat, spec = tree_flatten(found, is_leaf=lambda x: x is None)
    return tuple(tree_unflatten(list(without_second_derivative(flat, dout, dlse, *saved)), spec))


# ---- eager calls that something watches ------------------------------------------------------------------------------


_watchers = torch._C._len_torch_dispatch_stack, torch.autograd._profiler_enabled, torch._C._is_tracing


def is_watched(*tensors):
    """Must PyTorch see the ops of an eager call? Or has a tensor no memory, because it is fake or on device meta?"""
    modes, profiler, tracing = _watchers
    if modes() or profiler() or tracing():
        return True
    for x in tensors:
        if x.is_meta or (type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter):
            return True
    return False


def _mod_of_op(mod):
    """The arguments of the ops for ``(text, tensors, numbers)`` or None: the inverse of :func:`_bound`."""
    if mod is None:
        return "", [], [], []
    text, tensors, numbers = mod
    pairs = list(zip(_params(text), numbers))
    floats = [torch.scalar_tensor(x, dtype=torch.float64, device="cpu") for type, x in pairs if type == F64]
    return text.hex(), list(tensors), [int(x) for type, x in pairs if type != F64], floats


def classify(device, program, tensors, numbers, shape, block_size):
    """The lists of the blocks of a mask, by the op."""
    like = tensors[0] if tensors else torch.empty(0, device=device)
    return torch.ops.flash_attn.flex_classify(like, *_mod_of_op((program.text, tensors, numbers)), shape, block_size)


def _shared_of(call, tensors):
    """The arguments that both ops share."""
    blocks = () if call.blocks is None else call.blocks
    lists = [x for x in blocks[2:6] if x is not None]
    sequences = ([], False) if call.sequences is None else (list(call.sequences[:3]), call.sequences.blocks_have_offset)
    mods = *_mod_of_op(call.score_with(tensors)), *_mod_of_op(call.mask)
    return call.scale, False, *mods, list(blocks[:2]), lists, *sequences


def _plain_of(call):
    is_plain = call.score is None and call.mask is None and call.blocks is None
    return [float(x) for x in call.plain] if is_plain else []


def forward(call, query, key, value, tensors, sinks=None):
    """``attention.attend`` by the op."""
    if torch._C._is_tracing():
        raise NotImplementedError(
            "torch.jit.trace cannot record attention with mods, attn_bias or attn_mask: use torch.export"
        )
    out, lse, max_scores, probability = torch.ops.flash_attn.flex_forward(
        query, key, value, *_shared_of(call, tensors), call.wants_max, _plain_of(call), *(sinks or (None, None, None)),
        *(call.dropout or ()),
    )  # fmt: skip
    return out, lse, max_scores if call.wants_max else None, probability if sinks else None


def backward(call, inputs, tensors, out, lse, dout, dlse, wants, wanted, derivative, deterministic):
    """The gradients of query, key and value, or None, and the sums of the wanted tensors of the score_mod, by the op.

    ``derivative``: the text of the derivative's program, and its places.
    """
    text, places = derivative
    found = torch.ops.flash_attn.flex_backward(
        *inputs, *_shared_of(call, tensors), out, lse, dout, dlse, list(wants), text.hex(), list(places), list(wanted),
        deterministic, _plain_of(call), *(call.dropout or ()),
    )  # fmt: skip
    found = iter(found)
    return [next(found) if want else None for want in wants], list(found)


def _empty_lists(like, shape, block_size):
    b, h, len_q, len_kv = shape
    rows, columns = -(-len_q // block_size[0]), -(-len_kv // block_size[1])
    shapes = [(b, h, rows), (b, h, rows, columns), (b, h, columns), (b, h, columns, rows)]
    return [like.new_empty(size, dtype=torch.int32) for size in shapes * 2]


def _classify(like, text, tensors, ints, floats, shape, block_size):
    mask, lists = _bound(text, tensors, ints, floats), _empty_lists(like, shape, block_size)
    calls.classify(*mask, tuple(lists), *shape, *block_size, None)
    note_lists([lists[i] for i in PARTIAL_AND_FULL], mask, *shape[2:], block_size)
    return lists


def _register():
    library = torch.library.Library("flash_attn", "FRAGMENT")
    kernels = {
        "flex_forward": (_forward, _forward_fake),
        "flex_attend": (_attend, _attend_fake),
        "flex_backward": (_backward, _backward_fake),
        "flex_classify": (_classify, lambda like, *rest: _empty_lists(like, *rest[-2:])),
    }
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        for key in ("CPU", "CUDA"):
            library.impl(name, kernels[name][0], key)
        if name != "flex_attend":
            library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"flash_attn::{name}", kernels[name][1], lib=library)
    register_gradient("flash_attn::flex_attend", _gradients_of_attend, _save)
    forget_own_kernels(SCHEMAS, ("CPU", "CUDA", "Autograd", "Meta"))
    torch.ops.flash_attn._flex_library = library  # keeps the library alive, because its kernels disappear with it


register_once("ops of flex_attention", _register)
register_once("formulas for FLOPs of flex_attention", register_flops, FORMULAS_OF_FLEX)
