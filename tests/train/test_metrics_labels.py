"""Quality of a classifier against counts made by hand, and mistakes worth reading."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep.train.metrics import label_metrics, worst_labels

LABELS = ("a", "b", "c")
pairs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1)


def with_answers(*guesses: int, classes: int = 3) -> torch.Tensor:
    return nn.functional.one_hot(torch.tensor(guesses), classes).float()


def by_hand(pairs: list[tuple[int, int]]) -> dict[str, float]:
    of_class = []
    for label in range(3):
        hits = sum(pair == (label, label) for pair in pairs)
        guessed = sum(guess == label for _, guess in pairs)
        there = sum(truth == label for truth, _ in pairs)
        precision = Fraction(hits, guessed or 1)
        recall = Fraction(hits, there or 1)
        of_class.append((precision, recall, Fraction(2 * hits, guessed + there or 1)))
    precision, recall, f1 = (
        float(sum(part) / 3) for part in zip(*of_class, strict=True)
    )
    right = sum(truth == guess for truth, guess in pairs)
    # Gorodkin's coefficient: the correlation of truth and guess as 0-1 vectors.
    n = len(pairs)
    truths, guesses = (Counter(side) for side in zip(*pairs, strict=True))
    both = n * right - sum(truths[k] * guesses[k] for k in range(3))
    spread = (n * n - sum(c * c for c in truths.values())) * (
        n * n - sum(c * c for c in guesses.values())
    )
    return {
        "accuracy": right / n,
        "macro_f1": f1,
        "macro_precision": precision,
        "macro_recall": recall,
        "mcc": both / math.sqrt(spread) if spread else 0.0,
    }


@settings(deadline=None)
@given(pairs)
def test_scores_are_those_counted_one_by_one(pairs: list[tuple[int, int]]) -> None:
    """Law: every score is what its definition gives; none warns, one class or many."""
    truth, guesses = zip(*pairs, strict=True)
    found = label_metrics(with_answers(*guesses), torch.tensor(truth), LABELS)
    assert found.scores == pytest.approx(by_hand(pairs), abs=1e-12)


def test_loss_by_hand() -> None:
    """Law: the loss is the mean of minus the log of the true class's probability."""
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
    found = label_metrics(shares.log(), torch.tensor([0, 2]), LABELS)
    assert found.loss == pytest.approx((math.log(2) + math.log(8)) / 2)


def test_mistakes_are_sorted_by_the_probability_of_the_wrong_guess() -> None:
    """Law: wrong guesses only, the most confident first; only their texts are asked."""
    shares = [[0.5, 0.4, 0.1], [0.2, 0.7, 0.1], [0.9, 0.1, 0.0], [0.1, 0.3, 0.6]]
    logits = torch.tensor(shares).log()
    asked: list[int] = []

    def text(i: int) -> str:
        asked.append(i)
        return f"text {i}"

    table = worst_labels(text, logits, torch.tensor([1, 2, 0, 0]), LABELS, limit=2)
    assert table.columns == ("text", "true", "predicted", "probability")
    assert table.rows == (
        ("text 1", "c", "b", pytest.approx(0.7)),
        ("text 3", "a", "c", pytest.approx(0.6)),
    )
    assert asked == [1, 3]
    note = "3 of 4 predictions are wrong; the 2 most confident are shown."
    assert table.notes == (note,)
