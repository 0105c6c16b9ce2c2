"""Transformer modules: attention against the definition, and parallel forms against whole forms on two processes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks

from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.layers.rotary import apply_rotary_emb_torch
from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.embedding import (
    BertEmbeddings,
    GPT2Embeddings,
    ParallelGPT2Embeddings,
)
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    LinearResidual,
    ParallelMHA,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp, ParallelFusedMLP, ParallelGatedMlp, ParallelMLP
from flash_attn.ops.fused_dense import (
    ColumnParallelLinear,
    FusedDense,
    FusedDenseFunc,
    FusedMLPFunc,
    RowParallelLinear,
    fused_dense_func,
    fused_mlp_func,
)
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn.utils.distributed import (
    all_gather,
    all_reduce,
    allreduce_sequence_parallel_grad,
    get_dim_for_local_rank,
    reduce_scatter,
    sync_shared_params,
)
from flash_attn.utils.generation import InferenceParams

BOTH = (False, True)
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def definition(q, k, v, visible=None, bias=None):
    """softmax(q k^T / sqrt(d) + bias) v over visible keys; q [b, s, h, d], k and v [b, s, h_kv, d]; float64."""
    k, v = (x.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).to(q.dtype)


def lower_triangle(len_q, len_k):
    return torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)


# ---- attention -----------------------------------------------------------------------------------------------------


def test_alibi_slopes():
    assert get_alibi_slopes(8) == [2.0**-k for k in range(1, 9)]
    assert get_alibi_slopes(1) == [2.0**-8]
    six = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert get_alibi_slopes(6) == six


@pytest.mark.parametrize("causal", BOTH)
def test_self_attention(causal):
    qkv = torch.randn(2, 7, 3, 4, 16)
    visible = lower_triangle(7, 7) if causal else None
    expected = definition(*qkv.unbind(2), visible)
    close(SelfAttention(causal=causal)(qkv), expected)
    close(FlashSelfAttention(causal=causal)(qkv), expected)
    close(FlashSelfAttention(causal=not causal)(qkv, causal=causal), expected)
    scaled = torch.cat([0.5 * qkv[:, :, :1], qkv[:, :, 1:]], 2)
    for cls in (SelfAttention, FlashSelfAttention):
        close(cls(causal, softmax_scale=0.5 / 4)(qkv), definition(*scaled.unbind(2), visible))
        close(
            cls(causal, softmax_scale=0.0)(qkv), definition(torch.zeros_like(qkv[:, :, 0]), *qkv.unbind(2)[1:], visible)
        )

    kept = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    masked = SelfAttention(causal=causal)(qkv, key_padding_mask=kept)
    tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(qkv, kept)
    packed = FlashSelfAttention(causal=causal)(tokens, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    close(pad_input(packed, indices, 2, 7), masked * kept[..., None, None])


@pytest.mark.parametrize("causal", BOTH)
def test_cross_attention(causal):
    """Grouped heads, more keys than queries; packed lengths 3 and 5 over 6 and 9 keys."""
    q, kv = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 2, 16)
    expected = definition(q, *kv.unbind(2), lower_triangle(5, 9) if causal else None)
    close(CrossAttention(causal)(q, kv), expected)
    close(FlashCrossAttention(causal)(q, kv), expected)
    cu_q, cu_k = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 6, 15], dtype=torch.int32)
    tokens_q, tokens_kv = torch.cat([q[0, :3], q[1]]), torch.cat([kv[0, :6], kv[1]])
    out = FlashCrossAttention(causal)(tokens_q, tokens_kv, None, cu_q, 5, cu_k, 9)
    short = definition(q[:1, :3], *kv[:1, :6].unbind(2), lower_triangle(3, 6) if causal else None)
    close(out, torch.cat([short[0], expected[1]]))
    kept = torch.arange(9) < torch.tensor([[6], [9]])
    close(CrossAttention(causal)(q[:, 2:], kv, key_padding_mask=kept)[0], definition(
        q[:1, 2:], *kv[:1, :6].unbind(2), lower_triangle(3, 6) if causal else None
    )[0])  # fmt: skip
    with pytest.raises(AssertionError, match="cu_seqlens must be an int32"):
        FlashCrossAttention()(tokens_q, tokens_kv, None, cu_q.long(), 5, cu_k, 9)
    with pytest.raises(AssertionError, match="max_seqlen_k must be an int"):
        FlashCrossAttention()(tokens_q, tokens_kv, None, cu_q, 5, cu_k, None)


def test_alibi_window_and_dropout():
    qkv = torch.randn(1, 6, 3, 2, 8)
    slopes = torch.tensor(get_alibi_slopes(2))
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    near = distance <= 2
    expected = definition(*qkv.unbind(2), near, -slopes[:, None, None] * distance)
    attention = FlashSelfAttention(window_size=(2, 2), alibi_slopes=slopes, attention_dropout=0.5)
    assert not attention.state_dict()
    assert not torch.allclose(attention(qkv), attention(qkv))
    close(attention.eval()(qkv), expected)
    half = attention.half()(qkv.half())  # half() also casts the slopes, but the kernels need fp32
    torch.testing.assert_close(half.float(), expected, rtol=1e-2, atol=1e-2)
    attention.float()
    cross = FlashCrossAttention(False, None, 0.0, slopes, (2, 2))
    close(cross(qkv[:, :, 0], qkv[:, :, 1:]), expected)


# ---- MHA -----------------------------------------------------------------------------------------------------------


def mha_by_hand(mha, x, heads, heads_kv, rotary_dim, causal):
    """MHA from its parameters."""
    d = x.shape[-1] // heads
    q, k, v = mha.Wqkv(x).split([heads * d, heads_kv * d, heads_kv * d], -1)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in (q, k, v))
    if rotary_dim:
        angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
        q, k = (apply_rotary_emb_torch(t, angles.cos(), angles.sin()) for t in (q, k))
    out = definition(q, k, v, lower_triangle(x.shape[1], x.shape[1]) if causal else None)
    return mha.out_proj(out.flatten(-2))


@pytest.mark.parametrize("flash", BOTH)
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_mha(heads_kv, rotary_dim, causal, flash):
    mha = MHA(64, 4, heads_kv, causal=causal, rotary_emb_dim=rotary_dim, use_flash_attn=flash)
    x = torch.randn(2, 7, 64, requires_grad=True)
    expected = mha_by_hand(mha, x, 4, heads_kv, rotary_dim, causal)
    out = mha(x)
    close(out, expected)
    dout = torch.randn_like(out)
    inputs = [x, *mha.parameters()]
    for ours, exact in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(expected, inputs, dout)):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-4)
    again = MHA(
        64, 4, heads_kv, causal=causal, rotary_emb_dim=rotary_dim, use_flash_attn=flash, checkpointing=True,
        return_residual=True,
    )  # fmt: skip
    again.load_state_dict(mha.state_dict())
    y, residual = again(x)
    assert y.equal(out) and residual is x
    assert set(mha.state_dict()) == {"Wqkv.weight", "Wqkv.bias", "out_proj.weight", "out_proj.bias"}


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_mha_packed_and_masked(heads_kv):
    flash, plain = MHA(64, 4, heads_kv, use_flash_attn=True), MHA(64, 4, heads_kv)
    plain.load_state_dict(flash.state_dict())
    x, kept = torch.randn(2, 6, 64), torch.arange(6) < torch.tensor([[6], [4]])
    tokens, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, kept)
    packed = flash(tokens, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    close(packed, plain(x, key_padding_mask=kept)[kept])
    with pytest.raises(AssertionError, match="key_padding_mask"):
        flash(x, key_padding_mask=kept)
    with pytest.raises(AssertionError, match="max_seqlen"):
        flash(tokens, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("flash", BOTH)
def test_mha_cross(flash):
    mha = MHA(64, 4, 2, cross_attn=True, use_flash_attn=flash)
    x, memory = torch.randn(2, 5, 64), torch.randn(2, 8, 64)
    q, kv = mha.Wq(x).unflatten(-1, (4, 16)), mha.Wkv(memory).unflatten(-1, (2, 2, 16))
    expected = mha.out_proj(definition(q, *kv.unbind(2)).flatten(-2))
    close(mha(x, memory), expected)
    close(mha(x, mixer_subset=slice(0, 1)), mha(x)[:, :1])


def test_mha_convolution():
    """With a causal convolution a token changes only itself and the next two tokens."""
    mha = MHA(32, 2, dwconv=True, causal=True)
    x = torch.randn(1, 6, 32)
    out = mha(x)
    x[0, 3:] = 0
    assert mha(x)[0, :3].equal(out[0, :3])
    weight, bias = mha.dwconv_qkv.weight[:, 0], mha.dwconv_qkv.bias
    qkv = F.pad(mha.Wqkv(x), (0, 0, 2, 0))
    expected = sum(qkv[:, i : i + 6] * weight[:, i] for i in range(3)) + bias
    mixed = definition(*expected.unflatten(-1, (3, 2, 16)).unbind(2), lower_triangle(6, 6))
    close(mha(x), mha.out_proj(mixed.flatten(-2)))


@pytest.mark.parametrize("flash", BOTH)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary_emb_dim": 16},
        {"rotary_emb_dim": 8},
        {"rotary_emb_dim": 16, "rotary_emb_scale_base": 512.0},
        {"window_size": (2, 0)},
        {"use_alibi": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_mha_generates_what_it_computes_at_once(heads_kv, options, flash):
    """A prompt of 3 tokens, then single tokens, then two tokens give the same as all 7 at once."""
    if not flash and ("window_size" in options or "use_alibi" in options):
        with pytest.raises(AssertionError, match="needs use_flash_attn"):
            MHA(64, 4, **options)
        return
    mha = MHA(64, 4, heads_kv, causal=True, layer_idx=0, use_flash_attn=flash, **options)
    x = torch.randn(2, 7, 64)
    if "rotary_emb_scale_base" in options:
        mha.rotary_emb._update_cos_sin_cache(8, dtype=torch.float32)  # XPos depends on the length of its table
    with torch.no_grad():
        whole = mha(x)
        params = InferenceParams(max_seqlen=8, max_batch_size=3)
        steps = []
        for first, last in ((0, 3), (3, 4), (4, 5), (5, 7)):
            steps.append(mha(x[:, first:last], inference_params=params))
            params.seqlen_offset = last
    close(torch.cat(steps, 1), whole)
    assert params.key_value_memory_dict[0].shape == mha.allocate_inference_cache(3, 8).shape == (3, 8, 2, heads_kv, 16)


def test_mha_generates_with_lengths_of_its_own():
    """Two sequences of 3 and 5 tokens; the next token of each attends to its own past."""
    mha = MHA(64, 4, causal=True, layer_idx=0, rotary_emb_dim=16, use_flash_attn=True)
    x = torch.randn(2, 6, 64)
    with torch.no_grad():
        whole = mha(x)
        params = InferenceParams(max_seqlen=8, max_batch_size=2)
        mha(x[:, :5], inference_params=params)
        params.seqlen_offset, params.lengths_per_sample = 5, torch.tensor([3, 5], dtype=torch.int32)
        step = mha(torch.stack([x[0, 3:4], x[1, 5:6]]), inference_params=params)
    close(step, torch.stack([whole[0, 3:4], whole[1, 5:6]]))


@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("flash", BOTH)
def test_mha_generates_for_some_rows_of_the_batch(flash, rotary_dim):
    """Rows 1 and 2 of caches of four: a prompt of 3 tokens, then one token, then one token with given lengths."""
    mha = MHA(64, 4, causal=True, layer_idx=0, rotary_emb_dim=rotary_dim, use_flash_attn=flash)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        whole = mha(x)
        params = InferenceParams(max_seqlen=5, max_batch_size=4, batch_size_offset=1)
        params.key_value_memory_dict[0] = cache = mha.allocate_inference_cache(4, 5).fill_(7)
        steps = []
        for first, last in ((0, 3), (3, 4), (4, 5)):
            if last == 5 and flash:
                params.lengths_per_sample = torch.tensor([0, 4, 4, 0], dtype=torch.int32)
            steps.append(mha(x[:, first:last], inference_params=params))
            params.seqlen_offset = last
    close(torch.cat(steps, 1), whole)
    assert cache[[0, 3]].eq(7).all() and cache[1:3].ne(7).all()


def test_linear_residual():
    linear, x = LinearResidual(3, 4), torch.randn(2, 3)
    y, residual = linear(x)
    assert residual is x and y.equal(F.linear(x, linear.weight, linear.bias))


# ---- MLPs, dense layers, blocks, embeddings ------------------------------------------------------------------------


def test_mlps():
    x = torch.randn(2, 3, 12)
    for mlp in (Mlp(12), Mlp(12, 20, 5, F.relu, bias1=False)):
        assert mlp(x).equal(mlp.fc2(mlp.activation(mlp.fc1(x))))
    assert Mlp(12).fc1.out_features == 48 and Mlp(12, return_residual=True)(x)[1] is x
    for activation in (F.sigmoid, F.silu, F.gelu):
        mlp = GatedMlp(12, activation=activation)
        assert (mlp.fc1.out_features, mlp.fc2.in_features) == (256, 128)
        y, gate = mlp.fc1(x).chunk(2, -1)
        close(mlp(x), mlp.fc2(y * activation(gate)))
    assert GatedMlp(96, multiple_of=100).fc2.in_features == 300
    assert GatedMlp(12, hidden_features=7, multiple_of=8, out_features=3)(x).shape == (2, 3, 3)


@pytest.mark.parametrize("checkpoint_lvl", [0, 1, 2])
@pytest.mark.parametrize("activation, exact", [
    ("gelu_approx", partial(F.gelu, approximate="tanh")), ("relu", F.relu), ("sqrelu", lambda x: F.relu(x) ** 2)
])  # fmt: skip
def test_fused_mlp(activation, exact, checkpoint_lvl):
    mlp = FusedMLP(12, 20, 5, activation=activation, checkpoint_lvl=checkpoint_lvl, return_residual=True)
    x = torch.randn(2, 3, 12, requires_grad=True)
    y, residual = mlp(x)
    expected = mlp.fc2(exact(mlp.fc1(x)))
    close(y, expected)
    assert residual is x
    inputs, dout = [x, *mlp.parameters()], torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, dout), torch.autograd.grad(expected, inputs, dout)):
        close(a, b)
    with pytest.raises(AssertionError, match="'tanh'"):
        fused_mlp_func(x, mlp.fc1.weight, mlp.fc2.weight, activation="tanh")


def test_fused_dense():
    x, dense = torch.randn(2, 12), FusedDense(12, 5, return_residual=True)
    y, residual = dense(x)
    assert residual is x and y.equal(F.linear(x, dense.weight, dense.bias))
    assert fused_dense_func(x, dense.weight, dense.bias).equal(y)
    assert FusedDenseFunc.apply(x, dense.weight, dense.bias).equal(y)
    mlp = FusedMLP(12, 20, 5, activation="relu")
    assert FusedMLPFunc.apply(x, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias, "relu").equal(mlp(x))


@pytest.mark.parametrize("checkpoint_lvl", [0, 1, 2])
def test_squared_relu_between_two_layers(checkpoint_lvl):
    mlp, x = FusedDenseSqreluDense(12, 20, 5, checkpoint_lvl=checkpoint_lvl), torch.randn(2, 3, 12, requires_grad=True)
    y, expected = mlp(x), mlp.fc2(F.relu(mlp.fc1(x)) ** 2)
    close(y, expected)
    inputs, dout = [x, *mlp.parameters()], torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, dout), torch.autograd.grad(expected, inputs, dout)):
        close(a, b)
    with pytest.raises(AssertionError, match="checkpoint_lvl is 3"):
        FusedDenseSqreluDense(12, checkpoint_lvl=3)


@pytest.mark.parametrize("name, exact", [
    ("id", lambda x: x),
    ("gelu", F.gelu),
    ("gelu_approx", partial(F.gelu, approximate="tanh")),
    ("squared_relu", lambda x: F.relu(x) ** 2),
])  # fmt: skip
def test_linear_and_activation(name, exact):
    x, weight, bias, next_weight = torch.randn(2, 3, 12), torch.randn(5, 12), torch.randn(5), torch.randn(7, 5)
    z = F.linear(x, weight, bias).requires_grad_()
    y, act_input = triton_linear_act(x, weight, bias, name, save_act_input=True)
    close(y, exact(z))
    close(act_input, z)
    assert triton_linear_act(x, weight, bias, name).equal(y)
    g = torch.randn(2, 3, 7)
    expected = torch.autograd.grad(F.linear(exact(z), next_weight), z, g)[0]
    close(triton_dgrad_act(g, next_weight, name, act_input), expected)
    with pytest.raises(AssertionError, match="activation is 'tanh', allowed are id, gelu"):
        triton_linear_act(x, weight, activation="tanh")
    with pytest.raises(AssertionError, match="weight is torch.float64, x is torch.float32"):
        triton_linear_act(x, weight.double())
    if name != "id":
        with pytest.raises(AssertionError, match="needs act_input"):
            triton_dgrad_act(g, next_weight, name)


@pytest.mark.parametrize("norm_cls", [nn.LayerNorm, RMSNorm])
def test_prenorm_block(norm_cls):
    block = Block(32, partial(MHA, num_heads=2), partial(Mlp, hidden_features=40), norm_cls, residual_in_fp32=True)
    x = torch.randn(2, 5, 32)
    y, residual = block(*block(x))
    r, h = x, block.mixer(block.norm1(x))
    r = r + h
    h = block.mlp(block.norm2(r))
    r = r + h
    h = block.mixer(block.norm1(r))
    r = r + h
    close(residual, r)
    close(y, block.mlp(block.norm2(r)))
    half = Block(32, partial(MHA, num_heads=2), residual_in_fp32=True).bfloat16()
    assert half(x.bfloat16())[1].dtype == torch.float32
    no_mlp = Block(32, partial(MHA, num_heads=2), nn.Identity)
    assert not hasattr(no_mlp, "norm2") and no_mlp(x)[1] is not None


@pytest.mark.parametrize("shared", BOTH)
@pytest.mark.parametrize("sequence_parallel", BOTH)
@pytest.mark.parametrize("cls, names", [(Block, 2), (ParallelBlock, 2), (partial(ParallelBlock, tied_norm=True), 1)])
def test_norms_say_what_the_ranks_do_with_them(cls, names, sequence_parallel, shared):
    block = cls(32, partial(MHA, num_heads=2), sequence_parallel=sequence_parallel, mark_shared_params=shared)
    for flag, wanted in (("_sequence_parallel", sequence_parallel), ("_shared_params", shared)):
        marked = {name for name, param in block.named_parameters() if getattr(param, flag, False)}
        norms = {f"norm{i + 1}.{kind}" for i in range(names) for kind in ("weight", "bias")}
        assert marked == (norms if wanted else set())


@pytest.mark.parametrize("return_residual", BOTH)
def test_postnorm_block(return_residual):
    mixer, mlp = (
        partial(MHA, num_heads=2, return_residual=return_residual),
        partial(Mlp, return_residual=return_residual),
    )
    block = Block(32, mixer, mlp, prenorm=False, return_residual=return_residual)
    x = torch.randn(2, 5, 32)
    first = (lambda y: y[0]) if return_residual else (lambda y: y)
    h = block.norm1(x + first(block.mixer(x)))
    close(block(x), block.norm2(h + first(block.mlp(h))))


def test_parallel_block():
    x = torch.randn(2, 5, 32)
    for tied in BOTH:
        block = ParallelBlock(32, partial(MHA, num_heads=2), tied_norm=tied)
        h1, h2, r = block(*block(x))
        y = block.norm1(x)
        a, b = block.mixer(y), block.mlp(y if tied else block.norm2(x))
        close(r, x + a + b)
        close(h1, block.mixer(block.norm1(r)))
        close(h2, block.mlp(block.norm1(r) if tied else block.norm2(r)))


def test_stochastic_depth():
    x = torch.ones(1000, 2, 3)
    y = StochasticDepth(0.25)(x)
    assert y.flatten(1).std(1).eq(0).all() and set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert 200 < (y[:, 0, 0] == 0).sum() < 300
    assert StochasticDepth(0.25).eval()(x) is x and not StochasticDepth(1.0)(x).any()


def test_embeddings():
    ids = torch.randint(0, 11, (2, 5))
    gpt = GPT2Embeddings(8, 11, 16)
    assert gpt(ids).equal(gpt.word_embeddings.weight[ids] + gpt.position_embeddings.weight[:5])
    positions = torch.tensor([4, 3, 2, 1, 0])
    assert gpt(ids, positions).equal(gpt.word_embeddings.weight[ids] + gpt.position_embeddings.weight[positions])
    narrow = GPT2Embeddings(8, 11, 0, word_embed_proj_dim=4)
    close(narrow(ids), narrow.word_embeddings.weight[ids] @ narrow.project_in.weight.T)
    bert = BertEmbeddings(8, 11, 16, 2)
    types = torch.randint(0, 2, (2, 5))
    base = bert.word_embeddings.weight[ids] + bert.position_embeddings.weight[:5]
    assert bert(ids, token_type_ids=types).equal(base + bert.token_type_embeddings.weight[types])
    assert bert(ids).equal(base + bert.token_type_embeddings.weight[0])


def test_patches_are_a_convolution():
    embed = PatchEmbed((8, 12), (4, 2), 3, 10)
    x = torch.randn(2, 3, 8, 12)
    expected = F.conv2d(x, embed.proj.weight.unflatten(1, (3, 4, 2)), embed.proj.bias, stride=(4, 2))
    close(embed(x), expected.flatten(2).transpose(1, 2))
    assert embed.num_patches == 12 and embed.grid_size == (2, 6)
    assert PatchEmbed(8, 4, 3, 10, flatten=False)(x[..., :8]).shape == (2, 2, 2, 10)
    with pytest.raises(AssertionError, match="image is"):
        embed(x[..., :4])


# ---- split over ranks ----------------------------------------------------------------------------------------------


def test_dims_of_ranks():
    assert [get_dim_for_local_rank(10, 4, r) for r in range(4)] == [3, 3, 2, 2]
    assert [get_dim_for_local_rank(24, 3, r, 4) for r in range(3)] == [8, 8, 8]
    assert [get_dim_for_local_rank(20, 3, r, 4) for r in range(3)] == [8, 8, 4]


def rank_part(x, rank, dim=0):
    return x.detach().chunk(2, dim)[rank].clone().requires_grad_()


def collectives(rank, group):
    x = torch.arange(4.0).requires_grad_()
    y = all_gather(x + 10 * rank, group)
    assert y.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    y.backward(torch.arange(8.0) * (1 + rank))
    assert x.grad.tolist() == [3.0 * (4 * rank + i) for i in range(4)]
    x = torch.arange(4.0).requires_grad_()
    y = reduce_scatter(x * (1 + rank), group)
    assert y.tolist() == [3.0 * (2 * rank), 3.0 * (2 * rank + 1)]
    y.backward(torch.tensor([1.0, 2.0]) + 10 * rank)
    assert x.grad.tolist() == [(1 + rank) * g for g in (1, 2, 11, 12)]
    x = torch.ones(3, requires_grad=True)
    y = all_reduce(x * (1 + rank), group)
    assert y.tolist() == [3, 3, 3]
    y.sum().backward()
    assert x.grad.tolist() == [1 + rank] * 3


def parameters_of_ranks(rank, group):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(rank), model.bias.fill_(rank)
    model.weight._shared_params = model.bias._sequence_parallel = True
    sync_shared_params(model, group)
    assert model.weight.eq(0).all() and model.bias.eq(rank).all()
    model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.tensor([1.0, 10.0]) * (rank + 1)
    allreduce_sequence_parallel_grad(model, group)
    assert model.weight.grad.eq(1).all() and model.bias.grad.tolist() == [3, 30]
    gradients_of_every_dtype(rank, group)


def gradients_of_every_dtype(rank, group):
    """One message for each dtype. A sum in another dtype would be rounded differently or lose digits."""
    messages, all_reduce_once = [], dist.all_reduce
    model = nn.ParameterDict({
        name: nn.Parameter(torch.zeros(size, dtype=dtype))
        for name, size, dtype in (("a", 2, torch.bfloat16), ("b", 3, torch.float32), ("c", 1, torch.bfloat16))
    })  # fmt: skip
    for name, param in model.items():
        param._sequence_parallel, param.grad = True, torch.full_like(param, (rank + 1) * (1 + ord(name) - ord("a")))

    def counted(tensor, **options):
        messages.append((tensor.dtype, tensor.numel()))
        return all_reduce_once(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        allreduce_sequence_parallel_grad(model, group)
    assert messages == [(torch.bfloat16, 3), (torch.float32, 3)]
    assert [param.grad.tolist() for param in model.values()] == [[3, 3], [6, 6, 6], [9]]


def split_layers(rank, group):
    """A column parallel layer and a row parallel layer, with tokens split or not, give outputs and gradients of the
    whole layers."""
    torch.manual_seed(0)
    fc1, fc2, x = nn.Linear(6, 8), nn.Linear(8, 5), torch.randn(4, 6, requires_grad=True)
    gated = nn.Linear(6, 16)
    dout = torch.randn(4, 5)
    expected = {
        "plain": fc2(F.gelu(fc1(x), approximate="tanh")),
        "gated": fc2(F.glu(gated(x))),
    }
    for name, y in expected.items():
        (dx,) = torch.autograd.grad(y, x, dout)
        for sequence_parallel in BOTH:
            options = {"process_group": group, "sequence_parallel": sequence_parallel}
            if name == "plain":
                layers = [
                    nn.Sequential(
                        ColumnParallelLinear(6, 8, **options), nn.GELU("tanh"), RowParallelLinear(8, 5, **options)
                    ),
                    ParallelMLP(6, 8, 5, partial(F.gelu, approximate="tanh"), **options),
                    ParallelFusedMLP(6, 8, 5, **options),
                ]
            else:
                layers = [ParallelGatedMlp(6, hidden_features=8, out_features=5, multiple_of=4, **options)]
            for layer in layers:
                first = layer[0] if isinstance(layer, nn.Sequential) else layer.fc1
                last = layer[2] if isinstance(layer, nn.Sequential) else layer.fc2
                with torch.no_grad():
                    for target, source in ((first.weight, "weight"), (first.bias, "bias")):
                        if name == "plain":
                            target.copy_(getattr(fc1, source).chunk(2)[rank])
                        else:  # the rank's quarter of y, then of the gate
                            target.copy_(torch.cat([half.chunk(2)[rank] for half in getattr(gated, source).chunk(2)]))
                    last.weight.copy_(fc2.weight.chunk(2, 1)[rank])
                    assert (last.bias is None) == (rank > 0)
                    if rank == 0:
                        last.bias.copy_(fc2.bias)
                mine = rank_part(x, rank) if sequence_parallel else x.detach().clone().requires_grad_()
                out = layer(mine)
                close(out, y.chunk(2)[rank] if sequence_parallel else y)
                out.backward(dout.chunk(2)[rank] if sequence_parallel else dout)
                close(mine.grad, dx.chunk(2)[rank] if sequence_parallel else dx)


def split_attention(rank, group):
    for heads_kv in (4, 2):
        torch.manual_seed(0)  # ranks draw different numbers of parameters below
        whole = MHA(64, 4, heads_kv, causal=True, rotary_emb_dim=16, use_alibi=True, use_flash_attn=True)
        x, dout = torch.randn(2, 6, 64, requires_grad=True), torch.randn(2, 6, 64)
        part = ParallelMHA(64, 4, group, heads_kv, causal=True, rotary_emb_dim=16, use_alibi=True, use_flash_attn=True)
        sizes = [64, 16 * heads_kv, 16 * heads_kv]
        with torch.no_grad():
            for name in ("weight", "bias"):
                qkv = getattr(whole.Wqkv, name).split(sizes)
                getattr(part.Wqkv, name).copy_(torch.cat([t.chunk(2)[rank] for t in qkv]))
            part.out_proj.weight.copy_(whole.out_proj.weight.chunk(2, 1)[rank])
            if rank == 0:
                part.out_proj.bias.copy_(whole.out_proj.bias)
        expected = whole(x)
        (dx,) = torch.autograd.grad(expected, x, dout)
        mine = rank_part(x.flatten(0, 1), rank)
        out = part(mine, seqlen=6)
        close(out, expected.flatten(0, 1).chunk(2)[rank])
        out.backward(dout.flatten(0, 1).chunk(2)[rank])
        close(mine.grad, dx.flatten(0, 1).chunk(2)[rank])
        assert part.allocate_inference_cache(2, 8).shape == (2, 8, 2, heads_kv // 2, 16)


def split_embeddings(rank, group):
    torch.manual_seed(0)
    whole, ids = GPT2Embeddings(8, 12, 6), torch.randint(0, 12, (2, 6))
    for sequence_parallel in BOTH:
        part = ParallelGPT2Embeddings(8, 12, 6, group, sequence_parallel=sequence_parallel)
        with torch.no_grad():
            part.word_embeddings.weight.copy_(whole.word_embeddings.weight.chunk(2)[rank])
            part.position_embeddings.weight.copy_(whole.position_embeddings.weight.chunk(2, 1)[rank])
        out = part(ids, combine_batch_seqlen_dim=True)
        expected = whole(ids).flatten(0, 1)
        close(out, expected.chunk(2)[rank] if sequence_parallel else expected)


def everything_split(rank, group):
    for check in (collectives, parameters_of_ranks, split_layers, split_attention, split_embeddings):
        check(rank, group)


def test_split_over_ranks(tmp_path):
    on_ranks(everything_split, tmp_path)
