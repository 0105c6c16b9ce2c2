"""Distributed tensors (``torch.distributed.tensor``): each rank attends to its part of the batch or of the heads.

A row of attention reads all keys of its head, and nothing of other heads or of other batch entries. So a dimension of
the mesh divides the batch, or the heads, or nothing. The placements of the caller's tensors say which of the three. If
a tensor is sharded in another dimension, it is redistributed, and the mesh divides the heads if they come out even.

    mesh divides   q, out         k, v                                      what has neither batch nor heads
    the batch      Shard(batch)   Shard(batch)                              Replicate
    the heads      Shard(heads)   Shard(heads), or Replicate if k has too   Replicate
                                  few heads: a rank takes those of its queries
    nothing        Replicate      Replicate                                 Replicate

Every function of this package follows this table. The letters of a layout name the dimensions of a tensor: b for the
batch, h for the heads of q, g for the heads of k, and a point for the rest. The ranks call the same function with plain
tensors, so the kernels, their checks and their gradients are those of plain tensors. A tensor that every rank has,
while the mesh divides the work, has one addend of its gradient on each rank: the placement of the gradient is Partial.

This file imports torch.distributed.tensor. So it is imported when the first distributed tensor comes.
"""

from contextlib import contextmanager

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flash_attn._arguments import NAMES, split
from flash_attn._ops import check_tensor, flash_attn_2_cuda, rng_of
from flash_attn.flash_attn_interface import flash_attn_with_kvcache

# ---- layouts of the public functions -------------------------------------------------------------------------------


def layout(**letters):
    return {name: tuple(letters[name]) for name in letters}  # Dynamo does not trace the letters of a string


DENSE = layout(
    q="b.h.", k="b.g.", v="b.g.", kv="b..g.", qkv="b..h.", alibi_slopes="bh", attn_bias="bh..", attn_mask="bh..",
    sinks="h",
)  # fmt: skip
PACKED = layout(
    q=".h.", k=".g.", v=".g.", kv="..g.", qkv="..h.", alibi_slopes=".h", attn_bias=".h..", attn_mask=".h..", sinks="h"
)
PAGED = {**PACKED, **layout(k="..g.", v="..g.")}
INDICES = layout(cache_seqlens="b", cache_batch_idx="b", cache_leftpad="b", block_table="b.")
CACHED = {**DENSE, **layout(k_cache="b.g.", v_cache="b.g."), **INDICES}
POOLED = {**CACHED, **layout(k_cache="..g.", v_cache="..g.")}  # pages, or rows that cache_batch_idx names

_DENSE_RESULTS = layout(out="b.h.", lse="bh.", S_dmask="bh..", max_logits="h")
_PACKED_RESULTS = layout(out=".h.", lse="h.", S_dmask=".h..", max_logits="h")

_LEADING = "q", "k", "v", "kv", "qkv", "k_cache", "v_cache", "qv"  # others may be plain, the same on every rank
_WITH_GRADIENT = "attn_bias", "sinks"  # besides the leading ones
_MAY_BE_FEWER = "alibi_slopes", "attn_bias", "attn_mask"  # leading dimensions may be absent
_MAY_BE_ONE = "attn_bias", "attn_mask"  # sizes may be 1

# ---- what a dimension of the mesh divides --------------------------------------------------------------------------


