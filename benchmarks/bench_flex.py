"""Programmable attention beside PyTorch's compiled flex_attention, on a CPU or on a GPU.

    python benchmarks/bench_flex.py                                          every case
    python benchmarks/bench_flex.py --device cuda --lengths 1024 4096 16384 --dims 64 128
    python benchmarks/bench_flex.py --cases causal window --lengths 1024
    python benchmarks/bench_flex.py --cases causal alibi table --fresh       first calls that find no kernel on the disk
    python benchmarks/bench_flex.py --cases alibi table --fresh --ours       without PyTorch's function

On a CPU the calls of a problem run one after the other, in a random order in every turn. A figure is the median over as
many turns as fill --seconds, five at least, after the first call of each. PyTorch's backward of flex_attention is
refused there, so only its forward is timed. scaled_dot_product_attention with a dense mask or bias stands beside ours.

On a GPU the rules are those of _gpu.py, in turns and each call alone, back to back. In turns the flush before a launch
writes 1 GiB, which takes longer than the host takes for a call: figures are the GPU's time.

The case sinks is a causal mask with a learned sink for each head: flash_attn_func of ours, and the output of PyTorch's
function times sigmoid(lse - sink).

TFLOPS count 4 d operations for each visible pair of query and key forward and 10 d backward. ``first_ms`` is the time
of the first call, with everything that is compiled in it. With --fresh the caches of kernels are empty folders, and
NVRTC's own cache is off. ``mask_ms`` is the time to make the block mask, the first time: on a CPU by our function, and
on a GPU by PyTorch's, because both kernels get its mask there. ``tiny_us`` is the host's time of a call with 16 queries
and 16 keys.

Writes flex_cpu.csv or flex_DEVICE.csv to the folder --out. A row replaces the older row of the same case.
"""

import argparse
import datetime
import math
import os
import random
import sys
import tempfile
import time
from statistics import median

if "--fresh" in sys.argv:
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # NOTE: later it has no effect (torch 2.11, CUDA 13)

import _gpu
import torch
import torch.nn.functional as F
from _results import add_out, command, need_gpu, save
from torch.nn.attention import flex_attention as theirs

from flash_attn import flash_attn_func
from flash_attn._measure import cpu_name
from flash_attn.flex_attention import create_block_mask, flex_attention

