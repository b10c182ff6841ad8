"""Compiling on the user's machine: which compiler, what is refused, what is said."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compilers import REAL, compiled, counting, fake, needs_compiler, own_cache, script

from halfstep.errors import UserError
from halfstep.masters import c_compiler, cpu_kernels

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["own_cache"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are for POSIX")


@needs_compiler
def test_described(cache: Path) -> None:
    """Law: kernels say what compiled them, and whose threads they use."""
    assert cpu_kernels.available()
    assert cpu_kernels.describe().startswith("compiled with ")
    assert cpu_kernels.describe().endswith("threads of torch's OpenMP") or (
        cpu_kernels.runtime() is None
    )
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_compiler
def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where torch brings no OpenMP, that is said."""
    monkeypatch.setattr(cpu_kernels, "runtime", lambda: None)
    assert cpu_kernels.describe().endswith("one thread, as torch has no OpenMP")


NO = "no such program"
NOT_FOUND = (
    f"no C compiler found (mycc -m64: {NO}; cc: {NO}; gcc: {NO}; clang: {NO}): "
    "set HALFSTEP_COMPILER"
)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({c_compiler.VARIABLE: "none"}, "HALFSTEP_COMPILER=none"),
        ({"CC": "mycc -m64", "PATH": ""}, NOT_FOUND),
        # A compiler that the user names is not replaced by another in silence.
        (
            {c_compiler.VARIABLE: "/no/such/cc"},
            "HALFSTEP_COMPILER=/no/such/cc: no such program",
        ),
        (
            {c_compiler.VARIABLE: 'gcc "-O2'},
            'HALFSTEP_COMPILER=gcc "-O2: No closing quotation',
        ),
    ],
)
def test_reasons(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str
) -> None:
    """Law: without a compiler there are no kernels, and the reason is reported."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not cpu_kernels.available()
    assert cpu_kernels.describe() == f"not compiled: {why}"
    with pytest.raises(UserError, match=re.escape(why)):
        cpu_kernels.check_finite([torch.ones(3)], norm=False)


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
    monkeypatch.setenv(c_compiler.VARIABLE, fake(tmp_path, compiling))
    assert not cpu_kernels.available()
    assert cpu_kernels.describe().startswith("not compiled: ")
    assert said in cpu_kernels.describe()
    assert "\n" not in cpu_kernels.describe()


GARBAGE = 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"'


@needs_compiler
@pytest.mark.parametrize(
    ("source", "why"),
    [
        (None, "not compiled: "),
        ("int other;\n", "halfstep_update"),
        (
            "void halfstep_update(){} int halfstep_check_finite(){return 0;}\n",
            "not compiled: what it compiled does not compute as it should",
        ),
    ],
    ids=["garbage", "missing functions", "wrong results"],
)
def test_libraries_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: Path,
    source: str | None,
    why: str,
) -> None:
    """Law: what cannot be loaded, or computes something else, is a reason, not kept."""
    compiling = GARBAGE
    if source is not None:
        other = tmp_path / "other.c"
        other.write_text(source)
        compiling = f'{GARBAGE}; exec {REAL} -shared -fPIC -o "$2" {other}'
    monkeypatch.setenv(c_compiler.VARIABLE, fake(tmp_path, compiling))
    assert not cpu_kernels.available()
    assert why in cpu_kernels.describe()
    assert not list(cache.iterdir())


def impatient(monkeypatch: pytest.MonkeyPatch, begun: Path) -> None:
    """Let patience end as soon as a program has written into a file."""
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
        f'exec {REAL} "$@"'
    )
    monkeypatch.setenv(c_compiler.VARIABLE, fake(tmp_path, picky))
    assert cpu_kernels.describe().startswith("compiled with fakecc 1.0, ")


@needs_compiler
@pytest.mark.parametrize("variable", ["CC", c_compiler.VARIABLE])
def test_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    """Law: a variable may hold more than a name, as with ccache; blank is not set."""
    compiler, log = counting(tmp_path)
    monkeypatch.setenv(variable, f"env {compiler}")
    assert cpu_kernels.available()
    assert compiled(log) == 1
    monkeypatch.setenv(variable, " ")
    assert c_compiler.find().command[0] == REAL


HARMLESS = """
import sys
from halfstep.masters import c_compiler as build, cpu_kernels as native
print(native.describe(), build.flushes_subnormals(), sep="|")
"""


@needs_compiler
@pytest.mark.parametrize(
    "words",
    [
        "-fsanitize=address",
        "-Ofast",
        *(
            pytest.param(part, marks=pytest.mark.slow)  # of the one above
            for part in ("-ffast-math", "-funsafe-math-optimizations")
        ),
    ],
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


FLUSHING = """
#include <xmmintrin.h>
__attribute__((constructor)) static void harm(void) {
    _mm_setcsr(_mm_getcsr() | 0x8040);
}
"""


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets a register of x86")
def test_flushing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Law: a library that flushes subnormals is refused, and what it did undone."""
    other = tmp_path / "harm.c"
    other.write_text(FLUSHING, encoding="utf-8")
    monkeypatch.setenv(c_compiler.VARIABLE, f"{REAL} {other}")
    assert "makes zero of subnormal numbers" in cpu_kernels.describe()
    assert not c_compiler.flushes_subnormals()


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
    with pytest.raises(
        c_compiler.NoLibraryError, match="does not compute as it should"
    ):
        job.load_or_compile(c_compiler.find())


def test_runtime_is_torchs() -> None:
    """Law: where torch runs OpenMP, its runtime is found, and answers."""
    found = cpu_kernels.runtime()
    if "OpenMP" not in torch.__config__.parallel_info().split("backend:")[-1]:
        pytest.skip("torch has no OpenMP here")
    assert found is not None
    assert ctypes.CFUNCTYPE(ctypes.c_int)(found[2])() == 1
