"""PyTorch's scaled_dot_product_attention and varlen_attn on the kernels of this package."""

import platform
import subprocess
import sys
import threading

import fresh_python
import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as torchs
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import varlen as torchs_varlen

import flash_attn
from flash_attn import explain, flash_attn_varlen_func

SDPA = F.scaled_dot_product_attention
aten = torch.ops.aten
INF = float("inf")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def active():
    with flash_attn.sdpa():
        yield


@pytest.fixture(autouse=True)
def restored():
    yield
    assert torchs.current_flash_attention_impl() is None


def inputs(b, h, h_kv, len_q, len_kv, d, dtype, seed=0):
    return (
        randn(b, h, len_q, d, seed=seed).to(dtype),
        randn(b, h_kv, len_kv, d, seed=seed + 1).to(dtype),
        randn(b, h_kv, len_kv, d, seed=seed + 2).to(dtype),
    )


def all_results(q, k, v, **options):
    """out and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = SDPA(*leaves, **options)
    dout = randn(*out.shape, seed=7).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves, dout)


def exact(q, k, v, attn_mask=None, **options):
    """PyTorch's own math in fp64."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        return all_results(q.double(), k.double(), v.double(), attn_mask=attn_mask, **options)


def verify(q, k, v, **options):
    """Our error is at most twice that of PyTorch's own kernel, and the strides are the same."""
    torch_s = all_results(q, k, v, **options)
    with flash_attn.sdpa():
        plan = explain(SDPA, q.detach().requires_grad_(), k, v, **options)
        assert plan.kernel.startswith("attn_") and plan.backward.kernel.startswith("attn_bwd"), plan
        ours = all_results(q, k, v, **options)
    for mine, theirs, true in zip(ours, torch_s, exact(q, k, v, **options)):
        allowed = 2 * (theirs.double() - true).abs().max() + 2e-6 * true.abs().max().clamp(min=1)
        assert (mine.double() - true).abs().max() <= allowed, plan
        assert mine.stride() == theirs.stride() and mine.dtype == theirs.dtype
    return plan


