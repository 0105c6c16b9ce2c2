"""The ops of namespace ``flash_attn`` as PyTorch's tracers see them.

Importing the extension registers the ops (csrc/torch/ops.c). This file gives each op a fake. A fake computes the
shapes, dtypes and strides of the op's results without data, so that torch.compile and torch.export can plan memory. A
fake and its op agree exactly, and tests/test_compile.py compares them.

    op                           results
    _flash_attn_forward          out, lse [b, h, len_q], s_dmask, rng_state [2]
    _flash_attn_varlen_forward   out, lse [h, total_q], s_dmask, rng_state [2]
    fwd, varlen_fwd              the same without out, which is an argument and written in place
    _flash_attn_backward         softmax_d [b, h, len_q up to 128];  dq, dk, dv are written in place
    _flash_attn_varlen_backward  softmax_d [h, total_q + 128 b];     dq, dk, dv are written in place
    fwd_kvcache                  lse [b, h, len_q];  out and, when keys are appended, the cache are written in place
"""

import sys
import threading
import warnings

import torch
from torch.autograd import forward_ad

try:
    import flash_attn_2_cuda
except ModuleNotFoundError:
    raise ImportError(
        "flash_attn needs its compiled module flash_attn_2_cuda, which is not installed: run `pip install .` or "
        "`pip install -e .` in the source tree"
    ) from None

__all__ = [
    "NO_SECOND_DERIVATIVE",
    "check_layout",
    "check_storage",
    "check_storages",
    "check_tensor",
    "empty_like",
    "flash_attn_2_cuda",
    "forget_own_kernels",
    "is_freed",
    "refuse_tangents",
    "refuse_transforms",
    "register_gradient",
    "register_once",
    "rng_of",
    "round_multiple",
    "warn_of_gradients",
    "without_second_derivative",
]


def register_once(what, register, *arguments):
    """Calls ``register(*arguments)`` once in a process, even if this module is imported several times.

    The ops themselves are registered once too. If Ctrl-C ended an import, the next import continues at the same place.
    """
    done = vars(torch.ops.flash_attn).setdefault("_registered", set())
    if what not in done:
        register(*arguments)
        done.add(what)


def round_multiple(x: int, m: int) -> int:
    """Rounds ``x`` up to a multiple of ``m``."""
    return (x + m - 1) // m * m


