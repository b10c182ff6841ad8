"""Token ids of every example, made once, kept on disk, and read where they lie.

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
from halfstep.train.data.example_store import memory_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from halfstep.train.data.corpus import Split
    from halfstep.train.data.length_batches import Indices

T = TypeVar("T")

_VERSION = 2  # of the files below
_CHUNK = 4096
_IDS, _STARTS = "ids.i32", "starts.i64"
_TAGS, _OFFSETS, _COUNTS = "tags.i16", "offsets.i32", "counts.i32"


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
        ids = np.fromiter(chain.from_iterable(token_lists), np.int32, int(starts[-1]))
        label_array = None if labels is None else np.asarray(labels, dtype=np.int64)
        offset_array = None
        if offsets is not None:
            flat = list(chain.from_iterable(offsets))
            offset_array = np.array(flat, np.int32).reshape(-1, 2)
        return cls(
            ids, starts, np.arange(len(lengths)), label_array, offsets=offset_array
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a worker as a path: a mapped array would travel whole."""
        state = dict(vars(self))
        for derived in ("lengths", "counts", "begins"):
            state.pop(derived, None)
        if self.source is None:
            return _from_state, (None, state)
        mapped = {"ids", "starts", "tags", "offsets", "stored_counts", "source"}
        in_memory = {name: value for name, value in state.items() if name not in mapped}
        return _from_state, (self.source, in_memory)

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
    """Return a split's tokens, made now or kept from an earlier run.

    Args:
        split: Of a corpus.
        tokenizer: Cuts texts to its `model_max_length`.
        task: "classify": an example has a class. "ner": a token has a tag.

    Raises:
        UserError: If tags are needed and the tokenizer cannot tell offsets.
    """
    facts = {
        "version": _VERSION,
        "rows": split.store.key,
        "tokenizer": fingerprint(tokenizer),
        "longest": tokenizer.model_max_length,
        "task": task,
    }
    folder = cache.get_or_build(
        "tokens", facts, lambda path: _build(path, split, tokenizer, task)
    )
    if task == "ner":
        return _from_state(
            folder, {"rows": split.rows, "meaning": _targets_of_tags(split.ids)}
        )
    return _from_state(folder, {"rows": split.rows, "labels": split.labels()})


def _targets_of_tags(ids: np.ndarray) -> np.ndarray:
    """Return the target of each stored tag: kinds have other numbers in a corpus."""
    targets = np.zeros(2 + 2 * len(ids), dtype=np.int64)
    targets[1:-1:2], targets[2:-1:2] = 1 + 2 * ids, 2 + 2 * ids
    targets[-1] = IGNORED
    return targets


def _from_state(folder: Path | None, state: dict[str, Any]) -> EncodedTexts:
    if folder is None:
        return EncodedTexts(**state)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    state = {
        "ids": memory_map(folder / _IDS, "i4"),
        "starts": memory_map(folder / _STARTS, "i8"),
        "source": folder,
        "inexact": facts["inexact"],
    } | state
    if (folder / _TAGS).exists():
        state["tags"] = memory_map(folder / _TAGS, "i2")
        state["offsets"] = memory_map(folder / _OFFSETS, "i4").reshape(-1, 2)
        state["stored_counts"] = memory_map(folder / _COUNTS, "i4")
    return EncodedTexts(**state)


def _build(folder: Path, split: Split, tokenizer: Any, task: str) -> None:  # noqa: ANN401
    """Write the tokens of every row of a store, a chunk at a time."""
    store = split.store
    tagged = task == "ner"
    inexact, position = 0, 0
    names = (_IDS, _STARTS, *((_TAGS, _OFFSETS, _COUNTS) if tagged else ()))
    files = {name: (folder / name).open("wb") for name in names}
    try:
        files[_STARTS].write(np.zeros(1, np.int64).tobytes())
        for rows in _chunks(range(len(store))):
            token_lists = tokenize(
                tokenizer, [store.text(row) for row in rows], offsets=tagged
            )
            ends = position + np.cumsum(
                [len(ids) for ids, _ in token_lists], dtype=np.int64
            )
            position = int(ends[-1])
            files[_STARTS].write(ends.tobytes())
            files[_IDS].write(_flat([ids for ids, _ in token_lists], np.int32))
            if not tagged:
                continue
            tags = []
            for row, (_, offsets) in zip(rows, token_lists, strict=True):
                row_tags, num_inexact = entity_tags.tag_tokens(
                    offsets, _spans(split, row)
                )
                tags.append(row_tags)
                inexact += num_inexact
            files[_TAGS].write(_flat(tags, np.int16))
            counts = [sum(tag != IGNORED for tag in each) for each in tags]
            files[_COUNTS].write(np.array(counts, np.int32).tobytes())
            flat = chain.from_iterable(offsets for _, offsets in token_lists)
            files[_OFFSETS].write(_flat(flat, np.int32))
    finally:
        for file in files.values():
            file.close()
    facts = json.dumps({"inexact": inexact})
    (folder / "facts.json").write_text(facts, encoding="utf-8")


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield items a few thousand at a time."""
    source = iter(items)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


def _spans(split: Split, row: int) -> list[tuple[int, int, int]]:
    store = split.store
    stored = store.spans[store.span_starts[row] : store.span_starts[row + 1]]
    return [(int(start), int(end), int(kind)) for start, end, kind in stored]


def _flat(lists: Iterable[Sequence[int]], dtype: type) -> bytes:
    return np.fromiter(chain.from_iterable(lists), dtype).tobytes()


def tokenize(
    tokenizer: Any,  # noqa: ANN401
    texts: Sequence[str],
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
    if not texts:
        return []
    if offsets and not tokenizer.is_fast:
        message = (
            f"{type(tokenizer).__name__} cannot tell which characters a token stands "
            "for, which ner needs; use a model with a fast tokenizer (tokenizer.json)."
        )
        raise UserError(message)
    encoding = tokenizer(
        list(texts),
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
    """Return how often each character stands in a split's texts, once cleaned.

    Args:
        split: What to learn a vocabulary from.
        clean: Of a text or of several, with line breaks between them. The counts are
            kept if it is a method of what tells its state as bytes, as a normaliser
            of the tokenizers library does, and counted anew each time if not.
    """
    import tokenizers

    def counted() -> Counter[str]:
        counts: Counter[str] = Counter()
        for chunk in _chunks(split.texts()):
            counts.update(clean("\n".join(chunk)))
        return counts

    normalizer_hash = _normalizer_hash(clean)
    if normalizer_hash is None:
        return counted()
    facts = {
        "version": _VERSION,
        "rows": split.store.key,
        "chosen": hashlib.sha256(split.rows.tobytes()).hexdigest(),
        "clean": normalizer_hash,
        "tokenizers": tokenizers.__version__,
    }

    def build(folder: Path) -> None:
        text = json.dumps(dict(sorted(counted().items())))
        (folder / "counts.json").write_text(text, encoding="utf-8")

    folder = cache.get_or_build("characters", facts, build)
    return Counter(json.loads((folder / "counts.json").read_text(encoding="utf-8")))


def _normalizer_hash(clean: Callable[[str], str]) -> str | None:
    """Return a hash of a normaliser's method, None if there is no telling what it does.

    Why: a function's name says nothing of what it does, and counts that were cleaned
    by another rule would make a vocabulary that does not fit the texts.
    """
    owner = getattr(clean, "__self__", None)
    state = None if owner is None else owner.__getstate__()
    if not isinstance(state, bytes):
        return None
    name = f"{type(owner).__qualname__}.{clean.__name__}"
    return hashlib.sha256(name.encode() + b"\0" + state).hexdigest()
