"""Explains which kernel an attention call would run, and why. The call is planned but not run."""

import contextlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

import torch
from torch.overrides import TorchFunctionMode

from flash_attn import _sdpa
from flash_attn._ops import flash_attn_2_cuda


def _number(n, thing):
    return f"{n} {thing}{'' if n == 1 else 's'}"


@dataclass
class Plan:
    """The plan of one pass of a call. Printing shows one fact a line."""

    direction: str  # "forward" or "backward"
    device: str
    kernel: str = ""  # operator, instruction set, dtype, head dimension, tile; "" if no kernel can run the call
    isa: str = ""  # instruction set; "" on a GPU, where the kernel's name contains it
    block_q: int = 0  # rows of one tile
    block_kv: int = 0  # keys of one tile
    tiles_per_task: int = 0  # query tiles that share one packed block of keys
    threads: int = 0  # CPU threads
    num_splits: int = 0  # ranges of keys whose results are summed in order; 0: all CTAs get an equal share of the keys
    group_heads: int = 0  # heads that a GPU walks together, so that their keys stay in its L2; 0: not chosen
    tile_heads: int = 0  # query heads of one key head that share the work tiles of a GPU; 0: not chosen
    gathers: bool = False  # pages of a KV cache are copied side by side before the kernel runs
    aligns: bool = False  # the kernel runs on copies of tensors whose rows do not start at multiples of 16 bytes
    is_dynamic: bool = False  # CTAs of a forward take their next work tile from a counter
    cluster: int = 0  # CTAs of a cluster, which share a head's keys and exchange sums; 0: sums go through memory
    lanes: int = 0  # decode: CTAs of a group, which read neighbouring heads side by side; 0: another kernel
    groups: int = 0  # decode: number of groups; with clusters: clusters of each key head
    has_low_launch: bool = False  # packed sequences of few rows have a launch of their own, which runs first
    short_rows: int = 0  # packed: attn_bwd_short runs before, for sequences of up to so many tokens; 0: it does not
    workspace_bytes: int = 0
    any_order: bool = False  # backward: parts of dq are added in any order, and repeats differ by rounding
    ruled_out: list[tuple[str, str]] = field(default_factory=list)  # (kernel, reason) of each kernel that was ruled out
    refusal: str = ""  # reason why no kernel can run the call
    backward: Optional["Plan"] = None  # plan of the backward pass, if an input requires grad

    def __str__(self) -> str:
        lines = [f"{self.direction} on {self.device}: {self.kernel or self.refusal}"]
        if self.kernel:
            lines += [f"    instruction set  {self.isa}"] if self.isa else []
            lines += [f"    tile             {self.block_q} rows x {self.block_kv} keys"]
            lines[-1] += f", {_number(self.tiles_per_task, 'tile')} a task" if self.tiles_per_task else ""
            lines += [f"    threads          {self.threads}"] if self.threads else []
            lines += [
                f"    key splits       {self.num_splits or 'as many as it takes'}",
                *([f"    walked together  {_number(self.group_heads, 'head')}"] if self.group_heads else []),
                *([f"    in a work tile   {self.tile_heads} heads"] if self.tile_heads > 1 else []),
                *(["    pages            copied side by side before it runs"] if self.gathers else []),
                *(["    tensors          copied to rows of whole 16 bytes, and back"] if self.aligns else []),
                *(["    work tiles       from a counter"] if self.is_dynamic else []),
                *([f"    clusters of      {self.cluster}"] if self.cluster else []),
                *(
                    [f"    CTAs             {_number(self.groups, 'group')} of {self.lanes}"]
                    if self.lanes and not self.cluster
                    else []
                ),
                *(["    launches         2, the first for sequences of few rows"] if self.has_low_launch else []),
                *(
                    [f"    launches         attn_bwd_short before it, for sequences of up to {self.short_rows} tokens"]
                    if self.short_rows
                    else []
                ),
                f"    workspace        {self.workspace_bytes:,} bytes",
                *(["    dq               added in any order"] if self.any_order else []),
            ]
        lines += [f"    ruled out        {kernel}: {reason}" for kernel, reason in self.ruled_out]
        if self.backward is not None:
            lines.append(str(self.backward))
        return "\n".join(lines)


def _as_plan(found):
    direction = {"fwd": "forward", "bwd": "backward"}[found["pass"]]
    if found["refusal"]:
        return Plan(direction, found["device"], refusal=f"PyTorch's own kernel runs: {found['refusal']}")
    return Plan(direction, **{name: value for name, value in found.items() if name not in ("pass", "text")})


# ---- the calls of a function ---------------------------------------------------------------------------------------

