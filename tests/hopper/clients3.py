"""Programs that use clients with the package flash_attn_3. test_hopper_clients.py runs each in a new process, because
clients look for packages when they are imported:

python clients3.py PROGRAM cpu
"""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import flash_attn_3.flash_attn_interface as fa3
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind site-packages, which may have a folder tests
from harness_clients import close, counted

DEVICE = sys.argv[2]
ON_CPU = DEVICE == "cpu"
CALLS = []  # the names of the functions of flash_attn_3 that a client called


def watch(module, *names):
    for name in names:
        function = getattr(module, name)
        assert function.__module__.startswith("flash_attn_3"), function
        setattr(module, name, counted(function, CALLS))


def called():
    names = set(CALLS)
    CALLS.clear()
    return names


def transformers():
    """attn_implementation="flash_attention_3", transformers' own. It looks for a GPU and for the package."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers import modeling_flash_attention_utils as flash
    from transformers.utils import import_utils

    matrix = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    assert matrix[3]["pkg_availability_check"]()
    if ON_CPU:  # the answers about a GPU
        import_utils.is_torch_cuda_available = lambda: True
        matrix[3] = {**matrix[3], "supported_devices": ((lambda: True, "cuda"),), "cuda_min_major_version": None}
    assert import_utils.is_flash_attn_3_available()
    flash.lazy_import_flash_attention("flash_attention_3")
    watch(flash, "_flash_fn", "_flash_varlen_fn")

    from harness_transformers import LENGTHS, models, tokens, trained

    for name in ("Llama", "Mistral", "Gemma2"):
        theirs, mine = (model.to(DEVICE) for model in models(name, "flash_attention_3"))
        assert mine.config._attn_implementation == "flash_attention_3"
        ids, mask = (x.to(DEVICE) for x in tokens())
        positions = torch.cat([torch.arange(n, device=DEVICE) for n in LENGTHS])[None]
        with torch.no_grad():
            packed = mine(ids[mask.bool()][None], position_ids=positions, use_cache=False).logits[0]
            close(packed, torch.cat([theirs(row[:n][None]).logits[0] for row, n in zip(ids, LENGTHS)]), 1e-5)
            assert called() == {"flash_attn_varlen_func"}
            close(mine(ids[2:]).logits, theirs(ids[2:]).logits, 1e-5)
            assert called() == {"flash_attn_func"}
            left, beside = (x.to(DEVICE) for x in tokens(side="left"))
            options = {"attention_mask": beside, "max_new_tokens": 6, "do_sample": False}
            assert mine.generate(left, **options).equal(theirs.generate(left, **options))
            called()
        (losses, grads), (wanted_losses, wanted) = (trained(model, ids, mask) for model in (mine, theirs))
        assert called() == {"flash_attn_varlen_func"}
        close(losses, wanted_losses, 1e-5)
        for grad, want in zip(grads, wanted):
            torch.testing.assert_close(grad, want, rtol=1e-3, atol=1e-5)

    watch(flash, "_flash_with_kvcache_fn")
    if ON_CPU:  # it asks for pages if there is a GPU
        from transformers.generation.continuous_batching import initialization

        found = SimpleNamespace(is_available=lambda: True)
        initialization.torch = SimpleNamespace(**{**vars(torch), "cuda": found})
    theirs, mine = (model.to(DEVICE).eval() for model in models("Llama", "flash_attention_3"))
    prompts = [torch.randint(1, 97, (n,)).tolist() for n in (9, 4, 13, 17)]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    size_of_page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # older releases
    batching = ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=64, max_blocks_per_request=8, use_cuda_graph=not ON_CPU, **{size_of_page: 8}
    )
    found = mine.generate_batch(
        prompts, generation_config=GenerationConfig(**options), continuous_batching_config=batching
    )
    order = sorted(found, key=lambda request: int(request.rpartition("_")[2]))
    expected = [theirs.generate(torch.tensor([x], device=DEVICE), **options)[0, len(x) :].tolist() for x in prompts]
    assert [found[request].generated_tokens for request in order] == expected
    assert called() == {"flash_attn_varlen_func", "flash_attn_with_kvcache"}


def diffusers():
    """The backends _flash_3 and _flash_varlen_3, Diffusers' own. The first has no gradients, by Diffusers."""
    import diffusers.models.attention_dispatch as dispatch

    assert dispatch._CAN_USE_FLASH_ATTN_3
    watch(dispatch, "flash_attn_3_func", "flash_attn_3_varlen_func")
    if ON_CPU:  # Diffusers' op is for GPUs
        op = dispatch._wrapped_flash_attn_3
        op.register_kernel("cpu")(op._init_fn)

    from harness_diffusers import PICTURES, model_of, same_step, step

    for name in PICTURES[:2]:
        same_step(step(name, "_flash_varlen_3", DEVICE), step(name, "native", DEVICE))
        assert called() == {"flash_attn_varlen_func"}
        model, inputs = model_of(name, DEVICE)
        found = []
        for backend in ("_flash_3", "native"):
            model.set_attention_backend(backend)
            with torch.no_grad():
                found.append(model(**inputs).sample)
        close(*found, 1e-5)
        assert called() == {"flash_attn_func"}


