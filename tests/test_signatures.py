"""Names, order and defaults of upstream's public arguments. Clients call by position and inspect signatures."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

DIFFERENCES = (Path(__file__).parents[1] / "docs/differences.md").read_text()


def upstream():
    """[(module, name, arguments)]"""
    module, found = None, []
    for line in Path(__file__).with_name("signatures.txt").read_text().splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif line and not line.startswith("#"):
            name, _, arguments = line.partition("(")
            found.append((module, name, arguments[:-1]))
    return found


UPSTREAM = upstream()


def ours(module, name):
    """The function, class or method of that name, or None."""
    try:
        found = importlib.import_module(f"flash_attn.{module}")
    except ModuleNotFoundError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def arguments(function, skip=0):
    """The arguments as a line of signatures.txt has them: no annotations, and short names of types and functions."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    parts, marks = [], {p.kind for p in parameters}
    for i, p in enumerate(parameters):
        after = parameters[i - 1].kind if i else None
        if after is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            parts.append("/")
        if p.kind is p.KEYWORD_ONLY and p.VAR_POSITIONAL not in marks and after is not p.KEYWORD_ONLY:
            parts.append("*")
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(f"{star}{p.name}" + ("" if p.default is p.empty else f"={short(p.default)}"))
    return ", ".join(parts)


def short(default):
    if callable(default):
        return getattr(default, "__name__", repr(default))
    return repr(default).removeprefix("torch.")


def extends(given, expected):
    """More arguments by keyword, or ``*options`` for the last ones. Both take every call that upstream takes."""
    head, _, tail = given.partition(", *options")
    return given.startswith(f"{expected}, *, ") or (head != given and tail == "" and expected.startswith(f"{head}, "))


def is_autograd(found):
    """An autograd function whose ``apply`` is torch's own, which takes anything. ``forward`` has the arguments."""
    return "forward" in vars(found) and "apply" not in vars(found)


@pytest.mark.parametrize("module, name, expected", UPSTREAM, ids=[f"{m}.{n}" for m, n, _ in UPSTREAM])
def test_signature(module, name, expected):
    found = ours(module, name)
    if found is None:
        row = rf"^\| `{re.escape(module)}` \|.*`{re.escape(name.split('.')[0])}`"
        missing = f"flash_attn.{module}.{name} is neither here nor in docs/differences.md"
        assert re.search(row, DIFFERENCES, re.MULTILINE), missing
        return
    if name.endswith(".apply") and is_autograd(ours(module, name.removesuffix(".apply"))):
        found = ours(module, name.removesuffix(".apply")).forward
        given = arguments(found, skip=1)
    else:
        given = arguments(found)
    assert given == expected or extends(given, expected), f"{given}\n{expected}"


def test_every_public_module_has_signatures():
    modules = {module for module, _, _ in UPSTREAM}
    package = Path(__file__).parents[1] / "flash_attn"
    for folder in ("layers", "losses", "modules", "ops", "utils"):
        for path in (package / folder).rglob("[!_]*.py"):
            module = ".".join(path.relative_to(package).with_suffix("").parts)
            assert module in modules | OURS, module


# Modules that upstream does not have, or whose functions are torch's own under another name.
OURS = {"modules.attention", "ops.dropout_add_norm", "utils.torch"}
