"""libtorch's C shim, as csrc/torch/torch_abi.h declares it, against the installed torch.

Our C code includes no header of torch. Without these tests a function that torch changed, renamed or dropped would show
only as a crash on a user's machine. The table of csrc/torch/torch_abi.h is the only list, and every test reads it.
"""

import re
from pathlib import Path

import pytest
import torch
from toolbox import CSRC, ROOT, run, tool

HERE = ROOT / "tests" / "guards"
OLDEST = (2, 4)
HEADERS_TELL = (2, 10)  # torch's headers tell the release of a function from 2.10 on

# Every symbol that is looked up, by the first release that has it. Symbols of 2.4 are required. If one of them is
# missing, `import flash_attn` raises a sentence that names the symbol. Later symbols are optional.
SYMBOLS = {
    (2, 4): """
        aoti_torch_get_dim aoti_torch_get_sizes aoti_torch_get_strides aoti_torch_get_dtype
        aoti_torch_get_device_type aoti_torch_get_device_index aoti_torch_empty_strided
        aoti_torch_delete_tensor_object aoti_torch_check aoti_torch_grad_mode_is_enabled
        aoti_torch_device_type_cpu aoti_torch_device_type_cuda
        aoti_torch_get_storage_size aoti_torch_get_storage_offset
        aoti_torch_dtype_float16 aoti_torch_dtype_bfloat16 aoti_torch_dtype_float32 aoti_torch_dtype_float64
        aoti_torch_dtype_float8_e4m3fn aoti_torch_get_data_ptr aoti_torch_assign_tensors_out
        aoti_torch_dtype_int32 aoti_torch_dtype_int64 aoti_torch_dtype_uint8 aoti_torch_copy_
    """,
    (2, 5): "aoti_torch_dtype_uint64",
    (2, 7): """
        aoti_torch_library_init_def aoti_torch_library_init_impl aoti_torch_library_def aoti_torch_new_tensor_handle
        aoti_torch_delete_library_object
    """,
    (2, 9): "aoti_torch_new_uninitialized_tensor",
    (2, 10): """
        torch_library_impl torch_parallel_for torch_get_num_threads
        torch_get_mutable_data_ptr torch_get_const_data_ptr aoti_torch_is_defined
    """,
    (2, 13): "torch_delete_stable_ivalue",
}
IN_PYTHON = "torch.library registers the ops (csrc/torch/python_ops.c)"
WITH_OLDER = "an older function does the same (csrc/torch/older_torch.c)"
WITHOUT_OPTIONAL = {
    "aoti_torch_library_init_def": IN_PYTHON,
    "aoti_torch_library_init_impl": IN_PYTHON,
    "aoti_torch_library_def": IN_PYTHON,
    "torch_library_impl": IN_PYTHON,
    "aoti_torch_new_tensor_handle": WITH_OLDER,
    "torch_get_mutable_data_ptr": WITH_OLDER,
    "torch_get_const_data_ptr": WITH_OLDER,
    "torch_parallel_for": "OpenMP's functions, if libtorch has them",
    "torch_get_num_threads": "at::get_num_threads, if libtorch has OpenMP's functions",
    "torch_delete_stable_ivalue": "slots are freed with C++'s operator delete, as torch did until 2.12",
    "aoti_torch_copy_": "a gradient with gaps goes to torch's own kernel",
    "aoti_torch_delete_library_object": "register() says that this PyTorch cannot give back a kernel",
    "aoti_torch_dtype_uint64": "rng_state of torch's ops is int64",
    "aoti_torch_new_uninitialized_tensor": "register() says that this PyTorch cannot give back a kernel",
    "aoti_torch_is_defined": "the message about a None says that the tensor has no memory",
}


