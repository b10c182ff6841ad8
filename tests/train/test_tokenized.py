"""Tokens on disk and in batches: made once, found again, each beside a slow twin."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import classified, counting, letters_tokenizer, marked
from small_training import same

from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.data.tokenized import EncodedTexts, encode_split, tokenize

ROWS = [("ab", "x"), ("b", "y"), ("aab", "x"), ("ba", "y")]
# [CLS] 2, [SEP] 3, a 5, b 6.
TOLD = [[2, 5, 6, 3], [2, 6, 3], [2, 5, 5, 6, 3], [2, 6, 5, 3]]

token_lists = st.lists(
    st.lists(st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=10
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))


def ids_of(held: EncodedTexts) -> list[list[int]]:
    ends = held.starts[held.rows + 1]
    pairs = zip(held.starts[held.rows], ends, strict=True)
    return [held.ids[start:end].tolist() for start, end in pairs]


def labels_of(held: EncodedTexts) -> list[int]:
    assert held.labels is not None
    return held.labels.tolist()


@settings(max_examples=40)
@given(st.data(), token_lists, st.integers(0, 9), st.integers(1, 9))
def test_a_batch_is_its_slow_twin(
    data: st.DataObject, lists: list[list[int]], pad_id: int, multiple: int
) -> None:
    """Law: a row's tokens, then padding, up to the next multiple of the longest."""
    labels = [7 * index for index in range(len(lists))]
    held = EncodedTexts.build(lists, labels)
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=20))
    got = held.collate(np.array(chosen, np.int64), pad_id, multiple)
    width = multiple
    while width < max((len(lists[index]) for index in chosen), default=0):
        width += multiple
    assert list(got) == ["input_ids", "attention_mask", "labels"]
    assert all(tensor.dtype == torch.int64 for tensor in got.values())
    assert got["input_ids"].shape == (len(chosen), width)
    rows = [lists[index] for index in chosen]
    padded = [row + [pad_id] * (width - len(row)) for row in rows]
    masks = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    expected = [padded, masks, [labels[index] for index in chosen]]
    assert [tensor.tolist() for tensor in got.values()] == expected


def test_a_batch_is_a_copy(tmp_path: Path) -> None:
    """Law: what a step writes into its batch reaches neither memory nor the disk."""
    split = classified(tmp_path / "a.jsonl", ROWS, "xy")
    for held in (
        EncodedTexts.build(TOLD, [0, 1, 0, 1]),
        encode_split(split, letters_tokenizer("ab", 9), "classify"),
    ):
        for tensor in held.collate(np.arange(4), 0).values():
            tensor.fill_(9)
        assert (ids_of(held), labels_of(held)) == (TOLD, [0, 1, 0, 1])


def test_classes(tmp_path: Path) -> None:
    """Law: an example has its row's tokens and class, in the order of the split."""
    split = classified(tmp_path / "a.jsonl", ROWS, "yx", chosen=[2, 0, 1])
    held = encode_split(split, letters_tokenizer("ab", 9), "classify")
    assert ids_of(held) == [TOLD[2], TOLD[0], TOLD[1]]
    assert labels_of(held) == [1, 1, 0]
    assert (len(held), held.lengths.tolist()) == (3, [5, 4, 3])
    assert held.counts.tolist() == [1, 1, 1]
    assert held.begins.tolist() == [0, 5, 9, 12]
    longest = held.longest(2)
    assert (ids_of(longest), labels_of(longest)) == ([TOLD[0], TOLD[2]], [1, 1])


def test_made_once(tmp_path: Path) -> None:
    """Law: the same rows are cut once, whichever are chosen and whatever labels mean.

    A tokenizer made anew, and one that was called with other settings, is the same.
    """
    split = classified(tmp_path / "a.jsonl", ROWS, "xy")
    tokenizer, calls = counting(letters_tokenizer("ab", 9))
    first = encode_split(split, tokenizer, "classify")
    assert sum(calls) == len(ROWS)
    again, more = counting(letters_tokenizer("ab", 9))
    again(["ab", "b"], padding=True, truncation=True, max_length=3)
    more.clear()
    other = classified(tmp_path / "b.jsonl", ROWS, "yx", chosen=[1, 3])
    second = encode_split(other, again, "classify")
    assert (more, second.source) == ([], first.source)
    assert (ids_of(second), labels_of(second)) == ([TOLD[1], TOLD[3]], [0, 0])


