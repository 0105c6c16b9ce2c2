"""transformers on the CPU by attn_implementation: tokens per second of flash_attn, sdpa and eager.

    python benchmarks/bench_clients.py                             all cells
    python benchmarks/bench_clients.py --only "Llama.*bfloat16"    cells whose line in --list matches

The models are transformers' own, with the shapes below and random weights. All implementations use one object. A model
is mostly matrix products of its weights, which are PyTorch's for all of them.

    attention   the attention of one layer alone, without gradients, by transformers' function for sdpa and by ours
    infer       a forward pass without gradients. Padded batches count the tokens that are no padding
    train       a forward and a backward pass
    prompt      a forward pass over a prompt that fills the cache
    generate    one token at a time after a prompt

Padded batches have lengths from an eighth of the longest to the longest, evenly spread. Each round runs all
implementations in random order. A figure is the best of the rounds, and a ratio the median over the rounds. The output
of each implementation is compared with that of eager, or of sdpa, before anything is timed. One thread is timed by its
own clock, which stops while other programs run. "without_attention" is the model with the sum of q, k and v in place of
its attention, which no implementation can beat. "limit" in the table is its speed as a multiple of that of sdpa.

Writes clients.csv to the folder --out, beside the rows of other machines.
"""

import argparse
import os
import random
import re
import time
from dataclasses import dataclass
from statistics import median

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from _results import add_out, save
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from flash_attn._measure import machine
from flash_attn.integrations.transformers import register

WAYS = ("flash_attn", "sdpa", "eager")
NOTHING = "without_attention"
SHAPES = {  # class, configuration, options; the options are those of the published models, with fewer layers
    "MiniLM": ("BertModel", "BertConfig", {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}),
    "BERT": ("BertModel", "BertConfig", {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}),
    "Llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
}
LAYERS = {"MiniLM": 6, "BERT": 4, "Llama": 4}
VOCABULARY = 2048
KEY = ("cpu", "threads", "model", "dtype", "pass", "batch", "length", "padded", "against")


@dataclass(frozen=True)
class Cell:
    model: str
    dtype: str
    action: str
    batch: int
    length: int
    is_padded: bool

    def __str__(self):
        padded = " padded" if self.is_padded else ""
        return f"{self.model} {self.dtype} {self.action} {self.batch} x {self.length}{padded}"


def cells():
    for dtype in ("float32", "bfloat16"):
        for name, batch, length in (("MiniLM", 16, 128), ("MiniLM", 4, 512), ("BERT", 2, 512), ("Llama", 4, 512)):
            for padded in (False, True):
                yield Cell(name, dtype, "attention", batch, length, padded)
        yield Cell("Llama", dtype, "attention", 1, 2048, False)
        for name, batch, length in (("MiniLM", 16, 128), ("MiniLM", 4, 512), ("BERT", 8, 128), ("BERT", 2, 512)):
            for padded in (False, True):
                yield Cell(name, dtype, "infer", batch, length, padded)
        for length in (512, 2048):
            yield Cell("Llama", dtype, "prompt", 1, length, False)
            yield Cell("Llama", dtype, "generate", 1, length, False)
        yield Cell("Llama", dtype, "prompt", 4, 512, True)
        yield Cell("Llama", dtype, "generate", 4, 512, True)
        for name, batch, length in (("MiniLM", 4, 512), ("Llama", 1, 1024)):
            for padded in (False, True) if batch > 1 else (False,):
                yield Cell(name, dtype, "train", batch, length, padded)


