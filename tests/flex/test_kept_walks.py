"""What a block mask keeps on a GPU from call to call (csrc/torch/kept_walks.h): a call that finds it gives what a call
gives that makes it anew."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from flash_attn import _extended_directly, _remembered, flash_attn_func, flash_attn_varlen_func
from flash_attn.flex import kept_walks
from flash_attn.flex.kept_walks import KeptWalks
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
    first = mask.kept_walks[:2]
    verify(tensors, mask)
    verify(draw(d, seed=1), mask)
    if is_hopper():  # a call that does not find them makes an entry
        assert all(x is y and x is not None for x, y in zip(first, mask.kept_walks[:2], strict=True))


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
    empty, pickled = [None, None, kept_walks.MOST_BYTES], pickle.dumps(mask.kept_walks)
    assert len(pickled) < 200 and pickle.loads(pickled) == empty
    other = copy.copy(mask)
    other.kept_walks = copy.deepcopy(mask.kept_walks)
    assert other.kept_walks == empty
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


def of_options(tensors, lengths, **options):
    """out and gradients of a call with options, of tensors ``[b, len, h, d]``, or of packed ones."""
    if lengths is None:
        out = flash_attn_func(*tensors, **options)
    else:
        out = flash_attn_varlen_func(*[x.flatten(0, 1) for x in tensors], *lengths, **options)
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=generator).to(out)
    return out.detach(), *torch.autograd.grad(out, tensors, dout)


@pytest.mark.parametrize("is_packed", [False, True])
def test_calls_with_options_keep_them(is_packed, monkeypatch):
    length, made = 700, []
    tensors = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in draw(length=length)]
    sums = torch.tensor([0, 100, 101, 450, length], dtype=torch.int32, device="cuda")
    lengths = (sums, sums, 349, 349) if is_packed else None
    options = [{"causal": True}, {"window_size": (150, 0)}, {"causal": True, "softcap": 5.0}]
    bias = torch.randn(2, 1, 1, device="cuda")

    def note(*args):
        made.append(KeptWalks(*args))
        return made[-1]

    monkeypatch.setattr(_extended_directly, "_with_walks", lambda blocks, is_exact: blocks)
    forget()
    want = [of_options(tensors, lengths, attn_bias=bias, **option) for option in options]
    monkeypatch.undo()
    monkeypatch.setattr(_extended_directly, "KeptWalks", note)
    forget()
    for _ in range(3):
        for option, expected in zip(options, want):
            assert same(of_options(tensors, lengths, attn_bias=bias, **option), expected)
    assert len(made) == 2  # windows: the softcap is no matter of the mask
    assert not is_hopper() or all(entry is not None for kept in made for entry in kept)
    if is_packed:
        sums[2] = 300
        monkeypatch.undo()
        found = of_options(tensors, lengths, attn_bias=bias, causal=True)
        other = sums.clone()
        assert same(found, of_options(tensors, (other, other, 349, 349), attn_bias=bias, causal=True))
        assert not torch.equal(found[0], want[0][0])
    forget()


def forget():
    _extended_directly._kept_blocks_of_dense.cache_clear()
    _extended_directly._last_packed.__init__()
    _remembered._kept.clear()


def test_options_keep_few_bytes(monkeypatch):
    made = []
    monkeypatch.setattr(_extended_directly, "KeptWalks", lambda most: made.append(KeptWalks(most)) or made[-1])
    forget()
    q = torch.randn(1, 8192, 1, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        flash_attn_func(q, q, q, attn_bias=torch.zeros((), device="cuda"), causal=True)
    assert made[0][:2] == [None, None] and len(made) == 1
    forget()


@pytest.mark.parametrize("option", ["attn_bias", "score_mod"])
def test_inductor_takes_back_what_runs_before_its_graphs(option):
    """Memory that a call keeps must not come from a run whose memory goes: inductor refuses to record the graph."""
    pytest.importorskip("triton")
    bias = torch.randn(700, device="cuda")

    def attend(q, k, v):
        if option == "attn_bias":
            return flash_attn_func(*[x.transpose(1, 2) for x in (q, k, v)], attn_bias=bias, causal=True)
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], mask_mod=lambda b, h, i, j: i >= j)

    torch._dynamo.reset()
    compiled = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):
        tensors = draw(seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*tensors)
        found = out.detach().clone(), *[x.clone() for x in torch.autograd.grad(out, tensors, torch.ones_like(out))]
        out = attend(*tensors)
        want = out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))
        assert all((x - y).abs().max() <= 0.02 * y.abs().max() for x, y in zip(found, want))
