"""Settings and runs of `halfstep bench`, as the command line reads them."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from typing import TYPE_CHECKING

from halfstep import cli
from halfstep.bench import commands, measure

if TYPE_CHECKING:
    from argparse import Namespace

    import pytest

    from halfstep.reporting.table import Cell, Table


def flags(bench: str, words: str) -> Namespace:
    """Return the settings that flags give."""
    parser = ArgumentParser()
    commands.add_flags(parser, bench)
    arguments = parser.parse_args(shlex.split(words))
    if hasattr(arguments, "device"):
        arguments.device = measure.pick_device(arguments.device)
    return arguments


def tables(bench: str, words: str) -> list[Table]:
    """Return the tables of a run."""
    arguments = flags(bench, words)
    chosen = commands.load(bench)
    chosen.check(arguments)
    return chosen.run(arguments)


def run(bench: str, words: str) -> int:
    """Run a bench; return its exit status, however it leaves."""
    try:
        return cli.run(["bench", bench, *shlex.split(words)])
    except SystemExit as left:
        return int(str(left.code))


def rejected(bench: str, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line by which a run is rejected; nothing else is printed."""
    assert run(bench, words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line.removeprefix("halfstep: error: ")


def rows(table: Table) -> list[dict[str, Cell]]:
    """Return the rows of a table, each from column to cell."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]
