"""``torch.vmap`` over attention is one call: the mapped dimension joins the batch.

Dense tensors ``[n, b, len, h, d]`` become ``[n * b, len, h, d]``. Packed tensors ``[n, total, h, d]`` become
``[n * total, h, d]``, and the sequences of one entry follow those of the entry before. A tensor that is not mapped is
expanded. Rows after the last sequence of an entry belong to no sequence. In the joined call they are a sequence of
their own, whose results become 0 afterwards:

    cu_seqlens of one entry, 12 rows    0 5 9
    cu_seqlens of two entries           0 5 9 | 12 17 21        sequences of 5, 4, (3), 5, 4 rows

A wrong number of an entry, such as a page that does not exist, must not reach the other entries. On the CPU the op
refuses such a number. On a GPU it is clamped to the entry, as kernels clamp the numbers of a call to its tensors.

Dropout draws one mask for the joined batch, so each entry has a mask of its own: ``randomness="different"``. With
"same", and in a backward whose forward was not mapped, the entries are computed one by one. The backward recognizes the
first case by a mapped rng_state, the second by an out that is not mapped.
"""

import contextlib
import os
from typing import NamedTuple

import torch

from flash_attn._ops import flash_attn_2_cuda, rng_of


class _Info(NamedTuple):
    """What torch tells a rule."""

    batch_size: int
    randomness: str


def entries(x, dim, num):
    """Returns ``x`` with the mapped dimension in front. ``x`` may be None."""
    if x is None:
        return None
    return x.expand(num, *x.shape) if dim is None else x.movedim(dim, 0)


def join_first(x, dim, num):
    """Dense tensors and rows of packed ones: the mapped dimension joins the first dimension."""
    return None if x is None else entries(x, dim, num).flatten(0, 1)


def parted(x, num, b):
    """The inverse of ``join_first`` of entries ``[b, ..]``."""
    return x.unflatten(0, (num, b))


_checks_on_gpu = os.environ.get("FLASH_ATTN_CHECK", "") not in ("", "0")


def _is_checked(x):
    """Does the op check the numbers that a tensor holds?"""
    return x.is_cpu or (_checks_on_gpu and x.is_cuda and not torch.cuda.is_current_stream_capturing())


def _firsts(num, step, x):
    """The numbers 0, step, 2 step, .. of the entries, as a column beside the entries ``x``."""
    firsts = torch.arange(num, device=x.device) * step
    return firsts.to(x.dtype).view(num, *[1] * (x.dim() - 1))


def _joined_numbers(x, num_there, step, if_negative):
    """Numbers from 0 to num_there - 1 of each entry, as numbers of the joined call.

    On a GPU a number that is too large counts as the last, and one that is negative as ``if_negative``.
    """
    firsts = _firsts(len(x), step, x)
    if _is_checked(x):
        return torch.where((x >= 0) & (x < num_there), x + firsts, -1)
    return torch.where(x < 0, if_negative, x.clamp(max=num_there - 1)) + firsts


def _joined_sums(x, total, longest):
    """Running sums ``[num, b + 1]`` of lengths up to longest, in total rows of each entry."""
    sums = _firsts(len(x), total, x) + x.clamp(0, total)
    if _is_checked(x):
        lengths = x.diff(dim=1)
        is_wrong = ((lengths < 0) | (lengths > longest)).any(1, keepdim=True) | (x[:, :1] != 0) | (x[:, -1:] > total)
        sums = torch.where(is_wrong, -1, sums)
    return sums.flatten()


