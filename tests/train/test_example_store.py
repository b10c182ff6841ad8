"""Stores: what a file holds comes back, from flat files, in any process."""

import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import in_tmp_path, refused, write  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.train.data import example_store, labelled_text, tagged_text
from halfstep.train.data.corpus import Corpus, load
from halfstep.train.data.example_store import Store, open_store

SUPPRESSED = [HealthCheck.function_scoped_fixture]
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
).filter(str.strip)
pairs = st.lists(st.tuples(texts, st.sampled_from(["a", "b", "\u00e4", "7"])))


def lines(name: str, values: list[object]) -> Path:
    """Write a JSON value a line, or an array."""
    if name.endswith(".json"):
        return write(name, json.dumps(values, indent=1))
    return write(name, "".join(f"{json.dumps(v)}\n" for v in values))


def held(kept: Store) -> list[tuple[str, str, str]]:
    return [
        (kept.text(i), kept.words[kept.word_at[i]], kept.where(i))
        for i in range(len(kept))
    ]


@given(pairs.filter(len), st.sampled_from(["a.json", "a.jsonl"]))
@settings(max_examples=40, suppress_health_check=SUPPRESSED)
def test_a_store_holds_what_its_reader_reads(
    found: list[tuple[str, str]], name: str
) -> None:
    """Law: text, label, file and line of each row are those that the reader gives."""
    path = lines(name, [*found])
    read = [(row.text, row.label_word, row.where) for row in labelled_text.read(path)]
    made = open_store(path, "classify", None)
    assert held(made) == read
    assert len(made) == len(found)
    assert list(made.words) == list(dict.fromkeys(label for _, label in found))
    assert made.word_at.dtype == np.int32


def marked(kept: Store) -> list[tuple[str, list[tuple[int, int, str]], str]]:
    found = []
    for i in range(len(kept)):
        spans = kept.spans[kept.span_starts[i] : kept.span_starts[i + 1]].tolist()
        named = [(start, end, kept.words[kind]) for start, end, kind in spans]
        found.append((kept.text(i), named, kept.where(i)))
    return found


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_store_holds_the_entities_of_each_text(name: str) -> None:
    """Law: text, entities and place of each row are those that the reader gives."""
    count = 1025  # more than one piece
    values = [
        {
            "text": "so good a day",
            "entities": [[k, k + 1, f"K{(n + k) % 5}"] for k in (0, 3, 8)[: n % 4]],
        }
        for n in range(count)
    ]
    path = lines(name, [*values])
    read = [
        (m.text, [(s.start, s.end, s.kind) for s in m.spans], m.where)
        for m in tagged_text.read(path)
    ]
    made = open_store(path, "ner", None)
    assert marked(made) == read
    assert (made.span_starts.dtype, made.spans.dtype) == (np.int64, np.int32)
    owners, words = made.uses()
    told = [(row, kind) for row, (_, found, _) in enumerate(read) for *_, kind in found]
    assert [*zip(owners.tolist(), (made.words[w] for w in words), strict=True)] == told


def test_reading_stops_at_the_limit() -> None:
    """Law: what comes after the first rows is neither held nor checked."""
    path = lines("a.jsonl", [["x", "a"], ["y", "b"], ["z"]])
    assert held(open_store(path, "classify", 2)) == [
        ("x", "a", "a.jsonl line 1"),
        ("y", "b", "a.jsonl line 2"),
    ]
    with pytest.raises(UserError, match=r"a.jsonl line 3: \[\"z\"\] is not a text"):
        open_store(path, "classify", 3)


def test_the_key_is_that_of_the_rows() -> None:
    """Law: it is the same for the same rows of any file, and another for others."""
    one = open_store(lines("a.jsonl", [["x", "a"], ["y", "b"]]), "classify", None).key
    table = write("b.csv", "text,label\nx,a\n\ny,b\n")
    assert open_store(table, "classify", None).key == one
    for x, y, b in (("x", "z", "b"), ("xy", "y", "b"), ("x", "y", "c")):
        path = lines("c.jsonl", [[x, "a"], [y, b]])
        assert open_store(path, "classify", None).key != one


def test_the_key_is_not_that_of_lines_left_out() -> None:
    """Law: a blank line more before a sentence that is left out changes no key."""
    whole = "".join(f"w{n} B-X\n\n" for n in range(200))
    keys = set()
    for start in ("", "\n", "\n\n"):
        path = write(f"{len(start)}.conll", f"{start}a B-X\nb I-Y\n\n{whole}")
        made = open_store(path, "ner", None)
        (fault,) = made.left_out
        assert f"line {len(start) + 2}" in fault
        keys.add(made.key)
    assert len(keys) == 1


