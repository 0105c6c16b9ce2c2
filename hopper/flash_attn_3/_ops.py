"""The ops of namespace ``flash_attn_3`` as PyTorch's tracers see them.

Importing the extension registers the ops (csrc/torch/ops_3.c). This file gives each op a fake. A fake computes the
shapes, dtypes and strides of the op's results without data, so that torch.compile and torch.export can plan memory.

    op                       results
    fwd                      out, lse [b, h, len_q] or [h, total_q], two empty tensors
    bwd                      softmax_d, four empty tensors;  dq, dk, dv are written in place
    fwd_combine              out [b, len, h, d], lse [b, len, h]
    get_scheduler_metadata   one int32
    _flash_attn_forward      those of fwd
    _flash_attn_backward     softmax_d;  dq, dk, dv are written in place
    _fwd_kvcache             lse;  out and, when keys are appended, the cache are written in place
    _combine                 those of fwd_combine, which are always new tensors
    quantize                 q, k, v in float8_e4m3fn, three descales [b, h_kv] or [1, 1]
    _refuse_backward         none, because it raises; compiled backwards call it

An op that returns its argument ``out`` cannot be compiled. So the Python functions call the ops with an underscore.
"""

import torch
from torch.autograd import forward_ad

try:
    import flash_attn_3._C as _C  # NOTE: where it is missing, "from flash_attn_3 import _C" raises another ImportError
except ModuleNotFoundError:
    raise ImportError(
        "flash_attn_3 needs its compiled module flash_attn_3._C, which is not installed: run `pip install ./hopper` "
        "in the source tree"
    ) from None

__all__ = [
    "NO_GRADIENTS",
    "_C",
    "forget_own_kernels",
    "ops",
    "output_dtype",
    "refuse_backward",
    "refuse_tangents",
    "refuse_wrapped",
    "register_gradient",
    "register_once",
]

ops = torch.ops.flash_attn_3


def register_once(what, register, *arguments):
    """Calls ``register(*arguments)`` once in a process, even if this module is imported several times."""
    done = vars(ops).setdefault("_registered", set())
    if what not in done:
        register(*arguments)
        done.add(what)


def refuse_tangents(arguments):
    """Our kernels would drop the tangents of forward-mode derivatives without a word."""
    for x in arguments:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("flash_attn_3 has no jvp: there is no forward-mode derivative of attention")


def below_transforms(x):
    """Returns the tensor that no transform of torch.func wraps, or None if a transform must know what becomes of it.

    Raises for a tensor with a tangent. What is no tensor stays.
    """
    functorch = torch._C._functorch
    while isinstance(x, torch.Tensor) and functorch.is_functorch_wrapped_tensor(x):
        if forward_ad._current_level >= 0:
            refuse_tangents((x,))
        if not functorch.is_gradtrackingtensor(x) or (x.requires_grad and torch.is_grad_enabled()):
            return None
        x = functorch.get_unwrapped(x)
    return x


NO_GRADIENTS = (
    "flash_attn_3 has no gradients under the transforms of torch.func: use torch.autograd.grad, or "
    "flash_attn.flash_attn_func, which has them"
)

NO_BATCHES = (
    "flash_attn_3 has no gradients of a batch (is_grads_batched=True, vectorize=True): compute them one by one, or use "
    "flash_attn.flash_attn_func, which has them"
)


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
                    raise NotImplementedError(NO_GRADIENTS)
            return kernel(keyset, *arguments, **rest)

        super().impl(name, honest, key, **options)


def register_gradient(op, backward, save):
    """``torch.library.register_autograd`` for an op without a forward-mode derivative."""
    library = _Gradients("flash_attn_3", "FRAGMENT")
    torch.library.register_autograd(op, backward, setup_context=save, lib=library)
    vars(ops).setdefault("_gradients", []).append(library)  # the kernel disappears with its library


def output_dtype(q):
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def _fake(op):
    """Registers a fake that gets the op's arguments by name, and refuses tensors of several devices."""
    schema = getattr(ops, op).default._schema.arguments
    names = [argument.name for argument in schema]
    defaults = {argument.name: argument.default_value for argument in schema}

    def register(fake):
        def checked(*args, **kwargs):
            given = {**defaults, **dict(zip(names, args)), **kwargs}
            tensors = [(name, x) for name, x in given.items() if isinstance(x, torch.Tensor)]
            first, device = tensors[0][0], tensors[0][1].device
            for name, x in tensors:
                if x.device != device:
                    raise RuntimeError(f"{name} must be on {device}, where {first} is; it is on {x.device}")
            return fake(given)

        register_once(f"fake of {op}", torch.library.register_fake, f"flash_attn_3::{op}", checked)
        return fake

    return register