class Dense:
    """Joins the batches of ``num`` calls."""

    def __init__(self, num, q, q_dim, *_):
        self.num = num
        self.b = entries(q, q_dim, num).shape[1]

    def q(self, x, dim):
        return join_first(x, dim, self.num)

    k = lse = q

    def slopes(self, x, dim):
        if x is None or (dim is None and x.dim() == 1):
            return x
        x = entries(x, dim, self.num)
        x = x[:, None].expand(-1, self.b, -1) if x.dim() == 2 else x
        return x.flatten(0, 1)

    def part(self, x):
        return x.unflatten(0, (self.num, x.shape[0] // self.num if self.num else self.b))

    q_part = k_part = lse_part = s_dmask_part = part


class _Packed:
    """Joins the sequences of ``num`` calls.

    Pages of keys have no rows that belong to no sequence. There cu_seqlens_k tells only lengths.
    """

    def __init__(self, num, q, q_dim, k, k_dim, cu_seqlens_q, cu_seqlens_k, dims, max_seqlens, table, table_dim):
        self.num, self.max_seqlens = num, max_seqlens
        self.cu_seqlens_q, self.cu_seqlens_k = map(entries, (cu_seqlens_q, cu_seqlens_k), dims, (num, num))
        self.b = self.cu_seqlens_q.shape[1] - 1
        self.total_q = entries(q, q_dim, num).shape[1]
        self.total_k, self.room = entries(k, k_dim, num).shape[1], None
        if table is not None:
            page_size, columns = entries(k, k_dim, num).shape[2], entries(table, table_dim, num).shape[2]
            self.total_k, self.room = None, page_size * columns  # the keys of a sequence that there is room for
        totals = [self.total_q, self.total_k or 0]
        if num * max(totals) >= 2**31:
            raise RuntimeError(f"vmap: {num} times {max(totals)} rows are too many for cu_seqlens, which are int32")

    def lengths(self):
        max_q, max_k = self.max_seqlens
        cu_seqlens_q = _joined_sums(self.cu_seqlens_q, self.total_q, max_q)
        max_q = max(max_q, self.total_q)
        if self.total_k is None:
            return cu_seqlens_q, self._sums_of_pages(), max_q, max_k
        cu_seqlens_k = _joined_sums(self.cu_seqlens_k, self.total_k, max_k)
        return cu_seqlens_q, cu_seqlens_k, max_q, max(max_k, self.total_k)

    def _sums_of_pages(self):
        sums, firsts = self.cu_seqlens_k, self.cu_seqlens_k[:, :1]
        if _is_checked(sums):
            lengths = torch.cat([torch.where(firsts == 0, 0, -1), sums.diff(dim=1)], 1)
        else:
            lengths = torch.nn.functional.pad(sums.diff(dim=1).clamp(0, self.room), (1, 0))
        return lengths.flatten().cumsum(0, dtype=sums.dtype)

    def q(self, x, dim):
        return join_first(x, dim, self.num)

    k = q

    def dout(self, x, dim):
        return _owned(entries(x, dim, self.num), self.cu_seqlens_q).flatten(0, 1)

    def lse(self, x, dim):
        return entries(x, dim, self.num).transpose(0, 1).flatten(1, 2)

    def slopes(self, x, dim):
        if x is None or (dim is None and x.dim() == 1):
            return x
        x = entries(x, dim, self.num)
        return self._per_sequence(x[:, None].expand(-1, self.b, -1) if x.dim() == 2 else x)

    def _per_sequence(self, x):
        """A row for each sequence ``[num, b, ..]``, and rows of 0 for the sequences of rows without owner."""
        padded = torch.cat([x, x.new_zeros(self.num, 1, *x.shape[2:])], 1)
        return padded.flatten(0, 1)[:-1]

    def table(self, table, dim, num_pages, is_shared):
        """num_pages is that of an entry. The entries share all pages, or none."""
        x = entries(table, dim, self.num)
        return self._per_sequence(_joined_numbers(x, num_pages, 0 if is_shared else num_pages, num_pages - 1))

    def q_part(self, x):
        return _owned(x.unflatten(0, (self.num, self.total_q)), self.cu_seqlens_q)

    def k_part(self, x):
        return _owned(x.unflatten(0, (self.num, self.total_k)), self.cu_seqlens_k)

    def lse_part(self, x):
        parts = x.unflatten(1, (self.num, self.total_q)).transpose(0, 1)
        return _owned(parts, self.cu_seqlens_q, -1, -torch.inf)

    def s_dmask_part(self, x):
        rows, columns = (round_up(longest) for longest in self.max_seqlens)
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).unflatten(0, (self.num, self.b + 1))
        return padded[:, : self.b, :, :rows, :columns]


def round_up(length):
    return (length + 127) // 128 * 128


def _owned(x, cu_seqlens, dim=1, value=0):
    """Fills rows of no sequence. ``x`` is ``[num, .., rows, ..]`` with the rows in dimension dim."""
    rows = torch.arange(x.shape[dim], device=x.device)
    is_owned = (rows >= cu_seqlens[:, :1]) & (rows < cu_seqlens[:, -1:])
    shape = [x.shape[0], *[1] * (x.dim() - 1)]
    shape[dim] = x.shape[dim]
    return torch.where(is_owned.view(shape), x, value)


def _join(info, in_dims, q, k, cu_seqlens_q, cu_seqlens_k, dims, max_seqlens, table=None, table_dim=None):
    if cu_seqlens_q is None:
        return Dense(info.batch_size, q, in_dims[0])
    k, k_dim = (q, in_dims[0]) if k is None else (k, in_dims[1])
    return _Packed(
        info.batch_size, q, in_dims[0], k, k_dim, cu_seqlens_q, cu_seqlens_k, dims, max_seqlens, table, table_dim
    )  # fmt: skip


# ---- the rules ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _only_checked():
    """Calls of attention inside are checked, and compute and write nothing."""
    was_on = flash_attn_2_cuda.only_plans()
    if not was_on:
        flash_attn_2_cuda.plan_only(True)
    try:
        yield
    finally:
        if not was_on:
            flash_attn_2_cuda.plan_only(False)


def _joined_or_refused(joined, apply, info, in_dims, arguments):
    """Returns ``joined()``. If it fails, the call of an entry says what is wrong, in its own sizes and numbers."""
    if info.batch_size == 0:
        return one_by_one(apply, info, in_dims, arguments)
    try:
        return joined()
    except Exception as error:
        failure = error
    with _only_checked():
        one_by_one(apply, info, in_dims, arguments)
    raise failure


def attention(apply, info, in_dims, arguments):
    """The rule of the forward: ``apply`` takes the arguments and returns (out, softmax_lse, S_dmask, rng_state)."""
    if arguments[9] and info.randomness != "different":  # dropout_p
        return one_by_one(apply, info, in_dims, arguments, arguments[0].device)
    return _joined_or_refused(
        lambda: _joined_attention(apply, info, in_dims, *arguments), apply, info, in_dims, arguments
    )


def _joined_attention(
    apply, info, in_dims, q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, block_table, *options
):  # fmt: skip
    lengths, pages = (cu_seqlens_q, cu_seqlens_k, in_dims[3:5], options[:2]), (block_table, in_dims[6])
    joined = _join(info, in_dims, q, k, *lengths, *pages)
    slopes = joined.slopes(alibi_slopes, in_dims[5])
    lengths = None, None, *options[:2]
    k_dim, v_dim = in_dims[1:3]
    if cu_seqlens_q is not None:
        lengths = joined.lengths()
    if block_table is None:
        k, v = joined.k(k, k_dim), joined.k(v, v_dim)
    elif k_dim is v_dim is None:
        block_table = joined.table(*pages, k.shape[0], True)
    else:
        k, v = joined.k(k, k_dim), joined.k(v, v_dim)
        block_table = joined.table(*pages, k.shape[0] // info.batch_size, False)
    out, softmax_lse, s_dmask, rng_state = apply(
        joined.q(q, in_dims[0]), k, v, *lengths[:2], slopes, block_table, *lengths[2:], *options[2:]
    )
    has_s_dmask = s_dmask is not None and s_dmask.dim() > 1
    s_dmask = joined.s_dmask_part(s_dmask) if has_s_dmask else s_dmask
    results = joined.q_part(out), joined.lse_part(softmax_lse), s_dmask, rng_state
    return results, (0, 0, 0 if has_s_dmask else None, None)


def gradients(apply, info, in_dims, options, needed, dout, saved):
    """The rule of the backward: ``apply(options, needed, dout, *saved)`` returns the gradients."""
    dout_dim, *dims = in_dims[2:]
    max_seqlens, dropout_p, *rest = options
    num_lengths = len(max_seqlens)
    num_tensors = len(saved) - 4 - num_lengths
    tensors, (out, lse, rng_state, alibi_slopes, *cu_seqlens) = saved[:num_tensors], saved[num_tensors:]
    out_dim, lse_dim, rng_dim, slopes_dim, *cu_dims = dims[num_tensors:]
    if info.batch_size == 0 or (dropout_p and (out_dim is None or rng_dim is not None)):
        return one_by_one(apply, info, in_dims, (options, needed, dout, *saved))
    q, k = (*tensors, None)[:2]
    joined = _join(info, dims, q, k, *(cu_seqlens or (None, None)), cu_dims, max_seqlens)
    if cu_seqlens:
        *cu_seqlens, max_q, max_k = joined.lengths()
        options = (max_q, max_k), dropout_p, *rest
        dout = joined.dout(dout, dout_dim)
    else:
        dout = joined.q(dout, dout_dim)
    grads = apply(
        options, needed, dout, *map(joined.q, tensors, dims), joined.q(out, out_dim), joined.lse(lse, lse_dim),
        rng_state, joined.slopes(alibi_slopes, slopes_dim), *cu_seqlens,
    )  # fmt: skip
    parts = [joined.q_part, *[joined.k_part] * (num_tensors - 1)]
    grads = tuple(None if x is None else part(x) for part, x in zip(parts, grads))
    return grads, tuple(None if x is None else 0 for x in grads)


is_batch_of_gradients = torch._C._functorch.is_legacy_batchedtensor


def _legacy_level():
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def batch_of_gradients(apply, options, needed, dout, saved):
    """``torch.autograd.grad(is_grads_batched=True)`` maps over dout with a vmap of its own, which has no rules."""
    level = _legacy_level()
    dout = torch._remove_batch_dim(dout, level, 0, 0)
    info = _Info(dout.shape[0], "error")
    in_dims = None, None, 0, *[None] * len(saved)
    grads, _ = gradients(apply, info, in_dims, options, needed, dout, saved)
    return [None if x is None else torch._add_batch_dim(x, 0, level) for x in grads]


def gradients_of_each(function, *douts):
    """Returns ``function(*douts)``, a tuple of gradients. A batch of gradients is computed one by one.

    A dout may be None.
    """
    if torch.compiler.is_compiling() or not any(x is not None and is_batch_of_gradients(x) for x in douts):
        return function(*douts)
    level = _legacy_level()
    dims = [0 if x is not None and is_batch_of_gradients(x) else None for x in douts]
    douts = [x if dim is None else torch._remove_batch_dim(x, level, 0, 0) for x, dim in zip(douts, dims)]
    num = next(len(x) for x, dim in zip(douts, dims) if dim is not None)
    grads, _ = one_by_one(function, _Info(num, "error"), dims, douts)
    return tuple(None if x is None else torch._add_batch_dim(x, 0, level) for x in grads)


def one_by_one(apply, info, in_dims, arguments, device=None):
    """Computes the entries one after the other. With a device, all of them draw the same random numbers.

    Where there is no entry, one of zeros tells the shapes of the results.
    """
    if info.batch_size == 0:
        entry = [
            x if dim is None or not torch.is_tensor(x) else x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]))
            for x, dim in zip(arguments, in_dims)
        ]
        found = tuple(None if x is None else x.new_empty((0, *x.shape)) for x in apply(*entry))
        return found, tuple(None if x is None else 0 for x in found)
    get_rng_state, set_rng_state = rng_of(device) if device is not None else (lambda: None, lambda state: None)
    state, results = get_rng_state(), []
    for i in range(info.batch_size):
        set_rng_state(state)
        entry = [x if dim is None or not torch.is_tensor(x) else x.select(dim, i) for x, dim in zip(arguments, in_dims)]
        results.append(apply(*entry))
    stacked = tuple(None if x[0] is None else torch.stack(x) for x in zip(*results))
    return stacked, tuple(None if x is None else 0 for x in stacked)


