"""What a run writes down: settings, and metrics of which only the last can be torn."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

from halfstep.checkpoint import atomic_directory
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from io import FileIO
    from pathlib import Path


def finite(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    """Return a value for JSON, which has no inf and no NaN: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the lines of some records."""
    return "".join(
        json.dumps(finite(record), allow_nan=False) + "\n" for record in records
    )


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line; on a full disk half of it may be there, at the end.

    Why: whoever goes on, in this process or another, takes a line without an end for
    one that was never written. So half a line is removed before the next is added.
    """
    data = memoryview(to_lines([record]).encode())
    with path.open("a+b", buffering=0) as file:
        _cut_torn_end(file)
        while data:
            data = data[file.write(data) :]


def _cut_torn_end(file: FileIO) -> None:
    end = file.seek(0, os.SEEK_END)
    if not end:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records; a last line torn by a crash is left out.

    Raises:
        UserError: If any other line is damaged, or the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        message = f"{path} cannot be read: {atomic_directory.os_reason(error)}."
        raise UserError(message) from error
    records = []
    # What follows the last line end is empty, or torn.
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            record["step"] + 0
        except (ValueError, TypeError, KeyError) as error:
            message = (
                f"{path} line {number} is damaged: it is not a record of a step. "
                "Remove the line, or start anew with another --out."
            )
            raise UserError(message) from error
        records.append(record)
    return records


def settings(path: Path) -> dict[str, Any]:
    """Return the settings of the run whose `config.json` this is.

    Raises:
        UserError: If there is no run, or its settings are damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"{path.parent} holds no run; it has no config.json."
        raise UserError(message) from error
    except OSError as error:
        message = f"{path} cannot be read: {atomic_directory.os_reason(error)}."
        raise UserError(message) from error
    except ValueError as error:
        message = f"{path} is damaged: it is not valid JSON."
        raise UserError(message) from error
    if not isinstance(content, dict):
        message = f"{path} is damaged: it holds no settings."
        raise UserError(message)
    return content


def check_is_run(path: Path) -> None:
    """Refuse to replace what no run of ours has written.

    Raises:
        UserError: If this is not the `config.json` of one.
    """
    try:
        ours = {"model", "level", "dtype", "out"} <= settings(path).keys()
    except UserError:
        ours = False
    if not ours:
        message = (
            f"--overwrite: {path.parent} holds files of these names that are not a "
            "halfstep run's; choose another --out."
        )
        raise UserError(message)


def check_exists(path: Path) -> None:
    """Refuse to write where the run did not begin.

    Why: where a disk was mounted there is an empty folder once it is gone, and what is
    written into that is lost to the run.

    Raises:
        UserError: If this, the run's `config.json`, is gone.
        OSError: If the disk does not tell.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        message = (
            f"{path.parent} is no longer the folder of this run: its config.json is "
            "gone. Is its disk? Mend that, then go on with --resume."
        )
        raise UserError(message) from error
