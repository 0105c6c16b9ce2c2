"""x-transformers with this package as its flash attention."""

import pytest
import torch
from harness import need

from flash_attn import flash_attn_varlen_func

need("x_transformers")
from x_transformers.attend import Attend  # noqa: E402


def test_x_transformers():
    """It takes our function for packed sequences, but for tensors of a GPU only."""
    attend = Attend(causal=True, flash=True, flash_pack_seq=True)
    assert attend.flash_attn_varlen_func is flash_attn_varlen_func
    q = torch.randn(1, 2, 9, 16)
    lengths = {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_k": torch.tensor([0, 4, 9])}
    with pytest.raises(AssertionError, match="only available on CUDA"):
        attend(q, q, q, flash_pack_seq_kwargs={**lengths, "max_seqlen_q": 5, "max_seqlen_k": 5})
