"""The reference kernels are the specification of all others, and are compared with float64 PyTorch. The oracle is
compared with PyTorch's own attention, so that the comparison ends at code that is not ours."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import DENSE, PACKED, TINY, WINDOWS, Case, each, in_dtypes
from harness import offsets, verify
from oracle import attention, dropout_keep, philox4x32, rotate, visible

from flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("reference_isa")


@pytest.mark.parametrize("len_q, len_kv, causal", [(5, 9, False), (9, 5, False), (7, 7, True), (1, 6, True)])
def test_oracle_equals_sdpa(len_q, len_kv, causal):
    """SDPA's own causal mask is aligned to the top left, so SDPA gets our mask."""
    q, k, v = (torch.randn(n, 4, 8, dtype=torch.float64) for n in (len_q, len_kv, len_kv))
    mask = torch.ones(len_q, len_kv, dtype=torch.bool).tril(len_kv - len_q) if causal else None
    want = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, scale=0.7)
    out, lse = attention(q, k, v, scale=0.7, causal=causal)
    torch.testing.assert_close(out, want.transpose(0, 1), rtol=1e-13, atol=1e-13)
    if not causal:
        assert torch.allclose(lse, (0.7 * torch.einsum("ihd,jhd->hij", q, k)).exp().sum(-1).log())


@pytest.mark.parametrize(
    "len_q, len_kv, causal, window, picture",
    [
        (2, 5, True, (-1, -1), "xxxx. xxxxx"),
        (5, 2, True, (-1, -1), ".. .. .. x. xx"),
        (3, 4, False, (1, 0), "xx.. .xx. ..xx"),
        (4, 2, False, (-1, 2), "x. xx xx xx"),
        (3, 5, True, (0, 9), "..x.. ...x. ....x"),
        (2, 3, False, (-1, -1), "xxx xxx"),
    ],
)
def test_oracle_mask_pictures(len_q, len_kv, causal, window, picture):
    see = visible(len_q, len_kv, causal, window)
    assert " ".join("".join(".x"[int(cell)] for cell in row) for row in see) == picture


def test_philox_known_answers():
    """The generator's published vectors: rounds, counter, key, result."""
    import numpy as np

    ones = 0xFFFFFFFF
    vectors = [
        (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, (ones,) * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ]
    for rounds, counter, key, want in vectors:
        words = philox4x32([np.array(c, dtype=np.uint64) for c in counter], key, rounds)
        assert " ".join(f"{int(w):08x}" for w in words) == want


def test_oracle_dropout_rate():
    for p, keep in ((0.17, 212 / 256), (0.5, 128 / 256), (1e-30, 1.0)):
        assert abs(dropout_keep(7, 0, 1, 3, 160, 320, p).double().mean().item() - keep) < 5e-3


def test_oracle_rotation_by_hand():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    turn = torch.tensor([1])
    assert rotate(x, cos, sin, turn, True).flatten().tolist() == [-2.0, 1.0, 3.0, 4.0]
    assert rotate(x, cos, sin, turn, False).flatten().tolist() == [-3.0, 2.0, 1.0, 4.0]
    assert rotate(x, cos, sin, torch.tensor([2]), True).flatten().tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("case", in_dtypes(DENSE + WINDOWS + TINY, ("fp64",)), ids=repr)
def test_dense(case):
    verify(case, backward=case.values not in ("huge", "sentinel"))


@pytest.mark.parametrize("case", in_dtypes(PACKED, ("fp64",)), ids=repr)
def test_packed(case):
    verify(case, backward=True)


@pytest.mark.parametrize(
    "case", each(Case(33, 49, h_kv=1), dtype=("fp32", "bf16", "fp16"), dropout=(0.0, 0.2)), ids=repr
)
def test_rounded_dtypes(case):
    verify(case, backward=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (3, 2), "softcap": 2.0},
        {"causal": True, "alibi_slopes": torch.tensor([0.3, 0.1]), "softmax_scale": 0.7},
    ],
    ids=str,
)
def test_gradcheck(options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 3, dtype=torch.float64, requires_grad=True) for n, h in ((5, 2), (6, 1), (6, 1)))
    assert torch.autograd.gradcheck(lambda q, k, v: flash_attn_func(q, k, v, **options), (q, k, v))
    cu_q, cu_k = offsets((2, 0, 3)), offsets((1, 2, 3))
    packed = [x.detach()[0].requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 3, **options), packed
    )


def test_nan_in_a_row_stays_in_that_row():
    q, k, v = (torch.randn(1, 9, 1, 8) for _ in range(3))
    q[0, 4, 0, 3] = math.nan
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    bad = torch.zeros(9, dtype=torch.bool)
    bad[4] = True
    assert torch.equal(out[0, :, 0].isnan(), bad[:, None].expand(9, 8))
    assert torch.equal(lse[0, 0].isnan(), bad)
