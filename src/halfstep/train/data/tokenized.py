"""Tokenizes every example once, and memory-maps the cached result.

In: a split and a tokenizer. Out: `EncodedTexts`, which makes the tensors of a batch.

The tokens of a million texts stay in mapped files; in memory are only an index and a
length per text.

Shapes: B examples in a batch, T positions, N examples in total.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfstep.errors import UserError
from halfstep.train.data import cache, entity_tags
from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.task_progress import track

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from halfstep.train.data.corpus import Split
    from halfstep.train.data.example_store import Store
    from halfstep.train.data.length_batches import Indices

_VERSION = 4  # format of a cache entry's files
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The tokens and targets of a split's examples, as flat arrays."""

    ids: np.ndarray
    """Concatenated token ids of all stored texts. int32, shape (tokens,)."""
    starts: np.ndarray
    """Offset in `ids` of each stored text, and the end. int64."""
    rows: np.ndarray
    """Index of each example among the stored texts. int64, shape (N,)."""
    labels: np.ndarray | None = None
    """classify: the class of each example. int64, shape (N,)."""
    tags: np.ndarray | None = None
    """ner: the stored tag of each token, an index into `meaning`. int16."""
    offsets: np.ndarray | None = None
    """Start and end character of each token. int32, shape (tokens, 2)."""
    stored_counts: np.ndarray | None = None
    """Number of tagged tokens in each stored text. int32."""
    meaning: np.ndarray | None = None
    """Stored tag -> target; the last entry is for special tokens. int64."""
    source: Path | None = None
    """The cache entry that the arrays are mapped from."""
    inexact: int = 0
    """Entities of all stored texts whose edges do not match token edges."""

    @classmethod
    def build(
        cls,
        token_lists: Sequence[Sequence[int]],
        labels: Sequence[int] | None = None,
        offsets: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> EncodedTexts:
        """Build from tokens in memory, without a cache entry."""
        lengths = np.fromiter(map(len, token_lists), np.int64, len(token_lists))
        starts = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        encoded = cls(_flat(token_lists), starts, np.arange(len(lengths)))
        if labels is not None:
            encoded = replace(encoded, labels=np.asarray(labels, np.int64))
        if offsets is not None:
            flat = np.array(list(chain.from_iterable(offsets)), np.int32)
            encoded = replace(encoded, offsets=flat.reshape(-1, 2))
        return encoded

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the path for a worker, instead of the mapped arrays."""
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
        lengths: np.ndarray = self.starts[self.rows + 1] - self.starts[self.rows]
        return lengths

    @cached_property
    def counts(self) -> np.ndarray:
        """Targets of each example. int64, shape (N,)."""
        if self.stored_counts is None:
            return np.ones(len(self), dtype=np.int64)
        counts: np.ndarray = self.stored_counts[self.rows].astype(np.int64)
        return counts

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
            `input_ids` and `attention_mask`, int64 of shape (B, T), and `labels`, int64
            of shape (B,), or (B, T) for ner.
        """
        places, real = self.token_indices(indices, multiple)
        input_ids = np.full(real.shape, pad_id, dtype=np.int64)
        input_ids[real] = self.ids[places[real]]
        batch = {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
        }
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[indices])
        elif self.tags is not None and self.meaning is not None:
            targets = np.full(real.shape, IGNORED, dtype=np.int64)
            # Special tokens have a negative tag, which selects the last target.
            stored = np.maximum(self.tags[places[real]], -1)
            targets[real] = self.meaning[stored]
            batch["labels"] = torch.from_numpy(targets)
        return batch

    def longest(self, count: int) -> EncodedTexts:
        """Return the `count` longest examples."""
        chosen = np.argsort(self.lengths, kind="stable")[-count:]
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=self.rows[chosen], labels=labels)

    def token_indices(
        self, indices: Indices, multiple: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a batch's indices into `ids`, and which are real; both (B, T)."""
        chosen = self.rows[indices]
        begins, ends = self.starts[chosen], self.starts[chosen + 1]
        longest = int((ends - begins).max(initial=1))
        width = -(-longest // multiple) * multiple
        places: np.ndarray = begins[:, None] + np.arange(width)
        return places, places < ends[:, None]

    def token_offsets(self, index: int) -> np.ndarray:
        """Return the character offsets of an example's tokens. int32, shape (T, 2)."""
        assert self.offsets is not None  # noqa: S101 - only asked where tokens count
        row = self.rows[index]
        offsets: np.ndarray = self.offsets[self.starts[row] : self.starts[row + 1]]
        return offsets


def encode_split(split: Split, tokenizer: Any, task: str) -> EncodedTexts:  # noqa: ANN401
    """Tokenize a split, or load its tokens from the cache."""
    facts = {
        "version": _VERSION,
        "rows": split.store.key,
        "tokenizer": fingerprint(tokenizer),
        "longest": tokenizer.model_max_length,
        "task": task,
    }
    folder = cache.get_or_build(
        "tokens", facts, lambda path: _build(path, split.store, tokenizer)
    )
    encoded = EncodedTexts(**_mapped(folder), rows=split.rows, source=folder)
    if task != "ner":
        return replace(encoded, labels=split.labels())
    # Stored tag -> target: the corpus numbers entity types differently.
    targets = np.zeros(2 + 2 * len(split.ids), dtype=np.int64)
    targets[1:-1:2], targets[2:-1:2] = 1 + 2 * split.ids, 2 + 2 * split.ids
    targets[-1] = IGNORED
    return replace(encoded, meaning=targets)


def _mapped(folder: Path) -> dict[str, Any]:
    """Load the fields of `EncodedTexts` that a cache entry holds."""
    arrays = cache.load_arrays(folder)
    if "offsets" in arrays:
        arrays["offsets"] = arrays["offsets"].reshape(-1, 2)
    return {**arrays, **json.loads((folder / "facts.json").read_bytes())}


def _build(folder: Path, store: Store, tokenizer: Any) -> None:  # noqa: ANN401
    """Tokenize every row of a store, in chunks, and write the arrays."""
    tagged = store.task == "ner"
    inexact = 0
    with cache.ArrayWriter(folder) as arrays:
        chunks = (
            range(start, min(start + _CHUNK, len(store)))
            for start in range(0, len(store), _CHUNK)
        )
        for rows in track(chunks, "tokenizing", "texts", len(store)):
            token_lists = tokenize(tokenizer, map(store.text, rows), offsets=tagged)
            arrays.append_offsets("starts.i8", [len(ids) for ids, _ in token_lists])
            arrays.append("ids.i4", _flat([ids for ids, _ in token_lists]))
            if not tagged:
                continue
            tags = []
            for row, (_, offsets) in zip(rows, token_lists, strict=True):
                spans = store.spans[store.span_starts[row] : store.span_starts[row + 1]]
                row_tags, num_inexact = entity_tags.tag_tokens(
                    offsets, list(map(tuple, spans.tolist()))
                )
                tags.append(row_tags)
                inexact += num_inexact
            arrays.append("tags.i2", _flat(tags))
            counts = [sum(tag != IGNORED for tag in each) for each in tags]
            arrays.append("stored_counts.i4", counts)
            arrays.append(
                "offsets.i4", [pair for _, each in token_lists for pair in each]
            )
    facts = json.dumps({"inexact": inexact})
    (folder / "facts.json").write_text(facts, encoding="utf-8")


def _flat(lists: Iterable[Sequence[int]]) -> np.ndarray:
    """Concatenate lists to an int32 array; raise OverflowError beyond its range."""
    return np.fromiter(chain.from_iterable(lists), np.int32)


def tokenize(
    tokenizer: Any,  # noqa: ANN401
    texts: Iterable[str],
    *,
    offsets: bool = False,
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return the token ids and, if asked, the character offsets of each text.

    Offsets are (start, end) without surrounding white space: byte-level tokenizers
    include the blank before a word, where no entity starts. A token of white space
    alone gets an empty range, (x, x).

    Raises:
        UserError: If offsets are requested and the tokenizer is not a fast one.
    """
    texts = list(texts)
    if not texts:
        return []
    if offsets and not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} gives no character offsets, which ner needs; "
            "use a model with a fast tokenizer (tokenizer.json)."
        )
    encoding = tokenizer(
        texts,
        truncation=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
    )
    if not offsets:
        return [(ids, []) for ids in encoding["input_ids"]]
    places = [
        [_without_blanks(text, start, end) for start, end in pairs]
        for text, pairs in zip(texts, encoding["offset_mapping"], strict=True)
    ]
    return list(zip(encoding["input_ids"], places, strict=True))


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
    if tokenizer.is_fast:
        # A call stores its truncation and padding there; they do not belong to it.
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.append(json.dumps(core | {"truncation": None, "padding": None}))
    else:
        parts += [json.dumps(tokenizer.get_vocab()), repr(tokenizer.init_kwargs)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
