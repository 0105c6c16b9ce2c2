"""Rotary embedding. The reference is a rotation written with complex numbers in float64."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)
from flash_attn.ops.triton.rotary import apply_rotary, rotary_kernel

BOTH = (False, True)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def tables(rows, rotary_dim, dtype=torch.float32):
    """cos and sin as RotaryEmbedding makes them, and their angles."""
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.double) / rotary_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def reference(x, cos, sin, positions, interleaved, conjugate=False):
    """x [..., h, d] as complex pairs times cos + i sin of its position [...]; float64."""
    half = cos.shape[-1]
    turn = torch.complex(cos.double(), sin.double())
    inside = (positions >= 0) & (positions < len(cos))
    turn = torch.where(inside[..., None], turn[positions.clamp(0, len(cos) - 1)], 1.0)[..., None, :]
    pairs, kept = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * (turn.conj() if conjugate else turn))
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat([turned.flatten(-2), kept], dim=-1)


def close(x, expected):
    """One rounding of an fp32 result: half a unit in the last place, and the rounding error of fp32."""
    bound = expected.abs() * torch.finfo(x.dtype).eps / 2 * 1.01 + 4 * torch.finfo(torch.float32).eps
    if x.dtype == torch.float16:
        bound += 2.0**-25  # half a subnormal step
    difference = (x.double() - expected).abs()
    assert (difference <= bound).all(), f"{(difference - bound).max()} beyond rounding in {x.dtype}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inplace", BOTH)
@pytest.mark.parametrize("interleaved", BOTH)
@pytest.mark.parametrize("rotary_dim", [2, 16, 24])
@pytest.mark.parametrize("offset", [0, 5, "each"])
def test_dense(offset, rotary_dim, interleaved, inplace, dtype):
    x = torch.randn(3, 7, 2, 24).to(dtype)
    cos, sin = tables(16, rotary_dim, dtype)
    offsets = torch.tensor([9, 0, 4]) if offset == "each" else offset
    first = offsets[:, None] if offset == "each" else offset
    expected = reference(x, cos, sin, (torch.arange(7) + first).expand(3, 7), interleaved)
    out = apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
    close(out, expected)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    if not inplace:
        back = apply_rotary(out.double(), cos, sin, offsets, interleaved=interleaved, conjugate=True)
        close(back.to(dtype), reference(out, cos, sin, (torch.arange(7) + first).expand(3, 7), interleaved, True))


@pytest.mark.parametrize("offset_dtype", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("inplace", BOTH)
@pytest.mark.parametrize("interleaved", BOTH)
def test_packed(interleaved, inplace, offset_dtype):
    """Sequences of 3, 0 and 5 tokens. The last two tokens belong to no sequence and do not change."""
    x = torch.randn(10, 2, 20)
    cos, sin = tables(12, 16)
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    offsets = 0 if offset_dtype is None else torch.tensor([4, 1, 7], dtype=offset_dtype)
    first = [0, 0, 0] if offset_dtype is None else offsets.tolist()
    positions = torch.tensor([*range(first[0], first[0] + 3), *range(first[2], first[2] + 5), -1, -1])
    expected = reference(x, cos, sin, positions, interleaved)
    out = apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets, cu_seqlens, 5)
    close(out, expected)


def test_positions_past_the_table_do_not_turn():
    x = torch.randn(2, 4, 1, 8)
    cos, sin = tables(6, 8)
    out = apply_rotary(x, cos, sin, torch.tensor([4, 0]))
    assert out[0, 2:].equal(x[0, 2:]) and not out[0, :2].equal(x[0, :2])
    close(out, reference(x, cos, sin, torch.tensor([[4, 5, 6, 7], [0, 1, 2, 3]]), False))


@pytest.mark.parametrize("offsets", [0, torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)])
@pytest.mark.parametrize("inplace", BOTH)
def test_tokens_of_no_sequence_do_not_turn_by_an_empty_table(inplace, offsets):
    """There may be no sequence, or two empty ones. The tokens behind them are left as they are."""
    x = torch.randn(3, 2, 24)
    starts = torch.zeros(1 if not torch.is_tensor(offsets) else len(offsets) + 1, dtype=torch.int32)
    for rows in 0, 4:
        out = apply_rotary(x.clone(), *tables(rows, 16), offsets, starts, 0, inplace=inplace)
        assert torch.equal(out, x)


def test_layouts():
    """Views with gaps, a head slice and a transposed batch. The in-place form writes nothing else."""
    cos, sin = tables(8, 8)
    memory = torch.randn(5, 2, 3, 12)  # [s, b, h, d]
    before = memory.clone()
    x = memory.transpose(0, 1)[:, :, 1:, :8]
    expected = reference(x, cos, sin, torch.arange(5).expand(2, 5), False)
    out = apply_rotary_emb(x, cos, sin)
    close(out, expected)
    apply_rotary_emb(x, cos, sin, inplace=True)
    close(x, expected)
    assert memory[:, :, 0].equal(before[:, :, 0]) and memory[..., 8:].equal(before[..., 8:])


@pytest.mark.parametrize("interleaved", BOTH)
def test_definition_and_gradients(interleaved):
    cos, sin = tables(9, 12, torch.double)
    x = torch.randn(2, 4, 3, 16, dtype=torch.double, requires_grad=True)
    expected = apply_rotary_emb_torch(x, cos[2:6], sin[2:6], interleaved)
    close(expected.detach(), reference(x.detach(), cos, sin, torch.arange(2, 6).expand(2, 4), interleaved))
    out = apply_rotary_emb_func(x, cos, sin, interleaved, seqlen_offsets=2)
    dout = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, dout)
    (dx_expected,) = torch.autograd.grad(expected, x, dout)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, dx_expected, rtol=1e-12, atol=1e-12)

    plain = lambda x, cos, sin: apply_rotary(x, cos, sin, 2, interleaved=interleaved)  # noqa: E731
    assert torch.autograd.gradcheck(plain, (x, cos.requires_grad_(), sin.requires_grad_()))

    packed = x.detach().flatten(0, 1).requires_grad_()
    cu_seqlens, offsets = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([3, 0])
    turn = lambda p: apply_rotary_emb(p, cos, sin, interleaved, False, offsets, cu_seqlens, 5)  # noqa: E731
    assert torch.autograd.gradcheck(turn, packed)


@pytest.mark.parametrize("leaf", BOTH)
def test_in_place_gradients(leaf):
    """Also on a leaf that requires grad. The incoming gradient may belong to another tensor, too, and does not
    change."""
    cos, sin = tables(4, 8)
    w = torch.randn(2, 4, 1, 8, requires_grad=True)
    values = torch.randn(2, 4, 1, 8)
    x = values.clone().requires_grad_()
    out = apply_rotary_emb(x if leaf else x * 1, cos, sin, inplace=True)
    dout = torch.randn_like(out)
    (out + w).backward(dout)
    close(x.grad, reference(dout, cos, sin, torch.arange(4).expand(2, 4), False, conjugate=True))
    assert w.grad.equal(dout)
    if leaf:
        assert out.detach().equal(x.detach()) and not x.detach().equal(values)


@pytest.mark.parametrize("own_k", BOTH)
@pytest.mark.parametrize("interleaved", BOTH)
@pytest.mark.parametrize("form", ["three", "grouped"])
@pytest.mark.parametrize("leaf", BOTH)
def test_qkv(leaf, form, interleaved, own_k):
    cos, sin = tables(10, 16)
    cos_k, sin_k = (cos * 0.5, sin * 0.5) if own_k else (None, None)
    heads_q, heads_k = (2, 2) if form == "three" else (4, 1)
    values = torch.randn(2, 5, heads_q + 2 * heads_k, 16)
    num_heads_q = None if form == "three" else heads_q
    shape = (lambda t: t.unflatten(2, (3, 2))) if form == "three" else (lambda t: t)
    qkv = shape(values).clone().requires_grad_()
    offsets = torch.tensor([5, 2])
    out = apply_rotary_emb_qkv_(qkv if leaf else qkv * 1, cos, sin, cos_k, sin_k, interleaved, offsets, num_heads_q)
    positions = torch.arange(5) + offsets[:, None]

    def turned(x, conjugate):
        q, k, v = x.split([heads_q, heads_k, heads_k], dim=2)
        k = reference(
            k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, positions, interleaved, conjugate
        )
        return torch.cat([reference(q, cos, sin, positions, interleaved, conjugate), k, v], dim=2)

    if own_k:  # the reference does not rotate positions off the table; here all are on the table
        assert positions.max() < 10
    close(out.detach(), shape(turned(values, False)))
    dout = torch.randn_like(values)
    out.backward(shape(dout))
    close(qkv.grad, shape(turned(dout, True)))


def test_kv():
    cos, sin = tables(6, 8)
    values = torch.randn(2, 5, 2, 3, 8)
    kv = values.clone().requires_grad_()
    out = apply_rotary_emb_kv_(kv, cos, sin, seqlen_offsets=1)
    positions = torch.arange(1, 6).expand(2, 5)
    close(out[:, :, 0].detach(), reference(values[:, :, 0], cos, sin, positions, False))
    assert out[:, :, 1].equal(values[:, :, 1])
    out.sum().backward()  # a gradient of stride 0
    close(kv.grad[:, :, 0], reference(torch.ones(2, 5, 3, 8), cos, sin, positions, False, True))
    assert kv.grad[:, :, 1].eq(1).all()


@pytest.mark.parametrize("interleaved", BOTH)
@pytest.mark.parametrize("form", ["three", "grouped", "kv"])
def test_second_derivatives_and_batches_of_gradients(form, interleaved):
    """The backward of the in-place functions is a rotation, and autograd and vmap see the rotation."""
    (cos, sin), offsets = tables(10, 12, torch.double), torch.tensor([5, 2])
    x = torch.randn({"three": (2, 4, 3, 2, 16), "grouped": (2, 4, 4, 16), "kv": (2, 4, 2, 2, 16)}[form]).double()

    def turn(x):
        if form == "kv":
            return apply_rotary_emb_kv_(x * 1, cos, sin, interleaved, offsets)
        num_heads_q = 2 if form == "grouped" else None
        return apply_rotary_emb_qkv_(x * 1, cos, sin, 2 * cos, 2 * sin, interleaved, offsets, num_heads_q)

    def turn_plainly(x):
        q, k, v = {
            "three": lambda: x.unbind(2), "grouped": lambda: x.split([2, 1, 1], 2), "kv": lambda: (None, *x.unbind(2)),
        }[form]()  # fmt: skip
        of_k = (cos, sin) if form == "kv" else (2 * cos, 2 * sin)
        turned = (None if q is None else (q, cos, sin)), (k, *of_k)
        rows = torch.arange(4) + offsets[:, None]
        parts = [apply_rotary_emb_torch(y, c[rows], s[rows], interleaved) for y, c, s in filter(None, turned)] + [v]
        return torch.cat(parts, 2) if form == "grouped" else torch.stack(parts, 2)

    def gradient_of_penalty(function):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf).pow(3).sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaf)[0]

    expected = gradient_of_penalty(turn_plainly)
    torch.testing.assert_close(gradient_of_penalty(turn), expected, rtol=1e-12, atol=1e-12)

    leaf, several = x.clone().requires_grad_(), torch.randn(3, *x.shape).double()
    expected = [torch.autograd.grad(turn_plainly(leaf), leaf, dout)[0] for dout in several]
    for create_graph in BOTH:
        found = torch.autograd.grad(turn(leaf), leaf, several, is_grads_batched=True, create_graph=create_graph)[0]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", BOTH)
@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_module(scale_base, interleaved):
    """Scores of rotated q and k depend on the distance only, and XPos scales the scores by the distance."""
    rotary = RotaryEmbedding(16, interleaved=interleaved, scale_base=scale_base)
    vector_q, vector_k = torch.randn(1, 1, 1, 1, 16), torch.randn(1, 1, 1, 1, 16)
    qkv = torch.cat([vector_q, vector_k, torch.zeros_like(vector_q)], dim=2).repeat(1, 12, 1, 1, 1)
    out = rotary(qkv.clone())
    scores = torch.einsum("id,jd->ij", out[0, :, 0, 0].double(), out[0, :, 1, 0].double())
    for distance in range(-3, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    q, kv = rotary(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())
    assert q.equal(out[:, :, 0]) and kv.equal(out[:, :, 1:])


def test_module_formula_of_xpos():
    rotary = RotaryEmbedding(8, base=100.0, scale_base=4.0)
    rotary._update_cos_sin_cache(6, device="cpu", dtype=torch.float32)
    i, p = torch.arange(0, 8, 2, dtype=torch.double), torch.arange(6, dtype=torch.double)[:, None]
    angle, scale = p * 100.0 ** (-i / 8), ((i + 0.4 * 8) / (1.4 * 8)) ** ((p - 3) / 4.0)
    expected = angle.cos() * scale, angle.sin() * scale, angle.cos() / scale, angle.sin() / scale
    cached = rotary._cos_cached, rotary._sin_cached, rotary._cos_k_cached, rotary._sin_k_cached
    for table, value in zip(cached, expected):
        torch.testing.assert_close(table.double(), value, rtol=1e-5, atol=1e-6)
    assert not rotary.state_dict()  # buffers are not persistent
    assert rotary.inv_freq.dtype == torch.float32 and rotary.scale.shape == (4,)


def test_module_cache():
    """Tables grow, follow the dtype, and are exact in half precision. A decoded token equals that of the whole
    sequence."""
    rotary = RotaryEmbedding(16)
    qkv = torch.randn(2, 9, 3, 2, 16)
    whole = rotary(qkv.clone())
    for offset in (8, torch.tensor([8, 8], dtype=torch.int32)):
        fresh = RotaryEmbedding(16)
        assert fresh(qkv[:, 8:].clone(), seqlen_offset=offset).equal(whole[:, 8:])
        assert fresh(qkv[:, 8:].clone(), seqlen_offset=offset, max_seqlen=20).equal(whole[:, 8:])
    half = RotaryEmbedding(16).half()
    half._update_cos_sin_cache(4096, dtype=torch.float16)
    rotary._update_cos_sin_cache(4096, dtype=torch.float16)
    assert half._cos_cached.equal(rotary._cos_cached) and half._cos_cached.dtype == torch.float16
    grouped = torch.randn(1, 3, 6, 16)
    assert rotary(grouped.clone(), num_heads_q=4)[:, 1:, 4].ne(grouped[:, 1:, 4]).any()
    assert rotary(grouped.clone(), num_heads_q=4)[:, :, 5].equal(grouped[:, :, 5])


def tables_of(rotary, rows=4096):
    made = rotary._tables(rows, "cpu", torch.float32)
    return torch.stack([x for x in made if x is not None])


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("assigned", BOTH)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_conversions_do_not_round_the_frequencies(low, assigned, scale_base):
    """Also inside a model, of frequencies that a program has assigned, and if something else rounds the buffers."""
    expected, rotary = (RotaryEmbedding(64, scale_base=scale_base) for _ in range(2))
    if assigned:
        expected.inv_freq = expected._compute_inv_freq() * torch.linspace(1, 0.3, 32)
        rotary.inv_freq = expected.inv_freq.clone()
    model = torch.nn.Sequential(rotary, torch.nn.Linear(2, 2)).to(low)
    assert model[1].weight.dtype == low and tables_of(rotary).equal(tables_of(expected))
    assert tables_of(model.double().to(low).float()[0]).equal(tables_of(expected))
    if assigned:
        expected.inv_freq = expected.inv_freq.to(low).float()
    for buffer in rotary.buffers():
        buffer.data = buffer.data.to(low)
    for rounded in (rotary, rotary.float()):
        assert tables_of(rounded).equal(tables_of(expected))


def test_module_cache_survives_inference_mode():
    rotary = RotaryEmbedding(8)
    with torch.inference_mode():
        rotary(torch.randn(1, 4, 3, 1, 8))
    qkv = torch.randn(1, 4, 3, 1, 8, requires_grad=True)
    rotary(qkv * 1).sum().backward()
    assert qkv.grad is not None


@pytest.mark.parametrize("interleaved", BOTH)
def test_rotate_half(interleaved):
    x = torch.arange(6.0)
    expected = [-1, 0, -3, 2, -5, 4] if interleaved else [-3, -4, -5, 0, 1, 2]
    assert rotate_half(x, interleaved).tolist() == expected


def test_compiles():
    cos, sin = tables(8, 8)
    x = torch.randn(2, 8, 1, 8, requires_grad=True)
    compiled = torch.compile(lambda x: apply_rotary_emb(x, cos, sin) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), 2 * apply_rotary_emb(x, cos, sin))


def test_the_module_compiles_once_for_all_lengths():
    torch._dynamo.reset()
    weight, graphs = torch.randn(16, 16, requires_grad=True), CompileCounterWithBackend("aot_eager")
    module, compiled = RotaryEmbedding(16), torch.compile(RotaryEmbedding(16), fullgraph=True, backend=graphs)
    for n in (9, 5, 14, 20, 7, 33):
        x, kv = torch.randn(2, n, 3, 2, 16), torch.randn(2, n, 2, 2, 16)
        outs = [(f(x @ weight), *f(x[:, :, 0] @ weight, kv @ weight)) for f in (module, compiled)]
        torch.testing.assert_close(*outs)
        grads = [torch.autograd.grad(sum(y.sin().sum() for y in out), weight)[0] for out in outs]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count <= 4  # of a fixed and of any length, without and with kv


def test_a_graph_has_tables_for_its_tokens():
    torch._dynamo.reset()
    compiled, x = torch.compile(RotaryEmbedding(16), fullgraph=True, backend="eager"), torch.randn(2, 9, 3, 2, 16)
    torch.testing.assert_close(compiled(x.clone(), max_seqlen=4), RotaryEmbedding(16)(x.clone()))


def test_xpos_keeps_its_tables_beside_torch_compile():
    """Tables of a longer length have another middle, and keys in a cache may have been rotated with it."""
    torch._dynamo.reset()
    module, compiled = (RotaryEmbedding(16, scale_base=4.0) for _ in range(2))
    compiled = torch.compile(compiled, backend="aot_eager")
    for n in (9, 5, 14):
        x = torch.randn(2, n, 3, 2, 16)
        torch.testing.assert_close(compiled(x.clone()), module(x))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cos": torch.zeros(8, 5)}, "cos"),
        ({"cos": torch.zeros(8, 12), "sin": torch.zeros(8, 12)}, "rotary dim 24"),
        ({"cos": torch.zeros(3, 4), "sin": torch.zeros(3, 4)}, "3 rows, 4 positions"),
        ({"seqlen_offsets": 5}, "8 rows, 9 positions"),
        ({"seqlen_offsets": -1}, "seqlen_offsets is -1"),
        ({"seqlen_offsets": torch.zeros(3, dtype=torch.int32)}, "seqlen_offsets must be \\(2,\\)"),
        ({"seqlen_offsets": torch.zeros(2)}, "int32 or int64"),
        ({"x": torch.zeros(8, 1, 16)}, "\\[b, s, h, d\\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "\\[t, h, d\\]"),
        ({"x": torch.zeros(8, 1, 16), "cu_seqlens": torch.tensor([0, 4])}, "max_seqlen"),
        ({"x": torch.zeros(2, 4, 1, 264)}, "256"),
    ],
)
def test_refusals(change, words):
    arguments = {"x": torch.zeros(2, 4, 1, 16), "cos": torch.zeros(8, 4), "sin": torch.zeros(8, 4), **change}
    with pytest.raises(AssertionError, match=words):
        apply_rotary(**arguments)


def test_rotary_kernel_refuses():
    with pytest.raises(NotImplementedError, match="apply_rotary"):
        rotary_kernel[(1,)]
    with pytest.raises(NotImplementedError, match="apply_rotary"):
        rotary_kernel(1, 2)
    with pytest.raises(AttributeError, match="apply_rotary instead .no attribute 'cache'"):
        rotary_kernel.cache  # noqa: B018


def test_in_place_on_views_of_one_projection():
    """q and k are rotated in place, one after the other, as views from unbind or slices. Gradients reach the base."""
    cos, sin = tables(5, 8)
    dout = torch.randn(2, 5, 3, 8)
    for views in (lambda t: t.unbind(2), lambda t: (t[:, :, 0], t[:, :, 1], t[:, :, 2])):
        x = torch.randn(2, 5, 3, 1, 8, requires_grad=True)
        q, k, v = views(x * 1)
        q, k = apply_rotary_emb(q, cos, sin, inplace=True), apply_rotary_emb(k, cos, sin, inplace=True)
        torch.cat([q, k, v], 2).backward(dout)
        positions = torch.arange(5).expand(2, 5)
        close(x.grad[:, :, 0], reference(dout[:, :, :1], cos, sin, positions, False, True))
        close(x.grad[:, :, 1], reference(dout[:, :, 1:2], cos, sin, positions, False, True))
        assert x.grad[:, :, 2].equal(dout[:, :, 2:])


@pytest.mark.parametrize("steps", [("half", "empty"), ("empty", "half"), ("empty",)], ids=str)
def test_frequencies_of_a_module_that_was_on_meta(steps):
    """They are no part of a state dict, and to_empty leaves any numbers."""
    with torch.device("meta"):
        rotary = RotaryEmbedding(16, scale_base=512.0)
    for step in steps:
        rotary = rotary.half() if step == "half" else rotary.to_empty(device="cpu")
    want = RotaryEmbedding(16, scale_base=512.0)
    assert torch.equal(rotary.inv_freq, want.inv_freq) and torch.equal(rotary.scale, want.scale)


def test_frequencies_that_a_program_has_replaced():
    rotary = RotaryEmbedding(16)
    del rotary.inv_freq
    rotary.inv_freq = torch.nn.Parameter(torch.rand(8))
    assert rotary.double().inv_freq.dtype == torch.float64
    rotary = RotaryEmbedding(16)
    rotary.inv_freq = torch.rand(4).half()
    assert torch.equal(rotary.float().inv_freq, rotary.inv_freq.half().float())
