"""Dense masks and biases on a GPU: attn_mask and attn_bias of flash_attn_func beside PyTorch's
scaled_dot_product_attention, forward and backward, in bf16.

    python benchmarks/bench_masks.py
    python benchmarks/bench_masks.py --short

    none         no mask
    padding      hides keys behind the end of a sequence
    causal       an array of queries and keys
    documents    eight of them, as such an array
    random       hides each pair with one half
    bias         of queries and keys, for all heads; "bias of heads" has one for each head

The kernels run in turns (_gpu.py). An error is the norm of the difference to fp64, divided by the norm of the exact
result. It is that of 64 queries of each head of the first sequence. Writes masks_<device>.csv to the folder --out, and
prints the table.

--short times thousands of short sequences without a mask, and FA2, too. "before" is our call without the kernels of
short sequences, and "copy" copies as many bytes as q, k, v and out have. Writes short_<device>.csv. With --masks it
times these sequences with masks, and with biases that want their gradients. Writes short_masks_<device>.csv.

--dropout P drops weights in ours and in PyTorch's backends, at BENCH_MASKS. "without" is our call without dropout, and
no error is computed. Writes dropout_masks_<device>.csv.
"""

import argparse
import random
from functools import partial

import torch
import torch.nn.functional as F
from _gpu import by_kernels, flusher, in_turns, machine, ready
from _results import add_out, command, need_gpu, save
from cases import BENCH_MASKS, BENCH_SHORT, BENCH_SHORT_MASKS
from tables import print_tables
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func

MASKS = "none", "padding", "causal", "documents", "random", "bias", "bias of heads"
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
BESIDE_SHORT = {**PEERS, "FA2": SDPBackend.FLASH_ATTENTION}
PROBLEM = "kernel", "pass", "mask", "b", "h", "length", "d"
COLUMNS = "date", "device", "torch", "rule", *PROBLEM, "ms", "error", "mhz", "command"
NUM_EXACT = 64


def mask_of(name, case):
    """A mask or a bias that broadcasts to the scores, or None."""
    length, place = case.len_q, torch.arange(case.len_q, device="cuda")
    of_pairs = (case.h if name == "bias of heads" else 1, length, length)
    if name.startswith("bias"):
        return torch.randn(1, *of_pairs, device="cuda", dtype=torch.bfloat16)
    lengths = torch.linspace(length / 2, length, case.b, device="cuda")[:, None, None, None]
    return {
        "none": lambda: None,
        "padding": lambda: place < lengths,
        "causal": lambda: (place[:, None] >= place)[None, None],
        "documents": lambda: (place[:, None] * 8 // length == place * 8 // length)[None, None],
        "random": lambda: torch.rand(case.b, *of_pairs, device="cuda") < 0.5,
    }[name]()


def ours(q, k, v, mask, dropout_p=0.0):
    named = {} if mask is None else {"attn_mask" if mask.dtype == torch.bool else "attn_bias": mask}
    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p, **named).transpose(1, 2)


def peer(backend, dropout_p=0.0):
    def call(q, k, v, mask):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p)

    return call


def is_learned(mask):
    return mask is not None and mask.requires_grad


def calls_of(function, tensors, mask, dout):
    """{pass: call}, and out."""
    with torch.no_grad():
        out = function(*tensors, mask)
    recorded, leaves = function(*tensors, mask), [*tensors, mask] if is_learned(mask) else tensors

    def forward():
        with torch.no_grad():
            return function(*tensors, mask)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(recorded, leaves, dout, retain_graph=True),
    }, out


def error_of(out, tensors, mask):
    rows = torch.linspace(0, out.shape[2] - 1, NUM_EXACT, device="cuda").long()
    q, k, v = (x.detach()[:1].double() for x in tensors)
    scores = q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        part = mask[:1] if mask.shape[2] == 1 else mask[:1, :, rows]
        scores = scores.masked_fill(~part, -torch.inf) if mask.dtype == torch.bool else scores + part.detach().double()
    want = scores.softmax(-1) @ v
    return ((out[:1, :, rows] - want).norm() / want.norm()).item()


def copy_of(tensors):
    """Reads two tensors and writes two."""
    bytes_of = torch.empty(2, *tensors[0].shape, device="cuda", dtype=tensors[0].dtype)
    target = torch.empty_like(bytes_of)
    return lambda: target.copy_(bytes_of)


def before(call):
    return by_kernels("decode,sm90,sm80,any", call)


def functions_of(options):
    """{kernel: function of q, k, v, mask}."""
    peers = {
        name: peer(backend, options.dropout) for name, backend in (BESIDE_SHORT if options.short else PEERS).items()
    }
    without = {"without": ours} if options.dropout else {}
    return {"ours": partial(ours, dropout_p=options.dropout), **without, **peers}


def run(options):
    flush, rng = flusher(), random.Random(0)
    short = BENCH_SHORT_MASKS if options.masks else BENCH_SHORT
    for case in short if options.short else BENCH_MASKS:
        for name in options.masks or (["none"] if options.short else MASKS):
            mask, shape = mask_of(name, case), (case.b, case.len_q, case.h, case.d)
            tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]
            *tensors, dout = tensors
            if options.short and name.startswith("bias"):
                mask.requires_grad_()
            tensors = [x.requires_grad_() for x in tensors]
            made, calls = {}, {}
            for kernel, function in functions_of(options).items():
                try:
                    made[kernel] = calls_of(function, tensors, mask, dout)
                except RuntimeError as error:
                    print(f"  {kernel}: {str(error).splitlines()[0]}")
            for kernel, (of, _) in made.items():
                calls.update({(kernel, step): lambda call=call: call for step, call in of.items()})
            if options.short:
                calls.update(
                    {("before", step): lambda call=call: before(call) for step, call in made["ours"][0].items()}
                )
                calls["copy", "forward"] = partial(copy_of, tensors)
            times, mhz = in_turns(ready(calls), options.seconds, flush, rng)
            compared = {} if options.dropout else made
            errors = {kernel: error_of(out, tensors, mask) for kernel, (_, out) in compared.items()}
            rows = []
            for (kernel, step), ms in times.items():
                problem = dict(zip(PROBLEM, (kernel, step, name, case.b, case.h, case.len_q, case.d)))
                figures = {
                    "ms": round(ms, 4),
                    "error": f"{errors[kernel]:.1e}" if kernel in errors else "",
                    "mhz": mhz,
                }
                rows.append({**machine(), "rule": "turns", "command": command(), **problem, **figures})
            words = (f"{row['kernel']} {row['pass']} {row['ms']:.3f}" for row in rows)
            print(case.b, case.h, case.len_q, case.d, name, "  ".join(words), flush=True)
            yield rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for all kernels of a problem together")
    parser.add_argument("--short", action="store_true", help="thousands of short sequences")
    parser.add_argument("--masks", nargs="+", choices=MASKS)
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="the probability to drop a weight")
    add_out(parser)
    options = parser.parse_args()
    if options.short and options.dropout:
        parser.error("--dropout goes without --short")
    need_gpu()
    kind = "masks" if not options.short else "short_masks" if options.masks else "short"
    kind = "dropout_masks" if options.dropout else kind
    path = options.out / f"{kind}_{machine()['device']}.csv"
    for rows in run(options):
        save(rows, path, COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, machine()["device"])
