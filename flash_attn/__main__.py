"""``python -m flash_attn``: what is installed, what this machine offers, a self-check, and a comparison with PyTorch.

Exit status 1 if the kernels differ from the reference, or from PyTorch, by more than rounding.
"""

import argparse
import os
import platform
import sys
from functools import partial
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F

import flash_attn
from flash_attn._measure import alternate, cpu_name, quotient
from flash_attn._ops import flash_attn_2_cuda

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = Table = None


def show(title, columns, rows):
    """Prints a table, as plain text if rich is not installed."""
    print(title)
    if Console:
        table = Table(box=box.SIMPLE_HEAD)
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(highlight=False).print(table)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print()
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)))
    print()


def facts():
    """Yields facts about the installation and the machine as (name, value)."""
    *others, best = flash_attn_2_cuda.cpu_isas()
    now = use_isa(best)
    yield "flash_attn", f"{flash_attn.__version__}  in {flash_attn.__path__[0]}"
    yield "torch", f"{torch.__version__}  on Python {platform.python_version()}"
    yield "processor", f"{cpu_name()}, {torch.get_num_threads()} threads"
    rest = [name for name in [*others, best] if name != now]
    yield "kernels", f"of {now}; this machine can also run those of {', '.join(rest)}"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        runs = "kernels of its own" if capability == (9, 0) else "special kernels in fp16 and bf16, generic kernels"
        if capability < (8, 0):
            runs = "too old for the kernels, its tensors raise an error"
        yield "GPU", f"{torch.cuda.get_device_name()}; {runs}"
    else:
        yield "GPU", "none that torch can use"


def use_isa(name):
    """Lowers the kernels to an instruction set, but never above FLASH_ATTN_CPU_ISA. Returns the set that is in use."""
    allowed = flash_attn_2_cuda.cpu_isas()
    limit = flash_attn_2_cuda.set_cpu_isa(os.environ.get("FLASH_ATTN_CPU_ISA") or None)
    return flash_attn_2_cuda.set_cpu_isa(min(name, limit, key=allowed.index))


def random(dtype, *shape):
    return torch.randn(shape).to(dtype).requires_grad_()


def dense(dtype, b=2, len_q=129, len_kv=129, h=4, h_kv=4, d=64, **options):
    """Returns out and the gradients of one call."""
    q, k, v = random(dtype, b, len_q, h, d), random(dtype, b, len_kv, h_kv, d), random(dtype, b, len_kv, h_kv, d)
    out = flash_attn.flash_attn_func(q, k, v, **options)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape).to(dtype))]


def packed(dtype, lengths=(1, 200, 0, 67), h=4, d=64):
    """Returns out and the gradients for packed sequences of different lengths."""
    q, k, v = (random(dtype, sum(lengths), h, d) for _ in range(3))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    return [out, *torch.autograd.grad(out, (q, k, v), torch.randn(out.shape).to(dtype))]


@torch.no_grad()
def cached(dtype, pages=7, page_size=16, h=4, h_kv=2, d=64):
    """Runs one step of decoding. Two sequences share a paged cache, which grows in place."""
    q, k, v = random(dtype, 2, 1, h, d), random(dtype, 2, 1, h_kv, d), random(dtype, 2, 1, h_kv, d)
    k_cache, v_cache = (random(dtype, pages, page_size, h_kv, d) for _ in range(2))
    block_table = torch.tensor([[5, 0, 3], [2, 6, -1]], dtype=torch.int32)
    lengths = torch.tensor([40, 17], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=block_table, causal=True
    )
    return [out, k_cache, v_cache]


CHECKS = {
    "full": partial(dense),
    "causal, head dimension 128": partial(dense, len_q=200, len_kv=331, d=128, causal=True),
    "window, grouped heads": partial(dense, len_q=257, len_kv=190, h=6, h_kv=2, d=80, window_size=(40, 7)),
    "softcap, ALiBi": partial(dense, h=2, h_kv=2, d=96, softcap=15.0, alibi_slopes=torch.tensor([0.5, 0.25])),
    "dropout": partial(dense, h_kv=1, d=32, dropout_p=0.17),
    "packed sequences": packed,
    "paged KV cache": cached,
}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


# The largest differences that rounding explains, in units of the dtype's precision. In 16 bits the limit is 4, because
# P and dS are rounded once more than in the reference. In fp32 the limit is 64, because sums of a few hundred terms run
# in another order.
LIMITS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


