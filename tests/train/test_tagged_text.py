"""Texts with entities: columns of tagged tokens and JSON, and each refusal in full."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest
from data_files import cells, in_tmp_path, refused, write  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.train.data.tagged_text import (
    FORMATS,
    AnnotatedText,
    InvalidTagsError,
    Span,
    read,
)


def texts_of(name: str, content: str | bytes) -> list[AnnotatedText]:
    return list(read(write(name, content)))


def brief(texts: list[AnnotatedText]) -> list[tuple[str, list[tuple[str, str]], int]]:
    return [
        (
            each.text,
            [(each.text[s.start : s.end], s.kind) for s in each.spans],
            each.line,
        )
        for each in texts
    ]


def test_where_a_sentence_stands() -> None:
    """Law: a text names its file and first line; `-DOCSTART-` is none, and ends one."""
    content = (
        "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\n-DOCSTART- -X- O O\n"
        "he PRP B-NP O\n \n\n\nsat VB B-VP O"
    )
    found = texts_of("a.conll", content)
    assert [(each.text, each.line, each.where) for each in found] == [
        ("EU", 3, "a.conll line 3"),
        ("he", 5, "a.conll line 5"),
        ("sat", 9, "a.conll line 9"),
    ]
    assert found[0] == AnnotatedText("EU", (Span(0, 2, "ORG"),), 3, "a.conll line 3")


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".bmes", "a B-X\nb E-X\n\nc O\n"),
        (".bio", "\ufeffa B-X\nb I-X\n\nc O\n"),
        (".bioes", "a B-X\r\nb I-X\r\n\r\nc O\r\n"),
        (".conll", "a\tB-X\nb\tI-X\n\t\nc\tO"),
        (".iob", " a  ?  B-X \nb !  I-X\n \t \nc ? O"),
        (".txt", "a\t?\tB-X\t\r\nb\t?\tI-X\n\n\nc\t!\tO"),
    ],
)
def test_forms_of_columns(suffix: str, content: str) -> None:
    """Law: suffix, scheme, tabs, blanks, line ends and a byte-order mark are one."""
    found = brief(texts_of(f"a{suffix}", content))
    assert [each[:2] for each in found] == [("a b", [("a b", "X")]), ("c", [])]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["高", "勇", "：", "男"], "高勇：男"),
        (["1966", "年", "出生"], "1966 年出生"),
        (["他", "在", "IBM", "工作", "。"], "他在 IBM 工作。"),
        (["he", "said", "“", "yes", "”"], "he said “ yes ”"),
        (["1", "9", "6", "6"], "1 9 6 6"),
        (["東京", "タワー", "ｱｲ"], "東京タワーｱｲ"),
        (["서울", "에서", "ﾡ", "ﾡ"], "서울 에서 ﾡ ﾡ"),
        (["New York", "is", "\u3000", "big"], "New York is\u3000big"),
        (["好", "\U0001f600", "𠮷"], "好\U0001f600𠮷"),
    ],
)
def test_tokens_are_joined(tokens: list[str], text: str) -> None:
    """Law: blanks stand where people write them, and each token is found again."""
    lines = [f"{token}\t{'O' if token.isspace() else 'B-X'}" for token in tokens]
    ((found, entities, _),) = brief(texts_of("a.txt", "\n".join(lines)))
    assert found == text
    assert entities == [(token, "X") for token in tokens if not token.isspace()]


words = st.text(st.characters(categories=["L", "N"], max_codepoint=0x2FF), min_size=1)
sentences = st.lists(
    st.tuples(
        st.lists(words, min_size=1, max_size=4), st.sampled_from(["", "PER", "a-b_C"])
    ),
    min_size=1,
    max_size=5,
)


def letters(scheme: str, length: int) -> str:
    if scheme == "IOB2":
        return "B" + "I" * (length - 1)
    inner = scheme[1]
    return "S" if length == 1 else "B" + inner * (length - 2) + "E"


@settings(max_examples=40)
@given(
    st.lists(sentences, min_size=1, max_size=4),
    st.sampled_from(["IOB2", "BIES", "BMES"]),
)
def test_columns_read_what_was_tagged(
    file: list[list[tuple[list[str], str]]], scheme: str
) -> None:
    """Law: entities written as tags of any scheme come back, each with its kind."""
    blocks, expected = [], []
    for sentence in file:
        tags = [
            f"{prefix}-{kind}" if kind else "O"
            for tokens, kind in sentence
            for prefix in letters(scheme, len(tokens))
        ]
        tokens = list(chain.from_iterable(tokens for tokens, _ in sentence))
        blocks.append("\n".join(map(" ".join, zip(tokens, tags, strict=True))))
        entities = [(" ".join(tokens), kind) for tokens, kind in sentence if kind]
        expected.append((" ".join(tokens), entities))
    found = brief(texts_of("a.txt", "\n\n".join(blocks)))
    assert [each[:2] for each in found] == expected


IOB1 = "in IOB1 it could: save as IOB2, where B-X begins it."
TOKENS = "each line holds a token and its tag"
BAD = rf"""
a O\nb I-X\n | 2 | tag I-X cannot follow O; {IOB1}
a O\nb M-X\nc E-X\n | 2 | tag M-X cannot follow O; begin with B-X, or S-X for a
a B-X\nb M-X\nc O\n | 3 | tag O cannot follow M-X, which is unclosed; put M-
a B-X\nb E-X\n\nc B-X\n\nd O | 4 | the sentence ends after B-X, which is unc
a O\n\nb B-X\n\nc S-X\n | 5 | tag S-X is of BMES or BIOES, but IOB2 began in line 3;
a B-X\nb M-X\nc E-X\nd B-X\ne I-X\nf E-X | 5 | tag I-X stands beside M in li
a B-\n | 1 | tag 'B-' is unknown; a tag is O, or B, I, M, E or S
a O\nb\n | 2 | "b" is the only column; {TOKENS}
a O\nNew York O\n | 2 | column count is 3, but 2 in line 1; put tabs round a
a\tO\n\tO\n | 2 | token "" has no width; drop the line.
a O\n\u200b O\n | 2 | token "\\u200b" has no width; drop the line.
a O\rb O\r | 1 | a carriage return stands inside the line; end lines with\x20
a O\n\n\u3000 O\n | 3 | text is blank; give it words or drop it.
a O\nb O\n \tB-X\n | 1 | entity X " " begins or ends with a blank
"""


@pytest.mark.parametrize(("content", "line", "fault"), cells(BAD))
def test_a_bad_line_is_refused(content: str, line: str, fault: str) -> None:
    """Law: a tag or token that cannot be names its line, the fault and the cure."""
    assert refused(texts_of, "a.txt", content).startswith(f"a.txt line {line}: {fault}")


# What is left out


FIRST = "a B-X\nb M-X\nc E-X\n"
SCHEMES = {
    FIRST: ("BMES", "S{0}|B{0}(M{0})*E{0}"),
    "a B-X\nb I-X\nc E-X\n": ("BIES", "S{0}|B{0}(I{0})*E{0}"),
    "a O\nb B-X\nc I-X\n": ("BI", "B{0}(I{0})*"),
}
"""A sentence that tells its scheme -> prefixes, and what an entity is."""


@settings(max_examples=60)
@given(st.sampled_from([*SCHEMES]), st.data())
def test_sentences_are_left_out_one_by_one(first: str, data: st.DataObject) -> None:
    """Law: given a list, exactly the sentences that cannot be are missing and told."""
    prefixes, entity = SCHEMES[first]
    tags = st.sampled_from(["O", *(f"{p}-{kind}" for p in prefixes for kind in "XY")])
    sentences = data.draw(st.lists(st.lists(tags, min_size=1, max_size=4), max_size=9))
    valid = re.compile(f"(O|{entity.format('-X')}|{entity.format('-Y')})*")
    blocks = [first]
    kept: list[tuple[int, int]] = [(1, 4)]
    lost: list[tuple[int, int]] = []
    line = 5
    for sentence in sentences:
        blocks.append("".join(f"x {tag}\n" for tag in sentence))
        is_right = valid.fullmatch("".join(sentence)) is not None
        (kept if is_right else lost).append((line, line + len(sentence)))
        line += len(sentence) + 1
    path = write("a.txt", "\n".join(blocks))
    left_out: list[str] = []
    found = list(read(path, left_out))
    assert [each.line for each in found] == [first for first, _ in kept]
    for said, (begin, past) in zip(left_out, lost, strict=True):
        match = re.match(r"a\.txt line (\d+): ", said)
        assert match, said
        assert begin <= int(match[1]) < past
    if lost:
        with pytest.raises(InvalidTagsError, match=f"^{re.escape(left_out[0])}$"):
            list(read(path))
    else:
        assert list(read(path)) == found


@pytest.mark.parametrize("line", ["b U-X", "b", "b c O", "\u200b O"])
def test_what_is_no_matter_of_order_is_refused_still(line: str) -> None:
    """Law: an unknown tag or a broken line refuses the file, list or none."""
    path = write("a.txt", f"{FIRST}\n{line}\n")
    left_out: list[str] = []
    with pytest.raises(UserError, match=r"^a\.txt line 5: ") as caught:
        list(read(path, left_out))
    assert not isinstance(caught.value, InvalidTagsError)
    assert left_out == []


def test_what_is_left_out_decides_nothing() -> None:
    """Law: where all is left out the list says why; others still tell their scheme."""
    left_out: list[str] = []
    assert list(read(write("a.txt", "a I-X\n"), left_out)) == []
    assert left_out == [f"a.txt line 1: tag I-X cannot begin a sentence; {IOB1}"]
    (kept,) = read(write("a.bmes", "q O\na I-X\n\nb B-X\nc E-X\n"), left_out)
    assert [(span.start, span.end) for span in kept.spans] == [(0, 3)]
    assert len(left_out) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_objects(suffix: str) -> None:
    """Law: a text knows its entities, in order, and where it stands."""
    entry = '{"text": "Ada in Rome", "entities": [[7, 11, " LOC"], [0, 3, "PER"]]}'
    is_array = suffix == ".json"
    where = f"a{suffix} line 2{' entry 1' if is_array else ''}"
    spans = (Span(0, 3, "PER"), Span(7, 11, "LOC"))
    found = texts_of(f"a{suffix}", f"[\n{entry}]" if is_array else f"\n{entry}\n\n")
    assert found == [AnnotatedText("Ada in Rome", spans, 2, where)]


chars = st.characters(codec="utf-8", categories=["L", "N", "P", "S"])


@settings(max_examples=40)
@given(st.lists(st.lists(st.text(chars, min_size=1), min_size=1), min_size=1))
def test_objects_read_what_json_writes(texts: list[list[str]]) -> None:
    """Law: entities that touch each other come back, in characters of any plane."""
    objects, expected = [], []
    for parts in texts:
        edges = [sum(map(len, parts[:i])) for i in range(len(parts) + 1)]
        entities = [[edges[i], edges[i + 1], f"k{i}"] for i in range(len(parts))]
        objects.append({"text": "".join(parts), "entities": entities[::-1]})
        expected.append([(part, f"k{i}") for i, part in enumerate(parts)])
    array = texts_of("a.json", json.dumps(objects))
    lines = texts_of("a.jsonl", "\n".join(map(json.dumps, objects)))
    assert [found for _, found, _ in brief(array)] == expected
    assert [found for _, found, _ in brief(lines)] == expected


OBJECT = 'each line holds {"text": "...", "entities": [[start, end, type], ...]}.'
ROME = '{"text": "Rome", "entities": [%s]}'
INSIDE = "it is [start, end, type]: 0 <= start < end <= 4, and type is a word."
BAD_OBJECTS = rf"""
[1, 2] | [1, 2] is not a text with entities; {OBJECT}
{{"text": "Rome"}} | {{"text": "Rome"}} is not a text with entities
{{"text": " \\u200b", "entities": []}} | text is blank; give it words or drop
{{"text": "\\ud83d", "entities": []}} | a character is cut in half (a lone surr
{ROME % "[0, 4]"} | entity 1 is [0, 4]; {INSIDE}
{ROME % '[0, 4.0, "X"]'} | entity 1 is [0, 4.0, "X"]; {INSIDE}
{ROME % '[false, 4, "X"]'} | entity 1 is [false, 4, "X"]; {INSIDE}
{ROME % '[0, 5, "X"]'} | entity 1 is [0, 5, "X"]; {INSIDE}
{ROME % '[2, 2, "X"]'} | entity 1 is [2, 2, "X"]; {INSIDE}
{ROME % '[0, 4, " "]'} | entity 1 is [0, 4, " "]; {INSIDE}
{ROME % '[0, 4, "X"], [0, 4, "X"]'} | entity X from 0 to 4 is given twice.
{ROME % '[1, 4, "X"], [0, 2, "Y"]'} | entities overlap: Y from 0 to 2 and X from 1
"""


@pytest.mark.parametrize(("entry", "fault"), cells(BAD_OBJECTS))
def test_a_bad_object_is_refused(entry: str, fault: str) -> None:
    """Law: an object that cannot be used names its line, the fault and the cure."""
    content = '{"text": "x", "entities": []}\n\n' + entry + "\n"
    assert refused(texts_of, "a.jsonl", content).startswith(f"a.jsonl line 3: {fault}")


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.conll", "\n-DOCSTART- O\n\n", TOKENS),
        ("a.jsonl", "\n", OBJECT),
        ("a.json", "[]", OBJECT.replace("line holds", "entry is")),
    ],
)
def test_a_bad_file_is_refused(name: str, content: str | bytes, fault: str) -> None:
    """Law: a file that holds no readable texts says why, and how to save it."""
    start = f"{name} holds no texts; {fault}"
    assert refused(texts_of, name, content).startswith(start)


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what the system says against reading is told."""

    def forbid(path: Path, _mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    path = write("a.txt", "a O")
    monkeypatch.setattr(Path, "open", forbid)
    told = refused(lambda: list(read(path)))
    assert told == "a.txt cannot be read: Permission denied."


def test_another_suffix_is_refused() -> None:
    """Law: the suffixes that can be read are named; capitals make no difference."""
    suffixes = ".bmes, .bio, .bioes, .conll, .iob, .txt, .json, .jsonl or .ndjson"
    assert set(suffixes.replace(",", " ").split()) - {"or"} == FORMATS.keys()
    fault = f"a.csv: suffix '.csv' is unknown; save it as {suffixes}."
    assert refused(texts_of, "a.csv", "") == fault
    Path("b.txt").mkdir()
    fault = f"b.txt is a directory; give one file, {suffixes}."
    assert refused(lambda: list(read(Path("b.txt")))) == fault
    assert texts_of("c.TXT", "a O")[0].text == "a"
