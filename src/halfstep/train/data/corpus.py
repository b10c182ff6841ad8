"""Loads examples as a corpus: train, dev and test splits, with numbered labels.

In: a file, a directory of splits, or None for the built-in data. Out: `Corpus`, or a
`UserError` that names the file, the line and what to do.
"""

from __future__ import annotations

import difflib
import hashlib
import heapq
import json
import math
import random
from array import array
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.errors import UserError
from halfstep.reporting.table import format_count
from halfstep.train.data import text_lines
from halfstep.train.data.example_store import MAX_LABELS, READERS, Store, open_store
from halfstep.train.data.labelled_text import (
    DEFAULT_COLUMNS,
    Columns,
    has_no_header,
    is_number,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    Int64 = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

__all__ = ["BUILT_IN", "EMOTIONS", "Corpus", "Split", "load"]

BUILT_IN = {"classify": "emotions", "ner": "entities"}

EMOTIONS = ("other", "like", "sad", "disgust", "angry", "happy")
"""The classes of the built-in emotions, by id."""

# What messages call a label.
_NOUNS = {"classify": "label", "ner": "entity type"}
# With fewer rows, labels often differ anyway.
_MIN_ROWS_FOR_HEADER_CHECK = 3
# Label names that a message lists.
_MAX_LISTED_LABELS = 12


@dataclass(frozen=True, eq=False)
class Split:
    """A sequence of examples from one file."""

    store: Store
    rows: Int64
    """Row in the store of each example; shape (N,)."""
    ids: Int64
    """Index in `Corpus.labels` of each of the store's label words; -1 if absent."""

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, i: int) -> str:
        """Return the text of an example."""
        return self.store.text(int(self.rows[i]))

    def texts(self) -> Iterator[str]:
        """Yield the text of each example."""
        return map(self.store.text, map(int, self.rows))

    def text_hashes(self) -> Int64:
        """Return a hash of each text without surrounding blanks; shape (N,).

        64 bits, so different texts have different hashes; Python's hash, so it differs
        between processes.
        """
        hashes = (hash(text.strip()) for text in self.texts())
        return np.fromiter(hashes, np.int64, len(self))

    def distinct(self) -> Split:
        """Return the split with one row of each text."""
        _, first = np.unique(self.text_hashes(), return_index=True)
        return Split(self.store, self.rows[first], self.ids)

    def where(self, i: int) -> str:
        """Return the file and line of an example, for messages."""
        return self.store.where(int(self.rows[i]))

    def words(self) -> set[str]:
        """Return the label words or entity types that occur in the examples."""
        return {self.store.words[word] for word in np.unique(self._used_words())}

    def label_counts(self, num_labels: int) -> Int64:
        """Return the examples of each class, or entities of each type; shape (K,)."""
        return np.bincount(self.ids[self._used_words()], minlength=num_labels)

    def _used_words(self) -> Int64:
        rows, words = self.store.uses()
        is_used = np.zeros(len(self.store), bool)
        is_used[self.rows] = True
        return np.asarray(words[is_used[rows]], np.int64)

    def labels(self) -> Int64:
        """Return each example's class, an index into `Corpus.labels`; shape (N,)."""
        return self.ids[self.store.word_at[self.rows]]

    def spans(self, i: int) -> list[tuple[int, int, int]]:
        """Return (start, end, index in `Corpus.labels`) of an example's entities."""
        row = int(self.rows[i])
        first, end = self.store.span_starts[row : row + 2]
        stored_spans = self.store.spans[first:end].tolist()
        return [
            (start, stop, int(self.ids[word])) for start, stop, word in stored_spans
        ]