def release(text):
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """{symbol: (first release, "required" or "optional")}, printed by a C program that expands the table."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "table.c").write_text(
        '#include <stdio.h>\n#include "torch/torch_abi.h"\n'
        '#define ROW(symbol, since, need, ...) puts(#symbol " " since " " #need);\n'
        "int main(void) { FA_TORCH_SYMBOLS(ROW) return 0; }\n"
    )
    run(tool("gcc"), "-std=c11", "-I", CSRC, folder / "table.c", "-o", folder / "table")
    rows = [line.split() for line in run(folder / "table").splitlines()]
    assert rows, "the table is empty"
    return {symbol: (release(since), need) for symbol, since, need in rows}


def test_the_table_is_the_list_above(table):
    listed = {name: since for since, names in SYMBOLS.items() for name in names.split()}
    assert {symbol: since for symbol, (since, _) in table.items()} == listed
    assert {symbol for symbol, (_, need) in table.items() if need == "optional"} == set(WITHOUT_OPTIONAL)


@pytest.fixture(scope="module")
def torch_include():
    from torch.utils.cpp_extension import include_paths

    return [option for path in include_paths() for option in ("-isystem", path)]


def declared_names(torch_include, target):
    """The functions that torch's headers declare for extensions that want to run on release `target` and later."""
    source = "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n#include <torch/csrc/stable/c/shim.h>\n"
    version = f"0x{target[0]:02x}{target[1]:02x}000000000000"
    text = run(
        tool("g++"), "-std=c++20", "-E", "-P", "-x", "c++", f"-DTORCH_TARGET_VERSION={version}", *torch_include, "-",
        input=source,
    )  # fmt: skip
    return set(re.findall(r"\b(\w+)\s*\(", text))


def test_types_equal_those_of_torch(torch_include):
    run(tool("g++"), "-std=c++20", "-fsyntax-only", "-I", CSRC, *torch_include, HERE / "abi_types.cpp")


def test_a_wrong_type_is_noticed(torch_include, tmp_path):
    """The check above can fail: a header copy with one changed parameter does not compile."""
    header = (CSRC / "torch/torch_abi.h").read_text()
    changed = header.replace("int64_t grain_size", "int32_t grain_size")
    assert changed != header
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/torch_abi.h").write_text(changed)
    command = [tool("g++"), "-std=c++20", "-fsyntax-only", "-DTABLE_ALONE", "-I", tmp_path, "-I", CSRC, *torch_include]
    with pytest.raises(pytest.fail.Exception, match="torch_parallel_for: csrc/torch/torch_abi.h and"):
        run(*command, HERE / "abi_types.cpp")


def test_every_symbol_is_in_the_installed_libtorch(table):
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    lines = run(tool("nm"), "-D", "--defined-only", library).splitlines()
    exported = {line.split()[-1].split("@")[0] for line in lines}
    installed = release(torch.__version__)
    expected = {symbol for symbol, (since, _) in table.items() if since <= installed}
    assert expected - exported == set()
    assert {symbol for symbol, (since, _) in table.items() if since > installed} & exported == set()


def exported_by(*libraries):
    lines = [run(tool("nm"), "-D", "--defined-only", Path(torch.__file__).parent / "lib" / name) for name in libraries]
    return set(re.findall(r" T (_Z\w+)", "".join(lines)))


def test_the_mangled_names_are_in_the_installed_libraries():
    """Without these names calls still work, but slower: through the dispatcher, or with a question to Python about
    watchers."""
    (wrap,) = re.findall(r'THPVARIABLE_WRAP "(_Z\w+)"', (CSRC / "torch/torch_abi.c").read_text())
    assert wrap in exported_by("libtorch_python.so")
    names = re.findall(r'"(_Z\w+)"', (CSRC / "torch/torch_abi.h").read_text())
    names += re.findall(r'HAS_CALLBACKS +"(_Z\w+)"', (CSRC / "torch/torch_abi.c").read_text())
    assert len(names) == 12 and set(names) <= exported_by("libtorch_cpu.so", "libc10.so")
    # DynamicLayer.h includes headers that torch does not ship, so abi_types.cpp cannot check its type.
    header = Path(torch.__file__).parent / "include" / "ATen" / "functorch" / "DynamicLayer.h"
    assert "TORCH_API const std::vector<DynamicLayer>& getDynamicLayerStack();" in header.read_text()


