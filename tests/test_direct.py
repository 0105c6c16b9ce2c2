"""The ops without torch's dispatcher (csrc/torch/direct.c). Results are the same, and a watched call gets None."""

import threading

import flash_attn_2_cuda as direct
import fresh_python
import pytest
import torch
from harness import randn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn
from flash_attn import _calls, flash_attn_func

OPS = torch.ops.flash_attn
MASK = (0.3, True, (4, -1), 0.0)  # as the direct functions take the mask
FLAT = (0.3, True, 4, -1, 0.0)  # as the ops take the mask
PLAIN = (0.0, None, False, (-1, -1), 0.0, None, False, False)  # no option
INT = torch.int32


Q, K, V = randn(2, 5, 4, 16), randn(2, 7, 2, 16), randn(2, 7, 2, 16)
ROWS = [x.flatten(0, 1) for x in (Q, K, V)]
LENGTHS = (torch.tensor([0, 4, 10], dtype=INT), torch.tensor([0, 9, 14], dtype=INT), 6, 9)
USED = torch.tensor([3, 6], dtype=INT)
NEW = None, None, USED, *[None] * 6  # no keys to append, and no rotary, indices, pages, slopes
SLOPES = torch.rand(4)


FLAGS = False, False  # deterministic, return_attn_probs


def dense(q=Q, k=K, v=V, mask=MASK, slopes=SLOPES, dropout_p=0.0, flags=FLAGS):
    return direct.direct_attention(q, k, v, dropout_p, *mask, slopes, *flags)


def same(got, want):
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for x, y in zip(got, want):
        assert type(x) is torch.Tensor and x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
        assert torch.equal(x, y)


# ---- the same results ----------------------------------------------------------------------------------------------


def test_dense():
    want = OPS._flash_attn_forward(Q, K, V, 0.0, *FLAT, SLOPES, False)
    same(dense(), want[0])
    same(direct.direct_forward(Q, K, V, 0.0, *MASK, SLOPES, *FLAGS), want[:2])
    same(direct.direct_flash_attn_forward(Q, K, V, 0.0, *FLAT, SLOPES, False), want)
    heads_first = Q.transpose(1, 2).contiguous().transpose(1, 2)
    same(dense(heads_first), OPS._flash_attn_forward(heads_first, K, V, 0.0, *FLAT, SLOPES, False)[0])


def test_dropout_draws_the_same_seed():
    torch.manual_seed(3)
    want = OPS._flash_attn_forward(Q, K, V, 0.3, *FLAT, None, True)
    torch.manual_seed(3)
    same(direct.direct_flash_attn_forward(Q, K, V, 0.3, *FLAT, None, True), want)


def test_varlen():
    options = SLOPES, False, None, None, None, True, 0
    want = OPS._flash_attn_varlen_forward(*ROWS, *LENGTHS, 0.0, *FLAT, *options)
    same(direct.direct_varlen_attention(*ROWS, *LENGTHS, 0.0, *MASK, SLOPES, *FLAGS, None), want[0])
    same(direct.direct_varlen_forward(*ROWS, *LENGTHS, 0.0, *MASK, SLOPES, *FLAGS, None), want[:2])
    same(direct.direct_flash_attn_varlen_forward(*ROWS, *LENGTHS, 0.0, *FLAT, *options), want)


def test_kvcache():
    out = torch.empty_like(Q)
    lse = OPS.fwd_kvcache(Q, K, V, *NEW, out, *FLAT, True, 0)
    same(direct.direct_kvcache_attention(Q, K, V, *NEW, *MASK, True, 0), out)
    same(direct.direct_kvcache_forward(Q, K, V, *NEW, *MASK, True, 0), (out, lse))
    lse = OPS.fwd_kvcache(Q, K, V, *NEW[:2], torch.full((2,), 5, dtype=INT), *NEW[3:], out, *FLAT, True, 0)
    same(direct.direct_kvcache_forward(Q, K, V, *NEW[:2], 5, *NEW[3:], *MASK, True, 0), (out, lse))


