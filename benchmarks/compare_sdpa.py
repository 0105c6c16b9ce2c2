"""Speed, memory and exactness of flash_attn_func beside PyTorch's backends of scaled_dot_product_attention and eager
attention, on the GPU if there is one, or on the CPU.

    python benchmarks/compare_sdpa.py                                    lengths 512 to 64k, forward and backward
    python benchmarks/compare_sdpa.py --device cpu --lengths 512 1024    part of it

On a GPU a problem has 16k tokens, or one sequence if it is longer, and 16 heads of 128 columns in bf16. On a CPU it has
one sequence and 4 heads of 64 columns in fp32. Every kernel gets the same q, k, v and dO, all N(0, 1).

    forward     out without gradients. MiB: the peak beyond the inputs.
    backward    dq, dk, dv of a finished forward. MiB: the peak of forward and backward together, beyond the inputs.

In every round each kernel runs once, in random order; a time is the median over the rounds that fill --seconds for each
kernel, and at least three. The first call of a kernel is not timed. The second tells how many rounds fit, and a kernel
whose call took more than --limit seconds is not measured at longer lengths: its cell says "too slow". A cell also says
"out of memory", or "none" if the backend does not take the problem. On a CPU a program that asks for too much memory
may be killed. So this program asks for no more than is free. A process keeps memory that it has freed, so on a CPU a
fresh process measures each peak.

Errors are the norm of the difference divided by the norm of the exact result, for out and dq of 64 queries of every
head, which fp64 computes by the formula.

Writes compare_<device>.csv to the folder --out, draws compare_<device>.svg beside it with matplotlib, and prints the
tables of docs/compare.md.
"""

import argparse
import contextlib
import ctypes
import datetime
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from _compare_tables import draw, tables_of
from _results import add_out, need_gpu, save
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func

LENGTHS = 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536
TOKENS, NUM_EXACT = 16384, 64
PASSES = "forward", "backward"
MIB = 2**20
CYCLES = 400_000  # of a GPU, while the host launches: about 0.2 ms
PROBLEM = "device", "kernel", "pass", "dtype", "b", "h", "d", "length", "causal"
COLUMNS = "date", *PROBLEM, "status", "ms", "tflops", "mib", "out_error", "dq_error", "command"


def ours(q, k, v, causal):
    return flash_attn_func(q, k, v, causal=causal)


def sdpa(backend):
    def call(q, k, v, causal):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return out.transpose(1, 2)

    return call


