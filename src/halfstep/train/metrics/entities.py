"""How good are guessed entities: scores, confusions, and mistakes worth reading.

In: the entities of each text, as they are and as a model guessed them. Out: a
`Judged`, and a table of mistakes.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.reporting.table import Cell, Table
from halfstep.train.metrics.result import Judged, apart, most_mistaken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.train.metrics.result import Counts

Entity = tuple[int, int, int]
"""First character, the one after the last, and the index of the kind."""

_MOST_KINDS = 30  # of a confusion matrix that a person can read
_MOST_CHARACTERS = 200  # of a text in a table of mistakes
_MOST_LETTERS = 40  # of an entity there
_MOST_NAMED = 6  # of the entities of one text there


def judge(
    truth: Sequence[Sequence[Entity]],
    guess: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    loss: float,
) -> Judged:
    """Return how well guessed entities agree with the true ones.

    An entity is found if one of the same kind over the same characters was guessed:
    half an entity is a mistake, and so is another kind. What is given twice counts
    once. A share of nothing is 0, and a kind that is neither there nor guessed takes
    part in the mean over kinds.

    Args:
        truth: Entities of each text.
        guess: The same for as many texts.
        kinds: Names of the kinds, 1 or more, each once.
        loss: Mean cross-entropy in nats, to be carried along.
    """
    true, guessed = list(map(set, truth)), list(map(set, guess))
    alike = sum(one == two for one, two in zip(true, guessed, strict=True))
    (precision, recall, f1, _), by_kind = _strict(true, guessed, kinds)
    per = tuple((kind, *by_kind[kind]) for kind in kinds)
    scores = {
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "macro_f1": statistics.fmean(row[3] for row in per),
        "accuracy": alike / max(1, len(true)),
    }
    predicted = Counter(kinds[kind] for each in guessed for _, _, kind in each)
    table = _confusion(true, guessed, tuple(kinds))
    return Judged(loss, scores, per, table, predicted)


_Shares = tuple[float, float, float, int]


def _strict(
    truth: Sequence[set[Entity]], guess: Sequence[set[Entity]], kinds: Sequence[str]
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
        for true, guessed in zip(truth, guess, strict=True)
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
    found = evaluator.evaluate()
    for kind, results in found["entities"].items():
        by_kind[kind] = shares(results["strict"])
    return shares(found["overall"]["strict"]), by_kind


def mistakes(
    texts: Callable[[int], str],
    truth: Sequence[Sequence[Entity]],
    guess: Sequence[Sequence[Entity]],
    kinds: Sequence[str],
    most: int = 20,
) -> Table:
    """Return the texts with the most mistakes, and the entities that are mistaken.

    Why: these show wrong labels in the data, and what the model has not understood.

    Args:
        texts: Returns a text; asked only for those shown.
        truth: Entities of each text.
        guess: The same for as many texts.
        kinds: Names of the kinds.
        most: How many texts to show.
    """
    wrong = [
        len(set(true) ^ set(guessed))
        for true, guessed in zip(truth, guess, strict=True)
    ]
    worst = sorted(
        filter(wrong.__getitem__, range(len(wrong))), key=lambda i: -wrong[i]
    )
    rows = []
    for i in worst[:most]:
        text, true, guessed = texts(i), set(truth[i]), set(guess[i])
        first = min(true ^ guessed)[0]
        missed = _named(text, true - guessed, kinds)
        rows.append((_around(text, first), missed, _named(text, guessed - true, kinds)))
    note = f"{len(worst):,} of {len(wrong):,} texts have mistakes"
    if len(rows) < len(worst):
        note += f"; the {len(rows)} with the most are shown"
    columns = ("text", "missed", "not there")
    return Table("Texts with the most mistakes", columns, tuple(rows), (f"{note}.",))


def _confusion(
    truth: Sequence[set[Entity]], guess: Sequence[set[Entity]], kinds: tuple[str, ...]
) -> Table:
    """Return which kinds were guessed for which, over the same characters."""
    # The last row is for guesses without a true entity, the last column the reverse.
    nothing = len(kinds)
    counts: Counts = np.zeros((nothing + 1, nothing + 1), dtype=np.int64)
    for true, guessed in zip(truth, guess, strict=True):
        for _, _, kind in true & guessed:
            counts[kind, kind] += 1
        left: dict[tuple[int, int], tuple[list[int], list[int]]]
        left = defaultdict(lambda: ([], []))
        for side, entities in enumerate((true - guessed, guessed - true)):
            for start, end, kind in sorted(entities):
                left[start, end][side].append(kind)
        for both in left.values():
            for row, column in zip_longest(*both, fillvalue=nothing):
                counts[row, column] += 1
    notes = ["Over the same characters; with other edges it is missed, and not there."]
    if len(kinds) > _MOST_KINDS:
        counts, kinds = most_mistaken(counts, kinds, _MOST_KINDS)
        notes.append(f"The {len(kinds) - 1} kinds with the most mistakes, and others.")
    missed, made_up = apart("missed", kinds), apart("not there", kinds)
    cells: list[list[Cell]] = [list(row) for row in counts.tolist()]
    cells[-1][-1] = None
    return Table(
        "Confusion",
        (apart("truth", (*kinds, missed)), *kinds, missed),
        tuple((name, *row) for name, row in zip((*kinds, made_up), cells, strict=True)),
        tuple(notes),
    )


def _named(text: str, entities: set[Entity], kinds: Sequence[str]) -> str:
    """Return entities as words: kind, letters and place of each."""
    words = []
    for start, end, kind in sorted(entities)[:_MOST_NAMED]:
        letters = text[start:end]
        if len(letters) > _MOST_LETTERS:
            letters = f"{letters[: _MOST_LETTERS - 3]}..."
        words.append(f"{kinds[kind]} {letters} at {start}")
    if len(entities) > _MOST_NAMED:
        words.append(f"and {len(entities) - _MOST_NAMED} more")
    return "; ".join(words)


def _around(text: str, place: int) -> str:
    """Return a text, or the part of a long one that begins a little before a place."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    begin = max(0, min(place - _MOST_LETTERS, len(text) - _MOST_CHARACTERS))
    end = begin + _MOST_CHARACTERS
    before, after = "..." if begin else "", "..." if end < len(text) else ""
    return f"{before}{text[begin:end]}{after}"
