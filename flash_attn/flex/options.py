"""A score_mod and a mask_mod of the options of ``flash_attn_func``: window, softcap, slopes, attn_bias and attn_mask.

    s = softcap tanh(s / softcap),  s -= slope distance,  s += attn_bias - shift,  s = -inf unless a row sees a key

The shift is 0 for most rows. It is the largest bias of a row whose biases are all below -1000, such as -1e9 for a row
that is wholly masked: beside such a bias fp32 has no digits for the scores. A softmax does not change by it. The caller
adds it to lse and max_scores (:func:`shift_of_rows`). Beside a bias such as torch.finfo(torch.float32).min fp64 has no
digits, either: then the scores count as 0, and all keys of the row alike, as in PyTorch.

Row i of a sequence sees the keys from first to last, without those that attn_mask hides. The distance of a key is that
to the key beside the row. Packed sequences are one long sequence. Tensors of its rows say where first and last lie.
"""

import flash_attn_2_cuda
import torch

from .._dispatch import is_unseen

BLOCK = 128
LEAST_BIAS = -1000  # of a row that needs no shift
LEAST_BIAS_OF_FP64 = -1e20  # a score has no digit beside a lower one


class Places:
    """Where the rows of a call and their keys lie. This is a dense call, whose sequences have the same lengths.

    A score_mod and a mask_mod ask: ``beside(i)`` is the key beside row i, and ``place(b, h, i, j)`` are the indices of
    batch, head, row and key for attn_bias and attn_mask.
    """

    def __init__(self, len_q, len_kv, window):
        shift = len_kv - len_q
        left, right = window
        self.has_window = left >= 0 or right >= 0
        least, most = (x if x >= 0 else None for x in (left, right))

        def sees(i, j):
            sees_left = True if least is None else i + shift - j <= least
            return sees_left if most is None else (j - i - shift <= most) & sees_left

        self.sees = sees
        self.beside = lambda i: i + shift
        self.place = lambda b, h, i, j: (b, h, i, j)

        self._lengths, self._window = (len_q, len_kv), (least, most)

    def largest(self, bias):
        """The largest bias of each row, ``[b, h, rows]`` or 1 in place of a size, of keys that it sees, or of all keys.

        A bias of keys alone is often one of padding, beside a causal mask that hides the keys without padding."""
        (_, len_kv), (least, most) = self._lengths, self._window
        if least is not None or most is None or bias.shape[2] > 1 or bias.shape[3] == 1:
            return bias.amax(-1)
        _, last = self.bounds(bias.device)
        return bias[:, :, 0].cummax(-1).values[..., last.clamp(0, len_kv - 1)]

    def shift(self, bias, sinks):
        """What shift_of_rows returns, by C. None: C has nothing for such a bias."""
        return shift_of_dense(bias, sinks, *self._lengths, *(-1 if x is None else x for x in self._window))

    def of_rows(self, x):
        """``[b, h, len_q]``, or 1 in place of a size, as a row of the kernels has it."""
        return x

    def bounds(self, device):
        """The first and the last key that each row sees, int64 ``[rows]``. They may lie outside of the keys."""
        (len_q, len_kv), (least, most) = self._lengths, self._window
        beside = torch.arange(len_q, device=device) + (len_kv - len_q)
        first = torch.zeros_like(beside) if least is None else beside - least
        return first, torch.full_like(beside, len_kv - 1) if most is None else beside + most


