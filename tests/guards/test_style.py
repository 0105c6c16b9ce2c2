"""Formatting, and a text check for each mistake that was made once."""

import ast
import re

import pytest
from toolbox import CSRC, ROOT, git_files, relative, run, tool

TEXT = {".c", ".h", ".cu", ".cuh", ".def", ".cpp", ".py", ".md", ".txt", ".toml", ".in"}
FORMATTED = {".c", ".h", ".cu", ".cuh", ".cpp"}


def project_files(suffixes):
    names = git_files("--cached", "--others", "--exclude-standard")
    return sorted(ROOT / name for name in names if (ROOT / name).suffix in suffixes and (ROOT / name).exists())


def test_c_is_formatted():
    files = project_files(FORMATTED)
    assert files
    run(tool("clang-format"), "--dry-run", "-Werror", *files)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_python_is_clean(command):
    run(tool("ruff"), *command, ROOT)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"[ \t]+$", id="space at a line's end"),
        pytest.param(r"^(<<<<<<<|>>>>>>>) ", id="left over from a merge"),
        pytest.param(r"\b(TODO|FIXME|XXX)\b", id="unfinished"),
        pytest.param(r"(?<![\w.])/(root|home|work|tmp)/", id="path of one machine"),
    ],
)
def test_no_line_has(pattern):
    found = [
        f"{relative(path)}:{number}: {line}"
        for path in project_files(TEXT)
        if path.name != "test_style.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def test_tests_share_code_through_other_modules():
    """A helper that two tests need is in a harness or a toolbox, so that a change of a test cannot break another."""
    found = [
        f"{relative(path)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*(from|import) test_", line)
    ]
    assert found == []


def names_of(tree):
    """The names that a module has when its text has run, imported ones too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)


def test_helpers_of_tests_have_the_names_that_tests_use():
    """Most tests of GPUs are skipped elsewhere, so a wrong name would stand until a GPU runs them."""
    trees = {path: ast.parse(path.read_text()) for path in map(ROOT.joinpath, git_files("tests/*.py"))}
    helpers = {path.stem: set(names_of(tree)) for path, tree in trees.items() if not path.stem.startswith("test_")}
    used = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in helpers:
                used += [(path, node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in helpers:
                used.append((path, node.value.id, node.attr))
    local = {(path, name) for path, tree in trees.items() for name in names_of(tree)}
    imported = {
        (path, alias.name) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Import)
        for alias in node.names
    }  # fmt: skip
    wrong = [
        f"{relative(path)}: {module}.{name}"
        for path, module, name in used
        if name not in helpers[module] and ((path, module) in imported or (path, module) not in local)
    ]
    assert len(used) > 500 and not wrong, wrong


def test_lines_are_short():
    """clang-format breaks code, not comments. ruff watches Python. Rows of Markdown tables may be longer."""
    found = [
        f"{relative(path)}:{number}: {len(line)} columns"
        for path in project_files(TEXT - {".md", ".py", ".txt"})
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert found == []


def test_kernels_contain_no_host_headers():
    """csrc/cpu knows the contract and C's own library: neither Python nor torch."""
    found = [
        f"{relative(path)}: {line}"
        for path in sorted(CSRC.glob("cpu/*.[ch]"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*#\s*include\s*[<\"](Python\.h|.*torch.*|call\.h)", line)
    ]
    assert found == []
