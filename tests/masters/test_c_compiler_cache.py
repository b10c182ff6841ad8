"""What is kept of compiled kernels, for which processor, and where it may lie."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from compilers import compiled, counting, needs_compiler, own_cache

from halfstep.masters import c_compiler, cpu_kernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["own_cache"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are for POSIX")


def only(folder: Path) -> Path:
    """Return the one file of a folder."""
    (file,) = folder.iterdir()
    return file


@needs_compiler
def test_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """Law: a second process finds what the first compiled."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(c_compiler.VARIABLE, compiler)
    assert cpu_kernels.available()
    assert compiled(log) == 1
    assert cpu_kernels.available()
    assert compiled(log) == 1
    assert stat.S_IMODE(only(cache).stat().st_mode) & 0o077 == 0


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "changed", "named well"])
def test_damaged_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, damage: str
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
    if damage == "named well":
        file.unlink()
        built.write_bytes(b"garbage")
        job.store(built, found, cache)
    else:
        cut = whole[: len(whole) // 2]
        file.write_bytes(cut if damage == "cut" else cut + b"x" + whole[len(cut) + 1 :])
    assert cpu_kernels.available()
    assert compiled(log) == 2
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
def test_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where nothing can be kept, kernels are compiled each time, and say so."""
    place = tmp_path / "cache"
    place.mkdir()
    (place / "halfstep").write_text("in the way", encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(c_compiler.tempfile, "tempdir", str(temporary))
    assert cpu_kernels.available()
    assert "compiled in each process: " in cpu_kernels.describe()
    assert not list(temporary.iterdir())


@needs_compiler
def test_open_cache(cache: Path) -> None:
    """Law: a folder that others can write to is not used: they could put code there."""
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert cpu_kernels.available()
    assert "can be written to by others: chmod 700 it" in cpu_kernels.describe()
    assert not list(cache.iterdir())


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


def test_linked_cache(cache: Path) -> None:
    """Law: a link is not used, wherever it leads."""
    cache.parent.mkdir(parents=True, mode=0o700)
    cache.symlink_to(cache.parent)
    with pytest.raises(c_compiler.NoLibraryError, match="is not a folder of this user"):
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


PROGRAM = """
from halfstep.masters import cpu_kernels as native
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
