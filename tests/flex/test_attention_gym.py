"""Every mask and every score function of attention-gym, on the CPU and on a GPU.

Masks are compared with PyTorch's own lists and values. Score functions are compared with PyTorch's function in fp64,
and their gradients with plain arithmetic in fp64 (oracle_attention.py).
"""

import inspect

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from oracle_attention import attention, close, gradients
from torch.nn import functional
from torchs_harness import ALL, DEVICES, tensors, tolerance_of

from flash_attn.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

attn_gym = pytest.importorskip("attn_gym", reason="attention-gym is not installed (requirements/test.txt)")

from attn_gym import masks, mods  # noqa: E402
from attn_gym.masks import causal, document_mask, vsa  # noqa: E402

B, H, N = 2, 4, 200
LISTS = ["kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"]
LISTS += ["q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def integers(high, *shape, device, low=0):
    generator = torch.Generator().manual_seed(high)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(device)


def offsets(device):
    return document_mask.length_to_offsets([50, 7, 60, 83], device)


def tree(device):
    """Each node hangs below an earlier one."""
    return masks.build_tree_ancestor_matrix([-1, *(7 * n % (n + 1) for n in range(N - 1))], device)


# The generator of each mask, and what is made by it for sequences of N.
MASKS = {
    "causal_mask": lambda device: masks.causal_mask,
    "generate_sliding_window": lambda device: masks.generate_sliding_window(30),
    "generate_prefix_lm_mask": lambda device: masks.generate_prefix_lm_mask(40),
    "generate_dilated_sliding_window": lambda device: masks.generate_dilated_sliding_window(60, 7),
    "generate_global_sliding_window": lambda device: masks.generate_global_sliding_window(
        9, torch.arange(N, device=device) % 67 == 3
    ),
    "generate_doc_mask_mod": lambda device: masks.generate_doc_mask_mod(masks.causal_mask, offsets(device)),
    "generate_packed_causal_doc_mask_mod": lambda device: masks.generate_packed_causal_doc_mask_mod(offsets(device)),
    "batchify_mask_mod": lambda device: masks.batchify_mask_mod(masks.causal_mask, 33),
    "generate_block_diffusion_mask": lambda device: masks.generate_block_diffusion_mask(N // 2, 16),
    "generate_vision_cross_attention_mask_mod": lambda device: masks.generate_vision_cross_attention_mask_mod(
        torch.tensor([[0, 40], [40, 90], [90, 200], [7, 9]], device=device), N // 4
    ),
    "generate_jetspec_tree_causal_mask_mod": lambda device: masks.generate_jetspec_tree_causal_mask_mod(
        0, tree(device)
    ),
    "generate_jetspec_training_mask_mod": lambda device: masks.generate_jetspec_training_mask_mod(40, 8),
    "generate_natten": lambda device: masks.generate_natten(20, 10, 5, 3),
    "generate_tiled_natten": lambda device: masks.generate_tiled_natten(20, 10, 5, 3, 4, 2),
    "generate_morton_natten": lambda device: masks.generate_morton_natten(16, 16, 5, 3),
    "generate_shared_prefix_mask_mod": lambda device: masks.generate_shared_prefix_mask_mod(
        offsets(device), torch.tensor([0, 0, 2, 2], device=device)
    ),
    "generate_sta_mask_mod_2d": lambda device: masks.generate_sta_mask_mod_2d((12, 16), (6, 8), (2, 4), 8),
    "generate_sta_mask_mod_3d": lambda device: masks.generate_sta_mask_mod_3d((4, 6, 8), (2, 6, 4), (2, 2, 4), 8),
    "generate_spatial_head_mask_mod": lambda device: masks.generate_spatial_head_mask_mod(5, 10, 18, 2, True, 4),
    "generate_temporal_head_mask_mod": lambda device: masks.generate_temporal_head_mask_mod(5, 10, 18, 2),
    "generate_vsa_mask_mod": lambda device: masks.generate_vsa_mask_mod(
        integers(13, B, H, 13, 3, device=device), 16, integers(17, 13, device=device, low=1)
    ),
    "generate_vsa_padding_mask_mod": lambda device: vsa.generate_vsa_padding_mask_mod(
        integers(17, 13, device=device, low=1), 16
    ),
}


def graph(device):
    """The adjacency of two graphs of 60 nodes."""
    drawn = torch.rand(B, 60, 60, generator=torch.Generator().manual_seed(1)) < 0.05
    return (drawn | drawn.mT).to(device)


def table(*shape, device):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device).requires_grad_()


def spatial(device):
    bias = table(H, 6, device=device)
    return mods.generate_graphormer_spatial_bias(bias, mods.shortest_path_distances(graph(device), 4)), [bias]


def edges(device):
    bias = table(H, 3, 5, device=device)
    paths = mods.shortest_path_edge_types(graph(device), integers(5, B, 60, 60, device=device), 3)
    return mods.generate_graphormer_edge_bias(bias, *paths), [bias]


def rope(device):
    parts = (table(B, h, 60, 8, device=device).detach() for h in (H, 1))
    return mods.generate_mla_rope_score_mod(*parts, H, 0.3), []


def activation(function, *offset):
    return lambda device: (mods.generate_activation_score_mod(function, *offset), [])


# The generator of each score function, and pairs of what is made by it for 60 queries and keys, and what is learned.
SCORES = {
    "generate_activation_score_mod": activation(functional.gelu),
    "generate_activation_score_mod, relu": activation(functional.relu),
    "generate_activation_score_mod, silu": activation(functional.silu),
    "generate_activation_score_mod, sigmoid": activation(torch.sigmoid, 0.5),
    "generate_activation_score_mod, softplus": activation(functional.softplus),
    "generate_alibi_bias": lambda device: (mods.generate_alibi_bias(H), []),
    "generate_graphormer_spatial_bias": spatial,
    "generate_graphormer_edge_bias": edges,
    "generate_mla_rope_score_mod": rope,
    "generate_sandwich_bias": lambda device: (mods.generate_sandwich_bias(H, 60, device=device), []),
    "generate_tanh_softcap": lambda device: (mods.generate_tanh_softcap(20), []),
}


def generators(*modules):
    """The functions of modules that make a mod, by their annotations; and the plain causal mask."""
    found = {"causal_mask"} if masks in modules else set()
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if str(inspect.signature(function).return_annotation).endswith("_mod_signature"):
                found.add(name)
            elif "Callable" in str(inspect.signature(function).return_annotation):
                found.add(name)
    return found


def test_nothing_is_left_out():
    assert generators(masks, vsa) == set(MASKS)
    assert generators(mods) == {name.split(",")[0] for name in SCORES}


@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name):
    ours, mod = MASKS[name](device), MASKS[name]("cpu")
    dense = theirs.create_mask(mod, B, H, N, N, device="cpu")
    assert torch.equal(create_mask(mod, B, H, N, N, device="cpu"), dense) and 0 < dense.float().mean() < 1
    for block in (16, (64, 32), 128):
        mask = create_block_mask(ours, B, H, N, N, device=device, BLOCK_SIZE=block)
        torchs = theirs.create_block_mask(mod, B, H, N, N, device="cpu", BLOCK_SIZE=block)
        for each in LISTS:
            assert torch.equal(getattr(mask, each).cpu(), getattr(torchs, each)), each
    qkv = tensors(B, H, H, N, N)
    wide = [x.double() for x in qkv]
    want = theirs.flex_attention(*wide, block_mask=torchs)
    leaves = [x.to(device).requires_grad_() for x in qkv]
    out = flex_attention(*leaves, block_mask=mask)
    close(out.cpu(), want, tolerance_of(device, out.dtype))
    close(flex_attention(*leaves, mask_mod=ours).cpu(), want, tolerance_of(device, out.dtype))
    wide = [x.requires_grad_() for x in wide]
    exact = attention(*wide, None, dense)[0]
    close(want, exact, 1e-9)
    for has, wants in zip(*(torch.autograd.grad(x.sin().sum(), y) for x, y in ((out, leaves), (exact, wide)))):
        close(has.cpu(), wants, 4 * tolerance_of(device, out.dtype))


