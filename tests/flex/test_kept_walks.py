"""What a block mask keeps on a GPU from call to call (csrc/torch/kept_walks.h): a call that finds it gives what a call
gives that makes it anew."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_attn.flex_attention import create_block_mask, flex_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]


def seen_by_table(length, seed=0):
    """A table of keys that are seen, and its causal mask. All blocks are partial, whatever the table holds."""
    generator = torch.Generator().manual_seed(seed)
    table = (torch.rand(length, generator=generator) < 0.5).cuda()
    return table, lambda b, h, q, k: (q >= k) & table[k]


def draw(d=64, length=700, h=2, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, h, length, d, generator=generator).to("cuda", dtype).requires_grad_() for _ in range(3)]


def results(tensors, mask, score_mod=None):
    out = flex_attention(*tensors, score_mod, mask)
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=generator).to(out)
    return out.detach(), *torch.autograd.grad(out, tensors, dout)


def fresh(mask):
    """The same mask, which keeps nothing."""
    lists = {name: None if (x := getattr(mask, name)) is None else x.clone() for name in [*LISTS, "q_num_blocks"]}
    names = ["q_indices", "full_q_num_blocks", "full_q_indices"]
    lists.update({name: getattr(mask, name) for name in names})
    return BlockMask(seq_lengths=mask.seq_lengths, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask.mask_mod, **lists)


def same(found, want):
    """The same bits of out. Gradients are sums in the order of the CTAs."""
    rest = zip(found[1:], want[1:], strict=True)
    return torch.equal(found[0], want[0]) and all((x - y).abs().max() <= 0.02 * y.abs().max() for x, y in rest)


def verify(tensors, mask, score_mod=None):
    assert same(results(tensors, mask, score_mod), results(tensors, fresh(mask), score_mod))


def is_hopper():
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_next_call_finds_them(d):
    _, mask_mod = seen_by_table(700)
    mask, tensors = create_block_mask(mask_mod, None, None, 700, 700, "cuda"), draw(d)
    verify(tensors, mask)
    first = [*mask.kept_walks]
    verify(tensors, mask)
    verify(draw(d, seed=1), mask)
    if is_hopper():  # a call that does not find them makes an entry
        assert all(x is y and x is not None for x, y in zip(first, mask.kept_walks, strict=True))


def test_changes_are_noticed():
    table, mask_mod = seen_by_table(700)
    mask, tensors = create_block_mask(mask_mod, None, None, 700, 700, "cuda"), draw()
    verify(tensors, mask)
    first = results(tensors, mask)[0]
    entry = mask.kept_walks[0]
    with torch.no_grad():
        table.copy_(~table)
    verify(tensors, mask)
    assert not torch.equal(results(tensors, mask)[0], first)
    assert not is_hopper() or entry is not mask.kept_walks[0]
    mask.kv_num_blocks[..., 3] = 1
    verify(tensors, mask)
    mask.kv_indices = mask.kv_indices.clone()
    mask.kv_indices[..., 2, 0] = 1
    verify(tensors, mask)
    other, _ = seen_by_table(700, seed=5)
    mask.mask_mod = lambda b, h, q, k: (q >= k) & other[k]
    verify(tensors, mask)
    least = 3
    mask.mask_mod = lambda b, h, q, k: (q >= k + least) & other[k]
    verify(tensors, mask)
    least = 30
    verify(tensors, mask)


def test_calls_of_other_sizes_take_turns():
    _, mask_mod = seen_by_table(700)
    mask = create_block_mask(mask_mod, None, None, 700, 700, "cuda")
    kinds = [draw(64), draw(128), draw(64, h=4), draw(64, dtype=torch.float16), draw(256), draw(dtype=torch.float32)]
    for tensors in (*kinds, *kinds):
        verify(tensors, mask)
    verify(kinds[0], mask, lambda s, b, h, q, k: s * 0.5 + 0.01 * (k - q))
    verify(kinds[0], mask)


def test_streams_and_threads_do_not_meet():
    """A stream must not read what another one has not finished."""
    _, mask_mod = seen_by_table(4096)
    tensors = draw(length=4096)
    masks = [create_block_mask(mask_mod, None, None, 4096, 4096, "cuda") for _ in range(4)]
    want, wrong = results(tensors, fresh(masks[0])), []
    torch.cuda.synchronize()

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(10):
                for mask in masks:
                    if not same(results(tensors, mask), want):
                        wrong.append(mask)
            stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_looks_anew():
    table, mask_mod = seen_by_table(700)
    mask, tensors = create_block_mask(mask_mod, None, None, 700, 700, "cuda"), draw()
    with torch.no_grad():
        verify_out = flex_attention(*tensors, None, mask)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flex_attention(*tensors, None, mask)
        graph.replay()
        assert torch.equal(out, verify_out)
        table.copy_(~table)
        graph.replay()
        assert torch.equal(out, flex_attention(*tensors, None, fresh(mask)))
        assert torch.equal(out, flex_attention(*tensors, None, mask))


def test_a_copy_keeps_nothing():
    _, mask_mod = seen_by_table(700)
    mask, tensors = create_block_mask(mask_mod, None, None, 700, 700, "cuda"), draw()
    results(tensors, mask)
    assert len(pickle.dumps(mask.kept_walks)) < 200 and pickle.loads(pickle.dumps(mask.kept_walks)) == [None, None]
    other = copy.copy(mask)
    other.kept_walks = copy.deepcopy(mask.kept_walks)
    assert other.kept_walks == [None, None]
    verify(tensors, other)


def test_memory_goes_with_the_mask():
    _, mask_mod = seen_by_table(4096)
    tensors = draw(length=4096)
    results(tensors, create_block_mask(mask_mod, None, None, 4096, 4096, "cuda"))
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        mask = create_block_mask(mask_mod, None, None, 4096, 4096, "cuda")
        for _ in range(3):
            results(tensors, mask)
    assert torch.cuda.memory_allocated() - before < 32 << 20
    del mask
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
