"""Quality of entities against counts of sets, and mistakes that are the worst."""

import json
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.metrics import EvalMetrics, entity_metrics, worst_entities

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
