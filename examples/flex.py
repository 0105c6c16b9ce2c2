"""Programmable attention in eleven examples: each is a mask_mod, a score_mod, or both.

    python examples/flex.py                         a table: visible pairs, blocks, and the error of each example
    python examples/flex.py --time                  also milliseconds, beside PyTorch's compiled flex_attention
    python examples/flex.py --pictures FOLDER       draws the blocks of each mask (needs matplotlib)
    python examples/flex.py --device cuda           on a GPU

The error is the largest difference, in the output and in all gradients, from plain arithmetic in fp64. It is divided by
the largest magnitude of the exact tensor.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Callable, Optional

import torch
from torch.nn.attention import flex_attention as theirs

from flash_attn.flex_attention import AuxRequest, create_block_mask, flex_attention

EXAMPLES = []


@dataclass
class Mods:
    """What an example makes. Gradients flow to the tensors in ``learned``."""

    mask_mod: Optional[Callable] = None
    score_mod: Optional[Callable] = None
    learned: tuple = ()
    sink: Optional[torch.Tensor] = None


def example(function):
    EXAMPLES.append(function)
    return function


# ---- the examples: (heads, length, device) -> Mods -------------------------------------------------------------------


@example
def causal(h, n, device):
    """A query sees the keys up to its own place."""
    return Mods(lambda b, h, q, kv: q >= kv)


@example
def window(h, n, device):
    """A query sees its own key and those shortly before."""
    size = n // 4
    return Mods(lambda b, h, q, kv: (q >= kv) & (q - kv < size))


@example
def prefix_lm(h, n, device):
    """All see the prefix. What follows is causal."""
    prefix = n // 3
    return Mods(lambda b, h, q, kv: (kv < prefix) | (q >= kv))


@example
def document(h, n, device):
    """Packed documents of unequal lengths. Each is causal and sees no other."""
    ends = torch.tensor([n // 5, n // 2, n - n // 8], device=device)
    of = torch.searchsorted(ends, torch.arange(n, device=device), right=True)
    return Mods(lambda b, h, q, kv: (of[q] == of[kv]) & (q >= kv))


@example
def dilated(h, n, device):
    """Every fourth key of a window."""
    return Mods(lambda b, h, q, kv: (q >= kv) & (q - kv < n // 2) & ((q - kv) % 4 == 0))


@example
def natten_2d(h, n, device):
    """A pixel sees the 7 x 7 pixels around it. At the border the neighbourhood moves inside."""
    width = 2 ** (int(math.log2(n)) // 2)
    height, radius = n // width, 3

    def mask_mod(b, h, q, kv):
        row = (q // width).clamp(radius, height - 1 - radius)
        column = (q % width).clamp(radius, width - 1 - radius)
        return ((row - kv // width).abs() <= radius) & ((column - kv % width).abs() <= radius)

    return Mods(mask_mod)


@example
def sliding_tile_3d(h, n, device):
    """Video in tiles of 4 x 4 x 4 voxels, one tile after the other. A tile sees itself and the tiles next to it.

    A frame is 4 x 4 tiles, so 1024 voxels are one layer of tiles.
    """
    side, tile = 4, 64

    def mask_mod(b, h, q, kv):
        q, kv = q // tile, kv // tile
        near = (q // side**2 - kv // side**2).abs() <= 1
        near = near & ((q // side % side - kv // side % side).abs() <= 1)
        return near & ((q % side - kv % side).abs() <= 1)

    return Mods(mask_mod)


@example
def alibi(h, n, device):
    """A penalty that grows with the distance, with a slope of its own for each head."""
    slopes = 2.0 ** (-8 * torch.arange(1, h + 1, device=device) / h)
    return Mods(lambda b, h, q, kv: q >= kv, lambda score, b, h, q, kv: score - slopes[h] * (q - kv))


@example
def softcap(h, n, device):
    """Scores between -30 and 30."""
    return Mods(score_mod=lambda score, b, h, q, kv: 30 * torch.tanh(score / 30))


@example
def t5_bias(h, n, device):
    """A learned bias for each head and distance."""
    table = torch.randn(h, 2 * n, device=device, requires_grad=True)
    return Mods(score_mod=lambda score, b, h, q, kv: score + table[h, q - kv + n], learned=(table,))


@example
def sinks(h, n, device):
    """A learned logit for each head that takes part in the softmax and has no value."""
    sink = torch.randn(h, device=device, requires_grad=True)
    return Mods(lambda b, h, q, kv: q >= kv, learned=(sink,), sink=sink)


# ---- run and check ---------------------------------------------------------------------------------------------------


def blocks_of(mods, n, device):
    make = create_block_mask if device == "cpu" else theirs.create_block_mask
    return mods.mask_mod and make(mods.mask_mod, None, None, n, n, device=device)


def attend(mods, q, k, v, block_mask):
    if mods.sink is None:
        return flex_attention(q, k, v, score_mod=mods.score_mod, block_mask=block_mask)
    out, aux = flex_attention(q, k, v, score_mod=mods.score_mod, block_mask=block_mask, return_aux=AuxRequest(lse=True))
    return out * torch.sigmoid(aux.lse - mods.sink[:, None]).unsqueeze(-1).to(out.dtype)


def indices(h, n, device):
    at = torch.arange(n, device=device)
    heads = torch.arange(h, device=device)[:, None, None]
    return torch.zeros((), dtype=torch.long, device=device), heads, at[:, None], at[None, :]


def visible(mods, h, n, device):
    if mods.mask_mod is None:
        return torch.ones(h, n, n, dtype=torch.bool, device=device)
    return mods.mask_mod(*indices(h, n, device)).expand(h, n, n)


def reference(mods, q, k, v):
    """The formula, with every score in memory."""
    h, n, d = q.shape[1:]
    scores = q @ k.mT / math.sqrt(d)
    if mods.score_mod:
        scores = mods.score_mod(scores, *indices(h, n, q.device))
    scores = scores.masked_fill(~visible(mods, h, n, q.device), -math.inf)
    if mods.sink is not None:
        scores = torch.cat([scores, mods.sink.to(scores.dtype)[None, :, None, None].expand(1, h, n, 1)], -1)
    return scores.softmax(-1)[..., :n] @ v


def error_of(mods, q, k, v, dout, block_mask):
    leaves = [q, k, v, *mods.learned]
    out = attend(mods, q, k, v, block_mask)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = reference(mods, *exact)
    wanted = [out, *torch.autograd.grad(out, [*exact, *mods.learned], dout.double())]
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, wanted))


def kinds_of(block_mask, n):
    """[rows, columns] of 0 for an empty block, 1 for a partial one, 2 for a full one."""
    if block_mask is None:
        return torch.full((-(-n // 128), -(-n // 128)), 2)
    kinds = torch.zeros(block_mask.kv_indices.shape[-2:], dtype=torch.long)
    lists = (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    for kind, (counts, columns) in enumerate(lists, 1):
        if counts is not None:
            for row, count in enumerate(counts[0, 0].tolist()):
                kinds[row, columns[0, 0, row, :count].long().cpu()] = kind
    return kinds


# ---- time and draw ---------------------------------------------------------------------------------------------------


def milliseconds(call, device, times=5):
    found = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - begin))
    return f"{median(found[1:]):.2f}"


def timed(mods, q, k, v, dout, block_mask):
    """Milliseconds of our forward, our backward, and PyTorch's compiled forward."""
    device, leaves = q.device.type, [q, k, v, *mods.learned]
    out = attend(mods, q, k, v, block_mask)
    ours = milliseconds(lambda: attend(mods, q, k, v, block_mask), device)
    backward = milliseconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device)
    torch._dynamo.reset()
    q, k, v = q.detach(), k.detach(), v.detach()  # PyTorch refuses a CPU tensor that requires a gradient
    compiled = torch.compile(theirs.flex_attention, dynamic=False)
    try:
        with torch.no_grad():
            other = milliseconds(lambda: compiled(q, k, v, mods.score_mod, block_mask), device)
    except Exception as error:  # the compiler raises a class of its own for each thing that it lacks
        other = type(error).__name__
    return ours, backward, other