# ---- random numbers -------------------------------------------------------------------------------------------------


def _levels_of(x):
    """The levels of the transforms that wrap a tensor."""
    level = torch._C._functorch.maybe_get_level(x)
    while level is not None and level > 0:
        yield level
        x = torch._C._functorch.get_unwrapped(x)
        level = torch._C._functorch.maybe_get_level(x)


def randomness_error(randomness):
    where = "" if randomness == "error" else " where no argument is batched"
    return RuntimeError(f"vmap: flash_attn draws random numbers, refused by randomness={randomness!r}{where}")


def check_randomness(tensors):
    """Raises if a call with dropout contradicts the argument randomness of one of the vmaps around the call.

    torch asks the rules above only about mapped tensors.
    """
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_all_functorch_interpreters

    levels = {level for x in tensors for level in _levels_of(x)}
    for transform in retrieve_all_functorch_interpreters():
        if isinstance(transform, VmapInterpreter):
            randomness = transform.randomness()
            if randomness == "error" or (randomness == "different" and transform.level() not in levels):
                raise randomness_error(randomness)


# ---- decoding -------------------------------------------------------------------------------------------------------


def _is_joined_in_place(x, dim):
    """Is ``join_first`` of the tensor a view of it?"""
    x = x.movedim(dim, 0)
    return 1 in x.shape[:2] or x.stride(0) == x.stride(1) * x.shape[1]


