"""Helpers around models: generation, weights from a directory, timing, test data."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from harness import need

from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.utils.benchmark import benchmark_all, benchmark_backward, benchmark_fwd_bwd, pytorch_profiler
from flash_attn.utils.generation import (
    GenerationMixin,
    InferenceParams,
    allocate_inference_cache,
    decode,
    decode_speculative,
    modify_logit_for_repetition_penalty,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
    sample_speculative,
    update_graph_cache,
)
from flash_attn.utils.library import triton_op
from flash_attn.utils.pretrained import state_dict_from_pretrained
from flash_attn.utils.testing import (
    attention_ref,
    construct_chunk_mask,
    construct_local_mask,
    generate_qkv,
    generate_random_padding_mask,
)
from flash_attn.utils.torch import custom_bwd, custom_fwd

need("safetensors")
from safetensors.torch import save_file  # noqa: E402

# ---- generation ----------------------------------------------------------------------------------------------------


class TinyGPT(GenerationMixin, torch.nn.Module):
    """Two blocks with caches."""

    def __init__(self, rotary_emb_dim=0):
        super().__init__()
        self.embeddings = GPT2Embeddings(32, 19, 24)
        self.layers = torch.nn.ModuleList(
            Block(
                32,
                lambda dim, i=i: MHA(
                    dim, 2, causal=True, layer_idx=i, use_flash_attn=True, rotary_emb_dim=rotary_emb_dim
                ),
            )
            for i in range(2)
        )
        self.head = torch.nn.Linear(32, 19, bias=False)

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        return {i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype) for i, layer in enumerate(self.layers)}

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


def test_decode_by_position():
    """The seventh argument is the token that ends a sequence."""
    torch.manual_seed(0)
    model, prompt = TinyGPT(), torch.randint(0, 19, (1, 3))
    sequences, scores = decode(prompt, model, 9)
    end = int(sequences[0, 4])
    ended = decode(prompt, model, 9, 1, 0.0, 1.0, end)
    assert ended.sequences.equal(sequences[:, : 3 + sequences[0, 3:].tolist().index(end) + 1])
    assert len(scores) == 6 and scores[0].shape == (1, 19)
    assert decode(prompt, model, 9, 1, 0.0, 1.0, None, None, 5).scores[0].shape == (1, 5)
    assert decode(torch.arange(3)[None], model, 9, repetition_penalty=1e9).sequences[0].unique().numel() == 9


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary_emb_dim", [0, 8, 16])
def test_graphs_decode_what_the_model_decodes(rotary_emb_dim, device, capsys):
    torch.manual_seed(0)
    model = TinyGPT(rotary_emb_dim).to(device)
    for batch, length in ((2, 9), (1, 7), (2, 20), (2, 9)):  # a graph of its own, the same memory, more memory, again
        prompt = torch.randint(0, 19, (batch, 3), device=device)
        expected = decode(prompt, model, length)
        found = decode(prompt, model, length, cg=True, enable_timing=True)
        assert found.sequences.equal(expected.sequences)
        for a, b in zip(found.scores, expected.scores):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith("Prompt processing + decoding time: ") for line in lines)
    cache = model._decoding_cache
    assert (cache.max_batch_size, cache.max_seqlen) == (2, 20) and set(cache.callables) == {(2, 1)}
    steps = update_graph_cache(model, None, 2, 3, 12, decoding_seqlens=(1, 3))
    prompt = torch.randint(0, 19, (2, 7), device=device)
    with torch.inference_mode():
        steps.inference_params.reset(12, 2)
        model(prompt[:, :4], inference_params=steps.inference_params)
        found = steps.run(prompt[:, 4:], torch.arange(4, 7, device=device).expand(2, 3), 4)
        torch.testing.assert_close(found, model(prompt, num_last_tokens=3).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_graphs_of_a_copy_have_its_weights(copied, device):
    """A shallow copy has the graphs of its origin until it decodes, and leaves them to its origin."""
    torch.manual_seed(0)
    model, prompt = TinyGPT(16).to(device), torch.randint(0, 19, (2, 3), device=device)
    model.generate(prompt, 9, cg=True)
    cache, other = model._decoding_cache, copied(model)
    if copied is not copy.copy:
        assert not other._decoding_cache.callables and other._decoding_cache.inference_params is None
    other._modules = {**other._modules, "head": torch.nn.Linear(32, 19, bias=False).to(device)}
    for one in (other, model):
        expected, found = (decode(prompt, one, 9, cg=cg) for cg in (False, True))
        assert found.sequences.equal(expected.sequences)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
    assert model._decoding_cache is cache is not other._decoding_cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cg", [False, True])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_speculative_decoding_is_decoding(lookahead, cg, device, capsys):
    """The model drafts for itself, or another model drafts badly. Greedy text is that of the model alone."""
    torch.manual_seed(0)
    model, other, prompt = TinyGPT(16).to(device), TinyGPT().to(device), torch.randint(0, 19, (1, 3), device=device)
    expected = decode(prompt, model, 15)
    calls = []
    for draft in (copy.deepcopy(model), other):
        found = decode_speculative(prompt, model, draft, 15, lookahead, cg=cg, enable_timing=True)
        assert found.sequences.equal(expected.sequences)
        torch.testing.assert_close(found.scores, torch.stack(expected.scores, 1), rtol=1e-4, atol=1e-5)
        calls.append(int(capsys.readouterr().out.rsplit(" ", 1)[1]))
    assert calls[0] == 12 // (lookahead + 1) and calls[0] <= calls[1] <= 12
    with pytest.raises(AssertionError, match="2 sequences, 1 is allowed"):
        decode_speculative(prompt.expand(2, 3), model, other, 15)


def test_speculative_samples_have_the_distribution_of_the_model():
    torch.manual_seed(0)
    p, q = torch.tensor([[0.5, 0.05, 0.15, 0.3], [0.1, 0.2, 0.3, 0.4]]), torch.tensor([[0.1, 0.4, 0.4, 0.1]])
    n = 20000
    drafts = torch.multinomial(q, n, replacement=True).T
    tokens, count = sample_speculative(p.log().expand(n, 2, 4), q.log().expand(n, 1, 4), drafts, top_k=0)
    assert set(count.tolist()) == {1, 2}
    torch.testing.assert_close(tokens[:, 0].bincount(minlength=4) / n, p[0], rtol=0, atol=0.02)
    second = tokens[count == 2, 1]
    torch.testing.assert_close(second.bincount(minlength=4) / len(second), p[1], rtol=0, atol=0.02)
    same = sample_speculative(p.log().expand(n, 2, 4), p[:1].log().expand(n, 1, 4), drafts, top_k=0)[1]
    assert same.eq(2).all()


def test_caches_of_a_model_with_a_config():
    """Without ``allocate_inference_cache`` the sizes come from the model's config, and ranks share the heads."""
    model = torch.nn.Linear(3, 3)
    model.config = SimpleNamespace(num_attention_heads=8, hidden_size=64, num_hidden_layers=2)
    cache = update_graph_cache(model, None, 2, 3, 12, decoding_seqlens=(), tensor_parallel=4, dtype=torch.bfloat16)
    caches = cache.inference_params.key_value_memory_dict
    assert sorted(caches) == [0, 1] and caches[0].shape == (2, 12, 2, 2, 8) and caches[0].dtype == torch.bfloat16
    assert update_graph_cache(model, cache, 1, 3, 9, (), 4, torch.bfloat16).inference_params.key_value_memory_dict is (
        caches
    )