def draw(kinds, name, folder):
    try:
        import matplotlib
    except ImportError:
        sys.exit("--pictures needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    figure, axes = pyplot.subplots(figsize=(4, 4))
    axes.imshow(kinds, cmap=ListedColormap(["#f2f2f2", "#f4b860", "#2f6690"]), vmin=0, vmax=2)
    axes.set(title=f"{name}: empty (grey), partial (yellow), full (blue)")
    axes.set(xlabel="block of keys", ylabel="block of queries")
    axes.title.set_fontsize(8)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--length", type=int, default=1024, help="of the sequence, from 64 (default: 1024)")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64, help="of a head")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    h, n, device = options.heads, options.length, options.device
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, h, n, options.dim, device=device) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    titles = ["ms forward", "ms backward", "ms compiled flex"] if options.time else []
    print(
        f"{'':16}{'visible':>8}{'empty':>8}{'partial':>8}{'full':>8}{'error':>10}" + "".join(f"{x:>18}" for x in titles)
    )
    for make in EXAMPLES:
        mods = make(h, n, device)
        block_mask = blocks_of(mods, n, device)
        share = visible(mods, h, n, device).float().mean().item()
        kinds = kinds_of(block_mask, n)
        counts = "".join(f"{count:8}" for count in kinds.flatten().bincount(minlength=3).tolist())
        error = error_of(mods, q, k, v, dout, block_mask)
        figures = timed(mods, q, k, v, dout, block_mask) if options.time else ()
        print(f"{make.__name__:16}{share:8.1%}{counts}{error:10.1e}" + "".join(f"{x:>18}" for x in figures), flush=True)
        if options.pictures:
            draw(kinds, make.__name__, options.pictures)
        if not error < 1e-3:
            sys.exit(f"{make.__name__} differs from the reference")


if __name__ == "__main__":
    main()
