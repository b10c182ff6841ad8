"""Findings: said where there is something to do, silent where there is not."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.data_checks import data_findings


class Texts(list[int]):
    """A split, as the hash of each text; its labels and entity types are given."""

    def __init__(
        self, hashes: Iterable[int], counts: tuple[int, ...], types: tuple[str, ...]
    ) -> None:
        super().__init__(hashes)
        self.counts, self.types = counts, types
        self.source = SimpleNamespace(use_rows=())

    def label_counts(self) -> np.ndarray[Any, Any]:
        return np.array(self.counts)

    def text_hashes(self) -> np.ndarray[Any, Any]:
        return np.array(self, np.int64)

    def words(self) -> set[str]:
        return {*self.types}

    def distinct(self) -> Self:
        return self


def texts(*lengths: int, inexact: int = 0) -> EncodedTexts:
    made = EncodedTexts.build([[1] * length for length in lengths])
    per_text = {"num_inexact": np.full(len(lengths), inexact // max(1, len(lengths)))}
    return replace(made, per_text=per_text)


QUIET: dict[str, Any] = {
    "train": texts(3, 4),
    "dev": texts(2),
    "test": texts(),
    "notes": (),
    "labels": ("a", "b"),
    "use_rows": (0, 0, 1),
    "target": "class",
    "repeats": 0,
    "task": "classify",
    "train_counts": (1, 1),
    "dev_counts": (50, 50),
    "train_hashes": range(1000),
    "dev_hashes": range(1000, 1200),
    "test_hashes": (),
    "test_types": (),
}
"""A run of which there is nothing to say."""


def trainer(**more: Any) -> Any:
    said = SimpleNamespace(**QUIET | more)
    encoded = {name: getattr(said, name) for name in ("train", "dev", "test")}
    corpus = SimpleNamespace(
        notes=said.notes,
        target=said.target,
        repeats=said.repeats,
        labels=said.labels,
        train=Texts(said.train_hashes, said.train_counts, ()),
        dev=Texts(said.dev_hashes, said.dev_counts, ()),
        test=Texts(said.test_hashes, (), said.test_types),
        task=said.task,
    )
    corpus.train.source.use_rows = said.use_rows
    job = SimpleNamespace(encoded=encoded, longest=8, corpus=corpus)
    return SimpleNamespace(job=job)


NER = {"task": "ner"}
NO_ENTITY = "The test texts hold no entity: whatever the model finds there, its F1 is"
CUT = "where texts are cut: raise --max-length, if the model takes more."
WIDE = "the 95%% confidence interval of %s is up to 0.20 wide; evaluate on more."
OF = "of the training file cannot be shown exactly by tokens: an ed"


SAID: list[tuple[Any, Any, str]] = [
    ({}, {"repeats": 1}, "1 text equals an earlier one: equal texts are in the sa"),
    ({}, {"dev_counts": (50, 46)}, f"dev has 96 distinct texts: {WIDE % 'accuracy'}"),
    (
        NER | {"dev_counts": (90, 10)},
        NER | {"dev_counts": (900, 1)},
        f"dev has 1 entity of 'b': {WIDE % 'its recall'}".replace("0.20", "0.89"),
    ),
    (
        {},
        {"dev_counts": (200, 0)},
        "dev has no text of 'b': macro averages count such labels as 0; evaluate on m",
    ),
    (
        {},
        {"train_counts": (0, 9), "dev_counts": (0, 100)},
        "train has no text of 'a': macro averages count such labels as 0; name fewer",
    ),
    (
        NER | {"test_hashes": (-1,), "test_types": ("PER",)},
        NER | {"test_hashes": (-1,)},
        NO_ENTITY,
    ),
    (
        {"train_hashes": (*range(980), *range(20))},
        {"train_hashes": (*range(979), *range(21))},
        "21 of 1,000 train texts equal an earlier one: drop them, unless",
    ),
    (
        {"dev_hashes": range(999, 1199)},
        {"dev_hashes": range(998, 1198)},
        "2 of 200 dev texts are in train too: scores on dev are too good; take",
    ),
    ({}, {"test_hashes": (-1, 5)}, "1 of 2 test texts are in train too: scores"),
    (
        {"train": texts(7, 7, 7), "dev": texts(7)},
        {"train": texts(7, 8, 8), "dev": texts(7)},
        f"2 of 3 train texts reach 8 tokens, {CUT}",
    ),
    ({}, {"dev": texts(7, 8)}, f"1 of 2 dev texts reaches 8 tokens, {CUT}"),
    (
        {"labels": ("so good", "so bad")},
        {"labels": ("so good", "So  GOOD")},
        "'so good', 'So  GOOD' differ in case or blanks only, and are 2 labels",
    ),
    (
        {"target": "multi_label"},
        {"target": "multi_label", "use_rows": (0, 1)},
        "No text has two labels: if they are joined by another sign than a comma",
    ),
    # Inexact entities of dev are of another file, or of the same one again.
    ({"dev": texts(3, inexact=4)}, {"train": texts(3, inexact=4)}, f"4 entities {OF}"),
    (NER, {"train": texts(3, inexact=1)}, f"1 entity {OF}"),
]


@pytest.mark.parametrize(("just", "more", "said"), SAID)
def test_what_is_said(just: Any, more: Any, said: str) -> None:
    """Law: each finding has its bound, and says what to do about it beyond."""
    assert data_findings(trainer(**just)) == ()
    (finding,) = data_findings(trainer(**more))
    assert finding.startswith(said)


def test_a_file_that_was_split_has_one_line_on_repeats() -> None:
    """Law: equal texts that are kept together are counted once."""
    told = data_findings(trainer(repeats=500, train_hashes=(*range(500),) * 2))
    assert len(told) == 1


def test_notes_of_reading_come_first() -> None:
    """Law: what reading chose or left out is among the findings."""
    notes = ("a.bio: 2 rows were left out.", "a.bio: label is the column 'mood'.")
    assert data_findings(trainer(notes=notes, repeats=1))[:2] == notes


def test_numbers_have_no_classes() -> None:
    """Law: regression has no finding about classes, whatever the counts."""
    more: dict[str, Any] = {"train_counts": (0, 0), "dev_counts": (0, 0)}
    assert data_findings(trainer(target="regression", **more)) == ()