def test_a_known_file_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: content decides, not the name; a suffix of another format is another."""
    first = open_store(lines("a.jsonl", [["x", "a"]]), "classify", None)
    monkeypatch.delattr(labelled_text, "read")
    again = open_store(Path("a.jsonl").rename("b.jsonl"), "classify", None)
    assert (again.key, again.where(0)) == (first.key, "b.jsonl line 1")
    with pytest.raises(AttributeError):
        open_store(Path("b.jsonl").rename("b.ndjson"), "classify", None)


def test_a_file_that_changes_while_it_is_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: no store holds the rows of one content under the name of another."""
    path = lines("a.jsonl", [["x", "a"]])
    read = labelled_text.read

    def change(path: Path, **more: Any) -> object:
        lines("a.jsonl", [["y", "a"]])
        return read(path, **more)

    monkeypatch.setattr(labelled_text, "read", change)
    fault = "a.jsonl changed while it was read; start when it is whole."
    assert refused(open_store, path, "classify", None) == fault


PAIRS = ("AB", "CD")


def test_too_many_labels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a column that is no label is refused at its first row too many."""
    monkeypatch.setattr(example_store, "MAX_LABELS", 3)
    monkeypatch.setattr(example_store, "MAX_KINDS", 3)
    three, four = (
        lines(f"{most}.jsonl", [[f"t{n}", f"w{n % most}"] for n in range(9)])
        for most in (3, 4)
    )
    assert len(open_store(three, "classify", None)) == 9
    assert refused(open_store, four, "classify", None) == (
        "4.jsonl line 4: 'w3' is one label more than 3; is it a label, and not a text "
        "or a number of the row?"
    )
    texts = [
        {"text": "x y", "entities": [[0, 1, one], [2, 3, two]]} for one, two in PAIRS
    ]
    with pytest.raises(UserError, match=r"a.jsonl line 2: 'D' is one label more"):
        open_store(lines("a.jsonl", texts), "ner", None)


def test_a_store_travels_as_its_folder() -> None:
    """Law: its pickle does not grow with the file, and opens the same rows."""
    few = open_store(lines("a.jsonl", [["x", "a"]]), "classify", None)
    path = lines("a.jsonl", [["x" * 99, n] for n in range(999)])
    many = open_store(path, "classify", None)
    assert len(pickle.dumps(many)) == len(pickle.dumps(few))
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        assert pool.submit(held, many).result(timeout=120) == held(many)


def test_too_many_sentences_with_invalid_tags_are_refused() -> None:
    """Law: more than one in a hundred is refused, with the first and their number."""
    good, bad = "Ann B-PER\n\n", "Ann O\nLee I-PER\n\n"
    (fault,) = open_store(write("a.bio", good * 99 + bad), "ner", None).left_out
    with pytest.raises(UserError) as caught:
        open_store(write("a.bio", good * 98 + bad), "ner", None)
    assert str(caught.value) == (
        f"{fault.replace('line 200', 'line 198')} Such tags are in 1 of 99 sentences; "
        "at most one in a hundred is left out."
    )


def splits(
    suffix: str, train: str, dev: str, names: tuple[str, ...] | None = None
) -> Corpus:
    """Load a directory of two splits, given as contents."""
    write(f"posts/train{suffix}", train)
    write("posts/dev.csv", dev)
    given: dict[str, Any] = {"limit": None, "dev_share": 0.2, "seed": 0}
    return load(Path("posts"), task="classify", label_names=names, **given)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".csv", "sentence,class\nx,a\ny,a\nz,b\nv,b\n"),
        (".tsv", "\nsentence\tclass\nx\ta\ny\tb\n"),
    ],
)
def test_a_header_with_other_names_is_no_row(suffix: str, content: str) -> None:
    """Law: a first label that stands nowhere else is not taken for a class."""
    line = refused(splits, suffix, content, "x,a\n")
    number = 1 + content.startswith("\n")
    start = f"posts/train{suffix} line {number}: label 'class' stands in no other row: "
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("suffix", "content", "labels"),
    [
        (".csv", "x,class\ny,a\nz,a\nv,class\n", ("a", "class")),
        (".csv", "x,class\ny,a\n", ("a", "class")),
        (".csv", "text,label\nx,class\ny,a\nz,a\nv,b\n", ("a", "b", "class")),
        (".csv", "x,2\ny,1\nz,1\nv,0\n", ("0", "1", "2")),
        (".jsonl", '["x", "class"]\n["y", "a"]\n["z", "a"]\n', ("a", "class")),
    ],
)
def test_a_first_row_may_be_data(
    suffix: str, content: str, labels: tuple[str, ...]
) -> None:
    """Law: a label that comes again, one below a header, and a number are labels."""
    assert splits(suffix, content, f"x,{labels[-2]}\n").labels == labels


def test_a_rare_label_may_come_first() -> None:
    """Law: a label that train holds heads no dev, and one that was named no train."""
    assert len(splits(".csv", "x,a\ny,b\nz,a\nv,b\n", "x,a\ny,b\nz,b\n").dev) == 3
    assert len(splits(".csv", "x,a\ny,b\nz,b\n", "x,b\n", ("a", "b")).train) == 3
