"""The ops of flash_attn_3 under torch.compile, torch.export and torch.library.opcheck."""

import flash_attn_3.flash_attn_interface as fa3
import pytest
import torch
from tensors3 import E4M3, i32, make, sums
from torch.autograd import forward_ad
from torch.library import opcheck

OPS = torch.ops.flash_attn_3
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# AOTAutograd takes no op that returns its argument, like fwd and fwd_combine with out.
SCHEMA_AND_FAKE = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("d_v", [32, 64])
def test_opcheck_forward(d_v, grad):
    q, k, v = make(2, 9, 4, 32, grad=grad), make(2, 13, 2, 32, grad=grad), make(2, 13, 2, d_v, grad=grad)
    opcheck(OPS._flash_attn_forward.default, (q, k, v), {"causal": True}, test_utils=ALL_CHECKS)
    opcheck(OPS._flash_attn_forward.default, (q.detach(), k.detach(), v.detach()), {"window_size_left": 3})


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck_varlen_forward(grad):
    q = make(12, 4, 32, grad=grad)
    lengths = {"cu_seqlens_q": sums(5, 0, 7), "cu_seqlens_k": sums(5, 0, 7), "max_seqlen_q": 7, "max_seqlen_k": 7}
    opcheck(OPS._flash_attn_forward.default, (q, q, q), lengths, test_utils=ALL_CHECKS)


def test_opcheck_fp8_forward():
    q = make(2, 9, 4, 32, dtype=E4M3)
    opcheck(OPS._flash_attn_forward.default, (q, q, q), {"q_descale": torch.rand(2, 4)}, test_utils="test_faketensor")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["bwd", "_flash_attn_backward"])
def test_opcheck_backward(name, packed):
    q = make(12, 4, 32) if packed else make(2, 6, 4, 32)
    lengths = {"cu_seqlens_q": sums(5, 7), "cu_seqlens_k": sums(5, 7), "max_seqlen_q": 7, "max_seqlen_k": 7}
    options = {**(lengths if packed else {}), "softmax_scale": 0.2, "is_causal": True}
    out, lse = fa3._flash_attn_forward(q, q, q, **(lengths if packed else {}), softmax_scale=0.2, causal=True)[:2]
    grads = {name: torch.zeros_like(q) for name in ("dq", "dk", "dv")}
    opcheck(getattr(OPS, name).default, (make(*q.shape), q, q.clone(), q.clone(), out, lse), {**grads, **options})


def test_opcheck_of_the_other_ops():
    q, cache = make(2, 3, 4, 32), (make(2, 12, 2, 32), make(2, 12, 2, 32))
    new, used = make(2, 2, 2, 32), i32(3, 10)
    opcheck(OPS.fwd.default, (q, *cache), test_utils=SCHEMA_AND_FAKE)
    opcheck(
        OPS._fwd_kvcache.default,
        (q, *cache, new, new.clone(), None, torch.empty_like(q), None, None, used, None, None, None, None),
    )
    parts, lse = make(3, 2, 5, 4, 16), make(3, 2, 4, 5).mT
    opcheck(OPS._combine.default, (parts, lse, torch.float16))
    opcheck(OPS._combine.default, (parts.requires_grad_(), lse), test_utils=ALL_CHECKS)
    parts = parts.detach()
    opcheck(OPS.fwd_combine.default, (parts, lse), test_utils=SCHEMA_AND_FAKE)
    opcheck(OPS.get_scheduler_metadata.default, (2, 1, 12, 4, 2, 32, 32, torch.bfloat16, used))


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def check_compiled(function, *tensors):
    """Results and gradients of the compiled function are those of the function, bit for bit."""
    inputs = [x for x in tensors if x.requires_grad]
    found = []
    for run in (function, compiled(function)):
        out = run(*tensors)
        results = [*out] if isinstance(out, tuple) else [out]
        torch.manual_seed(1)
        dout = torch.randn(results[0].shape)
        grads = torch.autograd.grad(results[0], inputs, dout.to(results[0].dtype)) if inputs else ()
        found.append([*results, *grads])
    assert len(found[0]) == len(found[1]) and all(torch.equal(x, y) for x, y in zip(*found))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("d_v", [32, 64])
