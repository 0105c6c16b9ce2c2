"""How exact attention on a GPU is: relative errors of out, dq, dk and dv against fp64, beside cuDNN and PyTorch's FA2.

    python benchmarks/bench_exactness.py               every case: less than a minute
    python benchmarks/bench_exactness.py --dims 128 --dtypes bf16

An error is the norm of the difference divided by the norm of the fp64 tensor, with b 1, h 4 and length --length. Every
kernel gets the same q, k, v and dO, all N(0, 1) and rounded to the dtype. fp64 gets these rounded tensors. Inputs:

    N(0,1)               scale 1 / sqrt(d)
    scores x 4           scale 4 / sqrt(d)
    one key dominates    row i has the direction of a key that the row sees, drawn at random, and a score of 40 nats
                         with this key: its weight is nearly 1. out and dv only, because dq and dk are nearly zero.

Writes exactness_<device>.csv to the folder --out and prints the table.
"""

import argparse
import random
from itertools import product

import torch
import torch.nn.functional as F
from _gpu import machine
from _results import add_out, command, need_gpu, save
from tables import print_tables
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DOMINATED = "one key dominates"
INPUTS = "N(0,1)", "scores x 4", DOMINATED
TENSORS = "out", "dq", "dk", "dv"
PROBLEM = "kernel", "inputs", "dtype", "b", "h", "length", "d", "causal"
COLUMNS = "date", "device", "torch", "cudnn", *PROBLEM, *TENSORS, "command"


def tensors(inputs, dtype, shape, causal, seed):
    """q, k, v, dO [b, s, h, d] and the scale."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v, dout = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(4))
    scale = (4 if inputs == "scores x 4" else 1) * shape[-1] ** -0.5
    if inputs == DOMINATED:
        length = shape[1]
        seen = torch.arange(1, length + 1, device="cuda") if causal else torch.full((length,), length, device="cuda")
        key = (torch.rand(length, device="cuda", generator=generator) * seen).long()
        one = k[:, key].float()
        q = (40 / scale * one / (one * one).sum(-1, keepdim=True)).to(dtype)
    return (q, k, v, dout), scale


def exact(q, k, v, dout, scale, causal):
    """out, dq, dk, dv in fp64, by the formulas."""
    q, k, v, dout = (x.double().transpose(1, 2) for x in (q, k, v, dout))
    scores = scale * q @ k.mT
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    p = scores.softmax(-1)
    out = p @ v
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return [x.transpose(1, 2) for x in (out, scale * ds @ k, scale * ds.mT @ q, p.mT @ dout)]


def ours(q, k, v, scale, causal, **options):
    return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, **options)


def sdpa(backend):
    def call(q, k, v, scale, causal):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=scale).transpose(1, 2)

    return call


KERNELS = {
    "ours": ours,
    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "FA2": sdpa(SDPBackend.FLASH_ATTENTION),
}


def results(kernel, q, k, v, dout, scale, causal):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = kernel(*leaves, scale, causal)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def errors(found, wanted):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, wanted)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--inputs", nargs="+", default=INPUTS, choices=INPUTS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    options = parser.parse_args()
    need_gpu()

    base, rng = {**machine(), "command": command()}, random.Random(options.seed)
    path = options.out / f"exactness_{base['device']}.csv"
    rows = []
    for inputs, dtype, d, causal in product(options.inputs, options.dtypes, options.dims, (False, True)):
        shape = 1, options.length, 4, d
        (*qkv, dout), scale = tensors(inputs, DTYPES[dtype], shape, causal, options.seed)
        wanted = exact(*qkv, dout, scale, causal)
        for name in rng.sample(options.kernels, len(options.kernels)):
            try:
                found = errors(results(KERNELS[name], *qkv, dout, scale, causal), wanted)
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0]}")
                continue
            found = {x: f"{error:.3e}" for x, error in zip(TENSORS, found)}
            if inputs == DOMINATED:
                found.update(dq="", dk="")
            problem = dict(zip(PROBLEM, (name, inputs, dtype, 1, 4, options.length, d, causal)))
            rows.append({**base, **problem, **found})
            print(inputs, dtype, f"d {d}", "causal" if causal else "full", name, found, flush=True)
    rows.sort(key=lambda row: options.kernels.index(row["kernel"]))
    save(rows, path, COLUMNS, ("device", *PROBLEM))
    print_tables(options.out, base["device"])


if __name__ == "__main__":
    main()
