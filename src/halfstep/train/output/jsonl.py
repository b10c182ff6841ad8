"""Reads and writes JSON lines; tolerates a last line torn by a crash."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


def finite(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    """Replace inf and NaN, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def to_lines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the records as JSON lines."""
    return "".join(
        json.dumps(finite(record), allow_nan=False) + "\n" for record in records
    )


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without a last line torn by a crash."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    # After the last newline comes nothing, or a torn line.
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
