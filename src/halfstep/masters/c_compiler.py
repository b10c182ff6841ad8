"""C compiled on the user's machine, once, and kept for the processes after this one.

In: a C file and the user's compiler. Out: the loaded library, or the reason why there
is none; nothing here fails for a machine without a compiler, and nothing is silent.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE = "HALFSTEP_COMPILER"
"""Names the compiler, as CC does; "none" does without compiled kernels."""

DEFAULT_COMPILERS = ("cc", "gcc", "clang")

FLAGS = (
    "-std=gnu11",
    "-O3",
    # CC may hold words that change results, or that end or change the whole process.
    "-fno-sanitize=all",
    "-fno-fast-math",
    "-fno-unsafe-math-optimizations",
    "-fno-finite-math-only",
    # a * b + c in two roundings, as torch's arithmetic is written down.
    "-ffp-contract=off",
    # Without it sqrtf may set errno, and stays scalar.
    "-fno-math-errno",
    "-fopenmp-simd",
    "-fPIC",
    "-shared",
)

NATIVE_FLAGS = (("-march=native",), ("-mcpu=native",), ())
"""Words for this very processor, as compilers know them; the first that works."""

COMPILE_TIMEOUT_S = 30.0
"""Seconds after which a compiler counts as stuck."""
VERSION_TIMEOUT_S = 10.0
"""Seconds in which it is to say its version."""

_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = {
    *("model name", "flags"),
    *("Features", "CPU implementer", "CPU part", "CPU variant"),
    # POWER, RISC-V, s390.
    *("cpu", "machine", "isa", "uarch", "features"),
}
_MAX_ERROR_CHARS = 160
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NoLibraryError(Exception):
    """Why there is no library, for people."""


@dataclass(frozen=True)
class Compiler:
    """A command and how it names itself."""

    command: tuple[str, ...]
    version: str


def find() -> Compiler:
    """Return the user's compiler.

    Raises:
        NoLibraryError: If there is none, or the user wants none.
    """
    requested = os.environ.get(VARIABLE, "").strip()
    if requested == "none":
        message = f"{VARIABLE}=none"
        raise NoLibraryError(message)
    if os.name != "posix":
        message = f"no compiled kernels on {platform.system()}"
        raise NoLibraryError(message)
    if requested:
        return _probe_compiler(_words(VARIABLE, requested), f"{VARIABLE}={requested}")
    cc_command = _words("CC", os.environ.get("CC", ""))
    candidates = [cc_command] if cc_command else []
    why = []
    for command in [*candidates, *((name,) for name in DEFAULT_COMPILERS)]:
        try:
            return _probe_compiler(command, shlex.join(command))
        except NoLibraryError as error:
            why.append(str(error))
    message = f"no C compiler found ({'; '.join(why)}): set {VARIABLE}"
    raise NoLibraryError(message)


def _words(variable: str, value: str) -> tuple[str, ...]:
    """Split a variable as a shell would."""
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        message = f"{variable}={value}: {error}"
        raise NoLibraryError(message) from error


def _probe_compiler(command: tuple[str, ...], name: str) -> Compiler:
    program = shutil.which(command[0])
    if program is None:
        message = f"{name}: no such program"
        raise NoLibraryError(message)
    output = _run((program, *command[1:], "--version"), name, VERSION_TIMEOUT_S)
    return Compiler((program, *command[1:]), output.partition("\n")[0].strip())


def _run(command: tuple[str, ...], name: str, timeout_s: float) -> str:
    """Return what a command says.

    Raises:
        NoLibraryError: If it fails, or does not end.
    """
    try:
        output, errors, status = _output(command, timeout_s)
    except subprocess.TimeoutExpired as error:
        message = f"{name}: no answer in {timeout_s:g} s"
        raise NoLibraryError(message) from error
    except OSError as error:
        message = f"{name}: {error}"
        raise NoLibraryError(message) from error
    if status:
        lines = (errors.strip() or output.strip()).splitlines() or ["nothing"]
        # Of a compiler's complaints the first error is the one that matters.
        line = next((line for line in lines if "error" in line), lines[-1])
        message = (
            f"{name} failed with status {status}: {line.strip()[:_MAX_ERROR_CHARS]}"
        )
        raise NoLibraryError(message)
    return output


def _output(command: tuple[str, ...], timeout_s: float) -> tuple[str, str, int]:
    """Return the output of a command, its complaints, and its status."""
    # The user's own compiler, as make would call it.
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            # With what it has started: ccache, cc1.
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return output, errors, process.returncode


def cpu_features() -> list[str]:
    """Return what the system says of its processors, each line once."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    cpu_lines = (
        line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS
    )
    return list(dict.fromkeys(cpu_lines))


def processor() -> str:
    """Return what tells this processor from others for which code may be compiled."""
    return "\n".join([platform.machine(), platform.processor(), *cpu_features()])


def flushes_subnormals() -> bool:
    """Say whether this thread takes subnormal numbers for zero."""
    return sys.float_info.min / 2 == 0


