"""The short way of a plain eager call with the options of ``_extended.py``.

C checks the arguments, as the plain ops do, and computes the call with programs that are kept for each kind of call
(csrc/torch/option_mods.h). A *kind* says which options there are and which dimensions their tensors have. C asks once
for the programs of a kind. Whatever the short way cannot serve returns None, and the long way of ``_extended.py``
computes it or says what is wrong.
"""

import functools
import weakref

import flash_attn_2_cuda
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flash_attn import _extended
from flash_attn._dispatch import transforms_are_active
from flash_attn._ops import is_freed
from flash_attn._remembered import remembered
from flash_attn._sinks import without_rows_behind
from flash_attn.flex import attention as flex
from flash_attn.flex import ops
from flash_attn.flex import options as mods
from flash_attn.flex.graph import rng_state_of
from flash_attn.flex.kept_walks import FEW_BYTES, KeptWalks
from flash_attn.flex.tracer import program_of

# What programs read, as C numbers it: tensors, then numbers.
NUM_PLACES = 6  # of the rows of packed sequences
BIAS, MASK, SLOPES, SHIFT, FIRST = range(5)
LEN_SHIFT, LEFT, RIGHT, CAP, NUM_VALUES = range(FIRST + NUM_PLACES, FIRST + NUM_PLACES + 5)
NAMES = {BIAS: "attn_bias", MASK: "attn_mask", SLOPES: "alibi_slopes"}
STAND_INS = {7919: LEN_SHIFT, 104729: LEFT, 1299709: RIGHT, 12.75: CAP}  # numbers that no option has by itself

FEW = 128  # so many queries and keys are one block, which needs no list


def _is_one_block(len_q, len_kv):
    return len_q <= FEW and len_kv <= FEW


# ---- programs of each kind -----------------------------------------------------------------------------------------


class _Bindable:
    """A program, and which of the values its tensors and numbers are. Numbers that are no values are in ``fixed``."""

    def __init__(self, mod, score_dtype, stand_ins):
        self.program, tensors, numbers = program_of(mod, score_dtype)
        at = {x.data_ptr(): i for i, x in stand_ins.items()}
        self.tensors = [at[x.data_ptr()] for x in tensors]
        self.names = [NAMES.get(i) for i in self.tensors]
        self.text = self.program.text
        self.fixed = [x for x in numbers if x not in STAND_INS]
        places = iter(range(NUM_VALUES, NUM_VALUES + len(self.fixed)))
        self.numbers = [STAND_INS[x] if x in STAND_INS else next(places) for x in numbers]

    def for_c(self):
        return self.text, tuple(self.tensors), tuple(self.numbers), tuple(self.fixed)

    def bound(self, values):
        """The program itself in place of its text."""
        return self.program, *values[1:]


def _stand_in(dims, dtype):
    """A tensor with memory of its own, of size 1 where a dimension is not read."""
    return torch.zeros([2 if is_read else 1 for is_read in dims], dtype=dtype, device="cpu")


@functools.cache
def _mods_of_kind(score_dtype, is_packed, has_cap, slopes, bias, shift, mask, has_left, has_right):
    """The score_mod and the mask_mod of a kind, or None in their place, and which places they read, as bits.

    None: there are no such programs. slopes, bias, shift, mask: the dimensions that tensors have, or None. Those of
    bias and shift come with a dtype.
    """
    x = {}
    if bias is not None:
        x[BIAS] = _stand_in(*bias)
    if mask is not None:
        x[MASK] = _stand_in(mask, torch.bool)
    if slopes is not None:
        x[SLOPES] = _stand_in(slopes, torch.float32)
    if shift is not None:
        x[SHIFT] = _stand_in(*shift)
    values = {index: number for number, index in STAND_INS.items()}
    if is_packed:
        x.update({FIRST + i: _stand_in((True,), torch.int64) for i in range(NUM_PLACES)})
        places = mods.PackedPlaces.at(*[x[FIRST + i] for i in range(NUM_PLACES)])
    else:
        window = values[LEFT] if has_left else -1, values[RIGHT] if has_right else -1
        places = mods.Places(1, 1 + values[LEN_SHIFT], window)
    shape, cap = (2,) * 4, values[CAP] if has_cap else 0.0
    score_mod = mods.score_mod_of(places, shape, cap, x.get(SLOPES), x.get(BIAS), x.get(SHIFT))
    mask_mod = mods.mask_mod_of(places, shape, x.get(MASK))
    try:
        score = None if score_mod is None else _Bindable(score_mod, score_dtype, x)
        mask = None if mask_mod is None else _Bindable(mask_mod, None, x)
    except LookupError:  # a program has a tensor that is none of the call's
        return None
    read = {i - FIRST for each in (score, mask) if each is not None for i in each.tensors if i >= FIRST}
    return score, mask, sum(1 << i for i in read)


