"""Measures time, profile and memory of one function of tensors with ``torch.utils.benchmark``.

The timing functions print if ``verbose`` and return (timer, measurement). ``grad`` is the gradient of the (first)
output, and is random by default.
"""

from typing import Any, Callable, Optional

import torch
import torch.utils.benchmark as benchmark
from torch import Tensor

__all__ = [
    "benchmark_all",
    "benchmark_backward",
    "benchmark_combined",
    "benchmark_forward",
    "benchmark_fwd_bwd",
    "benchmark_memory",
    "pytorch_profiler",
]

Timed = tuple[benchmark.Timer, benchmark.Measurement]


def benchmark_forward(
    fn: Callable[..., Any],
    *inputs: Any,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> Timed:
    """Times the forward pass.

    Args:
        fn, inputs, kwinputs: ``fn(*inputs, **kwinputs)`` is measured.
        repeats: number of runs.
        desc, verbose: with verbose, print the measurement behind a line that starts with desc.
        amp, amp_dtype: run under autocast with this dtype, on the device type of the first tensor of inputs.
    Returns:
        (timer, measurement) of ``torch.utils.benchmark``; ``measurement.mean`` is the seconds of one run.

    >>> timer, measured = benchmark_forward(torch.sin, torch.ones(8), repeats=3, verbose=False)
    >>> measured.mean > 0
    True
    """

    def forward():
        with _autocast(inputs, amp, amp_dtype):
            fn(*inputs, **kwinputs)

    return _time(forward, repeats, desc, "Forward", verbose)


def benchmark_backward(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Optional[Tensor] = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> Timed:
    """Times the backward pass. Gradients of the inputs are dropped before each run.

    Args:
        fn, inputs, kwinputs: ``fn(*inputs, **kwinputs)`` is measured.
        grad: gradient of the (first) output, of its shape; random by default.
        repeats: number of runs.
        desc, verbose: with verbose, print the measurement behind a line that starts with desc.
        amp, amp_dtype: run under autocast with this dtype, on the device type of the first tensor of inputs.
    Returns:
        (timer, measurement) of ``torch.utils.benchmark``; ``measurement.mean`` is the seconds of one run.
    Raises:
        RuntimeError: grad has another shape than the output.

    >>> x = torch.ones(8, requires_grad=True)
    >>> timer, measured = benchmark_backward(torch.sin, x, repeats=3, verbose=False)
    >>> measured.mean > 0
    True
    """
    y, grad = _output_and_grad(fn, inputs, kwinputs, grad, amp, amp_dtype)

    def backward():
        _drop_grads(inputs)
        y.backward(grad, retain_graph=True)

    return _time(backward, repeats, desc, "Backward", verbose)


def benchmark_combined(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Optional[Tensor] = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> Timed:
    """Times forward and backward passes together.

    Gradients of the inputs are dropped before each run. One more forward pass runs before the timing.

    Args:
        fn, inputs, kwinputs: ``fn(*inputs, **kwinputs)`` is measured.
        grad: gradient of the (first) output, of its shape; random by default.
        repeats: number of runs.
        desc, verbose: with verbose, print the measurement behind a line that starts with desc.
        amp, amp_dtype: run under autocast with this dtype, on the device type of the first tensor of inputs.
    Returns:
        (timer, measurement) of ``torch.utils.benchmark``; ``measurement.mean`` is the seconds of one run.
    Raises:
        RuntimeError: grad has another shape than the output.

    >>> x = torch.ones(8, requires_grad=True)
    >>> timer, measured = benchmark_combined(torch.sin, x, repeats=3, verbose=False)
    >>> measured.mean > 0
    True
    """
    _, grad = _output_and_grad(fn, inputs, kwinputs, grad, amp, amp_dtype)

    def both():
        _drop_grads(inputs)
        y, _ = _output_and_grad(fn, inputs, kwinputs, grad, amp, amp_dtype)
        y.backward(grad, retain_graph=True)

    return _time(both, repeats, desc, "Forward + Backward", verbose)


def benchmark_fwd_bwd(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Optional[Tensor] = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[Timed, Timed]:
    """Returns (timer, measurement) of the forward pass and of the backward pass.

    The arguments are those of ``benchmark_backward``, and the pairs are those of ``benchmark_forward`` and
    ``benchmark_backward``.
    Raises:
        RuntimeError: grad has another shape than the output.

    >>> x = torch.ones(8, requires_grad=True)
    >>> forward, backward = benchmark_fwd_bwd(torch.sin, x, repeats=3, verbose=False)
    >>> forward[1].mean > 0 and backward[1].mean > 0
    True
    """
    options = {"repeats": repeats, "desc": desc, "verbose": verbose, "amp": amp, "amp_dtype": amp_dtype, **kwinputs}
    return benchmark_forward(fn, *inputs, **options), benchmark_backward(fn, *inputs, grad=grad, **options)


def benchmark_all(
    fn: Callable[..., Any],
    *inputs: Any,
    grad: Optional[Tensor] = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[Timed, Timed, Timed]:
    """Returns (timer, measurement) of the forward pass, of the backward pass, and of both together.

    The arguments are those of ``benchmark_backward``, and the pairs are those of ``benchmark_forward``,
    ``benchmark_backward`` and ``benchmark_combined``.
    Raises:
        RuntimeError: grad has another shape than the output.

    >>> x = torch.ones(8, requires_grad=True)
    >>> [measured.mean > 0 for timer, measured in benchmark_all(torch.sin, x, repeats=3, verbose=False)]
    [True, True, True]
    """
    options = {"repeats": repeats, "desc": desc, "verbose": verbose, "amp": amp, "amp_dtype": amp_dtype, **kwinputs}
    return (
        benchmark_forward(fn, *inputs, **options),
        benchmark_backward(fn, *inputs, grad=grad, **options),
        benchmark_combined(fn, *inputs, grad=grad, **options),
    )


def pytorch_profiler(
    fn: Callable[..., Any],
    *inputs: Any,
    trace_filename: Optional[str] = None,
    backward: bool = False,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    cpu: bool = False,
    verbose: bool = True,
    **kwinputs: Any,
) -> None:
    """Profiles one call after 30 calls of warm-up, prints the costliest operators, and may write a Chrome trace.

    Args:
        fn, inputs, kwinputs: ``fn(*inputs, **kwinputs)`` is measured.
        trace_filename: file of the Chrome trace; None: no trace.
        backward: each call includes a backward pass, with a random gradient.
        amp, amp_dtype: as of ``benchmark_forward``.
        cpu: record the CPU, too. The CPU is always recorded if the first tensor of inputs is not on CUDA.
        verbose: print the table.

    >>> pytorch_profiler(torch.sin, torch.ones(8), cpu=True, verbose=False)
    """
    on_cuda = _device_type(inputs) == "cuda"
    grad = _output_and_grad(fn, inputs, kwinputs, None, amp, amp_dtype)[1] if backward else None

    def step():
        _drop_grads(inputs)
        with _autocast(inputs, amp, amp_dtype):
            y = fn(*inputs, **kwinputs)
        if backward:
            _first(y).backward(grad, retain_graph=True)

    for _ in range(30):
        step()
    activity = torch.profiler.ProfilerActivity
    activities = ([activity.CPU] if cpu or not on_cuda else []) + ([activity.CUDA] if on_cuda else [])
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step()
    if verbose:
        print(profile.key_averages().table(row_limit=50))
    if trace_filename is not None:
        profile.export_chrome_trace(trace_filename)


def benchmark_memory(
    fn: Callable[..., Any], *inputs: Any, desc: str = "", verbose: bool = True, **kwinputs: Any
) -> float:
    """Returns the peak CUDA memory of one call in GB (10^9 bytes).

    The peak is that of PyTorch's allocator on the current device, and includes the memory of the inputs and of other
    live tensors. fn is called as ``fn(*inputs, **kwinputs)``. desc starts the line that ``verbose`` prints.

    >>> gigabytes = benchmark_memory(torch.sin, torch.ones(8, device="cuda"), verbose=False)  # doctest: +SKIP
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fn(*inputs, **kwinputs)
    torch.cuda.synchronize()
    gigabytes = torch.cuda.max_memory_allocated() / 1e9
    if verbose:
        print(f"{desc} max memory: {gigabytes} GB")
    return gigabytes


def _time(fn, repeats, desc, what, verbose):
    timer = benchmark.Timer("fn()", globals={"fn": fn}, num_threads=torch.get_num_threads())
    measurement = timer.timeit(repeats)
    if verbose:
        print(f"{desc} - {what} pass")
        print(measurement)
    return timer, measurement


def _output_and_grad(fn, inputs, kwinputs, grad, amp, amp_dtype):
    with _autocast(inputs, amp, amp_dtype):
        y = _first(fn(*inputs, **kwinputs))
    if grad is None:
        grad = torch.randn_like(y)
    elif grad.shape != y.shape:
        raise RuntimeError(f"grad is {tuple(grad.shape)}, the output is {tuple(y.shape)}")
    return y, grad


def _first(y):
    return y[0] if isinstance(y, tuple) else y


def _device_type(inputs):
    return next((x.device.type for x in inputs if isinstance(x, torch.Tensor)), "cpu")


def _autocast(inputs, amp, amp_dtype):
    return torch.autocast(device_type=_device_type(inputs), dtype=amp_dtype, enabled=amp)


def _drop_grads(inputs):
    for x in inputs:
        if isinstance(x, torch.Tensor):
            x.grad = None
