"""The cost of a call on the host, beside PyTorch's own attention. The problem is so small that little else remains.

    python benchmarks/bench_host.py                 the CPU, and a GPU where there is one
    python benchmarks/bench_host.py --device cuda
    python benchmarks/bench_host.py --only sdpa     calls whose names contain this regular expression

Each call runs under no_grad. Calls with gradients also run with tensors that need gradients, and then their backward:

    direct_attention         the function of the extension where flash_attn_func ends
    flash_attn_func          the public functions
    ..
    _flash_attn_forward      the private function that clients call
    torch.ops.flash_attn._flash_attn_forward
                             the op of the same name, with its autograd formula
    sdpa                     torch.nn.functional.scaled_dot_product_attention
    sdpa, registered         the same in flash_attn.sdpa(), entered once for each batch of calls
    flex_attention           with nothing, and with mods; a closure is made again for each call
    flash_attn_func, attn_bias
                             the options that upstream lacks, dense and packed
    two allocations          out and softmax_lse, nothing else

One round times a batch of each call, in random order. A figure is the median over the rounds, in microseconds for one
call. On a GPU the clock stops before the host waits for the device. There is one CPU thread.

Writes host.csv to the folder --out, beside the rows of other machines.
"""

import argparse
import contextlib
import platform
import random
import re
import time
from statistics import median

import flash_attn_2_cuda
import torch
import torch.nn.functional as F
from _results import add_out, need_gpu, save

from flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    sdpa,
)
from flash_attn._measure import machine
from flash_attn.flash_attn_interface import _flash_attn_forward
from flash_attn.flex_attention import create_block_mask, flex_attention

SHAPES = {"cpu": (1, 16, 1, 16), "cuda": (1, 64, 1, 64)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
REGISTERED = "sdpa, registered"


def calls_on(device, needs_grad):
    shape = SHAPES[device]
    q, k, v = (torch.randn(shape, device=device, dtype=DTYPES[device], requires_grad=needs_grad) for _ in range(3))
    q_rows, k_rows, v_rows = (x.detach()[0].requires_grad_(needs_grad) for x in (q, k, v))
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
    one_query = q.detach()[:, :1]
    n = shape[1]
    cu = torch.tensor([0, n], dtype=torch.int32, device=device)
    used = torch.tensor([n], dtype=torch.int32, device=device)
    scale = shape[-1] ** -0.5
    raw = (0.0, scale, False, -1, -1, 0.0, None, False)
    raw_op = torch.ops.flash_attn._flash_attn_forward.default
    calls = {
        **flex_calls(q_heads, k_heads, v_heads),
        **option_calls(q, k, v),
        **packed_option_calls(q_rows, k_rows, v_rows, cu),
        "flash_attn_func": lambda: flash_attn_func(q, k, v),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(q_rows, k_rows, v_rows, cu, cu, n, n),
        "torch.ops.flash_attn._flash_attn_forward": lambda: raw_op(q, k, v, *raw),
        "sdpa": lambda: F.scaled_dot_product_attention(q_heads, k_heads, v_heads),
        REGISTERED: lambda: F.scaled_dot_product_attention(q_heads, k_heads, v_heads),
    }
    if needs_grad:
        return calls
    return {
        "direct_attention": lambda: flash_attn_2_cuda.direct_attention(
            q, k, v, 0.0, None, False, (-1, -1), 0.0, None, False, False
        ),
        **calls,
        "_flash_attn_forward": lambda: _flash_attn_forward(q, k, v, *raw),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(one_query, k, v, cache_seqlens=used),
        "flash_attn_with_kvcache, a number": lambda: flash_attn_with_kvcache(one_query, k, v, cache_seqlens=n),
        "two allocations": lambda: (
            torch.empty_like(q),
            torch.empty(1, 1, n, device=device, dtype=torch.float32),
        ),
    }


def flex_calls(q, k, v):
    h, n, device, needs_grad = q.shape[1], q.shape[2], q.device, q.requires_grad
    slopes, document = torch.full((h,), 0.5, device=device), torch.arange(n, device=device) // 5
    table = torch.zeros(h, n, device=device, requires_grad=needs_grad)

    def causal(b, h, i, j):
        return i >= j

    def documents(b, h, i, j):
        return (document[i] == document[j]) & (i >= j)

    def alibi(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    def with_closure():
        captured, factor = slopes, 2

        def mod(score, b, h, i, j):
            return score + captured[h] * (j - i) * factor

        return mod

    masks = {mod: create_block_mask(mod, None, None, n, n, device) for mod in (causal, documents)}
    return {
        "flex_attention": lambda: flex_attention(q, k, v),
        "flex_attention, score_mod": lambda: flex_attention(q, k, v, alibi),
        "flex_attention, a closure": lambda: flex_attention(q, k, v, with_closure()),
        "flex_attention, a table": lambda: flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, j]),
        "flex_attention, causal BlockMask": lambda: flex_attention(q, k, v, block_mask=masks[causal]),
        "flex_attention, documents": lambda: flex_attention(q, k, v, block_mask=masks[documents]),
        "flex_attention, both": lambda: flex_attention(q, k, v, with_closure(), masks[documents]),
    }