def test_required_symbols_exist_since_the_oldest_release(table, torch_include):
    """Required symbols are declared for the oldest release. Optional symbols are newer, and each came with the release
    in the table."""
    oldest = declared_names(torch_include, OLDEST)
    assert {symbol for symbol, (_, need) in table.items() if need == "required"} - oldest == set()
    assert {symbol for symbol, (since, need) in table.items() if since > OLDEST and need == "required"} == set()
    for symbol, (since, _) in table.items():
        if since > HEADERS_TELL:
            assert symbol not in declared_names(torch_include, (since[0], since[1] - 1)), symbol
            assert symbol in declared_names(torch_include, since), symbol


LOADER = r"""
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include "torch/older_torch.h"

fa_status fa_fail(fa_error *err, fa_status status, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(err->text, sizeof err->text, format, values);
    va_end(values);
    return status;
}

int main(int argc, char **argv) {
    if (argc > 1 && !dlopen(argv[1], RTLD_NOW)) return fprintf(stderr, "%s\n", dlerror()), 2;
    fa_error err = {""};
    fa_status status = fa_torch_load(&err);
    if (status == FA_OK) status = fa_torch_replace(&err);
    printf("%d %d %s\n", status, fa_torch.operator_delete != NULL, err.text);
    return 0;
}
"""


@pytest.fixture(scope="module")
def load(table, tmp_path_factory):
    """load(symbols) runs fa_torch_load against a libtorch with just these: "status frees-with-delete message"."""
    folder = tmp_path_factory.mktemp("load")
    (folder / "loader.c").write_text(LOADER)
    files = (
        folder / "loader.c",
        *(CSRC / name for name in ("torch/torch_abi.c", "torch/older_torch.c", "system/library.c")),
    )
    run(tool("gcc"), "-std=c11", "-D_GNU_SOURCE", "-I", CSRC, *files, "-ldl", "-o", folder / "loader")

    def load(symbols):
        if symbols is None:
            return run(folder / "loader")
        functions = "".join(f"int {symbol}(void) {{ return 0; }}\n" for symbol in sorted(symbols))
        (folder / "torch.c").write_text(functions)
        run(tool("gcc"), "-shared", "-fPIC", "-Wl,-soname,libtorch_cpu.so", folder / "torch.c",
            "-o", folder / "libtorch_cpu.so")  # fmt: skip
        return run(folder / "loader", folder / "libtorch_cpu.so")

    return load


def test_each_missing_required_symbol_is_named(load, table):
    for symbol, (since, need) in table.items():
        if need == "required":
            answer = load({*table, "_ZdlPv"} - {symbol})
            assert not answer.startswith("0 "), symbol
            assert "flash_attn needs PyTorch 2.4 or newer" in answer, answer
            assert f"lacks {symbol} (there since {since[0]}.{since[1]})" in answer, answer


def test_a_missing_optional_symbol_is_replaced(load, table):
    assert load({*table, "_ZdlPv"}).startswith("0 0")
    assert load({*table, "_ZdlPv"} - {"torch_delete_stable_ivalue"}).startswith("0 1")


OPENMP = {"_ZN2at15get_num_threadsEv", "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_in_parallel"}


def test_a_torch_of_2_4_needs_openmp(load, table):
    """Without torch's function for threads, every function of OpenMP is needed, and a sentence names a missing one."""
    of_2_4 = {symbol for symbol, (since, _) in table.items() if since <= OLDEST} | {"_ZdlPv"}
    assert load(of_2_4 | OPENMP).startswith("0 1")
    for symbol in OPENMP:
        answer = load((of_2_4 | OPENMP) - {symbol})
        assert "flash_attn needs PyTorch 2.10 or newer on this platform" in answer and symbol in answer, answer


def test_no_torch_at_all_is_said_in_one_sentence(load):
    assert "flash_attn needs PyTorch 2.4 or newer" in load(None)
