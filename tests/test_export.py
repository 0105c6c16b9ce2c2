"""Programs of torch.export: results and gradients as in eager mode, also after torch.export.save and load."""

import io
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func, merge_attention
from flash_attn.bert_padding import index_first_axis, index_first_axis_residual, index_put_first_axis
from flash_attn.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_
from flash_attn.ops.activations import bias_gelu_impl, fast_gelu_impl, swiglu

HEADS, KV_HEADS, D = 4, 2, 16
ROWS = torch.tensor([3, 1, 0])


def causal(b, h, i, j):
    return i >= j


def flex(model, q, k, v, **options):
    options.setdefault("score_mod", lambda s, b, h, i, j: s * 2 + model.slopes[h] * (j - i))
    out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options)
    return out if isinstance(out, torch.Tensor) else sum(x.sum() for x in out)


def flex_aux(model, q, k, v):
    out, aux = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    return out.sum() + aux.lse.sin().sum() + aux.max_scores.amax()


def blocks(model, q, k, v):
    n, m = q.shape[1], k.shape[1]
    return flex(model, q, k, v, block_mask=create_block_mask(causal, None, None, n, m, device=q.device, BLOCK_SIZE=8))


def packed(model, q, k, v):
    lengths = model.lengths, model.lengths, 13, 13
    return flash_attn_varlen_func(*(x.flatten(0, 1)[:18] for x in (q, k, v)), *lengths, causal=True, sinks=model.sinks)


def merged(model, q, k, v):
    parts = [flash_attn_func(q, k[:, cut], v[:, cut], return_lse=True) for cut in (slice(0, 4), slice(4, None))]
    return merge_attention(*zip(*parts))[0]


def plain(**options):
    return lambda model, q, k, v: flash_attn_func(q, k, v, **options)


CALLS = {
    "plain": plain(causal=True, softcap=3.0),
    "in order": plain(deterministic=True),
    "sinks, in order": lambda model, q, k, v: flash_attn_func(q, k, v, sinks=model.sinks, deterministic=True),
    "with lse": lambda model, q, k, v: flash_attn_func(q, k, v, return_attn_probs=True)[0],
    "qkvpacked": lambda model, q, k, v: flash_attn_qkvpacked_func(
        torch.stack((q, q * 2, q + 1), 2), window_size=(3, 2)
    ),
    "packed": packed,
    "sinks": lambda model, q, k, v: flash_attn_func(q, k, v, sinks=model.sinks, window_size=(4, 0)),
    "bias": lambda model, q, k, v: flash_attn_func(q, k, v, attn_bias=model.slopes[:, None, None] * 2),
    "bias, mask, sinks": lambda model, q, k, v: flash_attn_func(
        q, k, v, attn_bias=model.slopes[:, None, None], attn_mask=q.new_ones(1, 1, dtype=torch.bool), sinks=model.sinks
    ),
    "lse": lambda model, q, k, v: sum(x.sin().sum() for x in flash_attn_func(q, k, v, return_lse=True)),
    "max logits": lambda model, q, k, v: flash_attn_func(q, k, v, causal=True, return_max_logits=True)[0],
    "merged": merged,
    "flex": flex,
    "flex, no mod": lambda model, q, k, v: flex(model, q, k, v, score_mod=None),
    "flex, mask_mod": lambda model, q, k, v: flex(model, q, k, v, mask_mod=causal),
    "flex, lse": lambda model, q, k, v: flex(model, q, k, v, return_lse=True),
    "flex, aux": flex_aux,
    "flex, blocks": blocks,
    "rotary": lambda model, q, k, v: apply_rotary_emb(q, *model.angles(q.shape[1])),
    "rotary of qkv": lambda model, q, k, v: apply_rotary_emb_qkv_(torch.stack((q, q, q), 2), *model.angles(q.shape[1])),
    "rotary of kv": lambda model, q, k, v: apply_rotary_emb_kv_(torch.stack((k, v), 2), *model.angles(k.shape[1])),
    "activations": lambda model, q, k, v: swiglu(fast_gelu_impl(q), bias_gelu_impl(q, q[0, 0, 0])),
    "padding": lambda model, q, k, v: index_put_first_axis(index_first_axis(q[0], ROWS), ROWS, 5),
    "padding, residual": lambda model, q, k, v: sum(x.sum() for x in index_first_axis_residual(q[0], ROWS)),
}


