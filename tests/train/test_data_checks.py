"""Findings: said where there is something to do, silent where there is not."""

from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.data_checks import data_findings


class Kinds(list[set[str]]):
    """A split, as the kinds of entities of each text."""

    def words(self) -> set[str]:
        return set().union(*self)


class Counts(list[int]):
    """A split whose texts differ, as the number of examples of each label."""

    def label_counts(self, num_labels: int) -> np.ndarray[Any, Any]:
        assert len(self) == num_labels
        return np.array(self)

    def distinct(self) -> Self:
        return self


def texts(*lengths: int, inexact: int = 0) -> EncodedTexts:
    made = EncodedTexts.build([[1] * length for length in lengths])
    return EncodedTexts(made.ids, made.starts, made.rows, inexact=inexact)


QUIET: dict[str, Any] = {
    "train": texts(3, 4),
    "dev": texts(2),
    "test": texts(),
    "left_out": (),
    "repeats": 0,
    "task": "classify",
    "train_counts": (1, 1),
    "dev_counts": (50, 50),
    "test_kinds": [],
}
"""A run of which there is nothing to say."""


def trainer(**more: Any) -> Any:
    said = SimpleNamespace(**QUIET | more)
    encoded = {name: getattr(said, name) for name in ("train", "dev", "test")}
    corpus = SimpleNamespace(
        left_out=said.left_out,
        repeats=said.repeats,
        labels=("a", "b"),
        train=Counts(said.train_counts),
        dev=Counts(said.dev_counts),
        task=said.task,
        test=Kinds(said.test_kinds),
    )
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
        "train has no text of 'a': macro averages count such labels as 0; number clas",
    ),
    (NER | {"test_kinds": [{"PER"}]}, NER | {"test_kinds": [set()]}, NO_ENTITY),
    (
        {"train": texts(7, 7, 7), "dev": texts(7)},
        {"train": texts(7, 8, 8), "dev": texts(7)},
        f"2 of 3 train texts reach 8 tokens, {CUT}",
    ),
    ({}, {"dev": texts(7, 8)}, f"1 of 2 dev texts reaches 8 tokens, {CUT}"),
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


def test_faults_come_first() -> None:
    """Law: damaged checkpoints come before what is about the data."""
    cut = {"train": texts(8, inexact=1), "dev": texts(8), "test": texts(8)}
    told = data_findings(trainer(**cut), ["step-00000009 is damaged"])
    assert [line.split(maxsplit=4)[3] for line in told[1:4]] == ["train", "dev", "test"]
    assert (told[0], told[4][:8]) == ("step-00000009 is damaged", "1 entity")
    assert len(told) == 5


@pytest.mark.parametrize(("count", "more"), [(1, ""), (20, ""), (22, " And 2 more.")])
def test_left_out_sentences(count: int, more: str) -> None:
    """Law: sentences that were left out are counted, and the first are named."""
    faults = tuple(f"a.bio line {number}: I after O." for number in range(count))
    (said,) = data_findings(trainer(left_out=faults))
    shown = " ".join(faults[:20])
    sentences = "1 sentence is" if count == 1 else f"{count} sentences are"
    assert said == f"{sentences} left out for invalid tags: {shown}{more}"
