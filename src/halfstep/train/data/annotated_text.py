"""Texts with annotated entities, and their form in JSON.

In: JSON objects with a text and the offsets of its entities. Out: `AnnotatedText`
values, checked, or a `UserError` that names the file, the line and what to do.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeGuard

from halfstep.errors import UserError
from halfstep.train.data import text_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Nothing to see and nothing to read: controls, and marks such as U+200B.
_NO_WIDTH = frozenset({"Cc", "Cf"})


@dataclass(frozen=True, slots=True)
class Span:
    """An entity in a text."""

    start: int
    """The first character, counted from 0."""
    end: int
    """The character after the last."""
    kind: str
    """What it is, as the file says: PER, ORG and so on."""


@dataclass(frozen=True, slots=True)
class AnnotatedText:
    """One text and its entities as a file holds them."""

    text: str
    """Not blank; that of tagged tokens is put together from them."""
    spans: tuple[Span, ...]
    """In the order of the text, apart from each other; none begins or ends blank."""
    line: int
    """Where it begins in its file, counted from 1."""
    where: str
    """The same for messages: file, line and, in an array, the number of the entry."""


def make_annotated_text(
    text: str, spans: Sequence[Span], line: int, where: str
) -> AnnotatedText:
    """Return a text whose spans lie inside it, checked and put in order.

    Raises:
        UserError: If the text is blank, or entities overlap or have blank edges.
    """
    ordered = tuple(sorted(spans, key=lambda span: (span.start, span.end)))
    fault = ""
    if not any(map(has_width, text)):
        fault = "text is blank; give it words or drop it"
    for span in ordered:
        words = text[span.start : span.end]
        if not any(map(has_width, words)) or words != words.strip():
            fault = fault or (
                f"entity {span.kind} {text_lines.as_json(words)} begins or ends with a "
                "blank, or holds nothing else; move its edges"
            )
    for one, two in pairwise(ordered):
        if two.start < one.end:
            fault = fault or (
                f"entity {two.kind} from {two.start} to {two.end} is given twice"
                if one == two
                else f"entities overlap: {one.kind} from {one.start} to {one.end} and "
                f"{two.kind} from {two.start} to {two.end}; keep one"
            )
    if fault:
        message = f"{where}: {fault}."
        raise UserError(message)
    return AnnotatedText(text, ordered, line, where)


def has_width(character: str) -> bool:
    """Tell whether a character is more than a control or an invisible mark."""
    return not character.isspace() and unicodedata.category(character) not in _NO_WIDTH


def from_json_objects(
    entries: Iterable[text_lines.Entry], syntax: str
) -> Iterator[AnnotatedText]:
    """Yield the texts of JSON objects.

    Args:
        entries: As `lines` yields them.
        syntax: What each must be, in words.

    Raises:
        UserError: If one cannot be used.
    """
    for where, line, entry in entries:
        text, entities, fault = _text_and_entities(entry, syntax)
        spans = []
        for number, entity in enumerate(entities, start=1):
            span = _span(entity, len(text))
            if isinstance(span, str):
                fault = fault or f"entity {number} {span}"
            else:
                spans.append(span)
        if fault:
            message = f"{where}: {fault}."
            raise UserError(message)
        yield make_annotated_text(text, spans, line, where)


def _text_and_entities(entry: object, syntax: str) -> tuple[str, list[object], str]:
    """Return text and entities of an object, and what is wrong with them."""
    if not isinstance(entry, dict):
        return (
            "",
            [],
            f"{text_lines.as_json(entry)} is not a text with entities; {syntax}",
        )
    if "text" not in entry:
        return "", [], f"text is missing; {syntax}"
    text = entry["text"]
    # A text may have a class, too: a `label` that is a word or a number.
    names = [
        name
        for name in ("entities", "spans", "label")
        if name in entry and (name != "label" or isinstance(entry[name], list))
    ]
    if not names:
        return "", [], f"entities is missing; {syntax}"
    entities = entry[names[0]]
    fault = ""
    if not isinstance(text, str):
        fault = f"text is {text_lines.as_json(text)}; a text is a string"
    elif text_lines.text_fault(text):
        fault = text_lines.text_fault(text)
    elif len(names) > 1:
        fault = f"{names[0]} and {names[1]} are both entities; keep one"
    elif not isinstance(entities, list):
        fault = f"{names[0]} is {text_lines.as_json(entities)}; {syntax}"
    return ("", [], fault) if fault else (text, entities, "")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _span(entity: object, length: int) -> Span | str:
    """Return the span of one entity, or what is wrong with it."""
    match entity:
        case (
            [start, end, kind]
            | {"start": start, "end": end, "label": kind}
            | {"start": start, "end": end, "type": kind}
            | {"start_offset": start, "end_offset": end, "label": kind}
        ):
            pass
        case _:
            syntax = '[start, end, kind] or {"start": ..., "end": ..., "label": ...}'
            return f"is {text_lines.as_json(entity)}; it is {syntax}"
    if not (_is_int(start) and _is_int(end)):
        edges = f"{text_lines.as_json(start)} to {text_lines.as_json(end)}"
        return f"from {edges}: an edge is a whole number, counted from 0"
    if not 0 <= start < end <= length:
        right = f"must lie in the {length} characters of its text, end after start"
        return f"from {text_lines.as_json(start)} to {text_lines.as_json(end)} {right}"
    if not isinstance(kind, str) or not kind.strip():
        return f"has kind {text_lines.as_json(kind)}; a kind is a word"
    if fault := text_lines.text_fault(kind):
        return f"has a kind in which {fault}"
    return Span(start, end, kind.strip())