def _programs_of(kind):
    """What C keeps of a kind, and the objects of its programs. csrc/torch/option_mods.c sets the bits of the number."""

    def bits(num):
        nonlocal kind
        found = tuple(bool(kind >> i & 1) for i in range(num))
        kind >>= num
        return found

    (is_fp64, is_packed, has_cap, are_of_batches), (has_slopes, *slopes) = bits(4), bits(3)
    (has_bias, *bias), dtype, (has_mask, *mask), (has_left, has_right) = bits(5), bits(2), bits(5), bits(2)
    (has_shift, *shift), (shift_is_fp64,) = bits(4), bits(1)
    found = _mods_of_kind(
        torch.float64 if is_fp64 else torch.float32, is_packed, has_cap,
        (tuple(slopes) if are_of_batches else (slopes[1],)) if has_slopes else None,
        (tuple(bias), BIAS_DTYPES[dtype]) if has_bias else None,
        (tuple(shift), torch.float64 if shift_is_fp64 else torch.float32) if has_shift else None,
        tuple(mask) if has_mask else None, has_left, has_right,
    )  # fmt: skip
    if found is None:
        return None
    *programs, places = found
    return *(None if x is None else x.for_c() for x in programs), places, *programs


BIAS_DTYPES = {
    (False, False): torch.float16,
    (True, False): torch.bfloat16,
    (False, True): torch.float32,
    (True, True): torch.float64,
}


def _fit_sums(cu_seqlens, q):
    """Are these running sums that torch's functions can read beside q? The kernels check more."""
    return (
        cu_seqlens.device == q.device
        and cu_seqlens.dtype == torch.int32
        and cu_seqlens.dim() == 1
        and cu_seqlens.is_contiguous()
        and len(cu_seqlens) > 1
        and not is_freed(cu_seqlens)
    )


# ---- blocks of masks -----------------------------------------------------------------------------------------------


def _blocks(device, attn_mask, shape, window, is_packed, is_decoded, programs, mask):
    """The lists of blocks, or None. C calls this function, with what ``_programs_of`` returned and the mask."""

    def find():
        return ops.blocks_of_mask(device, shape, mask, programs[4].program, is_decoded=is_decoded)

    if attn_mask is not None and not is_packed and device.type == "cpu":
        return remembered(attn_mask, (shape, window), find)
    return find()


# What is kept on a GPU belongs to one stream. A CUDA graph gets tensors of its own, because those that are kept may be
# forgotten. Tensors of inference mode do not tell whether they were changed, and the host must not wait to compare
# them.


