"""flash_attn.integrations.flex: the flex_attention of PyTorch's module."""

import pytest
import torch
import torch.nn.attention.flex_attention as torchs_flex
from harness_clients import close

from flash_attn.integrations import flex as flex_integration


def test_flex_of_torch():
    theirs = torchs_flex.flex_attention, torchs_flex.create_block_mask
    q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    with flex_integration.register() as registration:
        assert "flex_attention is that of flash_attn" in str(registration)
        mask = torchs_flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 100, 100, "cpu")
        out = torchs_flex.flex_attention(q, k, v, block_mask=mask)
        out.sum().backward()  # PyTorch has no backward on the CPU
        with pytest.raises(Exception, match=r"(?i)cpu|triton|flex") as caught:
            torchs_flex.flex_attention(q, k, v, block_mask=mask, kernel_options={"BACKEND": "TRITON"})
        assert not isinstance(caught.value, RecursionError)
    assert (torchs_flex.flex_attention, torchs_flex.create_block_mask) == theirs
    close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 1e-5)
