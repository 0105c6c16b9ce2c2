"""Clients on a GPU, unchanged: transformers and Diffusers with this package, and both through PyTorch's attention.

Hopper's kernels need halves. So there the distance from fp32 is compared with that of the client's own attention in the
same dtype. Tokens are compared in fp32, where a client's own attention and ours choose the same ones.
"""

import contextlib
import warnings

import pytest
import torch
from harness import need
from harness_clients import counted
from harness_cuda import no_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn

if no_gpu():
    pytest.skip(no_gpu(), allow_module_level=True)
need("transformers")
need("diffusers")
from harness_diffusers import BACKENDS, PICTURES, dispatch, model_of, step  # noqa: E402
from harness_transformers import DECODERS, LENGTHS, models, ours, tokens, trained, transformers, watch  # noqa: E402
from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402

from flash_attn.integrations import diffusers as ours_in_diffusers  # noqa: E402

NO_NOISE = pytest.mark.filterwarnings("ignore")


def on_gpu(*found, dtype=None):
    return [x.to("cuda", dtype) for x in found]


@pytest.fixture
def registered():
    with ours.register() as registration:
        yield registration


@pytest.fixture
def calls(monkeypatch):
    """The functions that our attention of transformers called, and those that transformers' own called."""
    found = watch(monkeypatch)
    flash_utils.lazy_import_flash_attention("flash_attention_2")
    for name in ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(flash_utils, name, counted(getattr(flash_utils, name), found))
    return found


def no_farther(mine, theirs, exact):
    """We are at most twice as far from the exact result as the client's own attention, plus a rounding to bf16."""
    mine, theirs, exact = (x.detach().double() for x in (mine, theirs, exact))
    distances = (mine - exact).norm(), (theirs - exact).norm()
    assert distances[0] <= 2 * distances[1] + 2**-9 * exact.norm(), distances


# ---- transformers --------------------------------------------------------------------------------------------------


def test_register_on_a_machine_with_a_gpu(registered):
    assert 'attn_implementation="flash_attn" runs' in str(registered)
    assert "flash_attention_2" not in str(registered)


@pytest.mark.parametrize("attention", ["flash_attn", "flash_attention_2"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_batch(registered, calls, name, attention):
    """bf16, with and without gradients, and packed sequences. gpt-oss has no "flash_attention_2"."""
    if (name, attention) == ("gpt-oss", "flash_attention_2"):
        pytest.skip("transformers refuses it")
    (exact, _), (theirs, mine) = (models(name, attention) for _ in range(2))
    exact, (theirs, mine) = exact.cuda(), on_gpu(theirs, mine, dtype=torch.bfloat16)
    ids, mask = on_gpu(*tokens())
    with torch.no_grad():
        results = [model(ids, attention_mask=mask).logits[mask.bool()] for model in (mine, theirs, exact)]
        no_farther(*results)
        packed = ids[mask.bool()][None]
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].cuda()
        no_farther(mine(packed, position_ids=positions, use_cache=False).logits[0], *results[1:])
    assert "flash_attn_varlen_func" in calls
    (losses, grads), *others = (trained(model, ids, mask) for model in (mine, theirs, exact))
    no_farther(losses, *(x for x, _ in others))
    for grad, *both in zip(grads, *(x for _, x in others)):
        no_farther(grad, *both)


@torch.no_grad()
def test_no_layer_waits_for_the_gpu(registered, calls):
    """A forward pass with a cache does not synchronize, and finds packed sequences, also in a buffer of positions."""
    theirs, mine = on_gpu(*models("Llama"))
    ids, mask = on_gpu(*tokens())
    ids = ids[mask.bool()][None]
    positions = torch.arange(ids.shape[1], device="cuda")[None]
    expected = theirs(ids).logits
    for options in ({}, {"position_ids": positions}):
        mine(ids, **options)  # kernels are loaded
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = mine(ids, **options).logits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert "flash_attn_varlen_func" not in calls
    positions.copy_(torch.cat([torch.arange(n) for n in LENGTHS]))
    out = mine(ids, position_ids=positions).logits[0]
    assert calls[-2:] == ["flash_attn_varlen_func"] * 2
    apart = torch.cat([theirs(row[None]).logits[0] for row in ids[0].split(LENGTHS)])
    torch.testing.assert_close(out, apart, rtol=1e-4, atol=1e-4)


@NO_NOISE
@pytest.mark.parametrize("attention", ["flash_attn", "flash_attention_2", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_and_cuda_graphs(registered, monkeypatch, attention, padded):
    """generate() compiles the step of a static cache with Inductor and captures it. All tokens are those of eager."""
    replays = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted(torch.cuda.CUDAGraph.replay, replays))
    theirs, mine = on_gpu(*models("Llama", attention))
    theirs.set_attn_implementation("eager")
    ids, mask = on_gpu(*tokens(LENGTHS if padded else (13, 13, 13), side="left"))
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    torch._dynamo.reset()
    through_us = flash_attn.sdpa() if attention == "sdpa" else contextlib.nullcontext()
    with through_us:
        out = mine.generate(ids, cache_implementation="static", **options)
        assert len(replays) >= 10, len(replays)
        again = mine.generate(ids, cache_implementation="static", **options)
    assert out.equal(theirs.generate(ids, **options)) and again.equal(out)


@NO_NOISE
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("attention", ["flash_attn", "flash_attention_2", "flash_attention_2, ours"])
def test_continuous_batching(calls, monkeypatch, attention, graphs):
    """Requests come and go, and their keys lie in pages. transformers asks for pages if a name ends in 2 or 3."""
    replays = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted(torch.cuda.CUDAGraph.replay, replays))
    names = {"flash_attn": ["flash_attn"], "flash_attention_2": []}.get(attention, ["flash_attention_2"])
    with ours.register(names):
        theirs, mine = on_gpu(*models("Llama", attention.partition(",")[0]))
        theirs.set_attn_implementation("eager")
        torch.manual_seed(3)
        prompts = [torch.randint(1, 97, (n,)).tolist() for n in (9, 4, 13, 17, 2)]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, use_cuda_graph=graphs, auto_switch_to_flash=False
        )
        found = mine.generate_batch(
            prompts, generation_config=transformers.GenerationConfig(**options), continuous_batching_config=batching
        )
    order = sorted(found, key=lambda request: int(request.rpartition("_")[2]))
    expected = [theirs.generate(torch.tensor([x]).cuda(), **options)[0, len(x) :].tolist() for x in prompts]
    assert [found[request].generated_tokens for request in order] == expected
    assert bool(replays) == graphs
    assert ("flash_attn_with_kvcache" in calls) == (attention != "flash_attn") and calls


