"""What the tests share that do what PyTorch's own tests of FlexAttention do: devices, tensors and one comparison."""

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from oracle_attention import INF, TOLERANCES, attention, close, gradients, moved
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torchs_mods import B, H, S

from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU of 8.0 or newer"))
DEVICES = ["cpu", GPU]
ALL = AuxRequest(lse=True, max_scores=True)


def tensors(b=B, h=H, h_kv=H, len_q=S, len_kv=S, d=16, d_v=None, dtype=torch.float32, b_kv=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(b, h, len_q, d), (b_kv or b, h_kv, len_kv, d), (b_kv or b, h_kv, len_kv, d_v or d)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def tolerance_of(device, dtype):
    return max(TOLERANCES[dtype], 1e-9 if device == "cpu" else 1e-4)


def masks_of(device, mask_mod, sizes, block=128, seen=None):
    """Our block mask on the device, PyTorch's on the CPU, and the dense one."""
    mine = create_block_mask(moved(mask_mod, device, seen), *sizes, device=device, BLOCK_SIZE=block)
    torchs = theirs.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=block)
    return mine, torchs, create_mask(mask_mod, *sizes, device="cpu")


def compare(
    device, qkv, score_mod=None, leaves=(), mask_mod=None, block=128, derived=None, beside_torch=True, trains=True,
    **kwargs,
):  # fmt: skip
    """Values and gradients of ours and of the specification, and values of PyTorch's function, unless another test
    has them for this mod.

    derived: makes the score_mod of the leaves. trains: False for a decoder, which has no gradients."""
    sizes, seen = (*qkv[0].shape[:3], qkv[1].size(2)), {}
    ours = [x.detach().to(device).requires_grad_(trains) for x in qkv]
    wide = [x.detach().double().requires_grad_(trains) for x in qkv]
    our_leaves, mine, torchs_mask, dense = [moved(x, device, seen) for x in leaves], None, None, None
    mod = None if score_mod is None else moved(score_mod, device, seen)
    if derived is not None:
        mod, score_mod = derived(*our_leaves), derived(*leaves)
    if mask_mod is not None:
        mine, torchs_mask, dense = masks_of(device, mask_mod, sizes, block, seen)
    out, aux = flex_attention(*ours, mod, mine, enable_gqa=True, return_aux=ALL, **kwargs)
    assert out.dtype == ours[0].dtype and aux.lse.dtype == aux.max_scores.dtype == torch.float32
    assert not aux.max_scores.requires_grad
    tolerance, want = tolerance_of(device, out.dtype), attention(*wide, score_mod, dense)
    for has, wants in zip((out, aux.lse, aux.max_scores), want, strict=True):
        close(has.cpu(), wants, tolerance)
    if beside_torch:
        inputs, request = [x.detach() for x in wide], AuxRequest(lse=True)  # on a CPU PyTorch has no max_scores
        found, found_aux = theirs.flex_attention(*inputs, score_mod, torchs_mask, enable_gqa=True, return_aux=request)
        close(out.cpu(), found, tolerance)
        close(aux.lse.cpu(), found_aux.lse, tolerance)
    if not trains:
        return
    dout, dlse = (torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) for x in (out, aux.lse))
    dlse = torch.where(want[1] == -INF, 0.0, dlse).float()
    got = gradients((out, aux.lse), [*ours, *our_leaves], (dout.to(device), dlse.to(device)))
    exact = gradients(want[:2], [*wide, *leaves], (dout.double(), dlse.double()))
    for has, wants in zip(got, exact, strict=True):
        close(has.cpu(), wants, 4 * max(tolerance, TOLERANCES[has.dtype] if has.dtype == torch.bfloat16 else 0))


def in_pages_of_torch(device, key, value, lengths, page):
    """PyTorch's PagedAttention with the first keys of each batch, and the two caches. Batches get pages by turns."""
    b, h_kv, len_kv, _ = key.shape
    num_pages = -(-len_kv // page) * (b + 2)
    paged = PagedAttention(num_pages, page, b + 2, device=device)
    for share in (0.25, 0.5, 1):
        for n in range(b):
            paged.reserve(torch.tensor(n, device=device), torch.tensor(int(len_kv * share), device=device))
    caches = [torch.zeros(1, h_kv, num_pages * page, x.size(-1), dtype=x.dtype, device=device) for x in (key, value)]
    for n, length in enumerate(lengths):
        at = torch.arange(length, device=device, dtype=torch.int32)[None]
        batch = torch.tensor([n], device=device, dtype=torch.int32)
        paged.assign(batch, at, *(x[n : n + 1, :, :length].to(device) for x in (key, value)), *caches)
    return paged, caches
