"""Compiling on the user's machine: which compiler, what is refused, what is kept.

Compilers here are scripts that do what a test wants; each test has its own cache.
"""

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import UserError
from halfstep.masters import c_compiler, cpu_kernels

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are for POSIX")

REAL = next(
    (path for name in c_compiler.DEFAULT_COMPILERS if (path := shutil.which(name))),
    None,
)
needs_compiler = pytest.mark.skipif(REAL is None, reason="no C compiler here")


@pytest.fixture(autouse=True, name="cache")
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and nothing known from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", script(tmp_path / "quick", f'exec {REAL} "$@" -O0'))
    monkeypatch.delenv(c_compiler.VARIABLE, raising=False)
    for name in ("_kernels", "_require_kernels"):
        fresh = getattr(cpu_kernels, name).__wrapped__
        monkeypatch.setattr(cpu_kernels, name, fresh)
    return tmp_path / "cache" / "halfstep" / "compiled"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def fake(tmp_path: Path, compiling: str) -> str:
    version = 'if [ "$1" = --version ]; then echo fakecc 1.0; exit 0; fi'
    return script(tmp_path / "fakecc", f"{version}\n{compiling}")


def counting(tmp_path: Path) -> tuple[str, Path]:
    log = tmp_path / "calls"
    log.touch()
    return script(tmp_path / "cc1", f'echo "$@" >> {log}\nexec {REAL} "$@" -O0'), log


def compiled(log: Path) -> int:
    calls = log.read_text(encoding="utf-8").splitlines()
    return sum("--version" not in call for call in calls)


NO = "no such program"
NOT_FOUND = (
    f"no C compiler found (mycc -m64: {NO}; cc: {NO}; gcc: {NO}; clang: {NO}): "
    "set HALFSTEP_COMPILER"
)
GARBAGE = 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"'
UNDEFINED = "int other;\n"
WRONG = "void halfstep_update(){} int halfstep_check_finite(){return 0;}\n"
FLUSHING = """
#include <xmmintrin.h>
__attribute__((constructor)) static void harm(void) {
    _mm_setcsr(_mm_getcsr() | 0x8040);
}
"""


def source(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "other.c"
    file.write_text(text, encoding="utf-8")
    return file


def instead(tmp_path: Path, text: str) -> str:
    command = f'{REAL} -shared -fPIC -o "$2" {source(tmp_path, text)}'
    return fake(tmp_path, f"{GARBAGE}; exec {command}")


BROKEN: dict[str, tuple[Callable[[Path], str], str]] = {
    "none": (lambda _: "none", "HALFSTEP_COMPILER=none"),
    # A compiler that the user names is not replaced by another in silence.
    "missing": (lambda _: "/no/such/cc", "HALFSTEP_COMPILER=/no/such/cc: " + NO),
    "quote": (lambda _: 'gcc "-O2', 'HALFSTEP_COMPILER=gcc "-O2: No closing quotation'),
    "error": (
        lambda path: fake(path, "echo note; echo 'x.c: error: bad' >&2; exit 3"),
        "x.c: error: bad",
    ),
    "silent": (lambda path: fake(path, "exit 1"), "failed with status 1: nothing"),
    "idle": (lambda path: fake(path, "exit 0"), "fakecc wrote nothing"),
    "garbage": (lambda path: fake(path, GARBAGE), "kernels.so: "),
    "undefined": (lambda path: instead(path, UNDEFINED), "halfstep_update"),
    "wrong": (
        lambda path: instead(path, WRONG),
        "it produced code that computes wrong results",
    ),
    "flushing": (
        lambda path: fake(path, f'exec {REAL} "$@" {source(path, FLUSHING)} -O0'),
        "flushes subnormal numbers to zero",
    ),
}
"""What HALFSTEP_COMPILER holds, and the reason that is given."""


@needs_compiler
@pytest.mark.parametrize("name", BROKEN)
def test_compilers_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, name: str
) -> None:
    """Law: without a library that works there are no kernels, for a reason in a line.

    What cannot be loaded, or computes something else, is not kept, and undone.
    """
    if name == "flushing" and platform.machine() != "x86_64":
        pytest.skip("sets a register of x86")
    make, why = BROKEN[name]
    monkeypatch.setenv(c_compiler.VARIABLE, make(tmp_path))
    assert not cpu_kernels.available()
    said = cpu_kernels.describe()
    assert said.startswith("not compiled: ")
    assert why in said
    assert "\n" not in said
    with pytest.raises(UserError, match=r"no compiled kernels \(not compiled: "):
        cpu_kernels.check_finite([torch.ones(3)], norm=False)
    assert not cache.exists() or not list(cache.iterdir())
    assert not c_compiler.flushes_subnormals()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: all that were looked for are named."""
    monkeypatch.setenv("CC", "mycc -m64")
    monkeypatch.setenv("PATH", "")
    assert cpu_kernels.describe() == f"not compiled: {NOT_FOUND}"


def impatient(monkeypatch: pytest.MonkeyPatch, begun: Path) -> None:
    wait = subprocess.Popen.communicate

    def communicate(
        self: Any, said: str | None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        while self.poll() is None and not (begun.exists() and begun.stat().st_size):
            time.sleep(0.01)
        # What has ended has said all.
        return wait(self, said, timeout if self.poll() is not None else 0)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)


def test_stuck_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a compiler that does not end is given up, once."""
    log = tmp_path / "calls"
    waiting = f"echo call >> {log}\nexec sleep 600"
    monkeypatch.setenv(c_compiler.VARIABLE, fake(tmp_path, waiting))
    impatient(monkeypatch, log)
    assert cpu_kernels.describe().endswith("fakecc: no answer in 30 s")
    assert log.read_text(encoding="utf-8") == "call\n"


