"""Compiling on the user's machine: what is kept, what is refused, and what is said."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from halfstep.errors import UserError
from halfstep.master import build, native

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are for POSIX")

REAL = next((path for name in build.USUAL if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(REAL is None, reason="no C compiler here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and nothing known from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(build.VARIABLE, raising=False)
    fresh = native._kernels.__wrapped__
    monkeypatch.setattr(native, "_kernels", fresh)
    return tmp_path / "cache" / "halfstep" / "compiled"


def script(path: Path, text: str) -> str:
    """Write a program in shell."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def fake(tmp_path: Path, compiling: str) -> str:
    """Write a compiler that knows its version, and then does something else."""
    version = 'if [ "$1" = --version ]; then echo fakecc 1.0; exit 0; fi'
    return script(tmp_path / "fakecc", f"{version}\n{compiling}")


def counting(tmp_path: Path) -> tuple[str, Path]:
    """Write a compiler that does its work, and takes down each call."""
    log = tmp_path / "calls"
    log.touch()
    return script(tmp_path / "cc1", f'echo "$@" >> {log}\nexec {REAL} "$@"'), log


def compiled(log: Path) -> int:
    """Return how often a counting compiler was asked to compile."""
    calls = log.read_text(encoding="utf-8").splitlines()
    return sum("--version" not in call for call in calls)


def only(folder: Path) -> Path:
    """Return the one file of a folder."""
    (file,) = folder.iterdir()
    return file


@needs_compiler
def test_described(cache: Path) -> None:
    """Law: kernels say what compiled them, and whose threads they use."""
    assert native.available()
    assert native.describe().startswith("compiled with ")
    assert native.describe().endswith("threads of torch's OpenMP") or (
        native.runtime() is None
    )
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_compiler
def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where torch brings no OpenMP, that is said."""
    monkeypatch.setattr(native, "runtime", lambda: None)
    assert native.describe().endswith("one thread, as torch has no OpenMP")


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: HALFSTEP_COMPILER=none does without, and using them says so."""
    monkeypatch.setenv(build.VARIABLE, "none")
    assert not native.available()
    assert native.describe() == "not compiled: HALFSTEP_COMPILER=none"
    with pytest.raises(UserError, match="HALFSTEP_COMPILER=none"):
        native.look([torch.ones(3)], norm=False)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a machine without a compiler has no kernels, and hears what was tried."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mycc -m64")
    assert not native.available()
    assert native.describe() == (
        "not compiled: no C compiler found (mycc -m64: no such program; cc: no such "
        "program; gcc: no such program; clang: no such program): set HALFSTEP_COMPILER"
    )


def test_named_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a compiler that the user names is not replaced by another in silence."""
    monkeypatch.setenv(build.VARIABLE, "/no/such/cc")
    assert native.describe() == (
        "not compiled: HALFSTEP_COMPILER=/no/such/cc: no such program"
    )


@pytest.mark.parametrize(
    ("compiling", "said"),
    [
        ("echo note; echo 'x.c: error: bad word' >&2; exit 3", "x.c: error: bad word"),
        ("exit 1", "failed with status 1: nothing"),
        ("exit 0", "fakecc wrote nothing"),
        ("kill -9 $$", "failed with status -9: nothing"),
    ],
)
def test_failing_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiling: str, said: str
) -> None:
    """Law: a compiler that fails is a reason in one line, not a crash."""
    monkeypatch.setenv(build.VARIABLE, fake(tmp_path, compiling))
    assert not native.available()
    assert native.describe().startswith("not compiled: ")
    assert said in native.describe()
    assert "\n" not in native.describe()


GARBAGE = 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"'


def test_garbage_from_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """Law: what cannot be loaded is a reason, and is not kept."""
    monkeypatch.setenv(build.VARIABLE, fake(tmp_path, GARBAGE))
    assert not native.available()
    assert native.describe().startswith("not compiled: ")
    assert not list(cache.iterdir())


def test_stuck_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a compiler that does not end is given up, once."""
    log = tmp_path / "calls"
    waiting = f"echo call >> {log}\nexec sleep 20"
    monkeypatch.setenv(build.VARIABLE, fake(tmp_path, waiting))
    monkeypatch.setattr(build, "PATIENCE", 0.5)
    assert "timed out after 0.5 seconds" in native.describe()
    assert log.read_text(encoding="utf-8") == "call\n"


@needs_compiler
def test_wrong_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """Law: a library that computes something else is not used, and not kept."""
    other = tmp_path / "other.c"
    other.write_text("void halfstep_update(){} int halfstep_look(){return 0;}\n")
    wrong = f'{GARBAGE}; exec {REAL} -shared -fPIC -o "$2" {other}'
    monkeypatch.setenv(build.VARIABLE, fake(tmp_path, wrong))
    assert native.describe() == (
        "not compiled: what it compiled does not compute as it should"
    )
    assert not list(cache.iterdir())


