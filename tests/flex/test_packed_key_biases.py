"""A packed bias of keys alone is put in the order of all keys on a GPU (flex/options.py, ``of_all_keys``)."""

import pytest
import torch

from flash_attn import _extended_directly, flash_attn_varlen_func
from flash_attn.flex import attention as flex
from flash_attn.flex import options

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))
CU_Q, CU_K, MAX_Q, MAX_K = [0, 20, 20, 33, 50], [0, 30, 41, 41, 70], 20, 30
H, D = 4, 16


@pytest.fixture(params=["cpu", GPU])
def device(request, monkeypatch):
    """CPUs order the keys, too, and small calls."""
    monkeypatch.setattr(options, "MANY_PAIRS", 0)
    monkeypatch.setattr(options, "DEVICES_OF_KEYS", ("cpu", "cuda"))
    return request.param


def inputs(device, low=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (52, H, D), (73, 2, D), (73, 2, D)
    q, k, v = (torch.randn(x, generator=generator).to(device) for x in shapes)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (CU_Q, CU_K))
    return q, k, v, cu_q, cu_k, generator


WAYS = ["short", "watched", "compiled"]


def way_of(function, way):
    if way == "compiled":
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)
    if way == "short":
        return function

    def watched(*args, **kwargs):
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            return function(*args, **kwargs)

    return watched


def run(way, device, bias, **kwargs):
    q, k, v, cu_q, cu_k, _ = inputs(device)
    leaves = [x.requires_grad_() for x in (q, k, v)] + [bias.detach().to(device).requires_grad_()]

    def call(q, k, v, bias):
        return flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, MAX_Q, MAX_K, attn_bias=bias, return_lse=True, return_max_logits=True, **kwargs
        )

    out, lse, max_logits = way_of(call, way)(*leaves)
    torch.manual_seed(0)
    rows = slice(CU_Q[-1])  # rows behind the last sequence have no lse
    (out[rows] * torch.randn(out[rows].shape).to(device)).sum().backward()
    return [out[rows].detach(), lse[:, rows].detach(), max_logits.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, H, 1, MAX_K), (4, 1, 1, MAX_K), (MAX_K,), (4, H, 1, MAX_K)])
@pytest.mark.parametrize("causal", (False, True))
def test_it_is_the_bias_of_each_row(causal, shape, way, device, monkeypatch):
    """A bias with rows is read as it lies. Some sequences have low biases, which the rows subtract."""
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if len(shape) == 4 and shape[0] > 1:
        bias[1] -= 1e6
    made, of_all_keys = [], options.of_all_keys
    monkeypatch.setattr(options, "of_all_keys", lambda *args: made.append(of_all_keys(*args)) or made[-1])
    mask = torch.ones(MAX_Q, MAX_K, dtype=torch.bool)
    mask[3:5, 7] = False
    got = run(way, device, bias, causal=causal, attn_mask=mask.to(device))
    assert len(made) == 1 and made[0].shape[-1] == 73
    monkeypatch.setattr(options, "MANY_PAIRS", 1 << 60)
    want = run(way, device, bias, causal=causal, attn_mask=mask.to(device))
    assert len(made) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_a_bias_of_all_keys_is_refused(device):
    """Only the function itself may bring one."""
    q, k, v, cu_q, cu_k, _ = inputs(device)
    with pytest.raises(RuntimeError, match="attn_bias must have the shape"):
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, MAX_Q, MAX_K, attn_bias=torch.randn(1, H, 1, 73, device=device))


def test_both_ways_have_the_same_program(device, monkeypatch):
    """Kernels that were compiled ahead by the long way serve the short way."""
    calls, prepare = [], flex.prepare
    monkeypatch.setattr(flex, "prepare", lambda *args: calls.append(prepare(*args)) or calls[-1])
    run("watched", device, torch.randn(1, H, 1, MAX_K))
    dims = (False, True, False, True), torch.float32
    score, *_ = _extended_directly._mods_of_kind(
        torch.float32, True, False, None, dims, (dims[0][:2] + (True,), torch.float32), None, False, False, True
    )
    ((call, _),) = calls
    assert call.score.text == score.text