def test_filters():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    modify_logits_for_top_k_filtering(logits, 2)
    assert logits.isinf().tolist() == [[True, False, True, False]]
    logits = torch.tensor([[0.5, 0.05, 0.15, 0.3]]).log()
    modify_logits_for_top_p_filtering(logits, 0.7)
    assert logits.isinf().tolist() == [[False, True, True, False]]
    for dtype, top_p in ((torch.float32, 1e-9), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)):
        logits = torch.randn(2, 1000).to(dtype)
        largest = logits.argmax(-1).tolist()
        modify_logits_for_top_p_filtering(logits, top_p)  # 1 - top_p is 1, or the sum before the largest logit is
        assert logits.isfinite().sum(-1).tolist() == [1, 1] and logits.argmax(-1).tolist() == largest
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
    q_packed, k_packed, v_packed, qv_packed, cu_q, cu_k, used_q, used_k, max_q, max_k, *_, pad, _, _ = packed
    assert len(packed) == 17 and qv_packed is None and used_q.equal(mask_q.sum(1)) and used_k.equal(mask_k.sum(1))
    out = pad(flash_attn_varlen_func(q_packed, k_packed, v_packed, cu_q, cu_k, max_q, max_k, **options))
    expected = attention_ref(q, k, v, mask_q, mask_k, **options)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

    kvpacked = generate_qkv(q, k, v, mask_q, mask_k, kvpacked=True)
    assert kvpacked[1].unbind(1)[1].equal(packed[2]) and len(kvpacked) == 11
    qkvpacked = generate_qkv(k, k, v, mask_k, mask_k, qkvpacked=True)
    assert qkvpacked[0].unbind(1)[2].equal(packed[2]) and len(qkvpacked) == 6
    whole = generate_qkv(q, k, v, qv=torch.randn(3, 9, 4, 8))
    assert whole[4].tolist() == [0, 9, 18, 27] and whole[3].shape == (27, 4, 8) and whole[6] is whole[7] is None