def test_backward():
    out, lse = direct.direct_forward(Q, K, V, 0.0, *MASK, SLOPES, *FLAGS)
    saved = randn(2, 5, 4, 16) + 1, Q, K, V, out, lse
    grads, want = ([torch.empty_like(x) for x in (Q, K, V)] for _ in range(2))
    rest = 0.0, *FLAT, SLOPES, False, None
    same(direct.direct_flash_attn_backward(*saved, *grads, *rest), OPS._flash_attn_backward(*saved, *want, *rest))
    same(grads, want)


def test_varlen_backward():
    out, lse = direct.direct_varlen_forward(*ROWS, *LENGTHS, 0.0, *MASK, SLOPES, *FLAGS, None)
    saved = randn(10, 4, 16), *ROWS, out, lse
    grads, want = ([torch.empty_like(x) for x in ROWS] for _ in range(2))
    rest = *LENGTHS, 0.0, *FLAT, SLOPES, True, None, True
    got = direct.direct_flash_attn_varlen_backward(*saved, *grads, *rest)
    same(got, OPS._flash_attn_varlen_backward(*saved, *want, *rest))
    same(grads, want)


def test_empty_tensors():
    for q, k in ((Q[:0], K[:0]), (Q[:, :0], K), (Q, K[:, :0])):
        same(dense(q, k, k), OPS._flash_attn_forward(q, k, k, 0.0, *FLAT, SLOPES, False)[0])


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_tensors_that_want_gradients():
    for i in range(3):
        tensors = [x.clone().requires_grad_(i == j) for j, x in enumerate((Q, K, V))]
        same(
            dense(*tensors), direct.direct_forward(Q, K, V, 0.0, *MASK, SLOPES, *FLAGS)
        )  # lse is needed for the backward, too
        assert direct.direct_flash_attn_forward(*tensors, 0.0, *FLAT, None, False) is None
        with torch.no_grad():
            same(dense(*tensors), dense())
        same(
            direct.direct_forward(*tensors, 0.0, *MASK, SLOPES, *FLAGS),
            direct.direct_forward(Q, K, V, 0.0, *MASK, SLOPES, *FLAGS),
        )


