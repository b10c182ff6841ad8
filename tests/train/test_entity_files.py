"""Texts with entities: every form of one text, properties of schemes, and mistakes."""

import re
from copy import copy
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.train.data.entity_files import (
    RowError,
    Span,
    annotated_row,
    row_tags,
    tag_column,
    tag_scheme,
    tagged_sentences,
)

Example = tuple[str, list[tuple[str, str]]]


def brief(text: str, spans: list[Span]) -> Example:
    return text, [(text[start:end], kind) for start, end, kind in spans]


def examples_of(content: str) -> list[Example]:
    """Return text and entities of each sentence; all must be valid."""
    lines = content.splitlines(keepends=True)
    return [brief(*row) for _, row in tagged_sentences(lines)]


def faults_of(content: str) -> list[tuple[int, str, str]]:
    return [
        (line, row.kind, str(row))
        for line, row in tagged_sentences(content.split("\n"))
        if isinstance(row, RowError)
    ]


ADA = ("Ada King in Rome", [("Ada King", "PER"), ("Rome", "LOC")])
FILES = {
    "IOB2, tabs": "Ada\tB-PER\nKing\tI-PER\nin\tO\nRome\tB-LOC",
    "IOB1": "Ada I-PER\nKing I-PER\nin O\nRome I-LOC\n",
    "BIOES": " Ada  B-PER \nKing  E-PER\nin   O\nRome S-LOC\n",
    "BMES, CRLF": "Ada B-PER\r\nKing E-PER\r\nin O\r\nRome S-LOC\r\n \r\n",
    "BILOU": "Ada B-PER\nKing L-PER\nin O\nRome U-LOC\n\t\n",
    "types alone": "Ada PER\nKing PER\nin O\nRome LOC\n\nis O\nbig O\n",
    "last": "Ada PER-B\nKing PER-I\nin O\nRome LOC-B\n",
    "underscore": "Ada B_PER\nKing I_PER\nin O\nRome B_LOC\n",
    "CoNLL-2003": (
        "-DOCSTART- -X- -X- O\n\nAda NNP B-NP I-PER\nKing NNP I-NP I-PER\n"
        "in IN B-PP O\nRome NNP B-NP I-LOC\n-DOCSTART- -X- -X- O\n"
    ),
    "CoNLL-U": (
        "# sent_id = 1\n# text = Ada King in Rome\n1\tAda\tPROPN\tB-PER\n"
        "2\tKing\tPROPN\tI-PER\n3\tin\tADP\tO\n4\tRome\tPROPN\tB-LOC\n"
    ),
    "MultiCoNER": (
        "# id 42\tdomain=en\nAda _ _ B-PER\nKing _ _ I-PER\nin _ _ O\nRome _ _ B-LOC\n"
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_reads_the_same(name: str) -> None:
    """Law: scheme, notation, columns, comments and line ends do not change a text."""
    assert examples_of(FILES[name])[0] == ADA


NUMBERS = ["O", "B-PER", "I-PER", "B-LOC"]
TEXT = "Ada King in Rome"
ROWS: dict[str, Any] = {
    "strings": {
        "tokens": TEXT.split(),
        "ner_tags": ["B-PER", "I-PER", "O", "B-LOC"],
        "pos_tags": [1, 1, 2, 1],
    },
    "numbers": {"words": TEXT.split(), "labels": [1, 2, 0, 3]},
    "halfstep": {"text": TEXT, "entities": [[12, 16, " LOC"], [0, 8, "PER"]]},
    "doccano 1": {"id": 1, "data": TEXT, "label": [[0, 8, "PER"], [12, 16, "LOC"]]},
    "doccano 2": {
        "text": TEXT,
        "entities": [
            {"id": 7, "label": "PER", "start_offset": 0, "end_offset": 8},
            {"id": 8, "label": "LOC", "start_offset": 12, "end_offset": 16},
        ],
        "relations": [],
    },
    "spaCy": [TEXT, {"entities": [(0, 8, "PER"), (12, 16, "LOC")]}],
    "Prodigy": {
        "text": TEXT,
        "tokens": [{"text": "Ada", "start": 0, "end": 3, "id": 0}],
        "spans": [
            {"start": 0, "end": 8, "token_start": 0, "token_end": 1, "label": "PER"},
            {"start": 12, "end": 16, "token_start": 3, "token_end": 3, "label": "LOC"},
        ],
        "answer": "accept",
    },
    "Label Studio": {
        "data": {"text": TEXT},
        "annotations": [
            {
                "result": [
                    {"value": {"start": 0, "end": 8, "labels": ["PER"]}},
                    {"value": {"start": 12, "end": 16, "labels": ["LOC"]}},
                    {"from_id": "a", "to_id": "b", "type": "relation"},
                ]
            }
        ],
    },
    "Label Studio, short": {
        "text": TEXT,
        "label": [
            {"start": 0, "end": 8, "text": "Ada King", "labels": ["PER"]},
            {"start": 12, "end": 16, "text": "Rome", "labels": ["LOC"]},
        ],
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_reads_the_same(name: str) -> None:
    """Law: rows of each tool give the same text and sorted entities."""
    assert brief(*annotated_row(ROWS[name], NUMBERS)) == ADA


def test_one_type_without_a_name() -> None:
    """Law: B and I alone are entities of one type, which is called entity."""
    assert examples_of("APC B\ngene I\n# O\n\n# O\n") == [
        ("APC gene #", [("APC gene", "entity")]),
        ("#", []),
    ]


def test_two_columns_are_token_and_tag() -> None:
    """Law: tokens that count are tokens where the other column holds the tags."""
    assert examples_of("1 B-X\n2 O\n\n1 O") == [("1 2", [("1", "X")]), ("1", [])]


def test_scheme_of_all_rows() -> None:
    """Law: a row that is valid in IOB1 alone is a mistake beside rows of IOB2."""
    row = {"tokens": ["in", "Rome"], "tags": ["O", "I-LOC"]}
    assert brief(*annotated_row(row)) == ("in Rome", [("Rome", "LOC")])
    scheme = tag_scheme([["B-LOC", "I-LOC"], ["B-PER"]])
    with pytest.raises(RowError, match="IOB2"):
        annotated_row(row, scheme=scheme)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["高", "勇", "：", "男"], "高勇：男"),
        (["1966", "年", "出生"], "1966 年出生"),
        (["他", "在", "IBM", "工作", "。"], "他在 IBM 工作。"),
        (["he", "said", "“", "yes", "”"], "he said “ yes ”"),
        (["1", "9", "6", "6"], "1 9 6 6"),
        (["1", "9", "年"], "19年"),
        (["東京", "タワー", "ｱｲ"], "東京タワーｱｲ"),
        (["서울", "에서", "ﾡ", "ﾡ"], "서울 에서 ﾡ ﾡ"),
        (["New York", "is", "\u3000", "big"], "New York is\u3000big"),
        (["好", "\U0001f600", "𠮷"], "好\U0001f600𠮷"),
    ],
)
def test_tokens_are_joined(tokens: list[str], text: str) -> None:
    """Law: blanks stand where people write them, and each token is found again."""
    tags = ["O" if token.isspace() else "B-X" for token in tokens]
    lines = "\n".join(map("\t".join, zip(tokens, tags, strict=True)))
    expected = (text, [(token, "X") for token in tokens if not token.isspace()])
    assert examples_of(lines) == [expected]
    assert brief(*annotated_row({"tokens": tokens, "tags": tags})) == expected


LETTERS = {"IOB1": "II", "IOB2": "BI", "BIOES": "BIES", "BMES": "BMES", "BILOU": "BILU"}


def tags_of(scheme: str, parts: list[tuple[list[str], str]]) -> list[str]:
    """Write a sentence's parts, (tokens, type or ""), in a scheme."""
    first, inner, *ends = [*LETTERS[scheme]]
    tags: list[str] = []
    before = ""
    for tokens, kind in parts:
        letters = [first, *inner * (len(tokens) - 1)]
        if ends:
            letters[-1] = ends[len(tokens) == 1]
        if scheme == "IOB1" and kind == before:
            letters[0] = "B"
        tags += [f"{letter}-{kind}" if kind else "O" for letter in letters]
        before = kind
    return tags


words = st.text(st.characters(categories=["L", "N"], max_codepoint=0x2FF), min_size=1)
parts = st.tuples(
    st.lists(words, min_size=1, max_size=4), st.sampled_from(["", "PER", "a-b_C"])
)
sentences = st.lists(parts, min_size=1, max_size=5)


@settings(max_examples=80)
@given(st.lists(sentences, min_size=1, max_size=4), st.sampled_from([*LETTERS]))
def test_entities_of_any_scheme_are_read(
    file: list[list[tuple[list[str], str]]], scheme: str
) -> None:
    """Law: entities written in any scheme are read exactly, from lines and from rows.

    Two types side by side, and two entities of one type, included.
    """
    tokens = [list(chain.from_iterable(part for part, _ in each)) for each in file]
    tags = [tags_of(scheme, each) for each in file]
    expected = [
        (" ".join(row), [(" ".join(part), kind) for part, kind in each if kind])
        for row, each in zip(tokens, file, strict=True)
    ]
    blocks = [
        "\n".join(map("\t".join, zip(*each, strict=True)))
        for each in zip(tokens, tags, strict=True)
    ]
    assert examples_of("\n\n".join(blocks)) == expected
    rows = [
        {"tokens": row, "tags": row_of}
        for row, row_of in zip(tokens, tags, strict=True)
    ]
    found = tag_scheme(map(row_tags, rows))
    assert [brief(*annotated_row(row, scheme=found)) for row in rows] == expected


VALID = {
    "IOB1": "I{0}([BI]{0})*",
    "IOB2": "B{0}(I{0})*",
    "BIOES": "S{0}|B{0}(I{0})*E{0}",
    "BMES": "S{0}|B{0}(M{0})*E{0}",
    "BILOU": "U{0}|B{0}(I{0})*L{0}",
}


@settings(max_examples=80)
@given(st.sampled_from([*VALID]), st.data())
def test_only_invalid_sentences_are_errors(scheme: str, data: st.DataObject) -> None:
    """Law: in a file of one scheme, exactly the sentences that break it are errors."""
    entity = VALID[scheme]
    letters = sorted(set(re.findall("[A-Z]", entity)))
    tags = st.sampled_from(["O", *(f"{x}-{kind}" for x in letters for kind in "XY")])
    drawn = data.draw(st.lists(st.lists(tags, min_size=1, max_size=4), max_size=6))
    usual = tags_of(scheme, [(["x"] * 3, "X"), (["x"], "X"), (["x"], "")])
    valid = re.compile(f"(O|{entity.format('-X')}|{entity.format('-Y')})*")
    file = [*[usual] * 20, *drawn]
    lines: list[str] = []
    expected = []
    for sentence in file:
        first = len(lines) + 1
        lines += [*(f"x {tag}" for tag in sentence), ""]
        expected.append((first, bool(valid.fullmatch("".join(sentence)))))
    results = list(tagged_sentences(iter(lines)))
    for (first, is_valid), sentence, result in zip(
        expected, file, results, strict=True
    ):
        assert isinstance(result[1], RowError) != is_valid
        assert first <= result[0] < first + (1 if is_valid else len(sentence))


chars = st.characters(codec="utf-8", categories=["L", "N", "P", "S"])


@settings(max_examples=40)
@given(st.lists(st.text(chars, min_size=1), min_size=1))
def test_offsets_count_characters(parts: list[str]) -> None:
    """Law: entities that touch each other are read exactly, in any plane of Unicode."""
    edges = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
    spans = [Span(*pair, f"k{i}") for i, pair in enumerate(pairwise(edges))]
    row = {"text": "".join(parts), "spans": [list(span) for span in spans[::-1]]}
    assert annotated_row(row) == ("".join(parts), spans)


BAD_LINES = {
    "a B-X\nb O\n\nc I-X\n": (4, "invalid tags", "'I-X' of 'c'"),
    "a I-X\n\nb I-X\n\nc O\nd B-X": (6, "invalid tags", "IOB1"),
    "a B-X\nb M-X\nc O\n": (3, "invalid tags", "put M-X or E-X"),
    "a B-X\nb E-X\n\nc O\nd B-X\n\ne O": (5, "invalid tags", "the sentence's end"),
    "a B-X\nb I-X\n\na B-X\nb I-X\n\nc S-X": (7, "unknown tags", "'S-X'"),
    "a B-X\nb M-X\nc M-X\nd E-X\n\nf B-X\ng I-X\nh E-X": (7, "unknown tags", "'g'"),
    "a B-X\nb B-\n": (2, "unknown tags", "'B-'"),
    "the DT\ncat NN\n": (1, "unknown tags", "'DT'"),
    "a O\nb\nc O": (2, "broken lines", "'b'"),
    "a O\nb O\nNew York O": (3, "broken lines", "'New', 'York'"),
    "a O\n# id 7\nb O": (2, "broken lines", "'id'"),
    "a\tO\n\tO\n": (2, "invalid tokens", "''"),
    "a O\n\u200b O\n": (2, "invalid tokens", r"'\u200b'"),
    "a O\n\n\u3000 O\n": (3, "blank text", "blank"),
    "a O\nb O\n \tB-X\n": (1, "blank edges of entities", "' '"),
}


@pytest.mark.parametrize("content", BAD_LINES)
def test_bad_lines(content: str) -> None:
    """Law: an error names the line and the value; the other sentences are read."""
    line, kind, value = BAD_LINES[content]
    ((found_line, found_kind, fault),) = faults_of(content)
    assert (found_line, found_kind) == (line, kind)
    assert value in fault


def entities(*each: object, text: str = "\U0001f600 Ada") -> dict[str, object]:
    return {"text": text, "entities": list(each)}


BAD_ROWS: list[tuple[Any, str, str]] = [
    ([1, 2], "no entities", "[1, 2]"),
    ({"text": "Rome"}, "no entities", "'Rome'"),
    ({"text": "Rome", "label": "LOC"}, "no entities", "'LOC'"),
    ({"tokens": ["a"], "tags": [0]}, "unknown tags", "tag 0 at token 1"),
    ({"tokens": ["a", "b"], "tags": ["O"]}, "missing tags", "2 tokens"),
    ({"tokens": ["a", "b"], "tags": ["", "O"]}, "unknown tags", "''"),
    ({"tokens": ["a", None], "tags": ["O", "O"]}, "invalid tokens", "None"),
    ({"tokens": ["a", "b"], "tags": ["B-X", "I-Y"]}, "invalid tags", "'I-Y' of 'b'"),
    ({"text": "a", "spans": [], "answer": "reject"}, "rejected annotations", "reject"),
    (entities(text=" \u200b"), "blank text", "blank"),
    (entities(text="\ud83d"), "invalid characters", r"'\ud83d'"),
    (entities([2, 5, "X\0"]), "invalid characters", r"'X\x00'"),
    (entities([0, 4]), "invalid entities", "[0, 4]"),
    (entities([2, 4.0, "X"]), "invalid entities", "4.0"),
    (entities([False, 5, "X"]), "invalid entities", "False"),
    (entities([3, 6, "X"]), "invalid entities", "<= 5"),
    (entities([2, 2, "X"]), "invalid entities", "[2, 2"),
    (entities([2, 5, " "]), "invalid entities", "' '"),
    (
        entities({"start": 3, "end": 5, "label": "X", "text": "Ad"}),
        *("invalid entities", "UTF-16"),
    ),
    (entities([1, 5, "X"]), "blank edges of entities", "' Ada'"),
    (entities([2, 5, "X"], [2, 5, "X"]), "overlapping entities", "from 2 to 5"),
    (entities([3, 5, "X"], [2, 4, "Y"]), "overlapping entities", "Y from 2 to 4"),
]


@pytest.mark.parametrize(("row", "kind", "value"), BAD_ROWS)
def test_bad_rows(row: Any, kind: str, value: str) -> None:
    """Law: a row that cannot be used names the kind of its mistake, and the value."""
    with pytest.raises(RowError, match=re.escape(value)) as caught:
        annotated_row(row)
    assert caught.value.kind == kind
    assert "\n" not in caught.value.fault


def test_names_of_numbers() -> None:
    """Law: a number without a name is an error with both; a text has no tags."""
    for tag in (-1, 4):
        message = f"tag {tag} at token 2 is not one of 4"
        with pytest.raises(RowError, match=message) as caught:
            annotated_row({"tokens": ["a", "b"], "tags": [0, tag]}, NUMBERS)
    copied = copy(caught.value)  # as pickle does it, from another process
    assert (copied.kind, str(copied)) == (caught.value.kind, str(caught.value))
    assert row_tags(ROWS["Prodigy"]) == row_tags({"text": "a"}) == []
    columns = [tag_column(ROWS[name]) for name in ("strings", "numbers", "Prodigy")]
    assert columns == ["ner_tags", "labels", None]


scalars = (
    st.none()
    | st.integers(-1, 3)
    | st.sampled_from(["", "a b", "O", "B-X", "I-X", "X", "accept"])
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["start", "end", "label"]), inner)
    ),
    max_leaves=6,
)
some = scalars | json_values


@settings(max_examples=150)
@given(
    st.fixed_dictionaries({"text": some, "entities": st.lists(some, max_size=2)})
    | st.fixed_dictionaries({"tokens": st.lists(some), "tags": st.lists(some)})
    | st.fixed_dictionaries(
        {
            "data": st.fixed_dictionaries({"text": some}),
            "annotations": st.lists(st.fixed_dictionaries({"result": some})),
        }
    )
    | json_values
)
def test_any_value_is_read_or_refused(row: Any) -> None:
    """Law: whatever JSON holds gives entities inside of their text, or a `RowError`."""
    try:
        text, spans = annotated_row(row, ["O", "B-X"])
    except RowError:
        return
    edges = [edge for start, end, _ in spans for edge in (start, end)]
    assert edges == sorted(edges)
    assert all(text[start:end].strip() for start, end, _ in spans)
