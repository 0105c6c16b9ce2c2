"""Dense calls of few work tiles on Hopper. Their keys count as a cache: heads share tiles, keys are cut into parts."""

import pytest
import torch
from harness_cuda import check_extremes, found_plainly, no_hopper, with_extremes

from flash_attn import explain, flash_attn_func

pytestmark = pytest.mark.skipif(bool(no_hopper()), reason=no_hopper() or "a GPU is here")


def randn(*shape, grad=False):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


@pytest.mark.parametrize("options", ({}, {"causal": True}, {"window": (900, 20)}), ids=str)
@pytest.mark.parametrize("d", (64, 128, 192, 256))
def test_extremes_that_are_seen(d, options):
    """Infinities, NaN and huge values, in more than one part."""
    q, k, v = with_extremes(60, 3000, d, "bf16")
    on = [x.cuda()[None] for x in (q, k, v)]
    asked = {"window_size" if key == "window" else key: x for key, x in options.items()}
    assert explain(flash_attn_func, *on, **asked).num_splits > 1
    out, lse, _ = flash_attn_func(*on, return_attn_probs=True, **asked)
    check_extremes(str(options), out[0], lse[0], v, *found_plainly(q, k, v, **options))


@pytest.mark.parametrize("d", (64, 128, 192, 256))
def test_gradients_are_those_of_many_tiles(d):
    """The same queries and keys once alone, and once amid so many sequences that every SM has its tiles."""
    torch.manual_seed(0)
    q, k, v = randn(64, 100, 8, d), randn(64, 1500, 4, d), randn(64, 1500, 4, d)
    alone = [x[:1].clone().requires_grad_() for x in (q, k, v)]
    amid = [x.requires_grad_() for x in (q, k, v)]
    plans = [explain(flash_attn_func, *x, causal=True) for x in (alone, amid)]
    assert plans[0].num_splits > 1 and plans[1].num_splits == 1
    outs = [flash_attn_func(*x, causal=True)[:1] for x in (alone, amid)]
    dout = randn(1, 100, 8, d)
    torch.testing.assert_close(*outs, atol=1e-2, rtol=1e-2)
    for x, y in zip(torch.autograd.grad(outs[0], alone, dout), torch.autograd.grad(outs[1], amid, dout)):
        torch.testing.assert_close(x, y[:1], atol=2e-2, rtol=2e-2)


def test_nan_is_seen_in_a_part_whose_weight_is_zero():
    """All rows see the key, so NaN in its V makes them NaN, however far below the other scores its own lies."""
    q, k, v = torch.ones(1, 64, 8, 128), torch.zeros(1, 5000, 8, 128), torch.zeros(1, 5000, 8, 128)
    k[:, :600], v[:, 4000] = 1.5, float("nan")
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    assert explain(flash_attn_func, q, k, v, softmax_scale=1.0).num_splits > 1
    assert flash_attn_func(q, k, v, softmax_scale=1.0).isnan().all()


def test_sinks_come_once():
    """Parts know nothing of the sinks. They come when the parts are combined."""
    torch.manual_seed(0)
    q, k, v, sinks = randn(1, 40, 8, 128), randn(1, 4000, 2, 128), randn(1, 4000, 2, 128), torch.randn(8, device="cuda")
    assert explain(flash_attn_func, q, k, v).num_splits > 1
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    found, found_lse = flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
    share = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2)[..., None]
    torch.testing.assert_close(found.float(), out.float() * share, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found_lse, torch.logaddexp(lse, sinks[:, None].expand_as(lse)), atol=1e-4, rtol=1e-4)


def test_a_graph_replays():
    torch.manual_seed(0)
    q, k, v = randn(1, 64, 8, 128), randn(1, 5000, 8, 128), randn(1, 5000, 8, 128)
    want = flash_attn_func(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
