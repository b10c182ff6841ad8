"""Compilers that do what a test wants, and a cache of its own for each test.

In: nothing. Out: scripts to name as the compiler, and the fixture `cache`.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from halfstep.masters import c_compiler, cpu_kernels

if TYPE_CHECKING:
    from pathlib import Path

REAL = next(
    (path for name in c_compiler.DEFAULT_COMPILERS if (path := shutil.which(name))),
    None,
)
needs_compiler = pytest.mark.skipif(REAL is None, reason="no C compiler here")


@pytest.fixture(autouse=True, name="cache")
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and nothing known from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(c_compiler.VARIABLE, raising=False)
    fresh = cpu_kernels._kernels.__wrapped__
    monkeypatch.setattr(cpu_kernels, "_kernels", fresh)
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
