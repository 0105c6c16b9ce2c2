"""Trains the same small GPT with our attention and with PyTorch's own arithmetic, and draws the loss curves.

The text is Python's reference from pydoc_data, character by character. All runs of a seed start from the same weights
and see the same batches, and only the attention function and the precision change. "math" is the plain backend of
scaled_dot_product_attention, which stores the scores. bf16 is autocast, and "in order" is deterministic=True. "math" in
the same precision shows how far rounding alone moves a curve. Both are compared with "math, fp64".

    python benchmarks/train_gpt.py                    on the GPU if there is one
    python benchmarks/train_gpt.py --device cpu --seeds 1

Writes train_gpt_<device>.csv to the folder --out, a row for each seed and step, and beside it a picture of the first
seed.
"""

import argparse
from contextlib import nullcontext
from itertools import accumulate
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from _results import add_out, need_gpu, save
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func


def math_attention(q, k, v):
    """``[b, len, h, d]`` in and out, causal."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def our_attention(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


def our_attention_in_order(q, k, v):
    return flash_attn_func(q, k, v, causal=True, deterministic=True)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, layers, heads, head_dim):
        super().__init__()
        width = heads * head_dim
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x, attention):
        x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, attention)
        return self.head(self.norm(x))


def characters(device):
    """(the text as numbers, the number of different characters)"""
    text = "".join(topics[name] for name in sorted(topics))
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text], device=device), len(number)


def train(
    attention,
    device,
    steps,
    seed=0,
    dtype=torch.float32,
    bf16=False,
    length=320,
    batch=3,
    layers=4,
    heads=4,
    head_dim=64,
):
    """The loss of every step. dtype is the type of weights and arithmetic, and bf16 means autocast."""
    torch.manual_seed(2 * seed)
    text, vocabulary = characters(device)
    model = GPT(vocabulary, length, layers, heads, head_dim).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2 * seed + 1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        windows = text[(starts + torch.arange(length + 1)).to(device)]
        with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
            scores = model(windows[:, :-1], attention)
        loss = F.cross_entropy(scores.flatten(0, 1).to(dtype), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def smooth(losses, over=20):
    return [sum(losses[max(0, i - over + 1) : i + 1]) / min(i + 1, over) for i in range(len(losses))]


def draw(runs, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (axis, gap) = plt.subplots(2, 1, figsize=(7, 7), sharex=True)
    exact, *others = runs
    axis.plot(smooth(runs[exact]), label=exact, color="black")
    for name in others:
        (line,) = axis.plot(smooth(runs[name]), label=name, linestyle="--")
        apart = (abs(x - y) for x, y in zip(runs[name], runs[exact]))
        gap.plot(list(accumulate(apart, max)), color=line.get_color())
    axis.set_ylabel("loss, mean of 20 steps")
    axis.legend()
    gap.set(xlabel="step", ylabel=f"largest difference from {exact} so far", yscale="log")
    for x in (axis, gap):
        x.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


FP32, BF16 = {}, {"bf16": True}
RUNS = {
    "math, fp64": (math_attention, {"dtype": torch.float64}),
    "math, fp32": (math_attention, FP32),
    "flash_attn, fp32": (our_attention, FP32),
    "math, bf16": (math_attention, BF16),
    "flash_attn, bf16": (our_attention, BF16),
    "flash_attn, bf16, in order": (our_attention_in_order, BF16),
}


def largest_difference(losses, exact):
    return max(abs(x - y) for x, y in zip(losses, exact))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    add_out(parser)
    options = parser.parse_args()
    if options.device == "cuda":
        need_gpu()

    curves = []
    for seed in range(options.seeds):
        runs = {name: train(f, options.device, options.steps, seed, **how) for name, (f, how) in RUNS.items()}
        curves.append(runs)
        print(f"seed {seed}: mean loss of the last 20 steps; largest difference from fp64 in 20, 80 and all steps")
        exact = runs["math, fp64"]
        for name, losses in runs.items():
            apart = (largest_difference(losses[:n], exact) for n in (20, 80, len(exact)))
            print(f"  {name:26} {smooth(losses)[-1]:.4f}  {'  '.join(f'{x:.1e}' for x in apart)}", flush=True)
    path = options.out / f"train_gpt_{options.device}.csv"
    rows = [
        dict(zip(RUNS, (f"{x:.9g}" for x in losses)), seed=seed, step=step)
        for seed, runs in enumerate(curves)
        for step, losses in enumerate(zip(*runs.values()))
    ]
    save(rows, path, ["seed", "step", *RUNS], ["seed", "step"])
    draw(curves[0], path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
