"""The ops of namespace ``flash_attn`` as PyTorch's tracers see them.

Importing the extension registers the ops (csrc/torch/ops.c). Here each gets a fake: the shapes, dtypes and strides of
its results, computed without data, so that torch.compile and torch.export can plan memory. A fake and its op agree
exactly; tests/test_compile.py holds them together.

    op                           results
    _flash_attn_forward          out, lse [b, h, len_q], s_dmask, rng_state [2]
    _flash_attn_varlen_forward   out, lse [h, total_q], s_dmask, rng_state [2]
    fwd, varlen_fwd              the same without out, which is given and written in place
    _flash_attn_backward         softmax_d [b, h, len_q up to 128];  dq, dk, dv are written in place
    _flash_attn_varlen_backward  softmax_d [h, total_q + 128 b];     dq, dk, dv are written in place
    fwd_kvcache                  lse [b, h, len_q];  out and, when keys are appended, the cache are written in place
"""

import sys
import threading
import warnings

import torch

try:
    import flash_attn_2_cuda
except ModuleNotFoundError as error:
    raise ImportError(
        "flash_attn needs its compiled module flash_attn_2_cuda, which is not installed: run `pip install .` or "
        "`pip install -e .` in the source tree"
    ) from error

__all__ = [
    "check_layout",
    "check_tensor",
    "empty_like",
    "flash_attn_2_cuda",
    "forget_own_kernels",
    "register_once",
    "round_multiple",
    "warn_of_gradients",
]


def register_once(what, register, *arguments):
    """``register(*arguments)``, once in a process, as the ops are registered, however often Python forgets this module.

    An import that ended in the middle, with Ctrl-C, is taken up where it was.
    """
    done = vars(torch.ops.flash_attn).setdefault("_registered", set())
    if what not in done:
        register(*arguments)
        done.add(what)


def round_multiple(x, m):
    """``x`` rounded up to a multiple of ``m``."""
    return (x + m - 1) // m * m


def check_tensor(name, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; it is of type {type(x).__name__}")


def check_layout(name, x, *layout):
    """Raises RuntimeError unless ``x`` has the dimensions of ``layout``: words name them, numbers fix their size."""
    shape = f"({', '.join(map(str, layout))})"
    if x.dim() != len(layout):
        came = f"{x.dim()}: shape {tuple(x.shape)}"
        raise RuntimeError(f"{name} must have {len(layout)} dimensions {shape}; it has {came}")
    if any(isinstance(want, int) and size != want for size, want in zip(x.shape, layout)):
        raise RuntimeError(f"{name} must have shape {shape}; it has {tuple(x.shape)}")


def empty_like(x):
    """``torch.empty_like(x)``, but contiguous where that would tear the last dimension apart."""
    like = torch.empty_like(x)
    torn = like.dim() > 0 and like.stride(-1) != 1 and like.shape[-1] > 1
    return torch.empty_like(x, memory_format=torch.contiguous_format) if torn else like


_has_warned = False


def warn_of_gradients(*tensors):
    """Once: ``flash_attn_with_kvcache`` drops the gradients that are asked for."""
    global _has_warned
    if torch.compiler.is_dynamo_compiling() or _has_warned or not torch.is_grad_enabled():
        return  # a call that is compiled comes here again, from its fake
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        _has_warned = True
        warnings.warn(
            "flash_attn_with_kvcache has no backward: its result requires no grad, although an input does. Call it "
            "under torch.no_grad(), or flash_attn_func for gradients.",
            stacklevel=3,
        )


def _keep_draws_apart(op, dropout_p):
    """Two equal calls with dropout are two draws, not one value to share.

    AOTAutograd merges equal calls, of random ops too unless they stand in its list, which has no public entrance. It is
    imported by the time that a call is traced, and only then.
    """
    rand_ops = getattr(sys.modules.get("torch._functorch.compile_utils"), "rand_ops", None)
    if dropout_p > 0 and rand_ops is not None and op not in rand_ops:
        rand_ops.append(op)


def _row_results(q, lse_shape, s_dmask_shape):
    """lse, s_dmask (empty unless it was asked for) and rng_state."""
    return (
        q.new_empty(lse_shape, dtype=torch.float32),
        q.new_empty(s_dmask_shape or (0,)),
        q.new_empty((2,), dtype=torch.int64),
    )


def _fake(op):
    """Registers a fake that refuses tensors of several devices: if one is "meta", torch calls it in place of the op."""
    names = [argument.name for argument in getattr(torch.ops.flash_attn, op).default._schema.arguments]

    def register(fake):
        def checked(*args, **kwargs):
            given = {**dict(zip(names, args)), **kwargs}
            q = given["q"]
            check_tensor("q", q)
            for name, x in given.items():
                if isinstance(x, torch.Tensor) and x.device != q.device:
                    raise RuntimeError(f"{name} must be on {q.device}, where q is; it is on {x.device}")
            return fake(*args, **kwargs)

        register_once(f"fake of {op}", torch.library.register_fake, f"flash_attn::{op}", checked)
        return fake

    return register


@_fake("fwd")
def _fwd(q, k, v, out, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax):
    check_layout("q", q, "batch_size", "seqlen_q", "num_heads", "head_size")
    check_layout("k", k, "batch_size", "seqlen_k", "num_heads_k", "head_size")
    b, len_q, h, _ = q.shape
    s_dmask = (b, h, round_multiple(len_q, 128), round_multiple(k.shape[1], 128)) if return_softmax else None
    return _row_results(q, (b, h, len_q), s_dmask)


@_fake("_flash_attn_forward")
def _forward(q, k, v, dropout_p, *options):
    _keep_draws_apart(torch.ops.flash_attn._flash_attn_forward, dropout_p)
    return (empty_like(q), *_fwd(q, k, v, None, dropout_p, *options))


@_fake("varlen_fwd")
def _varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0,
):  # fmt: skip
    check_layout("q", q, "total_q", "num_heads", "head_size")
    total_q, h, _ = q.shape
    b = cu_seqlens_q.shape[0] - 1
    rows, cols = round_multiple(max_seqlen_q, 128), round_multiple(max_seqlen_k, 128)
    return _row_results(q, (h, total_q), (b, h, rows, cols) if return_softmax else None)


