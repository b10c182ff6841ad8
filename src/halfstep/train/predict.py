"""Predicts labels or entities of new texts with a finished run; writes them."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from halfstep.checkpoint import atomic_directory
from halfstep.errors import UserError
from halfstep.reporting.table import Cell, Table, format_count, open_atomic
from halfstep.train import model as train_model
from halfstep.train import tasks
from halfstep.train.data import entity_tags, text_lines, tokenized
from halfstep.train.data.length_batches import ordered
from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.tasks import EVAL_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy as np

_AHEAD = 2048
"""Texts read before the first prediction: enough to batch by length."""

_EVERY = 2.0  # seconds between progress lines


@dataclass(frozen=True)
class Label:
    """The prediction of a classifier for one text, which may have been cut."""

    text: str
    label: str
    probabilities: dict[str, float]
    """Label -> probability; they sum to 1."""
    cut: bool


@dataclass(frozen=True)
class Entity:
    """An entity in a text; `end` is the offset after it."""

    kind: str
    start: int
    end: int
    words: str


@dataclass(frozen=True)
class Entities:
    """The predicted entities of one text, which may have been cut."""

    text: str
    entities: tuple[Entity, ...]
    """Sorted and disjoint."""
    cut: bool


class Predictor:
    """Predicts with the model of a run, which must be finished and intact."""

    def __init__(self, run: Path) -> None:
        folder = RunFolder(run)
        if not folder.model.is_dir():
            place, state, flag = run.resolve(), "holds no run", ""
            if folder.has_checkpoint():
                state, flag = "is not finished", "--resume "
            elif RunFolder(place.parent).model == place and run.is_dir():
                raise UserError(f"{run} is the model of a run; give {place.parent}.")
            out = f"{flag}--out {shlex.quote(str(run))}"
            message = f"{run} {state}: there is no {folder.model}; train with {out}."
            raise UserError(message)
        settings = folder.settings()
        self.task = tasks.TASKS[settings.get("task", "classify")]
        atomic_directory.verify(
            folder.model, atomic_directory.read(folder.model, atomic_directory.MODEL)
        )
        try:
            self._tokenizer, model, missing = train_model.load(
                folder.model, self.task.head
            )
        except train_model.CodeError as error:
            raise UserError(f"{folder.model}: {error}") from error
        except UserError as error:
            message = f"{folder.model} is damaged: {error} Train again, or --resume."
            raise UserError(message) from error
        model_files = folder.model.glob("tokenizer.json"), folder.model.glob("vocab*")
        if missing or not any(itertools.chain(*model_files)):
            lost = f"weights {', '.join(missing[:3])}" if missing else "tokenizer.json"
            raise UserError(f"{folder.model} is damaged: it lacks {lost}. Train again.")
        self._model: Any = model.eval()
        names = model.config.id2label
        self.outputs = tuple(names[index] for index in range(len(names)))

    def predict(self, texts: Iterable[str]) -> Iterator[Label | Entities]:
        """Yield a prediction for each text, in order and lazily.

        Texts are read about two thousand at a time, so the iterable may be endless.

        Args:
            texts: Each with at least one character other than white space.

        Raises:
            UserError: If a text is blank, holds NUL or cannot be encoded as UTF-8.
        """
        source, number = iter(texts), 0
        while chunk := list(itertools.islice(source, _AHEAD)):
            for text in chunk:
                number += 1
                fault = text_lines.text_fault(text)
                if not text.strip():
                    fault = "it is blank; give at least one character"
                if fault:
                    raise UserError(f"text {number} cannot be used: {fault}.")
            yield from self._predict_chunk(chunk)

    @torch.inference_mode()
    def _predict_chunk(self, texts: list[str]) -> list[Label | Entities]:
        tagged = self.task.name == "ner"
        token_lists = tokenized.tokenize(self._tokenizer, texts, offsets=tagged)
        places = [offsets for _, offsets in token_lists] if tagged else None
        encoded = EncodedTexts.build([ids for ids, _ in token_lists], offsets=places)
        cut = self._is_cut(texts, encoded)
        predictions: list[Any] = [None] * len(texts)
        for indices in ordered(encoded.lengths, EVAL_BATCH):
            inputs = encoded.collate(indices, self._tokenizer.pad_token_id)
            logits = self._model(**inputs).logits.float()
            if tagged:
                tags = tasks.best_tags(encoded, indices, logits)
                for index, row in zip(indices.tolist(), tags, strict=True):
                    entities = self._entities(encoded, index, row, texts[index])
                    predictions[index] = Entities(texts[index], entities, cut[index])
            else:
                shares = logits.softmax(-1)
                for index, row in zip(indices.tolist(), shares, strict=True):
                    named = dict(zip(self.outputs, row.tolist(), strict=True))
                    best = self.outputs[int(row.argmax())]
                    predictions[index] = Label(texts[index], best, named, cut[index])
        return predictions

    def _is_cut(self, texts: list[str], encoded: EncodedTexts) -> list[bool]:
        cut = [False] * len(texts)
        full = encoded.lengths >= self._tokenizer.model_max_length
        reached = full.nonzero()[0].tolist()
        if not reached:  # a tokenizer rejects an empty list
            return cut
        encoding = self._tokenizer(
            [texts[index] for index in reached],
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # would warn about the length
        )
        for index, ids in zip(reached, encoding["input_ids"], strict=True):
            cut[index] = len(ids) > int(encoded.lengths[index])
        return cut

    def _entities(
        self, encoded: EncodedTexts, index: int, tags: np.ndarray, item: str
    ) -> tuple[Entity, ...]:
        offsets = encoded.token_offsets(index)
        kinds = [name.removeprefix("B-") for name in self.outputs[1::2]]
        return tuple(
            Entity(kinds[kind], start, end, item[start:end])
            for start, end, kind in entity_tags.spans_of(tags[: len(offsets)], offsets)
        )


def lines(source: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the number of each non-blank line of a stream, from 1, and its text."""
    empty = True
    for number, line in enumerate(text_lines.decode_lines("standard input", source), 1):
        if text := line.strip():
            empty = False
            yield number, text
    if empty:
        raise UserError("standard input holds no text; give one a line.")


