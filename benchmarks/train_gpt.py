"""Trains the same small GPT with our attention and with PyTorch's own arithmetic, and draws both loss curves.

Text: Python's reference as pydoc_data has it, character by character. Both runs start from the same weights and see the
same batches; only the attention function changes. "math" is scaled_dot_product_attention's plain backend in fp32, which
stores the scores. On a GPU a third run trains under bf16 autocast with our kernels.

    python benchmarks/train_gpt.py                    on the GPU if there is one
    python benchmarks/train_gpt.py --device cpu

Writes benchmarks/results/train_gpt_<device>.csv, a row for each step, and the picture beside it.
"""

import argparse
import csv
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn import flash_attn_func

RESULTS = Path(__file__).resolve().parent / "results"


def math_attention(q, k, v):
    """``[b, len, h, d]`` in and out, causal."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def our_attention(q, k, v):
    return flash_attn_func(q, k, v, causal=True)


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
    """(the text as numbers, how many characters there are)"""
    text = "".join(topics[name] for name in sorted(topics))
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text], device=device), len(number)


def train(attention, device, steps, length=128, batch=8, layers=4, heads=4, head_dim=64, bf16=False):
    """The loss of every step."""
    torch.manual_seed(0)
    text, vocabulary = characters(device)
    model = GPT(vocabulary, length, layers, heads, head_dim).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=generator)
        windows = text[(starts + torch.arange(length + 1)).to(device)]
        with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
            scores = model(windows[:, :-1], attention)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), windows[:, 1:].flatten())
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

    figure, (axis, gap) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    first, *others = runs
    for name, losses in runs.items():
        axis.plot(smooth(losses), label=name, linestyle="-" if name == first else "--")
    for name in others:
        gap.plot([b - a for a, b in zip(smooth(runs[first]), smooth(runs[name]))], label=f"{name} less {first}")
    axis.set_ylabel("loss, mean of 20 steps")
    gap.set(xlabel="step", ylabel="difference")
    for x in (axis, gap):
        x.legend(), x.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    runs = {"math, fp32": train(math_attention, options.device, options.steps)}
    runs["flash_attn, fp32"] = train(our_attention, options.device, options.steps)
    if options.device == "cuda":
        runs["flash_attn, bf16"] = train(our_attention, options.device, options.steps, bf16=True)
    for name, losses in runs.items():
        print(f"{name:20} first {losses[0]:.4f}, mean of the last 20 {smooth(losses)[-1]:.4f}")
    path = RESULTS / f"train_gpt_{options.device}.csv"
    with open(path, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", *runs])
        rows.writerows([step, *(f"{x:.6f}" for x in losses)] for step, losses in enumerate(zip(*runs.values())))
    draw(runs, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
