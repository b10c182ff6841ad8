"""Makes a corpus of examples: train, dev and test splits, with numbered labels.

In: the rows that `source` reads. Out: `Corpus`, or a `UserError` that names the rows at
fault and what to do. Texts stay in memory-mapped Arrow files; in memory are a few
numbers per row.

Shapes: N examples of a split, K labels, U uses of labels in the rows of a file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
import re
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from halfstep.errors import UserError, format_value
from halfstep.reporting.table import format_count
from halfstep.train.data.source import BUILT_IN, read_splits
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from scipy.sparse import csr_array

    from halfstep.train.data.data_format import DataFormat
    from halfstep.train.data.source import Examples

    Int64 = np.ndarray[Any, np.dtype[np.int64]]
    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

__all__ = ["BUILT_IN", "EMOTIONS", "Corpus", "LabelledSource", "Split", "load"]

EMOTIONS = ("other", "like", "sad", "disgust", "angry", "happy")
"""The classes of the built-in emotions, by id."""

MAX_LABELS = 65536
"""Far above any real task. Without a limit, user ids mistaken for labels would ask for
a classifier with a billion outputs."""

MAX_KINDS = (2**15 - 1) // 2
"""Limit of entity types: each has two tags, and a tag is stored in 16 bits."""

# What messages call a label.
_NOUNS = {"classify": "label", "ner": "entity type"}
# Label names that a message lists, and rows at fault.
_MAX_LISTED_LABELS, _MAX_PLACES = 12, 10
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# More labels than these, and than a share of the rows, are measurements or texts.
_FEW_NUMBERS, _FEW_WORDS, _ROWS_PER_CLASS = 20, 100, 10


class LabelledSource:
    """The rows of one file, and where each label occurs in them."""

    words: tuple[str, ...]
    """Label words, or entity types, by first appearance."""
    use_rows: Int64
    """Row of each use of a label, ascending; shape (U,)."""
    use_words: Int64
    """Index in `words` of each use; shape (U,)."""

    def __init__(self, examples: Examples, task: str, target: str = "class") -> None:
        self.examples, self.task, self.target = examples, task, target
        self.has_one_label = task == "classify" and target == "class"
        self.use_rows = np.arange(len(examples.rows))
        if target == "regression":
            self.words, self.use_rows = (), self.use_rows[:0]
            self.use_words = self.use_rows
            return
        labels = self.column("spans" if task == "ner" else "label")
        if task == "ner" or target == "multi_label":
            lengths = _numbers(pc.list_value_length(labels))
            self.use_rows = np.repeat(self.use_rows, lengths)
            labels = pc.list_flatten(labels)
        if task == "ner":
            self._edges = [
                _numbers(pc.struct_field(labels, name)) for name in ("start", "end")
            ]
            labels = pc.struct_field(labels, "kind")
        chunks = labels.dictionary_encode().chunks
        self.words = tuple(chunks[0].dictionary.to_pylist()) if chunks else ()
        self.use_words = _numbers(pa.chunked_array([c.indices for c in chunks], "i4"))

    def __len__(self) -> int:
        return len(self.examples.rows)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column, memory-mapped."""
        return self.examples.rows.data.column(name)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """`text`, and `text_pair` of sentence pairs."""
        names = self.examples.rows.column_names
        return tuple(name for name in ("text", "text_pair") if name in names)

    @property
    def key(self) -> str:
        """Hash of the rows, independent of their file."""
        key: str = self.examples.rows._fingerprint  # noqa: SLF001 - no public name
        return key

    @cached_property
    def text_hashes(self) -> Int64:
        """A hash of each row's texts without surrounding blanks; shape (rows,).

        64 bits, so different texts have different hashes; Python's hash, so it differs
        between processes.
        """
        chunks = [self.column(name).chunks for name in self.text_columns]
        chunks[0] = track(chunks[0], "comparing texts", "texts", len(self))
        texts = (
            (text.strip() for chunk in column for text in chunk.to_pylist())
            for column in chunks
        )
        return np.fromiter(map(hash, zip(*texts, strict=True)), np.int64, len(self))

    def where(self, word: int) -> str:
        """Return the location of a label's first row, by its index in `words`."""
        return self.examples.where(
            int(self.use_rows[np.argmax(self.use_words == word)])
        )

    def spans(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, index in `words`) of a row's entities."""
        first, end = np.searchsorted(self.use_rows, (row, row + 1))
        parts = (*self._edges, self.use_words)
        return zip(*(part[first:end].tolist() for part in parts), strict=True)


def _numbers(column: pa.ChunkedArray) -> Int64:
    numbers: Int64 = column.to_numpy().astype(np.int64)
    return numbers