def test_packing_keeps_places_of_unused_tokens():
    q, k, v = (torch.randn(2, 5, 1, 8) for _ in range(3))
    used, unused = torch.arange(5) < torch.tensor([[2], [4]]), torch.tensor([[0, 0, 0, 1, 0], [0] * 5]).bool()
    packed = generate_qkv(q, k, v, used, used, query_unused_mask=unused, key_unused_mask=unused)
    assert packed[4].tolist() == packed[5].tolist() == [0, 3, 7] and packed[6].tolist() == [2, 4]
    with pytest.raises(AssertionError, match="key_unused_mask and packed forms"):
        generate_qkv(q, k, v, used, used, kvpacked=True, key_unused_mask=unused)
    with pytest.raises(AssertionError, match="query_unused_mask needs query_padding_mask"):
        generate_qkv(q, k, v, query_unused_mask=unused)


def test_reference_with_the_newer_options():
    torch.manual_seed(0)
    q, k, v, sinks = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 16), torch.randn(4)
    expected = flash_attn_func(q, k, v, causal=True, sinks=sinks)
    torch.testing.assert_close(attention_ref(q, k, v, causal=True, learnable_sink=sinks)[0], expected)
    q_descale, k_descale, v_descale = torch.rand(3, 2, 2)
    scaled = (q * q_descale.repeat_interleave(2, 1)[:, None, :, None], *(
        x * s[:, None, :, None] for x, s in ((k, k_descale), (v, v_descale))
    ))  # fmt: skip
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    torch.testing.assert_close(attention_ref(q, k, v, **descales)[0], attention_ref(*scaled)[0])
    qv = torch.randn(2, 5, 4, 16)  # q and qv side by side meet k and v side by side
    wide = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    torch.testing.assert_close(attention_ref(q, k, v, qv=qv)[0], attention_ref(*wide, v)[0])
    rounded = attention_ref(q, k, v, intermediate_dtype=torch.bfloat16)
    p = rounded[1].bfloat16().float()
    torch.testing.assert_close(rounded[0], torch.einsum("bhts,bshd->bthd", p, v.repeat_interleave(2, 2)))
    chunked = attention_ref(q, k, v, attention_chunk=3, causal=True)[1][0, 0].ne(0).int()
    assert chunked.tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert construct_chunk_mask(3, 1, 2).tolist() == [[True], [True], [False]]


def test_local_mask():
    outside = construct_local_mask(2, 5, (1, 0))
    assert outside.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]
    padded = construct_local_mask(2, 5, (1, 0), key_leftpad=torch.tensor([0, 3]))
    assert padded.int().tolist()[1] == [[[1, 1, 1, 0, 1], [1, 1, 1, 0, 0]]]
    kept = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    masked = construct_local_mask(2, 5, (1, 0), key_padding_mask=kept, key_leftpad=torch.tensor([0, 3]))
    assert masked.equal(padded)
    assert not construct_local_mask(2, 5).any() and not construct_local_mask(2, 5, (-1, -1)).any()
    sink = construct_local_mask(2, 5, (1, 0), 1)
    assert sink.int().tolist() == [[0, 1, 0, 0, 1], [0, 1, 1, 0, 0]]


@pytest.mark.parametrize("decomposes", [True, False])
def test_triton_op(decomposes):
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    options = {} if decomposes else {"allow_decomposition": False, "schema": "(Tensor y) -> Tensor"}
    op = triton_op(f"flash_attn_test::double_{decomposes}", mutates_args=(), **options)(double)
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert op(torch.ones(2, device="meta")).shape == (2,)
    schema = getattr(torch.ops.flash_attn_test, f"double_{decomposes}").default._schema
    assert schema.arguments[0].name == ("x" if decomposes else "y")


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