def drop_blank(texts: Sequence[str]) -> tuple[list[tuple[int, str]], tuple[str, ...]]:
    """Return the numbered texts that are not blank, and a note about the blank ones."""
    numbered = [(n, text) for n, text in enumerate(texts, 1) if text.strip()]
    blank = [str(n) for n, text in enumerate(texts, 1) if not text.strip()]
    if not numbered:
        message = f"text {', '.join(blank)} is blank; give at least one character."
        raise UserError(message)
    are = "text {} is" if len(blank) == 1 else "texts {} are"
    notes = (f"{are.format(', '.join(blank))} blank, and left out.",) if blank else ()
    return numbered, notes


def tables(
    predictions: Iterable[Label | Entities],
    outputs: Sequence[str],
    numbers: Iterable[int],
    notes: tuple[str, ...] = (),
) -> list[Table]:
    """Return predictions as tables; `numbers` are those of their texts."""
    rows: list[tuple[Cell, ...]] = []
    columns: tuple[str, ...] = ("text", "type", "entity", "start", "end")
    title = "Entities"
    about: tuple[str, ...] = (
        "text: number of the argument or line; start, end: characters, end excluded",
    )
    cut = 0
    for number, each in zip(numbers, predictions, strict=True):
        cut += each.cut
        if isinstance(each, Label):
            title, about = "Predictions", ()
            columns = ("label", *(f"p({name})" for name in outputs), "text")
            rows.append((each.label, *each.probabilities.values(), each.text))
        else:
            rows += [
                (number, entity.kind, entity.words, entity.start, entity.end)
                for entity in each.entities
            ] or [(number, "-", "no entity", None, None)]
    notes = (*about, *notes, *_cut_note(cut))
    return [Table(title, columns, tuple(rows), notes)]


def _cut_note(count: int) -> tuple[str, ...]:
    """Return a note on the number of truncated texts, if any."""
    texts = format_count(count, "text was", "texts were")
    note = f"{texts} cut at --max-length of the run; what follows was not read."
    return (note,) if count else ()


def write(
    predictions: Iterable[Label | Entities],
    path: Path | None,
    notes: tuple[str, ...] = (),
) -> None:
    """Write one JSON object per text, and progress and notes to standard error.

    The file is replaced atomically after the last prediction; a terminal or a pipe is
    written directly. None is standard output.

    Raises:
        UserError: If the file cannot be written.
    """
    began = last_report = time.monotonic()
    number = cut = 0
    output = contextlib.nullcontext(sys.stdout) if path is None else open_atomic(path)
    try:
        with output as file:
            for number, each in enumerate(predictions, 1):
                cut += each.cut
                file.write(json.dumps(asdict(each), ensure_ascii=False) + "\n")
                if time.monotonic() - last_report >= _EVERY:
                    last_report = time.monotonic()
                    _progress(number, last_report - began)
    except OSError as error:
        if path is None:
            raise
        message = f"--json {path} cannot be written: {error.strerror}."
        raise UserError(message) from error
    _progress(number, time.monotonic() - began)
    for note in (*notes, *_cut_note(cut)):
        print(note, file=sys.stderr, flush=True)


def _progress(number: int, seconds: float) -> None:
    rate = number / seconds if seconds else 0.0
    message = f"{format_count(number, 'text')}, {rate:.0f} a second"
    print(message, file=sys.stderr, flush=True)
