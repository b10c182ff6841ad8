"""One file of examples, checked once and then mapped from flat files.

In: a file, its task and how many rows count. Out: `Store`, which holds no Python object
a row, or a `UserError` that names the file, the line and the cure.

    texts.utf8        the texts, one after another
    starts.i8         where each begins in it, bytes; the end
    lines.i8          where each row begins in the file, lines from 1
    left_out.json     ner: of each sentence that is not here, what is wrong with it
    words.json        label words or kinds of entities, by first appearance
    word_at.i4        classify: of each row, the index of its word
    span_starts.i8    ner: of each row, where its spans begin in the next file; the end
    spans.i4          ner: first character, the one after the last, index of the kind
"""

from __future__ import annotations

import hashlib
import json
import mmap
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from halfstep.checkpoint import atomic_directory
from halfstep.errors import UserError
from halfstep.train.data import cache, labelled_text, tagged_text, text_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from halfstep.train.data.annotated_text import AnnotatedText

    Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


class Reader(Protocol):
    """What reads the files of a task."""

    @property
    def ACCEPTED(self) -> str:  # noqa: N802 -- a module's constant
        """The suffixes that it reads, in words."""

    @property
    def FORMATS(self) -> Mapping[str, object]:  # noqa: N802
        """The same suffixes, each in lower case and with its dot."""

    @property
    def read(self) -> Callable[..., Iterator[Any]]:
        """What returns the rows of a file, each checked."""


READERS: dict[str, Reader] = {"classify": labelled_text, "ner": tagged_text}
"""Of each task: the module that reads its files."""

MAX_LABELS = 65536
"""A guess, far above any real task: a user id taken for a label would otherwise ask
for a classifier with a billion outputs."""

MAX_KINDS = (2**15 - 1) // 2
"""Of entities: each has two tags, and a tag has 16 bits."""

# Larger whenever a reader makes something else of a file, or these files change.
_VERSION = 5
# Share of the sentences whose tags may be invalid: slips of a hand, not of a program.
_MAX_LEFT_OUT_SHARE = 0.01
# Rows that wait in memory to be written; each may be a long one.
_CHUNK = 512


class Store:
    """The examples of one file, and where each stands in it."""

    key: str
    """The same for the same examples, wherever they stand; another for others."""
    source: str
    """The file, for messages."""
    words: tuple[str, ...]
    """Label words or kinds of entities, by first appearance."""
    word_at: Integers
    """classify: of each row, an index into `words`; int32."""
    span_starts: Integers
    """ner: row i has the spans from here to the next; int64, one more than rows."""
    spans: Integers
    """ner: first character, the one after the last, index into `words`; int32."""

    def __init__(self, folder: Path, source: str, task: str) -> None:
        self.source, self.task, self._folder = source, task, folder
        files = json.loads((folder / atomic_directory.MANIFEST).read_bytes())["files"]
        # Where rows stand in the file, and where those that are not among them.
        del files["lines.i8"], files["left_out.json"]
        self.key = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        self.words = tuple(json.loads((folder / "words.json").read_bytes()))
        self._starts = memory_map(folder / "starts.i8", "i8")
        self._lines = memory_map(folder / "lines.i8", "i8")
        self._numbered = source.lower().endswith(".json")
        with (folder / "texts.utf8").open("rb") as file:
            # A text is never empty, so this file has a byte to map.
            self._texts = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if task == "ner":
            self.span_starts = memory_map(folder / "span_starts.i8", "i8")
            self.spans = memory_map(folder / "spans.i4", "i4").reshape(-1, 3)
        else:
            self.word_at = memory_map(folder / "word_at.i4", "i4")

    def __reduce__(self) -> tuple[type[Store], tuple[Path, str, str]]:
        """Travel to another process as a folder, never as its content."""
        return Store, (self._folder, self.source, self.task)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def text(self, i: int) -> str:
        """Return the text of a row."""
        return self._texts[self._starts[i] : self._starts[i + 1]].decode()

    def where(self, i: int) -> str:
        """Return where a row stands, for messages."""
        where = f"{self.source} line {self._lines[i]}"
        return f"{where} entry {i + 1}" if self._numbered else where

    @property
    def left_out(self) -> tuple[str, ...]:
        """Of each sentence with invalid tags: where it stands, and what is wrong."""
        tails = json.loads((self._folder / "left_out.json").read_bytes())
        return tuple(f"{self.source}{tail}" for tail in tails)

    def uses(self) -> tuple[Integers, Integers]:
        """Return each use of a word: its row, and the index of the word."""
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
    """Return the examples of a file, read and checked unless that was done before.

    Args:
        path: A file that the task's reader takes.
        task: "classify" or "ner".
        limit: Rows after which reading stops; None for all.
        columns: classify: names of those that are read.

    Raises:
        UserError: If the file or one of the rows read cannot be used.
    """
    reader = READERS[task]
    suffix = text_lines.check_file(path, reader.FORMATS, reader.ACCEPTED)
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
        _write(folder, islice(reader.read(path, **more), limit), task, left_out)
        tails = [fault.removeprefix(str(path)) for fault in left_out]
        text = json.dumps(tails, ensure_ascii=False)
        (folder / "left_out.json").write_text(text, encoding="utf-8")
        if _content(path) != content:
            message = f"{path} changed while it was read; start when it is whole."
            raise UserError(message)

    return Store(cache.get_or_build("rows", facts, build), str(path), task)


