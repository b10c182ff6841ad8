"""Quality of classes and entities against other counts, and mistakes worth reading."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from halfstep.reporting.table import Table
from halfstep.train.metrics import (
    EvalMetrics,
    confusion_table,
    entity_metrics,
    label_metrics,
    unique_name,
    worst_entities,
    worst_labels,
)

FOUND = EvalMetrics(
    loss=0.25,
    scores={"accuracy": 0.875, "macro_f1": 0.5, "mcc": -0.125},
    per_class=(("a", 1.0, 0.5, 0.625, 3), ("b", 0.5, 0.25, 0.375, 1)),
    confusion=Table("Confusion", ("true", "a", "b"), (("a", 2, 1), ("b", 0, 1))),
    predicted={"a": 2, "b": 2},
)


def test_table() -> None:
    """Law: a row for each label, then the means and the sum; scores stand below."""
    assert FOUND.table("Quality on dev") == Table(
        "Quality on dev",
        ("label", "precision", "recall", "F1", "support"),
        (
            *FOUND.per_class,
            ("macro average", 0.75, 0.375, 0.5, 4),
            ("weighted average", 0.875, 0.4375, 0.5625, 4),
        ),
        ("accuracy 0.8750, macro F1 0.5000, MCC -0.1250, loss 0.2500",),
    )


def test_no_label_is_true() -> None:
    """Law: labels that no example has all weigh the same; nothing divides by zero."""
    rows = (("a", 0.0, 0.0, 0.0, 0), ("b", 0.5, 0.0, 0.0, 0))
    assert replace(FOUND, per_class=rows).weighted() == (0.25, 0.0, 0.0)


def test_data_is_flat_json() -> None:
    """Law: summary.json holds loss, scores by name, and the rows of labels."""
    assert json.loads(json.dumps(FOUND.data())) == {
        "loss": 0.25,
        "accuracy": 0.875,
        "macro_f1": 0.5,
        "mcc": -0.125,
        "weighted_average": [0.875, 0.4375, 0.5625],
        "per_class": [["a", 1.0, 0.5, 0.625, 3], ["b", 0.5, 0.25, 0.375, 1]],
    }


@given(st.lists(st.sampled_from(["a", "a'", "a''", "b"])), st.sampled_from("ab"))
def test_unique_names(names: list[str], name: str) -> None:
    """Law: the name is none of the others, and itself where that is so already."""
    found = unique_name(name, tuple(names))
    assert found not in names
    assert found.rstrip("'") == name
    assert found == name or name in names


@given(st.integers(0, 1), st.integers(2, 5), st.integers(1, 4), st.data())
def test_most_mistaken(beyond: int, most: int, more: int, data: st.DataObject) -> None:
    """Law: the names with the most mistakes stay, the others are added up as one."""
    names = tuple(f"n{i}" for i in range(most + more))
    size = len(names) + beyond
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    counts = np.array(data.draw(st.lists(row, min_size=size, max_size=size)))
    table = confusion_table(counts, names, most)
    wrong = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    kept = sorted(sorted(range(len(names)), key=lambda i: -wrong[i])[: most - 1])
    named = (*(names[i] for i in kept), "others")
    assert table.columns == ("true", *named, *["missed"] * beyond)
    assert tuple(row[0] for row in table.rows) == (*named, *["spurious"] * beyond)
    others = [i for i in range(len(names)) if i not in kept]
    groups = [*([i] for i in kept), others, *([len(names) + i] for i in range(beyond))]
    expected: list[list[int | None]] = [
        [int(counts[np.ix_(rows, columns)].sum()) for columns in groups]
        for rows in groups
    ]
    if beyond:
        expected[-1][-1] = None
    assert [list(row[1:]) for row in table.rows] == expected


# Classes


def test_scores_by_hand() -> None:
    """Law: scores and their means are as recorded; what divides by zero counts as 0."""
    true = torch.tensor([0, 1, 1, 1, 0, 0, 3])
    predicted = torch.tensor([0, 0, 1, 1, 2, 0, 1])
    judged = label_metrics(one_hot(predicted, 5).float(), true, "abcde")
    near = pytest.approx
    assert judged.scores == near(
        {
            "accuracy": 4 / 7,
            "macro_f1": 4 / 15,
            "macro_precision": 4 / 15,
            "macro_recall": 4 / 15,
            "mcc": 1 / 3,
        },
        abs=1e-15,
    )
    assert judged.per_class == (
        ("a", *[near(2 / 3)] * 3, 3),
        ("b", *[near(2 / 3)] * 3, 3),
        ("c", 0.0, 0.0, 0.0, 0),
        ("d", 0.0, 0.0, 0.0, 1),
        ("e", 0.0, 0.0, 0.0, 0),
    )
    assert judged.predicted == {"a": 3, "b": 3, "c": 1, "d": 0, "e": 0}
    assert [row[1:] for row in judged.confusion.rows[:2]] == [
        (2, 0, 1, 0, 0),
        (1, 2, 0, 0, 0),
    ]


@pytest.mark.parametrize("predicted", [0, 1])
def test_one_class(predicted: int) -> None:
    """Law: with a single true class the correlation is 0; scikit-learn does not warn.

    Counts are whole numbers, also where no prediction is right.
    """
    judged = label_metrics(
        one_hot(torch.tensor([predicted] * 2), 2).float(), torch.tensor([0, 0]), "ab"
    )
    assert judged.scores["mcc"] == 0.0
    assert json.dumps(judged.data()["per_class"]).count("2]") == 1


def test_loss_by_hand() -> None:
    """Law: the loss is the mean of minus the log of the true class's probability."""
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
    found = label_metrics(shares.log(), torch.tensor([0, 2]), ("a", "b", "c"))
    assert found.loss == pytest.approx((math.log(2) + math.log(8)) / 2)


