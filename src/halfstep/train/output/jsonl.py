"""JSON objects, one a line, in a file of which only the last line can be torn."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
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


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records; a last line torn by a crash is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
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
