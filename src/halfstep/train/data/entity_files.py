"""Reads texts with entities: lines of tagged tokens, and rows of JSON or parquet.

In: the lines of a file, or one row. Out: a text and its `Span` values, or a `RowError`.
Mistakes in tags and offsets are never repaired: a guess would train on entities that
were not annotated.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    # One line: its number and columns.
    _Line = tuple[int, list[str]]

# Scheme -> its letters, and the position of a token in an entity that each means. In
# IOB1, B is only for an entity directly after another of its type; I begins all others.
_SCHEMES = {
    "IOB2": {"B": "B", "I": "I"},
    "BIOES": {"B": "B", "I": "I", "E": "E", "S": "S"},
    "BMES": {"B": "B", "M": "I", "E": "E", "S": "S"},
    "BILOU": {"B": "B", "I": "I", "L": "E", "U": "S"},
    "IOB1": {"B": "B", "I": "I"},
}
# B-PER, PER-B, and B alone where entities have no types.
_NOTATIONS = (
    r"(?i:(?P<letter>[BIMELSU])[-_](?P<kind>\S.*))",
    r"(?i:(?P<kind>\S.*)[-_](?P<letter>[BIMELSU]))",
    r"(?i:(?P<letter>[BIMELSU])(?P<kind>))",
)
_ONLY_KIND = "entity"
_BLANKS = re.compile(" +")
# First words of comments in CoNLL-U, GermEval, MultiCoNER and OntoNotes.
_COMMENTS = frozenset({"#", "#begin", "#end"})
# Keys of a row: the first that is there counts.
_TOKENS = ("tokens", "words")
_TAGS = ("ner_tags", "tags", "labels", "ner")
_TEXTS = ("text", "data")
_ENTITIES = ("entities", "spans", "label", "labels")
_START, _END = ("start", "start_offset"), ("end", "end_offset")
_KIND = ("label", "type", "kind", "labels")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Invisible characters: controls, and format marks such as U+200B.
_NO_WIDTH = frozenset({"Cc", "Cf"})
# Characters of an invalid value that a message quotes.
_MAX_QUOTED = 60


class Span(NamedTuple):
    """An entity in a text, by offsets in characters; `end` is exclusive."""

    start: int
    end: int
    kind: str


class RowError(ValueError):
    """A text whose entities cannot be used.

    `kind` names the mistake in a few words, for counting. `fault` holds the invalid
    value and what would be right. `token` is the index of the token it is in.
    """

    def __init__(self, kind: str, fault: str, token: int = 0) -> None:
        super().__init__(kind, fault, token)
        self.kind, self.fault, self.token = kind, fault, token

    def __str__(self) -> str:
        return self.fault


class TagScheme(NamedTuple):
    """How the tags of a file mark entities."""

    name: str
    """IOB1, IOB2, BIOES, BMES or BILOU."""
    notation: str
    """Pattern of all tags but O; empty if they are entity types without a letter."""


def tag_scheme(sentences: Iterable[Sequence[str]]) -> TagScheme:
    """Return the scheme that allows most of the tags of a file, given by sentence.

    So a mistake in one sentence stays a mistake. Tags without letters (PER, O) are
    types, each run of one type an entity, if O is the most frequent tag: if not, they
    may be parts of speech.
    """
    tags: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    for sentence in sentences:
        tags.update(sentence)
        pairs.update(pairwise(("O", *sentence, "O")))
    matches = {
        notation: sum(n for tag, n in tags.items() if re.fullmatch(notation, tag))
        for notation in _NOTATIONS
    }
    if not any(matches.values()) and tags["O"] == max(tags.values(), default=0):
        return TagScheme("IOB1", "")
    notation = max(_NOTATIONS, key=matches.__getitem__)

    def allowed(scheme: TagScheme) -> int:
        return sum(n for pair, n in pairs.items() if _is_allowed(scheme, *pair))

    return max((TagScheme(name, notation) for name in _SCHEMES), key=allowed)


@lru_cache(maxsize=65536)
def _parts(scheme: TagScheme, tag: str) -> tuple[str, str] | None:
    """Return position (B, I, E, S) and type of a tag, empty for O; None if invalid."""
    if tag in {"O", "o"}:
        return "", ""
    if not scheme.notation:
        return ("I", tag) if tag.strip() else None
    match = re.fullmatch(scheme.notation, tag)
    position = match and _SCHEMES[scheme.name].get(match["letter"].upper())
    return (position, match["kind"] or _ONLY_KIND) if match and position else None


@lru_cache(maxsize=65536)
def _is_allowed(scheme: TagScheme, before: str, tag: str) -> bool:
    """Return whether a tag may follow another; O is also start and end."""
    parts, parts_before = _parts(scheme, tag), _parts(scheme, before)
    if parts is None or parts_before is None:
        return False
    (position, kind), (last, open_kind) = parts, parts_before
    is_open = last in {"B", "I"}
    continues = is_open and position in {"I", "E"} and kind == open_kind
    if is_open and "S" in _SCHEMES[scheme.name].values():
        return continues
    if scheme.name == "IOB1":
        return position != "B" or kind == open_kind
    return continues or position not in {"I", "E"}


def _check_tags(scheme: TagScheme, tokens: list[str], tags: list[str]) -> None:
    for index, (before, tag) in enumerate(pairwise(("O", *tags, "O"))):
        if _is_allowed(scheme, before, tag):
            continue
        is_end = index == len(tags)
        tagged = "the sentence's end"
        if not is_end:
            tagged = f"tag {tag!r} of {_quoted(tokens[index])}"
        kind, fault = "unknown tags", f"{tagged} is no tag of {scheme.name}"
        if _parts(scheme, tag):
            kind = "invalid tags"
            after = repr(before) if index else "the start"
            name = f"{scheme.name}, the scheme of most tags here"
            fault = f"{tagged} cannot follow {after} in {name}"
        types = {(_parts(scheme, each) or ("", "PER"))[1] for each in (before, tag)}
        pairs = product(sorted(types - {""}), _SCHEMES[scheme.name])
        every = ["O", *(f"{letter}-{each}" for each, letter in pairs)]
        right = " or ".join(x for x in every if _is_allowed(scheme, before, x))
        raise RowError(kind, f"{fault}; put {right}", index - is_end)


def tagged_sentences(
    lines: Iterable[str],
) -> Iterator[tuple[int, tuple[str, list[Span]] | RowError]]:
    """Yield line, and text and entities of each sentence, or line and error.

    A line holds a token in its first column and the tag in its last, separated by tabs
    or blanks; a blank line or -DOCSTART- ends a sentence. If the first column counts
    the tokens of each sentence, the second holds the token. Scheme and number of
    columns are those of most lines.

    Args:
        lines: Iterated twice; an iterator is kept in memory instead.

    Yields:
        First line and (text, sorted disjoint spans), or line of the mistake and error.
    """
    if iter(lines) is lines:
        lines = list(lines)
    widths: Counter[int] = Counter()
    is_position: Counter[bool] = Counter()

    def read_tags() -> Iterator[list[str]]:
        for sentence in _sentences(lines):
            widths.update(len(columns) for _, columns in sentence)
            firsts = enumerate((columns[0] for _, columns in sentence), start=1)
            is_position.update(token == str(number) for number, token in firsts)
            yield [columns[-1] for _, columns in sentence]

    scheme = tag_scheme(read_tags())
    width = max(widths, key=widths.__getitem__, default=0)
    has_positions = is_position[True] > is_position[False]
    first = int(has_positions and width > len(("token", "tag")))
    for sentence in _sentences(lines):
        try:
            for index, (_, columns) in enumerate(sentence):
                _check_columns(columns, width, index)
            tokens = [columns[first] for _, columns in sentence]
            tags = [columns[-1] for _, columns in sentence]
            row = _tagged_text(tokens, tags, scheme)
        except RowError as error:
            yield sentence[error.token][0], error
        else:
            yield sentence[0][0], row


def _sentences(lines: Iterable[str]) -> Iterator[list[_Line]]:
    sentence: list[_Line] = []
    for number, line in enumerate(lines, start=1):
        columns = _columns(line)
        if not columns or columns[0] == "-DOCSTART-":
            if sentence:
                yield sentence
                sentence = []
        elif sentence or not _is_comment(columns):
            sentence.append((number, columns))
    if sentence:
        yield sentence


def _is_comment(columns: list[str]) -> bool:
    """Return whether a line before a sentence is a comment, not the token #.

    The token # with a tag without a letter (# PER) cannot be told from one.
    """
    tag = columns[-1]
    is_tag = tag in {"O", "o"} or any(re.fullmatch(each, tag) for each in _NOTATIONS)
    return columns[0].split(" ")[0] in _COMMENTS and not is_tag


def _columns(line: str) -> list[str]:
    """Split a line into columns; none if it is blank."""
    if not line.strip():
        return []
    if "\t" not in line:
        return _BLANKS.split(line.strip(" \r\n"))
    # With tabs as separators, a token may be or contain a blank.
    cells = line.rstrip().split("\t")
    return [cell.strip(" ") or cell for cell in cells]


def _check_columns(columns: list[str], width: int, index: int) -> None:
    """Raise if the columns of a line, except for the tag, are invalid."""
    if len(columns) != width:
        raise RowError(
            "broken lines",
            f"{_quoted(columns)} has {len(columns)} columns, and most lines have "
            f"{width}; put tabs round a token that holds blanks, or fill up the line",
            index,
        )


def annotated_row(
    row: Mapping[str, Any] | Sequence[Any],
    tag_names: Sequence[str] | None = None,
    scheme: TagScheme | None = None,
) -> tuple[str, list[Span]]:
    """Return text and entities of a row of JSON, parquet or a data set of the hub.

    Args:
        row: `tokens` and `ner_tags`, `tags` or `labels`; or `text` and `entities`,
            `spans`, `label` or `labels`, each [start, end, type] or a mapping, as
            doccano, Prodigy and Label Studio write them; or spaCy's [text, {"entities":
            [...]}].
        tag_names: Names of the numbers in `tag_column`.
        scheme: `tag_scheme` of the `row_tags` of all rows. None: seen from this row,
            which does not distinguish IOB1 from a mistake in IOB2.

    Raises:
        RowError: If the row is none of these, or its entities are invalid.
    """
    match row:
        case [str(text), {"entities": entities}]:
            row = {"text": text, "entities": entities}
        case {"data": {"text": text}, "annotations": [{"result": [*results]}]}:
            maps = [each for each in results if isinstance(each, Mapping)]
            spans = [each["value"] for each in maps if "value" in each]  # no relations
            row = {"text": text, "entities": spans}
        case {"answer": str(answer)} if answer != "accept":
            fault = f'"answer" is {_quoted(answer)}, not "accept"; drop the row'
            raise RowError("rejected annotations", fault)
    text, entities = None, None
    if isinstance(row, Mapping):
        tags, column = row_tags(row, tag_names), _list_column(row, _TOKENS)
        if tags and column:
            return _tagged_text(row[column], tags, scheme or tag_scheme([tags]))
        text = next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
        column = _list_column(row, _ENTITIES)
        entities = row[column] if column else None
    if text is None or entities is None:
        right = "tokens and ner_tags, or text and entities ([start, end, type] each)"
        raise RowError("no entities", f"{_quoted(row)} lacks {right}")
    return text, _checked(text, [_span(text, entity) for entity in entities])


def tag_column(row: Mapping[str, Any]) -> str | None:
    """Return the column with the tags of a row's tokens; None if it has offsets."""
    return _list_column(row, _TAGS) if _list_column(row, _TOKENS) else None


