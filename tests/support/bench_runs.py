"""Settings and runs of `halfstep bench`, as the command line reads them."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import TYPE_CHECKING

from halfstep import cli
from halfstep.bench.commands import BENCHES

if TYPE_CHECKING:
    from argparse import Namespace

    import pytest

    from halfstep.reporting.table import Cell, Table


def flags(bench: str, words: str) -> Namespace:
    """Return the settings that flags give."""
    parser = ArgumentParser()
    BENCHES[bench].add_flags(parser)
    return parser.parse_args(words.split())


def run(bench: str, words: str) -> int:
    """Run a bench; return its exit status, however it leaves."""
    try:
        return cli.run(["bench", bench, *words.split()])
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
