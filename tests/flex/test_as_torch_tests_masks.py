"""What PyTorch's own tests of BlockMask check, with block masks of ours, on the CPU and on a GPU (torchs_tests.py)."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from oracle_attention import attention, close, moved
from torch.nn import functional
from torch.utils import _pytree as pytree
from torchs_harness import DEVICES, tensors, tolerance_of
from torchs_mods import BUILTIN, MASKS, B, S, is_before
from torchs_tests import COVERED, ELSEWHERE

from flash_attn.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
LISTS += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def of_batches(offset):
    """Causal, with a diagonal of its own for each batch."""
    return lambda b, h, i, j: i + offset[b] * 128 >= j


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [128, 32, (64, 16)], ids=str)
def test_lists(device, name, block):
    mask_mod = MASKS[name]()
    got = create_block_mask(moved(mask_mod, device), B, 4, S, S, device=device, BLOCK_SIZE=block)
    want = theirs.create_block_mask(mask_mod, B, 4, S, S, device="cpu", BLOCK_SIZE=block)
    for each in LISTS:
        assert torch.equal(getattr(got, each).cpu(), getattr(want, each)), each
    assert str(got) == str(want)


def test_attributes(device):
    same = create_block_mask(of_batches(torch.zeros(8, device=device)), 4, 2, 2048, 2048, device=device)
    assert same.shape == (4, 2, 2048, 2048) and same.numel() == 4 * 2 * 2048 * 2048
    assert same[0].shape == (1, 2, 2048, 2048) and same[0, 0].shape == (1, 1, 2048, 2048)
    assert same.sparsity() == same[0].sparsity() == same[1, 0].sparsity() == 46.875
    others = create_block_mask(of_batches(torch.arange(8, device=device)), 8, 1, 2048, 2048, device=device)
    assert others.sparsity() == 29.1015625 and "sparsity=29.10" in str(others)
    assert others[1].sparsity() < others[0].sparsity()


@pytest.mark.parametrize("block", [32, 64, 128, 256, (32, 64), (64, 32)], ids=str)
def test_sizes_of_blocks(device, block):
    made = create_block_mask(noop_mask, 4, 2, 2048, 2048, device=device, BLOCK_SIZE=block)
    assert made.BLOCK_SIZE == (block if isinstance(block, tuple) else (block, block))
    assert made.shape == (4, 2, 2048, 2048) and made.sparsity() == 0


PARTS = {
    "a batch": (0, (1, 2, 4)),
    "a batch and a head": ((0, 1), (1, 1, 4)),
    "from the end": ((-1, -2), (1, 1, 4)),
    "slices": ((slice(0, 2), slice(1, 2)), (2, 1, 4)),
    "rows of blocks": ((slice(0, 2), slice(1, 2), torch.tensor([1], dtype=torch.int32)), (2, 1, 1)),
    "the first row": ((slice(None), slice(None), torch.tensor([0], dtype=torch.int32)), (4, 2, 1)),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts(device, name):
    where, shape = PARTS[name]
    whole = create_block_mask(of_batches(torch.arange(4, device=device)), 4, 2, 512, 512, device=device)
    part = whole[where]
    for each, rest in zip(LISTS[:4], ((), (4,)) * 2):
        assert getattr(part, each).shape == (*shape, *rest)
        want = getattr(whole, each)[where].reshape(*shape, *rest)
        assert torch.equal(getattr(part, each), want)
    q, k, v = (x.to(device) for x in tensors(shape[0], 4, 4, 128 * shape[2], 512))
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        flex_attention(q, k, v, block_mask=part)


def test_other_devices(device):
    made = create_block_mask(of_batches(torch.zeros(1, device=device)), 1, 1, 512, 512, device=device)
    for where in (device, "cpu", device):
        made = made.to(where)
        assert all(getattr(made, each).device.type == where for each in LISTS)


def test_masks_combine(device):
    def is_after(b, h, i, j):
        return i < j

    def find(mask_mod):
        return create_block_mask(mask_mod, 1, 1, 2048, 2048, device=device)

    assert find(and_masks(is_before, lambda b, h, i, j: i - j <= 512)).kv_num_blocks.sum() == 28
    nothing, everything = find(and_masks(is_before, is_after)), find(or_masks(is_before, is_after))
    assert not nothing.kv_num_blocks.any() and not nothing.full_kv_num_blocks.any()
    assert everything.sparsity() == find(noop_mask).sparsity() == 0


def test_lists_by_hand(device):
    made, n = create_block_mask(is_before, 1, 1, 512, 512, device=device), torch.arange(4, device=device)
    by_hand = BlockMask.from_kv_blocks((n + 1)[None, None], n.expand(1, 1, 4, 4), BLOCK_SIZE=128, mask_mod=is_before)
    assert torch.equal(made.to_dense(), by_hand.to_dense())
    q, k, v = (x.to(device) for x in tensors(1, 2, 2, 512, 512))
    close(flex_attention(q, k, v, block_mask=by_hand), flex_attention(q, k, v, block_mask=made), 1e-5)


@pytest.mark.parametrize("has_full", [False, True])
@pytest.mark.parametrize("has_q", [False, True])
def test_lists_of_keys_alone(device, has_q, has_full):
    """Theirs refuses a backward without the lists of queries. Ours needs none."""
    made = create_block_mask(is_before, 1, 1, 300, 300, device=device, BLOCK_SIZE=64)
    lists = [getattr(made, each) for each in LISTS[:4]]
    if not has_full:
        n = torch.arange(5, device=device, dtype=torch.int32)
        lists = [(n + 1)[None, None], n.expand(1, 1, 5, 5), None, None]
    found = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=64, mask_mod=is_before, seq_lengths=(300, 300), compute_q_blocks=has_q
    )
    assert (found.q_indices is not None) == has_q and (found.full_kv_indices is not None) == has_full
    leaves = [x.to(device).requires_grad_() for x in tensors(2, 2, 2, 300, 300)]
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    out = flex_attention(*leaves, block_mask=found)
    want = attention(*wide, None, create_mask(is_before, 1, 1, 300, 300, device="cpu"))[0]
    close(out.cpu(), want, tolerance_of(device, out.dtype))
    for has, wants in zip(*(torch.autograd.grad(x.sin().sum(), y) for x, y in ((out, leaves), (want, wide)))):
        close(has.cpu(), wants, 4 * tolerance_of(device, out.dtype))


def test_lists_without_a_mod(device):
    """All blocks that are listed as partial are allowed as a whole then, whatever stands behind the counts."""
    counts = torch.tensor([[[3]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[2, 0, 3, -1]]]], dtype=torch.int32, device=device)
    block_mask = BlockMask.from_kv_blocks(counts, indices, compute_q_blocks=False)
    assert block_mask.shape == (1, 1, 128, 512) and block_mask[0].q_indices is None
    assert block_mask.BLOCK_SIZE == (128, 128) and block_mask.to("cpu").q_num_blocks is None
    qkv = tensors(1, 1, 1, 128, 512, 64, dtype=torch.float16)
    out = flex_attention(*(x.to(device) for x in qkv), block_mask=block_mask)
    mask = (torch.arange(512) // 128 != 1).expand(128, 512)
    close(out.cpu(), attention(*(x.double() for x in qkv), None, mask)[0], 3e-3)


def test_lists_that_do_not_belong_together(device):
    counts = torch.tensor([[[1]]], dtype=torch.int32, device=device)
    kv = {"kv_num_blocks": counts, "kv_indices": counts[..., None], "q_num_blocks": None, "q_indices": None}
    rest = {"BLOCK_SIZE": (64, 64), "mask_mod": noop_mask, "seq_lengths": (1, 1)}
    for kind in ("kv", "q"):
        full = dict.fromkeys(["full_kv_num_blocks", "full_kv_indices", "full_q_num_blocks", "full_q_indices"])
        with pytest.raises(AssertionError):
            BlockMask(**kv, **{**full, f"full_{kind}_num_blocks": counts}, **rest)


def test_a_row_of_blocks_for_one_query(device):
    """The mask of a sequence serves a decoder: a row of its blocks, with a mod that knows the place."""
    at = torch.tensor(200, device=device)
    q, k, v = (x.to(device) for x in tensors(4, 8, 8, 1, 512, 64))
    row = create_block_mask(is_before, 4, None, 512, 512, device=device, _compile=True)[:, :, 200 // 128]
    row.mask_mod = lambda b, h, i, j: is_before(b, h, i + at, j)
    row.seq_lengths = (1, 512)
    want = functional.scaled_dot_product_attention(q, k[:, :, :201], v[:, :, :201])
    close(flex_attention(q, k, v, block_mask=row), want, 1e-4)


@pytest.mark.parametrize("length, others", [(1024, (2048,)), (1023, (1024, 128))])
def test_other_lengths_are_refused(device, length, others):
    block_mask = create_block_mask(is_before, None, None, length, length, device=device)
    for n in others:
        q, k, v = (x.to(device) for x in tensors(1, 2, 2, n, n, dtype=torch.float16))
        with pytest.raises(ValueError, match="block_mask was created for"):
            flex_attention(q, k, v, block_mask=block_mask)


def test_a_longer_mask_is_cropped(device):
    block_mask = create_block_mask(MASKS["both ends"](), None, None, 1024, 1024, device=device)._adjust(384, 384)
    qkv = tensors(1, 2, 2, 384, 384)
    out = flex_attention(*(x.to(device) for x in qkv), block_mask=block_mask)
    mask = create_mask(MASKS["both ends"](), 1, 1, 384, 384, device="cpu")
    close(out.cpu(), attention(*(x.double() for x in qkv), None, mask)[0], tolerance_of(device, out.dtype))


def test_a_tree_of_tensors(device):
    made = create_block_mask(is_before, 2, 4, 512, 512, device=device)
    leaves, spec = pytree.tree_flatten(made)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.shape == made.shape and again.BLOCK_SIZE == made.BLOCK_SIZE and again.mask_mod is made.mask_mod
    for each in LISTS:
        assert torch.equal(getattr(again, each), getattr(made, each))
    q, k, v = (x.to(device) for x in tensors(2, 4, 4, 512, 512))
    out = flex_attention(q, k, v, BUILTIN["alibi"], again)
    assert torch.equal(out, flex_attention(q, k, v, BUILTIN["alibi"], made))


def test_short_documents(device):
    """Lengths of 9 and of 4, whose documents are not sorted."""
    for numbers in ([2, 42, 18, 21, 4, 2, 7, 1, -1], [57, 21, 16, 8]):
        numbers = torch.tensor(numbers)

        def mod(b, h, i, j, numbers=numbers):
            return (numbers[i] == numbers[j]) & (numbers[i] != -1) & (numbers[j] != -1)

        n = len(numbers)
        block_mask = create_block_mask(moved(mod, device), None, None, n, n, device=device)
        want = theirs.create_block_mask(mod, None, None, n, n, device="cpu")
        assert all(torch.equal(getattr(block_mask, each).cpu(), getattr(want, each)) for each in LISTS)
        qkv = tensors(1, 2, 2, n, n)
        out = flex_attention(*(x.to(device) for x in qkv), block_mask=block_mask)
        mask = create_mask(mod, 1, 1, n, n, device="cpu")
        close(out.cpu(), attention(*(x.double() for x in qkv), None, mask)[0], tolerance_of(device, out.dtype))


def test_a_graph_of_cuda_makes_a_block_mask(device):
    if device == "cpu":
        pytest.skip("a CUDA graph needs a GPU")
    want, graph = create_block_mask(is_before, None, None, 256, 256, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = create_block_mask(is_before, None, None, 256, 256, device=device)
    graph.replay()
    assert all(torch.equal(getattr(made, each), getattr(want, each)) for each in LISTS)


def test_tensors_of_several_devices(device):
    if device == "cpu":
        pytest.skip("a second device is needed")
    q, k, v = tensors(1, 2, 2, 128, 128)
    with pytest.raises(ValueError, match="to have the same device type, but got query.device: cpu, key.device: cuda:0"):
        flex_attention(q, k.to(device), v)
    on_cpu, ours = create_block_mask(is_before, 1, 1, 128, 128, device="cpu"), [x.to(device) for x in (q, k, v)]
    with pytest.raises(RuntimeError, match="Expect q/k/v and block_mask to be on the same device"):
        flex_attention(*ours, block_mask=on_cpu)
    slopes = torch.zeros(2)
    with pytest.raises(RuntimeError, match="a mod's tensors must be on cuda:0, where it is computed; one is on cpu"):
        flex_attention(*ours, lambda s, b, h, i, j: s + slopes[h])


def test_the_table_names_tests_that_exist():
    files = [*Path(__file__).parent.glob("test_*.py")]
    defined = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    named = {name for names in COVERED.values() for name in names.split()}
    assert named <= defined and not COVERED.keys() & ELSEWHERE.keys()