COLUMNS = ["date", "device", "torch", "threads", "case", "kernel", "pass", "dtype", "d", "b", "h", "length"]
KEY = ["device", "threads", "case", "kernel", "pass", "dtype", "d", "b", "h", "length", "rule"]
COLUMNS += ["rule", "visible", "ms", "tflops", "mhz", "watts", "first_ms", "mask_ms", "tiny_us", "command"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def see_past(b, h, q, kv):
    return q >= kv


def nothing(h, n, device):
    return None, None, []


def causal(h, n, device):
    return see_past, None, []


def document(h, n, device):
    ends = torch.randint(1, n, (11,), generator=torch.Generator().manual_seed(0)).sort().values
    of = torch.searchsorted(ends, torch.arange(n), right=True).to(device)
    return lambda b, h, q, kv: (of[q] == of[kv]) & (q >= kv), None, []


def window(h, n, device):
    return lambda b, h, q, kv: (q >= kv) & (q - kv < 1024), None, []


def neighbourhood(h, n, device):
    width, reach = 64, 8  # tokens of a row of an image, and how far they see

    def near(b, h, q, kv):
        return ((q // width - kv // width).abs() <= reach) & ((q % width - kv % width).abs() <= reach)

    return near, None, []


def softcap(h, n, device):
    return None, lambda score, b, h, q, kv: 30 * torch.tanh(score / 30), []


def alibi(h, n, device):
    slopes = 2.0 ** (-8 * torch.arange(1, h + 1, device=device) / h)
    return see_past, lambda score, b, h, q, kv: score - slopes[h] * (q - kv), []


def table(h, n, device):
    bias = torch.randn(h, 2 * n, device=device, requires_grad=True)
    return None, lambda score, b, h, q, kv: score + bias[h, q - kv + n], [bias]


def sinks(h, n, device):
    return see_past, None, [torch.zeros(h, device=device, requires_grad=True)]


CASES = {
    "none": nothing,
    "causal": causal,
    "document": document,
    "window": window,
    "neighbourhood": neighbourhood,
    "softcap": softcap,
    "alibi": alibi,
    "table": table,
    "sinks": sinks,
}


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call, device):
    synchronize(device)
    begin = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - begin, result


def indices(b, h, n, device):
    at = torch.arange(n, device=device)
    rows, heads = (torch.arange(size, device=device) for size in (b, h))
    return rows[:, None, None, None], heads[:, None, None], at[:, None], at


def count_visible(mask_mod, n, device):
    """Pairs of one head, a thousand queries at a time."""
    if mask_mod is None:
        return n * n
    at, zero = torch.arange(n, device=device), torch.zeros((), dtype=torch.long, device=device)
    return sum(int(mask_mod(zero, zero, part[:, None], at).sum()) for part in at.split(1000))


def dense_mask(mods, h, n, dtype, device):
    """The mask or bias for scaled_dot_product_attention; None where it would need the scores."""
    mask_mod, score_mod, _ = mods
    mask = None if mask_mod is None else mask_mod(*indices(1, h, n, device))
    if score_mod is None:
        return mask
    with torch.no_grad():
        bias = score_mod(torch.zeros(1, h, n, n, device=device), *indices(1, h, n, device))
    return (bias if mask is None else bias.masked_fill(~mask, -math.inf)).to(dtype)


def calls_of(case, mods, q, k, v, block_mask):
    """{kernel: forward}. On a CPU the dense peer is left out for softcap, which is no bias."""
    mask_mod, score_mod, _ = mods
    device = q.device.type
    torch._dynamo.reset()
    compiled = torch.compile(theirs.flex_attention, dynamic=False)
    qkv, their_score_mod = (q, k, v), score_mod
    if device == "cpu":  # flex_attention refuses tensors that require gradients, also under no_grad
        qkv = [x.detach() for x in qkv]
        _, their_score_mod, learned = CASES[case](q.shape[1], q.shape[2], device)
        for x in learned:
            x.requires_grad_(False)
    if case == "sinks":
        return sinks_calls(compiled, q, k, v, qkv, block_mask, mods[2][0])
    calls = {
        "flash_attn": lambda: flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask),
        "flex": lambda: compiled(*qkv, score_mod=their_score_mod, block_mask=block_mask),
    }
    if device == "cpu" and case != "softcap":
        mask = dense_mask(mods, q.shape[1], q.shape[2], q.dtype, device)
        calls["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return calls


def sinks_calls(compiled, q, k, v, qkv, block_mask, sink):
    def ours():
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(*rows, causal=True, sinks=sink).transpose(1, 2)

    def theirs_with_sinks():
        out, lse = compiled(*qkv, block_mask=block_mask, return_lse=True)
        return (out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1)).to(out.dtype)

    return {"flash_attn": ours, "flex": theirs_with_sinks}


def forward_only(call):
    def forward():
        with torch.no_grad():
            return call()

    return forward


def backward_of(call, leaves, dout):
    out = call()
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def first_calls(calls, device):
    """({name: call}, {name: milliseconds of the first call}) of those that work."""
    working, first = {}, {}
    for name, make in calls.items():
        try:
            call = make()
            first[name] = round(1000 * seconds_of(call, device)[0], 2)
            working[name] = call
        except Exception as error:  # the compiler raises a class of its own for each thing that it lacks
            print(f"  {' '.join(name)}: {(str(error) or type(error).__name__).splitlines()[0]}")
    return working, first


def times_of(calls, options, rng):
    """(name, {"ms" and what else is known}) of every call, by each rule of the device."""
    if options.device == "cuda":
        flush = _gpu.flusher(num_bytes=1 << 30)
        times, mhz = _gpu.in_turns(calls, options.seconds, flush, rng)
        yield from ((name, {"rule": "turns", "ms": ms, "mhz": mhz}) for name, ms in times.items())
        for name, call in rng.sample(list(calls.items()), len(calls)):
            yield name, {"rule": "sustained", **_gpu.alone(call, options.sustained_seconds)}
        return
    found = {name: [] for name in calls}
    begin = time.perf_counter()
    while calls and (len(next(iter(found.values()))) < 5 or time.perf_counter() - begin < options.seconds):
        for name, call in rng.sample(list(calls.items()), len(calls)):
            found[name].append(1000 * seconds_of(call, options.device)[0])
    yield from ((name, {"ms": median(times)}) for name, times in found.items())


def tiny_microseconds(make, h, d, dtype, device, times=200):
    """The host's time of one forward with 16 queries and 16 keys, without waiting for a GPU."""
    mask_mod, score_mod, _ = make(h, 16, device)
    q, k, v = (torch.randn(1, h, 16, d, device=device, dtype=dtype) for _ in range(3))
    block_mask = block_mask_of(mask_mod, 16, device)
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask)
        found.append(1e6 * (time.perf_counter() - begin))
    synchronize(device)
    return round(median(found), 1)


