"""A language model generates with flash_attn_with_kvcache, and says what it says with plain attention over everything.

A small Llama of random weights (RMSNorm, rotary, grouped heads, SwiGLU). Prompts of different lengths are read into the
cache one by one, then the batch goes on token by token: k and v appended and rotated in the call, dense and paged.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import check

from flash_attn import flash_attn_with_kvcache

H, H_KV, D, LAYERS, VOCAB, CAPACITY, STEPS = 8, 2, 64, 3, 199, 512, 40
PROMPTS = (130, 5, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Llama:
    """weights_in: what the weights are rounded to, whatever dtype computes with them."""

    def __init__(self, device, dtype, weights_in=None):
        gen = torch.Generator().manual_seed(0)
        hidden, wide = H * D, 2 * H * D

        def there(x):
            return x.to(weights_in or dtype).to(device, dtype)

        def weight(rows, columns):
            return there(torch.randn(rows, columns, generator=gen) / math.sqrt(columns))

        self.embedding = there(torch.randn(VOCAB, hidden, generator=gen))
        self.layers = [
            {
                "q": weight(H * D, hidden), "k": weight(H_KV * D, hidden), "v": weight(H_KV * D, hidden),
                "o": weight(hidden, H * D), "up": weight(2 * wide, hidden), "down": weight(hidden, wide),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.head = weight(VOCAB, hidden) * 4
        angle = torch.arange(CAPACITY)[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        self.cos, self.sin = there(angle.cos()), there(angle.sin())

    def run(self, tokens, attend):
        """Logits [b, n, VOCAB] of tokens [b, n]; attend(layer, q, k, v) -> like q."""
        x = self.embedding[tokens]
        b, n, _ = x.shape
        for layer, w in enumerate(self.layers):
            y = F.rms_norm(x, x.shape[-1:])
            q, k, v = (F.linear(y, w[name]).view(b, n, -1, D) for name in "qkv")
            x = x + F.linear(attend(layer, q, k, v).reshape(b, n, -1), w["o"])
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:]), w["up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.head).float()

    def plain(self, tokens):
        """Logits by plain attention over all the tokens."""
        n = tokens.shape[1]

        def attend(_, q, k, v):
            q, k = (self.rotate(x) for x in (q, k))
            k, v = (x.repeat_interleave(H // H_KV, 2) for x in (k, v))
            s = torch.einsum("bihd,bjhd->bhij", q, k).float() / math.sqrt(D)
            s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=s.device).triu(1), -math.inf)
            return torch.einsum("bhij,bjhd->bihd", s.softmax(-1).to(v.dtype), v)

        return self.run(tokens, attend)

    def rotate(self, x):
        cos, sin = (t[: x.shape[1], None].float() for t in (self.cos, self.sin))
        x0, x1 = x.float().chunk(2, -1)
        return torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos), -1).to(x.dtype)


class Server:
    """The model with a KV cache for len(PROMPTS) sequences, each of its own length."""

    def __init__(self, device, dtype, page):
        self.model = Llama(device, dtype)
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
        """Logits of the last of tokens [b, n], which join the cache."""

        def attend(layer, q, k, v):
            caches = (self.k[layer], self.v[layer])
            if self.table is None:
                caches = (x[rows] for x in caches)
            return flash_attn_with_kvcache(
                q, *caches, k, v, self.model.cos, self.model.sin, cache_seqlens=self.seqlens[rows],
                block_table=None if self.table is None else self.table[rows], causal=True, rotary_interleaved=False,
            )  # fmt: skip

        logits = self.model.run(tokens, attend)[:, -1]
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
    server = Server(device, torch.float32, page)
    said, _ = generate(server, device, False)
    for n, prompt in enumerate(prompts(device)):
        tokens = torch.cat((prompt, said[n : n + 1]), 1)
        want = server.model.plain(tokens[:, :-1])[0, prompt.shape[1] - 1 :].argmax(-1)
        assert torch.equal(said[n], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("page", (0, 16))
def test_logits_in_16_bit(device, dtype, page):
    """Our logits along our own tokens are as near to those of fp32 as plain attention's in the same dtype."""
    server, exact = Server(device, dtype, page), Llama(device, torch.float32, dtype)
    said, logits = generate(server, device, False)
    for n, prompt in enumerate(prompts(device)):
        tokens, start = torch.cat((prompt, said[n : n + 1]), 1)[:, :-1], prompt.shape[1] - 1
        ref, plain = (model.plain(tokens)[0, start:].cpu() for model in (exact, server.model))
        check("logits", logits[n].cpu(), ref, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("page", (0, 1, 16))
def test_a_captured_step_says_the_same(dtype, page):
    """One step in a CUDA graph, replayed while the lengths grow, against the same steps run one by one."""
    eager = generate(Server("cuda", dtype, page), "cuda", False)
    replayed = generate(Server("cuda", dtype, page), "cuda", True)
    assert all(torch.equal(x, y) for x, y in zip(eager, replayed))