def test_compiled_func(d_v, return_lse):
    q, k, v = make(2, 9, 4, 32, grad=True), make(2, 13, 2, 32, grad=True), make(2, 13, 2, d_v, grad=True)
    check_compiled(lambda *x: fa3.flash_attn_func(*x, causal=True, return_attn_probs=return_lse), q, k, v)


def test_compiled_varlen():
    """cu_seqlens_q and cu_seqlens_k are one tensor, as in self attention."""
    qkv, cu = [make(12, 4, 32, grad=True) for _ in range(3)], sums(5, 0, 7)
    used = i32(4, 0, 6)
    check_compiled(lambda *x: fa3.flash_attn_varlen_func(*x, cu, cu, 7, 7, causal=True), *qkv)
    check_compiled(lambda *x: fa3.flash_attn_varlen_func(*x, cu, cu, 7, 7, seqused_k=used), *qkv)


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.weight, self.options = torch.nn.Parameter(make(16, 16)), options

    def forward(self, x):
        y = x @ self.weight
        return fa3.flash_attn_func(y, y, y, causal=True, **self.options) + x * self.weight[0, 0]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_trains(strict):
    model, x = Block(), make(2, 9, 4, 16)
    program, found = torch.export.export(model, (x,), strict=strict).module(), []
    for run in (model, program):
        out = run(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(run.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_honest(strict):
    """It forgets an order with a warning, and refuses forward-mode derivatives."""
    x = make(2, 9, 4, 16)
    with pytest.warns(UserWarning, match="forgets deterministic=True"):
        program = torch.export.export(Block(deterministic=True), (x,), strict=strict).module()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="flash_attn_3 has no jvp"):
        program(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match="flash_attn_3 has no jvp"):
        torch.func.jvp(program, (x,), (x,))


@pytest.mark.parametrize("call", ["function", "op"])
@pytest.mark.parametrize(
    "reason, trained", [("qv", (3,)), ("qv", (0, 1, 2, 3)), ("qv", (0,)), ("chunk", (0, 1, 2))], ids=str
)
def test_compiled_forward_without_backward(reason, trained, call):
    """The forward compiles, although an input requires grad. The backward raises when it runs."""
    torch.compiler.reset()  # forgets the other cases, whose number is limited
    inputs = [make(2, 5, 4, 64), make(2, 7, 2, 64), make(2, 7, 2, 256), make(2, 5, 4, 256)]
    for i in trained:
        inputs[i].requires_grad_()

    def function(q, k, v, qv):
        options = {"qv": qv} if reason == "qv" else {"attention_chunk": 3}
        if call == "op":
            return OPS._flash_attn_forward(q, k, v, **options)[0]
        return fa3.flash_attn_func(q, k, v, **options)

    out = compiled(function)(*inputs)
    assert torch.equal(out, function(*inputs)) and out.requires_grad
    error, text = {
        "qv": (RuntimeError, "flash_attn_3 has no backward with qv"),
        "chunk": (AssertionError, "FA3 backward does not support attention_chunk"),
    }[reason]
    with pytest.raises(error, match=text):
        out.sum().backward()
    assert all(x.grad is None for x in inputs)
    with torch.no_grad():
        assert torch.equal(compiled(function)(*inputs), out)


def test_a_compiled_backward_for_fp8_raises():
    q, k, v = (make(2, 5, 4, 64).to(torch.float8_e4m3fn).requires_grad_() for _ in range(3))
    out = compiled(fa3.flash_attn_func)(q, k, v)
    assert torch.equal(out, fa3.flash_attn_func(q, k, v)) and out.requires_grad
    with pytest.raises(RuntimeError, match="flash_attn_3 has no backward for FP8: detach q, k and v"):
        out.sum().backward()


@pytest.mark.parametrize("num_heads_q", [None, 4])
def test_compiled_qkvpacked(num_heads_q):
    qkv = make(2, 9, 8, 32, grad=True) if num_heads_q else make(2, 9, 3, 4, 32, grad=True)
    check_compiled(lambda x: fa3.flash_attn_qkvpacked_func(x, causal=True, num_heads_q=num_heads_q), qkv)


@pytest.mark.parametrize("num_splits", [0, 1])
def test_compiled_cache(num_splits):
    """An append under torch.compile writes the caller's caches."""
    q, new, used = make(2, 3, 4, 32), make(2, 3, 2, 32), i32(3, 9)
    caches = make(2, 12, 2, 32), make(2, 12, 2, 32)

    def step(q, k_cache, v_cache):
        return fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, new, new, cache_seqlens=used, causal=True, num_splits=num_splits,
            return_softmax_lse=True,
        )  # fmt: skip

    results = []
    for run in (step, compiled(step)):
        copies = [x.clone() for x in caches]
        results.append([*run(q, *copies), *copies])
        assert not torch.equal(copies[0], caches[0])
    assert all(torch.equal(x, y) for x, y in zip(*results))


