"""Files, headings and results that the documents name exist, and the examples in the documents run."""

import importlib
import re
from fnmatch import fnmatch

import fresh_python
import pytest
import tables
import torch  # noqa: F401  the extensions need it
from toolbox import CSRC, ROOT, relative

RESULTS = ROOT / "benchmarks" / "results"
EXPERIMENTS = sorted(CSRC.glob("*/measurements"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(CSRC.rglob("*.md"))]
DOCUMENTS += [RESULTS / "README.md", ROOT / "hopper" / "README.md"]


def headings(path):
    """Anchors as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    broken = []
    for link in links:
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_results_that_are_named_exist(document):
    names = re.findall(r"`([\w*/]*?)([\w*]+\.(?:csv|svg))`", document.read_text(encoding="utf-8"))
    folders = RESULTS, document.parent, *EXPERIMENTS
    assert sorted(name for _, name in names if not any(list(folder.glob(name)) for folder in folders)) == []


def test_every_result_is_named():
    """Rows that no table and no sentence needs are not kept. The list of files in the results' own README does not
    count."""
    names = {name for name, _, _ in tables.named()}
    files = [path.name for folder in (RESULTS, *EXPERIMENTS) for path in folder.iterdir() if path.suffix != ".md"]
    assert sorted(file for file in files if not any(fnmatch(file, name) for name in names)) == []


def test_every_row_of_a_benchmark_tells_its_command_and_machine():
    """Rows of experiments, which no command makes again, lie beside their documents."""
    for path in RESULTS.glob("*.csv"):
        for row in tables.rows_with_origin(path):
            machine = any(row.get(name) for name in ("device", "cpu", "machine", "processor"))
            assert machine and row["date"] and row["command"].startswith("python benchmarks/"), f"{path.name}: {row}"


@pytest.mark.parametrize(
    "document, name, text",
    [
        pytest.param(document, name, text, id=f"{relative(document)}-{name}")
        for document in tables.documents()
        for _, name, text, _ in tables.BLOCK.findall(document.read_text(encoding="utf-8"))
    ],
)
def test_tables_are_those_of_the_results(document, name, text):
    try:
        made = tables.made(name)
    except tables.Missing:
        made = ""  # not measured: the block must be empty
    assert text == made, "python benchmarks/tables.py --write"


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_readme_names_every_file(folder):
    text = (CSRC / folder / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in (CSRC / folder).iterdir() if path.is_file() and path.suffix != ".md"]
    assert sorted(name for name in files if f"`{name}`" not in text) == []


@pytest.mark.parametrize("folder", ["flex", "gpu", "plan", "system", "torch"])
def test_the_tour_names_every_file(folder):
    """The tour need not name a header that stands beside its .c file."""
    text = (CSRC / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in (CSRC / folder).iterdir() if path.is_file() and path.suffix != ".md"}
    files -= {name[:-2] + ".h" for name in files if name.endswith(".c")}
    assert sorted(name for name in files if f"`{name}`" not in text) == []


@pytest.mark.parametrize("name", ["flash_attn_2_cuda", "flash_attn_3._C"])
def test_the_tour_names_every_function_of_the_modules(name):
    module = importlib.import_module(name)
    text = (CSRC / "README.md").read_text(encoding="utf-8")
    functions = {function for function in dir(module) if not function.startswith(("__", "direct_"))}
    assert sorted(function for function in functions if f"`{function}`" not in text) == []


def test_examples_run_from_top_to_bottom():
    """The examples run one after another in one session, as a reader types them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = fresh_python.python("".join(examples))
    printed = done.stdout
    assert done.returncode == 0, done.stderr
    assert "torch.Size([2, 1024, 8, 64])" in printed, printed

    # Below the last example stands what it prints on a processor with AVX-512.
    block = re.search(r"^```\n(forward on cpu: .*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    isa = re.search(r"^ {4}instruction set  (\w+)$", printed, re.MULTILINE)[1]
    passes = re.findall(r"^\w+ on cpu: attn_.*$", block, re.MULTILINE)
    labels = re.findall(r"^ {4}(?!ruled out)\w[\w ]+?  ", block, re.MULTILINE)
    assert len(passes) == 2 and len(labels) == 5
    for line in passes:
        start = line if isa == "avx512" else line.partition("_q")[0].replace("avx512", isa)
        assert f"\n{start}" in printed, printed
    assert all(f"\n{label}" in printed for label in labels), printed
