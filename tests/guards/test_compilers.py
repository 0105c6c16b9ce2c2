"""Every C file compiles without a warning under gcc and clang, and for aarch64; every header compiles alone."""

import pytest
from toolbox import C_FLAGS, CSRC, ROOT, c_headers, c_sources, compile_object, python_include, relative, run, tool


@pytest.mark.parametrize("path", c_sources(), ids=relative)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_source_compiles(compiler, path, tmp_path):
    compile_object(compiler, path, tmp_path / "out.o")


@pytest.mark.parametrize("path", c_sources(), ids=relative)
def test_source_compiles_for_aarch64(path, tmp_path):
    """Only portable C is compiled here, because intrinsics stay behind feature checks. Python's pyconfig.h
    belongs to this machine, but both machines are 64-bit Linux, and nothing is run."""
    command = [tool("aarch64-linux-gnu-gcc"), *C_FLAGS, "-O1", "-fPIC", *python_include()]
    run(*command, "-c", path, "-o", tmp_path / "out.o")
    assert "AArch64" in run(tool("readelf"), "-h", tmp_path / "out.o")


@pytest.mark.parametrize("path", c_headers(), ids=relative)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_header_compiles_alone(compiler, path, tmp_path):
    text = f'#include "{path.relative_to(CSRC)}"\n' * 2
    if '#include "vec_target.h"' in path.read_text():
        text += '#include "cpu/vec_target_end.h"\n'  # closes the pragma that vec_target.h opens
    (tmp_path / "alone.c").write_text(text)
    run(tool(compiler), *C_FLAGS, "-Wno-unused-function", "-fsyntax-only", "-I", CSRC, *python_include(),
        tmp_path / "alone.c", cwd=ROOT)  # fmt: skip