def check_tensor(name, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; it is of type {type(x).__name__}")


def check_layout(name, x, *layout):
    """Raises RuntimeError unless ``x`` has the dimensions of ``layout``: words are names, and numbers are sizes."""
    if x.dim() != len(layout):
        came = f"{x.dim()}: shape {tuple(x.shape)}"
        raise RuntimeError(f"{name} must have {len(layout)} dimensions {_words(layout)}; it has {came}")
    if any(not isinstance(want, str) and size != want for size, want in zip(x.shape, layout)):
        raise RuntimeError(f"{name} must have shape {_words(layout)}; it has {tuple(x.shape)}")


def _words(layout):
    return f"({', '.join(map(str, layout))})"


def _check_not_zero(q, k, name="k", is_paged=False):
    """Raises for a size of 0 where the op does. Lengths, the batch and the heads of q may be 0, and symbols are not."""
    for size, words in (
        (q.shape[-1], "q must have a head_size of at least 1; it has shape ending in 0"),
        (k.shape[-2], f"{name} must have at least one head; it has num_heads_k = 0"),
        (k.shape[1] if is_paged else 1, f"{name} must have a page size (dimension 1) of at least 1; it has 0"),
    ):
        if isinstance(size, int) and size == 0:
            raise RuntimeError(words)


def empty_like(x):
    """Returns ``torch.empty_like(x)``, or a contiguous tensor if the last dimension would not be contiguous."""
    like = torch.empty_like(x)
    torn = like.dim() > 0 and like.stride(-1) != 1 and like.shape[-1] > 1
    return torch.empty_like(x, memory_format=torch.contiguous_format) if torn else like


def _bytes_of_storage(x):
    """How many bytes the storage of a tensor must have, and how many it has. Both are 0 where that is not known."""
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or x.numel() == 0:
        return 0, 0
    try:
        num_bytes = x.untyped_storage().nbytes()
    except RuntimeError:  # tensors of torch.func have no storage
        return 0, 0
    if x.is_contiguous():  # the usual case, a third of the time
        last = x.numel() - 1
    else:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return (x.storage_offset() + last + 1) * x.element_size(), num_bytes


def is_freed(x):
    """Was the storage of a tensor freed or cut? torch's own copies read a freed storage, and crash."""
    wanted, num_bytes = _bytes_of_storage(x)
    return wanted > num_bytes


def check_storage(name, x):
    """Raises for a freed tensor what the ops raise."""
    wanted, num_bytes = _bytes_of_storage(x)
    if wanted > num_bytes:
        raise RuntimeError(
            f"{name} has shape {tuple(x.shape)}, for which its storage must hold {wanted} bytes; it holds {num_bytes} "
            "(has it been freed or resized?)"
        )


def check_storages(names, tensors):
    """``check_storage`` of several tensors, which are None or have names. C looks at all at once."""
    if not torch.compiler.is_compiling() and not flash_attn_2_cuda.have_memory(tuple(tensors)):
        for name, x in zip(names, tensors):
            if name is not None and x is not None:
                check_storage(name, x)


NO_JVP = "flash_attn has no jvp: there is no forward-mode derivative of attention"


def refuse_tangents(arguments):
    """Our kernels would drop the tangents of forward-mode derivatives without a word."""
    for x in arguments:
        if isinstance(x, (list, tuple)):
            refuse_tangents(x)
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(NO_JVP)


class _Gradients(torch.library.Library):
    """Gives ops their kernels for autograd. PyTorch's own would drop the tangents of forward-mode AD.

    The gradient of an op has no rules for the transforms of torch.func, and PyTorch's words tell of its own classes.
    """

    def impl(self, name, kernel, key, **options):
        def honest(keyset, *arguments, **rest):
            if forward_ad._current_level >= 0:
                refuse_tangents(arguments)
            if torch._C._are_functorch_transforms_active() and torch.is_grad_enabled():
                if any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
                    raise NotImplementedError(
                        "torch.func takes gradients of the public functions of flash_attn, such as flash_attn_func, "
                        f"and not of flash_attn::{name.split('::')[-1]}"
                    )
            return kernel(keyset, *arguments, **rest)

        super().impl(name, honest, key, **options)


def register_gradient(op, backward, save):
    """``torch.library.register_autograd`` for an op without a forward-mode derivative."""
    library = _Gradients("flash_attn", "FRAGMENT")
    torch.library.register_autograd(op, backward, setup_context=save, lib=library)
    # The kernel disappears with its library.
    vars(torch.ops.flash_attn).setdefault("_gradients", []).append(library)


def refuse_transforms(function, *tensors):
    """Raises for tensors of torch.func and for forward-mode derivatives, of which our kernels know nothing.

    Tensors may be None.
    """
    if torch._C._are_functorch_transforms_active() and any(
        isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors
    ):
        raise NotImplementedError(
            f"{function} takes no tensors of torch.func (vmap, grad, vjp, jacrev and the like): put the batch into the "
            "batch dimension, and take gradients with torch.autograd"
        )
    if forward_ad._current_level >= 0:
        refuse_tangents(tensors)


NO_SECOND_DERIVATIVE = "flash_attn has no second derivatives: its gradients cannot be differentiated again"


def without_second_derivative(grads, *inputs):
    """Makes gradients a function of the inputs whose derivative raises, because there are no second derivatives.

    Gradients and inputs may be None.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    return _LastDerivative.apply(len(grads), *grads, *inputs)


class _LastDerivative(torch.autograd.Function):
    """Returns the first num tensors unchanged, as a function of all tensors without a derivative.

    torch's ``once_differentiable`` is not enough. It treats the tensors as constants if dout requires no grad.
    """

    @staticmethod
    def forward(ctx, num, *tensors):
        return tensors[:num]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)


_has_warned = False


def warn_of_gradients(*tensors):
    """Warns once if ``flash_attn_with_kvcache`` drops gradients that an input requires."""
    global _has_warned
    if torch.compiler.is_dynamo_compiling() or _has_warned or not torch.is_grad_enabled():
        return  # the fake of a compiled call warns
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        _has_warned = True
        warnings.warn(
            "flash_attn_with_kvcache has no backward: its result requires no grad, although an input does. Call it "
            "under torch.no_grad(), or flash_attn_func for gradients.",
            stacklevel=3,
        )


def _keep_draws_apart(op, dropout_p):
    """Makes two equal calls with dropout draw twice.

    AOTAutograd merges equal calls. It merges calls of random ops too, unless the op is in AOTAutograd's list. This list
    has no public interface. AOTAutograd's module is imported when a call is traced, and not before.
    """
    rand_ops = getattr(sys.modules.get("torch._functorch.compile_utils"), "rand_ops", None)
    if dropout_p > 0 and rand_ops is not None and op not in rand_ops:
        rand_ops.append(op)


def _row_results(q, lse_shape, s_dmask_shape):
    """Returns lse, s_dmask and rng_state. s_dmask is empty unless the call asks for it."""
    return (
        q.new_empty(lse_shape, dtype=torch.float32),
        q.new_empty(s_dmask_shape or (0,)),
        q.new_empty((2,), dtype=torch.int64),
    )


def _fake(op):
    """Registers a fake that refuses tensors of several devices. A "meta" tensor makes torch call the fake."""
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
    _check_not_zero(q, k)
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
    is_paged = block_table is not None
    check_layout("k", k, *(("num_blocks", "page_block_size") if is_paged else ("total_k",)), "num_heads_k", "head_size")
    _check_not_zero(q, k, is_paged=is_paged)
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
def _fwd_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, rotary_cos=None, rotary_sin=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, *_, **__,
):  # fmt: skip
    warn_of_gradients(q, k_cache, v_cache, k, v)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if k is not None and torch.is_grad_enabled() and cache.requires_grad and cache.is_leaf:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation: " + f"{name} is written"
            )
    check_layout("q", q, "batch_size", "seqlen_q", "num_heads", "head_size")
    is_paged = block_table is not None
    rows = ("num_blocks", "page_block_size") if is_paged else ("batch_size_cache", "seqlen_cache")
    check_layout("k_cache", k_cache, *rows, "num_heads_k", "head_size")
    _check_not_zero(q, k_cache, "k_cache", is_paged)
    b, len_q, h, _ = q.shape
    return q.new_empty((b, h, len_q), dtype=torch.float32)


def rng_of(device):
    """Returns functions that read and set the state of the generator for dropout on the device."""
    if device.type != "cuda":
        return torch.get_rng_state, torch.set_rng_state
    return (lambda: torch.cuda.get_rng_state(device)), (lambda state: torch.cuda.set_rng_state(state, device))


class _Drawn(threading.local):
    def __init__(self):
        self.levels = []  # (level, randomness, generator's state) of each call that vmap repeats, innermost first


_drawn = _Drawn()


def _drawing_as_vmap_says(name):
    """Returns a kernel of the op for ``torch.vmap``. vmap repeats the op for each part of a batch.

    Dropout follows vmap's argument randomness. If two vmaps are nested, the inner vmap calls this kernel first, and the
    outer vmap repeats each part.
    """
    op = getattr(torch.ops.flash_attn, name).default
    at = [argument.name for argument in op._schema.arguments].index("dropout_p")
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.FuncTorchVmapMode)

    def draw(keyset, *args):
        if args[at] == 0:
            return op.redispatch(keyset & rest, *args)
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        get_rng_state, set_rng_state = rng_of(args[0].device)
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


def _refusing_negatives(name):
    """Returns a kernel of an op that writes into its arguments, for tensors with the negative bit.

    PyTorch's kernel would give the op a copy, and fail afterwards.
    """
    op = getattr(torch.ops.flash_attn, name).default
    arguments = op._schema.arguments
    names = [x.name for x in arguments]
    written = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write}
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Negative)

    def call(keyset, *args, **kwargs):
        given = {**dict(zip(names, args)), **kwargs}
        for key, x in given.items():
            if isinstance(x, torch.Tensor) and x.is_neg():
                if key in written and not (key in ("k_cache", "v_cache") and given.get("k") is None):
                    raise RuntimeError(f"{key} is written and must not have the negative bit: call resolve_neg()")
                given[key] = x.resolve_neg()
        return op.redispatch(keyset & rest, **given)

    return call


_WRITERS = ("fwd", "varlen_fwd", "fwd_kvcache", "_flash_attn_backward", "_flash_attn_varlen_backward")


def _mark_ops():
    """Sets properties of the ops that the C shim cannot set.

    The forward ops may draw from the random generator (dropout). A tag tells this to the tracers. So a compiled graph
    that recomputes an op in its backward restores the generator's state first. The C shim can set tags only from torch
    2.12 on. Autograd ignores the ops without gradients, because its default would look for gradients and warn. vmap
    leaves random numbers to kernels of its own dispatch key, which are registered here.
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
    for name in _WRITERS:
        library.impl(name, _refusing_negatives(name), "Negative", with_keyset=True)
    torch.ops.flash_attn._library = library  # keeps the library alive, because its kernels disappear with it


register_once("marks", _mark_ops)


OPS = (
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
    "_flash_attn_backward",
    "_flash_attn_varlen_backward",
    "fwd",
    "varlen_fwd",
    "fwd_kvcache",
)


def forget_own_kernels(names=OPS, keys=("Meta", "Autograd", "FuncTorchVmapMode", "Negative")):
    """Removes our kernels of these dispatch keys from torch.library's set.

    The direct functions search this set for foreign kernels, and leave calls to the dispatcher if there is any. So
    every file that gives kernels to torch.library calls this function.
    """
    kernels = getattr(torch.library, "_impls", set())
    for name in names:
        kernels.difference_update(f"flash_attn/{name}/{key}" for key in keys)
