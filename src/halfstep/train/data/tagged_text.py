"""Texts with annotated entities from one file, each checked, with its location.

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

# Nothing to see and nothing to read: controls, and marks such as U+200B.
_NO_WIDTH = frozenset({"Cc", "Cf"})
_TAG = re.compile(r"([BIMES])-(.+)")
_BLANKS = re.compile(" +")
_START_OF_DOCUMENT = "-DOCSTART-"
# Of a tag: its prefix and its kind, both empty for O.
_Parts = tuple[str, str]
# A line of a sentence: its number, token and tag.
_Tagged = tuple[int, str, str]


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


class InvalidTagsError(UserError):
    """A sentence whose tags cannot follow each other."""


def read(path: Path, left_out: list[str] | None = None) -> Iterator[AnnotatedText]:
    """Yield the texts of one file, one at a time; one bad text rejects the file.

    Why: a tag that no scheme allows, or an offset past the end, is a slip in the file.
    Corrected by a guess, it would teach the model an entity that was not annotated.

    Args:
        path: A UTF-8 file: `.json` is one array of objects, `.jsonl` and `.ndjson` one
            object a line. The others hold a token and its tag a line, in the first and
            the last column, apart by tabs or blanks; a blank line ends a sentence. The
            tags tell their scheme: IOB2 (B, I), BIOES or BMES.
        left_out: Given a list, a sentence whose tags cannot follow each other does not
            refuse the file: it is left out, and what is wrong with it is added here.

    Raises:
        UserError: If the file or one of its texts cannot be used.
    """
    entries, syntax = FORMATS[text_lines.check_file(path, FORMATS)]
    empty = True
    for entry in entries(path, syntax, left_out):
        empty = False
        yield entry
    if empty and not left_out:
        message = f"{path} holds no texts; {syntax}."
        raise UserError(message)


@dataclass(slots=True)
class _Scheme:
    """How a file marks the end and the middle of an entity, once its tags tell."""

    ends: bool | None = None
    """Whether E and S mark the end; None until a sentence holds an entity."""
    ends_line: int = 0
    """The line that told."""
    inner: str = ""
    """I or M, as the first such tag; empty before."""
    inner_line: int = 0


def _read_columns(
    path: Path, syntax: str, left_out: list[str] | None
) -> Iterator[AnnotatedText]:
    """Yield the sentences of tagged tokens."""
    scheme = _Scheme()
    for sentence in _sentences(path, syntax):
        # A sentence that is left out must not decide the scheme.
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
    """Yield the lines of each sentence."""
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
            message = f"{path} line {number}: {fault}."
            raise UserError(message)
        sentence.append((number, columns[0], columns[-1]))
    if sentence:
        yield sentence


def _columns(line: str) -> list[str]:
    """Return the columns of a line, none where it is blank."""
    if not line.strip():
        return []
    if "\t" not in line:
        return _BLANKS.split(line.strip(" \r\n"))
    # Between tabs a blank is a token, and a token may hold one.
    cells = line.rstrip().split("\t")
    return [cell.strip(" ") or cell for cell in cells]


def _line_fault(
    line: str, columns: list[str], first: tuple[int, int], syntax: str
) -> str:
    """Return what is wrong with the columns of a line, the tag apart."""
    if "\r" in line.rstrip("\r\n"):
        return "a carriage return stands inside the line; end lines with line feeds"
    if len(columns) == 1:
        return f"{text_lines.as_json(columns[0])} is the only column; {syntax}"
    if len(columns) != first[0]:
        return (
            f"column count is {len(columns)}, but {first[0]} in line {first[1]}; "
            "put tabs round a token that holds blanks, or fill up the line"
        )
    token = columns[0]
    if not token.isspace() and not any(map(_has_width, token)):
        return f"token {text_lines.as_json(token)} has no width; drop the line"
    return ""


def _sentence(path: Path, sentence: list[_Tagged], scheme: _Scheme) -> AnnotatedText:
    """Return the text and the entities of one sentence."""
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
    """Return the tags of a sentence, which are checked against the scheme."""
    tags: list[_Parts] = []
    for number, _, tag in sentence:
        parts = _parts(tag)
        if parts is None:
            right = "a tag is O, or B, I, M, E or S, then - and a kind, as in B-PER"
            message = f"{path} line {number}: tag {tag!r} is unknown; {right}."
            raise UserError(message)
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
            message = f"{path} line {number}: tag {tag} {fault}."
            raise InvalidTagsError(message)
        before = tag
    if fault := _invalid_transition(before, "", scheme):
        message = f"{path} line {sentence[-1][0]}: {fault}."
        raise InvalidTagsError(message)
    return tags


@lru_cache(maxsize=4096)
def _parts(tag: str) -> _Parts | None:
    """Return prefix and kind of a tag; None if it is none."""
    if tag == "O":
        return "", ""
    match = _TAG.fullmatch(tag)
    return (match[1], match[2]) if match else None


def _scheme_conflict(prefix: str, scheme: _Scheme, number: int) -> str:
    """Return what is wrong with a prefix beside those of the lines before."""
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
    """Return why a tag cannot follow the one before; an empty tag is no tag at all.

    The sentence begins after an empty tag, and ends before one.
    """
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
    """Return the text of tokens, and where each of them starts.

    A blank stands between two tokens unless the characters at the seam are written
    without. A sentence of single characters comes from a file that has a character
    a line, where 2 0 1 9 is a year.
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
    """Tell whether a character is Chinese or Japanese, or punctuation of these.

    Korean is as wide, but has blanks between words.
    """
    width = unicodedata.east_asian_width(character)
    if width in {"W", "F", "H"}:
        return not unicodedata.name(character, "").startswith(
            ("HANGUL", "HALFWIDTH HANGUL")
        )
    # Quotes, dashes and dots that Chinese and western texts share.
    return width == "A" and unicodedata.category(character).startswith("P")


def _annotated_text(
    text: str, spans: Sequence[Span], line: int, where: str
) -> AnnotatedText:
    """Return a text whose spans lie inside it, checked and put in order."""
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
        message = f"{where}: {fault}."
        raise UserError(message)
    return AnnotatedText(text, ordered, line, where)


def _has_width(character: str) -> bool:
    """Tell whether a character is more than a control or an invisible mark."""
    return not character.isspace() and unicodedata.category(character) not in _NO_WIDTH


def _objects(
    path: Path, syntax: str, _left_out: list[str] | None
) -> Iterator[AnnotatedText]:
    """Yield the texts of JSON; offsets are right or wrong by themselves."""
    is_array = path.suffix.lower() == ".json"
    read_values = text_lines.json_array if is_array else text_lines.json_lines
    for where, line, entry in read_values(path):
        text, spans, fault = _text_and_spans(entry, syntax)
        if fault:
            message = f"{where}: {fault}."
            raise UserError(message)
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
                    f"end, kind]: 0 <= start < end <= {len(text)}, and kind is a word"
                )
    return text, spans, fault


_OBJECT = '{"text": "...", "entities": [[start, end, kind], ...]}'
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
"""Of each suffix: what reads it, and the form that its entries must have."""