def test_compiled_combine_and_metadata():
    parts, lse, out = make(3, 2, 5, 4, 16), make(3, 2, 4, 5).mT, torch.empty(2, 5, 4, 16)
    check_compiled(fa3.flash_attn_combine, parts, lse)
    check_compiled(lambda *x: fa3.flash_attn_combine(*x), parts, lse, out)
    used = i32(3, 9)
    check_compiled(lambda x: fa3.get_scheduler_metadata(2, 1, 12, 4, 2, 32, x), used)


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return fa3.flash_attn_func(q, k, v, causal=True)


def test_export():
    q, k, v = make(2, 9, 4, 32), make(2, 13, 2, 32), make(2, 13, 2, 64)
    lengths = {1: torch.export.Dim("length", min=2, max=100)}
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=(lengths, None, None))
    longer = make(2, 11, 4, 32)
    assert torch.equal(program.module()(longer, k, v), Model()(longer, k, v))


@pytest.mark.parametrize(
    "function, error, text",
    [
        (lambda q: fa3.flash_attn_func(q, q, q, num_splits=0), ValueError, "num_splits <= 0 not supported"),
        (lambda q: fa3._flash_attn_forward(q, q, q, out_=torch.empty_like(q)), TypeError,
         "with pre-allocated output tensor is not supported."),
        (lambda q: fa3._flash_attn_forward(q[0], q[0], q[0], cu_seqlens_q=q.new_empty(2).int()),
         ValueError, "max_seqlen_q must be provided if cu_seqlens_q is provided"),
    ],
    ids=["num_splits", "out", "max_seqlen"],
)  # fmt: skip
def test_what_a_trace_refuses(function, error, text):
    q = torch.empty(2, 3, 4, 32, device="meta")
    with pytest.raises(error, match=text):
        function(q)


def test_meta_tensors():
    q, v = torch.empty(2, 3, 4, 64, device="meta", dtype=torch.bfloat16), torch.empty(2, 3, 2, 256, device="meta")
    v = v.bfloat16()
    out, lse = fa3.flash_attn_func(q, v[..., :64], v, return_attn_probs=True)
    assert out.shape == (2, 3, 4, 256) and out.dtype == torch.bfloat16 and lse.shape == (2, 4, 3)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_sizes_that_must_not_be_zero(device):
    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(shape, device=device, dtype=dtype)

    table = zeros(2, 1, dtype=torch.int32)
    for call, words in (
        (lambda: fa3.flash_attn_func(*zeros(3, 2, 5, 4, 0)), "q must have a head_size of at least 1"),
        (
            lambda: fa3.flash_attn_func(*zeros(2, 2, 5, 4, 8), zeros(2, 5, 4, 0)),
            "head_size_v should be a multiple of 8",
        ),
        (lambda: fa3.flash_attn_func(*zeros(3, 2, 5, 0, 8)), "k must have at least one head; it has num_heads_k = 0"),
        (
            lambda: fa3.flash_attn_with_kvcache(zeros(2, 1, 0, 8), *zeros(2, 2, 5, 0, 8)),
            "k_cache must have at least one head; it has num_heads_k = 0",
        ),
        (
            lambda: fa3.flash_attn_with_kvcache(zeros(2, 1, 4, 8), *zeros(2, 3, 0, 4, 8), page_table=table),
            "k_cache must have a page size .dimension 1. of at least 1; it has 0",
        ),
    ):
        with pytest.raises(RuntimeError, match=f"^{words}"):
            call()
    assert fa3.flash_attn_func(zeros(2, 5, 0, 8), *zeros(2, 2, 5, 2, 8)).shape == (2, 5, 0, 8)


