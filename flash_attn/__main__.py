"""``python -m flash_attn``: what is installed, what this machine offers, a self-check, and a comparison with PyTorch.

Exit status 1 if the kernels and the reference differ by more than rounding.
"""

import platform
import sys
from statistics import median

import torch
import torch.nn.functional as F

import flash_attn
from flash_attn._measure import alternate, cpu_name, speedup
from flash_attn._ops import flash_attn_2_cuda

try:
    from rich.console import Console
    from rich.table import Table
except ImportError:
    Console = Table = None


def show(title, columns, rows):
    """Prints a table; plain text where rich is not installed."""
    if Console:
        table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
        for column in columns:
            table.add_column(column, justify="left" if column == columns[0] else "right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)))


def facts():
    """What is installed and what the machine offers, as lines of (name, value)."""
    isas = flash_attn_2_cuda.cpu_isas()
    yield "flash_attn", f"{flash_attn.__version__}  {flash_attn.__path__[0]}"
    yield "torch", f"{torch.__version__}   Python {platform.python_version()}"
    yield "processor", f"{cpu_name()}, {torch.get_num_threads()} threads"
    yield "kernels", f"{isas[-1]}   (also {', '.join(reversed(isas[:-1]))})"
    if torch.cuda.is_available():
        yield "GPU", f"{torch.cuda.get_device_name()}: this release has no kernels for it; CUDA tensors raise an error"
    else:
        yield "GPU", "none that torch can use"


# name, arguments of the call, (len_q, len_kv, h, h_kv, d)
CHECKS = [
    ("full", {}, (129, 129, 4, 4, 64)),
    ("causal", {"causal": True}, (200, 331, 4, 4, 128)),
    ("window, grouped heads", {"window_size": (40, 7)}, (257, 190, 6, 2, 80)),
    ("softcap, ALiBi", {"softcap": 15.0, "causal": True, "alibi_slopes": [0.5, 0.25]}, (150, 150, 2, 2, 96)),
    ("dropout", {"dropout_p": 0.17}, (140, 140, 4, 1, 32)),
]
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def call(inputs, options, isa=None):
    """out, dq, dk, dv of one forward and backward, with the kernels of `isa` (None: the best)."""
    q, k, v, dout = inputs
    flash_attn_2_cuda.set_cpu_isa(isa)
    try:
        torch.manual_seed(0)  # the same dropout
        out = flash_attn.flash_attn_func(q, k, v, **options)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]
    finally:
        flash_attn_2_cuda.set_cpu_isa(None)


def relative_difference(ours, reference):
    """max |a - b| / max |b|, the largest over pairs of tensors, in units of the dtype's precision."""
    worst = max((a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in zip(ours, reference))
    return worst.item() / torch.finfo(ours[0].dtype).eps


def check(name, options, sizes, dtype):
    """One case against the reference, as a row and whether it passed.

    Limits, in units of the dtype's precision: 4 in 16 bits, where P and dS are rounded once more than in the reference;
    64 in fp32, where sums of a few hundred terms run in another order.
    """
    len_q, len_kv, h, h_kv, d = sizes
    torch.manual_seed(1)
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"])
    q, dout = (torch.randn(2, len_q, h, d).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, len_kv, h_kv, d).to(dtype) for _ in range(2))
    inputs = [*(x.requires_grad_() for x in (q, k, v)), dout]
    difference = relative_difference(call(inputs, options), call(inputs, options, "reference"))
    limit = 64 if dtype is torch.float32 else 4
    return difference, difference <= limit


def self_check():
    """Kernels against the reference, forward and backward. Returns the rows of the table and whether all passed."""
    rows, all_passed = [], True
    for name, options, sizes in CHECKS:
        row = [name, "x".join(map(str, sizes))]
        for dtype in DTYPES:
            difference, passed = check(name, options, sizes, dtype)
            all_passed &= passed
            row.append(f"{difference:.2f} {'ok' if passed else 'WRONG'}")
        rows.append(row)
    return rows, all_passed


def compare(dtype, causal, length=1024, heads=8, d=64):
    """A row: time of PyTorch's scaled_dot_product_attention and ours, forward and forward + backward."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, length, heads, d).to(dtype).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)

    def sdpa():
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    def flash():
        return flash_attn.flash_attn_func(q, k, v, causal=causal)

    def with_backward(forward):
        return lambda: torch.autograd.grad(forward(), (q, k, v), dout)

    with torch.no_grad():
        difference = (sdpa().float() - flash().float()).abs().max().item()
        forward = alternate([sdpa, flash], rounds=7)
    both = alternate([with_backward(sdpa), with_backward(flash)], rounds=5)
    return [
        f"{DTYPES[dtype]}{' causal' if causal else ''}",
        *(f"{1e3 * median(seconds):.1f}" for seconds in forward),
        f"{speedup(*forward):.2f}x",
        *(f"{1e3 * median(seconds):.1f}" for seconds in both),
        f"{speedup(*both):.2f}x",
        f"{difference:.1e}",
    ]


def main():
    for name, value in facts():
        print(f"{name:<12}{value}")
    print()

    rows, passed = self_check()
    columns = ["Self-check", "len_q x len_kv x h x h_kv x d", *DTYPES.values()]
    show("Largest relative difference from the reference, out and gradients, in units of precision", columns, rows)

    rows = [compare(dtype, causal) for dtype in (torch.float32, torch.bfloat16) for causal in (False, True)]
    columns = [
        "1 x 1024 x 8 x 64",
        "SDPA ms",
        "flash ms",
        "forward",
        "SDPA ms",
        "flash ms",
        "with backward",
        "max diff",
    ]
    show("Against PyTorch's scaled_dot_product_attention (medians of alternating runs)", columns, rows)

    print("\nAll self-checks passed." if passed else "\nSELF-CHECK FAILED: please report this with the lines above.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
