"""`halfstep.train.metrics`: what was found, as a table and as data."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfstep.reporting.table import Table
from halfstep.train.metrics import EvalMetrics, confusion_table, unique_name

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


def test_table_of_nothing() -> None:
    """Law: without labels there is no mean, and no division by zero."""
    assert EvalMetrics(0.5, {}, ()).table("t").rows == ()
    none_true = EvalMetrics(0.5, {}, (("a", 0.0, 0.0, 0.0, 0), ("b", 0.5, 0.0, 0.0, 0)))
    assert none_true.weighted() == (0.25, 0.0, 0.0)


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
def test_apart(names: list[str], name: str) -> None:
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
    counts = data.draw(st.lists(row, min_size=size, max_size=size))
    table = confusion_table(np.array(counts), names, most)

    def wrong(i: int) -> int:
        return sum(counts[i]) + sum(line[i] for line in counts) - 2 * counts[i][i]

    kept = sorted(sorted(range(len(names)), key=lambda i: -wrong(i))[: most - 1])
    named = (*(names[i] for i in kept), "others")
    assert table.columns == ("true", *named, *["missed"] * beyond)
    assert tuple(row[0] for row in table.rows) == (*named, *["spurious"] * beyond)
    others = [i for i in range(len(names)) if i not in kept]
    groups = [*([i] for i in kept), others, *([len(names) + i] for i in range(beyond))]
    expected: list[list[int | None]] = [
        [sum(counts[i][j] for i in rows for j in columns) for columns in groups]
        for rows in groups
    ]
    if beyond:
        expected[-1][-1] = None
    assert [list(row[1:]) for row in table.rows] == expected
