"""Quality of classes and entities against other counts, and mistakes worth reading."""

import json
import math
import operator
import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from halfstep.reporting.table import Table
from halfstep.train.metrics import (
    EvalMetrics,
    best_thresholds,
    class_metrics,
    confusion_table,
    entity_metrics,
    label_set_metrics,
    regression_metrics,
    worst_classes,
    worst_entities,
    worst_label_sets,
    worst_values,
)

FOUND = EvalMetrics(
    loss=0.25,
    scores={"accuracy": 0.875, "macro_f1": 0.5, "mcc": -0.125},
    per_class=(("a", 1.0, 0.5, 0.625, 3), ("b", 0.5, 0.25, 0.375, 1)),
    confusion=Table("Confusion", ("true", "a", "b"), (("a", 2, 1), ("b", 0, 1))),
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


@given(st.integers(0, 1), st.integers(2, 5), st.integers(1, 4), st.data())
def test_most_mistaken(beyond: int, most: int, more: int, data: st.DataObject) -> None:
    """Law: of many names, the table has those with the most mistakes."""
    names = tuple(f"n{i}" for i in range(most + more))
    size = len(names) + beyond
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    counts = np.array(data.draw(st.lists(row, min_size=size, max_size=size)))
    table = confusion_table(counts, names, most)
    wrong = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    kept = sorted(sorted(range(len(names)), key=lambda i: -wrong[i])[:most])
    named = tuple(names[i] for i in kept)
    assert table.columns == ("true", *named, *["missed"] * beyond)
    kept += range(len(names), size)
    expected = counts[np.ix_(kept, kept)].tolist()
    if beyond:
        expected[-1][-1] = None
    assert [list(row[1:]) for row in table.rows] == expected
    assert tuple(row[0] for row in table.rows) == (*named, *["spurious"] * beyond)


# Classes


def test_scores_by_hand() -> None:
    """Law: scores and their means are as recorded; what divides by zero counts as 0."""
    true = torch.tensor([0, 1, 1, 1, 0, 0, 3])
    predicted = torch.tensor([0, 0, 1, 1, 2, 0, 1])
    judged = class_metrics(one_hot(predicted, 5).float(), true, "abcde")
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
    assert not judged.constant
    assert [row[1:] for row in judged.confusion.rows[:2]] == [
        (2, 0, 1, 0, 0),
        (1, 2, 0, 0, 0),
    ]


@pytest.mark.parametrize("predicted", [0, 1])
def test_one_class(predicted: int) -> None:
    """Law: with a single true class the correlation is 0; scikit-learn does not warn.

    Counts are whole numbers, also where no prediction is right. Where all texts are of
    one class, a constant prediction is no fault.
    """
    judged = class_metrics(
        one_hot(torch.tensor([predicted] * 2), 2).float(), torch.tensor([0, 0]), "ab"
    )
    assert judged.scores["mcc"] == 0.0
    assert json.dumps(judged.data()["per_class"]).count("2]") == 1
    assert not judged.constant


def test_loss_by_hand() -> None:
    """Law: the loss is the mean of minus the log of the true class's probability."""
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
    found = class_metrics(shares.log(), torch.tensor([0, 2]), ("a", "b", "c"))
    assert found.loss == pytest.approx((math.log(2) + math.log(8)) / 2)


def test_mistakes_are_sorted_by_the_probability_of_the_wrong_guess() -> None:
    """Law: wrong guesses only, the 20 most confident; only their texts are asked."""
    shares = [[0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.9, 0.1, 0.0], [0.1, 0.3, 0.6]]
    logits, targets = torch.tensor(shares).log(), torch.tensor([1, 2, 0, 0])
    asked: list[int] = []

    def text(i: int) -> str:
        asked.append(i)
        return f"text {i}"

    table = worst_classes(text, logits, targets, ("a", "b", "c"))
    assert table.columns == ("text", "true", "predicted", "probability")
    assert table.rows == (
        ("text 1", "c", "b", pytest.approx(0.7)),
        ("text 3", "a", "c", pytest.approx(0.6)),
        ("text 0", "b", "a", pytest.approx(0.5)),
    )
    assert asked == [1, 3, 0]
    assert table.notes == ("3 of 4 predictions are wrong.",)
    table = worst_classes(text, logits.repeat(7, 1), targets.repeat(7), "abc")
    assert len(table.rows) == 20
    note = "21 of 28 predictions are wrong; the 20 most confident are shown."
    assert table.notes == (note,)


# Several labels

flags = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2)