# ---- refused calls -------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def negative(x):
    """``-x`` as a view. Only a flag says that its elements are negated."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


ONE_COLUMN = randn(2, 5, 4, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: dense([1.0]),
        lambda: dense(None),
        lambda: dense(Q.as_subclass(Subclass)),
        lambda: dense(torch.nn.Parameter(Q)),
        lambda: dense(Q.to("meta")),
        lambda: dense(Q.to_sparse()),
        lambda: dense(Q.int()),
        lambda: dense(Q.double()),  # k has another dtype
        lambda: dense(Q[0]),
        lambda: dense(torch._efficientzerotensor(Q.shape)),
        lambda: dense(Q.mT.contiguous().mT),
        lambda: dense(negative(Q), negative(K), negative(V)),
        lambda: dense(*[negative(ONE_COLUMN)] * 3),
        lambda: dense(torch._neg_view(Q)),
        lambda: dense(slopes=[1.0]),
        lambda: dense(slopes=SLOPES[:3]),
        lambda: dense(mask=(0.3, 1, (4, -1), 0.0)),
        lambda: dense(mask=("0.3", True, (4, -1), 0.0)),
        lambda: dense(mask=(float("nan"), True, (4, -1), 0.0)),
        lambda: dense(mask=(10**400, True, (4, -1), 0.0)),
        lambda: dense(mask=(0.3, True, (4, 10**30), 0.0)),
        lambda: dense(mask=(0.3, True, (4,), 0.0)),
        lambda: dense(mask=(0.3, True, torch.tensor([4, -1]), 0.0)),
        lambda: dense(mask=(0.3, True, (4, -1))),
        lambda: dense(mask=(*MASK, 1)),
        lambda: dense(dropout_p=0.1),
        lambda: dense(dropout_p=None),
        lambda: dense(flags=(False, True)),  # the op returns the other results
        lambda: dense(flags=(0, False)),
        lambda: dense(flags=(False, None)),
        lambda: direct.direct_attention(),
        lambda: direct.direct_varlen_attention(*ROWS, *LENGTHS[:2], torch.tensor(6), 9, 0.0, *MASK, None, *FLAGS, None),
        lambda: direct.direct_varlen_attention(*ROWS, LENGTHS[0].long(), *LENGTHS[1:], 0.0, *MASK, None, *FLAGS, None),
        lambda: direct.direct_varlen_attention(*ROWS, *LENGTHS[:2], 1, 9, 0.0, *MASK, None, *FLAGS, None),  # low
        lambda: direct.direct_kvcache_attention(Q, K, V, None, None, 8, *NEW[3:], *MASK, True, 0),  # 7 keys in all
        lambda: direct.direct_kvcache_attention(Q, K, V, None, None, 2**32, *NEW[3:], *MASK, True, 0),
        lambda: direct.direct_kvcache_attention(Q, K, V, None, None, -1, *NEW[3:], *MASK, True, 0),
        lambda: direct.direct_kvcache_attention(Q, K, V, None, None, True, *NEW[3:], *MASK, True, 0),
    ],
)  # fmt: skip
def test_refused(call):
    assert call() is None


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    names = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names = *self.names, str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watch", [Dispatch, Functions, forward_ad.dual_level, torch.profiler.profile, torch.autograd.profiler.profile]
)
def test_refused_while_watched(watch):
    assert dense() is not None
    with watch():
        assert dense() is None
    assert dense() is not None


def test_observers_of_every_thread_see_the_op(tmp_path):
    """ExecutionTraceObserver and the profiler of all threads have callbacks that the state of the thread does not
    show."""
    assert dense() is not None
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    observer.start()
    assert dense() is None
    flash_attn_func(Q, K, V)
    observer.stop()
    observer.unregister_callback()
    assert "flash_attn::_flash_attn_forward" in (tmp_path / "trace.json").read_text()
    assert dense() is not None
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    seen = []
    with torch.profiler.profile(experimental_config=config) as profile:
        thread = threading.Thread(target=lambda: seen.append((dense(), flash_attn_func(Q, K, V))))
        thread.start()
        thread.join()
    assert seen[0][0] is None
    assert "flash_attn::_flash_attn_forward" in {event.key for event in profile.key_averages()}
    assert dense() is not None


OVERRIDE = """
import sys, warnings
import torch
import flash_attn_2_cuda
from flash_attn import flash_attn_func

warnings.simplefilter("ignore")  # torch warns that a kernel is overridden
x = torch.ones(1, 4, 2, 8)
dense = lambda: flash_attn_2_cuda.direct_attention(
    x, x, x, 0.0, None, False, (-1, -1), 0.0, None, False, False)

def nothing(q, k, v, *_):
    return torch.zeros_like(q), q.new_zeros(2, 4, 5), q.new_zeros(0), torch.zeros(2, dtype=torch.int64)

for key in sys.argv[1:]:
    with torch.library._scoped_library("flash_attn", "IMPL") as library:
        library.impl("_flash_attn_forward", nothing, key)
        assert dense() is None and not flash_attn_func(x, x, x).any(), key
    assert dense() is not None and flash_attn_func(x, x, x).any(), key

# torch.library knows as many kernels as before
with torch.library._scoped_library("test_direct", "DEF") as library:
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", torch.clone, "CPU")
    assert dense() is not None
with torch.library._scoped_library("flash_attn", "IMPL") as library:
    library.impl("_flash_attn_forward", nothing, "CPU")
    assert dense() is None
"""


def test_kernels_of_others_are_called():
    """The test runs in a process of its own, because torch's memory of an override outlives the override."""
    done = fresh_python.python(OVERRIDE, "CPU", "AutogradCPU", "Autograd")
    assert done.returncode == 0, done.stderr


def test_function_modes_see_the_op():
    with Functions() as mode:
        same(flash_attn_func(Q, K, V), flash_attn_func(Q, K, V))
    assert sum("_flash_attn_forward" in name for name in mode.names) == 2