def _check_rank(name, x, num):
    if x.dim() != num:
        raise RuntimeError(f"{name} must have {num} dimensions; it has {x.dim()}: shape {tuple(x.shape)}")


def _check_not_zero(call):
    """Raises for a size of 0 where the ops do. Lengths, the batch and the heads of q may be 0, and symbols are not."""
    name = "k" if call.get("k_cache") is None else "k_cache"
    q, k, v = call["q"], call[name], call["v" if name == "k" else "v_cache"]
    for size, words in (
        (q.shape[-1], "q must have a head_size of at least 1; it has shape ending in 0"),
        (v.shape[-1], "head_size_v should be a multiple of 8; v has 0"),
        (k.shape[-2], f"{name} must have at least one head; it has num_heads_k = 0"),
        (
            k.shape[1] if call.get("page_table") is not None else 1,
            f"{name} must have a page size (dimension 1) of at least 1; it has 0",
        ),
    ):
        if isinstance(size, int) and size == 0:
            raise RuntimeError(words)


def _lse_shape(call):
    q = call["q"]
    if call.get("cu_seqlens_q") is not None:
        _check_rank("q", q, 3)
        _check_not_zero(call)
        return q.shape[1], q.shape[0]
    _check_rank("q", q, 4)
    _check_not_zero(call)
    return q.shape[0], q.shape[2], q.shape[1]


def _out_shape(call):
    return *call["q"].shape[:-1], call["v"].shape[-1]


def _rows(q, *shape):
    return q.new_empty(shape, dtype=torch.float32)


def _check_lengths(call):
    for side in "qk":
        if call.get(f"cu_seqlens_{side}") is not None and call[f"max_seqlen_{side}"] is None:
            raise ValueError(f"max_seqlen_{side} must be provided if cu_seqlens_{side} is provided")


@_fake("fwd")
def _fwd(call):
    _check_lengths(call)
    q, out = call["q"], call.get("out")
    lse = _rows(q, *_lse_shape(call))
    out = q.new_empty(_out_shape(call), dtype=output_dtype(q)) if out is None else out
    return out, lse, _rows(q, 0), _rows(q, 0)


@_fake("_flash_attn_forward")
def _forward(call):
    if call["out_"] is not None:
        raise TypeError("Tracing (torch.compile/torch.export) with pre-allocated output tensor is not supported.")
    if call["num_splits"] <= 0:
        raise ValueError(
            f"tracing (torch.compile/torch.export) with num_splits <= 0 not supported. Got {call['num_splits']=}"
        )
    if call["k_new"] is not None:
        raise TypeError("Tracing with k_new is not supported: call flash_attn_with_kvcache, which may write its caches")
    return _fwd(call)