def step(apply, info, in_dims, options, tensors):
    """The rule of a step of decoding: ``apply(options, *tensors)`` returns (out, softmax_lse).

    The caches join like batches. The entries share caches that are not mapped, which must not be written then.
    """
    _, k_cache_dim, v_cache_dim, *_, cos_dim, sin_dim, _, _, _, _ = in_dims
    q, has_new, is_paged = tensors[0], tensors[3] is not None, tensors[10] is not None
    for name, dim in (("k_cache", k_cache_dim), ("v_cache", v_cache_dim)):
        if has_new and dim is None:
            raise RuntimeError(f"vmap: {name} is written, so it must be mapped like the other arguments")

    def one(*entry):
        return apply(options, *entry)

    # On a GPU nothing is appended to a page that does not exist. Pages that are clamped would be written.
    if not cos_dim is sin_dim is None or (has_new and is_paged and not _is_checked(q)):
        return one_by_one(one, info, in_dims, tensors)
    return _joined_or_refused(lambda: _joined_step(one, info, in_dims, *tensors), one, info, in_dims, tensors)


def _joined_step(
    apply, info, in_dims, q, k_cache, v_cache, k, v, seqlens, cos, sin, batch_idx, leftpad, table, slopes
):  # fmt: skip
    num = info.batch_size
    q_dim, k_cache_dim, v_cache_dim, k_dim, v_dim, seqlens_dim, _, _, *index_dims, slopes_dim = in_dims
    batch_idx_dim, leftpad_dim, table_dim = index_dims
    joined = Dense(num, q, q_dim)
    b, is_shared = joined.b, k_cache_dim is v_cache_dim is None
    caches = k_cache, v_cache
    if not is_shared:
        caches = join_first(k_cache, k_cache_dim, num), join_first(v_cache, v_cache_dim, num)
    num_rows = caches[0].shape[0] // (1 if is_shared else num)  # or pages
    if table is not None:
        x, num_pages, num_rows = entries(table, table_dim, num), num_rows, entries(table, table_dim, num).shape[1]
        table = _joined_numbers(x, num_pages, 0 if is_shared else num_pages, num_pages - 1).flatten(0, 1)
        is_shared = False
    if batch_idx is not None or (table is None and (is_shared or num_rows != b)):
        idx = torch.arange(b, dtype=torch.int32, device=q.device) if batch_idx is None else batch_idx
        idx = entries(idx, batch_idx_dim, num)
        batch_idx = _joined_numbers(idx, num_rows, 0 if is_shared else num_rows, 0).flatten()
    seqlens, leftpad = join_first(seqlens, seqlens_dim, num), join_first(leftpad, leftpad_dim, num)
    seqlens, leftpad = (None if x is None else x.contiguous() for x in (seqlens, leftpad))  # one may be expanded
    out, softmax_lse = apply(
        joined.q(q, q_dim), *caches, joined.k(k, k_dim), joined.k(v, v_dim), seqlens, cos, sin, batch_idx, leftpad,
        table, joined.slopes(slopes, slopes_dim),
    )  # fmt: skip
    for cache, dim, written in ((k_cache, k_cache_dim, caches[0]), (v_cache, v_cache_dim, caches[1])):
        if k is not None and not _is_joined_in_place(cache, dim):
            cache.movedim(dim, 0).copy_(written.unflatten(0, (num, -1)))
    return (joined.q_part(out), joined.lse_part(softmax_lse)), (0, 0)
