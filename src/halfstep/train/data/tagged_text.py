"""Reads and validates texts with annotated entities.

In: a file of tagged tokens (.bmes, .bio, .bioes, .conll, .iob, .txt) or of texts with
offsets (.json, .jsonl, .ndjson). Out: `AnnotatedText` values, or a `UserError` that
names the file, the line and what to do.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from halfstep.errors import UserError
from halfstep.train.data import text_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

# Invisible characters: controls, and format marks such as U+200B.
_NO_WIDTH = frozenset({"Cc", "Cf"})
_TAG = re.compile(r"([BIMES])-(.+)")
_BLANKS = re.compile(" +")
_START_OF_DOCUMENT = "-DOCSTART-"
# A tag's prefix and entity type, both empty for O.
_Parts = tuple[str, str]
# One line: its number, token and tag.
_Tagged = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Span:
    """An entity in a text, by offsets; `end` is after its last character."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class AnnotatedText:
    """One text and its entities."""

    text: str
    """Not blank; joined from the tokens if the file has tagged tokens."""
    spans: tuple[Span, ...]
    """Sorted and disjoint; none starts or ends with white space."""
    line: int
    where: str
    """Location for messages: file, line and, in an array, number of the entry."""


class InvalidTagsError(UserError):
    """A sentence with a sequence of tags that no scheme allows."""


def read(path: Path, left_out: list[str] | None = None) -> Iterator[AnnotatedText]:
    """Yield the texts of one file; raise at the first invalid one.

    Invalid tags or offsets are mistakes in the file. Repairing them by a guess would
    train on entities that were not annotated.

    Args:
        path: A UTF-8 file: `.json` is one array of objects, `.jsonl` and `.ndjson` one
            object per line. The others hold one token per line, in the first column,
            and its tag in the last, separated by tabs or blanks; a blank line ends a
            sentence. The scheme is inferred from the tags: IOB2 (B, I), BIOES or BMES.
        left_out: If given, sentences with an invalid sequence of tags are omitted, and
            their errors appended here, instead of raising.

    Raises:
        UserError: If the file or one of its texts is invalid.
    """
    entries, syntax = FORMATS[text_lines.check_file(path, FORMATS)]
    empty = True
    for entry in entries(path, syntax, left_out):
        empty = False
        yield entry
    if empty and not left_out:
        raise UserError(f"{path} holds no texts; {syntax}.")


@dataclass(slots=True)
class _Scheme:
    """The tagging scheme of a file, as far as known from the lines so far."""

    ends: bool | None = None
    """Whether E and S mark ends; None before the first entity."""
    ends_line: int = 0
    inner: str = ""
    """I or M, whichever came first; empty before."""
    inner_line: int = 0


def _read_columns(
    path: Path, syntax: str, left_out: list[str] | None
) -> Iterator[AnnotatedText]:
    scheme = _Scheme()
    for sentence in _sentences(path, syntax):
        # An omitted sentence must not determine the scheme.
        new_scheme = replace(scheme)
        try:
            text = _sentence(path, sentence, new_scheme)
        except InvalidTagsError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
        else:
            scheme = new_scheme
            yield text


def _sentences(path: Path, syntax: str) -> Iterator[list[_Tagged]]:
    sentence: list[_Tagged] = []
    first: tuple[int, int] | None = None
    for number, line in enumerate(text_lines.read_lines(path), start=1):
        columns = _columns(line)
        if not columns or columns[0] == _START_OF_DOCUMENT:
            if sentence:
                yield sentence
                sentence = []
            continue
        first = first or (len(columns), number)
        if fault := _line_fault(line, columns, first, syntax):
            raise UserError(f"{path} line {number}: {fault}.")
        sentence.append((number, columns[0], columns[-1]))
    if sentence:
        yield sentence


def _columns(line: str) -> list[str]:
    """Split a line into columns; none if it is blank."""
    if not line.strip():
        return []
    if "\t" not in line:
        return _BLANKS.split(line.strip(" \r\n"))
    # With tabs as separators, a token may be or contain a blank.
    cells = line.rstrip().split("\t")
    return [cell.strip(" ") or cell for cell in cells]


