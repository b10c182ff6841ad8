"""Labelled texts as a corpus: split into train, dev and test, each label an id.

In: a file, a directory of splits, or None for the built-in emotions. Out: `Corpus`,
or a `UserError` that names the file, the line and the cure.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from halfstep.errors import UserError
from halfstep.train.rows import ACCEPTED, FORMATS, Row, read

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EMOTIONS", "Corpus", "Example", "Row", "load", "read"]

EMOTIONS = ("other", "like", "sad", "disgust", "angry", "happy")
"""The classes of the built-in data, in the order of their ids."""

# A guess, far above any real task: a user id taken for a label would otherwise ask
# for a classifier with a billion outputs.
_MOST_CLASSES = 65536
# One for train and one for dev.
_FEWEST_ROWS = 2
# Label names that a message lists.
_SHOWN = 12


@dataclass(frozen=True)
class Example:
    """One text and its class."""

    text: str
    """The text as the file holds it."""
    label: int
    """The id of its class, an index into `Corpus.labels`."""


@dataclass(frozen=True)
class Corpus:
    """What a run learns from, chooses by and is judged on."""

    name: str
    """`emotions`, or the name of the directory, or of the file without its suffix."""
    labels: tuple[str, ...]
    """The name of each class, at its id."""
    train: tuple[Example, ...]
    """What the model learns from; two classes or more."""
    dev: tuple[Example, ...]
    """What chooses the checkpoint; never empty, and no class that train lacks."""
    test: tuple[Example, ...]
    """What only the final score sees; may be empty."""


def load(
    path: Path | None,
    *,
    label_names: tuple[str, ...] | None,
    limit: int | None,
    dev_share: float,
    seed: int,
) -> Corpus:
    """Return the corpus of a file, of a directory of splits, or the built-in one.

    Why: a class that only dev holds, or a label that is a number here and a word
    there, trains without complaint and shows only as a poor score. So it is refused.

    Args:
        path: A file, to be shuffled and split; or a directory with `train.*`, `dev.*`
            and perhaps `test.*`, taken as they are; or None for the built-in data.
        label_names: The classes in the order of their ids, at least two. None takes
            the words of train, sorted, or the numbers from 0 to the largest in train.
        limit: Take the first rows of the file (of train, in a directory) as if they
            were all. Rows, >= 2; None for all.
        dev_share: Part of a file that becomes dev, between 0 and 1; at least one row
            each for train and dev. Without effect where the splits are given.
        seed: Of the shuffle that comes before the split of a file.

    Returns:
        The corpus. Duplicates stay, since real data has them.

    Raises:
        UserError: If a file, row, label or setting cannot be used.
    """
    _check_settings(label_names, limit, dev_share)
    if path is None:
        name, label_names = "emotions", label_names or EMOTIONS
        with as_file(files("halfstep.train") / name) as folder:
            splits = _given_splits(folder, limit)
    elif path.is_dir():
        name, splits = path.resolve().name, _given_splits(path, limit)
    else:
        name, splits = path.stem, {"train": read(path)[:limit], "dev": [], "test": []}
    labels, ids = _label_ids(splits, label_names)
    if not splits["dev"]:
        splits = _drawn_splits(splits["train"], dev_share, seed)
    _check_train(str(path or name), splits)
    train, dev, test = (
        tuple(Example(row.text, ids[row.label_word]) for row in splits[split])
        for split in ("train", "dev", "test")
    )
    return Corpus(name, labels, train, dev, test)


def _check_settings(
    label_names: tuple[str, ...] | None, limit: int | None, dev_share: float
) -> None:
    """Refuse settings that no data can satisfy."""
    message = ""
    if limit is not None and limit < _FEWEST_ROWS:
        message = f"limit must be 2 or more, a row each for train and dev, not {limit}."
    elif not 0 < dev_share < 1:
        message = f"dev_share must lie between 0 and 1, such as 0.08, not {dev_share}."
    elif label_names is not None and len(set(label_names)) < max(2, len(label_names)):
        message = f"label_names must be two or more different names, not {label_names}."
    if message:
        raise UserError(message)


def _given_splits(folder: Path, limit: int | None) -> dict[str, list[Row]]:
    """Return the splits that a directory holds, train cut to its first rows."""
    splits: dict[str, list[Row]] = {}
    for split in ("train", "dev", "test"):
        found = sorted(
            file
            for file in folder.iterdir()
            if file.stem == split and file.suffix.lower() in FORMATS
        )
        message = ""
        if len(found) > 1:
            message = f"{found[0]} and {found[1].name} are both {split}; keep one."
        elif not found and split != "test":
            message = (
                f"{folder} holds no {split} file; name one {split} with {ACCEPTED}."
            )
        if message:
            raise UserError(message)
        splits[split] = read(found[0]) if found else []
    splits["train"] = splits["train"][:limit]
    return splits


def _drawn_splits(rows: list[Row], dev_share: float, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one file, shuffled and cut in two."""
    if len(rows) < _FEWEST_ROWS:
        message = f"{rows[0].where} is the only row; train and dev need one each."
        raise UserError(message)
    order = rows.copy()
    random.Random(seed).shuffle(order)  # noqa: S311 - a split is no secret
    for_dev = min(max(1, round(len(order) * dev_share)), len(order) - 1)
    return {"train": order[for_dev:], "dev": order[:for_dev], "test": []}


def _label_ids(
    splits: dict[str, list[Row]], label_names: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the name of each class, and the id of each label word."""
    rows = [*splits["train"], *splits["dev"], *splits["test"]]
    for row in rows:
        if fault := _label_fault(row, rows[0], label_names):
            message = f"{row.where}: {fault}."
            raise UserError(message)
    words = {row.label_word for row in splits["train"]}
    if not rows[0].is_number:
        names = label_names or tuple(sorted(words))
        return names, {name: number for number, name in enumerate(names)}
    names = label_names or tuple(map(str, range(max(map(int, words)) + 1)))
    return names, {str(number): number for number in range(len(names))}


def _label_fault(row: Row, first: Row, label_names: tuple[str, ...] | None) -> str:
    """Return what is wrong with the label of a row; nothing if it is sound."""
    word = row.label_word
    if row.is_number != first.is_number:
        return (
            f"label {word!r} does not go with {first.label_word!r} in {first.where}; "
            "use whole numbers throughout, or words"
        )
    if row.is_number:
        top = len(label_names or range(_MOST_CLASSES)) - 1
        if not 0 <= int(word) <= top:
            cure = "give more label names" if label_names else "count classes from 0"
            return f"labels out of range: {word} is not in 0 to {top}; {cure}"
    elif label_names and word not in label_names:
        near = difflib.get_close_matches(word, label_names, n=1)
        hint = f", perhaps {near[0]!r}" if near else ""
        known = ", ".join(label_names[:_SHOWN])
        more = ", ..." if label_names[_SHOWN:] else ""
        return f"label {word!r} is unknown{hint}; use {known}{more}"
    return ""


def _check_train(source: str, splits: dict[str, list[Row]]) -> None:
    """Refuse a train split of one class, or without a class of dev or test."""
    words = {row.label_word for row in splits["train"]}
    if len(words) == 1:
        message = (
            f"{source}: train holds only one class {words.pop()!r}; "
            "a classifier needs at least two."
        )
        raise UserError(message)
    for split in ("dev", "test"):
        for row in splits[split]:
            if row.label_word not in words:
                message = (
                    f"{row.where}: label {row.label_word!r} of {split} is absent from "
                    "train; add rows with it, take more rows, or drop this one."
                )
                raise UserError(message)
