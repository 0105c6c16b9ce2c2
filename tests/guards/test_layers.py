"""The layers of csrc: includes follow one table of arrows, and the files have no circle of includes."""

import functools
import re

import pytest
from toolbox import CSRC

# A folder's files may include files of their own folder, the contract, and the folders below. Host and kernels share
# parameters of launches and tiles.def, which lie in "cuda". A single file may know more than its folder.
CONTRACT = "contract"  # flash_attn.h and sequence.h, beside the folders
ARROWS = {
    CONTRACT: set(),
    "system": set(),
    "cuda": set(),
    "cpu": {CONTRACT, "flex"},  # a problem with flex, its block masks and its programs
    "flex": {CONTRACT},
    "plan": {CONTRACT, "cuda", "flex"},
    "gpu": {CONTRACT, "cuda", "flex", "plan", "system"},
    "torch": {CONTRACT, "cpu", "flex", "gpu", "plan", "system"},
}
MORE = {f"plan/{name}.c": {"cpu"} for name in ("cpu", "cpu_fwd", "cpu_bwd", "cpu_bwd_rows", "cpu_decode")}
# Threads, elements of fp16 and bf16, and the loops of evaluators for each instruction set.
KNOW_CPU = (
    "classify.h dense.h fast_math.h intervals.c operate.h operate_avx2.c operate_avx512.c operate_neon.c operations.h "
    "operate_scalar.c turn.h"
)
MORE.update({f"flex/{name}": {"cpu"} for name in KNOW_CPU.split()})
MORE["flex/intervals.c"].add("cuda")  # bounds of operations, which kernels compute, too
# Hashes.
MORE.update(dict.fromkeys(("flex/program.c", "plan/gpu_problem.c"), {"system"}))

# Headers from outside that only one folder may include.
FOREIGN = {"Python.h": "torch", "torch/": "none", "cuda": "none", "nvrtc.h": "none", "dlfcn.h": "system"}


@functools.cache
def host_files():
    """Sources and headers of the extension; of csrc/cuda what the host includes."""
    found = [path for path in CSRC.rglob("*") if path.suffix in {".c", ".h", ".def"}]
    return {path.relative_to(CSRC).as_posix(): path for path in sorted(found)}


def folder_of(name):
    return name.split("/")[0] if "/" in name else CONTRACT


def includes(name):
    """(the file of csrc, "") or ("", the foreign header) of each include."""
    files = host_files()
    for opened, header in re.findall(r'^\s*#\s*include\s*([<"])([^">]+)', files[name].read_text("utf-8"), re.MULTILINE):
        beside = f"{name.rpartition('/')[0]}/{header}".lstrip("/")
        if opened == '"':
            assert beside in files or header in files, f"{name} includes {header}, which is not in csrc"
            yield (beside if beside in files else header), ""
        else:
            yield "", header


@pytest.mark.parametrize("name", host_files())
def test_a_file_knows_only_what_it_may(name):
    allowed = ARROWS[folder_of(name)] | MORE.get(name, set()) | {folder_of(name)}
    for known, foreign in includes(name):
        assert not known or folder_of(known) in allowed, f"{name} may not know {known}"
        for header, owner in FOREIGN.items():
            assert not foreign.startswith(header) or folder_of(name) == owner, f"{name} may not include <{foreign}>"


@pytest.mark.parametrize("name", [name for name in host_files() if name.endswith(".h") and "/" in name])
def test_one_header_per_stem_with_a_guard_of_its_own(name):
    folder, stem = name[:-2].split("/")
    text = host_files()[name].read_text("utf-8")
    if folder == "cuda" or "#ifndef" not in text:  # texts of kernels; pieces that are included several times
        return
    assert f"#ifndef FA_{folder.upper()}_{stem.upper()}_H\n" in text


# One declaration for functions of one kind, each of which is defined in the file of its name.
KINDS = {"gpu/launchers.h", "plan/cpu_planners.h", "plan/gpu_planners.h", "cpu/kernels.h"}


@pytest.mark.parametrize("name", [name for name in host_files() if name[:-2] + ".c" in host_files()])
def test_a_header_declares_what_its_own_file_defines(name):
    if not name.endswith(".h") or name in KINDS:
        return
    declared = re.findall(
        r"^(?!static|typedef)\w[^;{}()#]*?\b(\w+)\([^;{}]*\);", host_files()[name].read_text("utf-8"), re.MULTILINE
    )
    source = host_files()[name[:-2] + ".c"].read_text("utf-8")
    missing = [function for function in declared if not re.search(rf"^\w.*\b{function}\(", source, re.MULTILINE)]
    assert missing == []


def reaches(graph, start):
    seen, stack = set(), [start]
    while stack:
        for known in graph[stack.pop()]:
            if known not in seen:
                seen.add(known)
                stack.append(known)
    return seen


def test_no_circles():
    """A stem is a .c file with its header. No stem reaches itself through the includes of others."""

    def stem(name):
        return name.rsplit(".", 1)[0]

    graph = {stem(name): set() for name in host_files()}
    for name in host_files():
        graph[stem(name)] |= {stem(known) for known, _ in includes(name) if known and stem(known) != stem(name)}
    assert [name for name in graph if name in reaches(graph, name)] == []