def cache_dir() -> Path:
    """Return the folder in the user's cache that compiled kernels are kept in."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "halfstep" / "compiled"


def private_dir(directory: Path) -> Path:
    """Make a folder that nobody else can write to or exchange.

    Why: whoever can put a library there runs code as this user.

    Returns:
        The folder without links: what was looked at is what will be used.

    Raises:
        NoLibraryError: If it cannot be made, or is not this user's alone.
    """
    try:
        # With parents=True the mode would be of the last one alone.
        for path in (*reversed(directory.parents), directory):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        facts = directory.lstat()
        directory = directory.resolve(strict=True)
        parents = [(parent, parent.stat()) for parent in directory.parents]
    except (OSError, RuntimeError) as error:
        message = f"{directory}: {error}"
        raise NoLibraryError(message) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        message = f"{directory} is not a folder of this user"
        raise NoLibraryError(message)
    if facts.st_mode & _WRITABLE_BY_OTHERS:
        message = f"{directory} can be written to by others: chmod 700 it"
        raise NoLibraryError(message)
    if not os.access(directory, os.W_OK | os.X_OK):
        message = f"{directory} cannot be written to"
        raise NoLibraryError(message)
    for parent, facts in parents:
        if facts.st_uid not in {0, os.getuid()}:
            message = f"{parent}, above the cache, belongs to another user"
            raise NoLibraryError(message)
        # As in /tmp, nobody moves there what is another's.
        if facts.st_mode & _WRITABLE_BY_OTHERS and not facts.st_mode & stat.S_ISVTX:
            message = f"{parent}, above the cache, is open to others: chmod go-w it"
            raise NoLibraryError(message)
    return directory


@contextmanager
def _temporary_file(directory: Path) -> Iterator[Path]:
    """Give a name of this process alone, and remove what is left under it."""
    handle, name = tempfile.mkstemp(".part", dir=directory)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


@dataclass(frozen=True)
class CompiledLibrary:
    """What is to be compiled, and how to know that it works."""

    source: Path
    """The C file; headers beside it count as part of it."""
    works: Callable[[ctypes.CDLL], bool]
    """Tries the loaded library on something known."""
    extra_flags: tuple[str, ...] = ()
    """More flags."""

    def cache_key(self, compiler: Compiler) -> str:
        """Return a name for everything that the library depends on."""
        parts = [
            compiler.version,
            *compiler.command,
            *FLAGS,
            *self.extra_flags,
            *(word for words in NATIVE_FLAGS for word in words),
            processor(),
        ]
        files = sorted([self.source, *self.source.parent.glob("*.h")])
        texts = [_digest(file.read_bytes()) for file in files]
        return _digest("\0".join(parts + texts).encode(errors="surrogateescape"))

    def compile(self, compiler: Compiler, directory: Path) -> Path:
        """Compile into a folder of this process; return the library.

        Raises:
            NoLibraryError: If the compiler fails.
        """
        out = directory / "kernels.so"
        name, why = shlex.join(compiler.command), None
        # Where the cache cannot tell processors apart, the code must run on each.
        for own in NATIVE_FLAGS if cpu_features() else ((),):
            words = (
                *FLAGS,
                *self.extra_flags,
                *own,
                str(self.source),
                "-o",
                str(out),
                "-lm",
            )
            try:
                _run((*compiler.command, *words), name, COMPILE_TIMEOUT_S)
            except NoLibraryError as error:
                if isinstance(error.__cause__, subprocess.TimeoutExpired):
                    raise
                why = why or error
            else:
                if out.exists():
                    return out
                message = f"{name} wrote nothing"
                raise NoLibraryError(message)
        raise NoLibraryError(str(why)) from why

    def store(self, built: Path, compiler: Compiler, directory: Path) -> Path:
        """Put a library into the cache, whole or not at all; return where.

        Why: a name that states its content needs no second file to prove it, so any
        number of processes may race, and a damaged file is known before it is loaded.
        """
        data = built.read_bytes()
        with _temporary_file(directory) as part:
            part.write_bytes(data)
            return part.replace(
                directory / f"{self.cache_key(compiler)}-{_digest(data)}.so"
            )

    def load(self, file: Path) -> ctypes.CDLL:
        """Load a library and try it.

        Raises:
            NoLibraryError: If it cannot be loaded, or computes something else.
        """
        flushed = flushes_subnormals()
        try:
            library = ctypes.CDLL(str(file))
            if flushes_subnormals() != flushed:
                # Start-up code that some words of CC link in did it.
                torch.set_flush_denormal(flushed)
                message = "what it compiled makes zero of subnormal numbers everywhere"
                raise NoLibraryError(message)
            works = self.works(library)
        except (OSError, AttributeError, MemoryError) as error:
            message = f"{file.name}: {error}"
            raise NoLibraryError(message) from error
        if not works:
            message = "what it compiled does not compute as it should"
            raise NoLibraryError(message)
        return library

    def load_cached(self, compiler: Compiler, directory: Path) -> ctypes.CDLL | None:
        """Return the library that an earlier process left; remove damaged ones."""
        for file in sorted(directory.glob(f"{self.cache_key(compiler)}-*.so")):
            with suppress(OSError, NoLibraryError):
                if file.stem.endswith(_digest(file.read_bytes())):
                    return self.load(file)
            with suppress(OSError):
                file.unlink()
        return None

    def load_or_compile(self, compiler: Compiler) -> tuple[ctypes.CDLL, str]:
        """Return the library, and a remark for people where it is not kept.

        Raises:
            NoLibraryError: If there is no way to have one.
        """
        directory = None
        try:
            directory = private_dir(cache_dir())
            cached = self.load_cached(compiler, directory)
            if cached is not None:
                return cached, ""
        except (NoLibraryError, OSError, RuntimeError) as error:
            directory, why = None, str(error)
        try:
            scratch = tempfile.TemporaryDirectory(
                prefix="halfstep-", ignore_cleanup_errors=True
            )
        except OSError as error:
            raise NoLibraryError(str(error)) from error
        with scratch as name:
            built = self.compile(compiler, Path(name))
            if directory is not None:
                try:
                    self.store(built, compiler, directory)
                    cached = self.load_cached(compiler, directory)
                    if cached is not None:
                        return cached, ""
                    why = f"{directory} gives back something else"
                except OSError as error:
                    why = str(error)
            # A loaded library stays in memory when its file is gone.
            return self.load(built), f"compiled in each process: {why}"