SHAPES = [
    (2, 3, 3, 5, 5, 8),
    (1, 4, 2, 17, 33, 64),  # fewer queries than keys, grouped heads
    (2, 4, 1, 130, 70, 40),  # more queries than keys
    (1, 4, 2, 1, 200, 64),  # one query: the decode kernel
    (1, 2, 2, 70, 300, 256),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def options_of(name, shape, dtype):
    b, h, h_kv, len_q, len_kv, _ = shape
    ones = torch.ones(b, h, len_q, len_kv)
    seen = {
        "bool": torch.rand(ones.shape, generator=torch.Generator().manual_seed(1)) > 0.3,
        "columns": torch.rand((b, 1, 1, len_kv), generator=torch.Generator().manual_seed(1)) > 0.3,
        "plane": torch.rand((len_q, len_kv), generator=torch.Generator().manual_seed(1)) > 0.3,
    }
    masks = {
        "none": None,
        "causal": None,
        **{name: x.index_fill(-1, torch.tensor(0), True) for name, x in seen.items()},
        "float": randn(b, 1, len_q, len_kv, seed=9).to(dtype),
        "rows": randn(1, h, len_q, 1, seed=9).to(dtype),
        "fp32": randn(b, h, len_q, len_kv, seed=9) * 3,
        "lowest": torch.where(seen["plane"].index_fill(-1, torch.tensor(0), True), 0.0, torch.finfo(dtype).min).to(
            dtype
        ),
    }
    return {"attn_mask": masks[name], "is_causal": name == "causal", "enable_gqa": h != h_kv}


@pytest.mark.parametrize("name", ["none", "causal", "bool", "columns", "plane", "float", "rows", "lowest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, name):
    plan = verify(*inputs(*shape, dtype), **options_of(name, shape, dtype))
    assert plan.kernel.endswith("_bias") == (name not in ("none", "causal")), plan


@pytest.mark.parametrize("name", ["none", "causal", "bool", "float"])
def test_every_instruction_set(isa, name):
    shape = 1, 4, 2, 37, 150, 32
    plan = verify(*inputs(*shape, torch.bfloat16), **options_of(name, shape, torch.bfloat16))
    assert plan.isa == isa


def test_scale():
    verify(*inputs(1, 2, 2, 30, 40, 16, torch.float32), scale=0.7)
    verify(*inputs(1, 2, 2, 30, 40, 16, torch.float32), scale=-0.3)


def test_mask_in_fp32():
    """PyTorch takes an fp32 mask with bf16 tensors."""
    shape = 2, 2, 2, 20, 50, 32
    verify(*inputs(*shape, torch.bfloat16), **options_of("fp32", shape, torch.bfloat16))


# ---- masks of keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowest", [False, True], ids=["inf", "lowest"])
@pytest.mark.parametrize("rows", [1, 12], ids=["one row", "all rows"])
@pytest.mark.parametrize("sides", ["right", "left", "both", "hole"])
def test_padding(sides, rows, lowest):
    """Padding shortens the call. Other masks of keys stay masks."""
    fill = torch.finfo(torch.float32).min if lowest else -INF
    mask = torch.zeros(3, 1, rows, 40)
    if sides in ("right", "both"):
        mask[0, ..., 25:] = mask[1, ..., 7:] = fill
    if sides in ("left", "both"):
        mask[0, ..., :9] = fill
    if sides == "hole":
        mask[0, ..., 8:11] = fill
    plan = verify(*inputs(3, 4, 4, 12, 40, 32, torch.float32), attn_mask=mask)
    assert plan.kernel.endswith("_bias") == (sides == "hole")


@pytest.mark.parametrize("len_q", [40, 12, 50])
@pytest.mark.parametrize("rows", [1, "all"])
def test_padding_beside_a_causal_mask(len_q, rows):
    """The hidden keys stay, because the causal mask counts from the first key."""
    q, k, v = inputs(2, 2, 2, len_q, 40, 16, torch.float32)
    mask = torch.zeros(2, 1, 1 if rows == 1 else len_q, 40)
    mask[0, ..., 25:] = mask[1, ..., :3] = mask[1, ..., 9:] = -INF
    future = torch.ones(len_q, 40, dtype=torch.bool).triu(1)
    expected = exact(q, k, v, attn_mask=mask.masked_fill(future, -INF))
    with flash_attn.sdpa():
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, attn_mask=mask)
        dout = randn(*out.shape, seed=7)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, True, attn_mask=mask
        )
    for x, y in zip((out, *grads), expected):
        assert torch.allclose(x, y.nan_to_num().float(), atol=1e-5)


def test_padding_in_many_sequences(active):
    q, k, v = inputs(100, 1, 1, 3, 9, 8, torch.float32)
    seen = torch.arange(9) < torch.arange(100)[:, None, None, None] % 9 + 1
    out = SDPA(q, k, v, attn_mask=seen)
    each = [SDPA(q[i, None], k[i, None, :, : i % 9 + 1], v[i, None, :, : i % 9 + 1]) for i in range(100)]
    assert torch.allclose(out, torch.cat(each), atol=1e-6)


@pytest.mark.parametrize("form", ["all rows", "some rows"])
def test_rows_that_see_nothing(form):
    """out is 0 and lse is 0, as PyTorch's kernel says, and no gradient is NaN."""
    q, k, v = inputs(2, 2, 2, 6, 50, 16, torch.float32)
    mask = torch.zeros(2, 1, 6, 50)
    mask[0, :, slice(None) if form == "all rows" else slice(1, 3)] = -INF
    op = aten._scaled_dot_product_flash_attention_for_cpu
    torch_s = [*op(q, k, v, attn_mask=mask), *all_results(q, k, v, attn_mask=mask)]
    with flash_attn.sdpa():
        ours = [*op(q, k, v, attn_mask=mask), *all_results(q, k, v, attn_mask=mask)]
    for mine, theirs in zip(ours, torch_s):
        assert torch.allclose(mine, theirs, atol=2e-6) and mine.stride() == theirs.stride()
    assert (ours[0][0, :, 1:3] == 0).all()


def test_rows_of_the_lowest_number():
    """Such a row sees all keys alike, and its gradient is no NaN."""
    q, k, v = inputs(1, 2, 2, 6, 50, 16, torch.float32)
    mask = torch.zeros(1, 1, 6, 50)
    mask[:, :, 2] = torch.finfo(torch.float32).min
    with flash_attn.sdpa():
        out, *grads = all_results(q, k, v, attn_mask=mask)
    assert torch.allclose(out[:, :, 2], v.mean(2), atol=1e-6)
    assert all(grad.isfinite().all() for grad in grads)


def test_infinite_and_nan_values_behind_a_mask(active):
    """Padding may hold anything."""
    q, k, v = inputs(1, 2, 2, 6, 50, 16, torch.float32)
    seen = (torch.arange(50) < 30).expand(1, 1, 6, 50)
    want = SDPA(q, k[:, :, :30], v[:, :, :30])
    k[:, :, 30:], v[:, :, 30:] = float("nan"), INF
    assert torch.allclose(SDPA(q, k, v, attn_mask=seen), want, atol=1e-6)


# ---- layouts --------------------------------------------------------------------------------------------------------


def test_strides():
    b, h, n, d = 2, 4, 20, 16
    packed = randn(b, n, 3, h, d)
    verify(*packed.permute(2, 0, 3, 1, 4))  # [b, n, h, d] in memory
    verify(*randn(3, b, h, 2 * n, d)[..., ::2, :])
    verify(*(randn(3, 1, 1, n, d).expand(3, b, h, n, d)))


def test_transposed_tensors_go_to_torch(active):
    """The last dimension has a stride. PyTorch takes such tensors to its own math."""
    q, k, v = (x.transpose(2, 3) for x in inputs(1, 2, 2, 16, 16, 16, torch.float32))
    assert torch.allclose(SDPA(q, k, v), exact(q, k, v)[0].float(), atol=1e-5)


def test_gradient_of_a_sum(active):
    """Its strides are 0."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 20, 30, 16, torch.float32))
    SDPA(q, k, v).sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]
    wanted = torch.autograd.grad(SDPA(q, k, v), (q, k, v), torch.ones(1, 2, 20, 16))
    assert all(torch.equal(x, y) for x, y in zip(grads, wanted))


def test_promises_of_fakes(active):
    q, k, v = (x.transpose(1, 2) for x in inputs(2, 30, 30, 4, 4, 16, torch.float32))
    op, back = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    out, lse = op(q, k, v)
    real = out, lse, *back(out, q, k, v, out, lse, 0.0, False)
    q, k, v, out, lse = (x.to("meta") for x in (q, k, v, out, lse))
    fake = *op(q, k, v), *back(out, q, k, v, out, lse, 0.0, False)
    for x, y in zip(real, fake):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


FIRST_CALLS = """
import sys, torch, flash_attn
q, k, v = torch.randn(3, 2, 4, 30, 16, requires_grad=True)
with flash_attn.sdpa():
    for options in ({"is_causal": True}, {"attn_mask": torch.rand(30, 30) > 0.3}):
        torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).sum().backward()