def eager(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


KERNELS = {
    "ours": ours,
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA math": sdpa(SDPBackend.MATH),
    "eager": eager,
}
ON_CPU = "ours", "SDPA flash", "SDPA math", "eager"


# ---- memory -------------------------------------------------------------------------------------------------------


def kib_of(path, name):
    """A number of a file under /proc."""
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise KeyError(name)


@contextlib.contextmanager
def no_more_than_free():
    """Asking for more memory than is free raises, as on a GPU. Linux would end the process instead."""
    import resource

    old = resource.getrlimit(resource.RLIMIT_AS)
    room = 1024 * (kib_of("/proc/self/status", "VmSize") + int(0.9 * kib_of("/proc/meminfo", "MemAvailable")))
    resource.setrlimit(resource.RLIMIT_AS, (room, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def peak_on_gpu(call):
    """MiB that a call takes beyond what is there, at most, and its seconds."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB, time.perf_counter() - start


def peak_here(call, small_call):
    """The same on a CPU, in a process that has not yet run the kernel. Freed memory stays with a process, and kernels
    keep some for the next call. The small call loads what a first call loads."""
    small_call()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    before, start = kib_of("/proc/self/status", "VmRSS"), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return max(0, kib_of("/proc/self/status", "VmHWM") - before) / 1024, seconds


def peak_on_cpu(name, which, tensors, causal):
    """``peak_here`` of a fresh process."""
    _, length, h, d = tensors[0].shape
    words = ["--peak-of", name, "--passes", which, "--lengths", length, "--heads", h, "--dim", d]
    words += ["--masks", "causal" if causal else "full", "--device", "cpu"]
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    mib, seconds = done.stdout.split()[-2:]
    return float(mib), float(seconds)


# ---- calls ----------------------------------------------------------------------------------------------------------


def forward(kernel, tensors, causal):
    q, k, v, _ = tensors

    def call():
        with torch.no_grad():
            return kernel(q, k, v, causal)

    return call


def step(kernel, tensors, causal):
    """Forward and backward: out, dq, dk, dv."""
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]

    def call():
        out = kernel(*leaves, causal)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return call


def backward(kernel, tensors, causal):
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = kernel(*leaves, causal)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def rows_of(q):
    """The queries of ``[b, length, h, d]`` that fp64 computes."""
    rows = torch.randperm(q.shape[1], generator=torch.Generator().manual_seed(0))[:NUM_EXACT]
    return rows.to(q.device)


def exact(tensors, causal):
    """out and dq ``[b, rows, h, d]`` of some queries, in fp64."""
    rows = rows_of(tensors[0])
    q, k, v, dout = (x.transpose(1, 2) for x in tensors)
    scale, outs, grads = q.shape[-1] ** -0.5, [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            q1, dout1 = q[b, h, rows].double(), dout[b, h, rows].double()
            k1, v1 = k[b, h].double(), v[b, h].double()
            scores = scale * q1 @ k1.mT
            if causal:
                hidden = torch.arange(k1.shape[0], device=q.device) > rows[:, None]
                scores.masked_fill_(hidden, -torch.inf)
            p = scores.softmax(-1)
            outs.append(p @ v1)
            ds = p * (dout1 @ v1.mT - (dout1 * outs[-1]).sum(-1, keepdim=True))
            grads.append(scale * ds @ k1)
    shape = q.shape[0], q.shape[1], len(rows), q.shape[-1]
    return [torch.stack(x).view(shape).transpose(1, 2) for x in (outs, grads)]


def error_of(found, wanted):
    """``wanted`` holds the rows of ``exact``."""
    found = found[:, rows_of(found)].double()
    return f"{((found - wanted).norm() / wanted.norm()).item():.2e}"


WHOLE = {"forward": forward, "backward": step}


def seconds_of(device, call):
    """The seconds of a call. A GPU waits first, so that its time has no time of the host."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- one problem ----------------------------------------------------------------------------------------------------


def why(error):
    """What the cell says. Other failures end the program."""
    text = str(error)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "allocate memory" in text:
        return "out of memory"
    if "No available kernel" in text or "No viable backend" in text:
        return "none"
    raise error


def compare(tensors, which, kernels, causal, slow, options, rng):
    """{kernel: {column: value}} of one problem and pass. ``slow`` are the kernels that a shorter length found slow."""
    device, found, calls, first = options.device, {}, {}, {}
    wanted = exact(tensors, causal)
    call_of = WHOLE[which]
    for name in rng.sample(kernels, len(kernels)):
        if name in slow:
            found[name] = {"status": "too slow"}
            continue
        try:
            whole = call_of(KERNELS[name], tensors, causal)
            results = whole() if which == "backward" else (whole(),)  # compiles kernels
            errors = dict(zip(("out_error", "dq_error"), (error_of(*x) for x in zip(results, wanted))))
            del results
            if device == "cuda":
                mib, first[name] = peak_on_gpu(whole)
            else:
                mib, first[name] = peak_on_cpu(name, which, tensors, causal)
            calls[name] = whole if which == "forward" else backward(KERNELS[name], tensors, causal)
            found[name] = {"status": "", "mib": round(mib, 1), **errors}
            seconds_of(device, calls[name])
        except (RuntimeError, MemoryError) as error:
            found[name] = {"status": why(error)}
            calls.pop(name, None)
            if device == "cuda":
                torch.cuda.empty_cache()
        if which == "backward" and name in calls and KERNELS[name] in (eager, KERNELS["SDPA math"]):
            found[name]["ms"] = time_alone(device, calls.pop(name), first[name], options.seconds)  # its graph is large
        if first.get(name, 0) > options.limit:
            slow.add(name)
    times = {name: [] for name in calls}
    rounds = max(3, min(200, int(options.seconds / max([first[name] for name in calls], default=1))))
    for _ in range(rounds if calls else 0):
        for name in rng.sample(list(calls), len(calls)):
            times[name].append(seconds_of(device, calls[name]))
    for name, of_kernel in times.items():
        found[name]["ms"] = 1000 * median(of_kernel)
    return found


def time_alone(device, call, first, seconds):
    rounds = max(3, min(200, int(seconds / first)))
    return 1000 * median(seconds_of(device, call) for _ in range(rounds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help="default: all that the device has")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["causal"])
    parser.add_argument("--heads", type=int, help="default: 16 on a GPU, 4 on a CPU")
    parser.add_argument("--dim", type=int, help="default: 128 on a GPU, 64 on a CPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kernel of a problem, about")
    parser.add_argument("--limit", type=float, default=20.0, help="a slower call is not repeated at longer lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-of", choices=KERNELS, help=argparse.SUPPRESS)  # for peak_on_cpu
    add_out(parser)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu:
        need_gpu()
    h, d = options.heads or (16 if on_gpu else 4), options.dim or (128 if on_gpu else 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    kernels = options.kernels or list(KERNELS if on_gpu else ON_CPU)
    if options.peak_of:
        (which,), (length,), (mask,) = options.passes, options.lengths, options.masks
        big, small = ([torch.randn(1, n, h, d) for _ in range(4)] for n in (length, 16))
        with no_more_than_free():
            calls = (WHOLE[which](KERNELS[options.peak_of], x, mask == "causal") for x in (big, small))
            print(*peak_here(*calls))
        return
    device = torch.cuda.get_device_name().replace(" ", "_").replace("/", "_") if on_gpu else "cpu"
    path, rng = options.out / f"compare_{device}.csv", random.Random(options.seed)
    rows = []
    with contextlib.nullcontext() if on_gpu else no_more_than_free():
        for mask in options.masks:
            slow = {which: set() for which in options.passes}
            for length in sorted(options.lengths):
                b, causal = (max(1, TOKENS // length) if on_gpu else 1), mask == "causal"
                torch.manual_seed(options.seed)
                tensors = [torch.randn(b, length, h, d, device=options.device).to(dtype) for _ in range(4)]
                for which in options.passes:
                    found = compare(tensors, which, kernels, causal, slow[which], options, rng)
                    products = 2 if which == "forward" else 5
                    flops = 2 * products * b * h * d * length**2 * (0.5 if causal else 1)
                    for name in kernels:
                        row = found[name]
                        if row.get("ms"):
                            row["tflops"] = f"{flops / row['ms'] / 1e9:.4g}"
                            row["ms"] = f"{row['ms']:.4g}"
                        problem = device, name, which, str(dtype).removeprefix("torch."), b, h, d, length, causal
                        today = datetime.date.today().isoformat()
                        rows.append({"date": today, **dict(zip(PROBLEM, problem)), **row})
                        print(mask, length, which, name, row, flush=True)
                del tensors
    everything = save(rows, path, COLUMNS, PROBLEM)
    draw(everything, path.with_suffix(".svg"))
    print("\n".join(tables_of(path.name, everything)))


if __name__ == "__main__":
    main()
