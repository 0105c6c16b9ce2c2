"""``import flash_attn`` in a fresh process: what it needs, what it says, what it costs."""

import os
import subprocess
import sys
import textwrap

import pytest

import flash_attn


def python(code):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    elsewhere = os.path.dirname(os.path.abspath(__file__))  # not the root of the source tree
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT = """
try:
    import flash_attn
except ImportError as error:
    print(error)
"""
NEEDS = f"flash_attn {flash_attn.__version__} needs PyTorch 2.10 or newer, and PyTorch "


def test_version():
    assert flash_attn.__version__ == "2.8.3"


def test_without_torch():
    assert python(f"import sys; sys.modules['torch'] = None\n{IMPORT}") == NEEDS + "is not installed"


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0", "2.9.0a0+git1234567"])
def test_with_an_older_torch(version):
    fake = f"import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__={version!r})"
    assert python(f"{fake}\n{IMPORT}") == f"{NEEDS}{version} is installed"


def test_without_the_compiled_module():
    said = python(f"import sys, torch; sys.modules['flash_attn_2_cuda'] = None\n{IMPORT}")
    assert said.startswith("flash_attn needs its compiled module flash_attn_2_cuda, which is not installed")


def test_import_is_quick_and_light():
    """Half a second after torch, on any machine; it takes a few hundredths."""
    seconds, modules = python("""
        import sys, time, torch
        before = set(sys.modules)
        start = time.perf_counter()
        import flash_attn
        print(time.perf_counter() - start, *sorted(set(sys.modules) - before))
    """).split(maxsplit=1)
    assert float(seconds) < 0.5
    assert {name.partition(".")[0] for name in modules.split()} <= {"flash_attn", "flash_attn_2_cuda", "pkgutil"}


def test_other_distributions_may_add_subpackages(tmp_path):
    package = tmp_path / "flash_attn" / "from_elsewhere"
    package.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (package / "__init__.py").write_text("answer = 42")
    ours = os.path.dirname(
        os.path.dirname(flash_attn.__file__)
    )  # before the other one, where an editable install is not
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
    done = subprocess.run([sys.executable, "-m", "flash_attn", argument], capture_output=True, text=True, timeout=120)
    assert done.returncode == status and words in done.stdout + done.stderr
