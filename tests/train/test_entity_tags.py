"""Entities as tags and back, and the best tags against all that there are."""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfstep.train.data.entity_tags import IGNORED, decode, spans_of, tag_tokens

Entities = list[tuple[int, int, int]]


# "Ada  Lovelace in Rome" between two special tokens.
OFFSETS = [(0, 0), (0, 3), (5, 9), (9, 13), (14, 16), (17, 21), (0, 0)]


SHARED = [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2)]  # a character of many tokens


@pytest.mark.parametrize(
    ("spans", "tags", "hidden"),
    [
        ([], [0, 0, 0, 0, 0], 0),
        ([(0, 13, 0), (17, 21, 1)], [1, 2, 2, 0, 3], 0),
        ([(0, 3, 0), (5, 13, 0)], [1, 1, 2, 0, 0], 0),
        # An edge inside a token, at either end; a token shared by two.
        ([(0, 7, 1)], [3, 4, 0, 0, 0], 1),
        ([(7, 13, 1)], [0, 3, 4, 0, 0], 1),
        ([(0, 7, 0), (7, 9, 1)], [1, 2, 0, 0, 0], 2),
        ([(5, 7, 0), (7, 13, 1)], [0, 1, 3, 0, 0], 2),
        # No token at all; cut off, in part and whole.
        ([(3, 5, 0)], [0, 0, 0, 0, 0], 1),
        ([(17, 30, 0), (31, 33, 1)], [0, 0, 0, 0, 1], 2),
    ],
)
def test_tags_by_hand(spans: Entities, tags: list[int], hidden: int) -> None:
    """Law: tokens of an entity are tagged, and what they cannot show is counted."""
    assert tag_tokens(OFFSETS, spans) == ([IGNORED, *tags, IGNORED], hidden)
    assert tag_tokens(SHARED, [(0, 1, 0), (1, 2, 0)]) == ([1, 2, 2, 1, 2], 0)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Entities]:
    steps = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=12))
    offsets, at = [], 0
    for gap, length in steps:
        offsets.append((at + gap, at + gap + length) if length else (0, 0))
        at += gap + length if length else 0
    edges = draw(st.lists(st.integers(0, at + 3), unique=True, max_size=10))
    pairs = [pair for pair in pairwise(sorted(edges)) if draw(st.booleans())]
    return offsets, [(*pair, draw(st.integers(0, 2))) for pair in pairs]


@given(cut_texts())
def test_there_and_back(text: tuple[list[tuple[int, int]], Entities]) -> None:
    """Law: what comes back from the tags is what was not counted as hidden."""
    offsets, spans = text
    tags, hidden = tag_tokens(offsets, spans)
    back = spans_of(tags, np.array(offsets, dtype=np.int32).reshape(-1, 2))
    assert len(set(spans) - set(back)) == hidden
    assert [tag == IGNORED for tag in tags] == [not end for _, end in offsets]
    edges = {edge for start, end in offsets for edge in ((start, 0), (end, 1))}
    for start, end, _ in set(spans) & set(back):
        assert {(start, 0), (end, 1)} <= edges


def test_back_from_valid_tags_only() -> None:
    """Law: empty tokens are passed over whatever their tag; a tag astray is refused."""
    offsets = np.array([[0, 2], [0, 0], [2, 4]], dtype=np.int32)
    for tag in (0, IGNORED, 3):
        assert spans_of(np.array([1, tag, 2], np.int16), offsets) == [(0, 4, 0)]
    assert spans_of([], np.zeros((0, 2), np.int32)) == []
    message = "tag 2 at character 2 continues no entity"
    for before in (0, 3):
        with pytest.raises(ValueError, match=message):
            spans_of([before, 0, 2], offsets)


def is_valid(tags: Sequence[int]) -> bool:
    pairs = pairwise([0, *tags])
    return all(tag % 2 or not tag or before in {tag - 1, tag} for before, tag in pairs)


def best(scores: np.ndarray) -> float:
    return max(
        sum(float(row[tag]) for row, tag in zip(scores, tags, strict=True))
        for tags in product(range(scores.shape[1]), repeat=len(scores))
        if is_valid(tags)
    )


# Sums of these are exact, so the best is the best to the bit.
exact = st.integers(-8, 8).map(lambda number: number / 4)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Return scores, and which tokens are real, for a few short texts."""
    texts, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    shape = (texts, tokens, draw(st.sampled_from([1, 3, 5])))
    return (
        draw(arrays(np.float32, shape, elements=exact)),
        draw(arrays(np.bool_, shape[:2])),
    )


@given(batches())
def test_no_valid_tags_are_better(batch: tuple[np.ndarray, np.ndarray]) -> None:
    """Law: the tags are valid, and the best; those not real are 0 and of no weight."""
    scores, real = batch
    kept = scores.copy()
    tags = decode(scores, real)
    assert (tags.dtype, tags.shape) == (np.int16, real.shape)
    assert not tags[~real].any()
    for row, chosen, counts in zip(scores, tags, real, strict=True):
        assert is_valid(chosen[counts].tolist())
        assert row[np.arange(len(row)), chosen][counts].sum() == best(row[counts])
    np.testing.assert_array_equal(scores, kept)
    scores[~real] = np.nan
    np.testing.assert_array_equal(decode(scores, real), tags)


@given(batch=batches(), coarse=st.booleans(), uneven=st.booleans())
def test_greatest_scores_that_are_valid(
    batch: tuple[np.ndarray, np.ndarray], *, coarse: bool, uneven: bool
) -> None:
    """Law: where the greatest scores are valid tags they are chosen, ties included.

    Coarse scores are often equal; beside uneven ones, 1 is lost in a sum of doubles.
    """
    scores, _ = batch
    if coarse:
        scores = np.sign(scores)
    if uneven:
        scores[:, ::2] += np.float32(1e30)
    greatest = scores.argmax(-1)
    tags = decode(scores, np.ones(greatest.shape, np.bool_))
    for row, chosen in zip(greatest.tolist(), tags.tolist(), strict=True):
        assert not is_valid(row) or chosen == row


def test_numbers_without_sense_still_give_valid_tags() -> None:
    """Law: nan and infinities, even throughout, never lead to tags that cannot be."""
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0], np.float32)
    scores = rng.choice(odd, (200, 6, 5))
    scores[:2] = np.array([np.nan, -np.inf])[:, None, None]
    scores[2, :, 2] = np.inf
    tags = decode(scores, np.ones((200, 6), np.bool_))
    assert all(map(is_valid, tags.tolist()))
    assert not tags[:2].any()
    assert decode(scores[:0], np.ones((0, 6), np.bool_)).shape == (0, 6)
