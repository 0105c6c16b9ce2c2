"""transformers' Llama generates the same text with flash_attn_with_kvcache as with its own eager attention.

The weights are random. Prompts of different lengths are read into the cache one by one. Then the batch generates token
by token. Each call appends and rotates k and v, dense and paged.
"""

import copy
import functools
import math

import pytest
import torch
from compare import check
from harness import need

from flash_attn import flash_attn_with_kvcache

need("transformers")
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402

H, H_KV, D, LAYERS, VOCAB, CAPACITY, STEPS = 8, 2, 64, 3, 199, 512, 40
PROMPTS = (130, 5, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@functools.cache
def eager(dtype):
    """The model with its own attention on the CPU, from which tests make copies."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=H * D, intermediate_size=2 * H * D, num_hidden_layers=LAYERS,
        num_attention_heads=H, num_key_value_heads=H_KV, max_position_embeddings=CAPACITY,
        initializer_range=(H * D) ** -0.5, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def logits_of(model, tokens):
    return model(tokens, use_cache=False).logits.float()


class Unturned(torch.nn.Module):
    """Replaces the model's rotary embedding. It does not rotate, because flash_attn_with_kvcache does."""

    def forward(self, x, position_ids):
        shape = (*position_ids.shape, D)
        return x.new_ones(shape), x.new_zeros(shape)


def attend(layer, q, k, v, _mask, server, rows, **_):
    """The attention function that transformers calls: q [b, h, n, d], k and v of the n new tokens -> [b, n, h, d]."""
    caches, table = (server.k[layer.layer_idx], server.v[layer.layer_idx]), server.table
    if table is None:
        caches = [x[rows] for x in caches]
    out = flash_attn_with_kvcache(
        q.transpose(1, 2), *caches, k.transpose(1, 2), v.transpose(1, 2), *server.cos_sin,
        cache_seqlens=server.seqlens[rows], block_table=None if table is None else table[rows],
        causal=True, rotary_interleaved=False,
    )  # fmt: skip
    return out, None


AttentionInterface.register("static_cache", attend)  # NOTE: transformers would look up a name with "flash" on a hub


class Server:
    """The model with a KV cache for len(PROMPTS) sequences, each of its own length."""

    def __init__(self, device, dtype, page):
        self.model = copy.deepcopy(eager(dtype)).to(device)
        self.model.set_attn_implementation("static_cache")
        positions = torch.arange(CAPACITY, device=device)[None]
        turned = self.model.model.rotary_emb(self.model.lm_head.weight, positions)
        self.cos_sin = [x[0, :, : D // 2].contiguous() for x in turned]
        self.model.model.rotary_emb = Unturned()
        b = len(PROMPTS)
        if page:
            columns = -(-CAPACITY // page)
            order = torch.randperm(b * columns, generator=torch.Generator().manual_seed(1))
            self.table = order.view(b, columns).to(device, torch.int32)
            shape = (LAYERS, b * columns, page, H_KV, D)
        else:
            self.table, shape = None, (LAYERS, b, CAPACITY, H_KV, D)
        self.k, self.v = (torch.full(shape, math.nan, device=device, dtype=dtype) for _ in range(2))
        self.seqlens = torch.zeros(b, device=device, dtype=torch.int32)

    def step(self, tokens, rows=slice(None)):
        """Logits of the last of tokens [b, n], which are appended to the cache."""
        logits = self.model(tokens, use_cache=False, server=self, rows=rows).logits[:, -1].float()
        self.seqlens[rows] += tokens.shape[1]
        return logits


def prompts(device):
    gen = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB, (1, n), generator=gen).to(device) for n in PROMPTS]


def generate(server, device, graphed):
    """The tokens that follow each prompt, and the logits of every step."""
    first = [server.step(prompt, slice(n, n + 1)) for n, prompt in enumerate(prompts(device))]
    logits = torch.cat(first)
    tokens = logits.argmax(-1, keepdim=True)
    said, seen = [tokens.clone()], [logits]
    graph = None
    for i in range(STEPS - 1):
        if graphed and graph is None and i == 3:
            before = server.seqlens.clone(), tokens.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = server.step(tokens)
                tokens.copy_(logits.argmax(-1, keepdim=True))
            server.seqlens.copy_(before[0]), tokens.copy_(before[1])
        if graph is None:
            logits = server.step(tokens)
            tokens.copy_(logits.argmax(-1, keepdim=True))
        else:
            graph.replay()
        said.append(tokens.clone())
        seen.append(logits.clone())
    return torch.cat(said, 1), torch.stack(seen, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", (0, 1, 16, 256))
def test_the_same_tokens_in_fp32(device, page):
    said, _ = generate(Server(device, torch.float32, page), device, False)
    model = copy.deepcopy(eager(torch.float32)).to(device)
    for n, prompt in enumerate(prompts(device)):
        tokens = torch.cat((prompt, said[n : n + 1]), 1)
        want = logits_of(model, tokens[:, :-1])[0, prompt.shape[1] - 1 :].argmax(-1)
        assert torch.equal(said[n], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("page", (0, 16))
def test_logits_in_16_bit(device, dtype, page):
    """Along our own tokens our logits are as near to the fp32 logits as eager attention's logits in the same dtype."""
    said, logits = generate(Server(device, dtype, page), device, False)
    models = [copy.deepcopy(eager(dtype)).to(device, x) for x in (torch.float32, dtype)]
    for n, prompt in enumerate(prompts(device)):
        tokens, start = torch.cat((prompt, said[n : n + 1]), 1)[:, :-1], prompt.shape[1] - 1
        ref, plain = (logits_of(model, tokens)[0, start:].cpu() for model in models)
        check("logits", logits[n].cpu(), ref, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("page", (0, 1, 16))
def test_a_captured_step_says_the_same(dtype, page):
    """One step in a CUDA graph, replayed while the lengths grow, gives the same as single steps."""
    eager = generate(Server("cuda", dtype, page), "cuda", False)
    replayed = generate(Server("cuda", dtype, page), "cuda", True)
    assert all(torch.equal(x, y) for x, y in zip(eager, replayed))
