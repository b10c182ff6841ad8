"""Command line parser without abbreviations, with one-line errors and wrapped help."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NoReturn

from halfstep.reporting.table import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A name, spaces, and its description.
_TWO_COLUMNS = re.compile(r"( *\S.*?) {2,}(?=\S)")
# Flags of other programs.
_SYNONYMS = {"--learning-rate": "--lr", "--train": "--data", "--output": "--out"}
_TYPE_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number, such as 0.001 or 1e-3",
}
_HANGING = 4  # extra indent of a description on a line of its own


def print_error(what: object, status: int) -> int:
    """Print an error as one line; return the exit status."""
    line = printable(" ".join(str(what).split()))
    sys.stderr.write(f"halfstep: error: {line}\n")
    return status


class Formatter(argparse.HelpFormatter):
    """Keeps the lines of a description or epilog, and wraps each to the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        del indent  # always 0 at this level
        return "\n".join(
            part for line in text.splitlines() for part in _fit_line(line, width)
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrap(" ".join(text.split()), width)


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text wrapped at spaces, with a first and a subsequent indent."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,  # flags and quoted words contain hyphens
    )


def _fit_line(line: str, width: int) -> Iterable[str]:
    """Return a line wrapped to a width; its second column continues below itself."""
    if len(line) <= width:
        return [line]
    begin = " " * (len(line) - len(line.lstrip()))
    match = _TWO_COLUMNS.match(line)
    if match is None:
        return _wrap(line, width, rest=begin)
    if match.end() <= width // 2:
        return _wrap(line, width, rest=" " * match.end())
    hanging = begin + " " * _HANGING
    return [match[1], *_wrap(line[match.end() :], width, hanging, hanging)]


class Parser(argparse.ArgumentParser):
    """Rejects abbreviations, and suggests the nearest flag or command."""

    def __init__(self, **words: Any) -> None:  # noqa: ANN401 -- argparse's own
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **words)

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line error."""
        sys.exit(print_error(f"{message}; see {self.prog} --help", 2))

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Reject unknown arguments in the subparser, which can suggest flags."""
        parsed, rest = super().parse_known_args(args, namespace)
        if rest:
            flag = next((word for word in rest if word.startswith("-")), "")
            flag = flag.partition("=")[0]
            options = self._option_string_actions
            near = _nearest(flag, options)
            if not flag and "--data" in options:
                near = f"; a file of texts is given as --data {rest[0]}"
            elif _SYNONYMS.get(flag) in options:
                near = f"; nearest: {_SYNONYMS[flag]}"
            self.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return parsed, rest

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:  # noqa: ANN401
        """Say what is expected where argparse names a type."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in _TYPE_DESCRIPTIONS:
                raise
            message = f"{arg_string!r} is not {_TYPE_DESCRIPTIONS[action.type]}"
            raise argparse.ArgumentError(action, message) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        if action.choices is not None and value not in action.choices:
            words = [str(choice) for choice in action.choices]
            near = _nearest(str(value), words)
            message = f"{value!r} is not one of {', '.join(words)}{near}"
            raise argparse.ArgumentError(action, message)


def _nearest(word: str, candidates: Iterable[str]) -> str:
    """Return a suggestion with the candidate that is most similar, or ""."""
    near = difflib.get_close_matches(word, candidates, 1)
    return f"; nearest: {near[0]}" if near else ""