@given(flags, st.randoms(use_true_random=False))
def test_scores_of_label_sets_are_scikit_learns(
    truth: list[list[bool]], draw: random.Random
) -> None:
    """Law: micro and macro scores, those of each label, and exact matches."""
    guess = [[draw.random() < 0.5 for _ in row] for row in truth]
    judged = label_set_metrics(torch.tensor(guess), torch.tensor(truth), "abc", 0.5)
    told = {"zero_division": 0}
    for mean in ("micro", "macro"):
        oracle = sklearn.metrics.f1_score(truth, guess, average=mean, **told)
        assert judged.scores[f"{mean}_f1"] == pytest.approx(oracle)
    by_label = sklearn.metrics.precision_recall_fscore_support(truth, guess, **told)
    for row, (name, *oracles) in zip(
        judged.per_class, zip("abc", *by_label, strict=True), strict=True
    ):
        assert row == (name, *map(pytest.approx, oracles))
    exact = sklearn.metrics.accuracy_score(truth, guess)
    assert judged.scores["exact_match"] == pytest.approx(exact)
    assert judged.confusion is None
    is_one = len(set(map(tuple, guess))) == 1 < len(set(map(tuple, truth)))
    wrong = sum(map(operator.ne, map(tuple, guess), map(tuple, truth)))
    assert bool(judged.constant) == (is_one and wrong >= 3)


@given(flags, st.randoms(use_true_random=False))
def test_no_threshold_is_better(truth: list[list[bool]], draw: random.Random) -> None:
    """Law: each label's threshold has the best F1 of all; 0.5 without a true text."""
    shares = [[draw.choice((0.1, 0.25, 0.5, 0.75, 0.9)) for _ in row] for row in truth]
    found = best_thresholds(torch.tensor(shares), torch.tensor(truth).float())
    for label, threshold in enumerate(found.tolist()):
        true, own = ([row[label] for row in rows] for rows in (truth, shares))

        def f1(limit: float, true: Any = true, own: Any = own) -> float:
            both = sum(t and p > limit for t, p in zip(true, own, strict=True))
            return 2 * both / max(1, sum(true) + sum(p > limit for p in own))

        if any(true):
            assert f1(threshold) == max(map(f1, (0.0, *own)))
        else:
            assert threshold == 0.5


def test_a_threshold_is_in_the_middle() -> None:
    """Law: where a threshold parts the texts, it is as far from both sides."""
    shares = torch.tensor([[0.9], [0.6], [0.2], [0.1]])
    found = best_thresholds(shares, torch.tensor([[1.0], [1.0], [0.0], [0.0]]))
    assert found.tolist() == pytest.approx([0.4])


def test_worst_label_sets() -> None:
    """Law: the texts with the most wrong labels first, by missed and spurious ones."""
    truth = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]) > 0
    guess = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 0]]) > 0
    table = worst_label_sets(str, guess, truth, "abc")
    assert table.rows == (("2", "c", "a, b"), ("1", "b", ""))
    assert table.notes == ("2 of 3 texts have mistakes.",)


# Numbers


def test_scores_of_numbers() -> None:
    """Law: correlations are numpy's, of values and of ranks; errors have the unit."""
    true, guess = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2.0, 1.0, 5.0, 6.0])
    judged = regression_metrics(guess, true, 0.25)
    ranks = [each.argsort().argsort().numpy() for each in (true, guess)]
    assert judged.scores == pytest.approx(
        {
            "spearman": np.corrcoef(*ranks)[0, 1],
            "pearson": np.corrcoef(guess.numpy(), true.numpy())[0, 1],
            "rmse": math.sqrt(7 / 4),
            "mean_absolute_error": 5 / 4,
        }
    )
    assert judged.loss == 0.25
    assert (judged.per_class, judged.confusion, judged.constant) == ((), None, "")
    assert json.loads(json.dumps(judged.data())) == {"loss": 0.25, **judged.scores}
    table = judged.table("Quality on dev")
    assert table.columns == ("score", "value")
    assert [row[0] for row in table.rows] == [
        *("spearman", "pearson", "RMSE", "mean absolute error", "loss")
    ]