def _line_fault(
    line: str, columns: list[str], first: tuple[int, int], syntax: str
) -> str:
    """Return what is wrong with the columns of a line, except for the tag."""
    if "\r" in line.rstrip("\r\n"):
        return "a carriage return stands inside the line; end lines with line feeds"
    if len(columns) == 1:
        return f"{text_lines.as_json(columns[0])} is the only column; {syntax}"
    if len(columns) != first[0]:
        return (
            f"column count is {len(columns)}, but {first[0]} in line {first[1]}; "
            "put tabs round a token that holds blanks, fill up the line, or drop it if "
            "it is a comment"
        )
    token = columns[0]
    if not token.isspace() and not any(map(_has_width, token)):
        return f"token {text_lines.as_json(token)} has no width; drop the line"
    return ""


def _sentence(path: Path, sentence: list[_Tagged], scheme: _Scheme) -> AnnotatedText:
    tags = _tags(path, sentence, scheme)
    text, starts = _join_tokens([token for _, token, _ in sentence])
    spans: list[Span] = []
    for (prefix, kind), start, (_, token, _) in zip(
        tags, starts, sentence, strict=True
    ):
        if prefix in {"B", "S"}:
            spans.append(Span(start, start + len(token), kind))
        elif prefix:
            spans[-1] = Span(spans[-1].start, start + len(token), kind)
    line = sentence[0][0]
    return _annotated_text(text, spans, line, f"{path} line {line}")


def _tags(path: Path, sentence: list[_Tagged], scheme: _Scheme) -> list[_Parts]:
    """Parse the tags of a sentence and check them against the scheme."""
    tags: list[_Parts] = []
    for number, _, tag in sentence:
        parts = _parts(tag)
        if parts is None:
            right = "a tag is O, or B, I, M, E or S, then - and a type, as in B-PER"
            raise UserError(f"{path} line {number}: tag {tag!r} is unknown; {right}.")
        tags.append(parts)
    prefixes = {prefix for prefix, _ in tags}
    if scheme.ends is None and prefixes != {""}:
        scheme.ends = not prefixes.isdisjoint("MES")
        scheme.ends_line = next(
            tagged[0] for tagged, parts in zip(sentence, tags, strict=True) if parts[0]
        )
    before = ""
    for (number, _, tag), parts in zip(sentence, tags, strict=True):
        fault = _scheme_conflict(parts[0], scheme, number) or _invalid_transition(
            before, tag, scheme
        )
        if fault:
            raise InvalidTagsError(f"{path} line {number}: tag {tag} {fault}.")
        before = tag
    if fault := _invalid_transition(before, "", scheme):
        raise InvalidTagsError(f"{path} line {sentence[-1][0]}: {fault}.")
    return tags


@lru_cache(maxsize=4096)
def _parts(tag: str) -> _Parts | None:
    """Split a tag into prefix and entity type; None if invalid."""
    if tag == "O":
        return "", ""
    match = _TAG.fullmatch(tag)
    return (match[1], match[2]) if match else None


def _scheme_conflict(prefix: str, scheme: _Scheme, number: int) -> str:
    """Return how a prefix contradicts the scheme of the lines before; "" if valid."""
    if prefix in {"E", "S", "M"} and not scheme.ends:
        began = f"but IOB2 began in line {scheme.ends_line}"
        return f"is of BMES or BIOES, {began}; use one scheme in a file"
    if prefix in {"I", "M"}:
        if not scheme.inner:
            scheme.inner, scheme.inner_line = prefix, number
        elif prefix != scheme.inner:
            other = f"{scheme.inner} in line {scheme.inner_line}"
            return f"stands beside {other}; use one of the two in a file"
    return ""


def _invalid_transition(before: str, tag: str, scheme: _Scheme) -> str:
    """Return why a tag cannot follow `before`; "" is the start or the end."""
    prefix, kind = _parts(tag or "O") or ("", "")
    was, open_kind = _parts(before or "O") or ("", "")
    inside = {"I", "M", "E"} if scheme.ends else {"I"}
    after = f"cannot follow {before}" if before else "cannot begin a sentence"
    if scheme.ends and was in {"B", "I", "M"}:
        if prefix in inside and kind == open_kind:
            return ""
        end = f"E-{open_kind}"
        right = f"{scheme.inner}-{open_kind} or {end}" if scheme.inner else end
        return (
            f"{after}, which is unclosed; put {right}"
            if tag
            else f"the sentence ends after {before}, which is unclosed; put {end}, or "
            "drop a blank line too many"
        )
    if prefix not in inside or (was and not scheme.ends and kind == open_kind):
        return ""
    if scheme.ends:
        return f"{after}; begin with B-{kind}, or S-{kind} for a single token"
    return f"{after}; in IOB1 it could: save as IOB2, where B-{kind} begins it"