def built(name, dtype):
    cls, config, options = SHAPES[name]
    options = {**options, "num_hidden_layers": LAYERS[name], "vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    dropout = {} if name == "Llama" else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**options, **dropout))
    return model.to(getattr(torch, dtype)).eval()


def batch_of(cell):
    """ids, the mask or None, and the number of tokens."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (cell.batch, cell.length))
    if not cell.is_padded:
        return ids, None, ids.numel()
    lengths = torch.linspace(cell.length / 8, cell.length, cell.batch).long()
    mask = torch.arange(cell.length) < lengths[:, None]
    if cell.model == "Llama":
        mask = mask.flip(1)  # prompts end together
    return ids, mask.long(), int(lengths.sum())


STEPS = 16  # tokens to generate


def run(model, cell, ids, mask, past=None):
    """One pass of the cell. Returns a result to compare."""
    if cell.action == "train":
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, attention_mask=mask)
        loss = out[0].float().square().mean()
        loss.backward()
        return loss.detach()
    with torch.no_grad():
        if cell.action != "generate":
            out = model(input_ids=ids, attention_mask=mask)[0].float()
            return out[:, -1:] if mask is None or cell.model == "Llama" else out[mask.bool()]
        found = []
        for step in range(STEPS):
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            token = torch.full((cell.batch, 1), 5 + step)
            found.append(model(input_ids=token, attention_mask=mask, past_key_values=past, use_cache=True)[0].float())
        past.crop(-STEPS)
        return torch.cat(found, 1)


def nothing(module, query, key, value, attention_mask, **options):
    """The sum of the last rows of q, k and v, as an attention would return it."""
    groups, rows = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (x[:, :, -rows:].repeat_interleave(groups, 1) if groups > 1 else x[:, :, -rows:] for x in (key, value))
    return (query + key + value).transpose(1, 2).contiguous(), None


def attention_of(cell, way, mask):
    """A call of the attention of a layer, with the mask that the implementation makes once for all layers."""
    _, config, options = SHAPES[cell.model]
    config = getattr(transformers, config)(**options)
    config._attn_implementation = way
    heads = config.num_attention_heads
    torch.manual_seed(2)
    columns, dtype = config.hidden_size // heads, getattr(torch, cell.dtype)
    shapes = [(cell.batch, cell.length, h, columns) for h in (heads, *[options.get("num_key_value_heads", heads)] * 2)]
    q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = cell.model == "Llama", heads // k.shape[1]
    make = create_causal_mask if module.is_causal else create_bidirectional_mask
    inputs = torch.empty(cell.batch, cell.length, 0, dtype=dtype)
    mask = make(config=config, inputs_embeds=inputs, attention_mask=mask, past_key_values=None)
    attention = transformers.AttentionInterface()[way]

    def call():
        with torch.no_grad():
            return attention(module, q, k, v, mask)[0][:, -1:].float()

    return call


def calls_of(cell):
    """A call for each implementation, and the number of tokens."""
    ids, mask, num_tokens = batch_of(cell)
    if cell.action == "attention":
        return {way: attention_of(cell, way, mask) for way in WAYS[:2]}, num_tokens
    model = built(cell.model, cell.dtype)
    calls, pasts = {}, {}
    for way in (*WAYS, NOTHING):
        if cell.action == "generate":
            model.set_attn_implementation(way)
            with torch.no_grad():
                pasts[way] = model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values

        def call(way=way):
            model.set_attn_implementation(way)
            return run(model, cell, ids, mask, pasts.get(way))

        calls[way] = call
    return calls, cell.batch * STEPS if cell.action == "generate" else num_tokens


def measure(cell, seconds):
    calls, num_tokens = calls_of(cell)
    ways, compared = list(calls), [way for way in calls if way != NOTHING]
    found = {way: call() for way, call in calls.items()}
    limit, exact = 1e-4 if cell.dtype == "float32" else 0.1, found[compared[-1]]
    for way in compared[:-1]:
        error = (found[way] - exact).abs().max().item()
        assert error <= limit * max(exact.abs().max().item(), 1), f"{cell}: {way} differs by {error}"
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times, until = {way: [] for way in ways}, time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["sdpa"]) < 3:
        for way in random.sample(ways, len(ways)):
            start = clock()
            calls[way]()
            times[way].append(clock() - start)
    for way in ways[1:]:
        yield {
            **machine(), "transformers": transformers.__version__, "model": cell.model, "dtype": cell.dtype,
            "pass": cell.action, "batch": cell.batch, "length": cell.length, "padded": int(cell.is_padded),
            "ours": round(num_tokens / min(times["flash_attn"])), "against": way,
            "theirs": round(num_tokens / min(times[way])),
            "ratio": round(median(b / a for a, b in zip(times["flash_attn"], times[way])), 2),
            "rounds": len(times[way]),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="cells whose line in --list matches")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5, help="of each cell, but three rounds at least")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    add_out(parser)
    options = parser.parse_args()
    chosen = [cell for cell in cells() if re.search(options.only, str(cell))]
    if options.list or not chosen:
        print(*chosen, sep="\n")
        return
    torch.set_num_threads(options.threads)
    register()
    transformers.AttentionInterface.register(NOTHING, nothing)
    path = options.out / "clients.csv"
    print(
        f"{'tokens per second':46} {'flash_attn':>11} {'sdpa':>9} {'ratio':>6} {'eager':>9} {'ratio':>6} {'limit':>6}"
    )
    for cell in chosen:
        found = list(measure(cell, options.seconds))
        against = "".join(f" {row['theirs']:9} {row['ratio']:6.2f}" for row in found if row["against"] != NOTHING)
        rates = {row["against"]: row["theirs"] for row in found}
        against += f" {rates[NOTHING] / rates['sdpa']:6.2f}" if NOTHING in rates else ""
        print(f"{cell!s:46} {found[0]['ours']:11}{against}", flush=True)
        save(found, path, list(found[0]), KEY)  # each cell at once: all cells take long
    print(f"rows: {path}")


if __name__ == "__main__":
    main()