flash_attn.register()
print(*(name for name in ("torch._dynamo", "sympy") if name in sys.modules))
"""


def test_first_calls_import_no_compiler():
    """The import of sympy, with which fakes of torch begin on "meta", takes 2 to 5 seconds."""
    done = fresh_python.python(FIRST_CALLS)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_promises_are_those_of_meta(monkeypatch):
    """The fakes are found in a table of torch. Without the table the ops run on "meta"."""
    promises = flash_attn._sdpa._promises.__wrapped__
    found = promises()
    monkeypatch.delattr(torch._decomp, "meta_table")
    assert promises() == found


def test_lse():
    q, k, v = inputs(2, 3, 3, 20, 30, 16, torch.bfloat16)
    op = aten._scaled_dot_product_flash_attention_for_cpu
    theirs = op(q, k, v)[1]
    with flash_attn.sdpa():
        mine = op(q, k, v)[1]
    assert torch.allclose(mine, theirs, atol=1e-3) and mine.stride() == theirs.stride() and mine.dtype == theirs.dtype


# ---- calls that are PyTorch's ---------------------------------------------------------------------------------------

FOREIGN = {
    "fp64": ({}, lambda q: q.double()),
    "wide heads": ({}, lambda q: q.repeat(1, 1, 1, 20)),
    "fp64 and mask": ({"attn_mask": torch.zeros(20, 20, dtype=torch.float64)}, lambda q: q.double()),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_calls(name):
    """PyTorch's own kernel computes them, bit for bit, and explain says so."""
    options, change = FOREIGN[name]
    q, k, v = (change(x) for x in inputs(1, 2, 2, 20, 20, 16, torch.float32))
    torch_s = all_results(q, k, v, **options)
    with flash_attn.sdpa():
        ours = all_results(q, k, v, **options)
        plan = explain(SDPA, q.requires_grad_(), k, v, **options)
    assert all(torch.equal(x, y) for x, y in zip(ours, torch_s))
    for one in (plan, plan.backward):
        assert not one.kernel and one.refusal.startswith("PyTorch's own kernel runs: "), plan


