"""Writes directories that are complete or absent: a manifest with hashes, a rename.

`manifest.json` holds the size and SHA-256 of every file, further facts, and a seal, the
SHA-256 of all that. Reading rejects a file that does not match, by name. A replacement
that was interrupted is undone by `restore_replaced`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

MANIFEST = "manifest.json"
SCHEMA = 1
PLAIN, SHARDED = "halfstep checkpoint", "halfstep sharded checkpoint"
MODEL = "halfstep model"
"""Values of "format" in a manifest."""

Facts = dict[str, int | str]
"""Size and SHA-256 of a file."""


class CheckpointError(UserError):
    """A checkpoint cannot be read or written; the message names the file and why."""


class CheckpointWriteError(CheckpointError):
    """A checkpoint that could not be written."""

    reason = ""
    """The system's reason, for messages that add to it."""


def write(
    directory: Path,
    format_: str,
    fill: Callable[[Path], Mapping[str, Any]],
    *,
    replace: bool = False,
) -> None:
    """Write a directory that is complete or absent, even after a crash.

    Why: a process may be killed at any byte. Files are written and flushed to disk
    under a temporary name beside the target, then renamed into place. `fill` writes
    files into an empty directory and returns further manifest entries.
    """
    temporary = temporary_path(directory)
    try:
        make_temporary(directory, temporary, replace=replace)
        fields = fill(temporary)
        paths = sorted(path for path in temporary.rglob("*") if not path.is_dir())
        files = {path.relative_to(temporary).as_posix(): digest(path) for path in paths}
        facts = {"format": format_, "files": files, **fields}
        commit(directory, temporary, facts, replace=replace)
    except BaseException as fault:
        # Cleaning up may fail too; report the original error.
        shutil.rmtree(temporary, ignore_errors=True)
        reason = os_reason(fault)
        if reason is None:
            raise
        raise write_error(directory, reason) from fault


def write_error(directory: Path, reason: str) -> CheckpointWriteError:
    """Return the error for a directory that could not be written."""
    error = CheckpointWriteError(
        f"checkpoint {directory} could not be written: {reason}. Fix that, or choose "
        "another place."
    )
    error.reason = reason
    return error


def read_error(
    path: Path, reason: str | None, format_: str | None = PLAIN
) -> CheckpointError:
    """Return the error for a checkpoint, or a file of it, that cannot be read."""
    noun, remedy = _words(format_)
    return CheckpointError(f"{noun} file {path} cannot be read: {reason}. {remedy}")


def _words(format_: str | None) -> tuple[str, str]:
    """Return what a directory of a format is called, and advice if it is damaged."""
    if format_ == MODEL:
        return "model", "Write it again with halfstep train --resume."
    return "checkpoint", "Resume from another checkpoint."


def make_temporary(directory: Path, temporary: Path, *, replace: bool = False) -> None:
    """Make the temporary directory, and remove those of killed processes."""
    remove_leftovers(directory.parent, directory.name, exclusive=False)
    if not replace:
        _check_not_taken(directory)
    temporary.mkdir(parents=True)


def _check_not_taken(directory: Path) -> None:
    if os.path.lexists(directory):
        message = f"{directory} exists; a checkpoint is never written over another."
        raise CheckpointError(message)


def commit(
    directory: Path, temporary: Path, facts: Mapping[str, Any], *, replace: bool = True
) -> None:
    """Write the manifest, flush all files to disk, and rename the directory."""
    manifest: dict[str, Any] = {"schema": SCHEMA, **facts}
    manifest["seal"] = seal(manifest)
    text = json.dumps(manifest, indent=1)
    (temporary / MANIFEST).write_text(text, encoding="utf-8")
    for path in (*temporary.rglob("*"), temporary):
        flush(path)
    rename_into_place(directory, temporary, replace=replace)


def rename_into_place(directory: Path, temporary: Path, *, replace: bool) -> None:
    """Rename a temporary directory into place.

    Why two renames: no system renames over a directory that is not empty. The old
    directory is moved aside, and back if the rename fails; after a kill,
    `restore_replaced` moves it back.
    """
    old = temporary_path(directory, "old")
    try:
        if replace and os.path.lexists(directory):
            remove(old)
            directory.rename(old)
        temporary.rename(directory)
    except OSError:
        if not replace:
            _check_not_taken(directory)
        elif not os.path.lexists(directory):
            with contextlib.suppress(OSError):
                old.rename(directory)
        raise
    flush(directory.parent)
    remove(old)


def read(directory: Path, format_: str | None = None) -> dict[str, Any]:
    """Return a directory's manifest after validation; no other file is read."""
    path = directory / MANIFEST
    noun, remedy = _words(format_)
    try:
        # Reading a pipe of that name would block.
        text = path.read_bytes() if _is_file(path) else None
        manifest = None if text is None else json.loads(text.decode())
    except OSError as error:
        raise read_error(path, os_reason(error), format_) from error
    except (ValueError, RecursionError) as error:
        message = f"{noun} file {path} is damaged: it is not valid JSON."
        raise CheckpointError(message) from error
    if text is None:
        message = f"{directory} is not a {format_ or PLAIN}: it has no {MANIFEST}."
        if format_ == MODEL:
            message += f" {remedy}"
        raise CheckpointError(message)
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    formats = {PLAIN, SHARDED} if format_ is None else {format_}
    if not isinstance(manifest, dict) or schema != SCHEMA:
        message = f"{path} has schema {schema!r}; this halfstep reads schema {SCHEMA}."
    elif manifest.get("seal") != seal(manifest):
        message = (
            f"{noun} file {path} is damaged: its seal does not match its content. "
            f"{remedy}"
        )
    elif manifest.get("format") not in formats:
        message = (
            f"{directory} is not a {format_ or PLAIN}: {MANIFEST} says it is a "
            f"{manifest.get('format')}."
        )
    elif not _lists_files(manifest) or not isinstance(manifest.get("notes"), dict):
        message = f"{path} was not written by halfstep: it lists no files, or no notes."
    else:
        return manifest
    raise CheckpointError(message)


