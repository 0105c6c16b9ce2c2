"""An installation in place compiles again what has changed, and nothing else."""

import os
import subprocess
import sys

import pytest
from toolbox import CSRC, run, tool

SETUP = f"""
import sys
sys.path.insert(0, {str(CSRC)!r})
from extension import BuildExt
from setuptools import Extension, setup

part = Extension("small", ["a.c", "b.c"], include_dirs=["."], depends=["a.h"], py_limited_api=True,
                 define_macros=[("Py_LIMITED_API", "0x03090000")])
setup(name="small", version="1", py_modules=[], ext_modules=[part], cmdclass={{"build_ext": BuildExt}})
"""
A = """
#include <Python.h>
#include "a.h"
int value_of_b(void);
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_small(void)
{
    PyObject *small = PyModule_Create(&module);
    PyModule_AddIntConstant(small, "a", VALUE);
    PyModule_AddIntConstant(small, "b", value_of_b());
    return small;
}
"""
IN_PLACE = ["setup.py", "--quiet", "build_ext", "--inplace"]
EDITABLE = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "installed", "-e", "."]


@pytest.mark.parametrize("build", [IN_PLACE, EDITABLE], ids=["build_ext", "pip"])
def test_only_what_changed_is_compiled(build, tmp_path):
    tool("gcc")
    files = {"setup.py": SETUP, "a.c": A, "a.h": "#define VALUE 1\n", "b.c": "int value_of_b(void) { return 2; }\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def install(*more, **environment):
        """(values of the module, names of the files that were compiled)"""
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("build/objects-*/*.o")}
        options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": "", **environment}}
        run(sys.executable, *build, *more, **options)
        after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("build/objects-*/*.o")}
        values = run(sys.executable, "-c", "import small; print(small.a, small.b)", **options)
        return values.strip(), "".join(sorted(path.stem for path in after if after[path] != before.get(path)))

    assert install() == ("1 2", "ab")
    if build is EDITABLE:
        assert install() == ("1 2", "")
        return
    (tmp_path / "a.h").write_text("#define VALUE 3\n")
    assert install() == ("3 2", "a")
    (tmp_path / "b.c").write_text("int value_of_b(void) { return 4; }\n")
    assert install() == ("3 4", "b")
    (tmp_path / "b.c").touch()
    assert install(CFLAGS="-O0") == ("3 4", "ab")
    assert install("--force", CFLAGS="-O0") == ("3 4", "ab")


def test_without_a_compiler_one_sentence(tmp_path):
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "a.c").write_text(A)
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    environment = {**os.environ, "CC": "no-such-cc", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    sentence = "Building needs a C compiler, and no-such-cc was not found: install gcc or clang, or set CC"
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1] == sentence
