"""How the guards build packages as users and packagers build them, and install them in a fresh environment."""

import functools
import os
import sys

from object_cache import cached_build
from toolbox import git_files, run

# No build may touch a C++ compiler, nvcc, or an editable install of this tree.
CLEAN = {"CXX": "/bin/false", "CUDA_HOME": "/nonexistent", "PYTHONPATH": ""}

# Programs that use an installed package.
WORKS = """
import sys, sysconfig
import torch, flash_attn, flash_attn_2_cuda

home = sysconfig.get_paths()["purelib"]
assert flash_attn.__file__.startswith(home), flash_attn.__file__
assert flash_attn_2_cuda.__file__.startswith(home), flash_attn_2_cuda.__file__
assert flash_attn.__version__ == "2.8.3"
q, k, v = (torch.randn(2, 33, 4, 64, requires_grad=True) for _ in range(3))
out = flash_attn.flash_attn_func(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
assert torch.allclose(out, expected, atol=1e-5), (out - expected).abs().max()
for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))):
    assert torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()
print("works")
"""
WORKS_OF_3 = """
import sys, sysconfig
{first}
import torch, flash_attn_3, flash_attn_interface, flash_attn_config
from importlib import metadata

home = sysconfig.get_paths()["purelib"]
from flash_attn_3 import _C
for module in (flash_attn_3, flash_attn_interface, flash_attn_config, _C):
    assert module.__file__.startswith(home), module.__file__
assert flash_attn_3.__version__ == metadata.version("flash-attn-3") == "3.0.0"
assert metadata.packages_distributions()["flash_attn_interface"] == ["flash_attn_3"]
q, k, v = (torch.randn(2, 33, 4, 64, requires_grad=True) for _ in range(3))
out = flash_attn_interface.flash_attn_func(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
assert torch.allclose(out, expected, atol=1e-5), (out - expected).abs().max()
for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))):
    assert torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()
assert _C.cuda_kernel_source(*_C.cuda_kernels()[0][1:])
{last}
print("works")
"""

# Without its folder on the path there is no flash_attn.
ALONE = {
    "first": "sys.modules['flash_attn'] = sys.modules['flash_attn_2_cuda'] = None",
    "last": "",
}


def pip(*arguments, **options):
    environment = {**os.environ, **CLEAN, **cached_build(), **options}
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, env=environment)


@functools.cache
def tracked_files():
    return set(git_files()) - {".gitignore"}
