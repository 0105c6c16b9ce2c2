"""The disk cache of compiled kernels, through a C program: what it keeps, what it refuses, where it gives up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
GCC = shutil.which("gcc")

pytestmark = pytest.mark.skipif(GCC is None, reason="gcc is not installed")

# write NAME KEY TEXT, or read NAME KEY: prints the text, or "absent".
PROGRAM = r"""
#include "kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool fa_module_folder(char *path, size_t room) {
    return getenv("MODULE_FOLDER") && (size_t)snprintf(path, room, "%s", getenv("MODULE_FOLDER")) < room;
}

int main(int argc, char **argv) {
    const uint64_t key = strtoull(argv[3], NULL, 0);
    fa_blob blob = {0};
    if (strcmp(argv[1], "write") == 0)
        for (int i = 4; i < argc; i++)
            fa_cache_write(argv[2], key + (uint64_t)i - 4, &(fa_blob){argv[i], strlen(argv[i])});
    else if (fa_cache_read(argv[2], key, &blob))
        printf("%.*s", (int)blob.bytes, blob.data);
    else
        printf("absent");
    free(blob.data);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache_program")
    (folder / "main.c").write_text(PROGRAM)
    command = [GCC, "-std=c11", "-D_GNU_SOURCE", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    files = [folder / "main.c", CSRC / "kernel_cache.c", "-o", folder / "cache"]
    subprocess.run([*command, "-I", CSRC, *files], check=True)
    return folder / "cache"


@pytest.fixture
def cache(program, tmp_path):
    """cache(words..): (what the program printed, what it warned)."""

    def cache(*words, **environment):
        variables = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
        variables = {**variables, "FLASH_ATTN_CACHE_DIR": str(tmp_path / "a" / "b"), **environment}
        variables = {k: v for k, v in variables.items() if v is not None}
        done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    cache.folder = tmp_path / "a" / "b"
    return cache


def test_what_was_written_is_read(cache):
    assert cache("read", "kernel", 7) == ("absent", "")
    assert cache("write", "kernel", 7, "first") == ("", "")
    assert cache("read", "kernel", 7) == ("first", "")
    assert cache("read", "kernel", 8)[0] == "absent"
    assert cache("read", "other", 7)[0] == "absent"
    assert cache("write", "kernel", 7, "second") == ("", "")
    assert cache("read", "kernel", 7)[0] == "second"
    assert [path.name for path in cache.folder.iterdir()] == ["kernel-0000000000000007.cubin"]


@pytest.mark.parametrize("at", (0, 7, 8, 16, 24, 31, 32, 40, -1))
def test_a_damaged_file_counts_as_absent(cache, at):
    cache("write", "kernel", 7, "a content of some length")
    (path,) = cache.folder.iterdir()
    good = path.read_bytes()
    bad = bytearray(good)
    bad[at] ^= 1
    path.write_bytes(bad)
    assert cache("read", "kernel", 7)[0] == "absent"
    path.write_bytes(good[: at if at >= 0 else len(good) + at])
    assert cache("read", "kernel", 7)[0] == "absent"
    path.write_bytes(good)
    assert cache("read", "kernel", 7)[0] == "a content of some length"


def test_a_file_of_another_key_is_not_taken(cache):
    cache("write", "kernel", 7, "content")
    (path,) = cache.folder.iterdir()
    path.rename(path.with_name("kernel-0000000000000008.cubin"))
    assert cache("read", "kernel", 8)[0] == "absent"


def test_shipped_files_come_first(cache, tmp_path):
    shipped = tmp_path / "site" / "flash_attn" / "cubins"
    cache("write", "kernel", 7, "shipped", FLASH_ATTN_CACHE_DIR=str(shipped))
    cache("write", "kernel", 7, "compiled")
    assert cache("read", "kernel", 7, MODULE_FOLDER=str(tmp_path / "site"))[0] == "shipped"
    assert cache("read", "kernel", 7)[0] == "compiled"


def test_the_folder_does_not_grow_without_bound(cache):
    cache("write", "old", 1, "oldest")
    (path,) = cache.folder.iterdir()
    os.utime(path, (1, 1))
    cache("write", "kernel", 100, *("x" for _ in range(600)))
    assert len(list(cache.folder.iterdir())) == 512
    assert cache("read", "old", 1)[0] == "absent"
    assert cache("read", "kernel", 699)[0] == "x"


def test_where_the_user_keeps_caches(cache, tmp_path):
    cache("write", "kernel", 7, "here", FLASH_ATTN_CACHE_DIR=None, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert len(list((tmp_path / "xdg" / "flash_attn").iterdir())) == 1
    cache("write", "kernel", 7, "here", FLASH_ATTN_CACHE_DIR=None, HOME=str(tmp_path / "home"))
    assert len(list((tmp_path / "home" / ".cache" / "flash_attn").iterdir())) == 1


def test_without_a_folder_one_warning_is_all(cache, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    said = cache("write", "kernel", 7, "x", "y", "z", FLASH_ATTN_CACHE_DIR=str(tmp_path / "file" / "below"))
    assert said[0] == "" and said[1].count("\n") == 1
    assert "compiled kernels are not kept: cannot write to" in said[1] and "FLASH_ATTN_CACHE_DIR" in said[1]
    said = cache("write", "kernel", 7, "x", FLASH_ATTN_CACHE_DIR=None)
    assert "there is no home folder" in said[1]
    assert cache("read", "kernel", 7, FLASH_ATTN_CACHE_DIR=None) == ("absent", "")


def test_many_processes_write_the_same_file(program, cache):
    environment = {**os.environ, "FLASH_ATTN_CACHE_DIR": str(cache.folder)}
    words = [program, "write", "kernel", "7", "z" * 100_000]
    running = [subprocess.Popen(words, env=environment) for _ in range(8)]
    seen = {cache("read", "kernel", 7)[0] for _ in range(10)}
    assert all(process.wait() == 0 for process in running)
    assert seen <= {"absent", "z" * 100_000}
    assert [path.name for path in cache.folder.iterdir()] == ["kernel-0000000000000007.cubin"]