@dataclass(frozen=True, eq=False)
class Split:
    """A sequence of examples from one file."""

    source: LabelledSource
    rows: Int64
    """Row in the source of each example; shape (N,)."""
    ids: Int64
    """Index in `Corpus.labels` of each of the source's label words; -1 if absent."""
    num_labels: int
    """Length of `Corpus.labels`."""

    def __len__(self) -> int:
        return len(self.rows)

    def text(self, i: int) -> str:
        """Return the text of an example; of a sentence pair, both, with a tab."""
        names, row = self.source.text_columns, int(self.rows[i])
        return "\t".join(self.source.column(name)[row].as_py() for name in names)

    def texts(self) -> Iterator[str]:
        """Yield the text of each example, as `text`."""
        columns = [self.source.column(name) for name in self.source.text_columns]
        for row in self.rows.tolist():
            yield "\t".join(column[row].as_py() for column in columns)

    def text_hashes(self) -> Int64:
        """Return a hash of each text without surrounding blanks; shape (N,)."""
        return self.source.text_hashes[self.rows]

    def distinct(self) -> Split:
        """Return the split with one row of each text."""
        _, first = np.unique(self.text_hashes(), return_index=True)
        return replace(self, rows=self.rows[first])

    def words(self) -> set[str]:
        """Return the label words or entity types that occur in the examples."""
        return {self.source.words[word] for word in np.unique(self._used_words())}

    def label_counts(self) -> Int64:
        """Return the uses of each label, or entities of each type; shape (K,)."""
        return np.bincount(self.ids[self._used_words()], minlength=self.num_labels)

    def _used_words(self) -> Int64:
        is_used = np.zeros(len(self.source), bool)
        is_used[self.rows] = True
        return self.source.use_words[is_used[self.source.use_rows]]

    def labels(self) -> np.ndarray | csr_array:
        """Return the label of each example.

        The class, an index into `Corpus.labels`, int64, or for regression the number,
        float32; shape (N,). Where texts have several labels, a sparse matrix of ones,
        float32, shape (N, K).
        """
        source = self.source
        if source.target == "regression":
            numbers = source.column("label").to_numpy()
            return np.asarray(numbers[self.rows], np.float32)
        ids = self.ids[source.use_words]
        if source.target == "class":
            return ids[self.rows]
        from scipy.sparse import csr_array

        ones = np.ones(len(ids), np.float32)
        shape = len(source), self.num_labels
        matrix = csr_array((ones, (source.use_rows, ids)), shape)
        matrix.data[:] = 1  # a label given twice was summed
        return matrix[self.rows]

    def spans(self, i: int) -> list[tuple[int, int, int]]:
        """Return (start, end, index in `Corpus.labels`) of an example's entities."""
        spans = self.source.spans(int(self.rows[i]))
        return [(start, end, int(self.ids[word])) for start, end, word in spans]


@dataclass(frozen=True)
class Corpus:
    """The examples of a run, in three splits, and their label names."""

    name: str
    """Name of the built-in data, of the hub or of the directory, or the file without
    its suffix."""
    task: str
    """`classify` or `ner`."""
    labels: tuple[str, ...]
    """The name of each class, label or entity type, by id; none for regression."""
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
    """Texts of a file that equal an earlier one, and are in the same split; 0 where
    the splits are given."""
    target: str = "class"
    """classify: `class`, `multi_label` or `regression`."""

    @property
    def sizes(self) -> str:
        """The number of texts in each split, for display."""
        tests = format_count(len(self.test), "test text")
        return f"{len(self.train)} train, {len(self.dev)} dev, {tests}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What reading chose or left out, for the user."""
        splits = (self.train, self.dev, self.test)
        sources = dict.fromkeys(split.source for split in splits)
        return tuple(note for source in sources for note in source.examples.notes)


def load(
    data: str | None,
    data_format: DataFormat,
    *,
    label_names: tuple[str, ...] | None,
    dev_share: float,
    seed: int,
) -> Corpus:
    """Load the corpus of a file, of a directory or hub name, or the built-in one.

    Raises on errors that would train silently and only show as a poor score, such as a
    class that only dev has, or labels that are numbers here and words there.

    Args:
        data: A file, which is shuffled and split unless it has splits; a directory or
            a name of the hub, whose splits are used as they are; or None for the
            built-in data.
        data_format: How it is read.
        label_names: Names of the classes or entity types, by id. None: the labels of
            train, sorted; numbers by their value.
        dev_share: Share of train that becomes dev if there is none; train and dev get
            at least one row.
        seed: Seed of the shuffle before that.

    Raises:
        UserError: If a file, row or label is invalid.
    """
    task, target = data_format.task, data_format.target
    if data is None and task == "classify":
        label_names = label_names or EMOTIONS
    read = read_splits(data, data_format)
    rows = {name: LabelledSource(read[name], task, target) for name in read}
    names = _label_names(rows, label_names)
    splits = {
        name: Split(
            each,
            np.arange(len(each)),
            _word_ids(each, names, label_names),
            len(names),
        )
        for name, each in rows.items()
    }
    repeats = 0
    if "dev" not in splits:
        divided, repeats = random_splits(splits["train"], dev_share, seed)
        splits |= divided
    train = splits["train"]
    splits.setdefault("test", replace(train, rows=train.rows[:0]))
    _check_train(splits)
    return Corpus(
        BUILT_IN[task] if data is None else _name(data),
        task,
        names,
        **{name: splits[name] for name in ("train", "dev", "test")},
        fingerprint=_fingerprint(task, target, names, splits),
        repeats=repeats,
        target=target,
    )


