"""The disk cache of compiled kernels, through a C program: the files that it keeps, refuses, and fails to write."""

import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"
GCC = shutil.which("gcc")
HOUR, MOST_BYTES = 3600, 100_000

pytestmark = [
    pytest.mark.skipif(GCC is None, reason="gcc is not installed"),
    pytest.mark.skipif(sys.platform == "win32", reason="folders of Windows have no owner that we look at"),
]

# write NAME KEY TEXT...: writes the texts, with KEY and the next numbers as keys. read NAME KEY: prints the text, or
# "absent". stress NAME SECONDS: reads and writes a few kernels, whose texts follow from their keys. Exits with 1 if a
# text is wrong.
PROGRAM = r"""
#include "gpu/kernel_cache.h"
#include "gpu/nvrtc.h"
#include "system/library.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Every file is a day old. */
static void age_all(void) {
    char command[1200];
    snprintf(command, sizeof command, "touch -d yesterday %s/*", getenv("FLASH_ATTN_CACHE_DIR"));
    if (system(command) != 0) exit(3);
}

bool fa_module_folder(char *path, size_t room) {
    return getenv("MODULE_FOLDER") && (size_t)snprintf(path, room, "%s", getenv("MODULE_FOLDER")) < room;
}

fa_status fa_nvrtc_get(const fa_nvrtc **nvrtc, fa_error *err) {
    static fa_nvrtc found;
    const char *identity = getenv("NVRTC");
    (void)err;
    *nvrtc = &found;
    found.identity = identity ? (uint32_t)atoi(identity) : 0;
    return identity ? FA_OK : FA_EUNSUPPORTED;
}

static int stress(const char *name, double seconds) {
    const clock_t end = clock() + (clock_t)(seconds * CLOCKS_PER_SEC);
    static char text[70000];
    for (unsigned i = 0; i == 0 || clock() < end; i++) {
        const uint64_t key = (i * 2654435761u >> 16) % 12;
        const size_t bytes = 1000 + 5000 * key;
        fa_blob blob;
        memset(text, 'a' + (int)key, bytes);
        if (!fa_cache_read(name, key, &blob))
            fa_cache_write(name, key, &(fa_blob){text, bytes});
        else if (blob.bytes != bytes || memcmp(blob.data, text, bytes) != 0)
            return 1;
        else
            free(blob.data);
    }
    return 0;
}

int main(int argc, char **argv) {
    const uint64_t key = strtoull(argv[3], NULL, 0);
    fa_blob blob = {0};
    if (strcmp(argv[1], "stress") == 0) return stress(argv[2], atof(argv[3]));
    if (strcmp(argv[1], "write") == 0)
        for (int i = 4; i < argc; i++) {
            fa_cache_write(argv[2], key + (uint64_t)i - 4, &(fa_blob){argv[i], strlen(argv[i])});
            if (getenv("AGED")) age_all();
        }
    else if (fa_cache_read(argv[2], key, &blob))
        printf("%.*s", (int)blob.bytes, blob.data);
    else
        printf("absent");
    free(blob.data);
    return 0;
}
"""


