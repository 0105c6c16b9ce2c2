"""PyTorch's ``scaled_dot_product_attention`` and ``varlen_attn`` on the kernels of this package.

PyTorch keeps a list of implementations of its attention ops (``torch.nn.attention``). This package adds itself under
the name "flash_attn" when it is imported. While it is active, C functions replace the kernels of these ops
(csrc/torch/sdpa.c). The functions in front of the ops, autograd, autocast, torch.compile and vmap stay PyTorch's.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator

import torch
from torch.nn import attention as torchs

from flash_attn._ops import flash_attn_2_cuda

NAME = "flash_attn"

# In the order of csrc/torch/sdpa.c.
_OPS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
)


@functools.cache
def _num_arguments():
    """The number of arguments of each op; 0: this PyTorch has no such op."""
    ops = [getattr(torch.ops.aten, name, None) for name in _OPS]
    return tuple(0 if op is None else len(op.default._schema.arguments) for op in ops)


@functools.cache
def _promises():
    """What PyTorch's fakes say: are the CPU's out, its gradients, and CUDA's gradients strided like the inputs?

    An op on "meta" imports sympy, which takes seconds. So the fakes themselves are called, with tensors of the CPU.
    """
    names = (_OPS[0], _OPS[1], _OPS[3])
    ops, fakes = [getattr(torch.ops.aten, name) for name in names], getattr(torch._decomp, "meta_table", {})
    is_known = all(op.default in fakes for op in ops)
    device = "cpu" if is_known else "meta"
    of_out, of_cpu, of_cuda = [fakes[op.default] for op in ops] if is_known else ops
    x = torch.empty(2, 3, 5, 8, device=device)
    lse, rng = torch.empty(2, 3, 5, device=device), torch.empty(2, device=device)
    with torch.no_grad():
        out = of_out(x, x, x)[0]
        cpu = of_cpu(x, x, x, x, x, lse, 0.0, False)[0]
        cuda = of_cuda(x, x, x, x, x, lse, None, None, 5, 5, 0.0, False, rng, rng)[0]
    return tuple(y.stride() == x.stride() for y in (out, cpu, cuda))


# ---- the preference of cuDNN ---------------------------------------------------------------------------------------


class _Priority:
    """Puts flash attention before cuDNN's attention, which PyTorch prefers on Hopper and Blackwell.

    PyTorch makes its order when it first chooses on a GPU. So a choice comes first. All of it waits until CUDA starts,
    because this package must not start CUDA.
    """

    def __init__(self):
        self.before, self.is_over = None, False
        if torch.cuda.is_available() and hasattr(torch._C, "_set_sdp_priority_order"):
            torch.cuda._lazy_call(self._put_first)

    def _put_first(self):
        if self.is_over:
            return
        x = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)
        self.before = torch._C._get_sdp_priority_order()
        flash = int(torchs.SDPBackend.FLASH_ATTENTION.value)
        torch._C._set_sdp_priority_order([flash, *(backend for backend in self.before if backend != flash)])

    def restore(self):
        self.is_over = True
        if self.before is not None:
            torch._C._set_sdp_priority_order(self.before)


# ---- PyTorch's list -------------------------------------------------------------------------------------------------

_goes_before_cudnn = True  # at the next activation
_has_warned = False


def _spend_warning():
    """PyTorch warns once per process when a kernel is replaced. A user who activates this package knows it already.

    The kernel that is replaced here belongs to an op of PyTorch's own tests, so no thread can meet the replacement.
    """
    global _has_warned
    if _has_warned or not hasattr(torch.ops.aten, "_test_optional_intlist"):
        return
    _has_warned = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl("_test_optional_intlist", lambda values, addends: values, "CPU")
        library._destroy()


_stays = False  # Kernels of this package are in the dispatcher, active or not.


def _may_stay():
    """Is no kernel of another package among those of scaled_dot_product_attention?

    Kernels that stay hand calls on to PyTorch's own while this package is not active, and would pass over another's.
    """
    keys = {_OPS[0]: "CPU", _OPS[1]: "CPU"}
    if torch.backends.cuda.is_built():
        keys.update({_OPS[2]: "CUDA", _OPS[3]: "CUDA"})
    for name, key in keys.items():
        lines = torch._C._dispatch_dump(f"aten::{name}").splitlines()
        if sum(line.startswith((f"{key}:", f"{key} (inactive):")) for line in lines) != 1 + _stays:
            return False
    return True


class _Handle:
    """PyTorch keeps this object while the package is active."""

    def __init__(self):
        global _stays
        _spend_warning()
        _stays = flash_attn_2_cuda.sdpa_override(_num_arguments(), _promises(), _may_stay())
        self.priority = _Priority() if _goes_before_cudnn else None

    def remove(self):
        flash_attn_2_cuda.sdpa_restore()
        if self.priority is not None:
            self.priority.restore()

    def put_before_cudnn(self, is_wanted):
        if is_wanted and self.priority is None:
            self.priority = _Priority()
        elif not is_wanted and self.priority is not None:
            self.priority.restore()
            self.priority = None


_handle = None  # the last one; the one that PyTorch keeps, if this package is active


def _make_handle():
    global _handle
    _handle = _Handle()
    return _handle


_HAS_LIST = hasattr(torchs, "register_flash_attention_impl")  # since torch 2.10
if _HAS_LIST:
    torchs.register_flash_attention_impl(NAME, register_fn=_make_handle)


def is_active() -> bool:
    return _HAS_LIST and torchs.current_flash_attention_impl() == NAME


def _check(before_cudnn):
    if not _HAS_LIST:
        raise RuntimeError(
            "flash_attn.register and flash_attn.sdpa need torch 2.10, the first release that keeps a list of attention "
            f"implementations; this is torch {torch.__version__}"
        )
    if not isinstance(before_cudnn, bool):
        raise TypeError(f"before_cudnn must be a bool; it is {before_cudnn!r}")


def _activate(name, before_cudnn=True):
    global _goes_before_cudnn
    _restore()
    _goes_before_cudnn = before_cudnn
    try:
        torchs.activate_flash_attention_impl(name)
    finally:
        _goes_before_cudnn = True


def _restore():
    if torchs.current_flash_attention_impl() is None:
        return
    if hasattr(torchs, "restore_flash_attention_impl"):
        torchs.restore_flash_attention_impl()
        return
    from torch.nn.attention import _registry  # PyTorch 2.10 cannot restore

    _registry._FLASH_ATTENTION_ACTIVE[1].remove()
    _registry._FLASH_ATTENTION_ACTIVE = None


# ---- what users call ------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_open = {}  # the before_cudnn of each context, in the order in which they were entered
_before, _order_before = None, True  # outside of all contexts: the implementation, and its before_cudnn


def register(*, before_cudnn: bool = True) -> None:
    """Runs PyTorch's ``scaled_dot_product_attention`` on the kernels of this package, from now on and in all threads.

    It is ``torch.nn.attention.activate_flash_attention_impl("flash_attn")``, and
    ``torch.nn.attention.restore_flash_attention_impl()`` undoes it. ``with flash_attn.sdpa():`` does both. On the CPU
    the calls run here that PyTorch's fused kernel would take, with masks and biases. On a GPU those run here that
    PyTorch's flash attention would take, and ``torch.nn.attention.varlen.varlen_attn``. Results, gradients, strides
    and errors are PyTorch's. A call that does not fit goes to PyTorch's own kernel. ``flash_attn.explain`` says which
    kernel a call takes, and why.

    Args:
        before_cudnn: on Hopper and Blackwell PyTorch prefers cuDNN's attention. True puts flash attention first. The
            last call decides, also for the contexts that are open.

    >>> register()
    >>> q = torch.randn(1, 4, 6, 16)
    >>> torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).shape
    torch.Size([1, 4, 6, 16])
    >>> torch.nn.attention.restore_flash_attention_impl()
    """
    global _before, _order_before
    _check(before_cudnn)
    with _lock:
        _activate(NAME, before_cudnn)
        _before, _order_before = NAME, before_cudnn
        _open.update(dict.fromkeys(_open, before_cudnn))


@contextlib.contextmanager
def sdpa(*, before_cudnn: bool = True) -> Iterator[None]:
    """A context in which PyTorch's ``scaled_dot_product_attention`` runs on the kernels of this package.

    The switch is one for all threads, as PyTorch's is. Contexts may be nested, and threads may enter them at the same
    time: the last one to leave restores what was active before the first one. A backward should run in a context too;
    outside, PyTorch's own kernel computes it from the same saved tensors.

    Args:
        before_cudnn: as for ``register``. Of the open contexts, the one that was entered last decides. The order of
            the others comes back when it ends.

    >>> q = torch.randn(1, 4, 6, 16)
    >>> with sdpa():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> out.shape
    torch.Size([1, 4, 6, 16])
    """
    global _before, _order_before
    _check(before_cudnn)
    context = object()
    with _lock:
        if not _open:
            _before = torchs.current_flash_attention_impl()
            _order_before = is_active() and _handle.priority is not None
        if is_active():
            _handle.put_before_cudnn(before_cudnn)
        else:
            _activate(NAME, before_cudnn)
        _open[context] = before_cudnn
    try:
        yield
    finally:
        with _lock:
            del _open[context]
            if not is_active():
                pass
            elif _open or _before == NAME:
                _handle.put_before_cudnn(next(reversed(_open.values()), _order_before))
            else:
                _restore() if _before is None else _activate(_before)
