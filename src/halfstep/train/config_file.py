"""Reads and writes the settings of a run as TOML, one per line."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting.table import write_text
from halfstep.train.config import SETTINGS, TrainConfig, setting_fault, type_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODES = ("check", "resume", "overwrite")
"""Flags of `halfstep train` that select what to do and are not settings."""
_HEADER = """\
# The settings of a run of `halfstep train`, every default resolved. What is not here
# was not set: all rows, all parameters, a fine-tuned model's own dropout.
# Run it again with
#     halfstep train --config THIS_FILE --out ANOTHER_FOLDER
"""


def read_file(path: Path, flag: str = "--config") -> dict[str, Any]:
    """Return the valid settings in a file that a flag names, without defaults."""
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        message = f"{flag} {path} cannot be read: {error.strerror}."
        raise UserError(message) from None
    except (ValueError, RecursionError) as error:
        message = (
            f"{path} is not TOML: {error}; write a setting a line, such as model = "
            '"tiny".'
        )
        raise UserError(message) from None
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        fault = setting_fault(name, value)
        if name in MODES:
            fault = f"{name!r} is no setting of a run; type --{name}"
        elif name in settings:
            fault = f"{name!r} is set twice, with - and with _; keep one"
        if fault:
            message = f"{path}: {fault}."
            raise UserError(message)
        # An integer may be too large for float(), which then raises OverflowError.
        is_float = type_of(SETTINGS[name]) is float
        settings[name] = float(str(value)) if is_float else value
    return settings


def write_resolved(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write settings as TOML that `--config` reads back to the same `TrainConfig`."""
    import tomli_w

    settings = TrainConfig(**mapping).data_dict()
    non_null = {name: value for name, value in settings.items() if value is not None}
    try:
        write_text(path, _HEADER + tomli_w.dumps(non_null))
    except (OSError, UnicodeEncodeError) as error:
        # A name from the command line may contain bytes that are not UTF-8.
        message = f"{path} cannot be written: {error}."
        raise UserError(message) from error