def test_mistakes_are_sorted_by_the_probability_of_the_wrong_guess() -> None:
    """Law: wrong guesses only, the most confident first; only their texts are asked."""
    shares = [[0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.9, 0.1, 0.0], [0.1, 0.3, 0.6]]
    logits = torch.tensor(shares).log()
    asked: list[int] = []

    def text(i: int) -> str:
        asked.append(i)
        return f"text {i}"

    targets = torch.tensor([1, 2, 0, 0])
    table = worst_labels(text, logits, targets, ("a", "b", "c"), limit=2)
    assert table.columns == ("text", "true", "predicted", "probability")
    assert table.rows == (
        ("text 1", "c", "b", pytest.approx(0.7)),
        ("text 3", "a", "c", pytest.approx(0.6)),
    )
    assert asked == [1, 3]
    note = "3 of 4 predictions are wrong; the 2 most confident are shown."
    assert table.notes == (note,)


# Entities

Entities = list[tuple[int, int, int]]
Texts = list[Entities]

KINDS = ("PER", "LOC", "ORG")


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def counted(truth: Texts, guess: Texts) -> tuple[float, float, float, int]:
    """Return precision, recall, F1 and count as sets tell them."""
    true = {(i, *entity) for i, row in enumerate(truth) for entity in row}
    guessed = {(i, *entity) for i, row in enumerate(guess) for entity in row}
    both = len(true & guessed)
    precision, recall = share(both, len(guessed)), share(both, len(true))
    return precision, recall, share(2 * both, len(true) + len(guessed)), len(true)


def agrees(judged: EvalMetrics, truth: Texts, guess: Texts) -> None:
    def near(value: float) -> object:
        return pytest.approx(value, rel=0, abs=4 * 2**-52)

    def of(kind: int, texts: Texts) -> Texts:
        return [[entity for entity in row if entity[2] == kind] for row in texts]

    precision, recall, f1, _ = counted(truth, guess)
    every = [counted(of(k, truth), of(k, guess)) for k in range(len(KINDS))]
    alike = [set(a) == set(b) for a, b in zip(truth, guess, strict=True)]
    assert judged.scores == {
        "f1": near(f1),
        "precision": near(precision),
        "recall": near(recall),
        "macro_f1": near(fmean(row[2] for row in every)),
        "accuracy": near(share(sum(alike), len(alike))),
    }
    for found, kind, right in zip(judged.per_class, KINDS, every, strict=True):
        assert found == (kind, *map(near, right[:3]), right[3])


@st.composite
def apart(draw: st.DrawFn) -> Entities:
    edges = sorted(draw(st.sets(st.integers(0, 8))))
    pairs = [pair for pair in pairwise(edges) if draw(st.booleans())]
    return [(*pair, draw(st.integers(0, 2))) for pair in pairs]