@dataclass(frozen=True)
class Corpus:
    """The examples of a run, in three splits, and their label names."""

    name: str
    """Name of the built-in data or the directory, or the file without its suffix."""
    task: str
    """`classify` or `ner`."""
    labels: tuple[str, ...]
    """The name of each class or entity type, by id."""
    train: Split
    """Training examples, with at least two classes or one entity type."""
    dev: Split
    """Selects the best checkpoint; never empty, and all its labels are in train. For
    ner it holds at least one entity."""
    test: Split
    """Used for the final score only; may be empty."""
    fingerprint: str
    """SHA-256 of the task, the labels and the examples of each split in order."""
    repeats: int
    """Texts of a file that equal an earlier one, and are in the same split; 0 for a
    directory."""

    @property
    def sizes(self) -> str:
        """The number of texts in each split, for display."""
        tests = format_count(len(self.test), "test text")
        return f"{len(self.train)} train, {len(self.dev)} dev, {tests}"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Location and error of each sentence omitted for invalid tags."""
        stores = {id(s.store): s.store for s in (self.train, self.dev, self.test)}
        return tuple(fault for store in stores.values() for fault in store.left_out)


def load(
    path: Path | None,
    *,
    task: str,
    label_names: tuple[str, ...] | None,
    limit: int | None,
    dev_share: float,
    seed: int,
    columns: Columns = DEFAULT_COLUMNS,
) -> Corpus:
    """Load the corpus of a file, of a directory of splits, or the built-in one.

    Raises on errors that would train silently and only show as a poor score, such as a
    class that only dev has, or labels that are numbers here and words there.

    Args:
        path: A file, which is shuffled and split; or a directory with `train.*`,
            `dev.*` and optionally `test.*`, used as they are; or None for the built-in
            data.
        task: "classify": each text has one label. "ner": each has entities.
        label_names: Names of the classes or entity types, by id. None: the sorted
            labels of train or, if these are numbers, all from 0 to the largest.
        limit: Use only the first rows of the file (of train, in a directory); None:
            all.
        dev_share: Share of a file that becomes dev; train and dev get at least one row.
        seed: Seed of the shuffle before a file is split.
        columns: classify: names of the columns with the text and the label.

    Raises:
        UserError: If a file, row or label is invalid.
    """
    if path is None and columns != DEFAULT_COLUMNS:
        raise UserError(
            "--text-column and --label-column name columns of --data; the built-in "
            "texts have none: leave them out."
        )
    if path is None:
        name = BUILT_IN[task]
        if task == "classify":
            label_names = label_names or EMOTIONS
        with as_file(files("halfstep.train") / name) as folder:
            stores = _load_splits(folder, task, limit, DEFAULT_COLUMNS)
    elif path.is_dir():
        name, stores = path.resolve().name, _load_splits(path, task, limit, columns)
    else:
        name, stores = path.stem, {"train": open_store(path, task, limit, columns)}
    labels, ids = _label_ids(stores, task, label_names)
    # With label_names given, a header's label is unknown and already rejected.
    if task == "classify" and not label_names and columns == DEFAULT_COLUMNS:
        _check_header(stores["train"])
    splits = {}
    for split, store in stores.items():
        word_ids = np.array([ids.get(word, -1) for word in store.words], np.int64)
        splits[split] = Split(store, np.arange(len(store)), word_ids)
    repeats = 0
    if "dev" not in splits:
        splits, repeats = random_splits(splits["train"], dev_share, seed)
    train = splits["train"]
    splits.setdefault("test", Split(train.store, train.rows[:0], train.ids))
    _check_train(str(path or name), task, splits)
    fingerprint = _fingerprint(task, labels, splits)
    return Corpus(
        name, task, labels, **splits, fingerprint=fingerprint, repeats=repeats
    )


def _load_splits(
    folder: Path, task: str, limit: int | None, columns: Columns
) -> dict[str, Store]:
    """Open the splits of a directory; `limit` applies to train."""
    reader = READERS[task]
    stores: dict[str, Store] = {}
    for split in ("train", "dev", "test"):
        readable = [f for f in folder.iterdir() if f.suffix.lower() in reader.FORMATS]
        matches = sorted(f for f in readable if f.stem == split)
        # File names may have more parts: train.char.bmes.
        matches = matches or sorted(
            f for f in readable if f.name.startswith(f"{split}.")
        )
        if len(matches) > 1:
            raise UserError(
                f"{matches[0]} and {matches[1].name} are both {split}; keep one."
            )
        if not matches and split != "test":
            raise UserError(
                f"{folder} holds no {split} file; name one {split} with "
                f"{text_lines.accepted(reader.FORMATS)}."
            )
        if matches:
            stores[split] = open_store(
                matches[0], task, limit if split == "train" else None, columns
            )
    return stores


def random_splits(
    split: Split, dev_share: float, seed: int
) -> tuple[dict[str, Split], int]:
    """Shuffle and split a file's rows; return the splits and the number of repeats.

    Rows with the same text stay together, or dev would hold texts of train. Dev is
    `dev_share` of the distinct texts, stratified by label, and at least one text of
    each label stays in train. For ner, a text goes to dev only if train keeps an entity
    of each of its types.
    """
    order = array("q", range(len(split)))
    random.Random(seed).shuffle(order)  # noqa: S311 - a split is no secret
    rows = np.array(order, np.int64)
    is_dev, num_texts = _dev_rows(split, rows, dev_share)
    if not is_dev.any():
        noun = "label" if split.store.task == "classify" else "entity type"
        raise UserError(
            f"{split.store.source}: no text can go to dev, for train would lack its "
            f"{noun}; add different texts with each {noun}."
        )
    splits = {
        "train": Split(split.store, rows[~is_dev], split.ids),
        "dev": Split(split.store, rows[is_dev], split.ids),
    }
    return splits, len(rows) - num_texts


def _dev_rows(split: Split, rows: Int64, dev_share: float) -> tuple[BoolArray, int]:
    """Return which of `rows`, in their order, go to dev, and the number of texts.

    A text is drawn where its first row in the file is in `rows`: in the order of any of
    its rows, frequent texts would come first, and take most rows to dev.
    """
    store = split.store
    _, first, text_of_row = np.unique(
        split.text_hashes(), return_index=True, return_inverse=True
    )
    place = np.empty_like(rows)
    place[rows] = np.arange(len(rows))
    used_rows, used_words = store.uses()
    num_words = len(store.words) or 1
    # Each label or entity type once per text, sorted by text.
    uses = np.unique(text_of_row[used_rows] * num_words + used_words)
    texts, words = np.divmod(uses, num_words)
    starts = np.searchsorted(texts, np.arange(len(first) + 1)).tolist()
    num_dev = min(max(1, round(len(first) * dev_share)), len(first) - 1)
    counts = np.bincount(words, minlength=num_words)
    quota = dev_counts(counts, num_dev) if store.task == "classify" else counts - 1
    remaining, words_of_texts = quota.tolist(), words.tolist()
    is_dev = np.zeros(len(first), bool)
    for text in np.argsort(place[first]).tolist():
        its_words = words_of_texts[starts[text] : starts[text + 1]]
        if num_dev and all(remaining[word] > 0 for word in its_words):
            is_dev[text] = True
            num_dev -= 1
            for word in its_words:
                remaining[word] -= 1
    return is_dev[text_of_row[rows]], len(first)


def dev_counts(counts: Int64, seats: int) -> Int64:
    """Return how many texts of each label go to dev.

    Uses the Huntington-Hill method of apportionment: the next seat goes to the label
    with the largest n / sqrt(k (k + 1)), for n texts and k seats so far. Each label
    gets its first seat before any gets a second, and never as many seats as texts.
    """
    taken = np.zeros(len(counts), np.int64)
    heap = [(-math.inf, -int(n), word) for word, n in enumerate(counts) if n > 1]
    heapq.heapify(heap)
    while heap and seats:
        _, count, word = heapq.heappop(heap)
        taken[word] += 1
        seats -= 1
        k = int(taken[word])
        if k < -count - 1:
            heapq.heappush(heap, (count / math.sqrt(k * (k + 1)), count, word))
    return taken


def _label_ids(
    stores: dict[str, Store], task: str, label_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the name of each class or entity type, and the id of each label word."""
    train = stores["train"]
    numbers = task == "classify" and is_number(train.words[0])
    for store in stores.values():
        # Words are in order of first appearance, so this finds the first invalid row.
        for word in store.words:
            fault = _label_fault(word, train, label_names, task=task, numbers=numbers)
            if fault:
                rows, words = store.uses()
                row = int(rows[words == store.words.index(word)][0])
                raise UserError(f"{store.where(row)}: {fault}.")
    if not numbers:
        names = label_names or tuple(sorted(train.words))
        return names, {name: number for number, name in enumerate(names)}
    names = label_names or tuple(map(str, range(max(map(int, train.words)) + 1)))
    return names, {str(number): number for number in range(len(names))}