def test_a_default_device_watches_nothing():
    with torch.device("cpu"):
        same(dense(), dense())
        with Dispatch():
            assert dense() is None
        with Functions():
            assert dense() is None


def test_refused_inside_functorch():
    seen = []

    def call(q):
        seen.append(dense())  # functorch does not know these tensors
        return q

    torch.func.vmap(call)(Q)
    assert seen == [None]


def test_traces_hold_the_op():
    traced = torch.jit.trace(lambda q: flash_attn_func(q, K, V), (Q,), check_trace=False)
    assert torch.equal(traced(-Q), flash_attn_func(-Q, K, V))


# ---- memory and threads --------------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_results_are_freed():
    q = torch.zeros(1, 4096, 4, 64)  # 4 MiB
    k = q[:, :1]
    for _ in range(3):
        direct.direct_forward(q, k, k, *PLAIN)
    before = resident_bytes()
    for _ in range(100):
        direct.direct_forward(q, k, k, *PLAIN)
        direct.direct_attention(q, k, k, *PLAIN)
    assert resident_bytes() - before < 100 << 20


def test_threads_at_once():
    want, wrong = dense(), []

    def work():
        for _ in range(200):
            if not torch.equal(dense(), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_module_of_ours_leaves_calls_to_the_dispatcher():
    code = (
        "import torch, flash_attn, flash_attn.flex_attention; import flash_attn.flex.ops, flash_attn._merge;"
        "print([name for name in torch.library._impls if name.startswith('flash_attn/')])"
    )
    assert fresh_python.python(code).stdout == "[]\n"


@pytest.mark.parametrize("form", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])
def test_tensors_in_one_take_the_short_way_without_gradients(monkeypatch, form):
    """With gradients they do not, because the gradient comes in one piece."""
    is_qkv, generator = "qkv" in form, torch.Generator().manual_seed(0)
    one = torch.randn(2, 7, 3 if is_qkv else 2, 4, 24, generator=generator, requires_grad=True)
    tensors = [one] if is_qkv else [torch.randn(2, 7, 4, 24, generator=generator), one]
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    places = () if "varlen" not in form else (cu, 7) if is_qkv else (cu, cu, 7, 7)
    function = getattr(flash_attn, f"flash_attn_{form}_func")

    def call(tensors):
        return function(*(x.flatten(0, 1) if places else x for x in tensors), *places, causal=True, softcap=5.0)

    want = call(tensors)
    calls = []
    monkeypatch.setattr(_calls, "_call", lambda *_: calls.append(1))
    with torch.no_grad():
        torch.testing.assert_close(call(tensors), want.detach(), rtol=0, atol=0)
    torch.testing.assert_close(call([x.detach() for x in tensors]), want.detach(), rtol=0, atol=0)
    assert calls == []
    call(tensors)
    assert calls == [1]


# ---- tensors in one ------------------------------------------------------------------------------------------------


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def on_device(x, device):
    """The same on a device, with 16 bits on a GPU."""
    return x.to(device, torch.float32 if device == "cpu" or not x.is_floating_point() else torch.bfloat16)


WHOLE = {
    "contiguous": lambda one: one,
    "heads_first": lambda one: one.transpose(-2, -3).contiguous().transpose(-2, -3),
    "every_second_column_is_not_ours": lambda one: torch.cat([one, one], -1)[..., : one.size(-1)],
    "parts_last": lambda one: torch.stack(one.unbind(-3), -1).movedim(-1, -3),
    "backwards_rows": lambda one: torch.stack([one, one], 1)[:, 1],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", WHOLE)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_c_takes_a_tensor_apart(device, layout, parts, is_packed):
    torch.manual_seed(0)
    one = WHOLE[layout](on_device(torch.randn(2, 7, parts, 4, 24), device))
    given = [] if parts == 3 else [on_device(torch.randn(2, 7, 4, 24), device)]
    function, lengths, tail = direct.direct_attention, (), PLAIN
    if is_packed:
        one, given = one.flatten(0, 1), [x.flatten(0, 1) for x in given]
        cu = torch.tensor([0, 5, 14], dtype=INT, device=device)
        function, lengths, tail = direct.direct_varlen_attention, (cu, cu, 9, 9), (*PLAIN, None)
    separate = *given, *(x if x.stride(-1) == 1 else x.contiguous() for x in one.unbind(-3))
    got = function(*given, one, *[None] * (parts - 1), *lengths, *tail)
    if one.stride(-1) != 1:
        assert got is None
    else:
        same(got, function(*separate, *lengths, *tail))


ONE = randn(2, 7, 3, 4, 16)


def cut(x):
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 4)
    return x


