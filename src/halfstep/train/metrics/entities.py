"""Computes metrics of predicted entities, their confusion, and the worst examples."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from halfstep.reporting.table import Table
from halfstep.train.metrics.result import EvalMetrics, confusion_table, excerpt, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.train.metrics.result import Counts

Entity = tuple[int, int, int]
"""(start, end, index of the entity type); character offsets, end exclusive."""

_MAX_KINDS = 30  # rows of a confusion matrix
_MAX_ENTITY_CHARACTERS = 40  # characters of an entity in a table
_MAX_ENTITIES = 6  # entities of one text in a table


def compute_metrics(
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    loss: float,
) -> EvalMetrics:
    """Compute exact-match precision, recall and F1 of predicted entities.

    A predicted entity is correct if a true one has the same type and offsets;
    duplicates count once. A ratio with a zero denominator is 0, and so is the F1 of a
    type with neither true nor predicted entities, which counts in the macro mean.
    """
    true_sets = list(map(set, true_entities))
    predicted_sets = list(map(set, predicted_entities))
    pairs = list(zip(true_sets, predicted_sets, strict=True))
    true = _counts_by_kind(true_sets)
    predicted = _counts_by_kind(predicted_sets)
    correct = _counts_by_kind([one & two for one, two in pairs])
    precision, recall, f1, _ = shares(correct.total(), predicted.total(), true.total())
    per = tuple(
        (name, *shares(correct[kind], predicted[kind], true[kind]))
        for kind, name in enumerate(kinds)
    )
    scores = {
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "macro_f1": statistics.fmean(row[3] for row in per),
        "accuracy": sum(one == two for one, two in pairs) / max(1, len(pairs)),
    }
    table = _confusion(true_sets, predicted_sets, tuple(kinds))
    num_predicted = {kinds[kind]: count for kind, count in predicted.items()}
    return EvalMetrics(loss, scores, per, table, num_predicted)


def _counts_by_kind(texts: Iterable[set[Entity]]) -> Counter[int]:
    return Counter(kind for entities in texts for _, _, kind in entities)


def worst_examples(
    texts: Callable[[int], str],
    true_entities: Sequence[Sequence[Entity]],
    predicted_entities: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    limit: int = 20,
) -> Table:
    """Return the texts with the most errors, and the missed and spurious entities.

    They show wrong labels in the data, and what the model has not learned.
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
        rows.append((excerpt(text, first), missed, _named(text, guessed - true, kinds)))
    note = f"{len(worst):,} of {len(num_errors):,} texts have mistakes"
    if len(rows) < len(worst):
        note += f"; the {len(rows)} with the most are shown"
    columns = ("text", "missed", "spurious")
    return Table("Texts with the most mistakes", columns, tuple(rows), (f"{note}.",))


def _confusion(
    true_entities: Sequence[set[Entity]],
    predicted_entities: Sequence[set[Entity]],
    kinds: tuple[str, ...],
) -> Table:
    """Return the confusion matrix of entity types, matched by identical offsets."""
    # Last row: predictions without a true entity; last column: the reverse.
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
    note = "An entity predicted with wrong edges counts as missed and as spurious."
    return confusion_table(counts, kinds, _MAX_KINDS, notes=(note,))


def _named(text: str, entities: set[Entity], kinds: Sequence[str]) -> str:
    """Format entities as type, text and offset."""
    words = []
    for start, end, kind in sorted(entities)[:_MAX_ENTITIES]:
        letters = text[start:end]
        if len(letters) > _MAX_ENTITY_CHARACTERS:
            letters = f"{letters[: _MAX_ENTITY_CHARACTERS - 3]}..."
        words.append(f"{kinds[kind]} {letters} at {start}")
    if len(entities) > _MAX_ENTITIES:
        words.append(f"and {len(entities) - _MAX_ENTITIES} more")
    return "; ".join(words)
