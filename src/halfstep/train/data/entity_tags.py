"""Entities as tags of tokens, and back; the best valid tags for given scores.

In: entities as characters of a text, the characters of each token, scores of tags.
Out: tags, which are indices into `tag_names`, and entities.

Shapes: B texts, T tokens, K tags. Tag 0 is O; kind k begins with 2k + 1, goes on with
2k + 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

IGNORED = -100
"""The tag of a special token, which no loss counts; torch's own number for it."""


def tag_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the tags: O, and B- and I- of each kind (IOB2).

    Whatever the scheme of the file was: this is the one that other programs read.
    """
    return ("O", *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


def tag_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, int]]
) -> tuple[list[int], int]:
    """Return the tags of a text's tokens, and how many entities they cannot show.

    An entity takes the tokens that hold any of its characters. They cannot show one
    with an edge inside a token, one that is cut off, and one whose token is taken.

    Args:
        offsets: First character of each token and the one after its last, in order.
            An empty token is special and gets -100.
        spans: First character, the one after the last, and kind; in order, and apart.
    """
    tags = [IGNORED if start >= end else 0 for start, end in offsets]
    token = 0
    for first, last, kind in spans:
        tag = 2 * kind + 1
        while token < len(tags) and (
            tags[token] == IGNORED or offsets[token][0] < last
        ):
            if tags[token] != IGNORED and offsets[token][1] > first:
                tags[token], tag = tag, 2 * kind + 2
            token += 1
    return tags, len(set(spans).difference(_spans(tags, offsets))) if spans else 0


def spans_of(
    tags: Sequence[int] | NDArray[np.integer], offsets: NDArray[np.integer]
) -> list[tuple[int, int, int]]:
    """Return the entities that valid tags show: first character, end and kind.

    They come in order, and no two share a character. A byte-level tokenizer makes
    several tokens of one character, and each may begin an entity: one that begins
    before the end of the last goes on with it if it is of the same kind; if not, it has
    only the characters that are left. Empty tokens are passed over.

    Raises:
        ValueError: If a tag goes on with an entity that none began.
    """
    return _spans(np.asarray(tags).tolist(), np.asarray(offsets).tolist())


def _spans(
    tags: Sequence[int], offsets: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    open_kind = -1
    last_end = 0  # where the last one found ends
    has_character = False  # whether the entity that goes on has a character yet
    for tag, (start, end) in zip(tags, offsets, strict=True):
        if start >= end:
            continue
        if tag <= 0:
            open_kind = -1
            continue
        kind = (tag - 1) // 2
        if tag % 2:
            has_character = start < last_end and spans[-1][2] == kind
        elif kind != open_kind:
            message = f"tag {tag} at character {start} continues no entity."
            raise ValueError(message)
        open_kind = kind
        if end <= last_end:
            continue
        if has_character:
            spans[-1] = (spans[-1][0], end, kind)
        else:
            spans.append((max(start, last_end), end, kind))
        has_character, last_end = True, end
    return spans


def decode(scores: NDArray[np.float32], real: NDArray[np.bool_]) -> NDArray[np.int16]:
    """Return the valid tags whose scores have the greatest sum, for each text.

    Why: the greatest score at each token alone may go on with an entity that never
    began. Viterbi's algorithm finds the best of the sequences that do not. Where the
    greatest scores are valid, they are what it finds, equal scores included: these go
    to the lower tag.

    Args:
        scores: float32, shape (B, T, K), K odd. A nan counts as less than any number.
        real: Which tokens count, bool, shape (B, T). The others are passed over: an
            entity goes on behind them.

    Returns:
        Tags, int16, shape (B, T); 0 where a token is not real.
    """
    texts, length, count = scores.shape
    lowest = np.finfo(np.float32).min
    gains = np.nan_to_num(scores.astype(np.float32), nan=float(lowest)).astype(
        np.float64
    )
    # Losses against the best, so that the best sequence of all sums to exactly 0.
    gains -= gains.max(axis=-1, keepdims=True)
    rows, inner = np.arange(texts), np.arange(2, count, 2)
    # Before the first token stands O.
    sums = np.full((texts, count), -np.inf)
    sums[:, 0] = 0.0
    backpointers = np.empty((length, texts, count), dtype=np.int16)
    for at in range(length):
        counts = real[:, at, None]
        previous = np.repeat(sums.argmax(-1)[:, None], count, axis=1)
        # I of a kind follows B or I of the same, so one of the two tags below it.
        previous[:, inner] = inner - (sums[:, inner - 1] >= sums[:, inner])
        backpointers[at] = np.where(counts, previous, np.arange(count))
        reached = sums[rows[:, None], previous] + gains[:, at]
        sums = np.where(counts, reached, sums)
    tags = np.zeros((texts, length), dtype=np.int16)
    tag = sums.argmax(-1)
    for at in reversed(range(length)):
        tags[:, at] = np.where(real[:, at], tag, 0)
        tag = backpointers[at, rows, tag]
    return tags