def verify(
    directory: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None
) -> None:
    """Compare files with the sizes and hashes in the manifest."""
    format_ = manifest.get("format")
    noun, remedy = _words(format_)
    for name in manifest["files"] if names is None else names:
        path, expected = directory / name, manifest["files"][name]
        try:
            actual = digest(path) if _is_file(path) else None
        except OSError as error:
            raise read_error(path, os_reason(error), format_) from error
        if actual is None:
            message = f"{noun} {directory} has no {name}; it is incomplete. {remedy}"
            raise CheckpointError(message)
        if actual["bytes"] != expected["bytes"]:
            raise CheckpointError(
                f"{noun} file {path} is truncated or altered: {actual['bytes']} "
                f"bytes, its manifest says {expected['bytes']}. {remedy}"
            )
        if actual["sha256"] != expected["sha256"]:
            raise CheckpointError(
                f"{noun} file {path} is damaged: its SHA-256 is not the one in "
                f"{MANIFEST}. {remedy}"
            )


def os_reason(error: BaseException | None) -> str | None:
    """Return in words why something could not be written or read, or None.

    Why: safetensors (with the errno in its message) and torch.save raise other
    exceptions instead of `OSError`.

    Example:
        >>> os_reason(OSError(28, "No space left on device"))
        'No space left on device'
        >>> os_reason(KeyError("a"))
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if type(error).__name__ == "SafetensorError":
        number = re.search(r"os error (\d+)", str(error))
        return os.strerror(int(number[1])) if number else str(error)
    # From torch.save, when writing to its file failed.
    if isinstance(error, RuntimeError):
        return os_reason(error.__cause__ or error.__context__)
    return None


def temporary_path(directory: Path, purpose: str = "part") -> Path:
    """Return a temporary name for a directory, specific to this process."""
    return directory.with_name(f".{directory.name}.{purpose}-{os.getpid()}")


def remove_leftovers(parent: Path, name: str = "", *, exclusive: bool = True) -> None:
    """Remove temporary files of killed processes, for one name or for all.

    Those of living processes stay, unless `exclusive`: no other program writes here.
    """
    # A directory that was moved aside may be the only copy.
    restore_replaced(parent, name, exclusive=exclusive)
    for path, _, _ in _leftovers(parent, name, exclusive=exclusive):
        remove(path)


def restore_replaced(parent: Path, name: str = "", *, exclusive: bool = True) -> None:
    """Move directories back whose replacement was interrupted by a kill."""
    for path, owner, purpose in _leftovers(parent, name, exclusive=exclusive):
        if purpose == "old" and not os.path.lexists(parent / owner):
            try:
                path.rename(parent / owner)
            except OSError:
                # Another process may have moved it back already.
                if not os.path.lexists(parent / owner):
                    raise


def _leftovers(
    parent: Path, name: str, *, exclusive: bool
) -> list[tuple[Path, str, str]]:
    """Return (temporary directory, its target's name, its purpose) triples."""
    pattern = re.compile(rf"\.({re.escape(name) or '.+'})\.(part|old|gone)-(\d+)")
    try:
        matches = [(path, pattern.fullmatch(path.name)) for path in parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        (path, match[1], match[2])
        for path, match in matches
        if match and (exclusive or not _is_alive(int(match[3])))
    ]


def _is_alive(number: int) -> bool:
    """Return whether another process of this machine has this PID."""
    if os.name == "nt" or number == os.getpid():
        return False  # On Windows os.kill would end the process
    try:
        os.kill(number, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)  # it is another user's
    return True


def discard(directory: Path) -> None:
    """Delete a directory so that a kill midway leaves nothing under its name."""
    temporary = temporary_path(directory, "gone")
    directory.rename(temporary)
    remove(temporary)


def remove(path: Path) -> None:
    """Remove a directory, file or link if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def digest(path: Path) -> Facts:
    """Return a file's size and SHA-256."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


def seal(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest's other entries."""
    facts = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # Windows cannot open directories; renames are durable
    # Windows cannot flush a file that is open for reading only.
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_file(path: Path) -> bool:
    """Return whether a file exists; `Path.is_file` gives False if a disk fails."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _lists_files(manifest: Mapping[str, Any]) -> bool:
    """Return whether a manifest lists only files within its own directory."""
    files = manifest.get("files")
    return isinstance(files, dict) and all(
        name != MANIFEST
        and all(re.fullmatch(r"(?!\.\.?$)[^/\\]+", part) for part in name.split("/"))
        and isinstance(facts, dict)
        and facts.keys() == {"bytes", "sha256"}
        for name, facts in files.items()
    )