def test_short_calls_in_fp32(active, isa):
    """MKL is faster there, unless there is AVX-512. On ARM nothing was measured."""
    q, k, v = inputs(2, 12, 12, 16, 16, 64, torch.float32)
    plan = explain(SDPA, q.requires_grad_(), k, v)
    why = "PyTorch's own kernel is faster" if platform.machine() == "x86_64" else "on ARM PyTorch's own kernel"
    weaker = ("reference", "scalar", "neon", "neonbf16", "avx2")
    assert (why in plan.refusal) == (isa in weaker)
    assert plan.backward.kernel.startswith("attn_bwd")
    assert torch.allclose(SDPA(q, k, v), exact(q, k, v)[0].float(), atol=1e-5)


def test_explain_of_torchs_math(active):
    q, k, v = inputs(1, 2, 2, 20, 20, 16, torch.float32)
    assert explain(SDPA, q, k, v, dropout_p=0.5).refusal == (
        "PyTorch chooses its own math attention, because there is dropout"
    )
    mask = torch.zeros(20, 20, requires_grad=True)
    assert "attn_mask requires grad" in explain(SDPA, q, k, v, attn_mask=mask).refusal
    SDPA(q, k, v, attn_mask=mask).sum().backward()
    assert mask.grad is not None


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda q, k, v: (q[0], k[0], v[0]), "query has 3 dimensions, not 4"),
        (lambda q, k, v: (q, k.mT.contiguous().mT, v), "the last dimension of key has a stride"),
        (lambda q, k, v: (q, k, v[..., :8]), "value has another head dimension than query"),
        (lambda q, k, v: (q, k[:, :1], v[:, :1]), "key has another number of heads than query, without enable_gqa"),
        (lambda q, k, v: (q[:, :, :0], k, v), "query is empty"),
        (lambda q, k, v: (q, k[:1], v[:1]), "key has another batch size than query"),
    ],
)
def test_explain_gives_the_reason_of_torchs_math(change, reason, active):
    q, k, v = change(*inputs(2, 2, 2, 20, 20, 16, torch.float32))
    assert explain(SDPA, q, k, v).refusal == f"PyTorch chooses its own math attention, because {reason}"


def test_explain_of_a_switched_off_attention(active):
    q, k, v = inputs(2, 2, 2, 20, 20, 16, torch.float32)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert "because flash attention is switched off" in explain(SDPA, q, k, v).refusal
    x = torch.nested.nested_tensor([torch.ones(2, 5, 16)], layout=torch.jagged)
    assert explain(SDPA, x, x, x).refusal == "PyTorch chooses its own attention, because the tensors are nested"


def test_explain_of_a_model(active):
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)
    plan = explain(torch.nn.Sequential(layer, layer), torch.randn(2, 10, 64))
    assert [one.kernel[:8] for one in plan] == ["attn_fwd"] * 2
    assert [one.backward.kernel[:8] for one in plan] == ["attn_bwd"] * 2


def test_errors_of_torchs_kernel(active):
    q, k, v = inputs(1, 2, 2, 20, 20, 16, torch.float32)
    with pytest.raises(
        RuntimeError, match="Attention mask dim in {2, 4}|PyTorch's own kernel refused the call, and printed why"
    ):
        aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=torch.zeros(2, 20, 20))


