"""Helpers around models: generation, weights from a directory, timing, test data."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.utils.benchmark import benchmark_all, benchmark_backward, benchmark_fwd_bwd, pytorch_profiler
from flash_attn.utils.generation import (
    GenerationMixin,
    InferenceParams,
    allocate_inference_cache,
    modify_logit_for_repetition_penalty,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)
from flash_attn.utils.pretrained import state_dict_from_pretrained
from flash_attn.utils.testing import (
    attention_ref,
    construct_local_mask,
    generate_qkv,
    generate_random_padding_mask,
)
from flash_attn.utils.torch import custom_bwd, custom_fwd

# ---- generation ----------------------------------------------------------------------------------------------------


class TinyGPT(GenerationMixin, torch.nn.Module):
    """Two blocks with caches."""

    def __init__(self):
        super().__init__()
        self.embeddings = GPT2Embeddings(32, 19, 24)
        self.layers = torch.nn.ModuleList(
            Block(32, lambda dim, i=i: MHA(dim, 2, causal=True, layer_idx=i, use_flash_attn=True)) for i in range(2)
        )
        self.head = torch.nn.Linear(32, 19, bias=False)

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0):
        x, residual = self.embeddings(input_ids, position_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, mixer_kwargs={"inference_params": inference_params})
        return SimpleNamespace(logits=self.head((x + residual)[:, -num_last_tokens:]))


def test_generation_is_the_whole_sequence_each_time():
    torch.manual_seed(0)
    model, prompt = TinyGPT(), torch.randint(0, 19, (2, 3))
    output = model.generate(prompt, 9, return_dict_in_generate=True, output_scores=True)
    sequence = prompt
    with torch.no_grad():
        for scores in output.scores:
            logits = model(sequence).logits[:, -1]
            torch.testing.assert_close(scores, logits, rtol=1e-4, atol=1e-5)
            sequence = torch.cat([sequence, logits.argmax(-1, keepdim=True)], 1)
    assert output.sequences.equal(sequence) and sequence.shape == (2, 9)
    teacher = torch.randint(0, 19, (2, 9))
    forced = model.generate(prompt, 9, teacher_outputs=teacher, return_dict_in_generate=True, output_scores=True)
    assert forced.sequences[:, 3:].equal(teacher[:, 3:])
    last = model(torch.cat([prompt, teacher[:, 3:8]], 1)).logits[:, -1]
    torch.testing.assert_close(forced.scores[-1], last, rtol=1e-4, atol=1e-5)
    assert len(model.generate(prompt[:1], 9, eos_token_id=int(sequence[0, 4]))[0]) <= 5
    assert model.generate(prompt, 9, vocab_size=5)[:, 3:].max() < 5


def test_filters():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    modify_logits_for_top_k_filtering(logits, 2)
    assert logits.isinf().tolist() == [[True, False, True, False]]
    logits = torch.tensor([[0.5, 0.05, 0.15, 0.3]]).log()
    modify_logits_for_top_p_filtering(logits, 0.7)
    assert logits.isinf().tolist() == [[False, True, True, False]]
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    assert modify_logit_for_repetition_penalty(logits, torch.tensor([[0, 1, 0]]), 2.0).tolist() == [[1, -4, 1]]


def test_sample():
    logits = torch.tensor([0.5, 0.05, 0.15, 0.3]).log().expand(4000, 4).contiguous()
    assert sample(logits, top_k=1).eq(0).all()
    share = sample(logits, top_k=0).bincount(minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.5, 0.05, 0.15, 0.3]), rtol=0, atol=0.05)
    share = sample(logits, top_k=2).bincount(minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.625, 0, 0, 0.375]), rtol=0, atol=0.05)
    assert set(sample(logits, top_k=0, top_p=0.7).tolist()) == {0, 3}
    share = sample(logits, top_k=0, temperature=0.1).bincount(minlength=4) / 4000
    assert share[0] > 0.98
    assert logits[0, 1] == torch.tensor(0.05).log()  # the caller's logits do not change


def test_inference_params():
    params = InferenceParams(8, 2, seqlen_offset=5, lengths_per_sample=torch.tensor([3, 5], dtype=torch.int32))
    params.key_value_memory_dict.update(allocate_inference_cache(2, 8, 1, 16, 2, "cpu", torch.float32))
    params.reset(4, 1)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (4, 1, 0)
    assert not params.lengths_per_sample.any() and sorted(params.key_value_memory_dict) == [0, 1]
    assert sorted(allocate_inference_cache(2, 8, 1, 16, [3, 7], "cpu")) == [3, 7]


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
def test_weights_from_a_directory(form, tmp_path):
    weights = {"a": torch.randn(3), "b": torch.arange(4)}
    if form == "safetensors":
        save_file(weights, tmp_path / "model.safetensors")
    elif form == "bin":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        for name, file in files.items():
            save_file({name: weights[name]}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    state = state_dict_from_pretrained(str(tmp_path))
    assert state["a"].equal(weights["a"]) and state["b"].equal(weights["b"])
    state = state_dict_from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert (state["a"].dtype, state["b"].dtype) == (torch.bfloat16, torch.int64)


def test_no_weights(tmp_path):
    with pytest.raises(OSError, match="has none of model.safetensors"):
        state_dict_from_pretrained(tmp_path)


# ---- timing --------------------------------------------------------------------------------------------------------


def test_timing(capsys, tmp_path):
    x = torch.randn(8, 8, requires_grad=True)
    results = benchmark_all(torch.tanh, x, repeats=2, desc="tanh")
    assert all(measurement.mean > 0 for _, measurement in results)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("tanh")] == [
        "tanh - Forward pass",
        "tanh - Backward pass",
        "tanh - Forward + Backward pass",
    ]
    forward, backward = benchmark_fwd_bwd(torch.tanh, x, repeats=1, verbose=False)
    assert forward[1].mean > 0 and backward[1].mean > 0
    with pytest.raises(RuntimeError, match="grad is"):
        benchmark_backward(torch.tanh, x, grad=torch.ones(3))
    pytorch_profiler(torch.tanh, x, backward=True, verbose=False, trace_filename=str(tmp_path / "trace.json"))
    assert "aten::tanh" in (tmp_path / "trace.json").read_text()


# ---- test data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, shortest", [("full", 40), ("random", 20), ("third", 13)])
def test_padding_masks(mode, shortest):
    lengths = generate_random_padding_mask(40, 200, "cpu", mode).sum(1)
    assert lengths.min() >= shortest and lengths.max() == 40
    assert (len(lengths.unique()) == 1) == (mode == "full")
    empty = generate_random_padding_mask(40, 7, "cpu", mode, zero_lengths=True).sum(1)
    assert (empty == 0).nonzero().flatten().tolist() == [0, 5, 6]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 1), (0, -1)])
def test_reference_and_packing_agree_with_the_kernels(window, causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 9, 4, 16), torch.randn(3, 13, 2, 16), torch.randn(3, 13, 2, 16)
    mask_q, mask_k = generate_random_padding_mask(9, 3, "cpu"), generate_random_padding_mask(13, 3, "cpu")
    options = {"causal": causal, "window_size": window}
    expected, p = attention_ref(q, k, v, **options)
    torch.testing.assert_close(flash_attn_func(q, k, v, **options), expected, rtol=1e-4, atol=1e-5)
    assert p.shape == (3, 4, 9, 13)

    packed = generate_qkv(q, k, v, mask_q, mask_k)
    out = packed[10](flash_attn_varlen_func(*packed[:7], **options))
    expected = attention_ref(q, k, v, mask_q, mask_k, **options)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

    kvpacked = generate_qkv(q, k, v, mask_q, mask_k, kvpacked=True)
    assert kvpacked[1].unbind(1)[1].equal(packed[2]) and len(kvpacked) == 11
    qkvpacked = generate_qkv(k, k, v, mask_k, mask_k, qkvpacked=True)
    assert qkvpacked[0].unbind(1)[2].equal(packed[2]) and len(qkvpacked) == 6
    assert generate_qkv(q, k, v)[3].tolist() == [0, 9, 18, 27]


def test_local_mask():
    outside = construct_local_mask(2, 5, (1, 0))
    assert outside.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]
    padded = construct_local_mask(2, 5, (1, 0), key_leftpad=torch.tensor([0, 3]))
    assert padded.int().tolist()[1] == [[[1, 1, 1, 0, 1], [1, 1, 1, 0, 0]]]
    kept = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    assert construct_local_mask(2, 5, (1, 0), None, kept, key_leftpad=torch.tensor([0, 3])).equal(padded)


def test_amp_decorators_take_no_device():
    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]