def largest_difference(results, expected, dtype):
    """Returns the largest max |result - expected| / max |expected|, in units of dtype's precision."""
    pairs = [(a.double(), b.double()) for a, b in zip(results, expected)]
    return max((a - b).abs().max() / b.abs().max() for a, b in pairs).item() / torch.finfo(dtype).eps


def verdict(found, limit):
    """Returns the cell of a table, and whether the difference is within its limit. NaN is not."""
    return f"{found:.2f} of {limit}{'' if found <= limit else ' WRONG'}", found <= limit


def difference(function, dtype, isa):
    """Returns the largest difference between kernel and reference of all results, in units of dtype's precision."""
    results = []
    for name in (isa, "reference"):
        use_isa(name)
        torch.manual_seed(0)  # the same inputs and the same dropout
        results.append(function(dtype))
    use_isa(isa)
    return largest_difference(*results, dtype)


def self_check(isa):
    """Compares kernels with the reference, forward and backward: the rows of a table, and whether all passed."""
    rows, all_passed = [], True
    for name, function in CHECKS.items():
        row = [name]
        for dtype in DTYPES:
            cell, passed = verdict(difference(function, dtype, isa), LIMITS[dtype])
            all_passed &= passed
            row.append(cell)
        rows.append(row)
    return rows, all_passed


def compare(dtype, causal, length=1024, heads=8, d=64):
    """Compares us with PyTorch's scaled_dot_product_attention: a row for the forward, a row for both passes.

    The speedup is the quotient of both medians. Beside it stand the least and the largest quotient of a round. Returns
    the rows, and whether the results agree. Both sides may be off by the limit of their dtype.
    """
    torch.manual_seed(2)
    q, k, v = (random(dtype, 1, length, heads, d) for _ in range(3))
    dout = torch.randn_like(q)

    def sdpa():
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    def flash():
        return flash_attn.flash_attn_func(q, k, v, causal=causal)

    def gradients(forward):
        return torch.autograd.grad(forward(), (q, k, v), dout)

    def row(name, functions, rounds):
        times = alternate(functions, rounds)
        theirs, ours = ([x] if isinstance(x, torch.Tensor) else x for x in (f() for f in functions))
        cell, passed = verdict(largest_difference(ours, theirs, dtype), 2 * LIMITS[dtype])
        milliseconds = [f"{1e3 * median(seconds):.1f}" for seconds in times]
        name = f"{DTYPES[dtype]}{' causal' if causal else ''}, {name}"
        rounds = [theirs / ours for theirs, ours in zip(*times)]
        spread = f"{min(rounds):.2f}-{max(rounds):.2f}"
        return [name, *milliseconds, f"{quotient(*milliseconds):.2f}x", spread, cell], passed

    with torch.no_grad():
        forward = row("fwd", [sdpa, flash], rounds=9)
    both = row("fwd+bwd", [partial(gradients, sdpa), partial(gradients, flash)], rounds=5)
    return [forward[0], both[0]], forward[1] and both[1]


def main():
    what = "Says what is installed and what this machine offers, checks the kernels and compares them with PyTorch's."
    also = "python -m flash_attn.build compiles GPU kernels before their first use."
    argparse.ArgumentParser(prog="python -m flash_attn", description=what, epilog=also).parse_args()
    isa = use_isa(flash_attn_2_cuda.cpu_isas()[-1])
    for name, value in facts():
        print(f"{name:<12}{value}")
    print(flush=True)

    print("The self-check and the comparison take about half a minute on two cores.\n", flush=True)
    rows, passed = self_check(isa)
    print(
        "Differences are divided by the largest expected value and by the dtype's epsilon (torch.finfo(dtype).eps).\n"
        'Behind "of" stands the largest difference that rounding explains.\n',
        flush=True,
    )
    title = "Self-check: largest difference from the reference, results and gradients"
    show(title, ["", *DTYPES.values()], rows)

    rows = []
    for done, (dtype, causal) in enumerate(product((torch.float32, torch.bfloat16), (False, True))):
        if sys.stdout.isatty():
            print(f"\rcomparing with PyTorch: {done} of 4", end="", flush=True)
        found, agree = compare(dtype, causal)
        rows, passed = rows + found, passed and agree
    if sys.stdout.isatty():
        print("\r", end="")
    title = (
        "Against PyTorch's scaled_dot_product_attention: [1, 1024, 8, 64], milliseconds, medians of alternating runs.\n"
        "The range is that of the speedup in single rounds."
    )
    show(title, ["", "SDPA", "flash", "speedup", "range", "difference"], rows)

    print("All checks passed." if passed else "A CHECK FAILED: please report this with the lines above.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
