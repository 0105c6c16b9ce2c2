"""Tiny models of Diffusers with random weights, their inputs, and a step of training."""

import contextlib

from harness import need

need("diffusers")
import diffusers  # noqa: E402
import diffusers.models.attention_dispatch as dispatch  # noqa: E402
import torch  # noqa: E402
from harness_clients import close  # noqa: E402

FLUX = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 64, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
QWEN = {
    "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 3, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
}  # fmt: skip


def inputs_of(name):
    if name == "FluxTransformer2DModel":
        return FLUX, {
            "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 7, 32),
            "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 2.0]),
            "img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(7, 3),
        }  # fmt: skip
    if name == "WanTransformer3DModel":
        inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 7, 16)}
        return WAN, {**inputs, "timestep": torch.tensor([3])}
    mask = torch.ones(2, 7, dtype=torch.long)  # of the text, which stands before the image: a hole
    mask[0, 4:] = 0
    return QWEN, {
        "hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states_mask": mask, "timestep": torch.tensor([1.0, 2.0]), "img_shapes": [[(1, 4, 4)]] * 2,
    }  # fmt: skip


def model_of(name, device="cpu", dtype=torch.float32):
    """A model with random weights and its inputs, the same on every device and, but for rounding, in every dtype."""
    torch.manual_seed(0)
    options, inputs = inputs_of(name)
    model = getattr(diffusers, name)(**options).to(device, dtype)
    for key, x in inputs.items():
        if isinstance(x, torch.Tensor):
            inputs[key] = x.to(device, dtype if x.is_floating_point() and key != "timestep" else x.dtype)
    return model, inputs


def step(name, backend, device="cpu", dtype=torch.float32):
    """A training step: the output, the loss's gradient of the input, and those of the parameters. None as backend is
    the one that Diffusers has already."""
    model, inputs = model_of(name, device, dtype)
    inputs["hidden_states"].requires_grad_()
    with contextlib.nullcontext() if backend is None else dispatch.attention_backend(backend):
        out = model(**inputs).sample
        out.square().mean().backward()
    return out.detach(), inputs["hidden_states"].grad, [x.grad for x in model.parameters() if x.grad is not None]


def same_step(mine, theirs):
    close(mine[0], theirs[0])
    for grad, want in zip([mine[1], *mine[2]], [theirs[1], *theirs[2]]):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6)


BACKENDS = ["flash", "flash_varlen", "_flash_3", "_flash_varlen_3", "flex"]
PICTURES = ["FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"]
