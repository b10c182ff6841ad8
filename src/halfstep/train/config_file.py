"""Settings of a run as a file of TOML, a setting a line.

In: a file that somebody wrote, or settings. Out: settings by name, each of the right
type and in its range; or a file that reads back to the same.
"""

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
    called,
    check,
    fits,
    kind_of,
    nearest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODES = ("check", "resume", "overwrite")
"""Flags of `halfstep train` that say what to do, and are no settings of a run."""
_EXAMPLE = 'model = "tiny"'
_ON_TOP = """\
# The settings of a run of `halfstep train`, every default resolved. What is not here
# was not set: all rows, all parameters, a fine-tuned model's own dropout.
# Run it again with
#     halfstep train --config THIS_FILE --out ANOTHER_FOLDER
"""
_PLACE = re.compile(
    r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL
)
_IN_WORDS: dict[type, str] = {
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
        message = f"{path}{_place_and_fault(str(error), text)}"
        raise UserError(message) from None
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        fault = _fault(key, name, value)
        if name in found:
            fault = f"{key!r} is set already, as {name!r} with - for _; keep one"
        if not fault and kind_of(SETTINGS[name]) is float:
            value = float(str(value))  # noqa: PLW2901 - a whole number may be vast
        if not fault:
            fault = _out_of_range(name, value)
        if fault:
            message = f"{path} line {_line_of(key, text)}: {fault}."
            raise UserError(message)
        found[name] = value
    return found


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


def _place_and_fault(said: str, text: str) -> str:
    """Return where text is not TOML, and why, from what the parser said."""
    found = _PLACE.fullmatch(said)
    why, line, column = found.groups() if found else (said, None, None)
    place = f" line {line} column {column}" if line else ""
    if found and not line:
        place = f" line {text.rstrip().count(chr(10)) + 1}"
    return f"{place}: broken TOML: {why}; write a setting a line, such as {_EXAMPLE}."


def _fault(key: str, name: str, value: object) -> str:
    """Return why a key with this value is no setting; nothing if it is one."""
    if name in MODES:
        return f"{key!r} is no setting of a run; type --{name} on the command line"
    if name not in SETTINGS and isinstance(value, dict):
        return f"{key!r} is a table; write settings without tables, such as {_EXAMPLE}"
    if name not in SETTINGS:
        near = nearest(name)
        advice = f"nearest: {near}" if near else "see halfstep train --help"
        return f"{key!r} is not a setting; {advice}"
    if not fits(SETTINGS[name], value):
        is_now, right = (
            _IN_WORDS[kind] for kind in (type(value), kind_of(SETTINGS[name]))
        )
        return f"{key} is {is_now}, {reprlib.repr(value)}; it must be {right}"
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
            held = tomllib.loads("\n".join(lines[:end]))
        except ValueError:
            continue  # in the middle of a value of several lines
        if key in held:
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
    kept = {name: value for name, value in settings.items() if value is not None}
    for name, value in kept.items():
        if not _can_be_utf8(value):
            message = (
                f"{called(SETTINGS[name])} {value!r} cannot stand in {path}, which is "
                "UTF-8: give it a name without bytes of other encodings."
            )
            raise UserError(message)
    try:
        write_text(path, _ON_TOP + tomli_w.dumps(kept))
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}."
        raise UserError(message) from error


def _can_be_utf8(value: object) -> bool:
    """Say whether a word holds no half of a surrogate pair."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
