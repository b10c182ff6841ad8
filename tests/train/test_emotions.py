"""The built-in emotions: enough, balanced, and no sentence a variant of another."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.data import corpus as data_corpus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPLITS = ("train", "dev", "test")
CLASSES = {"other", "like", "sad", "disgust", "angry", "happy"}
FEWEST = 1200
SHORTEST, LONGEST = 7, 36  # characters; a post, neither a cry nor an essay
# Half of five characters, spread over two ends, leaves two at one of them.
KEY = 2


@cache
def rows(split: str) -> tuple[tuple[str, str], ...]:
    """Return the (text, label) rows of a split as its file holds them."""
    source = files("halfstep.train") / "emotions" / f"{split}.tsv"
    head, *lines, end = source.read_text(encoding="utf-8").split("\n")
    assert (head, end) == ("text\tlabel", "")
    found = tuple(tuple(line.split("\t")) for line in lines)
    assert all(len(row) == 2 for row in found)
    return found  # type: ignore[return-value]


def bare(text: str) -> str:
    """Return a sentence without punctuation, symbols and white space."""
    return "".join(c for c in text if unicodedata.category(c)[0] not in "PSZC")


def differ_in_one_slot(one: str, other: str) -> bool:
    """Say whether what two sentences share at their ends is half of the longer."""
    short = min(len(one), len(other))
    start = 0
    while start < short and one[start] == other[start]:
        start += 1
    end = 0
    while end < short - start and one[-1 - end] == other[-1 - end]:
        end += 1
    return 2 * (start + end) >= max(len(one), len(other))


def variants(sentences: Sequence[str]) -> set[tuple[int, int]]:
    """Return the pairs of sentences that differ in one slot only.

    Only pairs with the same two characters at an end are compared: all others share
    one at each end at most. Sentences have five characters or more.
    """
    alike = defaultdict(list)
    for index, sentence in enumerate(sentences):
        alike["starts", sentence[:KEY]].append(index)
        alike["ends", sentence[-KEY:]].append(index)
    return {
        pair
        for group in alike.values()
        for pair in combinations(group, 2)
        if differ_in_one_slot(sentences[pair[0]], sentences[pair[1]])
    }


def all_rows() -> list[tuple[str, str]]:
    """Return the rows of all splits."""
    return [row for split in SPLITS for row in rows(split)]


def test_size() -> None:
    """Law: there are at least 1,200 distinct sentences."""
    assert len({bare(text) for text, _ in all_rows()}) >= FEWEST


@pytest.mark.parametrize("split", SPLITS)
def test_balance(split: str) -> None:
    """Law: the six classes are equally frequent in each split."""
    counts = Counter(label for _, label in rows(split))
    assert counts.keys() == CLASSES
    assert len(set(counts.values())) == 1


def test_no_sentence_twice() -> None:
    """Law: no sentence comes twice, in one split or two, however punctuated."""
    counts = Counter(bare(text) for text, _ in all_rows())
    assert [text for text, count in counts.items() if count > 1] == []


def test_lengths() -> None:
    """Law: every sentence has a sane length, and nothing at its ends to strip."""
    odd = [t for t, _ in all_rows() if not SHORTEST <= len(bare(t)) <= LONGEST]
    assert odd == []
    assert [t for t, _ in all_rows() if t != t.strip()] == []


def test_plain_characters() -> None:
    """Law: text is normalised and holds no control or private character."""
    for text, _ in all_rows():
        assert unicodedata.is_normalized("NFC", text), text
        assert not [c for c in text if unicodedata.category(c)[0] == "C"], text


def test_no_variants() -> None:
    """Law: no two sentences of the corpus differ in one slot only."""
    texts = [text for text, _ in all_rows()]
    found = variants([bare(text) for text in texts])
    assert [(texts[one], texts[other]) for one, other in found] == []


def test_variants_would_be_found() -> None:
    """Law: a sentence with one word replaced, added or moved is a variant."""
    texts = [bare(text) for text, _ in all_rows()]
    sentence = bare("老班长的葬礼上，几十个战友哭成一片。")
    twins = [
        bare("老班长的葬礼上，几十个邻居哭成一片。"),  # in the middle
        bare("老连长的葬礼上，几十个战友哭成一片。"),  # near the start
        bare("老班长的葬礼上，几十个战友沉默不语。"),  # at the end
        bare("老班长的葬礼上，几十个年轻战友哭成一片。"),  # added
    ]
    for twin in twins:
        assert variants([*texts, twin]) == {(texts.index(sentence), len(texts))}


def test_by_hand() -> None:
    """Law: half of the longer sentence is the least that makes a variant."""
    assert differ_in_one_slot("abcdXXXX", "abcdYYYY")
    assert not differ_in_one_slot("abcXXXXX", "abcYYYYY")
    assert differ_in_one_slot("abXXXXcd", "abYYYYcd")
    assert not differ_in_one_slot("abXXXXXcd", "abYYYYYcd")
    # What is shared is not counted twice: two letters of a repeated one, not four.
    assert not differ_in_one_slot("aa", "aaaaa")


@given(st.lists(st.text("ab", min_size=5, max_size=9), max_size=12))
def test_index_misses_nothing(sentences: list[str]) -> None:
    """Law: the index by ends finds what comparing all pairs finds."""
    every = combinations(range(len(sentences)), 2)
    assert variants(sentences) == {
        (i, j) for i, j in every if differ_in_one_slot(sentences[i], sentences[j])
    }


def test_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without a path, `load` returns these rows, labelled by their class."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))
    corpus = data_corpus.load(
        None, task="classify", label_names=None, limit=None, dev_share=0.08, seed=0
    )
    assert corpus.name == "emotions"
    assert set(corpus.labels) == CLASSES
    for split in SPLITS:
        found = getattr(corpus, split)
        labels = [corpus.labels[label] for label in found.labels()]
        loaded = list(zip(found.texts(), labels, strict=True))
        assert loaded == list(rows(split))
