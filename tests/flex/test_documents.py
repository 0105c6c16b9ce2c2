"""Documents of awkward lengths under one mask. The CPU engine skips what rows do not see inside of partial blocks."""

import random

import pytest
import torch
from oracle_attention import check, close

from flash_attn import flash_attn_varlen_func
from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 47, 48, 63, 64, 65, 95, 127, 128, 129, 200]


def numbers_of(rng, length):
    """The document of each token, and the lengths of the documents. -1: padding, which sees nothing."""
    parts, numbers = [], []
    while len(numbers) < length:
        part = min(rng.choice(LENGTHS), length - len(numbers))
        numbers += [-1 if rng.random() < 0.2 else len(parts)] * part
        parts.append(part)
    return torch.tensor(numbers), parts


def tensors_of(rng, h, h_kv, length, d, dtype):
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    return [torch.randn(2, heads, length, d, generator=generator).to(dtype) for heads in (h, h_kv, h_kv)]


def document_mask(kind, numbers):
    """causal, whole documents, a window, every third key, or a window of each head."""

    def within(q, k):
        return (numbers[q] == numbers[k]) & (numbers[q] >= 0)

    return {
        "causal": lambda b, h, q, k: within(q, k) & (q >= k),
        "whole": lambda b, h, q, k: within(q, k),
        "window": lambda b, h, q, k: within(q, k) & (q >= k) & (q - k < 37),
        "gaps": lambda b, h, q, k: within(q, k) & ((q - k) % 3 == 0),
        "heads": lambda b, h, q, k: within(q, k) & (q - k < 20 + 31 * h) & (k - q < 5 * b),
    }[kind]


@pytest.mark.parametrize("kind", ["causal", "whole", "window", "gaps", "heads"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_dense_computation(seed, kind, isa):
    rng = random.Random(f"{seed} {kind}")
    length = rng.choice([129, 250, 383, 450])
    h, h_kv = rng.choice([(4, 4), (4, 2), (3, 1)])
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    numbers, _ = numbers_of(rng, length)
    mod = document_mask(kind, numbers)
    size = (2, h) if kind == "heads" else (None, None)
    block_mask = create_block_mask(mod, *size, length, length, device="cpu", BLOCK_SIZE=rng.choice([128, 64, (48, 96)]))
    mask = create_mask(mod, *size, length, length, device="cpu")
    score_mod, leaves = None, []
    if seed % 3 == 1:
        table = torch.linspace(-1, 1, 2 * length).requires_grad_()
        score_mod, leaves = lambda s, b, h, q, k: s + table[q - k + length], [table]
    tensors = tensors_of(rng, h, h_kv, length, rng.choice([40, 64]), dtype)
    tolerance = None if dtype != torch.float32 else 1e-4
    check(*tensors, score_mod=score_mod, block_mask=block_mask, mask=mask, leaves=leaves, tolerance=tolerance)


def test_equals_packed_sequences(isa):
    rng = random.Random(1)
    parts = [rng.choice(LENGTHS) for _ in range(9)]
    numbers = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(parts))
    length = len(numbers)
    leaves = [x[:1].requires_grad_() for x in tensors_of(rng, 4, 2, length, 64, torch.float32)]
    mod = document_mask("causal", numbers)
    block_mask = create_block_mask(mod, None, None, length, length, device="cpu")
    out = flex_attention(*leaves, block_mask=block_mask, enable_gqa=True)
    ends = torch.tensor([0, *parts]).cumsum(0).to(torch.int32)
    rows = [x[0].transpose(0, 1) for x in leaves]
    want = flash_attn_varlen_func(*rows, ends, ends, max(parts), max(parts), causal=True).transpose(0, 1)[None]
    close(out, want, 2e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    for has, wants in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (out, want))):
        close(has, wants, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["causal", "gaps"])
def test_views_of_all_heads_or_of_one_head_give_the_same_bits(kind, dtype, isa):
    """A mask that reads h has views for each head."""
    rng = random.Random(2)
    length = 450
    numbers, _ = numbers_of(rng, length)
    mod = document_mask(kind, numbers)
    of_head = lambda b, h, q, k: mod(b, h, q, k) & (h >= 0) & (b >= 0)  # noqa: E731
    tensors = tensors_of(rng, 4, 2, length, 64, dtype)
    found = []
    for threads, one in ((1, mod), (1, of_head), (2, mod), (2, of_head)):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in tensors]
        block_mask = create_block_mask(one, None, None, length, length, device="cpu")
        out, aux = flex_attention(*leaves, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        found.append([out, aux.lse, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.set_num_threads(1)
    for others in found[1:]:
        assert all(torch.equal(has, wants) for has, wants in zip(others, found[0]))


def test_nan_beside_a_document(isa):
    """Keys and rows of padding hold NaN. They change no bit of the documents."""
    rng = random.Random(3)
    numbers, _ = numbers_of(rng, 500)
    mod = document_mask("causal", numbers)
    block_mask = create_block_mask(mod, None, None, 500, 500, device="cpu")
    tensors = tensors_of(rng, 2, 2, 500, 64, torch.float32)
    results = []
    for padding in (0.0, float("nan")):
        leaves = [x.clone() for x in tensors]
        for x in leaves:
            x[:, :, numbers < 0] = padding
            x.requires_grad_()
        out = flex_attention(*leaves, block_mask=block_mask)
        gradients = torch.autograd.grad(out[:, :, numbers >= 0].sum(), leaves)
        results.append([x[:, :, numbers >= 0] for x in (out, *gradients)])
    for clean, beside in zip(*results):
        assert torch.equal(clean, beside)