@pytest.mark.parametrize("name", SCORES)
def test_scores(device, name):
    """The products of rows are summed in fp32, in another order than PyTorch's."""
    (ours, our_leaves), (mod, leaves), qkv = SCORES[name](device), SCORES[name]("cpu"), tensors(B, H, H, 60, 60)
    wide, tolerance = [x.double() for x in qkv], tolerance_of(device, torch.float32)
    want, want_aux = theirs.flex_attention(*wide, mod, return_aux=AuxRequest(lse=True))
    inputs = [x.to(device).requires_grad_() for x in qkv]
    out, aux = flex_attention(*inputs, ours, return_aux=ALL)
    close(out.cpu(), want, tolerance)
    close(aux.lse.cpu(), want_aux.lse, tolerance)
    wide = [x.requires_grad_() for x in wide]
    exact = attention(*wide, mod)
    close(aux.max_scores.cpu(), exact[2], tolerance)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) for x in (out, aux.lse)]
    got = gradients((out, aux.lse), [*inputs, *our_leaves], [x.to(device) for x in weights])
    for has, wants in zip(got, gradients(exact[:2], [*wide, *leaves], [x.double() for x in weights]), strict=True):
        close(has.cpu(), wants, 4 * tolerance)


@pytest.mark.parametrize("function", [functional.gelu, functional.relu], ids=lambda function: function.__name__)
def test_an_activation_instead_of_softmax(device, function):
    """The package gets it from out and lse."""
    q, k, v = qkv = [x.to(device) for x in tensors(1, H, H, 60, 60)]
    out, aux = flex_attention(*qkv, mods.generate_activation_score_mod(function), return_aux=AuxRequest(lse=True))
    want = function(q.double() @ k.double().mT / 4) @ v.double()
    close(mods.undo_softmax(out, aux.lse, v.sum(-2, keepdim=True)), want, 1e-4)


