"""Compiles a C file with the user's compiler and caches the library.

A missing compiler is not an error: `NoLibraryError` carries the reason, which is always
reported.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from halfstep.machine import cpu

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "HALFSTEP_COMPILER"
"""Environment variable: the compiler command, as in CC; "none": do not compile."""

DEFAULT_COMPILERS = ("cc", "gcc", "clang")

FLAGS = (
    "-std=gnu11",
    "-O3",
    # Override flags in CC that change results, or the whole process.
    "-fno-sanitize=all",
    "-fno-fast-math",
    "-fno-unsafe-math-optimizations",
    "-fno-finite-math-only",
    # Round a * b + c twice, as torch's arithmetic is specified.
    "-ffp-contract=off",
    # Otherwise sqrtf may set errno and is not vectorized.
    "-fno-math-errno",
    "-fopenmp-simd",
    "-fPIC",
    "-shared",
)

NATIVE_FLAGS = ("-march=native", "-mcpu=native", "")
"""Target this processor; the first flag that compiles is used."""

COMPILE_TIMEOUT_S = 30.0
VERSION_TIMEOUT_S = 10.0

_CPU_FIELDS = (
    *("model name", "flags"),
    *("Features", "CPU implementer", "CPU part", "CPU variant"),
    # POWER, RISC-V, s390.
    *("cpu", "machine", "isa", "uarch", "features"),
)
_MAX_ERROR_CHARS = 160
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NoLibraryError(Exception):
    """There is no compiled library; the message says why."""


def _fail(message: str, cause: BaseException | None = None) -> NoReturn:
    raise NoLibraryError(message) from cause


@dataclass(frozen=True)
class Compiler:
    """A compiler command and its version line."""

    command: tuple[str, ...]
    version: str


def find() -> Compiler:
    """Return the user's compiler, or raise `NoLibraryError` with the reason."""
    requested = os.environ.get(VARIABLE, "").strip()
    if requested == "none":
        _fail(f"{VARIABLE}=none")
    if os.name != "posix":
        _fail(f"no compiled kernels on {platform.system()}")
    if requested:
        return _probe(requested, f"{VARIABLE}={requested}")
    reasons = []
    for command in (os.environ.get("CC", "").strip(), *DEFAULT_COMPILERS):
        try:
            if command:
                return _probe(command, command)
        except NoLibraryError as error:
            reasons.append(str(error))
    return _fail(f"no C compiler found ({'; '.join(reasons)}): set {VARIABLE}")


def _probe(text: str, name: str) -> Compiler:
    """Return the compiler for a command line, which may contain flags."""
    try:
        program, *flags = shlex.split(text)
    except ValueError as error:
        _fail(f"{name}: {error}", error)
    path = shutil.which(program)
    if path is None:
        _fail(f"{name}: no such program")
    output = _run((path, *flags, "--version"), name, VERSION_TIMEOUT_S)
    return Compiler((path, *flags), output.partition("\n")[0].strip())


def _run(command: tuple[str, ...], name: str, timeout_s: float) -> str:
    """Return the standard output of a command; raise `NoLibraryError` if it fails."""
    try:
        # The user's own compiler, run as make would run it.
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
                # Also kill its child processes (ccache, cc1).
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        _fail(f"{name}: no answer in {timeout_s:g} s", error)
    except OSError as error:
        _fail(f"{name}: {error}", error)
    if process.returncode:
        lines = (errors.strip() or output.strip()).splitlines() or ["nothing"]
        # The first line with "error" is the most useful one.
        line = next((line for line in lines if "error" in line), lines[-1])
        line = line.strip()[:_MAX_ERROR_CHARS]
        _fail(f"{name} failed with status {process.returncode}: {line}")
    return output


def cpu_features() -> list[str]:
    """Return the facts about the processor that a compiler's output may depend on."""
    facts = cpu.facts()
    return [f"{name}: {facts[name]}" for name in _CPU_FIELDS if name in facts]


def flushes_subnormals() -> bool:
    """Return whether this thread flushes subnormal numbers to zero."""
    return sys.float_info.min / 2 == 0


def private_dir(directory: Path) -> Path:
    """Make a directory that no other user can write to or replace; return it resolved.

    Why: a user who can write a library there runs code as this user. Callers must use
    the returned path, which is the one that was checked.
    """
    try:
        # mkdir(parents=True) applies the mode only to the last directory.
        for path in (*reversed(directory.parents), directory):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        facts = directory.lstat()
        directory = directory.resolve(strict=True)
        parents = [(parent, parent.stat()) for parent in directory.parents]
    except (OSError, RuntimeError) as error:
        _fail(f"{directory}: {error}", error)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        _fail(f"{directory} is not a folder of this user")
    if facts.st_mode & _WRITABLE_BY_OTHERS:
        _fail(f"{directory} can be written to by others: chmod 700 it")
    if not os.access(directory, os.W_OK | os.X_OK):
        _fail(f"{directory} cannot be written to")
    for parent, facts in parents:
        if facts.st_uid not in {0, os.getuid()}:
            _fail(f"{parent}, above the cache, belongs to another user")
        # In a sticky directory such as /tmp, only the owner can rename an entry.
        if facts.st_mode & _WRITABLE_BY_OTHERS and not facts.st_mode & stat.S_ISVTX:
            _fail(f"{parent}, above the cache, is open to others: chmod go-w it")
    return directory


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


