"""Token ids of every example, computed once, stored on disk and memory-mapped.

In: a split and a tokenizer. Out: `EncodedTexts`, which makes the tensors of a batch.

Why: tokenising every epoch, or every start, is time that trains nothing. The tokens of
a million texts stay in mapped files; only an order and a length a text is in memory.

Shapes: B examples in a batch, T positions, N examples in all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from halfstep.errors import UserError
from halfstep.train.data import cache, entity_tags
from halfstep.train.data.entity_tags import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from halfstep.train.data.corpus import Split
    from halfstep.train.data.example_store import Store
    from halfstep.train.data.length_batches import Indices

T = TypeVar("T")

_VERSION = 4  # of the files of a cache entry
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The tokens and the targets of a split's examples, stored flat."""

    ids: np.ndarray
    """Token ids, one text after another. int32, shape (tokens in all,)."""
    starts: np.ndarray
    """Where each stored text begins in `ids`, and the end. int64."""
    rows: np.ndarray
    """Which stored texts are the examples. int64, shape (N,)."""
    labels: np.ndarray | None = None
    """The class of each example, if it has one. int64, shape (N,)."""
    tags: np.ndarray | None = None
    """The tag of each token, if tokens have one: an index into `meaning`. int16."""
    offsets: np.ndarray | None = None
    """Of each token, from `tokens`, beside `tags`. int32, shape (tokens, 2)."""
    stored_counts: np.ndarray | None = None
    """Tokens that have a tag in each stored text. int32."""
    meaning: np.ndarray | None = None
    """Stored tag -> target; the last one is that of special tokens. int64."""
    source: Path | None = None
    """The folder that the files are mapped from."""
    inexact: int = 0
    """Entities among all stored texts that tokens cannot show to the character."""

    @classmethod
    def build(
        cls,
        token_lists: Sequence[Sequence[int]],
        labels: Sequence[int] | None = None,
        offsets: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> EncodedTexts:
        """Return tokens held in memory, for texts that come and go."""
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
        """Send a path to a worker: a mapped array would be sent whole."""
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
        """Targets to learn in each example. int64, shape (N,)."""
        if self.stored_counts is None:
            return np.ones(len(self), dtype=np.int64)
        counts: np.ndarray = self.stored_counts[self.rows].astype(np.int64)
        return counts

    @cached_property
    def begins(self) -> np.ndarray:
        """Where the tokens of each example begin among those of all, and the end."""
        begins: np.ndarray = np.concatenate([[0], np.cumsum(self.lengths)])
        return begins

    def collate(
        self, indices: Indices, pad_id: int, multiple: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of one batch, padded to its longest example.

        Args:
            indices: Which examples, in the order of the rows. None at all makes
                tensors of no rows.
            pad_id: The token that fills up a row.
            multiple: T is rounded up to a multiple of it, >= 1.

        Returns:
            `input_ids` and `attention_mask`, int64 of shape (B, T), and `labels`,
            int64 of shape (B,), or (B, T) where each token has one.
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
            # The tag of a special token is negative: it means the last target.
            stored = np.maximum(self.tags[places[real]], -1)
            targets[real] = self.meaning[stored]
            batch["labels"] = torch.from_numpy(targets)
        return batch

    def longest(self, count: int) -> EncodedTexts:
        """Return the longest examples, at most a number of them."""
        chosen = np.argsort(self.lengths, kind="stable")[-count:]
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=self.rows[chosen], labels=labels)

    def token_indices(
        self, indices: Indices, multiple: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where the tokens of a batch lie, and which positions hold one."""
        chosen = self.rows[indices]
        begins, ends = self.starts[chosen], self.starts[chosen + 1]
        longest = int((ends - begins).max(initial=1))
        width = -(-longest // multiple) * multiple
        places: np.ndarray = begins[:, None] + np.arange(width)
        return places, places < ends[:, None]

    def token_offsets(self, index: int) -> np.ndarray:
        """Return the characters of each token of an example. int32, shape (T, 2)."""
        assert self.offsets is not None  # noqa: S101 - only asked where tokens count
        row = self.rows[index]
        offsets: np.ndarray = self.offsets[self.starts[row] : self.starts[row + 1]]
        return offsets


def encode_split(split: Split, tokenizer: Any, task: str) -> EncodedTexts:  # noqa: ANN401
    """Return a split's tokens, made now or kept from an earlier run."""
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
    if task == "ner":
        return replace(encoded, meaning=_targets_of_tags(split.ids))
    return replace(encoded, labels=split.labels())


def _targets_of_tags(ids: np.ndarray) -> np.ndarray:
    """Return the target of each stored tag: kinds have other numbers in a corpus."""
    targets = np.zeros(2 + 2 * len(ids), dtype=np.int64)
    targets[1:-1:2], targets[2:-1:2] = 1 + 2 * ids, 2 + 2 * ids
    targets[-1] = IGNORED
    return targets


def _mapped(folder: Path) -> dict[str, Any]:
    """Return the fields of `EncodedTexts` that a cache entry holds."""
    arrays = cache.load_arrays(folder)
    if "offsets" in arrays:
        arrays["offsets"] = arrays["offsets"].reshape(-1, 2)
    return {**arrays, **json.loads((folder / "facts.json").read_bytes())}


def _build(folder: Path, store: Store, tokenizer: Any) -> None:  # noqa: ANN401
    """Write the tokens of every row of a store, a chunk at a time."""
    tagged = store.task == "ner"
    inexact = 0
    with cache.ArrayWriter(folder) as arrays:
        for rows in _chunks(range(len(store))):
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


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield items a few thousand at a time."""
    source = iter(items)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


def _flat(lists: Iterable[Sequence[int]]) -> np.ndarray:
    """Return int32 numbers; one that does not fit raises OverflowError."""
    return np.fromiter(chain.from_iterable(lists), np.int32)


def tokenize(
    tokenizer: Any,  # noqa: ANN401
    texts: Iterable[str],
    *,
    offsets: bool = False,
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Return the token ids of each text, and the characters of each token if asked.

    The characters of a token are the first and the one after the last, without white
    space at either edge: byte-level tokenizers count the blank before a word as part
    of it, and no entity begins there. A token of white space alone has none, (x, x).

    Raises:
        UserError: If offsets are asked for and the tokenizer is not a fast one.
    """
    texts = list(texts)
    if not texts:
        return []
    if offsets and not tokenizer.is_fast:
        message = (
            f"{type(tokenizer).__name__} gives no character offsets, which ner needs; "
            "use a model with a fast tokenizer (tokenizer.json)."
        )
        raise UserError(message)
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
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def fingerprint(tokenizer: Any) -> str:  # noqa: ANN401
    """Return a hash of all that decides which tokens a text becomes."""
    import tokenizers
    import transformers

    parts = [type(tokenizer).__name__, transformers.__version__, tokenizers.__version__]
    parts += [tokenizer.truncation_side, str(tokenizer.split_special_tokens)]
    if tokenizer.is_fast:
        # A call leaves its truncation and padding in there; they are no part of it.
        core = json.loads(tokenizer.backend_tokenizer.to_str())
        parts.append(json.dumps(core | {"truncation": None, "padding": None}))
    else:
        parts += [json.dumps(tokenizer.get_vocab()), repr(tokenizer.init_kwargs)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def character_counts(split: Split, clean: Callable[[str], str]) -> Counter[str]:
    """Return how often each character occurs in a split's texts, once cleaned."""
    counts: Counter[str] = Counter()
    for chunk in _chunks(split.texts()):
        counts.update(clean("\n".join(chunk)))
    return counts