def torchs():
    """torch.nn.attention.activate_flash_attention_impl("FA3")."""
    from torch.nn import attention
    from torch.nn.attention import _fa3

    flash, math = attention.SDPBackend.FLASH_ATTENTION, attention.SDPBackend.MATH

    def by(backend, dtype, is_causal):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        with attention.sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=0.3)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    def by_torchs_functions(is_causal):
        """What torch calls for tensors of a GPU."""
        forward, backward = (
            getattr(_fa3, f"_fa3_scaled_dot_product_flash_attention_{name}")
            for name in ("forward_impl_default", "backward_impl")
        )
        out, lse, _, _, *sizes, seed, offset, _ = forward(q, k, v, 0.0, is_causal, scale=0.3)
        saved = q, k, v, out, lse, None, None, *sizes, 0.0, is_causal, seed, offset
        return out, *backward(dout, *saved, scale=0.3)

    made = functools.partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    for is_causal in (False, True):
        q, k, v, dout = made(4, 2, 4, 70, 64)
        theirs, true = by(flash, torch.bfloat16, is_causal), by(math, torch.float64, is_causal)
        attention.activate_flash_attention_impl("FA3")
        assert attention.current_flash_attention_impl() == "FA3"
        if ON_CPU:
            _fa3._fa3_common_support_error = lambda *unused: None  # is there a Hopper GPU?
        results = by_torchs_functions(is_causal) if ON_CPU else by(flash, torch.bfloat16, is_causal)
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
        assert results[0].stride() == q.stride()
        for mine, other, exact in zip(results, theirs, true):
            assert (mine - exact).abs().max() <= 2 * (other - exact).abs().max()

    attention.activate_flash_attention_impl("FA3")
    cu, longest = torch.tensor([0, 9, 40], dtype=torch.int32, device=DEVICE), 31
    q, k, v = made(3, 40, 4, 64)
    forward = torch.ops.aten._flash_attention_forward if not ON_CPU else _fa3._fa3_flash_attention_forward_impl_default
    out, lse, *_ = forward(q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=0.3, window_size_left=5)
    want, want_lse = fa3.flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, softmax_scale=0.3, causal=True, window_size=(5, 0), return_attn_probs=True
    )
    close(out, want)
    close(lse, want_lse)
    if hasattr(_fa3, "_fa3_flash_attention_forward_no_dropout_inplace_impl"):  # torch 2.13
        filled = torch.empty_like(q)
        args = filled, q, k, v, cu, cu, longest, longest, 0.0, True, False
        _fa3._fa3_flash_attention_forward_no_dropout_inplace_impl(*args, scale=0.3, window_size_left=5)
        close(filled, want)
    attention.restore_flash_attention_impl()


def simpletuner():
    """attention_mechanism="flash-attn-3" and "flash-attn-3-varlen": Diffusers' backends, and the packed calls."""
    import diffusers.models.attention_dispatch as dispatch
    from harness_diffusers import same_step, step
    from simpletuner.helpers.training.attention_backend import (
        AttentionBackendController,
        AttentionPhase,
        get_packed_attention_backend,
    )

    watch(dispatch, "flash_attn_3_func", "flash_attn_3_varlen_func")
    expected = step("WanTransformer3DModel", "native", DEVICE)
    config = SimpleNamespace(attention_mechanism="flash-attn-3-varlen")
    AttentionBackendController.apply(config, AttentionPhase.TRAIN)
    same_step(step("WanTransformer3DModel", None, DEVICE), expected)
    assert called() == {"flash_attn_varlen_func"}

    backend = get_packed_attention_backend("flash-attn-3")
    watch(backend, "fixed_qkvpacked_func", "varlen_unpacked_func")
    qkv, mask = torch.randn(2, 9, 3, 2, 16, device=DEVICE), torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    mask[0, 2:5] = mask[1, 7:] = False
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    close(backend.qkvpacked(qkv), F.scaled_dot_product_attention(q, k, v).transpose(1, 2))
    assert called() == {"flash_attn_qkvpacked_func"}
    want = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=0.3).transpose(1, 2)
    close(backend.qkvpacked(qkv, mask, softmax_scale=0.3)[mask], want[mask])
    assert called() == {"flash_attn_varlen_func"}


PROGRAMS = {"transformers": transformers, "diffusers": diffusers, "torch": torchs, "simpletuner": simpletuner}

if __name__ == "__main__":
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]]()
    print("equal")