def _content(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        return str(atomic_directory.digest(path)["sha256"])
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise UserError(message) from error


def _write(
    folder: Path, examples: Iterator[Any], task: str, left_out: list[str]
) -> None:
    """Write the files of a store; refuse too many sentences with invalid tags."""
    words: dict[str, int] = {}
    count = 0
    text_starts, span_starts = _StartOffsets(), _StartOffsets()
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        while chunk := list(islice(examples, _CHUNK)):
            count += len(chunk)
            texts = [row.text.encode() for row in chunk]
            contents = {
                "texts.utf8": b"".join(texts),
                "starts.i8": text_starts.of([len(text) for text in texts]),
                "lines.i8": _bytes([row.line for row in chunk], "i8"),
            }
            if task == "ner":
                counts = [len(row.spans) for row in chunk]
                contents["span_starts.i8"] = span_starts.of(counts)
                contents["spans.i4"] = _spans(chunk, words)
            else:
                word_indices = [
                    words.setdefault(row.label_word, len(words)) for row in chunk
                ]
                contents["word_at.i4"] = _bytes(word_indices, "i4")
            _check_words(chunk, words, task)
            for name, content in contents.items():
                if name not in files:
                    files[name] = stack.enter_context((folder / name).open("wb"))
                files[name].write(content)
    if len(left_out) > _MAX_LEFT_OUT_SHARE * (count + len(left_out)):
        message = (
            f"{left_out[0]} Such tags stand in {len(left_out)} of "
            f"{count + len(left_out)} sentences; more than one in a hundred is no slip."
        )
        raise UserError(message)
    (folder / "words.json").write_text(json.dumps([*words]), encoding="utf-8")


class _StartOffsets:
    """Where each of many things begins that stand one after another, and the end."""

    def __init__(self) -> None:
        self._end: int | None = None

    def of(self, sizes: list[int]) -> bytes:
        """Return what the next things add, as it stands in a file."""
        ends = np.cumsum([self._end or 0, *sizes])
        first, self._end = self._end is None, int(ends[-1])
        return _bytes(ends if first else ends[1:], "i8")


def _spans(chunk: list[AnnotatedText], words: dict[str, int]) -> bytes:
    """Return the spans of some texts as they stand in a file; kinds are added."""
    spans = [
        (span.start, span.end, words.setdefault(span.kind, len(words)))
        for row in chunk
        for span in row.spans
    ]
    return _bytes(spans, "i4")


def _check_words(chunk: list[Any], words: dict[str, int], task: str) -> None:
    """Refuse more words than a model can have outputs."""
    limit = MAX_KINDS if task == "ner" else MAX_LABELS
    if len(words) <= limit:
        return
    word = [*words][limit]
    for row in chunk:
        row_words = [s.kind for s in row.spans] if task == "ner" else [row.label_word]
        if word in row_words:
            message = (
                f"{row.where}: {word!r} is one label more than {limit}; is it a "
                "label, and not a text or a number of the row?"
            )
            raise UserError(message)


def _bytes(numbers: list[Any] | Integers, dtype: str) -> bytes:
    """Return numbers as they stand in a file, on any machine."""
    return np.asarray(numbers, f"<{dtype}").tobytes()


def memory_map(path: Path, dtype: str) -> Integers:
    """Return the numbers of a file; they stay there until they are read."""
    if not path.stat().st_size:  # what has no bytes cannot be mapped
        return np.empty(0, f"<{dtype}")
    # A plain array over the same memory: memmap's own indexing is slow.
    return np.memmap(path, f"<{dtype}", "r").view(np.ndarray)