def _label_fault(
    word: str,
    first: Store,
    label_names: tuple[str, ...] | None,
    *,
    task: str,
    numbers: bool,
) -> str:
    """Return what is wrong with a label word; "" if valid."""
    if task == "classify" and is_number(word) != numbers:
        return (
            f"label {word!r} does not go with {first.words[0]!r} in {first.where(0)}; "
            "use whole numbers throughout, or words"
        )
    if numbers:
        top = len(label_names or range(MAX_LABELS)) - 1
        if not 0 <= int(word) <= top:
            cure = "give more label names" if label_names else "count classes from 0"
            return f"labels out of range: {word} is not in 0 to {top}; {cure}"
    elif label_names and word not in label_names:
        near = difflib.get_close_matches(word, label_names, n=1)
        hint = f", perhaps {near[0]!r}" if near else ""
        names = ", ".join(label_names[:_MAX_LISTED_LABELS])
        more = ", ..." if label_names[_MAX_LISTED_LABELS:] else ""
        return f"{_NOUNS[task]} {word!r} is unknown{hint}; use {names}{more}"
    return ""


def _check_header(train: Store) -> None:
    """Raise if the first row looks like a header with other column names."""
    if len(train) < _MIN_ROWS_FOR_HEADER_CHECK or any(map(is_number, train.words)):
        return
    alone = np.count_nonzero(train.word_at == train.word_at[0]) == 1
    if alone and has_no_header(Path(train.source)):
        raise UserError(
            f"{train.where(0)}: label {train.words[0]!r} stands in no other row: if it "
            "is a header, give --text-column and --label-column; otherwise drop the "
            "row."
        )