@_fake("_flash_attn_backward")
def _backward(call):
    q, lse = call["q"], _lse_shape(call)
    if call["cu_seqlens_q"] is not None:
        return _rows(q, lse[0], lse[1] + 128 * (call["cu_seqlens_q"].shape[0] - 1))
    return _rows(q, *lse[:2], (lse[2] + 127) // 128 * 128)


@_fake("bwd")
def _bwd(call):
    _check_lengths(call)
    return (_backward(call), *[_rows(call["q"], 0) for _ in range(4)])


@_fake("_fwd_kvcache")
def _fwd_kvcache(call):
    return _rows(call["q"], *_lse_shape(call))


@_fake("_combine")
def _combine(call):
    parts, lse = call["out_partial"], call["lse_partial"]
    _check_rank("out_partial", parts, 5)
    b, num_rows, h = lse.shape[1:]
    out = parts.new_empty(parts.shape[1:], dtype=call["out_dtype"] or torch.float32)
    return out, parts.new_empty((b, h, num_rows), dtype=torch.float32).transpose(1, 2)


@_fake("fwd_combine")
def _fwd_combine(call):
    out, lse = _combine(call)
    return (out if call["out"] is None else call["out"]), lse


@_fake("get_scheduler_metadata")
def _get_scheduler_metadata(call):
    return call["seqused_k"].new_empty((1,), dtype=torch.int32)


@_fake("quantize")
def _quantize(call):
    q, k = call["q"], call["k"]
    sums = call["cu_seqlens_q"]
    b = q.shape[0] if sums is None else sums.shape[0] - 1
    shape = (1, 1) if call["per_tensor"] else (b, k.shape[-2])
    tensors = [x.new_empty(x.shape, dtype=torch.float8_e4m3fn) for x in (q, k, call["v"])]
    return (*tensors, *[_rows(q, *shape) for _ in range(3)])


# ---- calls without a backward ------------------------------------------------------------------------------------


_REFUSALS = {
    "attention_chunk": AssertionError("FA3 backward does not support attention_chunk"),
    "FP8": RuntimeError("flash_attn_3 has no backward for FP8: detach q, k and v"),
    "qv": RuntimeError("flash_attn_3 has no backward with qv: qv would need a gradient, too"),
}


def refuse_backward(what, tensors):
    """Raises. While compiling, an op that will raise returns gradients of the tensors, so that the forward compiles."""
    if torch.compiler.is_compiling():
        return ops._refuse_backward(tensors, what)
    refusal = _REFUSALS[what]
    raise type(refusal)(*refusal.args)


def _define_refusal():
    schema = "(Tensor[] tensors, str what) -> Tensor[]"
    op = torch.library.custom_op(
        "flash_attn_3::_refuse_backward",
        lambda tensors, what: refuse_backward(what, tensors),
        mutates_args=(),
        schema=schema,
    )
    op.register_fake(lambda tensors, what: [torch.empty_like(x) for x in tensors])


register_once("refusal", _define_refusal)


# ---- kernels that torch.library knows ----------------------------------------------------------------------------


_WITHIN_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"  # the key of such calls. Other calls do not see its kernels


def refuse_wrapped(what, given):
    """Returns the tensors that no transform of torch.func wraps. Within grad new tensors are of grad, such as out."""
    found = [below_transforms(x) for x in given]
    if any(x is not None and y is None for x, y in zip(given, found)):
        raise NotImplementedError(
            f"{what} takes no tensors of torch.func (vmap, grad, functionalize and the like), because it writes into "
            "its arguments: flash_attn.flash_attn_with_kvcache takes those of vmap"
        )
    return found


def _refusing(name):
    op = getattr(ops, name).default

    def call(*args, **kwargs):
        found = refuse_wrapped(f"flash_attn_3::{name}", [*args, *kwargs.values()])
        with torch._C._DisableFuncTorch():
            return op(*found[: len(args)], **dict(zip(kwargs, found[len(args) :])))

    return call


def _refusing_negatives(name):
    """Returns a kernel of an op that writes into its arguments, for tensors with the negative bit.

    PyTorch's kernel would give the op a copy, and fail afterwards. NOTE: the schemas are upstream's. Some say that new
    keys are written, and some do not say that a cache and out_ are.
    """
    op = getattr(ops, name).default
    arguments = op._schema.arguments
    names = [x.name for x in arguments]
    results = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write} | {"out_"}
    caches, new = (("k_cache", "v_cache"), ("k", "v")) if "k_cache" in names else (("k", "v"), ("k_new", "v_new"))
    results -= {*caches, *new}
    rest = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Negative)

    def call(keyset, *args, **kwargs):
        given = {**dict(zip(names, args)), **kwargs}
        for key, x in given.items():
            if isinstance(x, torch.Tensor) and x.is_neg():
                if key in results or (key in caches and given.get(new[0]) is not None):
                    raise RuntimeError(f"{key} is written and must not have the negative bit: call resolve_neg()")
                given[key] = x.resolve_neg()
        return op.redispatch(keyset & rest, **given)

    return call


def _mark_ops():
    """Autograd ignores the ops without gradients, because its default would look for gradients and warn.

    Transforms of torch.func would not see that ops which write into their arguments have no derivative.
    """
    library = torch.library.Library("flash_attn_3", "IMPL")
    for name in ("fwd", "bwd", "fwd_combine", "get_scheduler_metadata", "_fwd_kvcache", "quantize"):
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    for name in ("fwd", "bwd", "fwd_combine", "_fwd_kvcache", "_flash_attn_backward"):
        library.impl(name, _refusing(name), _WITHIN_TRANSFORMS)
    for name in ("fwd", "bwd", "fwd_combine", "_fwd_kvcache", "_flash_attn_forward", "_flash_attn_backward"):
        library.impl(name, _refusing_negatives(name), "Negative", with_keyset=True)
    ops._library = library  # keeps the library alive, because its kernels disappear with it


register_once("marks", _mark_ops)


def forget_own_kernels():
    """Removes our kernels from torch.library's set. The direct functions search this set for foreign kernels."""
    kernels = getattr(torch.library, "_impls", set())
    keys = "/Meta", "/Autograd", "/Negative", f"/{_WITHIN_TRANSFORMS}"
    own = {name for name in kernels if name.startswith("flash_attn_3/") and name.endswith(keys)}
    own |= {name for name in kernels if name.startswith("flash_attn_3/_refuse_backward/")}
    kernels.difference_update(own)
