"""Predicts labels or entities of texts with a finished run.

In: rows of a file, with any columns, or texts. Out: predictions in their order. Rows
are read, tokenized and predicted in chunks, so memory does not grow with the file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch

from halfstep.casting.autocast_mode import autocast
from halfstep.casting.convert_model import convert_
from halfstep.checkpoint import atomic_directory
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.policy.rules import Policy
from halfstep.train import model as train_model
from halfstep.train import tasks
from halfstep.train.config import TrainConfig, read_file, resume_config
from halfstep.train.data import text_files, tokenized
from halfstep.train.data.length_batches import token_batches
from halfstep.train.data.source import TextRow, read_texts
from halfstep.train.output.run_directory import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from halfstep.train.data.source import BadRow
    from halfstep.train.data.tokenized import EncodedTexts

    Rows = Iterator[TextRow]

_CHUNK = 8192
"""Rows that are batched by length together; at most three chunks are in memory."""
_BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}
"""Tokens of a batch: on a CPU activations stay in its cache, a GPU needs more work."""


class _Chunk(NamedTuple):
    """Consecutive rows and their tokens."""

    rows: Sequence[TextRow]
    encoded: EncodedTexts
    cut: Sequence[int]


class Predictor:
    """Predicts with the model of a finished run, whose files are verified first.

    It computes at the level of the run where `halfstep env` recommends its dtype, and
    in fp32 elsewhere.

    Args:
        run: Folder of the run.
        device: "auto", "cpu" or "cuda".

    Attributes:
        precision: Format and device, such as "bf16 on cuda".

    Raises:
        UserError: If the run is not finished or damaged, or there is no such device.
    """

    def __init__(self, run: str | Path, device: str = "auto") -> None:
        folder = RunFolder(Path(run))
        _check_finished(folder)
        self.config = resume_config(folder.settings(), {})
        self._task = tasks.TASKS[self.config.problem]
        self._tokenizer, model = _load(folder.model, self._task.head)
        columns = self.config.data_format.text_columns or ()
        self._takes_pairs = len(columns) > 1
        self._device = hardware.pick_device(device)
        self._model = model.eval().to(self._device)
        self._context: Callable[[], contextlib.AbstractContextManager[object]]
        self._context = contextlib.nullcontext
        path = folder.path / "resolved.toml"
        dtype = self._use_level(read_file(path)) if path.exists() else "fp32"
        self.precision = f"{dtype} on {self._device}"

    def _use_level(self, resolved: dict[str, Any]) -> str:
        """Convert the model to a run's level if that is fast; return the dtype."""
        level, device = levels.parse(resolved["level"]), self._device
        format_ = formats.parse(resolved["dtype"])
        if not level.low or hardware.recommend(device).dtype != format_.name:
            return "fp32"
        policy = Policy.of(resolved["policy"])
        policy = convert_(self._model, level, format_.dtype, policy).policy
        if level.autocast:
            words = {"policy": policy, "model": self._model}
            self._context = partial(autocast, device, format_.dtype, **words)
        return format_.name

    def read_rows(self, data: str, bad_rows: list[BadRow], **given: Any) -> Rows:  # noqa: ANN401
        """Yield the rows of a file that `halfstep train` reads, with or without labels.

        Args:
            data: As for --data of `halfstep train`.
            bad_rows: With `skip_bad_rows`, rows that are left out are appended here.
            given: `text_column`, `encoding`, `delimiter`, `skip_bad_rows`, as for
                `halfstep train`. Only the text column is otherwise the run's: files
                that come later may be written by another program.
        """
        given["text_column"] = given["text_column"] or self.config.text_column
        data_format = TrainConfig(data=data, **given).data_format
        is_table = given["text_column"] or text_files.suffix_of(Path(data)) == ".csv"
        if self.config.task == "ner" and not is_table:
            data_format = replace(data_format, task="ner")  # a token and its tag a line
        for row in read_texts(data, data_format, bad_rows):
            own = row.columns
            if data_format.task == "ner" and "text" not in own:  # offsets are in it
                yield row._replace(columns={**own, "text": row.text})
            else:
                yield row

    def predict(self, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield the prediction for each text, in order.

        By the name of its column in a file: `label`, and `p(NAME)` for each class;
        `labels` of several, and `p(NAME)`; `value`; or `entities`, each with `start`,
        `end` (the offset after it), `label` and `text`. Probabilities have six digits.
        Texts are read thousands at a time, so the iterable may be endless.

        Raises:
            UserError: If a text is blank, holds NUL or cannot be encoded as UTF-8.
        """
        for _, predictions, _ in self.predict_rows(text_rows(texts)):
            yield from predictions

    def predict_rows(
        self, rows: Iterable[TextRow], advance: Callable[[int], object] = lambda _: None
    ) -> Iterator[tuple[Sequence[TextRow], list[dict[str, Any]], Sequence[int]]]:
        """Predict for rows, thousands at a time.

        Args:
            rows: Read lazily.
            advance: Called with the number of rows of each batch.

        Yields:
            Rows; their predictions, as of `predict`; and the indices of those whose
            text has more tokens than the model takes.
        """
        multiple = train_model.PAD_MULTIPLE if self._device == "cuda" else 1
        pad_id, size = self._tokenizer.pad_token_id, _BATCH_TOKENS[self._device]
        for chunk in self._chunks(iter(rows)):
            outputs = []  # on the device, which no batch waits for
            for indices in token_batches(chunk.encoded.lengths, size):
                inputs = chunk.encoded.collate(indices, pad_id, multiple)
                moved = {name: each.to(self._device) for name, each in inputs.items()}
                with torch.inference_mode(), self._context():
                    outputs.append((indices, self._model(**moved).logits.float()))
                advance(len(indices))
            yield chunk.rows, self._predictions(chunk, outputs), chunk.cut

    def _chunks(self, rows: Iterator[TextRow]) -> Iterator[_Chunk]:
        """Tokenize a chunk in a thread while the model works on the one before.

        Rows are read in the caller's thread: one that waits for standard input could
        not be interrupted.
        """
        with ThreadPoolExecutor(1) as pool:
            future: Future[_Chunk] | None = None
            while part := list(itertools.islice(rows, _CHUNK)):
                before, future = future, pool.submit(self._encode, part)
                if before is not None:
                    yield before.result()
            if future is not None:
                yield future.result()

    def _encode(self, rows: Sequence[TextRow]) -> _Chunk:
        texts: list[list[str]] = [[row.text for row in rows]]
        if self._takes_pairs:
            texts.append([row.text_pair or "" for row in rows])
        if self._takes_pairs is (rows[0].text_pair is None):
            learned, fix = ("pairs of texts", "--data FILE and --text-column A,B")
            if not self._takes_pairs:
                learned, fix = ("single texts", "one --text-column")
            raise UserError(f"the run has learned {learned}: give {fix}.")
        is_ner = self.config.task == "ner"
        encoded = tokenized.encode_texts(self._tokenizer, *texts, offsets=is_ner)
        full = np.flatnonzero(encoded.lengths >= self._tokenizer.model_max_length)
        cut: list[int] = []
        if len(full):  # a tokenizer rejects an empty list, and warns of long texts
            longest = ([each[i] for i in full] for each in texts)
            whole = self._tokenizer(*longest, verbose=False)["input_ids"]
            sizes = np.fromiter(map(len, whole), np.int64)
            cut = full[sizes > encoded.lengths[full]].tolist()
        return _Chunk(rows, encoded, cut)

    def _predictions(
        self, chunk: _Chunk, outputs: list[tuple[np.ndarray, Tensor]]
    ) -> list[dict[str, Any]]:
        predictions: list[dict[str, Any]] = [{}] * len(chunk.rows)
        for indices, logits in outputs:
            batch = self._task.predictions(
                logits, self._model.config, chunk.encoded, indices
            )
            for index, prediction in zip(indices.tolist(), batch, strict=True):
                predictions[index] = prediction
                for entity in prediction.get("entities", ()):
                    words = slice(entity["start"], entity["end"])
                    entity["text"] = chunk.rows[index].text[words]
        return predictions


def check_texts(
    run: Path, texts: Sequence[str], data: str | None, given: Mapping[str, Any]
) -> None:
    """Raise UserError unless there are texts or a file; ask about names of files.

    `given` are the flags that say how a file is read.
    """
    if data is not None and texts:
        raise UserError(f"--data {data} and the text {texts[0]!r}: give one of them.")
    if data is None and not texts:
        raise UserError("give texts, - for standard input, or --data FILE.")
    for name, value in given.items() if data is None else ():
        if value and (name, list(texts)) != ("encoding", ["-"]):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is for --data FILE: leave it out.")
    for text in texts:
        if os.path.isfile(text):  # noqa: PTH113 - no error if a text is no path
            here, word = f"halfstep predict {shlex.quote(str(run))}", shlex.quote(text)
            raise UserError(
                f"{text} is a file: for its rows, {here} --data {word}; for these "
                f"words, echo {word} | {here} - instead."
            )


def _check_finished(folder: RunFolder) -> None:
    """Raise UserError if a run has no final model."""
    run, flag = folder.path, ""
    if folder.model.is_dir():
        return
    place, state = run.resolve(), "holds no run"
    if folder.has_checkpoint():
        state, flag = "is not finished", "--resume "
    elif RunFolder(place.parent).model == place and run.is_dir():
        raise UserError(f"{run} is the model of a run; give {place.parent}.")
    out = f"{flag}--out {shlex.quote(str(run))}"
    message = f"{run} {state}: there is no {folder.model}; train with {out}."
    raise UserError(message)


def _load(folder: Path, head: str) -> tuple[Any, Any]:
    """Return the tokenizer and the model in a folder, after verifying its files."""
    manifest = atomic_directory.read(folder, atomic_directory.MODEL)
    atomic_directory.verify(folder, manifest)
    try:
        tokenizer, model, missing = train_model.load(folder, head)
    except train_model.CodeError as error:
        raise UserError(f"{folder}: {error}") from error
    except UserError as error:
        message = f"{folder} is damaged: {error} Train again, or --resume."
        raise UserError(message) from error
    vocabulary = itertools.chain(folder.glob("tokenizer.json"), folder.glob("vocab*"))
    if missing or not any(vocabulary):
        lost = f"weights {', '.join(missing[:3])}" if missing else "tokenizer.json"
        raise UserError(f"{folder} is damaged: it lacks {lost}. Train again.")
    return tokenizer, model


def text_rows(
    texts: Iterable[str], name: str = "text", *, skip_blank: bool = False
) -> Rows:
    """Yield texts as rows with one column, `text`; raise UserError if one is bad."""
    for number, text in enumerate(texts, 1):
        fault = text_files.character_fault(text)
        if not text.strip():
            if skip_blank:
                continue
            fault = "it is blank; give at least one character"
        if fault:
            raise UserError(f"{name} {number} cannot be used: {fault}.")
        yield TextRow(text, None, {"text": text}, f"{name} {number}")


def line_rows(source: BinaryIO, encoding: str | None = None) -> Rows:
    """Yield the lines of a stream that are not blank, as `text_rows` does."""
    lines = text_files.decode_lines("standard input", source, encoding)
    texts = (line.rstrip("\r\n") for line in lines)
    return text_rows(texts, "standard input line", skip_blank=True)