def test_an_approximate_softcap_is_refused(device):
    """It is a torch.autograd.Function around an operator of the package."""
    q, k, v = (x.to(device) for x in tensors(1, H, H, 60, 60))
    with pytest.raises(NotImplementedError, match=r"autograd\.Function.*softcapping\.py, line"):
        flex_attention(q, k, v, mods.generate_tanh_softcap(20, approx=True))


def tiles(n, device):
    """Three of n tiles for each tile of queries."""
    drawn = torch.rand(B, H, n, n, generator=torch.Generator().manual_seed(n))
    return drawn.argsort(-1)[..., :3].to(device, torch.int32)


def causal_blocks(batches, heads, **options):
    return lambda device: causal.create_causal_block_mask_fast(batches, heads, N, N, device, **options)


BLOCK_MASKS = {
    "causal, full blocks apart": causal_blocks(1, None),
    "causal, all partial": causal_blocks(B, H, separate_full_blocks=False),
    "vsa": lambda device: masks.create_vsa_block_mask(tiles(13, device), 16, 13),
    "vsa, with padding": lambda device: masks.create_vsa_block_mask(
        tiles(13, device), 16, 13, integers(17, 13, device=device, low=1)
    ),
    "vsa, for FA4": lambda device: masks.create_vsa_flash_block_mask(
        tiles(7, device), 32, 7, 16, integers(33, 7, device=device, low=1)
    ),
}


@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_block_masks(device, name):
    """The package lists the blocks itself. PyTorch's function on a CPU does not look at lists, so it is no measure."""
    block_mask, on_cpu = BLOCK_MASKS[name](device), BLOCK_MASKS[name]("cpu")
    (rows, columns), (len_q, len_kv) = on_cpu.BLOCK_SIZE, on_cpu.shape[-2:]
    dense = on_cpu.to_dense().bool().repeat_interleave(rows, 2).repeat_interleave(columns, 3)[:, :, :len_q, :len_kv]
    dense = dense & create_mask(on_cpu.mask_mod, 1, 1, len_q, len_kv, device="cpu")
    assert 0 < dense.float().mean() < 1
    qkv = tensors(B, H, H, len_q, len_kv)
    leaves, wide = [x.to(device).requires_grad_() for x in qkv], [x.double().requires_grad_() for x in qkv]
    out, want = flex_attention(*leaves, block_mask=block_mask), attention(*wide, None, dense)[0]
    close(out.cpu(), want, tolerance_of(device, out.dtype))
    for has, wants in zip(*(torch.autograd.grad(x.sin().sum(), y) for x, y in ((out, leaves), (want, wide)))):
        close(has.cpu(), wants, 4 * tolerance_of(device, out.dtype))
