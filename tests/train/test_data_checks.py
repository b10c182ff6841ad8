"""Findings: said where there is something to do, silent where there is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.data_checks import data_findings


def texts(*lengths: int, inexact: int = 0) -> EncodedTexts:
    """Return texts of so many tokens."""
    made = EncodedTexts.build([[1] * length for length in lengths])
    return EncodedTexts(made.ids, made.starts, made.rows, inexact=inexact)


class Kinds(list[set[str]]):
    """A split, as the kinds of entities of each text."""

    def words(self) -> set[str]:
        """Return the kinds of all texts."""
        return set().union(*self)


class Counts(list[int]):
    """A split, as the number of examples of each label."""

    def label_counts(self, num_labels: int) -> np.ndarray[Any, Any]:
        """Return the numbers."""
        assert len(self) == num_labels
        return np.array(self)

    def distinct(self) -> Counts:
        """Return the split, whose texts differ."""
        return self


def trainer(**more: Any) -> Any:
    """Return a trainer of whose run there is nothing to say, but for what is told."""
    job = {
        "encoded": {"train": texts(3, 4), "dev": texts(2), "test": texts()},
        "longest": 8,
        "corpus": SimpleNamespace(
            left_out=more.pop("left_out", ()),
            repeats=more.pop("repeats", 0),
            labels=("a", "b"),
            dev=Counts(more.pop("dev_counts", (50, 50))),
            task=more.pop("task", "classify"),
            test=Kinds(more.pop("test_kinds", [])),
        ),
    }
    job |= {name: more.pop(name) for name in ("encoded", "longest") if name in more}
    return SimpleNamespace(job=SimpleNamespace(**job), **more)


def test_nothing_to_say() -> None:
    """Law: a sound run has no findings; an empty test split is none."""
    assert data_findings(trainer()) == ()
    assert data_findings(trainer(task="ner")) == ()


@pytest.mark.parametrize(
    ("just", "more", "said"),
    [
        (
            {"repeats": 0},
            {"repeats": 1},
            "1 text equals an earlier one: equal texts are in the same split.",
        ),
        (
            {"dev_counts": (50, 50)},
            {"dev_counts": (50, 46)},
            (
                "dev has 96 distinct texts: the 95% confidence interval of accuracy is "
                "up to 0.20 wide; evaluate on more."
            ),
        ),
        (
            {"task": "ner", "dev_counts": (90, 10)},
            {"task": "ner", "dev_counts": (900, 1)},
            (
                "dev has 1 entity of 'b': the 95% confidence interval of its recall is "
                "up to 0.89 wide; evaluate on more."
            ),
        ),
        (
            {"task": "ner", "test_kinds": [set(), {"PER"}]},
            {"task": "ner", "test_kinds": [set(), set()]},
            (
                "The test texts hold no entity: whatever the model finds there, its F1 "
                "is 0; annotate some, or evaluate on other texts."
            ),
        ),
        (
            {"encoded": {"train": texts(7, 7, 7), "dev": texts(7)}},
            {"encoded": {"train": texts(7, 8, 8), "dev": texts(7)}},
            (
                "2 of 3 train texts reach 8 tokens, where texts are cut: raise "
                "--max-length, if the model takes more."
            ),
        ),
        (
            {"encoded": {"train": texts(7), "dev": texts(7, 7)}},
            {"encoded": {"train": texts(7), "dev": texts(7, 8)}},
            (
                "1 of 2 dev texts reaches 8 tokens, where texts are cut: raise "
                "--max-length, if the model takes more."
            ),
        ),
        (
            # Those of dev are of another file, or of the same one again.
            {"encoded": {"train": texts(3), "dev": texts(3, inexact=4)}},
            {"encoded": {"train": texts(3, inexact=4), "dev": texts(3)}},
            (
                "4 entities of the training file cannot be shown exactly by tokens: an "
                "edge is inside a token, or beyond --max-length."
            ),
        ),
        (
            {"encoded": {"train": texts(3), "dev": texts(3)}},
            {"encoded": {"train": texts(3, inexact=1), "dev": texts(3)}},
            (
                "1 entity of the training file cannot be shown exactly by tokens: an "
                "edge is inside a token, or beyond --max-length."
            ),
        ),
    ],
)
def test_what_is_said(just: Any, more: Any, said: str) -> None:
    """Law: each finding has its bound, and says what to do about it beyond."""
    assert data_findings(trainer(**just)) == ()
    assert data_findings(trainer(**more)) == (said,)


def test_faults_come_first() -> None:
    """Law: damaged checkpoints come before what is about the data."""
    told = data_findings(
        trainer(
            encoded={"train": texts(8, inexact=1), "dev": texts(8), "test": texts(8)},
        ),
        ["step-00000009 is damaged"],
    )
    assert told[0] == "step-00000009 is damaged"
    assert [line.split(maxsplit=4)[3] for line in told[1:4]] == ["train", "dev", "test"]
    assert told[4].startswith("1 entity")
    assert len(told) == 5


@pytest.mark.parametrize(("count", "more"), [(1, ""), (20, ""), (22, " And 2 more.")])
def test_left_out_sentences(count: int, more: str) -> None:
    """Law: sentences that were left out are counted, and the first are named."""
    faults = tuple(f"a.bio line {number}: I after O." for number in range(count))
    (said,) = data_findings(trainer(left_out=faults))
    shown = " ".join(faults[:20])
    sentences = "1 sentence is" if count == 1 else f"{count} sentences are"
    assert said == f"{sentences} left out for invalid tags: {shown}{more}"