# ---- Diffusers -----------------------------------------------------------------------------------------------------


def check_step(name, backend, context=contextlib.nullcontext):
    """Beside plain arithmetic: PyTorch's choice on Hopper, cuDNN, gave NaN in the gradient of Flux now and then."""
    with sdpa_kernel(SDPBackend.MATH):
        exact, theirs = (step(name, "native", "cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    with context():
        mine = step(name, backend, "cuda", torch.bfloat16)
    no_farther(mine[0], theirs[0], exact[0])
    no_farther(mine[1], theirs[1], exact[1])
    for grad, other, true in zip(mine[2], theirs[2], exact[2], strict=True):
        no_farther(grad, other, true)


@pytest.mark.parametrize("name", PICTURES[:2])
@pytest.mark.parametrize("backend", ["flash", "flash_varlen"])
def test_diffusers_takes_this_package_as_it_is(monkeypatch, name, backend):
    found = []
    for function in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setattr(dispatch, function, counted(getattr(dispatch, function), found))
    monkeypatch.setattr(dispatch, "_wrapped_flash_attn_forward", counted(dispatch._wrapped_flash_attn_forward, found))
    check_step(name, backend)
    assert found


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_of_diffusers(monkeypatch, name, backend):
    found = []
    for function in ("attend", "attend_under"):
        monkeypatch.setattr(ours_in_diffusers, function, counted(getattr(ours_in_diffusers, function), found))
    check_step(name, backend, lambda: ours_in_diffusers.register([backend]))
    assert found


@pytest.mark.parametrize("name", PICTURES[:2])
@pytest.mark.parametrize("backend", ["native", "_native_flash"])
def test_diffusers_through_pytorchs_attention(name, backend):
    check_step(name, backend, flash_attn.sdpa)
    model, inputs = model_of(name, "cuda", torch.bfloat16)
    with flash_attn.sdpa(), dispatch.attention_backend(backend), torch.no_grad():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(**inputs)
            torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages()]
    assert any("attn_fwd" in kernel for kernel in kernels), kernels


@NO_NOISE
@pytest.mark.parametrize("backend", ["flash", "_flash_3"])
def test_compiled_blocks_of_diffusers(backend):
    with ours_in_diffusers.register(), torch.no_grad(), warnings.catch_warnings():
        model, inputs = model_of(PICTURES[1], "cuda", torch.bfloat16)
        model.set_attention_backend(backend)
        want = model(**inputs).sample
        torch._dynamo.reset()
        model.compile_repeated_blocks(fullgraph=True)
        torch.testing.assert_close(model(**inputs).sample, want, rtol=2e-2, atol=2e-2)
        model.set_attention_backend("native")