def test_checkpoint():
    q = make(2, 5, 4, 32, grad=True)
    out = torch.utils.checkpoint.checkpoint(lambda x: fa3.flash_attn_func(x, x, x, causal=True), q, use_reentrant=False)
    expected = fa3.flash_attn_func(q, q, q, causal=True)
    (x,), (y,) = torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q)
    assert torch.equal(x, y)


def test_jvp_is_refused():
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="flash_attn_3 has no jvp"):
        q = forward_ad.make_dual(make(1, 3, 2, 32), make(1, 3, 2, 32))
        fa3.flash_attn_func(q, q, q)


def test_transforms_of_torch_func():
    """vmap without gradients is a call for each entry. The rest is refused in one sentence."""
    q, x = make(2, 3, 2, 32), make(2, 1, 3, 2, 32)
    out = torch.func.vmap(lambda x: fa3.flash_attn_func(x, x, x))(x)
    assert torch.equal(out[1], fa3.flash_attn_func(x[1], x[1], x[1]))

    def loss(q):
        return fa3.flash_attn_func(q, q, q).sum()

    for transform in (torch.func.grad(loss), torch.func.jacrev(loss), torch.func.vmap(torch.func.grad(loss))):
        with pytest.raises(NotImplementedError, match="no gradients under the transforms of torch.func.*autograd.grad"):
            transform(x if "vmap" in str(transform) else q)
    with pytest.raises(NotImplementedError, match="flash_attn_3 has no jvp"):
        torch.func.jvp(loss, (q,), (q,))
    leaf = q.clone().requires_grad_()
    for out in (fa3.flash_attn_func(leaf, q, q), fa3._flash_attn_forward(leaf, q, q)[0]):
        with pytest.raises(NotImplementedError, match="flash_attn_3 has no gradients of a batch .*one by one"):
            torch.autograd.grad(out, leaf, q[None], is_grads_batched=True)


def test_decoding_takes_no_tensors_of_torch_func():
    """A tangent or gradient of 0 would be wrong. Tensors that no transform follows are taken."""
    q, cache = make(1, 1, 2, 32), make(1, 6, 2, 32)

    def step(q):
        return fa3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4)

    for transform in (torch.func.grad(lambda q: step(q).sum()), torch.func.functionalize(step)):
        with pytest.raises(
            NotImplementedError, match="^flash_attn_with_kvcache of flash_attn_3 takes no tensors of torch"
        ):
            transform(q)
    with pytest.raises(
        NotImplementedError, match="takes no tensors of torch.func.*flash_attn_with_kvcache takes those"
    ):
        torch.func.vmap(step)(q[None])
    for transform in (torch.func.jacfwd(step), lambda q: torch.func.jvp(step, (q,), (q,))):
        with pytest.raises(NotImplementedError, match="^flash_attn_3 has no jvp"):
            transform(q)
    assert torch.equal(torch.func.grad(lambda x: (x * step(q)).sum())(q), step(q))
    assert torch.equal(torch.func.grad(lambda x: (x * torch.no_grad()(step)(x)).sum())(q), step(q))


def test_ops_in_transforms_of_torch_func():
    q, cache = make(1, 1, 2, 32), make(1, 6, 2, 32)
    parts, lses = make(2, 1, 3, 2, 8), torch.zeros(2, 1, 2, 3).transpose(-1, -2)
    forward = lambda q: torch.ops.flash_attn_3.fwd(q, cache, cache)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match="^flash_attn_3::fwd takes no tensors of torch.func"):
        torch.func.grad(lambda q: forward(q).sum())(q)
    with pytest.raises(NotImplementedError, match="^flash_attn_3 has no jvp"):
        torch.func.jvp(forward, (q,), (q,))
    with pytest.raises(NotImplementedError, match="^flash_attn_3 has no gradients under the transforms"):
        torch.func.grad(lambda x: fa3.flash_attn_combine(x, lses)[0].sum())(parts)
    with pytest.raises(NotImplementedError, match="^flash_attn_3 has no jvp"):
        torch.func.jvp(lambda q: fa3.quantize(q, cache, cache)[3], (q,), (q,))
    assert torch.equal(torch.func.grad(lambda x: (x * forward(q)).sum())(q), forward(q))
