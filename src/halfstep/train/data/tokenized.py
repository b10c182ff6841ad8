"""Tokenizes every example once, and memory-maps the cached Arrow file.

In: a split and a tokenizer. Out: `EncodedTexts`, which makes the tensors of a batch.

The tokens of a million texts stay in the mapped file; in memory are an offset and a
length per text. `datasets` takes 400 us for the rows of a batch of 32, as lists; a view
of the file's integers takes 60 us for its tensors.

Shapes: B examples in a batch, T positions, N examples in total.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from halfstep.errors import UserError
from halfstep.train.data import arrow_cache, entity_tags
from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from scipy.sparse import csr_array

    from halfstep.train.data.corpus import LabelledSource, Split
    from halfstep.train.data.length_batches import Indices

_VERSION = 5  # of the columns of a cached file
_CHUNK = 4096


class TokenColumn(NamedTuple):
    """Integers of the tokens of all stored texts."""

    values: np.ndarray
    """Those of a text one after another; what is between texts is meaningless. int32"""
    starts: np.ndarray
    """Index in `values` of each stored text's first token. int64."""


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The tokens and targets of a split's examples."""

    columns: Mapping[str, TokenColumn]
    """`input_ids`; of pairs `token_type_ids`; of ner `tags`, indices in `meaning`, and
    `char_starts` and `char_ends`, the characters of each token."""
    stored_lengths: np.ndarray
    """Number of tokens of each stored text. int64."""
    rows: np.ndarray
    """Index of each example among the stored texts. int64, shape (N,)."""
    labels: np.ndarray | csr_array | None = None
    """The class of each example, int64, or its number, float32; shape (N,). Of several
    labels a sparse matrix of ones, float32, shape (N, K)."""
    meaning: np.ndarray | None = None
    """ner: stored tag -> target; the last entry is for special tokens. int64."""
    per_text: Mapping[str, np.ndarray] = field(default_factory=dict)
    """ner: `num_targets` of each stored text, and `num_inexact`, its entities whose
    edges do not match token edges."""
    source: Path | None = None
    """The file that the columns are mapped from."""

    @classmethod
    def build(
        cls,
        token_lists: Sequence[Sequence[int]],
        labels: Sequence[int] | None = None,
        offsets: Sequence[Sequence[tuple[int, int]]] | None = None,
        token_types: Sequence[Sequence[int]] | None = None,
    ) -> EncodedTexts:
        """Build from tokens in memory, without a file."""
        lengths = np.fromiter(map(len, token_lists), np.int64, len(token_lists))
        starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])[:-1]
        columns = {"input_ids": TokenColumn(_flat(token_lists), starts)}
        if token_types is not None:
            columns["token_type_ids"] = TokenColumn(_flat(token_types), starts)
        if offsets is not None:
            pairs = _flat(chain.from_iterable(offsets)).reshape(-1, 2)
            for at, name in enumerate(("char_starts", "char_ends")):
                columns[name] = TokenColumn(pairs[:, at], starts)
        classes = None if labels is None else np.asarray(labels, np.int64)
        return cls(columns, lengths, np.arange(len(lengths)), classes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the path for a worker, instead of the mapped columns."""
        if self.source is None:
            return dict(vars(self))
        names = ("rows", "labels", "meaning", "source")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        mapped = _mapped(state["source"]) if state["source"] else {}
        vars(self).update(mapped | state)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example. int64, shape (N,)."""
        lengths: np.ndarray = self.stored_lengths[self.rows]
        return lengths

    @cached_property
    def counts(self) -> np.ndarray:
        """Targets of each example. int64, shape (N,)."""
        if not self.per_text:
            return np.ones(len(self), dtype=np.int64)
        counts: np.ndarray = self.per_text["num_targets"][self.rows]
        return counts

    @property
    def inexact(self) -> int:
        """Entities whose edges do not match token edges."""
        if not self.per_text:
            return 0
        return int(self.per_text["num_inexact"][self.rows].sum())

    @cached_property
    def begins(self) -> np.ndarray:
        """Offset of each example in the concatenated tokens of all, and the end."""
        begins: np.ndarray = np.concatenate([[0], np.cumsum(self.lengths)])
        return begins

    def collate(
        self, indices: Indices, pad_id: int, multiple: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one batch, padded to its longest example.

        Args:
            indices: The examples, by index in `rows`. May be empty.
            pad_id: Token id of the padding.
            multiple: T is rounded up to a multiple of this, >= 1.

        Returns:
            `input_ids`, `attention_mask` and, of pairs, `token_type_ids`: int64, shape
            (B, T). `labels`: of classes int64, shape (B,), of ner (B, T); of several
            labels float32, shape (B, K), of regression (B,).
        """
        real = self._mask(indices, multiple)
        batch = {
            "input_ids": self._padded("input_ids", indices, real, pad_id),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
        }
        if "token_type_ids" in self.columns:
            batch["token_type_ids"] = self._padded("token_type_ids", indices, real, 0)
        if self.labels is not None:
            labels: Any = self.labels[indices]
            is_dense = isinstance(labels, np.ndarray)
            batch["labels"] = torch.from_numpy(labels if is_dense else labels.toarray())
        elif self.meaning is not None:
            batch["labels"] = self._padded("tags", indices, real, IGNORED)
        return batch

    def _mask(self, indices: Indices, multiple: int = 1) -> np.ndarray:
        """Return which places of a batch are tokens, not padding. bool, (B, T)."""
        lengths = self.lengths[indices]
        width = -(-int(lengths.max(initial=1)) // multiple) * multiple
        mask: np.ndarray = np.arange(width) < lengths[:, None]
        return mask

    def _padded(
        self, name: str, indices: Indices, real: np.ndarray, padding: int
    ) -> torch.Tensor:
        values = self.token_values(name, indices, real)
        if name == "tags" and self.meaning is not None:
            # Special tokens have a negative tag, which selects the last target.
            values = self.meaning[np.maximum(values, -1)]
        padded = np.full(real.shape, padding, dtype=np.int64)
        padded[real] = values
        return torch.from_numpy(padded)

    def token_values(self, name: str, indices: Indices, real: np.ndarray) -> np.ndarray:
        """Return a column's values at the true places of a batch's mask (B, T)."""
        column = self.columns[name]
        starts = column.starts[self.rows[indices]]
        places = starts[:, None] + np.arange(real.shape[1])
        values: np.ndarray = column.values[places[real]]
        return values

    def tagged(self, indices: Indices) -> np.ndarray:
        """Return which tokens of a batch have characters, so a tag. bool, (B, T)."""
        real = self._mask(indices)
        if "char_starts" in self.columns:
            starts, ends = (
                self.token_values(name, indices, real)
                for name in ("char_starts", "char_ends")
            )
            real[real] = starts < ends
        return real

    def token_offsets(self, index: int) -> np.ndarray:
        """Return the character offsets of an example's tokens. int32, shape (T, 2)."""
        at, length = np.array([index]), int(self.lengths[index])
        names, real = ("char_starts", "char_ends"), np.ones((1, length), bool)
        return np.stack([self.token_values(name, at, real) for name in names], axis=-1)

    def longest(self, count: int) -> EncodedTexts:
        """Return the `count` longest examples."""
        chosen = np.argsort(self.lengths, kind="stable")[-count:]
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=self.rows[chosen], labels=labels)


def encode_split(split: Split, tokenizer: Any) -> EncodedTexts:  # noqa: ANN401
    """Tokenize a split's file, or map its tokens from the cache of `datasets`."""
    source = split.source
    facts = [
        *(_VERSION, source.task, source.text_columns, source.key),
        *(fingerprint(tokenizer), tokenizer.model_max_length),
    ]
    path = arrow_cache.path_of(facts, "tokens-")

    try:
        mapped = _mapped(path)
        is_complete = len(mapped["stored_lengths"]) == len(source)
    except (OSError, pa.ArrowInvalid):  # absent, or cut when the machine went down
        is_complete = False
    if not is_complete:
        _write(path, source, tokenizer)
        mapped = _mapped(path)
    encoded = EncodedTexts(**mapped, rows=split.rows, source=path)
    if source.task != "ner":
        return replace(encoded, labels=split.labels())
    # Stored tag -> target: the corpus numbers entity types differently.
    targets = np.zeros(2 + 2 * len(split.ids), dtype=np.int64)
    targets[1:-1:2], targets[2:-1:2] = 1 + 2 * split.ids, 2 + 2 * split.ids
    targets[-1] = IGNORED
    return replace(encoded, meaning=targets)


def _mapped(path: Path) -> dict[str, Any]:
    """Map the fields of `EncodedTexts` that a file holds.

    A view of the whole file, and where in it the integers of each text are: Arrow's
    batches of rows lie one after another in the mapping.
    """
    buffer = pa.memory_map(str(path)).read_buffer()
    values = np.frombuffer(buffer, np.int32, buffer.size // 4)
    table = pa.ipc.open_stream(buffer).read_all()
    columns, per_text = {}, {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not pa.types.is_list(column.type):
            per_text[name] = column.to_numpy().astype(np.int64)
            continue
        starts = []
        for chunk in column.chunks:
            # A chunk without a token has no values, and perhaps no place.
            address = chunk.values.buffers()[1].address if len(chunk.values) else None
            first = 0 if address is None else (address - buffer.address) // 4
            starts.append(first + chunk.offsets.to_numpy()[:-1].astype(np.int64))
        columns[name] = TokenColumn(values, np.concatenate(starts))
    lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
    return {
        "columns": columns,
        "stored_lengths": lengths.astype(np.int64),
        "per_text": per_text,
    }


def _write(path: Path, source: LabelledSource, tokenizer: Any) -> None:  # noqa: ANN401
    """Tokenize every row into a file, which is absent until it is complete.

    Not by `Dataset.map`, which leaves its temporary file behind on a full disk.
    """
    rows = source.examples.rows
    starts = range(0, len(rows), _CHUNK)
    chunks = (range(start, min(start + _CHUNK, len(rows))) for start in starts)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(arrow_cache.writing(path))
        writer = None
        for chunk in track(chunks, "tokenizing", "texts", len(rows)):
            table = _tokens(rows[chunk.start : chunk.stop], source, tokenizer)
            if writer is None:
                stream = pa.ipc.new_stream(file, table.schema)
                writer = stack.enter_context(stream)
            writer.write_table(table)


def _tokens(
    batch: Mapping[str, Any],
    source: LabelledSource,
    tokenizer: Any,  # noqa: ANN401
) -> pa.Table:
    """Tokenize rows, a list per column."""
    is_tagged = source.task == "ner"
    texts = [batch[name] for name in source.text_columns]
    encoded = encode_texts(tokenizer, *texts, offsets=is_tagged)
    ends = pa.array(encoded.begins, pa.int32())
    table = {
        name: pa.ListArray.from_arrays(ends, column.values)
        for name, column in encoded.columns.items()
    }
    if is_tagged:
        numbers = {word: number for number, word in enumerate(source.words)}
        spans = (
            [(span["start"], span["end"], numbers[span["kind"]]) for span in each]
            for each in batch["spans"]
        )
        table |= _tag_columns(encoded, spans, ends)
    return pa.table(table)


def _tag_columns(
    encoded: EncodedTexts, spans: Iterable[list[tuple[int, int, int]]], ends: pa.Array
) -> dict[str, pa.Array]:
    tags: list[list[int]] = []
    inexact = []
    for i, each in enumerate(spans):
        offsets = list(map(tuple, encoded.token_offsets(i).tolist()))
        tokens, num_inexact = entity_tags.tag_tokens(offsets, each)
        tags.append(tokens)
        inexact.append(num_inexact)
    targets = [sum(tag != IGNORED for tag in tokens) for tokens in tags]
    return {
        "tags": pa.ListArray.from_arrays(ends, _flat(tags)),
        "num_targets": pa.array(targets, pa.int32()),
        "num_inexact": pa.array(inexact, pa.int32()),
    }


def _flat(lists: Iterable[Sequence[int]]) -> np.ndarray:
    """Concatenate lists to an int32 array; raise OverflowError beyond its range."""
    return np.fromiter(chain.from_iterable(lists), np.int32)


def encode_texts(
    tokenizer: Any,  # noqa: ANN401
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    offsets: bool = False,
) -> EncodedTexts:
    """Tokenize texts in memory, with the character offsets of tokens if asked.

    Of sentence pairs, the longer is cut first. Offsets are without surrounding white
    space: byte-level tokenizers include the blank before a word, where no entity
    starts. A token of white space alone gets an empty range, (x, x).

    Raises:
        UserError: If offsets are requested and the tokenizer is not a fast one.
    """
    if not texts:
        return EncodedTexts.build([])
    if offsets and not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} gives no character offsets, which ner needs; "
            "use a model with a fast tokenizer (tokenizer.json)."
        )
    # Without them, a model takes every token for one of the first sentence.
    has_types = pairs is not None and "token_type_ids" in tokenizer.model_input_names
    encoding = tokenizer(
        texts,
        pairs,
        truncation="longest_first",
        return_attention_mask=False,
        return_token_type_ids=has_types,
        return_offsets_mapping=offsets,
    )
    places, types = None, encoding["token_type_ids"] if has_types else None
    if offsets:
        places = [
            [_without_blanks(text, start, end) for start, end in tokens]
            for text, tokens in zip(texts, encoding["offset_mapping"], strict=True)
        ]
    return EncodedTexts.build(encoding["input_ids"], offsets=places, token_types=types)


def _without_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    words = text[start:end]
    start = end - len(words.lstrip())
    return start, start + len(words.strip())


def fingerprint(tokenizer: Any) -> str:  # noqa: ANN401
    """Return a hash of everything that determines a text's tokens."""
    import tokenizers
    import transformers

    parts = [type(tokenizer).__name__, transformers.__version__, tokenizers.__version__]
    parts += [tokenizer.truncation_side, str(tokenizer.split_special_tokens)]
    parts += tokenizer.model_input_names
    if tokenizer.is_fast:
        # A call stores its truncation and padding there; they do not belong to it.
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.append(json.dumps(core | {"truncation": None, "padding": None}))
    else:
        parts += [json.dumps(tokenizer.get_vocab()), repr(tokenizer.init_kwargs)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