def block_mask_of(mask_mod, n, device):
    make = create_block_mask if device == "cpu" else theirs.create_block_mask
    return mask_mod and make(mask_mod, None, None, n, n, device=device)


def measure(case, n, d, options, base, rng):
    """The rows of one problem."""
    device, dtype, b, h = options.device, DTYPES[options.dtype], options.batch, options.heads
    mods = mask_mod, _, learned = CASES[case](h, n, device)
    q, k, v, dout = (torch.randn(b, h, n, d, device=device, dtype=dtype) for _ in range(4))
    leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), *learned]
    took, block_mask = seconds_of(lambda: block_mask_of(mask_mod, n, device), device)
    visible = count_visible(mask_mod, n, device)
    makes = {}
    for name, call in calls_of(case, mods, q, k, v, block_mask).items():
        if options.ours and name != "flash_attn":
            continue
        makes[name, "fwd"] = lambda call=call: forward_only(call)
        if device == "cuda" or name == "flash_attn" or (name == "sdpa" and not learned):
            makes[name, "bwd"] = lambda call=call: backward_of(call, leaves, dout)
    calls, first = first_calls(makes, device)
    tiny = None if case == "sinks" else tiny_microseconds(CASES[case], h, d, dtype, device)
    for (name, which), found in times_of(calls, options, rng):
        operations = (4 if which == "fwd" else 10) * d * b * h * visible
        row = {**base, "case": case, "kernel": name, "pass": which, "dtype": options.dtype, "d": d, "b": b, "h": h}
        row.update(length=n, visible=round(visible / n**2, 4), first_ms=first[name, which], **found)
        row.update(ms=round(found["ms"], 4), tflops=float(f"{operations / found['ms'] / 1e9:.4g}"))
        if name == "flash_attn" and which == "fwd":
            row.update(mask_ms=round(1000 * took, 3), tiny_us=tiny)
        yield row


def empty_the_caches():
    """For this process. NVRTC's cubins are in a cache of the driver, which was turned off before torch came."""
    folder = tempfile.mkdtemp(prefix="bench_flex_")
    for name in ("FLASH_ATTN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.path.join(folder, name)
        os.mkdir(os.environ[name], mode=0o700)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=(1024, 4096))
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128))
    parser.add_argument("--dtype", default=None, choices=DTYPES, help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="in turns: all calls of a problem together")
    parser.add_argument("--sustained-seconds", type=float, default=0.5, help="of each call alone, on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="of the random orders and of the inputs")
    parser.add_argument("--fresh", action="store_true", help="with empty caches of kernels, for first_ms")
    parser.add_argument("--alone", "--ours", dest="ours", action="store_true", help="our function alone")
    add_out(parser)
    options = parser.parse_args()
    if options.fresh:
        empty_the_caches()
    if options.device == "cuda":
        need_gpu()
    options.dtype = options.dtype or ("fp32" if options.device == "cpu" else "bf16")
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    on_cpu = options.device == "cpu"
    device = cpu_name() if on_cpu else torch.cuda.get_device_name().replace(" ", "_")
    base = {"date": datetime.date.today().isoformat(), "device": device, "torch": torch.__version__}
    base.update(threads=torch.get_num_threads() if options.device == "cpu" else "", command=command())
    path = options.out / ("flex_cpu.csv" if on_cpu else f"flex_{device.replace('/', '_')}.csv")
    for case in options.cases:
        for n in options.lengths:
            for d in options.dims:
                rows = list(measure(case, n, d, options, base, rng))
                save(rows, path, COLUMNS, KEY)
                shown = "kernel", "pass", "rule", "ms", "tflops"
                figures = [" ".join(str(row.get(name, "")) for name in shown) for row in rows]
                print(f"{case:9} length {n:6} d {d:3}  {'  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
