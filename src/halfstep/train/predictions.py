"""Writes predictions as tables or JSON lines."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

from halfstep.errors import UserError
from halfstep.reporting.table import Cell, Table, format_count, open_atomic
from halfstep.train.data.text_lines import decode_lines
from halfstep.train.predict import Label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from halfstep.train.predict import Entities

_EVERY = 2.0  # seconds between progress lines


def lines(source: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the number of each non-blank line of a stream, from 1, and its text."""
    empty = True
    for number, line in enumerate(decode_lines("standard input", source), 1):
        if text := line.strip():
            empty = False
            yield number, text
    if empty:
        raise UserError("standard input holds no text; give one a line.")


def drop_blank(
    texts: Sequence[str],
) -> tuple[list[tuple[int, str]], tuple[str, ...]]:
    """Return the numbered texts that are not blank, and a note about the blank ones."""
    numbered = [(n, text) for n, text in enumerate(texts, 1) if text.strip()]
    blank = [str(n) for n, text in enumerate(texts, 1) if not text.strip()]
    if not numbered:
        message = f"text {', '.join(blank)} is blank; give at least one character."
        raise UserError(message)
    are = "text {} is" if len(blank) == 1 else "texts {} are"
    notes = (f"{are.format(', '.join(blank))} blank, and left out.",) if blank else ()
    return numbered, notes


def tables(
    predictions: Iterable[Label | Entities],
    outputs: Sequence[str],
    numbers: Iterable[int],
    notes: tuple[str, ...] = (),
) -> list[Table]:
    """Return predictions as tables; `numbers` are those of their texts."""
    rows: list[tuple[Cell, ...]] = []
    columns: tuple[str, ...] = ("text", "type", "entity", "start", "end")
    title = "Entities"
    about: tuple[str, ...] = (
        "text: number of the argument or line; start, end: characters, end excluded",
    )
    cut = 0
    for number, each in zip(numbers, predictions, strict=True):
        cut += each.cut
        if isinstance(each, Label):
            title, about = "Predictions", ()
            columns = ("label", *(f"p({name})" for name in outputs), "text")
            rows.append((each.label, *each.probabilities.values(), each.text))
        else:
            rows += [
                (number, entity.kind, entity.words, entity.start, entity.end)
                for entity in each.entities
            ] or [(number, "-", "no entity", None, None)]
    notes = (*about, *notes, *_cut_note(cut))
    return [Table(title, columns, tuple(rows), notes)]


def _cut_note(count: int) -> tuple[str, ...]:
    """Return a note on the number of truncated texts, if any."""
    texts = "1 text was" if count == 1 else f"{count} texts were"
    note = f"{texts} cut at --max-length of the run; what follows was not read."
    return (note,) if count else ()


def write(
    predictions: Iterable[Label | Entities],
    path: Path | None,
    notes: tuple[str, ...] = (),
) -> None:
    """Write one JSON object per text, and progress and notes to standard error.

    The file is replaced atomically after the last prediction; a terminal or a pipe is
    written directly. None is standard output.

    Raises:
        UserError: If the file cannot be written.
    """
    began = last_report = time.monotonic()
    number = cut = 0
    output = contextlib.nullcontext(sys.stdout) if path is None else open_atomic(path)
    try:
        with output as file:
            for number, each in enumerate(predictions, 1):
                cut += each.cut
                file.write(json.dumps(asdict(each), ensure_ascii=False) + "\n")
                if time.monotonic() - last_report >= _EVERY:
                    last_report = time.monotonic()
                    _progress(number, last_report - began)
    except OSError as error:
        if path is None:
            raise
        message = f"--json {path} cannot be written: {error.strerror}."
        raise UserError(message) from error
    _progress(number, time.monotonic() - began)
    for note in (*notes, *_cut_note(cut)):
        print(note, file=sys.stderr, flush=True)


def _progress(number: int, seconds: float) -> None:
    rate = number / seconds if seconds else 0.0
    message = f"{format_count(number, 'text')}, {rate:.0f} a second"
    print(message, file=sys.stderr, flush=True)
