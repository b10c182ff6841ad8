"""Corpora of texts with entities: kinds, offsets, and each refusal."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from halfstep.errors import UserError
from halfstep.train.data.corpus import Corpus, Split, load

LONGEST_MESSAGE = 35


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the path as given; a relative one makes them whole literals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))


def corpus(
    path: Path | None, *, label_names: tuple[str, ...] | None = None, seed: int = 0
) -> Corpus:
    """Load with settings that suit small files."""
    return load(
        path, task="ner", label_names=label_names, limit=None, dev_share=0.2, seed=seed
    )


ANN = ("Ann in Rome", [(0, 3, "PER"), (7, 11, "LOC")])
BOB = ("Bob", [(0, 3, "PER")])
NIL = ("nobody", [])
Told = tuple[str, list[tuple[int, int, str]]]


def told(name: str, *texts: Told) -> Path:
    """Write texts with entities, one a line."""
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    objects = [{"text": text, "entities": found} for text, found in texts]
    path.write_text("".join(f"{json.dumps(o)}\n" for o in objects), encoding="utf-8")
    return path


def entities(split: Split, labels: tuple[str, ...]) -> list[Told]:
    """Return text and entities of each example."""
    return [
        (text, [(start, end, labels[kind]) for start, end, kind in split.spans(i)])
        for i, text in enumerate(split.texts())
    ]


def test_texts_with_entities_are_a_corpus() -> None:
    """Law: texts, offsets and kinds come back; kinds are sorted, or as given."""
    told("posts/train.jsonl", NIL, ANN, BOB, NIL)
    told("posts/dev.jsonl", BOB, NIL)
    got = corpus(Path("posts"))
    assert (got.task, got.labels) == ("ner", ("LOC", "PER"))
    assert entities(got.train, got.labels) == [NIL, ANN, BOB, NIL]
    assert entities(got.dev, got.labels) == [BOB, NIL]
    assert entities(got.test, got.labels) == []
    given = corpus(Path("posts"), label_names=("PER", "ORG", "LOC"))
    assert entities(given.train, given.labels) == [NIL, ANN, BOB, NIL]
    assert given.train.spans(1) == [(0, 3, 0), (7, 11, 2)]
    some = Split(got.train.store, np.array([2, 1]), got.train.ids)
    assert entities(some, got.labels) == [BOB, ANN]


def test_a_split_knows_its_kinds() -> None:
    """Law: the kinds of a split are those of its own texts, not of its file."""
    told("posts/train.jsonl", NIL, ANN, BOB)
    told("posts/dev.jsonl", BOB)
    whole = corpus(Path("posts")).train
    for rows, kinds in (([0], set()), ([2, 2, 0], {"PER"}), ([1], {"PER", "LOC"})):
        assert Split(whole.store, np.array(rows), whole.ids).words() == kinds
    assert Split(whole.store, whole.rows[:0], whole.ids).words() == set()


@pytest.mark.parametrize(
    ("train", "dev", "names", "message"),
    [
        (
            [NIL],
            [NIL],
            None,
            "posts: train holds no entity; annotate some, or take more",
        ),
        (
            [NIL, BOB],
            [NIL, NIL],
            None,
            "posts: dev holds no entity to choose the best model by; annotate some, or",
        ),
        (
            [BOB],
            [NIL, ANN],
            None,
            "posts/dev.jsonl line 2: kind 'LOC' of dev is absent from train; add",
        ),
        (
            [NIL, ANN],
            [BOB],
            ("PER", "LOCATION"),
            "posts/train.jsonl line 2: kind 'LOC' is unknown; use PER, LOCATION.",
        ),
        (
            [NIL, ANN],
            [BOB],
            ("PER", "PER"),
            "--labels PER,PER: name one or more labels, each once.",
        ),
    ],
)
def test_bad_kinds_are_refused(
    train: list[Told], dev: list[Told], names: tuple[str, ...] | None, message: str
) -> None:
    """Law: kinds must be known and in train; file and line are named."""
    told("posts/train.jsonl", *train)
    told("posts/dev.jsonl", *dev)
    with pytest.raises(UserError) as caught:
        corpus(Path("posts"), label_names=names)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).split()) <= LONGEST_MESSAGE


def test_the_built_in_entities_are_a_corpus() -> None:
    """Law: each split holds texts, and its entities lie in them, apart."""
    got = corpus(None)
    assert got.name == "entities"
    for split in (got.train, got.dev, got.test):
        assert len(split)
        for i in range(len(split)):
            edges = [e for start, end, _ in split.spans(i) for e in (start, end)]
            assert all(one <= two for one, two in pairwise(edges))
            assert not edges or edges[-1] <= len(split.text(i))


@pytest.mark.parametrize("seed", range(10))
def test_a_rare_kind_stays_in_train(seed: int) -> None:
    """Law: with any seed train holds each kind, though one stands in one text alone."""
    path = told("marked.jsonl", ANN, *[BOB] * 8, NIL)
    got = corpus(path, seed=seed)
    assert got.train.words() == {"PER", "LOC"}
    assert (len(got.train), len(got.dev)) == (8, 2)