@needs_compiler
def test_missing_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a library without our functions is a reason."""
    other = tmp_path / "other.c"
    other.write_text("int other;\n")
    wrong = f'{GARBAGE}; exec {REAL} -shared -fPIC -o "$2" {other}'
    monkeypatch.setenv(build.VARIABLE, fake(tmp_path, wrong))
    assert "halfstep_update" in native.describe()
    assert not native.available()


@needs_compiler
def test_old_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a compiler that does not know -march=native compiles without it."""
    picky = (
        'case "$*" in *=native*) echo "error: =native" >&2; exit 1;; esac\n'
        f'exec {REAL} "$@"'
    )
    monkeypatch.setenv(build.VARIABLE, fake(tmp_path, picky))
    assert native.describe().startswith("compiled with fakecc 1.0, ")


@needs_compiler
def test_cc_with_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: $CC may hold more than a name, as with ccache."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv("CC", f"env {compiler}")
    assert native.available()
    assert compiled(log) == 1


@needs_compiler
def test_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """Law: a second process finds what the first compiled."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(build.VARIABLE, compiler)
    assert native.available()
    assert compiled(log) == 1
    assert native.available()
    assert compiled(log) == 1
    assert stat.S_IMODE(only(cache).stat().st_mode) & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "changed", "named well"])
def test_damaged_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, damage: str
) -> None:
    """Law: a damaged file is replaced, and its successor is used."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(build.VARIABLE, compiler)
    # Not loaded in this process: a file that is mapped must not be cut.
    job = build.Job(native.SOURCE, native.works)
    found = build.find()
    build.private(cache)
    built = job.compile(found, tmp_path)
    file = job.keep(built, found, cache)
    whole = file.read_bytes()
    if damage == "named well":
        file.unlink()
        built.write_bytes(b"garbage")
        job.keep(built, found, cache)
    else:
        cut = whole[: len(whole) // 2]
        file.write_bytes(cut if damage == "cut" else cut + b"x" + whole[len(cut) + 1 :])
    assert native.available()
    assert compiled(log) == 2
    assert only(cache).read_bytes() == whole


@needs_compiler
def test_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: another source, header, compiler, flag or processor is another library."""
    for file in native.SOURCE.parent.glob("*.[ch]"):
        shutil.copy(file, tmp_path)
    source = tmp_path / native.SOURCE.name
    compiler = build.Compiler(("cc",), "cc 1")
    keys = [build.Job(source, native.works).key(compiler)]
    assert keys[0] == build.Job(native.SOURCE, native.works).key(compiler)
    keys.append(build.Job(source, native.works, ("-g",)).key(compiler))
    keys.append(build.Job(source, native.works).key(build.Compiler(("cc",), "cc 2")))
    with monkeypatch.context() as patch:
        patch.setattr(build, "processor", lambda: "another")
        keys.append(build.Job(source, native.works).key(compiler))
    for file in (source, tmp_path / "bits.h"):
        file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        keys.append(build.Job(source, native.works).key(compiler))
    assert len(set(keys)) == len(keys)


@needs_compiler
def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where nothing can be kept, kernels are compiled each time, and say so."""
    place = tmp_path / "cache"
    place.mkdir()
    (place / "halfstep").write_text("in the way", encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(temporary))
    assert native.available()
    assert "compiled in each process: " in native.describe()
    assert not list(temporary.iterdir())


@needs_compiler
def test_open_cache(cache: Path) -> None:
    """Law: a folder that others can write to is not used: they could put code there."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert native.available()
    assert "can be written to by others: chmod 700 it" in native.describe()
    assert not list(cache.iterdir())


@needs_compiler
def test_foreign_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a folder that belongs to another user is not used, nor a link to one."""
    cache.mkdir(parents=True, mode=0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
        assert "is not a folder of this user" in native.describe()
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(cache.with_name("elsewhere"))
    assert "is not a folder of this user" in native.describe()


PROGRAM = """
from halfstep.master import native
print(native.describe())
"""


@needs_compiler
def test_race(cache: Path) -> None:
    """Law: processes that compile at once all get kernels, and leave one file."""
    command = [sys.executable, "-c", PROGRAM]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = {process.communicate(timeout=120)[0] for process in started}
    assert len(said) == 1
    assert said.pop().startswith("compiled with ")
    assert only(cache).suffix == ".so"


def test_runtime_is_torchs() -> None:
    """Law: where torch runs OpenMP, its runtime is found, and answers."""
    found = native.runtime()
    if "OpenMP" not in torch.__config__.parallel_info().split("backend:")[-1]:
        pytest.skip("torch has no OpenMP here")
    assert found is not None
    assert ctypes.CFUNCTYPE(ctypes.c_int)(found[2])() == 1
