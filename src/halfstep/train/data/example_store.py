"""Validates one file of examples once, and memory-maps the result.

In: a file, its task and the number of rows to read. Out: `Store`, without a Python
object per row, or a `UserError` that names the file, the line and what to do.

    texts.utf8        concatenated texts
    starts.i8         byte offset of each text, and the end
    lines.i8          line of the file where each row starts, from 1
    left_out.json     ner: the error of each omitted sentence
    words.json        label words or entity types, by first appearance
    word_at.i4        classify: index of each row's label word
    span_starts.i8    ner: offset of each row's spans in the next file, and the end
    spans.i4          ner: start and end character, index of the entity type
"""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.checkpoint import atomic_directory
from halfstep.errors import UserError
from halfstep.train.data import cache, labelled_text, tagged_text, text_lines
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


READERS: dict[str, ModuleType] = {"classify": labelled_text, "ner": tagged_text}

MAX_LABELS = 65536
"""Far above any real task. Without a limit, user ids mistaken for labels would ask for
a classifier with a billion outputs."""

MAX_KINDS = (2**15 - 1) // 2
"""Limit of entity types: each has two tags, and a tag is stored in 16 bits."""

# To be raised when a reader's result or the format of these files changes.
_VERSION = 6
# Share of sentences whose tags may be invalid: annotation mistakes, not a wrong format.
_MAX_LEFT_OUT_SHARE = 0.01
# Rows buffered before writing; each may be long.
_CHUNK = 512


class Store:
    """The examples of one file, memory-mapped."""

    key: str
    """Hash of the examples, independent of the file's location."""
    source: str
    words: tuple[str, ...]
    """Label words or entity types, by first appearance."""
    word_at: Integers
    """classify: index into `words` of each row; int32."""
    span_starts: Integers
    """ner: start of each row's part of `spans`, and the end; int64, shape (N + 1,)."""
    spans: Integers
    """ner: start and end character, index into `words`; int32, shape (spans, 3)."""

    def __init__(self, folder: Path, source: str, task: str) -> None:
        self.source, self.task, self._folder = source, task, folder
        files = json.loads((folder / atomic_directory.MANIFEST).read_bytes())["files"]
        # Line numbers do not change what the examples are.
        del files["lines.i8"], files["left_out.json"]
        self.key = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        self.words = tuple(json.loads((folder / "words.json").read_bytes()))
        self._numbered = source.lower().endswith(".json")
        arrays = cache.load_arrays(folder)
        self._texts, self._starts = arrays["texts"], arrays["starts"]
        self._lines = arrays["lines"]
        if task == "ner":
            self.span_starts = arrays["span_starts"]
            self.spans = arrays["spans"].reshape(-1, 3)
        else:
            self.word_at = arrays["word_at"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def text(self, i: int) -> str:
        """Return the text of a row."""
        return self._texts[self._starts[i] : self._starts[i + 1]].tobytes().decode()

    def where(self, i: int) -> str:
        """Return the location of a row, for messages."""
        where = f"{self.source} line {self._lines[i]}"
        return f"{where} entry {i + 1}" if self._numbered else where

    @property
    def left_out(self) -> tuple[str, ...]:
        """Location and error of each sentence omitted for invalid tags."""
        tails = json.loads((self._folder / "left_out.json").read_bytes())
        return tuple(f"{self.source}{tail}" for tail in tails)

    def uses(self) -> tuple[Integers, Integers]:
        """Return (row, index of the word) for each occurrence of a label word."""
        if self.task == "ner":
            counts = np.diff(self.span_starts)
            return np.repeat(np.arange(len(self)), counts), self.spans[:, 2]
        return np.arange(len(self)), self.word_at


def open_store(
    path: Path,
    task: str,
    limit: int | None,
    columns: labelled_text.Columns = labelled_text.DEFAULT_COLUMNS,
) -> Store:
    """Open a file's first `limit` rows; read and validate them if not cached."""
    reader = READERS[task]
    suffix = path.suffix.lower()
    if suffix == ".txt" and task == "classify" and path.is_file():
        raise UserError(
            f"{path}: .txt is for --task ner; save it as .tsv (a text, a tab and its "
            f"label in each line), or as {text_lines.accepted(reader.FORMATS)}."
        )
    text_lines.check_file(path, reader.FORMATS)
    content = _content(path)
    facts = {
        "file": content,
        "suffix": suffix,
        "task": task,
        "limit": limit,
        "columns": columns,
        "version": _VERSION,
    }

    def build(folder: Path) -> None:
        left_out: list[str] = []
        tagged = task == "ner"
        more = {"left_out": left_out} if tagged else {"columns": columns}
        examples = islice(reader.read(path, **more), limit)
        _write(folder, examples, path.name, task, left_out)
        tails = [fault.removeprefix(str(path)) for fault in left_out]
        text = json.dumps(tails, ensure_ascii=False)
        (folder / "left_out.json").write_text(text, encoding="utf-8")
        if _content(path) != content:
            message = f"{path} changed while it was read; start when it is whole."
            raise UserError(message)

    return Store(cache.get_or_build("rows", facts, build), str(path), task)


def _content(path: Path) -> str:
    try:
        return str(atomic_directory.digest(path)["sha256"])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _write(
    folder: Path, examples: Iterator[Any], source: str, task: str, left_out: list[str]
) -> None:
    """Write the files of a store; raise if too many sentences have invalid tags."""
    words: dict[str, int] = {}
    limit = MAX_KINDS if task == "ner" else MAX_LABELS

    def index(word: str, where: str) -> int:
        number = words.setdefault(word, len(words))
        if number >= limit:  # limit of the model's outputs
            raise UserError(
                f"{where}: {word!r} is one label more than {limit}; is it a label, "
                "and not a text or a number of the row?"
            )
        return number

    count = 0
    with cache.ArrayWriter(folder) as arrays:
        chunks = iter(lambda: list(islice(examples, _CHUNK)), [])
        for chunk in track(chunks, f"reading {source}", "rows"):
            count += len(chunk)
            texts = [row.text.encode() for row in chunk]
            arrays.append("texts.utf8", b"".join(texts))
            arrays.append_offsets("starts.i8", [len(text) for text in texts])
            arrays.append("lines.i8", [row.line for row in chunk])
            if task == "ner":
                spans = [
                    (span.start, span.end, index(span.kind, row.where))
                    for row in chunk
                    for span in row.spans
                ]
                arrays.append("spans.i4", spans)
                sizes = [len(row.spans) for row in chunk]
                arrays.append_offsets("span_starts.i8", sizes)
            else:
                indices = [index(row.label_word, row.where) for row in chunk]
                arrays.append("word_at.i4", indices)
    if len(left_out) > _MAX_LEFT_OUT_SHARE * (count + len(left_out)):
        raise UserError(
            f"{left_out[0]} Such tags are in {len(left_out)} of "
            f"{count + len(left_out)} sentences; at most one in a hundred is left out."
        )
    (folder / "words.json").write_text(json.dumps([*words]), encoding="utf-8")