anywhere = st.lists(
    st.tuples(st.integers(0, 3), st.integers(4, 6), st.integers(0, 2)), max_size=6
)


@given(st.lists(st.tuples(apart() | anywhere, apart() | anywhere), max_size=6))
def test_scores_are_those_of_sets(texts: list[tuple[Entities, Entities]]) -> None:
    """Law: scores are those of sets of entities, overall and of each kind.

    Also of entities that overlap, or are given twice, in any order. A counter that lets
    a guess which only touches a true entity use it up fails here.
    """
    truth, guess = [one for one, _ in texts], [two for _, two in texts]
    agrees(entity_metrics(truth, guess, KINDS, 0.0), truth, guess)


def test_by_hand() -> None:
    """Law: half an entity and another kind are mistakes; neighbours are no overlap."""
    truth = [[(0, 2, 0), (2, 4, 1)], [(5, 9, 1)], [], [(0, 1, 0)]]
    guess = [[(0, 2, 0), (2, 4, 0)], [(5, 8, 1)], [], [(0, 1, 0), (0, 1, 0)]]
    judged = entity_metrics(truth, guess, KINDS, 0.25)
    agrees(judged, truth, guess)
    assert judged.loss == 0.25
    assert (judged.scores["f1"], judged.scores["accuracy"]) == (0.5, 0.5)
    assert judged.per_class[0] == (
        *("PER", pytest.approx(2 / 3), 1.0, pytest.approx(0.8), 2),
    )
    assert judged.confusion is not None
    assert judged.confusion.columns == ("true", "PER", "LOC", "ORG", "missed")
    assert judged.confusion.rows == (
        ("PER", 2, 0, 0, 0),
        ("LOC", 1, 0, 0, 1),
        ("ORG", 0, 0, 0, 0),
        ("spurious", 0, 1, 0, None),
    )
    assert json.loads(json.dumps(judged.data()))["per_class"][1] == ["LOC", 0, 0, 0, 2]
    # A kind may be named as a column of the table is.
    table = entity_metrics([[(0, 1, 0)]], [[]], ["missed", "true"], 0.0).confusion
    assert table is not None
    assert table.columns == ("true'", "missed", "true", "missed'")


def test_worst_texts_first() -> None:
    """Law: texts with the most mistakes come first, and only these are asked for."""
    asked = []

    def text_of(i: int) -> str:
        asked.append(i)
        return ("Ada in Rome", "Bob", "Eve", "Zoe")[i]

    truth = [[(0, 3, 0), (7, 11, 1)], [(0, 3, 0)], [(0, 3, 0)], [(0, 3, 0)]]
    guess = [[(0, 2, 0), (7, 11, 2)], [], [(0, 3, 0)], []]
    table = worst_entities(text_of, truth, guess, KINDS, limit=2)
    assert table.columns == ("text", "missed", "spurious")
    assert table.rows == (
        ("Ada in Rome", "PER Ada at 0; LOC Rome at 7", "PER Ad at 0; ORG Rome at 7"),
        ("Bob", "PER Bob at 0", ""),
    )
    shown = "3 of 4 texts have mistakes"
    assert table.notes == (f"{shown}; the 2 with the most are shown.",)
    assert asked == [0, 1]
    whole = worst_entities(text_of, truth, guess, KINDS)
    assert [row[0] for row in whole.rows] == ["Ada in Rome", "Bob", "Zoe"]
    assert whole.notes == (f"{shown}.",)
    assert worst_entities(text_of, truth, truth, KINDS).rows == ()


def test_long_texts_are_cut_round_the_mistake() -> None:
    """Law: what is shown of a long text holds its first mistake, and marks each cut."""
    text = "".join(f"{number:04}" for number in range(1000))
    truth = [[(0, 4, 0), *((i, i + 1, 1) for i in range(1200, 1220))], [(5, 99, 2)]]
    table = worst_entities(lambda _: text, truth, [[(0, 4, 0)], []], KINDS)
    (around, missed, _), (start, cut, _) = table.rows
    assert around == f"...{text[1160:1360]}..."
    assert missed == "; ".join(
        [*(f"LOC {text[i]} at {i}" for i in range(1200, 1206)), "and 14 more"]
    )
    assert (start, cut) == (f"{text[:200]}...", f"ORG {text[5:42]}... at 5")
