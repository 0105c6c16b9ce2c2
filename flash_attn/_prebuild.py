"""Compiles GPU kernels before their first use, and says where they are kept."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Union

import torch

from flash_attn._imagined import COMPILED, NOTED, SMS, WIDTHS, imagined_gpu, stand_in
from flash_attn._ops import flash_attn_2_cuda
from flash_attn._variants import choose, numbers_of


def kernel_root() -> Path:
    """Returns the folder that keeps compiled GPU kernels, as a ``pathlib.Path``.

    It is ``FLASH_ATTN_CACHE_DIR``, or ``flash_attn`` in the user's cache folder. The first compiled kernel makes it.
    ``python -m flash_attn.build --list`` lists its kernels.

    Raises:
        RuntimeError: there is no home folder, so compiled kernels are not kept.

    >>> kernel_root().is_absolute()
    True
    """
    folder = flash_attn_2_cuda.cuda_kernel_folder()
    if folder is None:
        raise RuntimeError("flash_attn: there is no home folder to keep compiled kernels in; set FLASH_ATTN_CACHE_DIR")
    return Path(folder)


def kept_kernels() -> list[tuple[str, int]]:
    """Returns [(name, bytes)] of the compiled kernels in kernel_root(), sorted by name.

    A kernel with the mods of a user has the hash of its mods at the end of its name. A kernel that several releases of
    NVRTC or versions of flash-attn have compiled comes several times.
    """
    files = [file for file in kernel_root().glob("*.cubin") if file.is_file()]
    return sorted((file.name.split("-")[0], file.stat().st_size) for file in files)


def prebuild(
    archs: Union[str, Sequence[str]] = ("sm_90a",),
    all_features: bool = False,
    progress: Optional[Callable[[int, int, str, bool], object]] = None,
) -> list[str]:
    """Compiles the kernels that the disk cache lacks.

    Args:
        archs: any of ``"sm_80"``, ``"sm_86"``, ``"sm_89"``, ``"sm_90a"`` (also ``"sm_90"``), ``"sm_100"``,
            ``"sm_103"``, ``"sm_120"``, ``"sm_121"``.
        all_features: also compile kernels for windows, softcap, ALiBi and dropout. For sm_90a also compile the generic
            kernels, which serve the calls that Hopper's own kernels do not take.
        progress: called after each kernel with (number done, number in all, name, whether it was compiled).
    Returns:
        The names of the kernels that were compiled.
    Raises:
        ValueError: there is no such architecture.
        RuntimeError: there is no NVRTC, a kernel does not compile, or the kernel cannot be kept.

    >>> names = prebuild(["sm_90a"])  # doctest: +SKIP
    >>> prebuild(["sm_1"])
    Traceback (most recent call last):
    ValueError: ...
    """
    kernels = choose(flash_attn_2_cuda, archs, all_features)
    compiled = []
    for done, (name, *variant) in enumerate(kernels, 1):
        is_new = flash_attn_2_cuda.build_cuda_kernel(*variant)
        if is_new:
            compiled.append(name)
        if progress:
            progress(done, len(kernels), name, is_new)
    return compiled


class Kernel(NamedTuple):
    """A kernel that a call loads on a GPU."""

    name: str  # ends with the hash of the user's mods, if the kernel has mods
    arch: int  # compute capability: 90 is 9.0
    key: str  # hash of source and options; its file in the cache is <name>-<key>-<compiler>.cubin
    was_there: bool  # the disk cache, or the package, had the kernel before
    is_compiled: bool  # the kernel was compiled now


def _tensors_of(x):
    """The tensors in tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors_of(part)


def _without_meta(x, device):
    """The same with stand-ins on the device for tensors on "meta"."""
    if isinstance(x, torch.Tensor):
        return stand_in(x, device) if x.is_meta else x
    if isinstance(x, dict):
        return type(x)((name, _without_meta(value, device)) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        return getattr(x, "_make", type(x))(_without_meta(value, device) for value in x)
    return x


def _leaves(tensors):
    """The leaves that the tensors were computed from, and that require grad."""
    leaves, seen, nodes = [], set(), [x.grad_fn for x in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _run_backward(results):
    """The backward of the first result alone, and of all together: gradients of lse may have other kernels."""
    outs = [x for x in _tensors_of(results) if x.grad_fn is not None]
    for some in (outs[:1], outs) if len(outs) > 1 else (outs,):
        leaves = _leaves(some)
        if leaves:
            gradients = [torch.empty_like(x) for x in some]
            torch.autograd.grad(some, leaves, gradients, retain_graph=True, allow_unused=True)


def _backwards_may_repeat():
    """A context in which compiled functions keep the buffers of their backward, as ``_run_backward`` needs."""
    from torch._functorch import config

    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else contextlib.nullcontext()


def prebuild_call(
    function: Callable[..., Any],
    *args: Any,
    archs: Union[str, Sequence[str]] = ("sm_90a",),
    compiles: bool = True,
    **kwargs: Any,
) -> list[Kernel]:
    """Compiles the kernels of the call ``function(*args, **kwargs)`` into the disk cache. No GPU is needed.

        query = torch.empty(1, 8, 4096, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
        flash_attn.prebuild_call(flex_attention, query, key, value, score_mod, block_mask, archs=["sm_90a"])

    The call is checked and planned as on a GPU of each architecture, mods are traced, and every kernel is compiled that
    the call would load there. If a result requires grad, so are the kernels of the backward. Nothing is computed. Few
    queries may take other tiles on GPUs with fewer multiprocessors. So Hopper's plans are those for 132, 114 and 78.

    Args:
        function: an attention function of this package, ``create_block_mask``, or a function that calls them, perhaps
            compiled by ``torch.compile``. What else it does is done on memory whose contents mean nothing.
        args, kwargs: its arguments. Tensors on "meta" have shape, strides and dtype, and take no memory. Tensors on the
            CPU and on a GPU will do, too. Block masks, and tensors that mods capture, may lie anywhere.
        archs: names like those of :func:`prebuild`.
        compiles: False only lists the kernels. Then no compiler is needed.
    Returns:
        A list of :class:`Kernel`, in the order of the launches.
    Raises:
        RuntimeError: there is no NVRTC, a kernel does not compile, or the kernel cannot be kept.
        ValueError: there is no such architecture.
        TypeError: the call asks for no kernel of a GPU.
        The errors of the call itself on such a GPU.

    >>> q = torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16, device="meta")
    >>> kernels = prebuild_call(flash_attn_func, q, q, q, causal=True, archs="sm_90a", compiles=False)
    >>> [kernel.arch for kernel in kernels]
    [90]
    """
    numbers = numbers_of(archs)
    device = next((x.device for x in _tensors_of((args, kwargs)) if not x.is_meta), torch.device("cpu"))
    args, kwargs = _without_meta((args, kwargs), device)
    kernels = {}
    for number in numbers:
        for sms in WIDTHS.get(number, (SMS[number],)):
            with imagined_gpu(number, COMPILED if compiles else NOTED, sms), _backwards_may_repeat():
                _run_backward(function(*args, **kwargs))
                found = flash_attn_2_cuda.asked_kernels()
            for name, arch, key, *rest in found:
                kernels.setdefault((name, arch, key), Kernel(name, arch, f"{key:016x}", *rest))
    if not kernels:
        raise TypeError(f"prebuild_call: {getattr(function, '__name__', function)!r} asks for no kernel of a GPU")
    return list(kernels.values())
