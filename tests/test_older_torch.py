"""The ways for torch before 2.10, with the installed torch: FLASH_ATTN_TORCH_SHIM hides what came later.

tests/torch_versions.py checks real releases, by hand.
"""

import os
from pathlib import Path

import fresh_python
import pytest

HERE = Path(__file__).resolve().parent

BITS = """
import hashlib, re
import torch
import flash_attn_2_cuda
from flash_attn import explain, flash_attn_func

def calls_op(q, k, v):
    return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.125, True, -1, -1, 0.0, None, False)

torch.manual_seed(0)
q, k, v = (torch.randn(2, 700, 4, 64, requires_grad=True) for _ in range(3))
for threads in (1, 2):
    torch.set_num_threads(threads)
    out = flash_attn_func(q, k, v, causal=True)
    tensors = [out, *torch.autograd.grad(out.sum(), (q, k, v)), *calls_op(q.detach(), k.detach(), v.detach())]
    content = b"".join(x.detach().numpy().tobytes() for x in tensors)
    text = str(explain(flash_attn_func, q, k, v, causal=True))
    print(hashlib.sha256(content).hexdigest(), re.search(f"threads +{threads}\\n", text) is not None)
"""

CHECKS = """
import sys
sys.path.insert(0, {here!r})
import torch_versions
for check in (torch_versions.dense, torch_versions.dropout, torch_versions.varlen, torch_versions.kvcache,
              torch_versions.operators, torch_versions.transforms, torch_versions.fullgraph, torch_versions.biased):
    check()
print("works")
"""


def python(code, shim):
    done = fresh_python.python(code, timeout=300, env={**os.environ, "FLASH_ATTN_TORCH_SHIM": shim})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_works():
    assert python(CHECKS.format(here=str(HERE)), "2.4") == "works\n"


def test_the_bits_are_the_same_on_any_number_of_threads():
    new, old = python(BITS, ""), python(BITS, "2.4")
    assert new == old and new.count("True") == 2, (new, old)


NONE_AND_WRONG = """
import torch, flash_attn
x = torch.randn(2, 5, 2, 16)
op = torch.ops.flash_attn._flash_attn_forward
for arguments in ((None, x, x), (x, x[:1], x), (x, x, x.double()), (x.to_sparse(), x, x)):
    try:
        op(*arguments, 0.0, 0.25, False, -1, -1, 0.0, None, False)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        print(type(error).__name__)
out = torch.empty_like(x)
ends = torch.tensor([0, 5], dtype=torch.int32)
torch.ops.flash_attn.varlen_fwd(x[0], x[0], x[0], out[0], ends, ends, 5, 5, 0.0, 0.25, False)  # others have defaults
assert torch.equal(out[0], flash_attn.flash_attn_func(x, x, x)[0])
torch.ops.flash_attn.fwd(x, x, x, out, 0.0, 0.25, False, -1, -1, 0.0, None, False)
assert torch.equal(out, flash_attn.flash_attn_func(x, x, x))
assert "flash_attn/_flash_attn_forward/CPU" not in torch.library._impls  # the direct functions would avoid it
"""


@pytest.mark.parametrize("shim", ["", "2.4"])
def test_ops_refuse_and_fill_in_the_same(shim):
    assert len(python(NONE_AND_WRONG, shim).split()) == 4