class PackedPlaces(Places):
    """The places of packed sequences. Nothing is read from the device."""

    has_window = True

    def __init__(self, cu_seqlens_q, cu_seqlens_k, total_q, total_kv, window):
        if len(cu_seqlens_q) < 2:  # no sequences are one without rows and keys
            cu_seqlens_q, cu_seqlens_k = (x.new_zeros(2) for x in (cu_seqlens_q, cu_seqlens_k))
        ends_q, row = cu_seqlens_q[1:].long(), torch.arange(total_q, device=cu_seqlens_q.device)
        sequence = torch.searchsorted(ends_q, row, right=True)
        is_used = sequence < len(ends_q)  # rows behind the last sequence see nothing
        sequence = sequence.clamp(max=len(ends_q) - 1)
        start_k, end_k = (cu_seqlens_k.long()[sequence + n].clamp(0, total_kv) for n in (0, 1))
        beside = end_k + row - ends_q[sequence]
        first, last = start_k, end_k - 1
        if window[0] >= 0:
            first = first.maximum(beside - window[0])
        if window[1] >= 0:
            last = last.minimum(beside + window[1])
        last = torch.where(is_used, last, -1)
        self._set(first, last, beside, sequence, row - cu_seqlens_q.long()[sequence], start_k)

    @classmethod
    def at(cls, first, last, beside, sequence, local, start_k):
        """Places that are known, int64 ``[total_q]`` each."""
        places = cls.__new__(cls)
        places._set(first, last, beside, sequence, local, start_k)
        return places

    def _set(self, first, last, beside, sequence, local, start_k):
        self.tensors = first, last, beside, sequence, local, start_k
        self._bounds = first, last
        self.sees = lambda i, j: (first[i] <= j) & (j <= last[i])
        self.beside = lambda i: beside[i]
        self.place = lambda b, h, i, j: (sequence[i], h, local[i], j - start_k[i])
        self._rows = sequence, local

    def bounds(self, device):
        return self._bounds

    def shift(self, bias, sinks):
        return shift_of_packed(bias, sinks, *self._rows)

    def largest(self, bias):
        return bias.amax(-1)

    def of_rows(self, x):
        (sequence, local), (b, _, length) = self._rows, x.shape
        sequence = sequence if b > 1 else torch.zeros_like(sequence)
        return x[sequence, :, local.clamp(0, length - 1)].t()[None]


def shift_of_dense(bias, sinks, len_q, len_kv, left, right):
    """The shift by C, or None. A bias of keys alone is cut by a causal mask."""
    is_cut = left < 0 <= right and bias.dim() > 0 and bias.shape[-1] > 1 and (bias.dim() == 1 or bias.shape[-2] == 1)
    cut = (len_q, len_kv - len_q + right) if is_cut else (None, None)
    return flash_attn_2_cuda.shift_of_biases(bias, LEAST_BIAS, sinks, *cut, None, None)


def shift_of_packed(bias, sinks, sequence, row):
    """The shift of packed sequences by C, or None."""
    return flash_attn_2_cuda.shift_of_biases(bias, LEAST_BIAS, sinks, None, None, sequence, row)


@torch.no_grad()
def shift_of_rows(places, attn_bias, sinks, dtype):
    """The shift of each row, ``[b, h, rows]`` or 1 in place of a size, or None without attn_bias.

    dtype: that of the scores. The shift of a bias in fp64 is fp64, because fp32 has not all of its values. C computes
    it, except in graphs and in transforms.

    A row whose sink is far above its scores needs none: its probabilities are 0. A NaN is no bias: a mask may hide it.
    """
    if attn_bias is None or 0 in attn_bias.shape:
        return None
    if is_unseen():
        shift = places.shift(attn_bias, sinks)
        if shift is not None:
            return shift
    dtype = torch.promote_types(dtype, attn_bias.dtype)
    bias = attn_bias.masked_fill(attn_bias.isnan(), -float("inf"))
    largest = places.largest(bias.reshape((1,) * (4 - bias.dim()) + bias.shape)).to(dtype)
    is_low = (largest < LEAST_BIAS) & ~largest.isinf()
    if sinks is not None:
        is_low = is_low & (sinks[:, None] <= largest - LEAST_BIAS)
        in_fp32 = largest.float().to(dtype)  # sinks get the shift in fp32
        largest = torch.where(in_fp32.isinf(), largest, in_fp32)
    return places.of_rows(torch.where(is_low, largest, 0.0))


