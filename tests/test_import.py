"""``import flash_attn`` in a fresh process: its requirements, its output and its cost."""

import os
import platform
import subprocess
import sys
import textwrap

import fresh_python
import pytest

import flash_attn

ELSEWHERE = os.path.dirname(os.path.abspath(__file__))  # not the root of the source tree


def python(code, is_fork=True):
    code = textwrap.dedent(code)
    if is_fork:
        done = fresh_python.python(code, cwd=ELSEWHERE)
    else:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ELSEWHERE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT = """
try:
    import flash_attn
except ImportError as error:
    print(error)
"""
NEEDS = f"flash_attn {flash_attn.__version__} needs PyTorch 2.4 or newer, and PyTorch "


def test_version():
    assert flash_attn.__version__ == "2.8.3"


def test_without_torch():
    assert python(f"import sys; sys.modules['torch'] = None\n{IMPORT}", is_fork=False) == NEEDS + "is not installed"


@pytest.mark.parametrize("version", ["2.3.1+cu121", "1.13.0", "2.3.0a0+git1234567"])
def test_with_an_older_torch(version):
    fake = f"import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__={version!r})"
    assert python(f"{fake}\n{IMPORT}", is_fork=False) == f"{NEEDS}{version} is installed"


def test_without_the_compiled_module():
    said = python(f"import sys, torch; sys.modules['flash_attn_2_cuda'] = None\n{IMPORT}")
    assert said.startswith("flash_attn needs its compiled module flash_attn_2_cuda, which is not installed")


def test_import_is_quick_and_light():
    """At most half a second after torch, on any machine. The import takes a few hundredths of a second."""
    seconds, modules = python(
        """
        import sys, time, torch
        before = set(sys.modules)
        start = time.perf_counter()
        import flash_attn
        print(time.perf_counter() - start, *sorted(set(sys.modules) - before))
    """,
        is_fork=False,
    ).split(maxsplit=1)
    assert float(seconds) < 0.5
    light = {"torch.utils.flop_counter", "torch.utils.module_tracker"}  # the first takes our formulas
    others = {name.partition(".")[0] for name in modules.split() if name not in light}
    assert others <= {"flash_attn", "flash_attn_2_cuda", "pkgutil"}


FORGET = "for name in [x for x in sys.modules if x.startswith('flash_attn')]: del sys.modules[name]"


def test_import_again():
    """After sys.modules was emptied, the ops are the ops of the first import."""
    said = python(f"""
        import sys, torch, flash_attn
        for _ in range(2):
            {FORGET}
            import flash_attn
        import flash_attn.flash_attn_interface as interface
        x = torch.randn(2, 5, 2, 16, requires_grad=True)
        out = flash_attn.flash_attn_func(x, x, x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        op = torch.ops.flash_attn._flash_attn_forward
        (same,) = torch.autograd.grad(op(x, x, x, 0.0, 0.25, False, -1, -1, 0.0, None, False)[0].sum(), x)
        op(*[x.detach().to("meta")] * 3, 0.0, 0.25, False, -1, -1, 0.0, None, False)
        interface.flash_attn_gpu.fwd(*[x] * 3, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
        print(torch.equal(grad, same), torch.Tag.nondeterministic_seeded in op.default.tags)
    """)
    assert said == "True True"


@pytest.mark.parametrize("where", ["register_fake", "register_autograd"])
@pytest.mark.parametrize("number", [1, 2])
def test_import_after_one_that_was_interrupted(where, number):
    """The second import completes the registrations that the interrupted import did not reach, such as gradients of the
    ops."""
    assert (
        python(f"""
        import sys, torch
        register, calls = torch.library.{where}, []
        def interrupted(*args, **kwargs):
            calls.append(args)
            if len(calls) == {number}:
                raise KeyboardInterrupt
            return register(*args, **kwargs)
        torch.library.{where} = interrupted
        try:
            import flash_attn
        except KeyboardInterrupt:
            print("interrupted")
        torch.library.{where} = register
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            del sys.modules[name]
        import flash_attn
        from flash_attn import flash_attn_interface as interface
        x = torch.randn(1, 5, 2, 16, requires_grad=True)
        out = interface._flash_attn_forward(x, x, x, 0.0, 0.25, False, -1, -1, 0.0, None, False)[0]
        (again,) = torch.autograd.grad(flash_attn.flash_attn_func(x, x, x, softmax_scale=0.25).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], again)
        cu = torch.tensor([0, 5], dtype=torch.int32)
        options = cu, cu, 5, 5, 0.0, 0.25, False
        rows = interface._flash_attn_varlen_forward(x[0], x[0], x[0], *options)[0]
        torch.testing.assert_close(torch.autograd.grad(rows.sum(), x)[0], again)
        assert not [name for name in torch.library._impls if name.startswith("flash_attn/")]
        """)
        == "interrupted"
    )


