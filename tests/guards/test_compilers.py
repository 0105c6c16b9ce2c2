"""Every C file compiles without a warning under gcc and clang, and for aarch64; every header compiles alone."""

import re

import pytest
from object_cache import cached
from toolbox import (
    C_FLAGS,
    CSRC,
    ROOT,
    arm_compiler,
    c_headers,
    c_sources,
    compile_object,
    python_include,
    relative,
    run,
    tool,
)

FOR_ARM = re.compile(r"#(el)?if FA_NEON|__aarch64__")


@pytest.mark.parametrize("path", c_sources(), ids=relative)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_source_compiles(compiler, path, tmp_path):
    compile_object(compiler, path, tmp_path / "out.o")


@pytest.mark.parametrize("path", c_sources(), ids=relative)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_source_compiles_for_aarch64(compiler, path, tmp_path):
    """Python's pyconfig.h belongs to this machine, but both machines are 64-bit Linux, and nothing is run. clang
    compiles only what gcc compiles for no other processor."""
    if compiler == "clang" and not FOR_ARM.search(path.read_text()):
        pytest.skip("portable C")
    program, *options = arm_compiler(compiler)
    flags = [*options, *C_FLAGS, "-fPIC", *python_include()]  # those of other tests, which keep their objects
    run(*cached(program), *flags, "-c", path, "-o", tmp_path / "out.o")
    assert "AArch64" in run(tool("readelf"), "-h", tmp_path / "out.o")


@pytest.mark.parametrize("path", c_headers(), ids=relative)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_header_compiles_alone(compiler, path, tmp_path):
    text = f'#include "{path.relative_to(CSRC)}"\n' * 2
    if '#include "vec_target.h"' in path.read_text():
        text += '#include "cpu/vec_target_end.h"\n'  # closes the pragma that vec_target.h opens
    (tmp_path / "alone.c").write_text(text)
    command = arm_compiler(compiler) if path.name == "vec_neon.h" else [tool(compiler)]
    run(*command, *C_FLAGS, "-Wno-unused-function", "-fsyntax-only", "-I", CSRC, *python_include(),
        tmp_path / "alone.c", cwd=ROOT)  # fmt: skip