def build(folder, *options):
    (folder / "main.c").write_text(PROGRAM)
    names = ("gpu/kernel_cache", "plan/kernel_table", "system/folder", "system/environment")
    sources = [CSRC / f"{name}.c" for name in names]
    command = [GCC, "-std=c11", "-g", "-O1", f"-DFA_CACHE_MOST_BYTES={MOST_BYTES}", *options, "-I", CSRC]
    subprocess.run([*command, folder / "main.c", *sources, "-o", folder / "cache", "-lpthread"], check=True)
    return folder / "cache"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache_program")
    return build(folder, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def fast_program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fast_cache_program"))


@pytest.fixture
def cache(program, tmp_path):
    """cache(words..): (the program's output, its warnings)."""

    def cache(*words, options=None, **environment):
        done = subprocess.run(
            [program, *map(str, words)], capture_output=True, text=True, env=cache.environment(**environment),
            **(options or {}),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    def environment(**changes):
        variables = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
        variables = {**variables, "FLASH_ATTN_CACHE_DIR": str(cache.folder), "NVRTC": "13", **changes}
        return {k: v for k, v in variables.items() if v is not None}

    cache.environment = environment
    cache.folder = tmp_path / "a" / "b"
    return cache


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_what_was_written_is_read(cache):
    assert cache("read", "kernel", 7) == ("absent", "")
    assert cache("write", "kernel", 7, "first") == ("", "")
    assert cache("read", "kernel", 7) == ("first", "")
    assert cache("read", "kernel", 8)[0] == "absent"
    assert cache("read", "other", 7)[0] == "absent"
    assert cache("write", "kernel", 7, "second") == ("", "")
    assert cache("read", "kernel", 7)[0] == "second"
    assert names(cache.folder) == ["kernel-0000000000000007-0000000d.cubin"]


@pytest.mark.parametrize("at", (0, 7, 8, 16, 24, 31, 32, 40, -1))
def test_a_damaged_file_counts_as_absent(cache, at):
    cache("write", "kernel", 7, "a content of some length")
    (path,) = cache.folder.iterdir()
    good = path.read_bytes()
    bad = bytearray(good)
    bad[at] ^= 1
    for content in (bad, good[: at if at >= 0 else len(good) + at], good + b"more", b""):
        path.write_bytes(content)
        assert cache("read", "kernel", 7) == ("absent", "")
    assert cache("write", "kernel", 7, "a content of some length") == ("", "")
    assert path.read_bytes() == good and names(cache.folder) == [path.name]


def test_a_file_of_another_key_or_kernel_is_not_taken(cache):
    cache("write", "kernel", 7, "content")
    (path,) = cache.folder.iterdir()
    for name, key, file in (("kernel", 8, "kernel-0000000000000008"), ("other", 7, "other-0000000000000007")):
        shutil.copy(path, path.with_name(f"{file}-0000000d.cubin"))
        assert cache("read", name, key)[0] == "absent"


def test_a_kernel_does_not_outlive_its_compiler(cache):
    cache("write", "kernel", 7, "of 12", NVRTC="12")
    assert cache("read", "kernel", 7)[0] == "absent"
    cache("write", "kernel", 7, "of 13")
    assert cache("read", "kernel", 7)[0] == "of 13" and cache("read", "kernel", 7, NVRTC="12")[0] == "of 12"
    assert cache("read", "kernel", 7, NVRTC=None)[0] in ("of 12", "of 13")  # without a compiler any version does
    assert cache("read", "kernel", 8, NVRTC=None)[0] == "absent"


def test_shipped_files_come_first(cache, tmp_path):
    shipped = tmp_path / "site" / "flash_attn" / "cubins"
    cache("write", "kernel", 7, "shipped", FLASH_ATTN_CACHE_DIR=str(shipped), NVRTC="12")
    (path,) = shipped.iterdir()
    path.rename(path.with_name("kernel-0000000000000007.cubin"))
    shipped.chmod(0o775)  # the mode that an installer may set
    cache("write", "kernel", 7, "compiled")
    assert cache("read", "kernel", 7, MODULE_FOLDER=str(tmp_path / "site")) == ("shipped", "")
    assert cache("read", "kernel", 7)[0] == "compiled"


def test_where_the_user_keeps_caches(cache, tmp_path):
    cache("write", "kernel", 7, "here", FLASH_ATTN_CACHE_DIR=None, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert len(names(tmp_path / "xdg" / "flash_attn")) == 1
    cache("write", "kernel", 7, "here", FLASH_ATTN_CACHE_DIR=None, HOME=str(tmp_path / "home"))
    assert len(names(tmp_path / "home" / ".cache" / "flash_attn")) == 1


# ---- removal of files ----------------------------------------------------------------------------------------------

TEXT = "x" * 10_000


def test_a_process_keeps_all_that_it_wrote(cache):
    cache("write", "attn_a", 0, *[TEXT] * 30)  # three times the limit, as with `python -m flash_attn.build --all`
    assert len(names(cache.folder)) == 30
    cache("write", "attn_b", 0, TEXT)  # another process, soon after
    assert len(names(cache.folder)) == 31
    cache("write", "attn_c", 0, *[TEXT] * 15, AGED="1")  # with a clock that jumps
    assert sum(name.startswith("attn_c") for name in names(cache.folder)) == 15


def test_what_was_not_used_for_longest_goes(cache):
    cache("write", "attn_a", 0, *[TEXT] * 15)
    files = sorted(cache.folder.iterdir())
    others = [
        "attn_a.cubin", "notes.cubin", "notes-0000000000000001-0000000d.cubin", "attn_a-1-0000000d.cubin",
        "attn_a-0000000000000001-0000000d.cubin.bak", "attn_A-0000000000000001-0000000d.cubin",
    ]  # fmt: skip
    for name in others:
        (cache.folder / name).write_text(TEXT)
        age(cache.folder / name, 10**8)
    for i, path in enumerate(files):
        age(path, 2 * 24 * HOUR - i)
    first_release = cache.folder / "attn_a-0000000000000001.cubin"
    files[14].rename(first_release)
    age(first_release, 10**7)
    cache("read", "attn_a", 0)  # used now
    assert cache("write", "attn_b", 0, TEXT) == ("", "")
    left = set(names(cache.folder)) - set(others)
    assert left == {path.name for path in (files[0], *files[7:14])} | {"attn_b-0000000000000000-0000000d.cubin"}
    assert set(others) <= set(names(cache.folder))


def test_kernels_of_every_family_go(cache):
    """Families whose names begin with another word than attn count, too."""
    families = set(re.findall(r'\.name = "(\w+)",\s*\.files', (CSRC / "plan/kernel_table.c").read_text()))
    assert {"attn_fwd_sm90", "combine", "quantize", "kvcache"} <= families
    for family in families:
        cache("write", f"{family}_d64", 0, TEXT)
    for path in cache.folder.iterdir():
        age(path, 2 * 24 * HOUR)
    cache("write", "attn_b", 0, *[TEXT] * 12)
    assert all(name.startswith("attn_b") for name in names(cache.folder))


def test_a_clock_that_jumped(cache):
    """A file from the future ages from the moment when it is first seen. Files of 1970 go first."""
    cache("write", "attn_a", 0, *[TEXT] * 15)
    files = sorted(cache.folder.iterdir())
    for path in files[:10]:
        age(path, -(10**9))
    for path in files[10:]:
        os.utime(path, (0, 0))
    assert cache("read", "attn_a", 0)[0] == TEXT and files[0].stat().st_mtime < time.time() + 60
    cache("write", "attn_b", 0, TEXT)
    assert {path.name for path in files[:10]} < set(names(cache.folder)) and len(names(cache.folder)) == 11
    assert all(path.stat().st_mtime < time.time() + 60 for path in files[:10])
    for path in cache.folder.iterdir():
        age(path, 2 * HOUR)
    cache("write", "attn_c", 0, TEXT)
    assert len(names(cache.folder)) == 9


def test_unfinished_files_of_dead_processes_go(cache):
    cache("write", "attn_a", 0, TEXT)
    start = cache.folder / ".attn_a-0000000000000000-0000000d.cubin.123.0123456789abcdef"
    old, young, other = start.with_suffix(".0123456789abcdef.new"), start.with_suffix(".1123456789abcdef.new"), None
    other = cache.folder / ".settings.new"
    for path, seconds in ((old, 2 * HOUR), (young, 10), (other, 10**6)):
        path.write_text("half")
        age(path, seconds)
    cache("write", "attn_b", 0, TEXT)
    assert not old.exists() and young.exists() and other.exists()


# ---- failures ------------------------------------------------------------------------------------------------------


def one_warning(said, *words):
    assert said.count("\n") == 1 and said.startswith("flash_attn: compiled kernels are not kept: "), said
    assert "set FLASH_ATTN_CACHE_DIR to a folder that you" in said and all(word in said for word in words), said


def test_without_a_folder_one_warning_is_all(cache, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    below = str(tmp_path / "file" / "below")
    out, said = cache("write", "kernel", 7, "x", "y", "z", FLASH_ATTN_CACHE_DIR=below)
    one_warning(said, f"cannot write to {below}: Not a directory")
    one_warning(cache("write", "kernel", 7, "x", FLASH_ATTN_CACHE_DIR=None)[1], "there is no home folder")
    assert cache("read", "kernel", 7, FLASH_ATTN_CACHE_DIR=None) == ("absent", "")
    if sys.platform == "linux":  # no user may make a folder there; the words are the system's reason
        assert "No such file" not in cache("write", "kernel", 7, "x", FLASH_ATTN_CACHE_DIR="/sys/flash_attn")[1]
    long = str(tmp_path) + ("/" + "a" * 200) * 6
    assert cache("read", "kernel", 7, FLASH_ATTN_CACHE_DIR=long)[0] == "absent"


def test_folders_are_the_users_alone(cache, tmp_path):
    before = os.umask(0)
    try:
        cache("write", "kernel", 7, "x")
    finally:
        os.umask(before)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (cache.folder, cache.folder.parent))
    (path,) = cache.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", (0o770, 0o722, 0o1777))
def test_a_folder_that_others_may_write_to_is_not_used(cache, mode):
    cache("write", "kernel", 7, "planted")
    cache.folder.chmod(mode)
    out, said = cache("read", "kernel", 7)
    assert out == "absent"
    one_warning(said, f"cannot use {cache.folder}: others may write to it")
    one_warning(cache("write", "kernel", 9, "x", "y")[1], f"cannot write to {cache.folder}: others may write to it")
    assert names(cache.folder) == ["kernel-0000000000000007-0000000d.cubin"]
    cache.folder.chmod(0o755)
    assert cache("read", "kernel", 7) == ("planted", "")


@pytest.mark.parametrize("mode", (0o620, 0o602))
def test_a_file_that_others_may_write_to_counts_as_absent(cache, mode):
    """A folder may have been closed after others wrote to it, or files may keep modes from elsewhere."""
    cache("write", "kernel", 7, "planted")
    (path,) = cache.folder.iterdir()
    path.chmod(mode)
    assert cache("read", "kernel", 7) == ("absent", "")
    assert cache("write", "kernel", 7, "mine") == ("", "") and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cache("read", "kernel", 7) == ("mine", "")


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others")


@AS_ROOT
def test_a_folder_of_another_user_is_not_used(cache):
    cache("write", "kernel", 7, "planted")
    os.chown(cache.folder, 12345, -1)
    out, said = cache("read", "kernel", 7)
    assert out == "absent"
    one_warning(said, "it belongs to another user")


@AS_ROOT
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_another_user_counts_as_absent(cache, tmp_path, is_link):
    cache("write", "kernel", 7, "planted")
    (path,) = cache.folder.iterdir()
    if is_link:
        path = path.rename(tmp_path / "elsewhere")
        (cache.folder / "kernel-0000000000000007-0000000d.cubin").symlink_to(path)
    os.chown(path, 12345, -1)
    assert cache("read", "kernel", 7) == ("absent", "")


@AS_ROOT
def test_a_folder_of_root_is_read_by_others(cache, program, tmp_path):
    """An image may contain kernels that root compiled while the image was built."""
    cache("write", "kernel", 7, "of the image")
    for folder in (cache.folder, *cache.folder.parents):
        if os.access(folder, os.W_OK) and folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    next(cache.folder.iterdir()).chmod(0o644)
    copy = Path(shutil.copy(program, tmp_path / "program"))
    for folder in copy.parents:
        folder.chmod(folder.stat().st_mode | 0o055)
    said = []
    for words in (("read", "kernel", "7"), ("write", "kernel", "8", "x", "y")):
        done = subprocess.run([copy, *words], capture_output=True, text=True, env=cache.environment(), user=12345)
        assert done.returncode == 0, done.stderr
        said.append((done.stdout, done.stderr))
    assert said[0] == ("of the image", "") and said[1][0] == ""
    one_warning(said[1][1], "cannot write to", "Permission denied")


def limit_file_size(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


@pytest.mark.parametrize("room", (0, 20, 32, 1000, 10_031))
def test_a_full_disk(cache, room):
    """A limit on the size of files replaces a full disk. Writing fails after this number of bytes."""
    cache("write", "kernel", 7, "before")
    full = {"preexec_fn": lambda: limit_file_size(room), "restore_signals": False}
    out, said = cache("write", "kernel", 7, TEXT, TEXT, options=full)
    one_warning(said, f"cannot write to {cache.folder}: File too large")
    assert names(cache.folder) == ["kernel-0000000000000007-0000000d.cubin"]
    assert cache("read", "kernel", 7)[0] == "before"


# ---- many processes ------------------------------------------------------------------------------------------------


def test_many_processes_at_once(fast_program, cache):
    words = [fast_program, "stress", "attn_a", "0.03"]
    running = [subprocess.Popen(words, env=cache.environment(), stderr=subprocess.PIPE) for _ in range(64)]
    said = [process.communicate()[1] for process in running]
    assert all(process.returncode == 0 for process in running) and set(said) == {b""}
    assert len(names(cache.folder)) == 12 and not any(name.endswith(".new") for name in names(cache.folder))


def test_processes_that_are_killed(fast_program, cache):
    """Killed processes leave complete files, or files that no process takes. A file damaged meanwhile is replaced."""
    r = random.Random(0)
    for _ in range(25):
        words = [fast_program, "stress", "attn_a", "5"]
        running = [subprocess.Popen(words, env=cache.environment(), stderr=subprocess.PIPE) for _ in range(4)]
        time.sleep(r.uniform(0, 0.03))
        for path in cache.folder.glob("attn_*") if cache.folder.exists() else ():
            if r.random() < 0.5:
                with open(path, "r+b") as file:
                    file.seek(r.randrange(1000))
                    file.write(b"?") if r.random() < 0.5 else file.truncate()
        time.sleep(r.uniform(0, 0.02))
        for process in running:
            process.kill()
        for process in running:
            assert process.communicate()[1] == b"" and process.returncode == -signal.SIGKILL
    assert subprocess.run([fast_program, "stress", "attn_a", "0.05"], env=cache.environment()).returncode == 0