@dataclass(frozen=True)
class CompiledLibrary:
    """A C file to compile, and a check of the result."""

    source: Path
    works: Callable[[ctypes.CDLL], bool]
    """Runs the loaded library on known values."""

    def cache_key(self, compiler: Compiler) -> str:
        """Return a hash of everything that the compiled library depends on."""
        parts = [compiler.version, *compiler.command, *FLAGS, *NATIVE_FLAGS]
        parts += [platform.machine(), platform.processor(), *cpu_features()]
        parts.append(_digest(self.source.read_bytes()))
        return _digest("\0".join(parts).encode(errors="surrogateescape"))

    def compile(self, compiler: Compiler, directory: Path) -> Path:
        """Compile into a temporary directory; return the library's path."""
        out = directory / "kernels.so"
        name, first_error = shlex.join(compiler.command), None
        # If the CPU is unknown, cached code must run on every CPU of the architecture.
        for native in NATIVE_FLAGS if cpu_features() else ("",):
            flags = (*FLAGS, native) if native else FLAGS
            paths = (str(self.source), "-o", str(out), "-lm")
            try:
                _run((*compiler.command, *flags, *paths), name, COMPILE_TIMEOUT_S)
            except NoLibraryError as error:
                if isinstance(error.__cause__, subprocess.TimeoutExpired):
                    raise
                first_error = first_error or error
                continue
            if not out.exists():
                _fail(f"{name} wrote nothing")
            return out
        return _fail(str(first_error), first_error)

    def store(self, built: Path, compiler: Compiler, directory: Path) -> Path:
        """Add a library to the cache atomically; return its path.

        The file name contains a hash of the content. So no second file is needed to
        validate it, processes may race, and damaged files are detected before loading.
        """
        data = built.read_bytes()
        name = f"{self.cache_key(compiler)}-{_digest(data)}.so"
        handle, part = tempfile.mkstemp(".part", dir=directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            return Path(part).replace(directory / name)
        finally:
            Path(part).unlink(missing_ok=True)

    def load(self, file: Path) -> ctypes.CDLL:
        """Load a library and check that it works."""
        flushed = flushes_subnormals()
        try:
            library = ctypes.CDLL(str(file))
            if flushes_subnormals() != flushed:
                # Some flags in CC link start-up code that enables flush-to-zero.
                torch.set_flush_denormal(flushed)
                _fail("it produced code that flushes subnormal numbers to zero")
            if not self.works(library):
                _fail("it produced code that computes wrong results")
        except (OSError, AttributeError, MemoryError) as error:
            _fail(f"{file.name}: {error}", error)
        return library

    def load_cached(self, compiler: Compiler, directory: Path) -> ctypes.CDLL | None:
        """Return the cached library, or None; delete damaged files."""
        for file in sorted(directory.glob(f"{self.cache_key(compiler)}-*.so")):
            with suppress(OSError, NoLibraryError):
                if file.stem.endswith(_digest(file.read_bytes())):
                    return self.load(file)
            with suppress(OSError):
                file.unlink()
        return None

    def load_or_compile(self, compiler: Compiler) -> tuple[ctypes.CDLL, str]:
        """Return the library, and a note for the user if it could not be cached."""
        directory, remark = None, ""
        try:
            base = Path(os.environ.get("XDG_CACHE_HOME", ""))
            root = base if base.is_absolute() else Path.home() / ".cache"
            directory = private_dir(root / "halfstep" / "compiled")
            cached = self.load_cached(compiler, directory)
            if cached is not None:
                return cached, ""
        except (NoLibraryError, OSError, RuntimeError) as error:
            directory, remark = None, f"compiled in each process: {error}"
        try:
            scratch = tempfile.TemporaryDirectory(
                prefix="halfstep-", ignore_cleanup_errors=True
            )
        except OSError as error:
            _fail(str(error), error)
        with scratch as name:
            built = self.compile(compiler, Path(name))
            # A loaded library stays mapped after its file is deleted.
            library = self.load(built)
            if directory is not None:
                try:
                    self.store(built, compiler, directory)
                except OSError as error:
                    remark = f"compiled in each process: {error}"
        return library, remark
