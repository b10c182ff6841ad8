"""Settings of a run as a file of TOML, a setting a line."""

from __future__ import annotations

import datetime as dt
import re
import reprlib
import tomllib
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting.table import write_text
from halfstep.train.config import (
    SETTINGS,
    TrainConfig,
    check,
    flag_of,
    has_type,
    nearest_setting,
    type_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODES = ("check", "resume", "overwrite")
"""Flags of `halfstep train` that say what to do, and are no settings of a run."""
_EXAMPLE = 'model = "tiny"'
_HEADER = """\
# The settings of a run of `halfstep train`, every default resolved. What is not here
# was not set: all rows, all parameters, a fine-tuned model's own dropout.
# Run it again with
#     halfstep train --config THIS_FILE --out ANOTHER_FOLDER
"""
_LOCATION = re.compile(
    r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL
)
_TOML_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text in quotes",
    list: "an array",
    dict: "a table",
    dt.datetime: "a date",
    dt.date: "a date",
    dt.time: "a time",
}


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings that stand in a file, those left out left out.

    Raises:
        UserError: If the file cannot be read, or a line in it is no setting.
    """
    text = _text(path)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{path}{_toml_error(str(error), text)}"
        raise UserError(message) from None
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        fault = _fault(key, name, value)
        if name in settings:
            fault = f"{key!r} is set already, as {name!r} with - for _; keep one"
        if not fault and type_of(SETTINGS[name]) is float:
            value = float(str(value))  # noqa: PLW2901 - a whole number may be vast
        if not fault:
            fault = _out_of_range(name, value)
        if fault:
            message = f"{path} line {_line_of(key, text)}: {fault}."
            raise UserError(message)
        settings[name] = value
    return settings


def _text(path: Path) -> str:
    """Return a file's text, line ends as Unix has them."""
    try:
        data = path.read_bytes()
    except OSError as error:
        message = (
            f"--config {path} cannot be read: {error.strerror}; give a TOML file of "
            "settings."
        )
        raise UserError(message) from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = (
            f"{path} line {line} is not UTF-8: byte {data[error.start]:#04x} at offset "
            f"{error.start}; save it as UTF-8."
        )
        raise UserError(message) from None


def _toml_error(parser_message: str, text: str) -> str:
    """Return where text is not TOML, and why, from what the parser said."""
    match = _LOCATION.fullmatch(parser_message)
    why, line, column = match.groups() if match else (parser_message, None, None)
    where = f" line {line} column {column}" if line else ""
    if match and not line:
        where = f" line {text.rstrip().count(chr(10)) + 1}"
    return f"{where}: broken TOML: {why}; write a setting a line, such as {_EXAMPLE}."


def _fault(key: str, name: str, value: object) -> str:
    """Return why a key with this value is no setting; nothing if it is one."""
    if name in MODES:
        return f"{key!r} is no setting of a run; type --{name} on the command line"
    if name not in SETTINGS and isinstance(value, dict):
        return f"{key!r} is a table; write settings without tables, such as {_EXAMPLE}"
    if name not in SETTINGS:
        near = nearest_setting(name)
        advice = f"nearest: {near}" if near else "see halfstep train --help"
        return f"{key!r} is not a setting; {advice}"
    if not has_type(SETTINGS[name], value):
        actual, expected = (
            _TOML_TYPE_NAMES[kind] for kind in (type(value), type_of(SETTINGS[name]))
        )
        return f"{key} is {actual}, {reprlib.repr(value)}; it must be {expected}"
    return ""


def _out_of_range(name: str, value: object) -> str:
    """Return why a setting cannot have a value of its type; nothing if it can."""
    try:
        check(SETTINGS[name], value)
    except UserError as error:
        return str(error).removesuffix(".")
    return ""


def _line_of(key: str, text: str) -> int:
    """Return the line in which a key of TOML stands.

    Why: the parser does not tell. A key is in the first lines that parse and hold it,
    and begins after the last that parse and do not.
    """
    lines = text.split("\n")
    begin = end = 0
    while True:
        end += 1
        try:
            parsed = tomllib.loads("\n".join(lines[:end]))
        except ValueError:
            continue  # in the middle of a value of several lines
        if key in parsed:
            return begin + 1
        begin = end


def write_resolved(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write settings as TOML which `--config` reads back to the same `TrainConfig`.

    Args:
        path: File to write or to replace, in one piece.
        mapping: Settings by name; one that is `None` is left out.

    Raises:
        UserError: If the settings are none, or the file cannot be written.
    """
    import tomli_w

    settings = TrainConfig(**mapping).data_dict()
    non_null = {name: value for name, value in settings.items() if value is not None}
    for name, value in non_null.items():
        if not _is_utf8_encodable(value):
            message = (
                f"{flag_of(SETTINGS[name])} {value!r} cannot stand in {path}, which is "
                "UTF-8: give it a name without bytes of other encodings."
            )
            raise UserError(message)
    try:
        write_text(path, _HEADER + tomli_w.dumps(non_null))
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}."
        raise UserError(message) from error


def _is_utf8_encodable(value: object) -> bool:
    """Say whether a word holds no half of a surrogate pair."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