class _Division:
    """What the dimensions of a mesh divide: "b", "h", or "" for nothing, and whether k's heads are divided with q's."""

    def __init__(self, mesh, divides, sizes):
        self.mesh, self.divides, self.sizes = mesh, divides, sizes
        self.ways = {"b": 1, "h": 1}
        h, g = sizes.get("h", 0), sizes.get("g", 0)
        fewest = h  # heads of the rank with the fewest; the kernels need a head of k
        for i, what in enumerate(divides):
            if what:
                self.ways[what] *= mesh.size(i)
            if what == "h":
                fewest -= -(-fewest // mesh.size(i)) * (mesh.size(i) - 1)
        self.splits_g = (h == g and fewest > 0) or (h % self.ways["h"] == 0 and g % self.ways["h"] == 0)

    def letter_of(self, i):
        """The letters of a layout that mesh dimension i divides."""
        return {"b": "b", "h": "hg" if self.splits_g else "h", "": ""}[self.divides[i]]

    def placements(self, letters, shape):
        """The placements of an argument, and those of its gradient."""
        letters = letters[len(letters) - len(shape) :]
        given, grads = [], []
        for i, what in enumerate(self.divides):
            dims = [dim for dim, letter in enumerate(letters) if letter in self.letter_of(i)]
            dims = [dim for dim in dims if shape[dim] == self.sizes[letters[dim]]]
            given.append(Shard(dims[0]) if dims else Replicate())
            grads.append(Shard(dims[0]) if dims else Partial() if what else Replicate())
        return tuple(given), tuple(grads)

    def heads_of_rank(self):
        """The first head of q on this rank, and the number of its heads. Shards are those of DTensor."""
        first, num = 0, self.sizes.get("h", 0)
        for i, what in enumerate(self.divides):
            if what == "h":
                size = -(-num // self.mesh.size(i))
                skipped = min(size * self.mesh.get_local_rank(i), num)
                first, num = first + skipped, min(size, num - skipped)
        return first, num

    def is_even(self):
        return all(self.sizes[what] % ways == 0 for what, ways in self.ways.items() if ways > 1)

    def part(self):
        """A number of the part of the work that this rank does."""
        number = 0
        for i, what in enumerate(self.divides):
            if what:
                number = number * self.mesh.size(i) + self.mesh.get_local_rank(i)
        return number


def _wish(x, i, letters):
    """What the placement of x says about mesh dimension i: "b", "h", "" for nothing, "?" for another dimension."""
    placement = x.placements[i]
    if placement.is_replicate() or placement.is_partial():
        return ""
    return {"b": "b", "h": "h", "g": "h"}.get(letters[placement.dim], "?") if placement.is_shard() else "?"


def _divide(mesh, tensors, layout, sizes, written):
    """Asks the tensors in their order: the first of them that is sharded decides.

    Ranks may not write different numbers to copies of one cache. So a written cache decides alone, but for a cache of
    one head: a rank writes all of it, whatever heads of q it has.
    """
    divides, ways = [], {"b": 1, "h": 1}
    for i in range(mesh.ndim):
        wishes = [_wish(x, i, layout[name]) for name, x in tensors]
        if written:
            of_written = [wish for (name, _), wish in zip(tensors, wishes) if name in written]
            wishes = of_written if any(of_written) or sizes["g"] > 1 else ["h" if "h" in wishes else ""]
        found = [wish for wish in wishes if wish in ("b", "h")]
        what = found[0] if found else ""
        if not found and "?" in wishes:
            even = [w for w in "hb" if w in sizes and sizes["g" if w == "h" else w] % (ways[w] * mesh.size(i)) == 0]
            what = even[0] if even else ""
        divides.append(what)
        if what:
            ways[what] *= mesh.size(i)
    return _Division(mesh, divides, sizes)


# ---- arguments and results -----------------------------------------------------------------------------------------


def _check(names, values, layout, leading):
    """Returns the mesh, and the sizes that may be divided, by their letters."""
    first = next(x for x in values if isinstance(x, DTensor))
    mesh, first_name = first.device_mesh, names[[x is first for x in values].index(True)]
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"{first_name} is distributed over a mesh that lacks this rank; it is {mesh}")
    sizes = {}
    for name, x in zip(names, values):
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                raise RuntimeError(
                    f"{name} must be distributed over the mesh of {first_name}, {mesh}; it is over {x.device_mesh}"
                )
        elif name in leading and x is not None:
            kind = "a plain tensor" if isinstance(x, torch.Tensor) else f"of type {type(x).__name__}"
            raise TypeError(f"{name} must be a DTensor, because {first_name} is one; it is {kind}")
        letters = layout.get(name)
        if letters is None or not isinstance(x, torch.Tensor):
            continue
        if x.dim() > len(letters) or (x.dim() < len(letters) and name not in _MAY_BE_FEWER):
            raise RuntimeError(f"{name} must have {len(letters)} dimensions; it has {x.dim()}: shape {tuple(x.shape)}")
        if x.device.type != first.device.type:
            raise RuntimeError(f"{name} must be on {first.device.type}, where {first_name} is; it is on {x.device}")
        letters = letters[len(letters) - x.dim() :]
        for dim, letter in enumerate(letters):
            if letter == "." or (x.shape[dim] == 1 and name in _MAY_BE_ONE):
                continue
            wanted = sizes.setdefault(letter, x.shape[dim])
            if x.shape[dim] != wanted:
                raise RuntimeError(
                    f"{name} must have {wanted} in dimension {dim}, like {first_name}; it has shape {tuple(x.shape)}. "
                    "Beside distributed tensors every tensor is that of the whole call"
                )
    if "h" not in sizes:
        return mesh, sizes
    sizes.setdefault("g", sizes["h"])
    if sizes["h"] % max(sizes["g"], 1):
        raise RuntimeError(
            f"Number of heads in key/value must divide number of heads in query; k has {sizes['g']}, q has {sizes['h']}"
        )
    return mesh, sizes


def _local(name, x, division, letters, is_written):
    """The part of an argument that this rank needs."""
    placements, grads = division.placements(letters, x.shape)
    if not isinstance(x, DTensor):
        if not x.requires_grad and all(p.is_replicate() for p in placements):
            return x
        x = DTensor.from_local(x, division.mesh, [Replicate()] * division.mesh.ndim, run_check=False)
    if tuple(x.placements) != placements:
        if is_written:
            raise RuntimeError(
                f"{name} is written, so it must have the placements {placements}, as the other tensors are; "
                f"it has {tuple(x.placements)}"
            )
        x = x.redistribute(placements=placements)
    return x.to_local(grad_placements=grads)


def _of_heads(x, dim, first, num, group):
    """The heads of k, in dimension dim, that queries first to first + num - 1 use. There are group queries for each."""
    heads = [i // group for i in range(first, first + num)]
    distinct = heads[-1] - heads[0] + 1 if heads else 0
    if distinct == 0:
        return x.narrow(dim, 0, 1)
    if num % distinct == 0 and all(head - heads[0] == i // (num // distinct) for i, head in enumerate(heads)):
        return x if distinct == x.shape[dim] else x.narrow(dim, heads[0], distinct)
    return x.index_select(dim, torch.arange(first, first + num, device=x.device) // group)


def _strides(x, shape):
    """Strides of the whole tensor, whose parts are dense. The stride of a size 1 says nothing about the order."""
    is_contiguous = x.is_contiguous()
    order = [(0 if is_contiguous else -x.stride(dim), dim) for dim in range(x.dim())]
    strides = []
    for dim in range(x.dim()):
        stride = 1
        for inner in range(x.dim()):
            if order[inner] > order[dim]:
                stride *= max(shape[inner], 1)
        strides.append(stride)
    return tuple(strides)


def _whole(x, letters, division):
    """The distributed result of which x is the part of this rank."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.dim() != len(letters):  # an empty result
        letters = (".",) * x.dim()
    shape = tuple(division.sizes.get(letter, n) for n, letter in zip(x.shape, letters))
    placements = []
    for i, what in enumerate(division.divides):
        dims = [dim for dim, letter in enumerate(letters) if letter in division.letter_of(i)]
        lacks = Partial("max") if letters == ("h",) else Replicate()  # the largest score of a head, over the batch
        placements.append(Shard(dims[0]) if dims else lacks if what else Replicate())
    if is_compiling() and division.is_even():  # NOTE: given shapes break graphs with dynamic shapes in torch 2.13
        return DTensor.from_local(x, division.mesh, placements, run_check=False)
    return DTensor.from_local(
        x, division.mesh, placements, run_check=False, shape=torch.Size(shape), stride=_strides(x, shape)
    )


@contextmanager
def _drawing(division, device):
    """Dropout of this part of the work, which differs from that of other parts.

    The generators of all ranks must be in the same state, as DTensor assumes. They are in one state afterwards, too.
    """
    get_rng_state, set_rng_state = rng_of(device)
    seed = int(torch.randint(2**62, (), device="cpu"))
    state = get_rng_state()
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    generator.manual_seed(seed + division.part())
    try:
        yield
    finally:
        set_rng_state(state)


def _output(name, x, division, letters):
    """Returns the part of an output that this rank writes, and a function that moves it to where x lies."""
    placements, grads = division.placements(letters, x.shape)
    if Partial() in grads:
        raise RuntimeError(
            f"{name} would get an addend of a sum on each rank, because k has {division.sizes['g']} heads, which the "
            f"mesh does not divide as it divides the {division.sizes['h']} heads of q: call flash_attn_func"
        )
    if tuple(x.placements) == placements:
        return x.to_local(), lambda: None
    part = x.redistribute(placements=placements).to_local()

    def move():
        found = DTensor.from_local(
            part, division.mesh, placements, run_check=False, shape=x.shape, stride=_strides(part, x.shape)
        )
        x.to_local().copy_(found.redistribute(placements=x.placements).to_local())

    return part, move


def run(function, layout, names, values, results, written=(), dropout_p=0.0, leading=_LEADING, outputs=()):
    """Returns ``function(*values)``, whose values have these names, of distributed tensors.

    ``results`` has the letters of each result. The function reads and writes the arguments ``written``, and it writes
    the arguments ``outputs``. The arguments ``leading`` must be distributed, and say what the mesh divides.
    """
    mesh, sizes = _check(names, values, layout, leading)
    given = [(name, x) for name, x in zip(names, values) if name in leading and name not in outputs]
    division = _divide(mesh, [(name, x) for name, x in given if x is not None], layout, sizes, written)
    first, num = division.heads_of_rank()
    locals_, moves = [], []
    for name, x in zip(names, values):
        if isinstance(x, torch.Tensor):
            letters = layout.get(name, (".",) * x.dim())
            if name not in leading and name not in _WITH_GRADIENT:  # torch cannot redistribute a gradient None
                x = x.detach()
            if name in outputs:
                x, move = _output(name, x, division, letters)
                moves.append(move)
            else:
                x = _local(name, x, division, letters, name in written)
            if "g" in letters and not division.splits_g and "h" in division.divides:
                x = _of_heads(x, letters.index("g"), first, num, sizes["h"] // max(sizes["g"], 1))
        locals_.append(x)
    runs = is_compiling() or not flash_attn_2_cuda.only_plans()  # explain writes nothing and draws no number
    if dropout_p and any(division.divides) and runs and not is_compiling():
        with _drawing(division, next(x.device for x in locals_ if isinstance(x, torch.Tensor))):
            found = function(*locals_)
    else:
        found = function(*locals_)
    for move in moves if runs else ():
        move()
    if runs and not is_compiling():  # autograd asks the DTensor whether it has changed, and not the part of this rank
        for name, x in zip(names, values):
            if x is not None and (name in written or name in outputs):
                increment_version(x)
    if not isinstance(found, tuple):
        return _whole(found, results[0], division)
    return tuple([_whole(x, letters, division) for x, letters in zip(found, results)])


# ---- the public functions ------------------------------------------------------------------------------------------

_LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"


def _may_lack_heads(qkv):
    """May a rank be without heads of a packed tensor? Its keys would then have no head, which kernels need."""
    fewest = qkv.shape[-2] if qkv.dim() > 2 else 0
    for i in range(qkv.device_mesh.ndim):
        fewest -= -(-fewest // qkv.device_mesh.size(i)) * (qkv.device_mesh.size(i) - 1)
    return fewest <= 0


def attend(function, option_names, tensors, lengths, options):
    """Returns ``function(tensors, lengths, *options)``."""
    if len(tensors) == 1 and isinstance(tensors[0], DTensor) and _may_lack_heads(tensors[0]):
        tensors = split(tensors)
    option_names = option_names[: len(options)]
    named = dict(zip(option_names, options))
    num, num_lengths = len(tensors), len(lengths)
    is_paged = named.get("block_table") is not None
    layout = DENSE if not lengths else PAGED if is_paged else PACKED

    def call(*values):
        return function(values[:num], values[num : num + num_lengths], *values[num + num_lengths :])

    results = ["out"]
    if named.get("return_attn_probs"):
        results += ["lse", "S_dmask"]
    if named.get("return_lse"):
        results.append("lse")
    if named.get("return_max_logits"):
        results.append("max_logits")
    letters = _PACKED_RESULTS if lengths else _DENSE_RESULTS
    results = [letters[name] for name in results]
    names = (*NAMES[num], *_LENGTHS[:num_lengths], *option_names)
    return run(call, layout, names, (*tensors, *lengths, *options), results, dropout_p=named["dropout_p"])


def merge(function, outs, lses):
    """Returns ``function(outs, lses)``, whose lists are equally long."""
    num = len(outs)
    letters = _PACKED_RESULTS if outs[0].dim() == 3 else _DENSE_RESULTS
    out_names, lse_names = [f"outs[{i}]" for i in range(num)], [f"lses[{i}]" for i in range(num)]
    places = {**dict.fromkeys(out_names, letters["out"]), **dict.fromkeys(lse_names, letters["lse"])}

    def call(*values):
        return function(values[:num], values[num:])

    names = (*out_names, *lse_names)
    return run(call, places, names, (*outs, *lses), (letters["out"], letters["lse"]), leading=names)


def check_written(named, written):
    """Raises for a cache that requires grad, as the ops do for plain tensors."""
    for name in written:
        if torch.is_grad_enabled() and named[name].requires_grad and named[name].is_leaf:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: " + f"{name} is written"
            )


def check_lengths(function, named, indices):
    """Each rank checks the lengths of the whole batch, if it knows them. Otherwise one rank alone would raise.

    ``function`` checks them with tensors that have no query heads, for which it computes nothing. Lengths on a GPU are
    not checked, here or elsewhere.
    """
    given = [x for x in named.values() if isinstance(x, DTensor)]
    if is_compiling() or given[0].device.type != "cpu" or not any(p.is_shard(0) for x in given for p in x.placements):
        return
    tensors = {name: named[name] for name in ("q", "k_cache", "v_cache", "k", "v")}
    known = {name: named[name] for name in indices}
    for name, x in known.items():
        if isinstance(x, DTensor):
            if not all(p.is_replicate() for p in x.placements):
                return
            known[name] = x.to_local()
    if any(x is not None and (not isinstance(x, torch.Tensor) or x.dim() != 4) for x in tensors.values()):
        return  # an error, which names the argument
    if any(isinstance(x, torch.Tensor) for x in known.values()):
        heads = {"q": 0}
        shapes = {name: x if x is None else (*x.shape[:2], heads.get(name, 1), 8) for name, x in tensors.items()}
        function(**{name: x if x is None else torch.empty(x) for name, x in shapes.items()}, **known)


def _step(*values):
    *values, sinks = values
    return flash_attn_with_kvcache(*values, True, sinks=sinks)


def attend_with_cache(names, values):
    """Returns ``(out, softmax_lse)`` of ``flash_attn_with_kvcache``. The last of the values is sinks."""
    named = dict(zip(names, values))
    for name in ("q", "k_cache", "v_cache"):
        check_tensor(name, named[name])
    is_pooled = named["block_table"] is not None or named["cache_batch_idx"] is not None
    rows, b = (x.shape[0] if x.dim() else 0 for x in (named["k_cache"], named["q"]))
    is_pooled = is_pooled or rows != b
    written = ("k_cache", "v_cache") if named["k"] is not None else ()
    check_written(named, written)
    with torch.no_grad():
        check_lengths(flash_attn_with_kvcache, named, INDICES)
        results = _DENSE_RESULTS["out"], _DENSE_RESULTS["lse"]
        return run(_step, POOLED if is_pooled else CACHED, names, values, results, written)