def test_made_anew(tmp_path: Path) -> None:
    """Law: another text, tokenizer, length or side of the cut is another entry."""
    split = marked(tmp_path / "a.jsonl", [("ab", []), ("aab", [])], [])
    more = marked(tmp_path / "b.jsonl", [("ab", []), ("abb", [])], [])
    left = letters_tokenizer("ab", 9)
    left.truncation_side = "left"
    one, shorter = letters_tokenizer("ab", 9), letters_tokenizer("ab", 4)
    told = ((split, one), (more, one), (split, shorter), (split, left))
    held = [encode_split(*each, "ner") for each in told]
    assert len({each.source for each in held}) == len(held)
    assert ids_of(held[1]) == [[2, 5, 6, 3], [2, 5, 6, 6, 3]]
    assert ids_of(held[2]) == [[2, 5, 6, 3], [2, 5, 5, 3]]


@pytest.mark.parametrize("task", ["classify", "ner"])
def test_a_worker_gets_a_path(task: str, tmp_path: Path) -> None:
    """Law: what is mapped travels as a path, and arrives as it was."""
    size, path = 20_000, tmp_path / "a.jsonl"
    if task == "ner":
        split = marked(path, [("ab" * size, [(1, 2, "K")]), ("ba", [])], ["K"], [1, 0])
    else:
        split = classified(path, [("ab" * size, "x"), ("ba", "y")], "xy", [1, 0])
    held = encode_split(split, letters_tokenizer("ab", 10**6), task)
    assert held.lengths.tolist() == [4, 2 * size + 2]
    assert held.counts.tolist() == ([2, 2 * size] if task == "ner" else [1, 1])
    assert len(pickle.dumps(held)) < size
    for one in (held, EncodedTexts.build(TOLD, [0, 1, 0, 1])):
        other = pickle.loads(pickle.dumps(one))  # noqa: S301 -- our own
        every = np.arange(len(one))
        assert same(other.collate(every, 0), one.collate(every, 0))
        assert other.source == one.source
        assert other.counts.tolist() == one.counts.tolist()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("QP", [[0, 1, 2, 3], [0, 0], [3, 3, 0]]),
        ("XPQ", [[0, 5, 6, 3], [0, 0], [3, 3, 0]]),
    ],
)
def test_tags_by_hand(tmp_path: Path, kinds: str, expected: list[list[int]]) -> None:
    """Law: tokens have the tags of a corpus' kinds, special ones and padding none.

    The numbers of the kinds are a corpus' own; the files are made once.
    """
    texts = [
        ("abba", [(1, 3, "Q"), (3, 4, "P")]),
        ("ab", []),
        ("aab", [(0, 1, "P"), (1, 2, "P")]),
    ]
    held, others = (
        encode_split(
            marked(tmp_path / "a.jsonl", texts, each), letters_tokenizer("ab", 9), "ner"
        )
        for each in (kinds, kinds[::-1])
    )
    assert held.source == others.source
    rows = [[IGNORED, *tags] for tags in expected]
    padded = [row + [IGNORED] * (8 - len(row)) for row in rows]
    assert held.collate(np.arange(3), 0, 4)["labels"].tolist() == padded
    assert (held.counts.tolist(), held.inexact) == ([4, 2, 3], 0)
    offsets = [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [0, 0]]
    assert held.token_offsets(0).tolist() == offsets


def test_what_tokens_cannot_show_is_counted(tmp_path: Path) -> None:
    """Law: an entity behind the cut is inexact; one before it is not."""
    texts = [("abba", [(0, 1, "P"), (3, 4, "P")]), ("ab", [(1, 2, "P")])]
    split = marked(tmp_path / "a.jsonl", texts, ["P"])
    assert encode_split(split, letters_tokenizer("ab", 5), "ner").inexact == 1
    assert encode_split(split, letters_tokenizer("ab", 6), "ner").inexact == 0


class Told:
    """A fast tokenizer whose tokens and their characters are as told."""

    is_fast = True

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self._places = places

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {
            "input_ids": [[*range(len(self._places))] for _ in texts],
            "offset_mapping": [self._places for _ in texts],
        }


def test_blanks_are_no_part_of_a_token() -> None:
    """Law: white space at a token's edges is trimmed; a token of it alone is empty.

    A tokenizer that cannot tell offsets is refused, and told why.
    """
    text = "Ann \u3000in\tRome "
    places = [(0, 0), (0, 4), (3, 7), (7, 13), (7, 8), (0, 13)]
    ((ids, found),) = tokenize(Told(places), [text], offsets=True)
    assert ids == [0, 1, 2, 3, 4, 5]
    assert [text[start:end] for start, end in found] == [
        *("", "Ann", "in", "Rome", "", "Ann \u3000in\tRome")
    ]
    assert all(end >= start for start, end in found)
    assert tokenize(Told(places), [text]) == [([0, 1, 2, 3, 4, 5], [])]
    assert tokenize(Told(places), [], offsets=True) == []
    slow = Told([])
    slow.is_fast = False
    told = refused(tokenize, slow, ["a"], offsets=True)
    assert told.startswith("Told gives no character offsets, which ner needs; use")
