"""A program that uses SimpleTuner, unchanged, with this package. SimpleTuner changes Diffusers when it is imported. So
test_integrations_simpletuner.py runs the program in a new process.

Every ``attention_mechanism`` of flash attention is chosen as SimpleTuner's trainer chooses it, and its own copies of
Wan and Flux take a step of training. The step is compared with that of "native". Counters say which functions were
called.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parent))
import diffusers.models.attention_dispatch as dispatch
import torch
from harness_clients import close, counted
from harness_diffusers import inputs_of, same_step
from simpletuner.helpers.models.flux.attention import FluxFusedFlashAttnProcessor3
from simpletuner.helpers.models.flux.transformer import FluxTransformer2DModel
from simpletuner.helpers.models.wan.transformer import WanTransformer3DModel
from simpletuner.helpers.training.attention_backend import (
    AttentionBackendController,
    AttentionPhase,
    get_packed_attention_backend,
)

import flash_attn
from flash_attn.integrations import diffusers as ours

CALLS = []  # the functions that SimpleTuner called


def watch(place, name):
    setattr(place, name, counted(getattr(place, name), CALLS))


def called():
    names = set(CALLS)
    CALLS.clear()
    return names


def step(cls, change=lambda model: None):
    torch.manual_seed(0)
    options, inputs = inputs_of(cls.__name__)
    model = cls(**options)
    change(model)
    inputs["hidden_states"].requires_grad_()
    out = model(**inputs)
    out = out[0] if isinstance(out, tuple) else out.sample
    out.square().mean().backward()
    return out.detach(), inputs["hidden_states"].grad, [x.grad for x in model.parameters() if x.grad is not None]


def chosen(mechanism):
    AttentionBackendController.apply(SimpleNamespace(attention_mechanism=mechanism), AttentionPhase.TRAIN)


def mechanisms():
    expected = step(WanTransformer3DModel)
    for mechanism, function in {
        "flash": "flash_attn_func",
        "flash-attn": "flash_attn_func",
        "flash_attn": "flash_attn_func",
        "flash-attn-2": "flash_attn_varlen_func",
        "flash-attn-varlen": "flash_attn_varlen_func",
    }.items():
        chosen(mechanism)
        same_step(step(WanTransformer3DModel), expected)
        assert called() == {function}, mechanism
    with ours.register():
        for mechanism in ("flash-attn", "flash-attn-2", "flash-attn-3", "flash-attn-3-varlen", "flex", "flex-attn"):
            chosen(mechanism)
            same_step(step(WanTransformer3DModel), expected)
            assert called() == {"attend"}, mechanism
        chosen("diffusers")
    assert AttentionBackendController.active_backend() is None


def every_model():
    """``scaled_dot_product_attention`` reaches the models that no mechanism reaches, as Flux is."""
    for cls in (WanTransformer3DModel, FluxTransformer2DModel):
        expected = step(cls)
        with flash_attn.sdpa():
            print(f"{cls.__name__} calls sdpa", file=sys.stderr, flush=True)
            same_step(step(cls), expected)
            print("end of the calls", file=sys.stderr, flush=True)


def packed():
    """Flux with fused projections, and the packed calls with and without a mask."""
    backend = get_packed_attention_backend("flash-attn-2")
    for name in ("fixed_qkvpacked_func", "varlen_qkvpacked_func", "varlen_unpacked_func"):
        watch(backend, name)

    def fuse(model):
        for module in model.modules():
            if hasattr(module, "fuse_projections"):
                module.fuse_projections(fuse=True)
        model.set_attn_processor(FluxFusedFlashAttnProcessor3("flash-attn-2"))

    out, grad, _ = step(FluxTransformer2DModel, fuse)
    assert called() == {"flash_attn_qkvpacked_func"}
    expected = step(FluxTransformer2DModel)
    close(out, expected[0])
    close(grad, expected[1])

    torch.manual_seed(0)
    qkv, mask = torch.randn(2, 9, 3, 2, 16), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 2:5] = mask[1, 7:] = False
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=0.3).transpose(1, 2)
    close(backend.qkvpacked(qkv, mask, softmax_scale=0.3)[mask], want[mask])
    assert called() == {"flash_attn_varlen_qkvpacked_func"}
    backend.varlen_qkvpacked_func = None
    close(backend.qkvpacked(qkv, mask, softmax_scale=0.3)[mask], want[mask])
    assert called() == {"flash_attn_varlen_func"}


if __name__ == "__main__":
    for function in ("flash_attn_func", "flash_attn_varlen_func"):
        watch(dispatch, function)
    watch(ours, "attend")
    mechanisms()
    every_model()
    packed()
    print("equal")