_PACKAGE = os.path.dirname(__file__) + os.sep
_NOT_ATTENTION = tuple(_PACKAGE + name for name in ("modules", "ops", "layers", "losses"))
_TORCH_CALLS_FROM = tuple(os.path.join("torch", *path) for path in (("autograd",), ("_library",), ("_ops.py",)))
_NODES = re.compile(
    "_(Attended|AttendedWithAll|Attention|Transformed|Extended|Recorded|FlexAttention)Backward"
    "|GeneratedBackwardFor_flash_attn(?!__combine)"
    "|ScaledDotProductFlashAttention(ForCpu)?Backward|FlashAttentionBackward"
)


def _saves_for_attention():
    """Does an attention function of this package call what saves a tensor at the moment?"""
    frame = sys._getframe(2)
    while frame is not None and any(name in frame.f_code.co_filename for name in _TORCH_CALLS_FROM):
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    return name.startswith(_PACKAGE) and not name.startswith(_NOT_ATTENTION)


class _Forwards:
    """The plans of forwards, and which of them have a node of the graph. A node saves tensors after its forward."""

    def __init__(self):
        self.plans, self.with_node, self.is_function_running = [], [], True

    def take(self):
        self.plans += [_as_plan(found) for found in flash_attn_2_cuda.take_plans()]

    def pack(self, x):
        if _saves_for_attention():
            self.take()
            if self.plans and (not self.with_node or self.with_node[-1] is not self.plans[-1]):
                self.with_node.append(self.plans[-1])
        return x

    def unpack(self, x):
        """A backward inside of the function would add gradients of results that mean nothing to .grad."""
        if self.is_function_running:
            raise TypeError("explain plans the backward itself: pass a function that does not run a backward")
        return x


class _Sdpa(TorchFunctionMode):
    """Sees the calls of ``scaled_dot_product_attention`` that reach no kernel of this package."""

    def __init__(self, forwards):
        super().__init__()
        self.forwards = forwards

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        self.forwards.take()
        num = len(self.forwards.plans)
        results = function(*args, **kwargs)
        self.forwards.take()
        if len(self.forwards.plans) == num:
            self.forwards.plans.append(_plan_of_torch(*args, **kwargs))
        return results


def _plan_of_torch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The plan of a call that PyTorch's other attention functions take."""
    tensors = {"query": query, "key": key, "value": value}
    kernel, is_nested = "", any(x.is_nested for x in tensors.values())
    if not is_nested:
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        names = {int(backend.value): name for name, backend in torch.nn.attention.SDPBackend.__members__.items()}
        kernel = names.get(int(choice), "OTHER").lower() + " "
    reason = "the tensors are nested" if is_nested else _why_not(tensors, attn_mask, dropout_p, enable_gqa)
    because = f", because {reason}" if reason else ""
    return Plan("forward", query.device.type, refusal=f"PyTorch chooses its own {kernel}attention{because}")


def _why_not(tensors, attn_mask, dropout_p, enable_gqa):
    """Why PyTorch's flash attention, whose place this package takes, does not take a call; None: the reason is not
    known."""
    query, key, value = tensors.values()
    if not torch.backends.cuda.flash_sdp_enabled():
        return "flash attention is switched off (torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_flash_sdp)"
    if attn_mask is not None and attn_mask.requires_grad:
        return "attn_mask requires grad"
    if attn_mask is not None and query.is_cuda:
        return "there is attn_mask"
    if dropout_p > 0 and query.device.type == "cpu":
        return "there is dropout"
    for name, x in tensors.items():
        if x.dim() != 4:
            return f"{name} has {x.dim()} dimensions, not 4"
        if x.numel() == 0:
            return f"{name} is empty"
        if x.stride(-1) != 1:
            return f"the last dimension of {name} has a stride"
        if x.shape[0] != query.shape[0]:
            return f"{name} has another batch size than query"
        if x.shape[1] != query.shape[1] and not enable_gqa:
            return f"{name} has another number of heads than query, without enable_gqa"
        if x.shape[3] != query.shape[3]:
            return f"{name} has another head dimension than query"
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}"
    return None


def _tensors_of(x):
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors_of(part)