def _list_column(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(row.get(name), list)), None)


def row_tags(
    row: Mapping[str, Any], tag_names: Sequence[str] | None = None
) -> list[str]:
    """Return the tags of a row's tokens, for `tag_scheme`; none if it has offsets."""
    names, column = tag_names or (), tag_column(row)
    tags = [
        names[tag] if type(tag) is int and 0 <= tag < len(names) else tag
        for tag in (row[column] if column else ())
    ]
    for index, tag in enumerate(tags):
        if not isinstance(tag, str):
            right = (
                f"is not one of {len(names)} ClassLabel names"
                if names
                else "has no name; write tags as words such as B-PER"
            )
            fault = f"tag {_quoted(tag)} at token {index + 1} {right}"
            raise RowError("unknown tags", fault, index)
    return tags


def _tagged_text(
    tokens: list[str], tags: list[str], scheme: TagScheme
) -> tuple[str, list[Span]]:
    if len(tokens) != len(tags):
        fault = f"{len(tokens)} tokens have {len(tags)} tags; each token has one"
        raise RowError("missing tags", fault)
    for index, token in enumerate(tokens):
        is_word = isinstance(token, str)
        if not is_word or not (token.isspace() or any(map(_has_width, token))):
            fault = f"token {_quoted(token)} is no visible text; drop it and its tag"
            raise RowError("invalid tokens", fault, index)
    _check_tags(scheme, tokens, tags)
    text, starts = _join_tokens(tokens)
    spans: list[Span] = []
    open_kind = ""
    for token, tag, start in zip(tokens, tags, starts, strict=True):
        position, kind = _parts(scheme, tag) or ("", "")
        if position in {"B", "S"} or kind not in {"", open_kind}:
            spans.append(Span(start, start + len(token), kind))
        elif position:
            spans[-1] = spans[-1]._replace(end=start + len(token))
        open_kind = kind
    return text, _checked(text, spans)


