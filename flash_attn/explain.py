"""Explains which kernel an attention call would run, and why. The call is planned but not run."""

from dataclasses import dataclass, field
from typing import Optional

import torch

from flash_attn._ops import flash_attn_2_cuda


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
    is_dynamic: bool = False  # CTAs of a forward take their next work tile from a counter
    cluster: int = 0  # CTAs of a cluster, which share a head's keys and exchange sums; 0: sums go through memory
    lanes: int = 0  # decode: CTAs of a group, which read neighbouring heads side by side; 0: another kernel
    groups: int = 0  # decode: number of groups; with clusters: clusters of each key head
    has_low_launch: bool = False  # packed sequences of few rows have a launch of their own, which runs first
    workspace_bytes: int = 0
    any_order: bool = False  # backward: parts of dq are added in any order, and repeats differ by rounding
    ruled_out: list = field(default_factory=list)  # (kernel, reason) of each kernel that was ruled out
    refusal: str = ""  # reason why no kernel can run the call
    backward: Optional["Plan"] = None  # plan of the backward pass, if an input requires grad

    def __str__(self):
        lines = [f"{self.direction} on {self.device}: {self.kernel or self.refusal}"]
        if self.kernel:
            lines += [f"    instruction set  {self.isa}"] if self.isa else []
            lines += [f"    tile             {self.block_q} rows x {self.block_kv} keys"]
            lines[-1] += f", {self.tiles_per_task} tiles a task" if self.tiles_per_task else ""
            lines += [f"    threads          {self.threads}"] if self.threads else []
            lines += [
                f"    key splits       {self.num_splits or 'as many as it takes'}",
                *([f"    walked together  {self.group_heads} heads"] if self.group_heads else []),
                *(["    work tiles       from a counter"] if self.is_dynamic else []),
                *([f"    clusters of      {self.cluster}"] if self.cluster else []),
                *(
                    [f"    CTAs             {self.groups} groups of {self.lanes}"]
                    if self.lanes and not self.cluster
                    else []
                ),
                *(["    launches         2, the first for sequences of few rows"] if self.has_low_launch else []),
                f"    workspace        {self.workspace_bytes:,} bytes",
                *(["    dq               added in any order"] if self.any_order else []),
            ]
        lines += [f"    ruled out        {kernel}: {reason}" for kernel, reason in self.ruled_out]
        if self.backward is not None:
            lines.append(str(self.backward))
        return "\n".join(lines)


def _as_plan(found):
    direction = {"fwd": "forward", "bwd": "backward"}[found["pass"]]
    return Plan(direction, **{name: value for name, value in found.items() if name not in ("pass", "text")})


def _collect(function, args, kwargs, device):
    """Returns the plans of the call, forward first. The ops allocate their results and then stop.

    On a GPU a pass that no kernel can run ends the list with its refusal. On the CPU every pass has a kernel, and an
    error is an error of the call.
    """
    direction = "forward"
    flash_attn_2_cuda.plan_only(True)
    try:
        results = function(*args, **kwargs)
        out = results[0] if isinstance(results, (tuple, list)) else results
        if out.requires_grad:
            # The node of out runs the backward op in this thread. Earlier nodes of the graph are not touched.
            direction = "backward"
            out.grad_fn.apply(torch.empty_like(out))
        return [_as_plan(found) for found in flash_attn_2_cuda.take_plans()]
    except RuntimeError as error:
        if device is None:
            raise
        refused = Plan(direction, device, refusal=str(error))
        return [*(_as_plan(found) for found in flash_attn_2_cuda.take_plans()), refused]
    finally:
        flash_attn_2_cuda.plan_only(False)


def explain(function, *args, **kwargs):
    """Returns the plan of the call ``function(*args, **kwargs)``. The call is checked and planned but not run.

        print(flash_attn.explain(flash_attn_func, q, k, v, causal=True))

    Args:
        function: one of the attention functions of this package.
        args, kwargs: the arguments of the function, on the device in question. Nothing is written, not even a KV
            cache, and no random number is drawn.
    Returns:
        ``Plan`` of the forward. If an input requires grad, ``backward`` holds the plan of the backward. If a GPU cannot
        run a pass, the Plan has no kernel, and ``refusal`` gives the reason.
    Raises:
        TypeError: the call plans no attention.
        On the CPU, the errors of the call itself.
    """
    devices = (str(x.device) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_cuda)
    plans = _collect(function, args, kwargs, next(devices, None))
    if not plans:
        raise TypeError(f"explain: {getattr(function, '__name__', function)!r} plans no attention")
    # A call with attn_bias or the like has a plan before its own, of the op that checks the arguments.
    plan = [x for x in plans if x.direction == "forward"][-1]
    plan.backward = next((x for x in plans if x.direction == "backward"), None)
    return plan