def _name(data: str) -> str:
    path = Path(data)
    if path.is_dir():
        return path.resolve().name
    return Path(data.removesuffix(".gz")).stem if path.exists() else data


def random_splits(
    split: Split, dev_share: float, seed: int
) -> tuple[dict[str, Split], int]:
    """Shuffle and split a file's rows; return the splits and the number of repeats.

    Rows with the same text stay together, or dev would hold texts of train. Dev is
    `dev_share` of the distinct texts, stratified by class, and at least one text of
    each class stays in train. A text with several labels or entities goes to dev only
    if train keeps one of each.
    """
    order = array("q", range(len(split)))
    random.Random(seed).shuffle(order)  # noqa: S311 - a split is no secret
    rows = np.array(order, np.int64)
    is_dev, num_texts = _dev_rows(split.source, rows, dev_share)
    file = split.source.examples.source
    if num_texts == 1:
        raise UserError(
            f"{file} holds one distinct text, and train and dev need one each; add "
            "different texts."
        )
    if not is_dev.any():
        noun = _NOUNS[split.source.task]
        raise UserError(
            f"{file}: no text can go to dev, for train would lack its {noun}; add "
            f"different texts with each {noun}."
        )
    splits = {
        "train": replace(split, rows=rows[~is_dev]),
        "dev": replace(split, rows=rows[is_dev]),
    }
    return splits, len(rows) - num_texts


def _dev_rows(
    source: LabelledSource, rows: Int64, dev_share: float
) -> tuple[BoolArray, int]:
    """Return which of `rows`, in their order, go to dev, and the number of texts.

    A text is drawn where its first row in the file is in `rows`: in the order of any of
    its rows, frequent texts would come first, and take most rows to dev.
    """
    _, first, text_of_row = np.unique(
        source.text_hashes, return_index=True, return_inverse=True
    )
    place = np.empty_like(rows)
    place[rows] = np.arange(len(rows))
    num_words = len(source.words) or 1
    # Each label or entity type once per text, sorted by text.
    uses = np.unique(text_of_row[source.use_rows] * num_words + source.use_words)
    texts, words = np.divmod(uses, num_words)
    starts = np.searchsorted(texts, np.arange(len(first) + 1)).tolist()
    num_dev = min(max(1, round(len(first) * dev_share)), len(first) - 1)
    counts = np.bincount(words, minlength=num_words)
    quota = dev_counts(counts, num_dev) if source.has_one_label else counts - 1
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
    words = np.repeat(np.arange(len(counts)), np.maximum(counts - 1, 0))
    # Seats that a label has before each of its own.
    before = np.arange(len(words)) - np.searchsorted(words, words)
    with np.errstate(divide="ignore"):
        claims = counts[words] / np.sqrt(before * (before + 1.0))
    order = np.lexsort((words, -counts[words], -claims))[:seats]
    return np.bincount(words[order], minlength=len(counts))