def test_empty_tensors(active):
    for len_q, len_kv in ((0, 5), (5, 0), (0, 0)):
        out = SDPA(torch.randn(1, 2, len_q, 8), torch.randn(1, 2, len_kv, 8), torch.randn(1, 2, len_kv, 8))
        assert out.shape == (1, 2, len_q, 8) and (out == 0).all()


# ---- the switch -----------------------------------------------------------------------------------------------------


def is_ours():
    q = torch.zeros(1, 1, 4, 8)
    try:
        return bool(explain(SDPA, q, q, q).kernel)
    except TypeError:
        return False


def test_context_restores():
    q, k, v = inputs(1, 2, 2, 100, 100, 64, torch.float32)
    before = all_results(q, k, v)
    assert not is_ours()
    with flash_attn.sdpa():
        assert is_ours() and torchs.current_flash_attention_impl() == "flash_attn"
        with flash_attn.sdpa():
            assert is_ours()
        assert is_ours()
    assert not is_ours()
    assert all(torch.equal(x, y) for x, y in zip(before, all_results(q, k, v)))
    with pytest.raises(ZeroDivisionError), flash_attn.sdpa():
        raise ZeroDivisionError
    assert not is_ours()


def test_register():
    flash_attn.register()
    flash_attn.register()
    assert is_ours()
    with flash_attn.sdpa():
        assert is_ours()
    assert is_ours()
    torchs.restore_flash_attention_impl()
    assert not is_ours()
    assert "flash_attn" in torchs.list_flash_attention_impls()
    torchs.activate_flash_attention_impl("flash_attn")
    assert is_ours()
    torchs.restore_flash_attention_impl()
    assert not is_ours()


def test_register_in_a_context_outlasts_it():
    with flash_attn.sdpa():
        flash_attn.register()
    assert is_ours()
    torchs.restore_flash_attention_impl()
    assert not is_ours()


def test_a_context_after_another_was_undone():
    with flash_attn.sdpa():
        torchs.restore_flash_attention_impl()
        with flash_attn.sdpa():
            assert is_ours()
    assert not is_ours()


def test_another_implementation_comes_back():
    removed = []

    class Handle:
        def remove(self):
            removed.append(1)

    torchs.register_flash_attention_impl("another", register_fn=Handle)
    torchs.activate_flash_attention_impl("another")
    with flash_attn.sdpa():
        assert is_ours() and removed == [1]
    assert torchs.current_flash_attention_impl() == "another" and not is_ours()
    torchs.restore_flash_attention_impl()


@pytest.fixture
def orders(monkeypatch):
    """What has become of PyTorch's order, which it makes on a GPU only."""
    made = []

    class Priority:
        def __init__(self):
            made.append("ours")

        def restore(self):
            made.append("PyTorch's")

    monkeypatch.setattr(flash_attn._sdpa, "_Priority", Priority)
    return lambda: made[-1] if made else "PyTorch's"


@pytest.mark.parametrize("outer", [True, False])
def test_the_order_of_nested_contexts(orders, outer):
    names = {True: "ours", False: "PyTorch's"}
    with flash_attn.sdpa(before_cudnn=outer):
        for inner in (True, False, True):
            with flash_attn.sdpa(before_cudnn=inner):
                assert orders() == names[inner]
            assert orders() == names[outer]
    assert orders() == names[False] and not is_ours()

    flash_attn.register(before_cudnn=outer)
    assert orders() == names[outer]
    with flash_attn.sdpa(before_cudnn=not outer):
        assert orders() == names[not outer]
    assert orders() == names[outer] and is_ours()
    flash_attn.register(before_cudnn=not outer)
    assert orders() == names[not outer]
    with flash_attn.sdpa(before_cudnn=not outer), flash_attn.sdpa(before_cudnn=not outer):
        flash_attn.register(before_cudnn=outer)
        assert orders() == names[outer]
        with flash_attn.sdpa(before_cudnn=not outer):
            assert orders() == names[not outer]
        assert orders() == names[outer]
    assert orders() == names[outer] and is_ours()
    torchs.restore_flash_attention_impl()
    assert orders() == names[False]