def test_import_after_a_misspelt_instruction_set():
    said = python(f"""
        import os, sys
        os.environ["FLASH_ATTN_CPU_ISA"] = "avx"
        {IMPORT.strip().replace(chr(10), chr(10) + " " * 8)}
        {FORGET}
        os.environ["FLASH_ATTN_CPU_ISA"] = "scalar"
        import flash_attn, torch
        x = torch.ones(1, 2, 1, 8)
        print(flash_attn.explain(flash_attn.flash_attn_func, x, x, x).isa)
    """)
    names = {"x86_64": "avx2, avx512, avx512bf16, amx", "aarch64": "neon, neonbf16"}[platform.machine()]
    assert said.splitlines() == [
        f"FLASH_ATTN_CPU_ISA is 'avx'; allowed are reference, scalar, {names}",
        "scalar",
    ]


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("FLASH_ATTN_TORCH_SHIM", "3", "allowed are releases of PyTorch 2, such as 2.4"),
        ("FLASH_ATTN_TORCH_SHIM", "2.4x", "allowed are releases of PyTorch 2, such as 2.4"),
        (
            "FLASH_ATTN_CUDA_KERNEL",
            "any,bogus",
            "each of its words must be a part of a kernel's name, such as attn_fwd",
        ),
        ("FLASH_ATTN_CUDA_KERNEL", "any,", "each of its words must be a part of a kernel's name, such as attn_fwd"),
        ("FLASH_ATTN_CHECK", "false", "allowed are 1, and 0 or nothing"),
        ("FLASH_ATTN_LOG", "plans", "allowed are plan, and 0 or nothing"),
    ],
)
def test_a_misspelt_variable_is_refused(name, value, text):
    said = python(f"import os\nos.environ[{name!r}] = {value!r}\n{IMPORT}")
    assert said.startswith(f"{name} is '{value}'; {text}"), said


@pytest.mark.parametrize("name", ["FLASH_ATTN_CACHE_DIR", "FLASH_ATTN_NVRTC"])
def test_a_path_that_is_too_long_is_refused(name):
    said = python(f"import os\nos.environ[{name!r}] = '/' + 1023 * 'a'\n{IMPORT}")
    assert said.startswith(f"{name} is a path of 1024 bytes; allowed are at most 1023"), said


def test_other_distributions_may_add_subpackages(tmp_path):
    package = tmp_path / "flash_attn" / "from_elsewhere"
    package.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (package / "__init__.py").write_text("answer = 42")
    ours = os.path.dirname(
        os.path.dirname(flash_attn.__file__)
    )  # an editable install would otherwise come after tmp_path
    code = f"""
        import sys; sys.path[:] = [{ours!r}, *sys.path, {str(tmp_path)!r}]
        import flash_attn.from_elsewhere; print(flash_attn.from_elsewhere.answer, flash_attn.__version__)
    """
    assert python(code) == f"42 {flash_attn.__version__}"


def test_the_function_named_like_its_module():
    code = "import flash_attn.explain, flash_attn; print(callable(flash_attn.explain), flash_attn.__file__)"
    assert python(code).startswith("True ")


@pytest.mark.parametrize(
    "argument, status, words", [("--help", 0, "Says what is installed"), ("--wrong", 2, "--wrong")]
)
def test_the_command_reads_its_arguments(argument, status, words):
    done = fresh_python.module("flash_attn", argument)
    assert done.returncode == status and words in done.stdout + done.stderr


def test_what_a_torch_before_2_9_lacks():
    """Plain calls work, and the sentence names the functions that do not."""
    said = python("""
        import torch
        torch.__version__ = "2.8.0"
        import flash_attn
        q = torch.randn(1, 5, 2, 16)
        flash_attn.flash_attn_func(q, q, q)
        for call in (
            lambda: flash_attn.flash_attn_func(q, q, q, sinks=torch.zeros(2)),
            lambda: __import__("flash_attn.flex_attention"),
        ):
            try:
                call()
            except ImportError as error:
                print(error)
    """).splitlines()
    want = "flex_attention, attn_mask, attn_bias, sinks and return_lse of flash_attn need PyTorch 2.9 or newer, and "
    assert said == [want + "PyTorch 2.8.0 is installed"] * 2