@pytest.mark.parametrize(
    "call",
    [
        lambda: direct.direct_attention(ONE[:, :, :2], None, None, *PLAIN),
        lambda: direct.direct_attention(ONE, None, ONE[:, :, 0], *PLAIN),
        lambda: direct.direct_attention(ONE, ONE, None, *PLAIN),
        lambda: direct.direct_attention(Q, None, None, *PLAIN),
        lambda: direct.direct_attention(Q, K, None, *PLAIN),
        lambda: direct.direct_attention(None, None, None, *PLAIN),
        lambda: direct.direct_attention(None, K, V, *PLAIN),
        lambda: direct.direct_attention(cut(ONE), None, None, *PLAIN),
        lambda: direct.direct_attention(ONE.clone().requires_grad_(), None, None, *PLAIN),
        lambda: direct.direct_attention(Q, ONE[:, :, :2].clone().requires_grad_(), None, *PLAIN),
        lambda: direct.direct_varlen_attention(ONE, None, None, *LENGTHS, *PLAIN, None),
        lambda: direct.direct_kvcache_attention(ONE, None, None, *NEW, None, False, -1, -1, 0.0, True, 0),
        lambda: direct.direct_flash_attn_backward(Q, Q, None, None, Q, Q, Q, Q, Q, 0.0, *FLAT, None, False, None),
    ],
)  # fmt: skip
def test_what_c_does_not_take_apart(call):
    assert call() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])
@pytest.mark.parametrize("option", ["attn_bias", "attn_mask", "sinks", "return_lse", "return_max_logits"])
def test_options_of_tensors_in_one(monkeypatch, device, form, option):
    """Without gradients no view is made of a part. The results are those of separate tensors."""
    torch.manual_seed(0)
    one = on_device(torch.randn(2, 150, 3 if "qkv" in form else 2, 4, 24), device)
    given = [] if "qkv" in form else [on_device(torch.randn(2, 150, 4, 24), device)]
    options = {
        "attn_bias": on_device(torch.randn(1, 4, 150, 150), device),
        "attn_mask": (torch.rand(2, 1, 150, 150) < 0.7).to(device),
        "sinks": on_device(torch.randn(4), device),
        "return_lse": True,
        "return_max_logits": True,
    }
    cu = torch.tensor([0, 120, 300], dtype=INT, device=device)
    is_packed, lengths = "varlen" in form, ()
    if is_packed:
        one, given = one.flatten(0, 1), [x.flatten(0, 1) for x in given]
        options |= {"attn_bias": options["attn_bias"][..., :150], "attn_mask": options["attn_mask"][:1]}
        lengths = (cu, 180) if "qkv" in form else (cu, cu, 180, 180)
        options |= {"attn_bias": on_device(torch.randn(1, 4, 180, 180), device)}
        options |= {"attn_mask": (torch.rand(2, 1, 180, 180) < 0.7).to(device)}
    picked = {option: options[option]}
    function = getattr(flash_attn, f"flash_attn_{form}_func")
    separate = flash_attn.flash_attn_varlen_func if is_packed else flash_attn_func
    want = separate(*given, *one.unbind(-3), *((cu, cu, 180, 180) if is_packed else ()), causal=True, **picked)
    function(*given, one, *lengths, causal=True, **picked)  # what is found once is found
    monkeypatch.setattr(_calls, "_parts", lambda *_: pytest.fail("views were made"))
    same(function(*given, one, *lengths, causal=True, **picked), want)
