"""Metrics of predicted entities: scores, confusion matrix, and the worst examples.

In: the entities of each text, as they are and as a model guessed them. Out: a
`EvalMetrics`, and a table of mistakes.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.reporting.table import Cell, Table
from halfstep.train.metrics.result import EvalMetrics, most_confused, unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.train.metrics.result import Counts

Entity = tuple[int, int, int]
"""First character, the one after the last, and the index of the kind."""

_MAX_KINDS = 30  # of a confusion matrix that a person can read
_MAX_CHARACTERS = 200  # of a text in a table of mistakes
_MAX_ENTITY_CHARACTERS = 40  # of an entity there
_MAX_ENTITIES = 6  # of the entities of one text there


def compute_metrics(
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    loss: float,
) -> EvalMetrics:
    """Return how well guessed entities agree with the true ones.

    An entity is found if one of the same kind over the same characters was guessed:
    half an entity is a mistake, and so is another kind. What is given twice counts
    once. A share of nothing is 0, and a kind that is neither there nor guessed takes
    part in the mean over kinds.

    Args:
        true_entities: Entities of each text.
        predicted_entities: The same for as many texts.
        kinds: Names of the kinds, 1 or more, each once.
        loss: Mean cross-entropy in nats, to be carried along.
    """
    true_sets, predicted_sets = (
        list(map(set, true_entities)),
        list(map(set, predicted_entities)),
    )
    num_exact = sum(
        one == two for one, two in zip(true_sets, predicted_sets, strict=True)
    )
    (precision, recall, f1, _), by_kind = _strict_scores(
        true_sets, predicted_sets, kinds
    )
    per = tuple((kind, *by_kind[kind]) for kind in kinds)
    scores = {
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "macro_f1": statistics.fmean(row[3] for row in per),
        "accuracy": num_exact / max(1, len(true_sets)),
    }
    predicted_counts = Counter(
        kinds[kind] for each in predicted_sets for _, _, kind in each
    )
    table = _confusion(true_sets, predicted_sets, tuple(kinds))
    return EvalMetrics(loss, scores, per, table, predicted_counts)


_Shares = tuple[float, float, float, int]


def _strict_scores(
    true_entities: Sequence[set[Entity]],
    predicted_entities: Sequence[set[Entity]],
    kinds: Sequence[str],
) -> tuple[_Shares, dict[str, _Shares]]:
    """Return precision, recall, F1 and count, of all entities and of each kind."""
    from nervaluate import Evaluator

    def written(entities: Iterable[Entity]) -> list[dict[str, str | int]]:
        # There, an end is the last character itself.
        return [
            {"label": kinds[kind], "start": int(start), "end": int(end) - 1}
            for start, end, kind in entities
        ]

    def shares(result: Any) -> _Shares:  # noqa: ANN401 - the library's own class
        precision, recall, f1 = result.precision, result.recall, result.f1
        return float(precision), float(recall), float(f1), int(result.possible)

    # The right guesses first: the library lets a guess that only touches a true
    # entity use it up, and would then call a right one that comes later a mistake.
    pairs = [
        (written(true), written(chain(guessed & true, guessed - true)))
        for true, guessed in zip(true_entities, predicted_entities, strict=True)
        if true or guessed
    ]
    nothing = (0.0, 0.0, 0.0, 0)
    by_kind = dict.fromkeys(kinds, nothing)
    if not pairs:
        return nothing, by_kind
    trues, guesses = zip(*pairs, strict=True)
    evaluator = Evaluator(list(trues), list(guesses), list(kinds), loader="dict")
    # Its other ways to count take three quarters of the time.
    evaluator.strategies = {"strict": evaluator.strategies["strict"]}
    evaluation = evaluator.evaluate()
    for kind, results in evaluation["entities"].items():
        by_kind[kind] = shares(results["strict"])
    return shares(evaluation["overall"]["strict"]), by_kind


def worst_examples(
    texts: Callable[[int], str],
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    limit: int = 20,
) -> Table:
    """Return the texts with the most mistakes, and the entities that are mistaken.

    Why: these show wrong labels in the data, and what the model has not understood.

    Args:
        texts: Returns a text; asked only for those shown.
        true_entities: Entities of each text.
        predicted_entities: The same for as many texts.
        kinds: Names of the kinds.
        limit: How many texts to show.
    """
    num_errors = [
        len(set(true) ^ set(guessed))
        for true, guessed in zip(true_entities, predicted_entities, strict=True)
    ]
    worst = sorted(
        filter(num_errors.__getitem__, range(len(num_errors))),
        key=lambda i: -num_errors[i],
    )
    rows = []
    for i in worst[:limit]:
        text, true, guessed = (
            texts(i),
            set(true_entities[i]),
            set(predicted_entities[i]),
        )
        first = min(true ^ guessed)[0]
        missed = _named(text, true - guessed, kinds)
        rows.append((_around(text, first), missed, _named(text, guessed - true, kinds)))
    note = f"{len(worst):,} of {len(num_errors):,} texts have mistakes"
    if len(rows) < len(worst):
        note += f"; the {len(rows)} with the most are shown"
    columns = ("text", "missed", "not there")
    return Table("Texts with the most mistakes", columns, tuple(rows), (f"{note}.",))


def _confusion(
    true_entities: Sequence[set[Entity]],
    predicted_entities: Sequence[set[Entity]],
    kinds: tuple[str, ...],
) -> Table:
    """Return which kinds were guessed for which, over the same characters."""
    # The last row is for guesses without a true entity, the last column the reverse.
    nothing = len(kinds)
    counts: Counts = np.zeros((nothing + 1, nothing + 1), dtype=np.int64)
    for true, guessed in zip(true_entities, predicted_entities, strict=True):
        for _, _, kind in true & guessed:
            counts[kind, kind] += 1
        unmatched: dict[tuple[int, int], tuple[list[int], list[int]]]
        unmatched = defaultdict(lambda: ([], []))
        for side, entities in enumerate((true - guessed, guessed - true)):
            for start, end, kind in sorted(entities):
                unmatched[start, end][side].append(kind)
        for both in unmatched.values():
            for row, column in zip_longest(*both, fillvalue=nothing):
                counts[row, column] += 1
    notes = ["Over the same characters; with other edges it is missed, and not there."]
    if len(kinds) > _MAX_KINDS:
        counts, kinds = most_confused(counts, kinds, _MAX_KINDS)
        notes.append(f"The {len(kinds) - 1} kinds with the most mistakes, and others.")
    missed, spurious = unique_name("missed", kinds), unique_name("not there", kinds)
    cells: list[list[Cell]] = [list(row) for row in counts.tolist()]
    cells[-1][-1] = None
    return Table(
        "Confusion",
        (unique_name("truth", (*kinds, missed)), *kinds, missed),
        tuple(
            (name, *row) for name, row in zip((*kinds, spurious), cells, strict=True)
        ),
        tuple(notes),
    )


def _named(text: str, entities: set[Entity], kinds: Sequence[str]) -> str:
    """Return entities as words: kind, letters and place of each."""
    words = []
    for start, end, kind in sorted(entities)[:_MAX_ENTITIES]:
        letters = text[start:end]
        if len(letters) > _MAX_ENTITY_CHARACTERS:
            letters = f"{letters[: _MAX_ENTITY_CHARACTERS - 3]}..."
        words.append(f"{kinds[kind]} {letters} at {start}")
    if len(entities) > _MAX_ENTITIES:
        words.append(f"and {len(entities) - _MAX_ENTITIES} more")
    return "; ".join(words)


def _around(text: str, place: int) -> str:
    """Return a text, or the part of a long one that begins a little before a place."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    begin = max(0, min(place - _MAX_ENTITY_CHARACTERS, len(text) - _MAX_CHARACTERS))
    end = begin + _MAX_CHARACTERS
    before, after = "..." if begin else "", "..." if end < len(text) else ""
    return f"{before}{text[begin:end]}{after}"