class Model(torch.nn.Module):
    """A block with a residual, so that a lost gradient of attention leaves another one."""

    def __init__(self, call):
        super().__init__()
        gen = torch.Generator().manual_seed(1)
        self.call = CALLS[call]
        self.weights = torch.nn.Parameter(torch.randn(3, D, D, generator=gen) / 3)
        self.slopes = torch.nn.Parameter(torch.randn(HEADS, generator=gen))
        self.sinks = torch.nn.Parameter(torch.randn(HEADS, generator=gen))
        self.register_buffer("lengths", torch.tensor([0, 5, 18], dtype=torch.int32))

    def angles(self, n):
        angles = torch.arange(n)[:, None] * 0.5 ** torch.arange(D // 2)
        return angles.cos(), angles.sin()

    def forward(self, x):
        q, k, v = (x @ w for w in self.weights)
        beside = self.weights.sum() + self.slopes.sum() * 2 + self.sinks.sum() * 3
        return self.call(self, q, k[:, :, :KV_HEADS], v[:, :, :KV_HEADS]) + beside


def inputs(n=11):
    return torch.randn(2, n, HEADS, D, generator=torch.Generator().manual_seed(n))


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def same(model, program, x):
    torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients(program, x), gradients(model, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_exported_program_trains(call, strict):
    model = Model(call)
    same(model, torch.export.export(model, (inputs(),), strict=strict).module(), inputs())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("call", ["plain", "sinks", "bias, mask, sinks", "lse", "max logits", "flex", "flex, mask_mod"])
def test_an_exported_program_trains_at_any_length_after_save_and_load(call, strict):
    model, file = Model(call), io.BytesIO()
    length = {1: torch.export.Dim("length", min=6, max=99)}
    torch.export.save(torch.export.export(model, (inputs(),), dynamic_shapes=(length,), strict=strict), file)
    file.seek(0)
    program = torch.export.load(file).module()
    for n in (11, 30):
        same(model, program, inputs(n))


@pytest.mark.parametrize("call", ["sinks", "bias, mask, sinks", "flex", "flex, aux", "flex, blocks"])
def test_the_op_of_exported_programs_keeps_pytorchs_rules(call):
    program, found = torch.export.export(Model(call), (inputs(),)), []

    class Arguments(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is torch.ops.flash_attn.flex_attend.default:
                found.append(args)
            return super().call_function(target, args, kwargs)

    with torch.no_grad():
        Arguments(program.module()).run(inputs())

    def leaf(x):
        return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x

    for args in found:
        torch.library.opcheck(torch.ops.flash_attn.flex_attend.default, torch.utils._pytree.tree_map(leaf, args))
    assert found


PROGRAM = """
import sys, torch, flash_attn.flex_attention
program, x = torch.export.load(sys.argv[1]).module(), torch.load(sys.argv[2])
torch.save(torch.autograd.grad(program(x).square().sum(), list(program.parameters())), sys.argv[3])
"""


@pytest.mark.parametrize("call", ["flex", "bias"])
def test_a_process_that_does_not_know_the_mod_has_its_gradients(call, tmp_path):
    model, paths = Model(call), [tmp_path / name for name in ("program.pt2", "x.pt", "gradients.pt")]
    torch.export.save(torch.export.export(model, (inputs(),)), paths[0])
    torch.save(inputs(), paths[1])
    subprocess.run([sys.executable, "-c", PROGRAM, *paths], check=True, cwd=Path(__file__).parents[1], timeout=300)
    for got, want in zip(torch.load(paths[2]), gradients(model, inputs()), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("call", ["sinks", "bias", "flex"])
def test_exports_do_not_depend_on_those_before(call):
    """Batch and length vary in turn."""
    for dim in (0, 1, 0):
        size = {dim: torch.export.Dim("size", min=1, max=99)}
        model, x = Model(call), inputs()
        program = torch.export.export(model, (x,), dynamic_shapes=(size,), strict=False).module()
        x = torch.cat((x, x), dim)
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", ["flex", "bias, mask, sinks"])
def test_no_second_derivative(call):
    program = torch.export.export(Model(call), (inputs(),)).module()
    grads = torch.autograd.grad(program(inputs()).square().sum(), list(program.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grads[0].sum().backward()


@pytest.mark.parametrize("call", ["plain", "packed", "sinks", "bias", "merged", "flex", "flex, blocks"])
def test_forward_derivatives_are_refused(call):
    program, x = torch.export.export(Model(call), (inputs(),)).module(), inputs()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        program(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(program, (x,), (x,))


@pytest.mark.parametrize("strict", [False, True])
def test_a_forgotten_order_is_said(strict):
    """The ops have the arguments of flash-attn, which has no place for deterministic=True in a forward."""
    with pytest.warns(UserWarning, match="forgets deterministic=True"):
        torch.export.export(Model("in order"), (inputs(),), strict=strict)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*deterministic")
        torch.export.export(Model("sinks, in order"), (inputs(),), strict=strict)
        torch.export.export(Model("plain"), (inputs(),), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_paged_keys_have_no_backward(strict):
    """Weights that require grad do not keep a program from inference."""

    class Paged(torch.nn.Module):
        def forward(self, q, pages, table, lengths):
            return flash_attn_varlen_func(q, pages, pages, lengths, lengths, 20, 20, block_table=table)

    arguments = (
        torch.randn(20, HEADS, D, requires_grad=True), torch.randn(4, 256, KV_HEADS, D),
        torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32),
    )  # fmt: skip
    out = torch.export.export(Paged(), arguments, strict=strict).module()(*arguments)
    torch.testing.assert_close(out, Paged()(*arguments))
    with pytest.raises(RuntimeError, match="no backward with block_table"):
        out.sum().backward()


def test_sinks_beside_pages_are_refused_where_their_gradient_would_be_lost():
    class Paged(torch.nn.Module):
        def forward(self, q, pages, sinks, table, lengths):
            return flash_attn_varlen_func(q, pages, pages, lengths, lengths, 20, 20, block_table=table, sinks=sinks)

    q, pages, sinks = (
        torch.randn(20, HEADS, D),
        torch.randn(4, 256, KV_HEADS, D),
        torch.zeros(HEADS, requires_grad=True),
    )
    arguments = q, pages, sinks, torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(Exception, match="would drop the gradient of sinks beside block_table"):
        torch.export.export(Paged(), arguments)
    with torch.no_grad():
        program = torch.export.export(Paged(), arguments).module()
        torch.testing.assert_close(program(*arguments), Paged()(*arguments))


def test_lists_that_another_graph_computes_are_taken_as_they_are():
    """The exported program sees marked lists in a graph that changes them."""

    class Masked(torch.nn.Module):
        def forward(self, q, *lists):
            mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(64, 64))
            return flex_attention(q, q, q, block_mask=mask)

    def lists(change):
        mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
        num = mask.full_kv_num_blocks
        num = torch.where(num > 1, num - 1, num) if change else num
        return mask.kv_num_blocks, mask.kv_indices, num, mask.full_kv_indices

    q, model = torch.randn(1, 1, 64, D), Masked()
    program = torch.export.export(model, (q, *lists(False)), strict=False).module()
    for change in (False, True):
        torch._dynamo.reset()
        found = torch.compile(lambda q: program(q, *lists(change)), backend="inductor")(q)  # noqa: B023
        torch.testing.assert_close(found, model(q, *lists(change)), rtol=1e-4, atol=1e-5)


def test_dropout_with_sinks_keeps_its_gradient():
    class Dropped(torch.nn.Module):
        def forward(self, q, sinks):
            return flash_attn_func(q, q, q, dropout_p=0.2, sinks=sinks)

    q, sinks = inputs(), torch.zeros(HEADS, requires_grad=True)
    program = torch.export.export(Dropped(), (q, sinks)).module()
    torch.manual_seed(3)
    loss = program(q, sinks).sin().sum()
    grad = torch.autograd.grad(loss, sinks)[0]
    for step in (-1e-2, 1e-2):  # of fp32
        for head in range(HEADS):
            torch.manual_seed(3)
            moved = program(q, sinks.detach() + step * (torch.arange(HEADS) == head)).sin().sum()
            torch.testing.assert_close((moved - loss) / step, grad[head], rtol=0.1, atol=0.02)
    with torch.no_grad():
        assert torch.export.export(Dropped(), (q, sinks)).module()(q, sinks).shape == q.shape