def option_calls(q, k, v):
    n, h = q.shape[1:3]
    bias = torch.zeros(1, 1, n, n, device=q.device, requires_grad=q.requires_grad)
    mask, sinks = torch.ones(n, n, dtype=torch.bool, device=q.device), torch.zeros(h, device=q.device)
    qkv = torch.stack([x.detach() for x in (q, k, v)], 2).requires_grad_(q.requires_grad)
    return {
        "flash_attn_func, attn_bias": lambda: flash_attn_func(q, k, v, attn_bias=bias),
        "flash_attn_func, attn_mask": lambda: flash_attn_func(q, k, v, attn_mask=mask),
        "flash_attn_func, sinks": lambda: flash_attn_func(q, k, v, sinks=sinks),
        "flash_attn_func, sinks and attn_bias": lambda: flash_attn_func(q, k, v, sinks=sinks, attn_bias=bias),
        "flash_attn_func, return_lse": lambda: flash_attn_func(q, k, v, return_lse=True),
        "flash_attn_func, return_max_logits": lambda: flash_attn_func(q, k, v, return_max_logits=True),
        "flash_attn_qkvpacked_func, attn_bias": lambda: flash_attn_qkvpacked_func(qkv, attn_bias=bias),
    }


def packed_option_calls(q, k, v, cu):
    n, h = q.shape[:2]
    bias = torch.zeros(1, 1, n, n, device=q.device, requires_grad=q.requires_grad)
    mask, sinks = torch.ones(n, n, dtype=torch.bool, device=q.device), torch.zeros(h, device=q.device)
    packed = q, k, v, cu, cu, n, n
    return {
        "flash_attn_varlen_func, attn_bias": lambda: flash_attn_varlen_func(*packed, attn_bias=bias),
        "flash_attn_varlen_func, attn_mask": lambda: flash_attn_varlen_func(*packed, attn_mask=mask),
        "flash_attn_varlen_func, sinks": lambda: flash_attn_varlen_func(*packed, sinks=sinks),
    }


def backwards_of(calls):
    """The backward of each call, alone. The tensors of a call are the leaves of its results."""

    def backward_of(call):
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        dout = torch.randn_like(out)
        inputs = [x for x in leaves_of(out.grad_fn) if x.requires_grad]
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return {name: backward_of(call) for name, call in calls.items()}


def leaves_of(node):
    """The leaf tensors below a node of the autograd graph."""
    if hasattr(node, "variable"):
        return [node.variable]
    return [leaf for parent, _ in node.next_functions if parent is not None for leaf in leaves_of(parent)]


def that_run(calls):
    for name, call in list(calls.items()):
        try:
            call()
        except RuntimeError as error:
            print(f"{name} is left out: {error}")
            del calls[name]
    return calls


def microseconds(calls, device, rounds, batch):
    times, order, rng = {name: [] for name in calls}, list(calls.items()), random.Random(0)
    for i in range(rounds + 1):
        rng.shuffle(order)
        for name, call in order:
            with sdpa() if name == REGISTERED else contextlib.nullcontext():
                start = time.perf_counter()
                for _ in range(batch):
                    call()
                elapsed = time.perf_counter() - start
            if device == "cuda":
                torch.cuda.synchronize()
            if i > 0:  # the first round is a warm-up
                times[name].append(elapsed / batch * 1e6)
    return {name: median(each) for name, each in times.items()}


def rows_of(device, options):
    where = machine()
    for mode in ("no_grad", "grad", "backward"):
        with torch.set_grad_enabled(mode != "no_grad"):
            calls = calls_on(device, mode != "no_grad")
            calls = that_run({name: call for name, call in calls.items() if re.search(f"{options.only}|^sdpa$", name)})
            calls = backwards_of(calls) if mode == "backward" else calls
            found = microseconds(calls, device, options.rounds, options.batch)
        for name, us in found.items():
            yield {
                "date": where["date"],
                "machine": torch.cuda.get_device_name() if device == "cuda" else where["cpu"],
                "cpu": where["cpu"],
                "python": platform.python_version(),
                "torch": where["torch"],
                "flash_attn": where["flash_attn"],
                "device": device,
                "mode": mode,
                "call": name,
                "us": round(us, 2),
                "sdpa_us": round(found["sdpa"], 2),
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", nargs="*", choices=SHAPES, default=["cpu", *["cuda"] * torch.cuda.is_available()])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--only", metavar="REGEX", default="", help="calls beside sdpa (default: all)")
    add_out(parser)
    options = parser.parse_args()
    if "cuda" in options.device:
        need_gpu()

    torch.set_num_threads(1)
    rows = []
    for device in options.device:
        for row in rows_of(device, options):
            rows.append(row)
            print(f"{device:5} {row['mode']:8} {row['call']:42} {row['us']:7.2f} us", flush=True)
    save(rows, options.out / "host.csv", list(rows[0]), ("machine", "device", "mode", "call"))


if __name__ == "__main__":
    main()