def _nodes_of(results):
    """The nodes of attention below the results, in the order of their forwards."""
    found, seen, nodes = [], set(), [x.grad_fn for x in _tensors_of(results)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _NODES.match(node.name()):
            found.append(node)
        nodes += [following for following, _ in node.next_functions]
    return sorted(found, key=lambda node: node._sequence_nr())


def _plan_backward(node):
    """Runs the backward of one node in this thread. Other nodes of the graph are not touched."""
    out, *others = node._input_metadata
    grad = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    node.apply(grad) if hasattr(node, "apply") else node(grad, *[None] * len(others))  # PyTorch's own have no apply
    return next((_as_plan(found) for found in flash_attn_2_cuda.take_plans()[::-1]), None)


def _collect(function, args, kwargs, device):
    """Returns the plans of the calls. The ops allocate their results and then stop.

    On a GPU a pass that no kernel can run has a refusal. On the CPU every pass has a kernel, and an error is an error
    of the call.
    """
    if flash_attn_2_cuda.only_plans():
        raise TypeError("explain is at work already: pass a function that does not call explain itself")
    forwards, backward_of = _Forwards(), None
    flash_attn_2_cuda.plan_only(True)
    try:
        sees_sdpa = _Sdpa(forwards) if _sdpa.is_active() else contextlib.nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(forwards.pack, forwards.unpack), sees_sdpa:
            results = function(*args, **kwargs)
        forwards.is_function_running = False
        forwards.take()
        for plan, node in zip(forwards.with_node[::-1], _nodes_of(results)[::-1]):
            backward_of = plan
            plan.backward = _plan_backward(node)
        return forwards.plans
    except RuntimeError as error:
        if "yet support saved tensor hooks" in str(error):
            raise TypeError(
                "explain plans no grad, vjp or jacrev of torch.func: pass the function of which they take the gradient"
            ) from None
        if device is None:
            raise
        forwards.take()
        if backward_of is None:
            return [*forwards.plans, Plan("forward", device, refusal=str(error))]
        backward_of.backward = Plan("backward", device, refusal=str(error))
        return forwards.plans
    finally:
        flash_attn_2_cuda.plan_only(False)


def _check_memory(function, tensors):
    """A plan is of a device, and tensors without memory lie on none."""
    from torch._subclasses.fake_tensor import FakeTensor

    for x in tensors:
        kind = "a fake tensor" if isinstance(x, FakeTensor) else "on device meta" if x.is_meta else None
        if kind is not None:
            raise TypeError(
                f"explain plans calls of tensors with memory; a tensor of shape {tuple(x.shape)} is {kind} "
                "(flash_attn.prebuild_call takes such tensors)"
            )


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Union[Plan, list[Plan]]:
    """Returns the plan of the call ``function(*args, **kwargs)``. The call is checked and planned but not run.

        print(flash_attn.explain(flash_attn_func, q, k, v, causal=True))
        print(*flash_attn.explain(model, x), sep="\\n")

    Args:
        function: an attention function of this package, or anything that calls one: a module, a lambda, a model. What
            else it does is done, with attention's results that mean nothing. In ``flash_attn.sdpa()``, and after
            ``flash_attn.register()``, PyTorch's ``scaled_dot_product_attention`` counts too.
        args, kwargs: the arguments of the function, on the device in question. Attention writes nothing, not even a KV
            cache, and draws no random number.
    Returns:
        ``Plan`` of the forward, or a list of them if the function calls attention several times. If an input requires
        grad, ``backward`` holds the plan of the backward, but not in ``torch.compile`` and ``torch.utils.checkpoint``,
        where it stays None. If a GPU cannot run a pass, or PyTorch's own kernel runs, the
        Plan has no kernel, and ``refusal`` gives the reason.
    Raises:
        TypeError: function is no function, the call plans no attention, runs a backward or explains a call itself, or
            a tensor is on device "meta" or fake.
        On the CPU, the errors of the call itself.

    >>> q = torch.randn(1, 128, 4, 64, requires_grad=True)
    >>> plan = explain(flash_attn_func, q, q, q, causal=True)
    >>> print(plan.direction, "on", plan.device, "and", plan.backward.direction)
    forward on cpu and backward
    """
    if not callable(function):
        raise TypeError("explain takes the function and its arguments: explain(flash_attn_func, q, k, v)")
    tensors = list(_tensors_of((args, kwargs)))
    if isinstance(function, torch.nn.Module):
        tensors += [*function.parameters(), *function.buffers()]
    device = next((str(x.device) for x in tensors if x.is_cuda), None)
    if device is None:
        _check_memory(function, tensors)
    plans = _collect(function, args, kwargs, device)
    if not plans:
        of_torch = "" if _sdpa.is_active() else (
            "; PyTorch's scaled_dot_product_attention counts after flash_attn.register() and in flash_attn.sdpa()"
        )  # fmt: skip
        raise TypeError(
            f"explain: {getattr(function, '__name__', None) or type(function).__name__!r} plans no attention (that of "
            f"tensors that are fake or on device meta does not count{of_torch})"
        )
    return plans[0] if len(plans) == 1 else plans
