"""Failures that do not come from the caller's arguments. Each raises its own exception, by every way into an op."""

import flash_attn_2_cuda as raw
import fresh_python
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["direct", "op"])
def route(request):
    """The direct functions refuse a call that a mode watches."""
    if request.param == "direct":
        yield
    else:
        with Watcher():
            yield


ENDLESS = torch.zeros(1, 1, 1, 64).expand(1, 2**42, 1, 64)  # one row repeated: out would take 2^50 bytes
KEY = torch.zeros(1, 3, 1, 64)


def test_no_memory_for_the_result(route):
    with pytest.raises(MemoryError, match="could not allocate an output"):
        flash_attn_func(ENDLESS, KEY, KEY)
    with pytest.raises(MemoryError, match="could not allocate an output"):
        _flash_attn_forward(ENDLESS, KEY, KEY, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    rows, cu = ENDLESS[0], torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(MemoryError, match="could not allocate an output"):
        flash_attn_varlen_func(rows, KEY[0], KEY[0], cu, cu, 3, 3)


def test_an_op_that_is_called_by_its_name():
    """The dispatcher knows no MemoryError, but the words are the same."""
    with pytest.raises(RuntimeError, match="could not allocate an output"):
        torch.ops.flash_attn._flash_attn_forward(ENDLESS, KEY, KEY, 0.0, 1.0, False, -1, -1, 0.0, None, False)
    # The next failure on this thread is not mistaken for this failure.
    with pytest.raises(RuntimeError, match="must have the same dtype") as raised:
        flash_attn_func(KEY, KEY.half(), KEY)
    assert type(raised.value) is RuntimeError


def interrupt(*_, **__):
    raise KeyboardInterrupt("while the seed was drawn")


def calls_with_dropout():
    x = torch.randn(2, 5, 2, 16)
    yield lambda: flash_attn_func(x, x, x, 0.5)
    yield lambda: _flash_attn_forward(x, x, x, 0.5, 1.0, False, -1, -1, 0.0, None, False)
    yield lambda: raw.fwd(x, x, x, None, None, 0.5, 1.0, False, -1, -1, 0.0, False, None)


@pytest.mark.parametrize("which", range(3))
def test_an_exception_of_python(which, route, monkeypatch):
    """Python draws the seed, and its exception reaches the caller."""
    call = list(calls_with_dropout())[which]
    call()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt, match="while the seed was drawn"):
        patched.setattr(torch, "randint", interrupt)
        call()
    call()


def test_arguments_stay_runtime_errors(route):
    x = torch.randn(2, 5, 2, 16)
    calls = (
        lambda: flash_attn_func(x, x[:1], x),
        lambda: flash_attn_with_kvcache(x, x, x, cache_seqlens=torch.tensor([6, 6], dtype=torch.int32)),
        lambda: _flash_attn_backward(x, x, x, x, x, x, None, None, None, 0.0, 1.0, False, -1, -1, 0.0, None, False),
        lambda: raw.fwd(x, x[:1], x, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None),
    )
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        assert type(raised.value) is RuntimeError


@pytest.mark.skipif(not ON_GPU, reason="no GPU of compute capability 8.0 or newer")
def test_what_no_kernel_takes(route):
    q, k = torch.zeros(1, 1, 1, 8, device="cuda"), torch.zeros(1, 1, 1, 8, device="cuda").expand(1, 2**31, 1, 8)
    with pytest.raises(NotImplementedError, match="no kernel takes this call"):
        flash_attn_func(q, k, k)


WITHOUT_MEMORY = """
import _testcapi, sys, torch
import flash_attn
q, bias = torch.randn(1, 5, 2, 16), torch.zeros(1, 2, 5, 5)
call = {
    "return_lse": lambda: flash_attn.flash_attn_func(q, q, q, return_lse=True),
    "attn_bias": lambda: flash_attn.flash_attn_func(q, q, q, attn_bias=bias),
}[sys.argv[1]]
call(), call()
refused = 0
for allocation in range(1, 60):
    _testcapi.set_nomemory(allocation, allocation + 1)
    try:
        result = call()
    except MemoryError:
        refused += 1
    _testcapi.remove_mem_hooks()
print(refused > 0)
"""


@pytest.mark.parametrize("call", ["return_lse", "attn_bias"])
def test_no_memory_for_an_object_of_python(call):
    """PyTorch throws a C++ exception if there is no memory for a torch.Tensor."""
    pytest.importorskip("_testcapi")
    done = fresh_python.python(WITHOUT_MEMORY, call)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
