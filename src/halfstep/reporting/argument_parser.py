"""Command line parser without abbreviations, with one-line errors and wrapped help."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from typing import TYPE_CHECKING, Any, NoReturn

from halfstep.reporting.table import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Flags of other programs.
_SYNONYMS = {"--learning-rate": "--lr", "--train": "--data", "--output": "--out"}
_HANGING = 6  # indent of what is wrapped


def print_error(what: object, status: int) -> int:
    """Print an error as one line; return the exit status."""
    line = printable(" ".join(str(what).split()))
    sys.stderr.write(f"halfstep: error: {line}\n")
    return status


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of a description or epilog, and wraps each at spaces only."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        hanging = indent + " " * _HANGING
        lines = (
            self._wrap(line, width, hanging if line.startswith(" ") else indent)
            for line in text.splitlines()
        )
        return "\n".join("\n".join(line) for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return self._wrap(" ".join(text.split()), width)

    def _wrap(self, line: str, width: int, hanging: str = "") -> list[str]:
        # Flags and quoted words contain hyphens.
        return textwrap.wrap(
            line, width, subsequent_indent=hanging, break_on_hyphens=False
        ) or [""]


class Parser(argparse.ArgumentParser):
    """Rejects abbreviations, and suggests the nearest flag or command."""

    def __init__(self, **words: Any) -> None:  # noqa: ANN401 -- argparse's own
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **words)

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

    def _match_arguments_partial(self, actions: Any, arg_strings_pattern: str) -> Any:  # noqa: ANN401
        """Leave a positional that may be empty to the words after the flags.

        Before Python 3.13 it takes no word where a flag follows, and the words after
        that flag are then unrecognized.
        """
        counts = super()._match_arguments_partial(actions, arg_strings_pattern)
        while counts and not counts[-1] and "O" in arg_strings_pattern:
            counts.pop()
        return counts

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