def test_stuck_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: what a stuck compiler has started ends with it; a version is soon said.

    As long as one of them lives, nobody can read a queue that they write to to its end.
    """
    queue, begun = tmp_path / "queue", tmp_path / "begun"
    os.mkfifo(queue)
    end = os.open(queue, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)
    child = f"(echo >> {begun}; exec sleep 600) > {queue} &\nwait"
    monkeypatch.setenv(c_compiler.VARIABLE, script(tmp_path / "cc2", child))
    impatient(monkeypatch, begun)
    with os.fdopen(end, "rb") as reading:
        assert cpu_kernels.describe().endswith("cc2: no answer in 10 s")
        assert not reading.read()


@needs_compiler
def test_old_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a compiler that does not know -march=native compiles without it."""
    picky = (
        'case "$*" in *=native*) echo "error: =native" >&2; exit 1;; esac\n'
        f'exec {REAL} "$@" -O0'
    )
    monkeypatch.setenv(c_compiler.VARIABLE, fake(tmp_path, picky))
    assert cpu_kernels.describe().startswith("compiled with fakecc 1.0, ")


@needs_compiler
@pytest.mark.parametrize("variable", ["CC", c_compiler.VARIABLE])
def test_words_and_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, variable: str
) -> None:
    """Law: a variable may hold more than a name, as with ccache; blank is not set."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(variable, f"env {compiler}")
    for _ in range(2):
        assert cpu_kernels.available()
        assert compiled(log) == 1
    assert stat.S_IMODE(only(cache).stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert cpu_kernels.describe().startswith("compiled with ")
    assert cpu_kernels.describe().endswith("threads of torch's OpenMP") or (
        cpu_kernels.runtime() is None
    )
    monkeypatch.setattr(cpu_kernels, "runtime", lambda: None)
    assert cpu_kernels.describe().endswith("one thread, as torch has no OpenMP")
    monkeypatch.delenv("CC")
    monkeypatch.setenv(variable, " ")
    assert c_compiler.find().command[0] == REAL


HARMLESS = """
import sys
from halfstep.masters import c_compiler as build, cpu_kernels as native
print(native.describe(), build.flushes_subnormals(), sep="|")
"""


@needs_compiler
@pytest.mark.parametrize(
    "words", ["-fsanitize=address", "-Ofast -ffast-math -funsafe-math-optimizations"]
)
def test_words_that_harm(words: str) -> None:
    """Law: flags in CC neither end the process nor change its arithmetic."""
    done = subprocess.run(
        [sys.executable, "-c", HARMLESS],
        env=os.environ | {"CC": f"{REAL} {words}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, _, flushes = done.stdout.strip().partition("|")
    assert said.startswith("compiled with ")
    assert flushes == "False"


@needs_compiler
@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("square != square ?", "0 ?"),
        ("w[i] - lr * g[i];", "w[i] - lr * g[i] + 1 - 1;"),
    ],
)
def test_self_check_sees(tmp_path: Path, true: str, false: str) -> None:
    """Law: kernels that lose a NaN under amsgrad or a subnormal number are refused."""
    for file in cpu_kernels.SOURCE.parent.glob("*.[ch]"):
        text = file.read_text(encoding="utf-8")
        (tmp_path / file.name).write_text(text.replace(true, false), encoding="utf-8")
    job = c_compiler.CompiledLibrary(
        tmp_path / cpu_kernels.SOURCE.name, cpu_kernels.works
    )
    with pytest.raises(c_compiler.NoLibraryError, match="computes wrong results"):
        job.load_or_compile(c_compiler.find())


def test_runtime_is_torchs() -> None:
    """Law: where torch runs OpenMP, its runtime is found, and answers."""
    found = cpu_kernels.runtime()
    if "OpenMP" not in torch.__config__.parallel_info().split("backend:")[-1]:
        pytest.skip("torch has no OpenMP here")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(found[2])() == 1


# What is kept, for which processor, and where it may lie


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@needs_compiler
def test_damaged_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """Law: a damaged file is replaced, and its successor is used."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(c_compiler.VARIABLE, compiler)
    # Not loaded in this process: a file that is mapped must not be cut.
    job = c_compiler.CompiledLibrary(cpu_kernels.SOURCE, cpu_kernels.works)
    found = c_compiler.find()
    c_compiler.private_dir(cache)
    built = job.compile(found, tmp_path)
    file = job.store(built, found, cache)
    whole = file.read_bytes()
    cut = whole[: len(whole) // 2]
    built.write_bytes(b"garbage")
    for number, damage in enumerate((cut, cut + b"x" + whole[len(cut) + 1 :], None)):
        file.unlink()
        if damage is None:  # what is stored under its own sum
            job.store(built, found, cache)
        else:
            file.write_bytes(damage)
        assert cpu_kernels.available()
        assert compiled(log) == number + 2
        assert only(cache).read_bytes() == whole


@needs_compiler
def test_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: another source, compiler, flag or processor is another library."""
    source = tmp_path / cpu_kernels.SOURCE.name
    shutil.copy(cpu_kernels.SOURCE, source)
    job = c_compiler.CompiledLibrary(source, cpu_kernels.works)
    compiler = c_compiler.Compiler(("cc",), "cc 1")
    original = c_compiler.CompiledLibrary(cpu_kernels.SOURCE, cpu_kernels.works)
    assert original.cache_key(compiler) == job.cache_key(compiler)
    keys = [
        job.cache_key(compiler),
        job.cache_key(c_compiler.Compiler(("cc", "-g"), "cc 1")),
        job.cache_key(c_compiler.Compiler(("cc",), "cc 2")),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(c_compiler.cpu, "facts", lambda: {"isa": "another"})
        keys.append(job.cache_key(compiler))
    source.write_text(source.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    keys.append(job.cache_key(compiler))
    assert len(set(keys)) == len(keys)


@needs_compiler
@pytest.mark.parametrize("usable", ["blocked", "open"])
def test_no_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, usable: str
) -> None:
    """Law: where nothing can be kept, kernels are compiled each time, and say so.

    A folder that others can write to is not used: they could put code there.
    """
    if usable == "open":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
        why = "can be written to by others: chmod 700 it"
    else:
        cache.parent.parent.mkdir()
        cache.parent.write_text("in the way", encoding="utf-8")
        why = "compiled in each process: "
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(c_compiler.tempfile, "tempdir", str(temporary))
    assert cpu_kernels.available()
    assert why in cpu_kernels.describe()
    assert not list(temporary.iterdir())
    assert usable == "blocked" or not list(cache.iterdir())


def test_private_folders(cache: Path) -> None:
    """Law: a cache that is missing is made for this user alone, whatever the umask."""
    before = os.umask(0o002)
    try:
        assert c_compiler.private_dir(cache) == cache.resolve()
    finally:
        os.umask(before)
    made = (cache, cache.parent, cache.parent.parent)
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    cache.parent.chmod(0o1777)
    c_compiler.private_dir(cache)  # sticky, as /tmp is
    cache.parent.chmod(0o770)
    with pytest.raises(c_compiler.NoLibraryError, match="is open to others"):
        c_compiler.private_dir(cache)
    cache.parent.chmod(0o700)
    cache.rmdir()
    cache.symlink_to(cache.parent)  # a link is not used, wherever it leads
    with pytest.raises(c_compiler.NoLibraryError, match="is not a folder of this user"):
        c_compiler.private_dir(cache)


@pytest.mark.parametrize(
    ("above", "user", "why"),
    [
        (0, 4321, "is not a folder of this user"),
        (1, 4321, "belongs to another user"),
        (1, 0, ""),  # root may own one above
    ],
)
def test_foreign_folders(
    cache: Path, monkeypatch: pytest.MonkeyPatch, above: int, user: int, why: str
) -> None:
    """Law: a cache of another user, or below another's folder, is not used."""
    c_compiler.private_dir(cache)
    owned = (cache, *cache.parents)[above]
    true = {"stat": type(cache).stat, "lstat": type(cache).lstat}

    def facts_of(name: str) -> Callable[..., os.stat_result]:
        def facts(path: Path, **words: bool) -> os.stat_result:
            found = list(true[name](path, **words))
            found[stat.ST_UID] = user if path == owned else found[stat.ST_UID]
            return os.stat_result(found)

        return facts

    for name in true:
        monkeypatch.setattr(type(cache), name, facts_of(name))
    if why:
        with pytest.raises(c_compiler.NoLibraryError, match=why):
            c_compiler.private_dir(cache)
    else:
        c_compiler.private_dir(cache)


@needs_compiler
def test_unknown_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: for a processor that cannot be told from others, code is for all of them."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(c_compiler.VARIABLE, compiler)
    monkeypatch.setattr(c_compiler.cpu, "facts", dict)
    assert cpu_kernels.available()
    assert compiled(log) == 1
    assert "=native" not in log.read_text(encoding="utf-8")


@needs_compiler
def test_race(cache: Path) -> None:
    """Law: processes that compile at once all get kernels, and leave one file."""
    command = [sys.executable, "-c", HARMLESS]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = {process.communicate(timeout=120)[0] for process in started}
    assert len(said) == 1
    assert said.pop().startswith("compiled with ")
    assert only(cache).suffix == ".so"
