"""JSON with entities, and files that are none: what is read, and each refusal."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marked_files import brief, refusal, texts_of

from halfstep.errors import UserError
from halfstep.train.data.tagged_text import FORMATS, AnnotatedText, Span, read


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the path as given; a relative one makes them whole literals."""
    monkeypatch.chdir(tmp_path)


ENTITIES = [
    '{"text": "Ada in Rome", "%s": [[7, 11, " LOC"], [0, 3, "PER"]]}',
    (
        '{"text": "Ada in Rome", "%s": [{"start": 0, "end": 3, "label": "PER", "i": 1},'
        '{"start": 7, "end": 11, "type": "LOC"}], "label": "a word"}'
    ),
    (
        '{"text": "Ada in Rome", "%s": [{"start_offset": 0, "end_offset": 3, "label":'
        '"PER"}, [7, 11, "LOC"]]}'
    ),
]


@pytest.mark.parametrize("entry", ENTITIES)
@pytest.mark.parametrize("name", ["entities", "spans", "label"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_objects(entry: str, name: str, suffix: str) -> None:
    """Law: each way to write entities says the same, in any order."""
    entry = (entry % name).replace(', "label": "a word"' if name == "label" else "", "")
    content = f"[\n{entry}]" if suffix == ".json" else f"\n{entry}\n\n"
    where = f"a{suffix} line 2{' entry 1' if suffix == '.json' else ''}"
    spans = (Span(0, 3, "PER"), Span(7, 11, "LOC"))
    assert texts_of(f"a{suffix}", content) == [
        AnnotatedText("Ada in Rome", spans, 2, where)
    ]


chars = st.characters(codec="utf-8", categories=["L", "N", "P", "S"])


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


EDGES = "begins or ends with a blank, or holds nothing else; move its edges."
TOKENS = "each line holds a token and its tag, and a blank line ends a sentence."
OBJECT = 'each line holds {"text": "...", "entities": [[start, end, kind], ...]}.'
ENTRY = OBJECT.replace("line holds", "entry is")
IT_IS = 'it is [start, end, kind] or {"start": ..., "end": ..., "label": ...}.'
INSIDE = "must lie in the 4 characters of its text, end after start."
HALF = "a character is cut in half (a lone surrogate); fix or drop the row."
WHOLE = "an edge is a whole number, counted from 0."


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ("[1, 2]", f"[1, 2] is not a text with entities; {OBJECT}"),
        ('{"entities": []}', f"text is missing; {OBJECT}"),
        ('{"text": "Rome"}', f"entities is missing; {OBJECT}"),
        ('{"text": "Rome", "label": 3}', f"entities is missing; {OBJECT}"),
        ('{"text": 3, "entities": []}', "text is 3; a text is a string."),
        ('{"text": "Rome", "spans": null}', f"spans is null; {OBJECT}"),
        (
            '{"text": "Rome", "spans": [], "label": []}',
            "spans and label are both entities; keep one.",
        ),
        (
            '{"text": " \\u200b", "spans": []}',
            "text is blank; give it words or drop it.",
        ),
        (
            '{"text": "\\ud83d", "spans": []}',
            "a character is cut in half (a lone surrogate); fix or drop the row.",
        ),
        ("[0, 4]", f"entity 1 is [0, 4]; {IT_IS}"),
        ('{"start": 0, "end": 4}', f'entity 1 is {{"start": 0, "end": 4}}; {IT_IS}'),
        ('[0, 4.0, "X"]', f"entity 1 from 0 to 4.0: {WHOLE}"),
        ('[false, 4, "X"]', f"entity 1 from false to 4: {WHOLE}"),
        ('[0, 4, "X"], ["0", 4, "X"]', f'entity 2 from "0" to 4: {WHOLE}'),
        ('[0, 5, "X"]', f"entity 1 from 0 to 5 {INSIDE}"),
        ('[-1, 2, "X"]', f"entity 1 from -1 to 2 {INSIDE}"),
        ('[2, 2, "X"]', f"entity 1 from 2 to 2 {INSIDE}"),
        ('[3, 2, "X"]', f"entity 1 from 3 to 2 {INSIDE}"),
        ('[0, 4, " "]', 'entity 1 has kind " "; a kind is a word.'),
        ("[0, 4, 7]", "entity 1 has kind 7; a kind is a word."),
        ('[0, 4, "\\udc00"]', f"entity 1 has a kind in which {HALF}"),
        ('[0, 4, "X"], [0, 4, "X"]', "entity X from 0 to 4 is given twice."),
        (
            '[1, 4, "X"], [0, 2, "Y"]',
            "entities overlap: Y from 0 to 2 and X from 1 to 4; keep one.",
        ),
        (
            '[0, 4, "X"], [0, 4, "Y"]',
            "entities overlap: X from 0 to 4 and Y from 0 to 4; keep one.",
        ),
    ],
)
def test_a_bad_object_is_refused(entry: str, fault: str) -> None:
    """Law: an object that cannot be used names its line, the fault and the cure."""
    if '"text"' not in entry and '"entities"' not in entry and entry != "[1, 2]":
        entry = f'{{"text": "Rome", "entities": [{entry}]}}'
    content = '{"text": "x", "entities": []}\n\n' + entry + "\n"
    assert refusal("a.jsonl", content) == f"a.jsonl line 3: {fault}"


