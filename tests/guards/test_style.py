"""Formatting, and a text check for each mistake that was made once."""

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