def test_the_order_where_the_outer_context_ends_first(orders):
    """As contexts of two threads may."""
    first, second = flash_attn.sdpa(before_cudnn=True), flash_attn.sdpa(before_cudnn=False)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert orders() == "PyTorch's" and is_ours()
    second.__exit__(None, None, None)
    assert orders() == "PyTorch's" and not is_ours()


def test_threads_share_the_switch():
    """The context of one thread ends while another thread is in its own."""
    q, k, v = inputs(1, 2, 2, 50, 50, 16, torch.float32)
    want = exact(q, k, v)[0].float()
    entered, may_leave, seen = threading.Barrier(3), threading.Event(), []

    def work(leaves_first):
        with flash_attn.sdpa():
            entered.wait()
            for _ in range(20):
                assert torch.allclose(SDPA(q, k, v), want, atol=1e-5)
            if not leaves_first:
                may_leave.wait()
                seen.append(is_ours())

    threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    entered.wait()
    threads[0].join()
    may_leave.set()
    threads[1].join()
    assert seen == [True] and not is_ours()


def kernels_of_the_cpu():
    dump = torch._C._dispatch_dump(f"aten::{flash_attn._sdpa._OPS[0]}")
    return [line for line in dump.splitlines() if line.startswith("CPU")]


def test_threads_outside_of_contexts():
    """A kernel that leaves the dispatcher while another thread calls it is freed memory."""
    with flash_attn.sdpa():
        if not flash_attn._sdpa._stays:
            pytest.skip("this PyTorch does not tell what its own kernel said")
        while_active = kernels_of_the_cpu()
    assert kernels_of_the_cpu() == while_active and "sdpa.c" in while_active[0] and len(while_active) == 2
    q, k, v = inputs(1, 2, 2, 50, 50, 16, torch.float32)
    want, is_over = all_results(q, k, v), threading.Event()
    wrong = []

    def work():
        while not is_over.is_set():
            found = all_results(q, k, v)
            wrong.extend(i for i, (x, y) in enumerate(zip(found, want)) if not torch.allclose(x, y, atol=1e-5))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        with flash_attn.sdpa():
            pass
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong


ANOTHER_KERNEL = """
import torch, flash_attn
def foreign(q, k, v, *others, **options):
    return torch.full_like(q, 7.0), torch.zeros(q.shape[:3])
def first():
    q = torch.ones(1, 1, 4, 8)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)[0, 0, 0, 0].item()
when = sys.argv[1]
if when == "after":
    with flash_attn.sdpa():
        pass
library = torch.library.Library("aten", "IMPL")
library.impl("_scaled_dot_product_flash_attention_for_cpu", foreign, "CPU")
found = [first()]
for _ in range(2):
    with flash_attn.sdpa():
        found.append(first())
    found.append(first())
library._destroy()
print(found, first())
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_kernel_of_another_package_comes_back(when):
    """Whether it was there before the first context, or came behind it."""
    done = fresh_python.python("import sys\n" + ANOTHER_KERNEL, when)
    assert done.stdout == "[7.0, 1.0, 7.0, 1.0, 7.0] 1.0\n", done.stderr


def test_a_new_process_prints_nothing():
    code = (
        "import torch, flash_attn\n"
        "flash_attn.register()\n"
        "q = torch.ones(1, 1, 4, 8)\n"
        "assert (torch.nn.functional.scaled_dot_product_attention(q, q, q) == 1).all()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_wrong_arguments():
    with pytest.raises(TypeError, match="before_cudnn must be a bool; it is 1"):
        flash_attn.register(before_cudnn=1)
    with pytest.raises(TypeError, match="before_cudnn must be a bool; it is None"), flash_attn.sdpa(before_cudnn=None):
        pass


# ---- what stands before the ops --------------------------------------------------------------------------------------


def test_modules(active):
    torch.manual_seed(0)
    x, padding = torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([[9], [5]])
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True, dropout=0.0)
    mha = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    results = [layer(x, src_key_padding_mask=padding), mha(x, x, x, key_padding_mask=padding, need_weights=False)[0]]
    assert "attn_" in explain(layer, x, src_key_padding_mask=padding).kernel
    with sdpa_kernel(SDPBackend.MATH):
        wanted = [layer(x, src_key_padding_mask=padding), mha(x, x, x, key_padding_mask=padding, need_weights=False)[0]]
    assert all(torch.allclose(y, z, atol=1e-5) for y, z in zip(results, wanted))


def test_checkpoint(active):
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 20, 30, 16, torch.float32))
    plain = torch.autograd.grad(SDPA(q, k, v).square().sum(), (q, k, v))
    saved = torch.utils.checkpoint.checkpoint(SDPA, q, k, v, use_reentrant=False)
    assert all(torch.equal(x, y) for x, y in zip(plain, torch.autograd.grad(saved.square().sum(), (q, k, v))))


def test_autocast(active):
    q, k, v = inputs(1, 2, 2, 20, 30, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = SDPA(q, k, v)
        assert "bf16" in explain(SDPA, q, k, v).kernel
    assert torch.equal(out, SDPA(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_vmap(active):
    q, k, v = (torch.stack([x, 2 * x]) for x in inputs(1, 2, 2, 20, 30, 16, torch.float32))
    each = torch.stack([SDPA(q[i], k[i], v[i], is_causal=True) for i in range(2)])
    assert torch.allclose(torch.vmap(lambda q, k, v: SDPA(q, k, v, is_causal=True))(q, k, v), each, atol=1e-6)


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    def count():
        with FlopCounterMode(display=False) as counter:
            SDPA(*inputs(1, 2, 2, 20, 30, 16, torch.float32))
            aten._scaled_dot_product_flash_attention(*inputs(1, 2, 2, 20, 30, 16, torch.float32)) if is_on else None
        return counter.get_total_flops()

    is_on = False
    theirs = count()
    with flash_attn.sdpa():
        assert count() == theirs
        is_on = True
        assert count() == theirs + 2 * 2 * 2 * 20 * 30 * 16


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(active, backend):
    """A graph calls the same ops, so the switch works on compiled code too."""

    has_mask = backend == "aot_eager"  # Inductor compiles C++ for the rest of such a graph

    def step(q, k, v, mask):
        return SDPA(q, k, v, attn_mask=mask if has_mask else None, is_causal=not has_mask)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n in (16, 24) if has_mask else (16,):
        q, k, v = (x.requires_grad_() for x in inputs(2, 4, 4, n, n, 16, torch.float32))
        mask = torch.rand(2, 1, n, n) > 0.2
        wanted, got = step(q, k, v, mask), compiled(q, k, v, mask)
        assert torch.allclose(got, wanted, atol=1e-5)
        dout = torch.randn_like(got)
        grads = [torch.autograd.grad(out, (q, k, v), dout) for out in (got, wanted)]
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(*grads))


def test_export(active):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return SDPA(q, k, v, is_causal=True)

    q, k, v = inputs(2, 4, 4, 16, 16, 16, torch.float32)
    program = torch.export.export(Model(), (q, k, v))
    assert torch.allclose(program.module()(q, k, v), SDPA(q, k, v, is_causal=True), atol=1e-6)


def test_opcheck(active):
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 2, 9, 12, 8, torch.float32))
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    torch.library.opcheck(op, (q, k, v), test_utils=("test_schema", "test_faketensor"))


# ---- the ops of CUDA, which have kernels for CPU tensors too ---------------------------------------------------------


def test_the_op_of_cuda(active):
    """Nine results; the causal mask ends at the bottom right; out is strided like q."""
    q, k, v = (x.transpose(1, 2) for x in inputs(2, 20, 30, 4, 4, 16, torch.bfloat16))
    k, v = (x.contiguous() for x in (k, v))
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    out, lse, cum_q, cum_k, max_q, max_k, rng_state, unused, debug = results
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 20, 30) and debug.numel() == 0
    assert rng_state.dtype == unused.dtype == torch.uint64 and rng_state.shape == (2,) and unused.shape == ()
    assert out.stride() == q.stride() and lse.shape == (2, 4, 20) and lse.is_contiguous()
    want = SDPA(q, k, v, attn_mask=torch.ones(20, 30, dtype=torch.bool).tril(10))
    assert torch.allclose(out, want, atol=2e-2)
    grads = aten._scaled_dot_product_flash_attention_backward(
        out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, rng_state, unused
    )
    for x, y in zip(grads, (q, k, v)):
        assert x.stride() == torch.empty_like(y).stride() and x.shape == y.shape and x.isfinite().all()


def test_dropout_of_the_op_of_cuda(active):
    """The state of the generator goes from the forward to the backward."""
    q, k, v = inputs(1, 2, 2, 40, 50, 16, torch.float32)
    results = aten._scaled_dot_product_flash_attention(q, k, torch.ones_like(v), 0.5)
    out, lse, rng_state = results[0], results[1], results[6]
    assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,)
    assert 0.5 < out.std() / out.mean() * 8 < 8 and abs(out.mean() - 1) < 0.1
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        torch.ones_like(out), q, k, v, out, lse, None, None, 40, 50, 0.5, False, rng_state, results[7]
    )
    # The sum of dv's columns is the sum of the kept probabilities, which out shows.
    assert torch.allclose(dv[..., 0].sum(2), out[..., 0].sum(2), rtol=1e-4)


def test_varlen_attn():
    """PyTorch has no such kernel for the CPU."""
    cu_seqlens = torch.tensor([0, 7, 30, 42], dtype=torch.int32)
    q, k, v = (randn(42, 4, 64, seed=i).requires_grad_() for i in range(3))
    with pytest.raises(NotImplementedError):
        torchs_varlen.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 23, 23)
    with flash_attn.sdpa():
        for window in ((-1, -1), (-1, 0), (5, 0)):
            want = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 23, 23, window_size=window)
            if not hasattr(torchs_varlen, "varlen_attn_out") and window == (5, 0):
                continue  # PyTorch before 2.13 has no windows here
            out = torchs_varlen.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, 23, 23, window_size=window)
            assert torch.equal(out, want)
            grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)]
            assert all(torch.equal(x, y) for x, y in zip(*grads))
        with pytest.raises(RuntimeError, match="cum_seq_q must have dtype int32; it is int64"):
            torchs_varlen.varlen_attn(q, k, v, cu_seqlens.long(), cu_seqlens, 23, 23)


@pytest.mark.skipif(not hasattr(torchs_varlen, "varlen_attn_out"), reason="this PyTorch has no varlen_attn_out")
def test_varlen_attn_out_and_pages(active):
    cu_seqlens = torch.tensor([0, 7, 30, 42], dtype=torch.int32)
    q, k, v = (randn(42, 4, 64, seed=i) for i in range(3))
    out = torch.full_like(q, float("nan"))
    torchs_varlen.varlen_attn_out(out, q, k, v, cu_seqlens, cu_seqlens, 23, 23, window_size=(-1, 0))
    assert torch.equal(out, flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 23, 23, causal=True))
    k_pages, v_pages = randn(6, 16, 4, 64), randn(6, 16, 4, 64, seed=1)
    table = torch.tensor([[0, 3], [2, 1], [4, 5]], dtype=torch.int32)
    used = torch.tensor([20, 25, 32], dtype=torch.int32)
    out = torchs_varlen.varlen_attn(q, k_pages, v_pages, cu_seqlens, None, 23, 32, seqused_k=used, block_table=table)
    k, v = (torch.cat([x[table[i].long()].flatten(0, 1)[: used[i]] for i in range(3)]) for x in (k_pages, v_pages))
    cu_k = torch.tensor([0, 20, 45, 77], dtype=torch.int32)
    assert torch.allclose(out, flash_attn_varlen_func(q, k, v, cu_seqlens, cu_k, 23, 32), atol=1e-6)


def test_a_torch_without_the_list_says_so():
    """Torch before 2.10 has no list of implementations. The rest of the package works there."""
    program = (
        "import torch.nn.attention as torchs\n"
        "for name in dir(torchs):\n"
        "    if name.endswith('flash_attention_impl'): delattr(torchs, name)\n"
        "import torch, flash_attn\n"
        "q = torch.ones(1, 3, 2, 16)\n"
        "assert flash_attn.explain(flash_attn.flash_attn_func, q, q, q).kernel\n"
        "for call in (flash_attn.register, flash_attn.sdpa().__enter__):\n"
        "    try: call()\n"
        "    except RuntimeError as error: print(error)\n"
    )
    done = fresh_python.python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("need torch 2.10") == 2