@pytest.mark.parametrize(("unit", "error"), [(1e-7, "1e-07"), (1e30, "1e+30")])
def test_errors_in_any_unit(unit: float, error: str) -> None:
    """Law: an error is shown with five digits, however small the label's unit."""
    true = torch.tensor([1.0, 2.0, 4.0]) * unit
    table = regression_metrics(true + unit, true, 0.25).table("Quality on dev")
    assert dict(table.rows)["RMSE"] == dict(table.rows)["mean absolute error"] == error
    assert dict(table.rows)["loss"] == "0.2500"


@pytest.mark.parametrize("guess", [[3.0, 3.0, 3.0], [3.0, 3.01, 2.99]])
def test_constant_numbers(guess: list[float]) -> None:
    """Law: hardly any spread is called constant, without scipy's warning."""
    judged = regression_metrics(torch.tensor(guess), torch.tensor([1.0, 3.0, 5.0]), 1.0)
    assert judged.constant == "about 3"
    same = torch.tensor([2.0, 2.0, 2.0])
    assert not regression_metrics(torch.tensor(guess), same, 1.0).constant


def test_worst_values() -> None:
    """Law: the largest error first, whatever its sign."""
    table = worst_values(str, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2, 0]))
    assert table.rows == (("2", "0", "3"), ("0", "1.5", "1"))


# What is the same for every text


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_constant_class_is_named(label: int) -> None:
    """Law: a constant prediction is found, whichever class it is."""
    logits = one_hot(torch.tensor([label] * 9), 3).float()
    judged = class_metrics(logits, torch.tensor([0, 1, 1] * 3), "abc")
    assert judged.constant == f"class {'abc'[label]!r}"


def test_few_texts_do_not_show_a_constant_class() -> None:
    """Law: a model that misses the only two texts of a class is not called useless."""
    logits = one_hot(torch.tensor([0] * 20), 2).float()
    assert not class_metrics(logits, torch.tensor([0] * 18 + [1] * 2), "ab").constant


@pytest.mark.parametrize(
    ("row", "said"), [((0, 0), "no label"), ((0, 1), "labels 'b'")]
)
def test_a_constant_set_is_named(row: tuple[int, int], said: str) -> None:
    guess = torch.tensor([row] * 6) > 0
    truth = torch.tensor([[1, 0], [0, 1]] * 3) > 0
    assert label_set_metrics(guess, truth, "ab", 0.0).constant == said


def test_no_entity_is_constant() -> None:
    """Law: a model that finds nothing is constant, unless there is nothing to find."""
    true, nothing = [[(0, 1, 0)]] * 3, [[]] * 3
    assert entity_metrics(true, nothing, KINDS, 0.0).constant == "no entity"
    assert not entity_metrics(true, [*nothing[1:], true[0]], KINDS, 0.0).constant
    assert not entity_metrics(nothing, nothing, KINDS, 0.0).constant


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
    table = worst_entities(text_of, truth, guess, KINDS)
    assert table.columns == ("text", "missed", "spurious")
    assert table.rows == (
        ("Ada in Rome", "PER Ada at 0; LOC Rome at 7", "PER Ad at 0; ORG Rome at 7"),
        ("Bob", "PER Bob at 0", ""),
        ("Zoe", "PER Zoe at 0", ""),
    )
    assert table.notes == ("3 of 4 texts have mistakes.",)
    assert asked == [0, 1, 3]
    assert worst_entities(text_of, truth, truth, KINDS).rows == ()


def test_long_texts_are_cut_round_the_mistake() -> None:
    """Law: what is shown of a long text holds its first mistake, and marks each cut."""
    text = "".join(f"{number:04}" for number in range(1000))
    truth = [[(0, 4, 0), *((i, i + 1, 1) for i in range(1200, 1220))], [(5, 99, 2)]]
    table = worst_entities(lambda _: text, truth, [[(0, 4, 0)], []], KINDS)
    (around, missed, _), (start, cut, _) = table.rows
    assert around == f"...{text[1160:1360]}..."
    assert missed.startswith(f"LOC {text[1200]} at 1200; LOC {text[1201]} at 1201; ")
    assert missed.endswith("...")
    assert (start, cut) == (f"{text[:200]}...", f"ORG {text[5:99]} at 5")