def _label_names(
    rows: dict[str, LabelledSource], label_names: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return the names by id; raise if the labels have no meaning as classes."""
    train = rows["train"]
    if label_names or train.target == "regression":
        return label_names or ()
    most = MAX_KINDS if train.task == "ner" else MAX_LABELS
    if train.has_one_label:
        words = {word for each in rows.values() for word in each.words}
        numbers = {word: Decimal(word) for word in words if _NUMBER.fullmatch(word)}
        if len(numbers) == len(words):
            return _numbers_as_names(train, numbers)
        if numbers:
            is_number = np.array([word in numbers for word in train.words])
            rare = words - numbers.keys()
            if is_number[train.use_words].mean() <= 1 / 2:
                rare = set(numbers)
            fault = "some labels are numbers, others words; use one of them throughout"
            raise _label_error(rows.values(), rare, fault)
        most = min(most, max(_FEW_WORDS, len(train) // 2))
    if len(train.words) > most:
        word = format_value(train.words[most])
        raise UserError(
            f"{train.where(most)}: {word} is one label more than {most}; is it a "
            "label, and not a text or a number of the row?"
        )
    return tuple(sorted(train.words))


def _numbers_as_names(
    train: LabelledSource, numbers: dict[str, Decimal]
) -> tuple[str, ...]:
    """Return whole numbers by value; raise if they are measurements, not classes."""
    uses = Counter(numbers[word] for word in train.words)
    fractions = [
        word
        for word in train.words
        if numbers[word].to_integral_value() != numbers[word]
    ]
    if fractions or len(uses) > max(_FEW_NUMBERS, len(train) // _ROWS_PER_CLASS):
        fault = (
            f"labels look continuous: {len(uses):,} different numbers in "
            f"{len(train):,} rows; add --regression, or name the classes in --labels"
        )
        raise _label_error([train], {*fractions[:1]} or {train.words[-1]}, fault)
    same = {word for word in train.words if uses[numbers[word]] > 1}
    if same:
        fault = f"label {min(same)!r} is written in several ways; write it in one"
        raise _label_error([train], same, fault)
    return tuple(sorted(train.words, key=numbers.__getitem__))


def _word_ids(
    rows: LabelledSource, names: Sequence[str], label_names: Sequence[str] | None
) -> Int64:
    """Return the index in `names` of each label word; -1 for one that train lacks."""
    ids = {name: number for number, name in enumerate(names)}
    unknown = [word for word in rows.words if word not in ids]
    if unknown and label_names:
        # Numbers count the given names from 0, as in the built-in data.
        ids |= {str(number): number for number in range(len(names))}
        unknown = [word for word in unknown if word not in ids or rows.task == "ner"]
    if unknown and label_names:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        hint = f", perhaps {near[0]!r}" if near else ""
        listed = ", ".join(names[:_MAX_LISTED_LABELS])
        more = ", ..." if names[_MAX_LISTED_LABELS:] else ""
        noun = _NOUNS[rows.task]
        fault = f"{noun} {unknown[0]!r} is unknown{hint}; use {listed}{more}"
        raise _label_error([rows], {*unknown}, fault)
    return np.array([ids.get(word, -1) for word in rows.words], np.int64)


def _label_error(
    files: Iterable[LabelledSource], words: set[str], fault: str
) -> UserError:
    """Return an error with the first row of each word, up to ten."""
    places = [
        (each.where(number), format_value(word))
        for each in files
        for number, word in enumerate(each.words)
        if word in words
    ]
    also = [f"{word} in {where}" for where, word in places[1:_MAX_PLACES]]
    also += [f"{len(places) - _MAX_PLACES} more"] * (len(places) > _MAX_PLACES)
    likewise = f"; likewise {', '.join(also)}" if also else ""
    return UserError(f"{places[0][0]}: {fault}{likewise}.")


def _check_train(splits: dict[str, Split]) -> None:
    """Raise if train is unusable, lacks a label of the others, or dev has no entity."""
    source = splits["train"].source
    if source.target == "regression":
        return
    task, file = source.task, source.examples.source
    train_words = splits["train"].words()
    if not train_words:
        noun = "entity" if task == "ner" else "label"
        message = f"{file}: train holds no {noun}; annotate some, or take more rows."
        raise UserError(message)
    if task == "ner" and not splits["dev"].words():
        raise UserError(
            f"{file}: dev holds no entity to choose the best model by; annotate "
            "some, or take more rows."
        )
    if source.has_one_label and len(train_words) == 1:
        raise UserError(
            f"{file}: train holds only one class {train_words.pop()!r}; "
            "a classifier needs at least two."
        )
    for name in ("dev", "test"):
        split = splits[name]
        absent = split.words() - train_words
        if absent:
            first = next(word for word in split.source.words if word in absent)
            fault = (
                f"{_NOUNS[task]} {first!r} of {name} is absent from train; add rows "
                "with it, take more rows, or drop this one"
            )
            raise _label_error([split.source], absent, fault)


def _fingerprint(
    task: str, target: str, labels: tuple[str, ...], splits: dict[str, Split]
) -> str:
    """Return the SHA-256 of the labels and examples of a corpus."""
    facts: list[Any] = [task, target, labels]
    for name in ("train", "dev", "test"):
        split, source = splits[name], splits[name].source
        numbers = [split.rows, source.use_rows, split.ids[source.use_words]]
        if target == "regression":
            numbers.append(np.asarray(split.labels()))
        facts.append([name, source.key, *map(_sha256, numbers)])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _sha256(numbers: np.ndarray) -> str:
    return hashlib.sha256(numbers.tobytes()).hexdigest()
