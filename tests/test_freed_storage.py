"""Tensors whose storage was freed, as by FSDP and offloading, or cut. The error names the tensor.

The tests cover every tensor argument of every op, through torch's dispatcher and past it, on both devices.
"""

import pytest
import torch

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attention,
)
from flash_attn import flash_attn_interface as interface
from flash_attn.flex_attention import flex_attention

OPS = torch.ops.flash_attn
ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not ON_GPU, reason="no GPU of 8.0 or newer"))]


def half(*shape):
    return torch.randn(shape, dtype=torch.float16)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


SLOPES = {"alibi_slopes": torch.rand(4)}
MASK = {"softmax_scale": 0.2, "causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
QKV = {"q": half(2, 5, 4, 16), "k": half(2, 7, 2, 16), "v": half(2, 7, 2, 16)}
ROWS = {name: x.flatten(0, 1) for name, x in QKV.items()}
CU = {"cu_seqlens_q": i32(0, 4, 10), "cu_seqlens_k": i32(0, 9, 14), "max_seqlen_q": 6, "max_seqlen_k": 9}
DENSE = {**QKV, "dropout_p": 0.0, **MASK, **SLOPES, "return_softmax": False}
PACKED = {**ROWS, **CU, "dropout_p": 0.0, **MASK, **SLOPES, "seqused_k": i32(3, 5), "leftpad_k": i32(1, 0)}
PAGES = {
    **CU,
    "q": ROWS["q"],
    "k": half(4, 5, 2, 16),
    "v": half(4, 5, 2, 16),
    "block_table": i32(0, 1, 2, 3).view(2, 2),
}


def backward(q, k, v, lse):
    grads = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    saved = {"dout": torch.randn_like(q), "out": torch.randn_like(q), "softmax_lse": lse}
    return {
        **saved,
        **grads,
        "dropout_p": 0.5,
        **MASK,
        **SLOPES,
        "deterministic": False,
        "rng_state": torch.tensor([3, 0]),
    }


DENSE_BACKWARD = {**QKV, **backward(*QKV.values(), torch.zeros(2, 4, 5))}
PACKED_BACKWARD = {**ROWS, **CU, **backward(*ROWS.values(), torch.zeros(4, 10))}
CACHES = {"q": half(2, 1, 4, 32), "k_cache": half(3, 10, 2, 32), "v_cache": half(3, 10, 2, 32)}
NEW = {"k": half(2, 3, 2, 32), "v": half(2, 3, 2, 32), "rotary_cos": half(16, 8), "rotary_sin": half(16, 8)}
IDX = {"cache_batch_idx": i32(0, 2), "cache_leftpad": i32(1, 0), "cache_seqlens": i32(2, 5)}
KVCACHE = {
    **CACHES, **NEW, **IDX, "block_table": None, **SLOPES, "out": half(2, 1, 4, 32), **MASK, "rotary_interleaved": True,
    "num_splits": 0,
}  # fmt: skip
IN_PAGES = {"k_cache": half(6, 5, 2, 32), "v_cache": half(6, 5, 2, 32), "block_table": i32(0, 1, 2, 3, 4, 5).view(3, 2)}
CALLS = [
    ("op", OPS._flash_attn_forward, DENSE),
    ("op", OPS._flash_attn_varlen_forward, PACKED),
    ("op", OPS.fwd, {**DENSE, "out": half(2, 5, 4, 16)}),
    ("op", OPS.varlen_fwd, {**PACKED, "out": half(10, 4, 16)}),
    ("op", OPS._flash_attn_backward, DENSE_BACKWARD),
    ("op", OPS._flash_attn_varlen_backward, PACKED_BACKWARD),
    ("op", OPS.fwd_kvcache, KVCACHE),
    ("op", OPS.fwd_kvcache, {**KVCACHE, **IN_PAGES}),
    ("direct", interface._flash_attn_forward, DENSE),
    ("direct", interface._flash_attn_varlen_forward, PACKED),
    ("direct", interface._flash_attn_backward, DENSE_BACKWARD),
    ("direct", interface._flash_attn_varlen_backward, PACKED_BACKWARD),
    ("direct", flash_attn_func, {**QKV, **SLOPES}),
    ("direct", flash_attn_varlen_func, {**PAGES, **SLOPES}),
    ("direct", flash_attn_with_kvcache, {**CACHES, **NEW, **SLOPES, "cache_seqlens": IDX["cache_seqlens"]}),
]
ROWS_OF_TESTS = [
    pytest.param(function, arguments, name, id=f"{door}-{function.__name__}-{name}")
    for door, function, arguments in CALLS
    for name, x in arguments.items()
    if isinstance(x, torch.Tensor)
]


def copied(arguments, device):
    return {name: x.clone().to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept", ["nothing", "all but a byte", "all"])
@pytest.mark.parametrize("function, arguments, name", ROWS_OF_TESTS)
def test_the_tensor_is_named(function, arguments, name, kept, device):
    arguments = copied(arguments, device)
    # Views of larger memory: only the memory that the view reaches counts.
    x = arguments[name]
    memory = torch.cat([x.flatten()[:1], x.flatten(), x.flatten()[:1]])
    arguments[name] = memory[1:-1].view(x.shape)
    needed = (x.numel() + 1) * x.element_size()
    memory.untyped_storage().resize_({"nothing": 0, "all but a byte": needed - 1, "all": needed}[kept])
    if kept == "all":
        function(**arguments)
        return
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold {needed} bytes; it holds"):
        function(**arguments)


def freed(*shape):
    """A tensor whose last dimension is not contiguous, without memory."""
    x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    x.untyped_storage().resize_(0)
    return x


Q, LSE = torch.zeros(2, 500, 4, 16), torch.zeros(2, 4, 500)


@pytest.mark.parametrize("function, shape, name", [
    (lambda x: flash_attn_func(x, x, x), Q.shape, "q"),
    (lambda x: flash_attn_func(Q, Q, x), Q.shape, "v"),
    (lambda x: flash_attn_func(Q, Q, Q, sinks=x), (4,), "sinks"),
    (lambda x: flash_attn_with_kvcache(Q, Q, Q, sinks=x), (4,), "sinks"),
    (lambda x: flex_attention(Q, x, Q), Q.shape, "k"),
    (lambda x: merge_attention([Q, x], [LSE, LSE]), Q.shape, r"outs\[1\]"),
    (lambda x: merge_attention([Q, Q], [LSE, x]), LSE.shape, r"lses\[1\]"),
])  # fmt: skip
def test_what_torch_would_copy_is_named(function, shape, name):
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold"):
        function(freed(*shape))


def lost(x, num_bytes):
    """A copy whose storage lacks its last bytes, as many as these, or all of its bytes."""
    x = x.clone()
    x.untyped_storage().resize_(0 if num_bytes is None else x.untyped_storage().nbytes() - num_bytes)
    return x


LOSSES = pytest.mark.parametrize("num_bytes", [None, 1])
SCORES = {"attn_bias": torch.randn(2, 4, 5, 7), "attn_mask": torch.ones(2, 4, 5, 7) > 0, "sinks": torch.rand(4)}


@LOSSES
@pytest.mark.parametrize("name", [*QKV, *SCORES, *SLOPES])
def test_options_name_the_tensor(name, num_bytes):
    given = {**QKV, **SCORES, **SLOPES}
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold"):
        flash_attn_func(**{**given, name: lost(given[name], num_bytes)})


@LOSSES
@pytest.mark.parametrize("more", [{}, {"attn_bias": torch.zeros(5, 5)}])
def test_packed_tensors_are_named(more, num_bytes):
    q = half(2, 5, 4, 16)
    with pytest.raises(RuntimeError, match="^qkv has shape .*storage must hold"):
        flash_attn_qkvpacked_func(lost(half(2, 5, 3, 4, 16), num_bytes), **more)
    with pytest.raises(RuntimeError, match="^kv has shape .*storage must hold"):
        flash_attn_kvpacked_func(q, lost(half(2, 5, 2, 4, 16), num_bytes), **more)


@LOSSES
@pytest.mark.parametrize("function, arguments, name", [
    (flash_attn_func, QKV, "q"),
    (flash_attn_func, {**QKV, "attn_bias": SCORES["attn_bias"]}, "v"),
    (flash_attn_varlen_func, {**ROWS, **CU}, "k"),
    (flash_attn_with_kvcache, {**CACHES, **NEW, "cache_seqlens": IDX["cache_seqlens"]}, "k"),
    (flash_attn_with_kvcache, {**CACHES, **NEW, "cache_seqlens": IDX["cache_seqlens"]}, "rotary_cos"),
    (flex_attention, dict(zip(("query", "key", "value"), [half(1, 2, 8, 16)] * 3)), "key"),
])  # fmt: skip
def test_autocast_names_the_tensor(function, arguments, name, num_bytes):
    """A copy of a cut tensor in another dtype would hold numbers of other tensors."""
    arguments = {**arguments, name: lost(arguments[name], num_bytes)}
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold"), torch.autocast("cpu"):
        function(**arguments)


@LOSSES
@pytest.mark.parametrize("part", ["_values", "_offsets", "_lengths"])
def test_jagged_tensors_are_named(part, num_bytes):
    start, length = torch.tensor([[0, 1, 2], [3, 2, 4]])
    x = torch.nested.narrow(torch.randn(3, 6, 2, 8), 1, start, length, layout=torch.jagged)
    storage = getattr(x, part).untyped_storage()
    storage.resize_(0 if num_bytes is None else storage.nbytes() - num_bytes)
    name = {"_values": "q", "_offsets": r"q\.offsets\(\)", "_lengths": r"q\.lengths\(\)"}[part]
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold"):
        flash_attn_func(x, x, x)


def test_a_length_is_named():
    with pytest.raises(RuntimeError, match="^max_seqlen_q has shape .*storage must hold"):
        flash_attn_varlen_func(**{**ROWS, **CU, "max_seqlen_q": lost(torch.tensor(6), None)})


@pytest.mark.parametrize("name", ["q", "k", "dout"])
def test_gradients_of_options_name_the_tensor(name):
    given = {**QKV, "attn_bias": SCORES["attn_bias"], "dout": torch.randn_like(QKV["q"])}
    given = {name: x.clone().requires_grad_(name != "dout") for name, x in given.items()}
    dout = given.pop("dout")
    out = flash_attn_func(**given)
    {**given, "dout": dout}[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold"):
        out.backward(dout)


@pytest.mark.parametrize("name", ["attn_bias", "attn_mask", "alibi_slopes"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_name_what_the_caller_gave(name, is_packed):
    """To the kernels it is a tensor of a mod."""
    shape = (2, 4, 6, 9) if is_packed else (2, 4, 5, 7)
    given = {"attn_bias": torch.randn(shape), "attn_mask": torch.ones(shape) > 0, "alibi_slopes": torch.rand(4)}
    if is_packed:
        out = flash_attn_varlen_func(**{**ROWS, **CU, "q": ROWS["q"].clone().requires_grad_()}, **given)
    else:
        out = flash_attn_func(**{**QKV, "q": QKV["q"].clone().requires_grad_()}, **given)
    given[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"^{name} has shape .*storage must hold"):
        out.sum().backward()


def test_gradients_of_freed_tensors():
    """The backward of a tensor that was freed after the forward."""
    q, k, v = (x.clone().requires_grad_() for x in QKV.values())
    out = flash_attn_func(q, k, v)
    k.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="^k has shape"):
        out.sum().backward()


def test_empty_tensors_need_no_storage():
    q, k, v = (x.clone() for x in QKV.values())
    k, v = k[:, :0], v[:, :0]
    k.untyped_storage().resize_(0), v.untyped_storage().resize_(0)
    assert not flash_attn_func(q, k, v).any()


@pytest.mark.parametrize("given", [(), ("cu_seqlens_q",), ("cu_seqlens_k",)])
def test_lengths_that_are_none(given):
    """The error names the first missing argument."""
    arguments = {**PACKED, **{name: None for name in ("cu_seqlens_q", "cu_seqlens_k") if name not in given}}
    missing = "cu_seqlens_k" if "cu_seqlens_q" in given else "cu_seqlens_q"
    for function in (OPS._flash_attn_varlen_forward, interface._flash_attn_varlen_forward):
        with pytest.raises(RuntimeError, match=f"{missing} must be a tensor; it is None"):
            function(**arguments)


def test_a_large_freed_mask_is_named():
    """It is not compared with a mask that is remembered."""
    q, mask = torch.randn(1, 200, 2, 16), torch.rand(200, 200) < 0.5
    flash_attn_func(q, q, q, attn_mask=mask)
    with pytest.raises(RuntimeError, match=r"attn_mask has shape \(200, 200\), for which its storage"):
        flash_attn_func(q, q, q, attn_mask=lost(mask, None))