def _join_tokens(tokens: list[str]) -> tuple[str, list[int]]:
    """Join tokens to a text; return it and the offset of each token.

    Tokens are separated by a blank, except next to white space or between two CJK
    characters. If all tokens are single characters, one of them CJK, there are no
    blanks at all: the file is split by character, and 2 0 1 9 is a year.
    """
    single = max(map(len, tokens), default=0) == 1 and any(map(_is_cjk, tokens))
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


def _span(text: str, entity: object) -> Span:
    """Return an entity that a row gives by offsets."""
    words, values = None, entity
    if isinstance(entity, Mapping):
        words = entity.get("text")
        values = [
            next((entity[key] for key in keys if key in entity), None)
            for keys in (_START, _END, _KIND)
        ]
    match values:
        case [int(start), int(end), str(kind) | [str(kind)]] if (
            bool not in {type(start), type(end)}
            and 0 <= start < end <= len(text)
            and kind.strip()
            and words in (None, text[start:end])
        ):
            return Span(start, end, kind.strip())
    raise RowError(
        "invalid entities",
        f"entity {_quoted(entity)} is not [start, end, type] with 0 <= start < end <= "
        f"{len(text)}, and its own text if it gives one; offsets count characters, not "
        "bytes or UTF-16",
    )


def _checked(text: str, spans: list[Span]) -> list[Span]:
    """Return the spans sorted; raise if they overlap or have blank edges."""
    if not any(map(_has_width, text)):
        raise RowError("blank text", "text is blank; give it words or drop it")
    for value in (text, *(span.kind for span in spans)):
        if _SURROGATE.search(value) or "\0" in value:
            fault = f"{_quoted(value)} holds a NUL or half a character; remove it"
            raise RowError("invalid characters", fault)
    spans = sorted(spans)
    for start, end, kind in spans:
        words = text[start:end]
        if not any(map(_has_width, words)) or words != words.strip():
            raise RowError(
                "blank edges of entities",
                f"entity {kind} {_quoted(words)} from {start} to {end} begins or ends "
                "with a blank, or holds nothing else; move its edges",
            )
    for one, two in pairwise(spans):
        if two.start < one.end:
            raise RowError(
                "overlapping entities",
                f"entities overlap: {one.kind} from {one.start} to {one.end} and "
                f"{two.kind} from {two.start} to {two.end}; keep one",
            )
    return spans


def _has_width(character: str) -> bool:
    return not character.isspace() and unicodedata.category(character) not in _NO_WIDTH


def _quoted(value: object) -> str:
    """Return a value as Python writes it, invisible characters escaped, cut short."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."