def _reader(tensor, shape):
    """``read(place)`` of a tensor that broadcasts to the shape. Only the dimensions that it has are read."""
    sizes = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
    is_read = tuple(size != 1 for size in sizes)
    kept = tensor.reshape([size for size in sizes if size != 1])

    def read(place):
        at = tuple(index for index, is_needed in zip(place, is_read) if is_needed)
        return kept[at] if at else kept

    return read


def score_mod_of(places, shape, softcap=0.0, slopes=None, attn_bias=None, shift=None):
    """The score_mod, or None. The scores have this shape, ``(b, h, len_q, len_kv)``. shift: of shift_of_rows."""
    if not (softcap > 0 or slopes is not None or attn_bias is not None):
        return None
    cap = softcap if softcap > 0 else None
    slope = None if slopes is None else _reader(slopes[..., None, None], shape)
    bias = None if attn_bias is None else _reader(attn_bias, shape)
    shift_at = None if shift is None else _reader(shift[..., None], shape)
    place_of, beside = places.place, places.beside
    is_one = shift is not None and shift.dim() > 0 and all(size == 1 for size in shift.shape)

    def score_mod(score, b, h, i, j):
        place = place_of(b, h, i, j)
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slope is not None:
            of_row = slope(place)  # fp32, whose product with a distance would be fp32, too
            of_row = of_row.double() if score.dtype == torch.float64 else of_row
            score = score - of_row * (beside(i) - j).abs()
        if bias is None:
            return score
        if shift_at is None:
            return score + bias(place)
        shift = shift_at((b, h, i, j))
        if is_one:
            shift = shift + (i - i)  # what captures alone give would be computed for each call
        # A row of such biases has scores of 0, with the gradient of the score. NOTE: it is a sum, so that kernels know
        # the derivative, which is 1.
        score = score + torch.where(shift < LEAST_BIAS_OF_FP64, -score.detach(), 0.0)
        return score + (bias(place) - shift)

    return score_mod


def mask_mod_of(places, shape, attn_mask=None):
    """The mask_mod, or None if every row sees every key."""
    if not places.has_window and attn_mask is None:
        return None
    mask = None if attn_mask is None else _reader(attn_mask, shape)
    place_of, sees = places.place, places.sees if places.has_window else None

    def mask_mod(b, h, i, j):
        if mask is None:
            return sees(i, j)
        return mask(place_of(b, h, i, j)) if sees is None else sees(i, j) & mask(place_of(b, h, i, j))

    return mask_mod


def blocks_of(places, len_q, len_kv, device, is_exact):
    """The lists of blocks that rows see, as the kernels take them. Nothing is read from the device.

    Args:
        is_exact: the rows see all keys between their bounds, so there are full blocks.
    """
    rows, columns = -(-len_q // BLOCK), -(-len_kv // BLOCK)
    first, last = places.bounds(device)
    first, last = first.clamp(min=0), last.clamp(max=len_kv - 1)
    is_empty, padding = first > last, (0, rows * BLOCK - len_q)

    def reduced(bound, filler, reduce, empty):
        """A bound over the rows of each block, ``[rows, 1]``. Rows without keys count as ``empty``."""
        bound = torch.where(is_empty, empty, bound)
        bound = torch.nn.functional.pad(bound, padding, value=filler)
        return reduce(bound.view(rows, BLOCK), 1, keepdim=True)

    begin = torch.arange(columns, device=device) * BLOCK
    end = (begin + BLOCK).clamp(max=len_kv) - 1
    is_seen = (begin <= reduced(last, -1, torch.amax, -1)) & (end >= reduced(first, len_kv, torch.amin, len_kv))
    is_full = (begin >= reduced(first, 0, torch.amax, len_kv)) & (end <= reduced(last, len_kv, torch.amin, -1))
    is_full = is_full & is_seen if is_exact else torch.zeros_like(is_seen)
    lists = []
    for listed in (is_seen & ~is_full, is_full):
        lists.append(listed.sum(-1, dtype=torch.int32)[None, None])
        order = torch.argsort(listed.to(torch.int8), dim=-1, descending=True, stable=True)
        lists.append(order.to(torch.int32)[None, None].contiguous())
    return BLOCK, BLOCK, *lists
