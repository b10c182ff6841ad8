"""Converts entities to token tags and back; decodes valid tags from scores.

Shapes: B texts, T tokens, K tags. Tag 0 is O; entity type k has the tags 2k + 1 (B-)
and 2k + 2 (I-), whatever scheme the file used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

IGNORED = -100
"""Target of special tokens; torch's default `ignore_index` of the loss."""


def tag_names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the tag names in IOB2: O, and B- and I- of each entity type.

    Other programs read IOB2, so it is used for every input scheme.
    """
    return ("O", *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


def tag_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, int]]
) -> tuple[list[int], int]:
    """Return the tags of a text's tokens, and the number of inexact entities.

    An entity gets the tokens that overlap it. It is inexact if an edge is inside a
    token, if it is truncated, or if another entity has its token.

    Args:
        offsets: Start and end character of each token, in order. An empty token is
            special and gets -100.
        spans: (start, end, entity type) of each entity; sorted and disjoint.
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
    """Return (start, end, entity type) for each entity of a valid sequence of tags.

    The entities are sorted and disjoint. A byte-level tokenizer can split a character
    into several tokens, each of which may begin an entity: one that starts before the
    end of the last extends it if the type is the same; otherwise it gets only the
    remaining characters. Empty tokens are skipped.

    Raises:
        ValueError: If an I tag does not follow a tag of the same type.
    """
    return _spans(np.asarray(tags).tolist(), np.asarray(offsets).tolist())


def _spans(
    tags: Sequence[int], offsets: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    open_kind = -1
    last_end = 0  # end of the last entity in `spans`
    has_character = False  # whether the current entity has a character yet
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
            raise ValueError(f"tag {tag} at character {start} continues no entity.")
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
    """Return the valid tag sequence with the highest total score of each text.

    The argmax per token may contain an I tag that follows no entity; Viterbi's
    algorithm finds the best valid sequence instead. If the argmax is valid, it is the
    result, and ties go to the lower tag.

    Args:
        scores: float32, shape (B, T, K), K odd. NaN counts as the lowest number.
        real: Tokens to tag, bool, shape (B, T). The others are skipped: an entity
            continues after them.

    Returns:
        Tags, int16, shape (B, T); 0 where a token is not real.
    """
    texts, length, count = scores.shape
    lowest = float(np.finfo(np.float32).min)
    gains = np.nan_to_num(scores, nan=lowest).astype(np.float64)
    # Relative to the best tag, so that the argmax sequence sums to exactly 0.
    gains -= gains.max(axis=-1, keepdims=True)
    rows, inner = np.arange(texts), np.arange(2, count, 2)
    # The sequence starts after an O.
    sums = np.full((texts, count), -np.inf)
    sums[:, 0] = 0.0
    backpointers = np.empty((length, texts, count), dtype=np.int16)
    for at in range(length):
        counts = real[:, at, None]
        previous = np.repeat(sums.argmax(-1)[:, None], count, axis=1)
        # I of a type follows its B or I: one of the two tags, 2k + 1 and 2k + 2.
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