def _join_tokens(tokens: list[str]) -> tuple[str, list[int]]:
    """Join tokens to a text; return it and the offset of each token.

    Tokens are separated by a blank, except next to white space or between two CJK
    characters. If all tokens are single characters, one of them CJK, there are no
    blanks at all: the file is split by character, and 2 0 1 9 is a year.
    """
    single = max(map(len, tokens)) == 1 and any(map(_is_cjk, tokens))
    parts, starts, length, last = [], [], 0, " "
    for token in tokens:
        head = token[0]
        if not (
            single
            or last.isspace()
            or head.isspace()
            or (_is_cjk(last) and _is_cjk(head))
        ):
            parts.append(" ")
            length += 1
        starts.append(length)
        parts.append(token)
        length += len(token)
        last = token[-1]
    return "".join(parts), starts


@lru_cache(maxsize=65536)
def _is_cjk(character: str) -> bool:
    """Return whether it is Chinese or Japanese; Korean separates words by blanks."""
    width = unicodedata.east_asian_width(character)
    if width in {"W", "F", "H"}:
        return not unicodedata.name(character, "").startswith(
            ("HANGUL", "HALFWIDTH HANGUL")
        )
    # Quotes, dashes and dots that Chinese shares with western texts.
    return width == "A" and unicodedata.category(character).startswith("P")


def _annotated_text(
    text: str, spans: Sequence[Span], line: int, where: str
) -> AnnotatedText:
    """Validate spans and sort them."""
    ordered = tuple(sorted(spans, key=lambda span: (span.start, span.end)))
    fault = ""
    if not any(map(_has_width, text)):
        fault = "text is blank; give it words or drop it"
    for span in ordered:
        words = text[span.start : span.end]
        if not any(map(_has_width, words)) or words != words.strip():
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
        raise UserError(f"{where}: {fault}.")
    return AnnotatedText(text, ordered, line, where)


def _has_width(character: str) -> bool:
    return not character.isspace() and unicodedata.category(character) not in _NO_WIDTH


def _objects(
    path: Path, syntax: str, _left_out: list[str] | None
) -> Iterator[AnnotatedText]:
    """Yield the texts of a JSON file, which cannot have invalid tags."""
    for where, line, entry in text_lines.json_values(path):
        text, spans, fault = _text_and_spans(entry, syntax)
        if fault:
            raise UserError(f"{where}: {fault}.")
        yield _annotated_text(text, spans, line, where)


def _text_and_spans(entry: object, syntax: str) -> tuple[str, list[Span], str]:
    """Return text and entities of a JSON object, and what is wrong with them."""
    match entry:
        case {"text": str(text), "entities": [*entities]}:
            fault = text_lines.text_fault(text)
        case _:
            fault = f"{text_lines.as_json(entry)} is not a text with entities; {syntax}"
            return "", [], fault
    spans = []
    for number, entity in enumerate(entities, start=1):
        match entity:
            case [start, end, str(kind)] if (
                type(start) is type(end) is int
                and 0 <= start < end <= len(text)
                and kind.strip()
            ):
                spans.append(Span(start, end, kind.strip()))
                fault = fault or text_lines.text_fault(kind)
            case _:
                fault = fault or (
                    f"entity {number} is {text_lines.as_json(entity)}; it is [start, "
                    f"end, type]: 0 <= start < end <= {len(text)}, and type is a word"
                )
    return text, spans, fault


_OBJECT = '{"text": "...", "entities": [[start, end, type], ...]}'
_TOKENS = "each line holds a token and its tag, and a blank line ends a sentence"
_EACH_LINE = f"each line holds {_OBJECT}"
FORMATS: dict[
    str, tuple[Callable[[Path, str, list[str] | None], Iterator[AnnotatedText]], str]
] = {
    **dict.fromkeys(
        (".bmes", ".bio", ".bioes", ".conll", ".iob", ".txt"), (_read_columns, _TOKENS)
    ),
    ".json": (_objects, f"each entry is {_OBJECT}"),
    ".jsonl": (_objects, _EACH_LINE),
    ".ndjson": (_objects, _EACH_LINE),
}
"""Suffix -> reader of the format, and what an entry must look like."""
