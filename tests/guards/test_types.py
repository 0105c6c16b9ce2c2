"""Type checkers accept typical uses of the public functions and find mistakes, and the stubs are current."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toolbox import ROOT, relative, tool
from torch.nn.attention.flex_attention import AuxRequest

sys.path.insert(0, str(ROOT / "docs"))
import generate_api
import generate_stubs

FILES = ROOT / "tests" / "typing"
COMMANDS = {
    "mypy": ["--config-file", FILES / "mypy.ini", "--no-error-summary", "--python-executable", sys.executable, FILES],
    "pyright": ["--project", FILES, "--pythonpath", sys.executable],
}
MODULES = [name for _, modules in generate_api.PAGES.values() for name in modules]
MODULES += ["flash_attn.bert_padding", "flash_attn.build", "flash_attn.explain", "flash_attn.flash_attn_interface"]


def mistakes():
    """Every line of a function of misuses.py is one."""
    lines = (FILES / "misuses.py").read_text(encoding="utf-8").splitlines()
    return {("misuses", number) for number, line in enumerate(lines, 1) if line.startswith("    ")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_type_checker_finds_the_mistakes_and_nothing_else(name):
    path = os.pathsep.join([str(ROOT), str(ROOT / "hopper")])
    command = [tool(name), *COMMANDS[name]]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": path}, timeout=600
    )
    found = re.findall(r"(\w+)\.pyi?:(\d+)\S* (?:- )?error\b", done.stdout)
    assert {(file, int(number)) for file, number in found} == mistakes() and len(mistakes()) >= 20, done.stdout


def test_the_stubs_are_current():
    assert [relative(path) for path in generate_stubs.old_stubs()] == [], "python docs/generate_stubs.py"


@pytest.mark.parametrize("package", ["flash_attn", "hopper/flash_attn_3"])
def test_a_package_says_that_it_has_types(package):
    assert (ROOT / package / "py.typed").exists()


def functions_of(module):
    """[(name, function)] of the public functions and methods that a module has written itself."""
    for name in getattr(module, "__all__", vars(module)):
        item = getattr(module, name)
        if name.startswith("_") and not name.startswith("_flash_attn"):  # what clients call in spite of its name
            continue
        if inspect.isclass(item) and item.__module__.startswith("flash_attn"):
            for method, function in vars(item).items():
                function = getattr(function, "__func__", function)  # of a static method
                if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
                    yield f"{name}.{method}", function
        elif inspect.isfunction(item) and item.__module__.startswith("flash_attn"):
            yield name, item


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_has_annotations(name):
    missing = []
    for function_name, function in functions_of(importlib.import_module(name)):
        signature = inspect.signature(function)
        missing += [
            f"{function_name}({p.name})"
            for p in signature.parameters.values()
            if p.annotation is p.empty and p.name != "self"
        ]
        if signature.return_annotation is signature.empty:
            missing.append(f"{function_name} ->")
    assert missing == []


@pytest.mark.parametrize("name", [name for name in MODULES if name != "flash_attn.explain"])
def test_public_functions_are_functions(name):
    """A functools.partial or a bound method has neither a docstring nor types of its own."""
    module = importlib.import_module(name)
    called = {n: getattr(module, n) for n in getattr(module, "__all__", ()) if callable(getattr(module, n))}
    odd = [n for n, item in called.items() if not (inspect.isfunction(item) or inspect.isclass(item))]
    assert odd == [n for n in odd if n in KNOWN]


# Objects of torch, and one that says what to call in its place.
KNOWN = {
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "rotary_kernel",
}


def is_of(result, text):
    """Is the result of the type that the stub promises? The types are Tensor, None, tuples and names of classes."""
    if text.startswith("tuple["):
        parts = text[len("tuple[") : -1].split(", ")
        if parts[1:] == ["..."]:
            return isinstance(result, tuple) and all(is_of(x, parts[0]) for x in result)
        return isinstance(result, tuple) and len(result) == len(parts) and all(map(is_of, result, parts))
    return any(type(result).__name__ == name.replace("None", "NoneType") for name in text.split(" | "))


X, W, LENGTHS = torch.ones(2, 8, 4, 16), torch.ones(16), torch.tensor([0, 3, 8], dtype=torch.int32)
MANY = torch.ones(8, 4, 16)
NORMED = dict.fromkeys(generate_stubs.dropout_add("norm"), (X, None, W, None, 0.1, 1e-05))
NORMED["dropout_add_norm_parallel_residual"] = (X, X, None, W, None, None, None, 0.1, 1e-5)
ARGUMENTS = {
    "flash_attn_func": (X, X, X),
    "flash_attn_kvpacked_func": (X, torch.stack([X, X], 2)),
    "flash_attn_qkvpacked_func": (torch.stack([X, X, X], 2),),
    "flash_attn_varlen_func": (MANY, MANY, MANY, LENGTHS, LENGTHS, 5, 5),
    "flash_attn_varlen_kvpacked_func": (MANY, torch.stack([MANY, MANY], 1), LENGTHS, LENGTHS, 5, 5),
    "flash_attn_varlen_qkvpacked_func": (torch.stack([MANY, MANY, MANY], 1), LENGTHS, 5),
    "flash_attn_with_kvcache": (X, X, X),
    "flex_attention": (X, X, X),
    "layer_norm_fn": (X, W, None),
    "rms_norm_fn": (X, W, None),
    "layer_norm_ref": (X, W, None),
    "rms_norm_ref": (X, W, None),
    "layer_norm_linear_fn": (X, W, None, torch.ones(3, 16), None),
    "fused_dense_func": (X, torch.ones(3, 16)),
    "fused_mlp_func": (X, torch.ones(3, 16), torch.ones(5, 3)),
    "triton_linear_act": (X, torch.ones(3, 16)),
    **NORMED,
    **{name.replace("norm", "layer_norm"): arguments for name, arguments in NORMED.items()},
    **{name.replace("norm", "rms_norm"): arguments for name, arguments in NORMED.items()},
}
GIVEN = {generate_stubs.ON: True, "Tensor": W, "AuxRequest": AuxRequest(lse=True, max_scores=True)}
RESULTS = [
    pytest.param(file, name, asked, result, id="-".join([Path(file).stem, name, *asked]))
    for file, table in generate_stubs.FUNCTIONS.items()
    for name, (plain, others) in table.items()
    for asked, result in [({}, plain), *others]
    if not file.startswith("hopper") and "." not in name
]


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("file, name, asked, result", RESULTS)
def test_results_are_what_the_stub_promises(file, name, asked, result):
    module = importlib.import_module(Path(file).with_suffix("").as_posix().replace("/", "."))
    options = {"is_rms_norm": False} if file.endswith("ops/dropout_add_norm.py") else {}
    found = getattr(module, name)(*ARGUMENTS[name], **options, **{key: GIVEN[kind] for key, kind in asked.items()})
    assert is_of(found, result), (type(found), [type(x) for x in found], result)


def test_a_wrong_promise_is_found():
    assert is_of((X, None), "tuple[Tensor, Tensor | None]") and is_of((X, X), "tuple[Tensor, ...]")
    assert not is_of((X, X), "Tensor") and not is_of(X, generate_stubs.PAIR)
    assert not is_of((X, None), generate_stubs.PAIR) and not is_of((X, X, X), generate_stubs.PAIR)
