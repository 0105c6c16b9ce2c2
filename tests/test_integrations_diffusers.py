"""flash_attn.integrations.diffusers with the real library, unchanged, on the CPU: a step of training of tiny models.

Each backend is compared with the backend "native". Counters say which kernels were called.
"""

import functools

import pytest
import torch
from harness_clients import close, counted
from harness_diffusers import BACKENDS, PICTURES, dispatch, same_step, step

from flash_attn import flash_attn_func
from flash_attn import flex_attention as our_flex
from flash_attn.integrations import diffusers as ours


@pytest.fixture
def registered():
    with ours.register():
        yield


@pytest.mark.parametrize("name", PICTURES)
def test_training_steps_of_diffusers(registered, monkeypatch, name):
    found = []
    for function in ("attend", "attend_under"):
        monkeypatch.setattr(ours, function, counted(getattr(ours, function), found))
    expected = step(name, "native")
    assert not found
    for backend in BACKENDS:
        same_step(step(name, backend), expected)
        assert found
        found.clear()


@pytest.mark.parametrize("backend", ["flash", "flash_varlen"])
@pytest.mark.parametrize("name", PICTURES[:2])
def test_diffusers_takes_this_package_as_it_is(name, backend):
    """Without any registration, on the CPU."""
    same_step(step(name, backend), step(name, "native"))


def test_diffusers_is_as_before():
    registry = dispatch._AttentionBackendRegistry

    def state():
        tables = registry._backends, registry._constraints, registry._supported_arg_names
        return [dict(table) for table in tables], dispatch._CAN_USE_FLASH_ATTN_3

    before = state()
    with ours.register(["_flash_3"]) as registration:
        assert 'backend "_flash_3" runs on the kernels of flash_attn' in str(registration)
        assert state() != before
    assert state() == before
    with pytest.raises(ValueError, match="backends must be some of"):
        ours.register(["native"])


def test_only_backends_that_are_registered_need_no_package(monkeypatch):
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN", False)
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN_3", False)
    with ours.register(["flex", "_flash_3"]):
        assert not dispatch._CAN_USE_FLASH_ATTN and dispatch._CAN_USE_FLASH_ATTN_3
    with ours.register(["flash"]):
        assert dispatch._CAN_USE_FLASH_ATTN and not dispatch._CAN_USE_FLASH_ATTN_3
    assert not dispatch._CAN_USE_FLASH_ATTN


@pytest.mark.parametrize("name", ["_AttentionBackendRegistry", "_check_device", "_CAN_USE_FLASH_ATTN_3"])
def test_diffusers_of_another_version(monkeypatch, name):
    monkeypatch.delattr(dispatch, name)
    with pytest.raises(ImportError, match="needs Diffusers 0.36 or newer; this one lacks"):
        ours.register()


MASKS = {
    "none": None,
    "keys": (2, 11),
    "keys of all": (1, 1, 1, 11),
    "keys, one dimension": (11,),
    "rows and keys": (7, 11),
    "batch, rows and keys": (2, 7, 11),
    "heads": (2, 4, 7, 11),
    "keys of a batch": (2, 1, 1, 11),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_diffusers(registered, backend, kind, dtype):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 7, 4, 16), torch.randn(2, 2, 11, 2, 16)
    mask = whole = None
    if MASKS[kind]:
        mask = torch.rand(MASKS[kind]) > 0.4
        mask[..., 3] = True  # every row sees a key
        mask = mask if dtype == torch.bool else torch.where(mask, 0.5, -3.0)
        shapes = {"keys": (2, 1, 1, 11), "keys, one dimension": (1, 11), "batch, rows and keys": (2, 1, 7, 11)}
        whole = mask.view(shapes.get(kind, mask.shape))
    attend = functools.partial(dispatch.dispatch_attention_fn, q, k, v, mask, scale=0.3)
    with dispatch.attention_backend(backend):
        out = attend()
        again, lse = attend(attention_kwargs={"return_lse": True})
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, whole, scale=0.3, enable_gqa=True)
    close(out, expected.transpose(1, 2))
    close(again, out)
    scores = 0.3 * heads[0] @ heads[1].repeat_interleave(2, 1).transpose(2, 3)
    if whole is not None:
        scores = scores.masked_fill(~whole, -float("inf")) if dtype == torch.bool else scores + whole
    close(lse if backend != "_flash_3" else lse.transpose(1, 2), scores.logsumexp(-1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_in_diffusers(registered, backend):
    """flex counts from the first key, as PyTorch, and the others from the last, as flash-attn."""
    q, (k, v) = torch.randn(2, 7, 4, 16), torch.randn(2, 2, 11, 4, 16)
    with dispatch.attention_backend(backend):
        out = dispatch.dispatch_attention_fn(q, k, v, is_causal=True)
        with pytest.raises(ValueError, match=r"attn_mask must be .* it has the shape \(3, 11\)"):
            dispatch.dispatch_attention_fn(q, k, v, torch.ones(3, 11, dtype=torch.bool))
    seen = torch.ones(7, 11, dtype=torch.bool).tril(0 if backend == "flex" else 4)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), seen)
    close(out, expected.transpose(1, 2))


def test_block_masks_in_diffusers(registered):
    q = k = v = torch.randn(2, 70, 4, 16)
    mask = our_flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70, "cpu")
    with dispatch.attention_backend("flex"):
        out = dispatch.dispatch_attention_fn(q, k, v, mask)
    close(out, flash_attn_func(q, k, v, causal=True))