def _check_train(source: str, task: str, splits: dict[str, Split]) -> None:
    """Raise if train is unusable, lacks a label of the others, or dev has no entity."""
    train_words = splits["train"].words()
    if task == "ner" and not train_words:
        raise UserError(
            f"{source}: train holds no entity; annotate some, or take more rows."
        )
    if task == "ner" and not splits["dev"].words():
        raise UserError(
            f"{source}: dev holds no entity to choose the best model by; annotate "
            "some, or take more rows."
        )
    if task == "classify" and len(train_words) == 1:
        raise UserError(
            f"{source}: train holds only one class {train_words.pop()!r}; "
            "a classifier needs at least two."
        )
    for name in ("dev", "test"):
        split, store = splits[name], splits[name].store
        rows, words = store.uses()
        bad = np.array([word not in train_words for word in store.words], bool)[words]
        has_unknown_word = np.zeros(len(store), bool)
        has_unknown_word[rows[bad]] = True
        unknown_rows = np.flatnonzero(has_unknown_word[split.rows])
        if len(unknown_rows):
            at = int(unknown_rows[0])
            word = store.words[words[bad & (rows == split.rows[at])][0]]
            raise UserError(
                f"{split.where(at)}: {_NOUNS[task]} {word!r} of {name} is absent from "
                "train; add rows with it, take more rows, or drop this one."
            )


def _fingerprint(task: str, labels: tuple[str, ...], splits: dict[str, Split]) -> str:
    """Return the SHA-256 of the labels and examples of a corpus."""
    facts = [
        [name, split.store.key, _sha256(split.rows), _sha256(split.ids)]
        for name, split in splits.items()
    ]
    return hashlib.sha256(json.dumps([task, labels, facts]).encode()).hexdigest()


def _sha256(numbers: Int64) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()