def test_blank_edges_are_refused() -> None:
    """Law: no entity begins or ends with a blank, which no token would show."""
    entry = '[{"text": "in Rome", "entities": [[2, 7, "LOC"]]}]'
    assert (
        refusal("a.json", entry) == f'a.json line 1 entry 1: entity LOC " Rome" {EDGES}'
    )


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", "", f" holds no texts; {TOKENS}"),
        ("a.conll", "\n-DOCSTART- O\n\n", f" holds no texts; {TOKENS}"),
        ("a.jsonl", "\n", f" holds no texts; {OBJECT}"),
        ("a.json", "[]", f" holds no texts; {ENTRY}"),
        (
            "a.txt",
            b"a O\n\xba O\n",
            " line 2 is not UTF-8: byte 0xba at offset 4; save it as UTF-8.",
        ),
    ],
)
def test_a_bad_file_is_refused(name: str, content: str | bytes, fault: str) -> None:
    """Law: a file that holds no readable texts says why, and how to save it."""
    assert refusal(name, content) == name + fault


def test_what_is_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: no file, a directory, a suffix and a locked file are told apart."""
    suffixes = ".bmes, .bio, .bioes, .conll, .iob, .txt, .json, .jsonl or .ndjson"
    assert set(suffixes.replace(",", " ").split()) - {"or"} == FORMATS.keys()
    Path("b.txt").mkdir()
    faults = {
        "a.txt": "a.txt is not there; give a file or a directory that exists.",
        "b.txt": f"b.txt is a directory; give one file, {suffixes}.",
    }
    for name, fault in faults.items():
        with pytest.raises(UserError, match=f"^{re.escape(fault)}$"):
            next(read(Path(name)))
    assert (
        refusal("a.csv", "")
        == f"a.csv: suffix '.csv' is unknown; save it as {suffixes}."
    )

    def forbid(path: Path, _mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    Path("c.TXT").write_text("a O", encoding="utf-8")
    assert next(read(Path("c.TXT"))).text == "a"
    monkeypatch.setattr(Path, "open", forbid)
    with pytest.raises(
        UserError, match=r"^c\.TXT cannot be read: Permission denied\.$"
    ):
        next(read(Path("c.TXT")))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_is_never_in_memory(name: str) -> None:
    """Law: reading takes the memory of a text, not of the file."""
    line = '{"text": "Rome", "entities": [[0, 4, "LOC"]]}\n'
    block = line if name == "a.jsonl" else "Rome B-LOC\n\n"
    content = block * (300_000 // len(block))
    Path(name).write_text(content, encoding="utf-8")
    size = Path(name).stat().st_size
    tracemalloc.start()
    try:
        count = sum(1 for _ in read(Path(name)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 300_000 // len(block)
    # A buffer of the file, of 128 KiB at most, and a text.
    assert peak < size * 2 / 3
