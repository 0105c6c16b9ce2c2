"""A training step of transformers' Llama on a GPU, and the share of attention in it, by attention implementation.

    python benchmarks/bench_llama.py                    two layers of hidden size 2048, one sequence of 4k tokens, bf16
    python benchmarks/bench_llama.py --lengths 16384

The shapes of a layer are those of Llama 3.2 1B, with 32 heads of 64 columns, and the same with 16 heads of 128. A
quarter as many heads have keys and values. The model has no embedding of tokens and no head, and random weights. A step
is a forward and a backward. All implementations use one model:

    flash_attn          attn_implementation="flash_attn", after flash_attn.integrations.transformers.register()
    sdpa, registered    attn_implementation="sdpa" in flash_attn.sdpa()
    sdpa, cuDNN         the same by PyTorch's backends, one at a time
    sdpa, flash

"attention" is the forward and backward of transformers' attention function alone, with the shapes and strides that the
model gives it. The share of attention is the time of all layers' attention divided by that of a step.

All implementations run in random turns, with the L2 flushed before each, as _gpu.py says. A figure is the median.
Before, out and the gradient of the input are compared with those of fp32 and PyTorch's math.

Writes llama_<device>.csv to the folder --out.
"""

import argparse
import contextlib
import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from _gpu import flusher, in_turns, machine
from _results import add_out, need_gpu, save
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn
from flash_attn.integrations.transformers import register

WAYS = {  # attn_implementation, and a context
    "flash_attn": ("flash_attn", contextlib.nullcontext),
    "sdpa, registered": ("sdpa", flash_attn.sdpa),
    "sdpa, cuDNN": ("sdpa", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    "sdpa, flash": ("sdpa", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
}
MOST = 4096  # tokens that fp32 computes by the formula
KEY = ["device", "implementation", "layers", "hidden", "h", "h_kv", "d", "length"]
COLUMNS = ["date", "torch", "cudnn", "transformers", *KEY, "step_ms", "attention_ms", "share"]


def built(h, options):
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=options.hidden, intermediate_size=4 * options.hidden, num_attention_heads=h,
        num_key_value_heads=h // 4, num_hidden_layers=options.layers, max_position_embeddings=1 << 17, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaModel(config).to("cuda", torch.bfloat16)


def step_of(model, inputs, dout, way):
    """A call: out and the gradient of the inputs. The gradients of weights are computed and dropped."""
    implementation, context = WAYS[way]
    wanted = [inputs, *(x for x in model.parameters() if x.shape[0] > 8)]

    def call():
        model.set_attn_implementation(implementation)
        with context():
            out = model(inputs_embeds=inputs).last_hidden_state
            return out.detach(), torch.autograd.grad(out, wanted, dout)[0]

    return call


def attention_of(model, length, way):
    """A call of the attention of a layer, forward and backward."""
    implementation, context = WAYS[way]
    module = model.layers[0].self_attn
    heads = (model.config.num_attention_heads, *[model.config.num_key_value_heads] * 2)
    shapes = [(1, length, h, module.head_dim) for h in heads]
    leaves = [torch.randn(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    dout = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    attention = transformers.AttentionInterface()[implementation]

    def call():
        with context():
            q, k, v = (x.transpose(1, 2) for x in leaves)
            out = attention(module, q, k, v, None, scaling=module.scaling)[0]
            return torch.autograd.grad(out, leaves, dout)

    return call


def check(model, inputs, dout):
    """Every way is at most twice as far from fp32 as PyTorch's math in bf16, in out and in the gradient."""
    inputs, dout = inputs.detach()[:, :MOST].requires_grad_(), dout[:, :MOST]
    found = {way: step_of(model, inputs, dout, way)() for way in WAYS}
    with sdpa_kernel(SDPBackend.MATH):
        model.set_attn_implementation("sdpa")
        plain = plain_step(model, inputs, dout)
        exact = plain_step(model.float(), inputs.detach().float().requires_grad_(), dout.float())
    model.bfloat16()
    for way, results in found.items():
        for mine, theirs, true in zip(results, plain, exact):
            distances = [((x - true).norm() / true.norm()).item() for x in (mine, theirs)]
            assert distances[0] <= 2 * distances[1], f"{way}: {distances}"


def plain_step(model, inputs, dout):
    out = model(inputs_embeds=inputs).last_hidden_state
    return out.detach(), torch.autograd.grad(out, inputs, dout)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.0, help="for all implementations of a problem together")
    add_out(parser)
    options = parser.parse_args()
    need_gpu()
    register()
    where, rng, rows = machine(), random.Random(0), []
    flush = flusher()
    print(f"{where['device']}, torch {where['torch']}: ms of a step, of its attention, share", flush=True)
    for d in options.dims:
        h = options.hidden // d
        model = built(h, options)
        for length in options.lengths:
            shape = 1, length, options.hidden
            inputs = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            steps = {way: step_of(model, inputs, dout, way) for way in WAYS}
            check(model, inputs, dout)
            times, _ = in_turns(steps, options.seconds, flush, rng)
            alone, _ = in_turns({way: attention_of(model, length, way) for way in WAYS}, options.seconds, flush, rng)
            for way in WAYS:
                attention_ms = options.layers * alone[way]
                row = {
                    **where, "transformers": transformers.__version__, "implementation": way, "layers": options.layers,
                    "hidden": options.hidden, "h": h, "h_kv": h // 4, "d": d, "length": length,
                    "step_ms": round(times[way], 3), "attention_ms": round(attention_ms, 3),
                    "share": round(attention_ms / times[way], 3),
                }  # fmt: skip
                rows.append(row)
                print(f"d {d:3}  length {length:6}  {way:17} {row['step_ms']:8} {row['attention_ms']:8} {row['share']}")
    save(rows, options.out / f"llama_{where['device']}.csv", COLUMNS, KEY)


if __name__ == "__main__":
    main()