def _is_captured(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream_of(device):
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def _kept_on_gpu(tensor, what, make):
    """``make()``, kept for the next layer (:func:`remembered`)."""
    if tensor.is_inference() or _is_captured(tensor.device):
        return make()
    return remembered(tensor, (what, _stream_of(tensor.device)), make)


def _with_walks(blocks, is_exact):
    """Lists that the kernels find as they are in the next call, too. An attn_mask may change uncounted."""
    return (*blocks, KeptWalks(FEW_BYTES)) if is_exact and blocks else blocks


# NOTE: torch.no_grad as a decorator of an inner function takes 10 us whenever the inner function is made.


def _dense_on_gpu(len_q, len_kv, window, device):
    """The lists of the blocks of a window, or None."""
    if not (len_q and len_kv) or _is_one_block(len_q, len_kv):
        return None
    what = len_q, len_kv, window, device
    return _blocks_of_dense(*what) if _is_captured(device) else _kept_blocks_of_dense(*what, _stream_of(device))


@torch.inference_mode(False)
def _blocks_of_dense(len_q, len_kv, window, device):
    return mods.blocks_of(mods.Places(len_q, len_kv, window), len_q, len_kv, device, True)


@functools.lru_cache(maxsize=16)
def _kept_blocks_of_dense(len_q, len_kv, window, device, stream):
    return _with_walks(_blocks_of_dense(len_q, len_kv, window, device), True)


def _packed_on_gpu(cu_seqlens_q, cu_seqlens_k, *what):
    """The places of packed sequences, and the lists of their blocks. what: total_q, total_kv, window, is_exact.

    is_exact None: no lists.
    """
    same = cu_seqlens_k if cu_seqlens_k is cu_seqlens_q else _kept_on_gpu(cu_seqlens_k, "sums", object)
    keys = "both" if same is cu_seqlens_q else same  # the same object as long as nobody changes these sums
    make = functools.partial(_places_of_packed, cu_seqlens_q, cu_seqlens_k, *what)
    return _kept_on_gpu(cu_seqlens_q, (keys, *what), make)


@torch.inference_mode(False)
@torch.no_grad()
def _places_of_packed(cu_seqlens_q, cu_seqlens_k, total_q, total_kv, window, is_exact):
    places = mods.PackedPlaces(cu_seqlens_q, cu_seqlens_k, total_q, total_kv, window)
    device = cu_seqlens_q.device
    has_lists = is_exact is not None and not _is_one_block(total_q, total_kv) and total_q and total_kv
    lists = mods.blocks_of(places, total_q, total_kv, device, is_exact) if has_lists else None
    return places.tensors, _with_walks(lists, is_exact)


class _LastPacked:
    """What was found for the packed call before, if the next layer brings the same two tensors, unchanged."""

    def __init__(self):
        self._kept = None  # one tuple, so that threads see all of it or nothing

    @staticmethod
    def _state(cu_seqlens_q, cu_seqlens_k):
        """It changes with every write that PyTorch counts, and with other memory behind a tensor."""
        stream = torch._C._cuda_getCurrentRawStream(cu_seqlens_q.get_device()) if cu_seqlens_q.is_cuda else None
        if cu_seqlens_k is cu_seqlens_q:
            return cu_seqlens_q._version, cu_seqlens_q.data_ptr(), cu_seqlens_q.shape, stream
        return (
            *(cu_seqlens_q._version, cu_seqlens_q.data_ptr(), cu_seqlens_q.shape, stream),
            *(cu_seqlens_k._version, cu_seqlens_k.data_ptr(), cu_seqlens_k.shape),
        )

    def find(self, cu_seqlens_q, cu_seqlens_k, what):
        if self._kept is None:
            return None
        ref_q, ref_k, of_call, state, found = self._kept
        if ref_q() is not cu_seqlens_q or ref_k() is not cu_seqlens_k or of_call != what:
            return None
        if cu_seqlens_q.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        return found if state == self._state(cu_seqlens_q, cu_seqlens_k) else None

    def keep(self, cu_seqlens_q, cu_seqlens_k, what, found):
        if not (cu_seqlens_q.is_inference() or cu_seqlens_k.is_inference() or _is_captured(cu_seqlens_q.device)):
            refs = weakref.ref(cu_seqlens_q), weakref.ref(cu_seqlens_k)
            self._kept = *refs, what, self._state(cu_seqlens_q, cu_seqlens_k), found


_last_packed = _LastPacked()


# ---- calls ---------------------------------------------------------------------------------------------------------


def _device_type(q):
    return "cpu" if q.is_cpu else "cuda" if q.is_cuda else None


def _are_watched():
    """Do transforms or modes look at torch's functions? C asks this, too, before it computes."""
    return transforms_are_active() or forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack()


def _places_on_gpu(q, k, lengths, window, is_exact):
    """The places of packed rows and the lists of their blocks, or None if the running sums do not fit."""
    cu_seqlens_q, cu_seqlens_k = lengths[:2]
    if _are_watched():
        return None
    what = q.size(0), k.size(0), window, is_exact  # len() of a tensor takes twice as long
    found = _last_packed.find(cu_seqlens_q, cu_seqlens_k, (*what, q.get_device()))
    if found is not None:
        return found
    if not type(cu_seqlens_q) is type(cu_seqlens_k) is Tensor or not _fit_sums(cu_seqlens_q, q):
        return None
    if cu_seqlens_k is not cu_seqlens_q and not (_fit_sums(cu_seqlens_k, q) and len(cu_seqlens_q) == len(cu_seqlens_k)):
        return None
    found = _packed_on_gpu(cu_seqlens_q, cu_seqlens_k, *what)
    _last_packed.keep(cu_seqlens_q, cu_seqlens_k, (*what, q.get_device()), found)
    return found


def _shift_of_doubles(q, k, lengths, attn_bias, sinks, places, window):
    """The shift of a bias in fp64, which no kernel of a GPU makes, and its values in fp32. None: something is wrong."""
    dense = len(q), q.shape[-2], q.shape[1], k.shape[1]
    shape = (len(lengths[0]) - 1, q.shape[-2], *lengths[2:]) if lengths else dense
    sizes = attn_bias.shape
    if _are_watched() or len(sizes) > 4 or any(n not in (1, want) for n, want in zip(sizes[::-1], shape[::-1])):
        return None
    if attn_bias.device != q.device or is_freed(attn_bias) or not (sinks is None or _extended.fit_sinks(sinks, q)):
        return None
    of = mods.PackedPlaces.at(*places) if lengths else mods.Places(*dense[2:], window)
    shift = mods.shift_of_rows(of, attn_bias, sinks, torch.float64)
    return None if shift is None else (shift, shift.float())


def attend(
    q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, block_table, attn_bias, attn_mask, sinks, return_lse, return_max_logits,
):  # fmt: skip
    """``_extended.attend``, or None. The arguments may be anything.

    k and v are None if they lie in the tensor before, as ``_calls._in_one`` says.
    """
    if not (type(q) is Tensor and return_attn_probs is False):
        return None
    if not type(k) is type(v) is Tensor and not (v is None and (k is None or type(k) is Tensor)):
        return None
    keys = q if k is None else k
    if type(return_lse) is not bool or type(return_max_logits) is not bool or type(softcap) not in (float, int):
        return None
    for x in (attn_bias, sinks, alibi_slopes):
        if x is not None and type(x) is not Tensor and type(x) is not Parameter:
            return None
    is_recorded = torch.is_grad_enabled() and (
        q.requires_grad
        or keys.requires_grad
        or (v is not None and v.requires_grad)
        or (sinks is not None and sinks.requires_grad)
        or (attn_bias is not None and attn_bias.requires_grad)
    )
    if is_recorded and v is None:
        return None
    has_dropout = type(dropout_p) not in (float, int) or dropout_p != 0
    if has_dropout and not (type(dropout_p) is float and 0 < dropout_p < 1):
        return None
    options = 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, False
    if attn_bias is attn_mask is None and not return_max_logits and not (return_lse and (is_recorded or has_dropout)):
        return None if has_dropout else _plain(q, k, v, lengths, options, block_table, sinks, return_lse, is_recorded)
    device, is_packed = _device_type(q), len(lengths) > 0
    num_dims, on_cpu = 3 if is_packed else 4, device == "cpu"
    if device is None or block_table is not None:
        return None
    if q.dim() != num_dims + (k is None) or keys.dim() != num_dims + (v is None):
        return None
    if type(causal) is not bool or type(window_size) is not tuple or len(window_size) != 2:
        return None
    if not type(window_size[0]) is type(window_size[1]) is int:
        return None
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        return None
    window = window_size[0], 0 if causal else window_size[1]
    if window[1] >= 0 and not is_packed and q.shape[1] == 1:  # the only query sees up to the last key
        causal, window_size = False, (window[0], -1)
        window = window_size
        options = 0.0, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, False
    places = blocks = None
    if on_cpu:
        (b, len_q), len_kv = q.shape[:2], keys.shape[1]
        shape = (1, q.shape[-2], b, keys.shape[0]) if is_packed else (b, q.shape[-2], len_q, len_kv)
        is_decoded = not (return_max_logits or has_dropout)
        is_decoded = is_decoded and ops.is_few_for_cpu(*shape[2:], shape[1], keys.shape[-2], q.dtype)
        if not (_is_one_block(*shape[2:]) or 0 in shape or is_decoded):
            blocks = functools.partial(_blocks, q.device, attn_mask, shape, (causal, *window_size), is_packed, False)
    elif is_packed:
        finds_blocks = ops.finds_blocks_of_packed(q.shape[0], q.shape[-2], keys.shape[0], lengths[3], attn_mask)
        found = _places_on_gpu(q, keys, lengths, window, None if finds_blocks else attn_mask is None)
        if found is None:
            return None
        places, blocks = found
        if finds_blocks:
            shape = 1, q.shape[-2], q.shape[0], keys.shape[0]
            blocks = functools.partial(_blocks, q.device, attn_mask, shape, None, True, False)
    elif attn_mask is not None:
        shape = q.shape[0], q.shape[-2], q.shape[1], keys.shape[1]
        few = ops.is_few_for_gpu(*shape[2:], shape[1], keys.shape[-2], q.dtype, q.shape[-1])
        is_decoded = few and not (is_recorded or return_max_logits or has_dropout)
        blocks = functools.partial(_blocks, q.device, attn_mask, shape, None, False, is_decoded)
    elif window != (-1, -1):
        if _are_watched():
            return None
        blocks = _dense_on_gpu(q.shape[1], keys.shape[1], window, q.device)
    record = [] if is_recorded or return_lse else None
    shift = None
    if attn_bias is not None and attn_bias.dtype == torch.float64 and not on_cpu:
        shift = _shift_of_doubles(q, keys, lengths, attn_bias, sinks, places, window)
        if shift is None:
            return None
    wants_probability = is_recorded and sinks is not None and sinks.requires_grad
    drawn = []

    def draw():  # once C takes the call, because the long way would draw again
        drawn.append(rng_state_of(dropout_p, q.device))
        return drawn[0]

    dropout = (dropout_p, draw) if has_dropout else None
    further = (
        _programs_of, attn_bias, attn_mask, sinks, places, blocks, return_max_logits, on_cpu, mods.LEAST_BIAS, shift,
        record, wants_probability, dropout,
    )  # fmt: skip
    if is_packed:
        results = flash_attn_2_cuda.direct_varlen_mods(q, k, v, *lengths, *options, None, *further)
    else:
        results = flash_attn_2_cuda.direct_mods(q, k, v, *options, *further)
    if results is None or record is None:
        return results
    out, lse, *rest = results
    probability = rest.pop(0) if len(rest) > return_max_logits else None  # a GPU has none
    (*_, score_of, mask_of), score, mask, blocks, of_rows = record
    if is_recorded:
        score = None if score_of is None else score_of.bound(score)
        mask = None if mask_of is None else mask_of.bound(mask)
        call = flex.Call(
            softmax_scale, score, mask, blocks, return_max_logits, dropout=(dropout_p, *drawn) if drawn else None
        )
        names = [] if score_of is None else [*score_of.names]
        names += [None] * (0 if blocks is None else len(flex.LISTS)) + ([] if mask_of is None else mask_of.names)
        way = _extended.Mods(call, is_packed, deterministic, names, of_rows, lengths[0] if is_packed else None)
        tensors = score[1] if score else ()
        out, lse = _extended.record(way, (out, lse, way.saved(sinks), probability), sinks, q, k, v, *tensors)
    results = [out]
    if return_lse:
        lse = lse if of_rows is None else lse + (of_rows.squeeze(0) if is_packed else of_rows)
        has_rows_behind = is_packed and sinks is not None and not on_cpu  # the CPU knows them
        results.append(without_rows_behind(lse, lengths[0]) if has_rows_behind else lse)
    return tuple(results + rest) if return_lse or rest else out


def _plain(q, k, v, lengths, options, block_table, sinks, return_lse, is_recorded):
    """The plain kernels: sinks, and an lse without a gradient."""
    wanted = return_lse or is_recorded, is_recorded and sinks.requires_grad
    if lengths:
        found = flash_attn_2_cuda.direct_varlen_options(q, k, v, *lengths, *options, block_table, sinks, *wanted)
    else:
        found = flash_attn_2_cuda.direct_options(q, k, v, *options, sinks, *wanted)
    if found is None or not is_recorded:
        return found
    out, lse, *probability = found
    _, scale, causal, (left, right), softcap, alibi_slopes, deterministic, _ = options
    scale = float(_extended.interface._as_scale(scale, q))
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    way = lengths[2:], 0.0, (scale, causal, left, right, float(softcap)), deterministic
    results = out, lse, (None,), probability[0] if probability else None
    out, lse = _extended.record(way, results, sinks, q, k, v, alibi_slopes, block_table, *lengths[:2])
    return (out, lse) if return_lse else out
