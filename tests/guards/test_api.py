"""The reference in docs/api is that of the docstrings, and the examples of the docstrings run."""

import doctest
import importlib
import inspect
import sys

import pytest
import torch
from toolbox import ROOT, relative

sys.path.insert(0, str(ROOT / "docs"))
import generate_api

MODULES = [name for _, modules in generate_api.PAGES.values() for name in modules]


def test_the_reference_is_current():
    assert [relative(path) for path in generate_api.old_pages()] == [], "python docs/generate_api.py"


def test_every_public_module_is_in_the_reference():
    package = ROOT / "flash_attn"
    folders = ("layers", "losses", "modules", "ops", "utils")
    paths = [path for folder in folders for path in (package / folder).rglob("[!_]*.py")]
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    # The classes of modules.attention are public under modules.mha.
    assert found - {"flash_attn.modules.attention"} - set(MODULES) == set()


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert [n for n, item in generate_api.public(module) if generate_api.is_ours(item) and not item.__doc__] == []


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_has_an_example(name):
    ours = [(n, item) for n, item in generate_api.public(importlib.import_module(name)) if generate_api.is_ours(item)]
    assert [n for n, item in ours if ">>> " not in item.__doc__] == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
    """Each docstring is a session of its own, which finds torch and the names of its module."""
    module, finder = importlib.import_module(name), doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    names = {"torch": torch, **{n: getattr(module, n) for n in module.__all__}}
    items = [("", module), *((n, x) for n, x in generate_api.public(module) if generate_api.is_ours(x))]
    items += [
        (f"{n}.{m}", method) for n, x in items[1:] if inspect.isclass(x) for m, method in generate_api.own_methods(x)
    ]
    said = []
    for n, item in items:
        for test in finder.find(item, f"{name}.{n}", module=False, globs=dict(names)):
            torch.manual_seed(0)
            runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_an_example_that_fails_is_found():
    """The runner of this file, on a docstring with a wrong result."""

    def wrong():
        """
        >>> 1 + 1
        3
        """

    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder(recurse=False).find(wrong, "wrong", module=False, globs={}):
        runner.run(test, out=lambda _: None)
    assert runner.failures == 1