@_fake("_flash_attn_varlen_forward")
def _varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, *args, **kwargs):
    _keep_draws_apart(torch.ops.flash_attn._flash_attn_varlen_forward, dropout_p)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return (empty_like(q), *_varlen_fwd(q, k, v, None, *lengths, dropout_p, *args, **kwargs))


@_fake("_flash_attn_backward")
def _backward(dout, q, *_, **__):
    check_layout("q", q, "batch_size", "seqlen_q", "num_heads", "head_size")
    b, len_q, h, _ = q.shape
    return q.new_empty((b, h, round_multiple(len_q, 128)), dtype=torch.float32)


@_fake("_flash_attn_varlen_backward")
def _varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, *_, **__):
    check_layout("q", q, "total_q", "num_heads", "head_size")
    total_q, h, _ = q.shape
    return q.new_empty((h, total_q + 128 * (cu_seqlens_q.shape[0] - 1)), dtype=torch.float32)


@_fake("fwd_kvcache")
def _fwd_kvcache(q, k_cache, v_cache, k=None, v=None, *_, **__):
    warn_of_gradients(q, k_cache, v_cache, k, v)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if k is not None and torch.is_grad_enabled() and cache.requires_grad and cache.is_leaf:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: " + f"{name} is written"
            )
    check_layout("q", q, "batch_size", "seqlen_q", "num_heads", "head_size")
    b, len_q, h, _ = q.shape
    return q.new_empty((b, h, len_q), dtype=torch.float32)


def _rng_of(x):
    """Reads and sets the state of the generator that dropout of the tensor draws from."""
    if not x.is_cuda:
        return torch.get_rng_state, torch.set_rng_state
    return (lambda: torch.cuda.get_rng_state(x.device)), (lambda state: torch.cuda.set_rng_state(state, x.device))


class _Drawn(threading.local):
    def __init__(self):
        self.levels = []  # of calls that vmap repeats, the innermost's first: level, randomness, the generator's state


_drawn = _Drawn()


def _drawing_as_vmap_says(name):
    """The op inside ``torch.vmap``, which repeats it for each part of a batch: dropout as its randomness asks.

    A vmap inside of another one comes here first, and each of its parts is repeated by the other one.
    """
    op = getattr(torch.ops.flash_attn, name).default
    at = [argument.name for argument in op._schema.arguments].index("dropout_p")
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.FuncTorchVmapMode)

    def draw(keyset, *args):
        if args[at] == 0:
            return op.redispatch(keyset & rest, *args)
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        get_rng_state, set_rng_state = _rng_of(args[0])
        interpreter = retrieve_current_functorch_interpreter()
        level, randomness = interpreter.level(), interpreter.randomness()
        if _drawn.levels and _drawn.levels[-1][0] == level:
            if randomness == "same":
                set_rng_state(_drawn.levels[-1][2])
            return op.redispatch(keyset & rest, *args)

        is_batched = any(torch._C._functorch.maybe_get_level(x) == level for x in args if isinstance(x, torch.Tensor))
        if randomness == "error" or (randomness == "different" and not is_batched):
            where = "" if randomness == "error" else " where no argument is batched"
            raise RuntimeError(f"vmap: flash_attn draws random numbers, refused by randomness={randomness!r}{where}")
        _drawn.levels.append((level, randomness, get_rng_state()))
        try:
            return op.redispatch(keyset & rest, *args)
        finally:
            _drawn.levels.pop()

    return draw


def _mark_ops():
    """What the C shim cannot say of an op.

    The forward ops may draw from the random generator (dropout). The tag tells the tracers, so that a compiled graph
    that recomputes an op in its backward restores the generator's state first. (The C shim can tag only from torch 2.12
    on.) Ops without gradients autograd lets pass. (Its default would look for gradients, and warn.) What vmap asks of
    random numbers it leaves to kernels of its own key.
    """
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward", "fwd", "varlen_fwd"):
        op = getattr(torch.ops.flash_attn, name).default
        op._tags = [*op._tags, torch.Tag.nondeterministic_seeded]
        op._nondeterministic_seeded = True
    library = torch.library.Library("flash_attn", "IMPL")
    for name in ("fwd", "varlen_fwd", "fwd_kvcache"):
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
        library.impl(name, _drawing_as_vmap_says(name), "FuncTorchVmapMode", with_keyset=True)
    torch.ops.flash_attn._library = library  # which takes them along when it goes


register_once("marks", _mark_ops)


def forget_own_kernels():
    """Takes ours out of torch.library's set of kernels from Python: the direct functions look there for others'."""
    kernels = getattr(torch.library, "_impls", set())
    for name in (
        "_flash_attn_forward",
        "_flash_attn_varlen_forward",
        "_flash_attn_backward",
        "_flash_attn_varlen_backward",
        "fwd",
        "varlen_fwd",
        "fwd_kvcache",
    ):
        kernels.difference_update(f"flash_attn/{name}/{key}" for key in ("Meta", "Autograd", "FuncTorchVmapMode"))
