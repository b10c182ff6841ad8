"""Tokens on disk and in batches: made once, found again, each beside a slow twin."""

import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from data_files import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import classified, counting, letters_tokenizer, marked, split_of
from small_training import same
from tokenizers import processors

from halfstep.train import model
from halfstep.train.data.entity_tags import IGNORED
from halfstep.train.data.tokenized import EncodedTexts, encode_split, encode_texts

ROWS = [("ab", "x"), ("b", "y"), ("aab", "x"), ("ba", "y")]
# [CLS] 2, [SEP] 3, a 5, b 6.
TOLD = [[2, 5, 6, 3], [2, 6, 3], [2, 5, 5, 6, 3], [2, 6, 5, 3]]

token_lists = st.lists(
    st.lists(st.integers(0, 2**31 - 1), max_size=20), min_size=1, max_size=10
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def ids_of(encoded: EncodedTexts) -> list[list[int]]:
    batches = [encoded.collate(np.array([i]), 0) for i in range(len(encoded))]
    return [batch["input_ids"][0].tolist() for batch in batches]


def labels_of(encoded: EncodedTexts) -> list[int]:
    assert isinstance(encoded.labels, np.ndarray)
    return encoded.labels.tolist()


@settings(max_examples=40)
@given(st.data(), token_lists, st.integers(0, 9), st.integers(1, 9))
def test_a_batch_is_its_slow_twin(
    data: st.DataObject, lists: list[list[int]], pad_id: int, multiple: int
) -> None:
    """Law: a row's tokens, then padding, up to the next multiple of the longest."""
    labels = [7 * index for index in range(len(lists))]
    encoded = EncodedTexts.build(lists, labels)
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=20))
    got = encoded.collate(np.array(chosen, np.int64), pad_id, multiple)
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


def test_a_batch_is_a_copy() -> None:
    """Law: what a step writes into its batch reaches neither memory nor the disk."""
    for encoded in (
        EncodedTexts.build(TOLD, [0, 1, 0, 1]),
        encode_split(classified(ROWS, "xy"), letters_tokenizer("ab", 9)),
    ):
        for tensor in encoded.collate(np.arange(4), 0).values():
            tensor.fill_(9)
        assert (ids_of(encoded), labels_of(encoded)) == (TOLD, [0, 1, 0, 1])


def test_classes() -> None:
    """Law: an example has its row's tokens and class, in the order of the split."""
    split = classified(ROWS, "yx", chosen=[2, 0, 1])
    encoded = encode_split(split, letters_tokenizer("ab", 9))
    assert ids_of(encoded) == [TOLD[2], TOLD[0], TOLD[1]]
    assert labels_of(encoded) == [1, 1, 0]
    assert (len(encoded), encoded.lengths.tolist()) == (3, [5, 4, 3])
    assert encoded.counts.tolist() == [1, 1, 1]
    assert encoded.begins.tolist() == [0, 5, 9, 12]
    longest = encoded.longest(2)
    assert (ids_of(longest), labels_of(longest)) == ([TOLD[0], TOLD[2]], [1, 1])


def test_several_labels_and_numbers() -> None:
    """Law: a batch has ones for each label of a text, or the numbers, in fp32."""
    labels = [["q", "p"], [], ["q", "q"]]
    columns = {"text": ["ab", "b", "a"], "label": labels}
    split = split_of(columns, "pqr", target="multi_label", chosen=[2, 0, 1])
    encoded = encode_split(split, letters_tokenizer("ab", 9))
    ones = torch.tensor([[0.0, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert same(encoded.collate(np.arange(3), 0)["labels"], ones)
    assert same(encoded.longest(1).collate(np.arange(1), 0)["labels"], ones[1:2])
    columns["label"] = [0.5, -2.0, 1e10]
    split = split_of(columns, "", target="regression", chosen=[2, 0])
    encoded = encode_split(split, letters_tokenizer("ab", 9))
    expected = torch.tensor([1e10, 0.5])
    assert same(encoded.collate(np.arange(2), 0)["labels"], expected)


@pytest.mark.parametrize("longest", [9, 6])
def test_sentence_pairs(longest: int) -> None:
    """Law: tokens of pairs are those of the tokenizer, of which the longer is cut."""
    columns = {"text": ["ab", "b" * 9], "text_pair": ["b", "ab"], "label": ["x", "y"]}
    tokenizer = model.character_tokenizer(["a b", "ab"], longest)
    encoded = encode_split(split_of(columns, "xy"), tokenizer)
    pairs = columns["text"], columns["text_pair"]
    expected = tokenizer(*pairs, truncation=True, padding=True, return_tensors="pt")
    batch = encoded.collate(np.arange(2), tokenizer.pad_token_id)
    assert batch["token_type_ids"].any()
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], expected[name])
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    without = encode_split(split_of(columns, "xy"), tokenizer)
    assert "token_type_ids" not in without.collate(np.arange(2), 0)


def test_texts_without_tokens() -> None:
    """Law: texts of which a tokenizer makes nothing are texts without tokens."""
    tokenizer = letters_tokenizer("ab", 9)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", special_tokens=[]
    )
    # More than Arrow writes as one batch, so that one has no token at all.
    split = classified([(" ", "x")] * 5000 + ROWS, "xy")
    encoded = encode_split(split, tokenizer)
    expected = [[5, 6], [6], [5, 5, 6], [6, 5]]
    assert ids_of(encoded.longest(3)) == [expected[n] for n in (0, 3, 2)]
    assert encoded.lengths.sum() == 8
    assert encoded.collate(np.arange(2), 0)["input_ids"].tolist() == [[0], [0]]


def test_made_once() -> None:
    """Law: the same rows are cut once, whichever are chosen and whatever labels mean.

    A tokenizer made anew, and one that was called with other settings, is the same.
    """
    tokenizer, calls = counting(letters_tokenizer("ab", 9))
    first = encode_split(classified(ROWS, "xy"), tokenizer)
    assert sum(calls) == len(ROWS)
    again, more = counting(letters_tokenizer("ab", 9))
    again(["ab", "b"], padding=True, truncation=True, max_length=3)
    more.clear()
    second = encode_split(classified(ROWS, "yx", chosen=[1, 3]), again)
    assert (more, second.source) == ([], first.source)
    assert (ids_of(second), labels_of(second)) == ([TOLD[1], TOLD[3]], [0, 0])


def test_made_anew() -> None:
    """Law: another text, tokenizer, length or side of the cut is another file."""
    split = marked([("ab", []), ("aab", [])], [])
    more = marked([("ab", []), ("abb", [])], [])
    left = letters_tokenizer("ab", 9)
    left.truncation_side = "left"
    one, shorter = letters_tokenizer("ab", 9), letters_tokenizer("ab", 4)
    other = letters_tokenizer("abc", 9)
    told = ((split, one), (more, one), (split, shorter), (split, left), (split, other))
    encoded = [encode_split(*each) for each in told]
    assert len({each.source for each in encoded}) == len(encoded)
    assert ids_of(encoded[1]) == [[2, 5, 6, 3], [2, 5, 6, 6, 3]]
    assert ids_of(encoded[2]) == [[2, 5, 6, 3], [2, 5, 5, 3]]


@pytest.mark.parametrize("cut", [1, 9, 400, 10**9])
def test_a_file_that_was_cut_is_made_anew(cut: int) -> None:
    """Law: a file that lacks its end, as after a power failure, is not used."""
    rows = [("ab" * (n % 9), "x") for n in range(3000)]
    split = classified([*rows, *ROWS], "xy")
    first = encode_split(split, letters_tokenizer("ab", 99))
    assert first.source is not None
    expected, path = ids_of(first), first.source
    content = path.read_bytes()
    path.unlink()  # another file, as the first is mapped
    path.write_bytes(content[: max(0, len(content) - cut)])
    assert ids_of(encode_split(split, letters_tokenizer("ab", 99))) == expected


def test_a_process_that_ends_while_it_tokenizes(tmp_path: Path) -> None:
    """Law: tokens have no file, by whatever name, until all of them are in it."""
    split = classified([("ab", "x"), ("b", "y")] * 5000, "xy")
    tokenizer, calls = counting(letters_tokenizer("ab", 9))
    cache, names = tmp_path / "cache", []

    class Stopped(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **words: Any) -> Any:
            if len(calls) == 2:
                names.extend(path.suffix for path in cache.rglob("*.*"))
                raise KeyboardInterrupt
            return super().__call__(*args, **words)

    Stopped.__name__ = type(tokenizer).__name__
    tokenizer.__class__ = Stopped
    with pytest.raises(KeyboardInterrupt):
        encode_split(split, tokenizer)
    assert names == [".part"]
    assert not [*cache.rglob("*.*")]
    encoded = encode_split(split, letters_tokenizer("ab", 9))
    assert ids_of(encoded)[-2:] == TOLD[:2]


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: what the system says against writing is one line that names the cure."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "x")
    split, tokenizer = classified(ROWS, "xy"), letters_tokenizer("ab", 9)
    told = refused(encode_split, split, tokenizer)
    assert "cannot be written: Not a directory; set HF_DATASETS_CACHE" in told


@pytest.mark.parametrize("task", ["classify", "ner"])
def test_a_worker_gets_a_path(task: str) -> None:
    """Law: what is mapped travels as a path, and arrives as it was."""
    size = 20_000
    if task == "ner":
        split = marked([("ab" * size, [(1, 2, "K")]), ("ba", [])], ["K"], [1, 0])
    else:
        split = classified([("ab" * size, "x"), ("ba", "y")], "xy", [1, 0])
    encoded = encode_split(split, letters_tokenizer("ab", 10**6))
    assert encoded.lengths.tolist() == [4, 2 * size + 2]
    assert encoded.counts.tolist() == ([2, 2 * size] if task == "ner" else [1, 1])
    assert len(pickle.dumps(encoded)) < size
    for one in (encoded, EncodedTexts.build(TOLD, [0, 1, 0, 1])):
        other = pickle.loads(pickle.dumps(one))  # noqa: S301 -- our own
        every = np.arange(len(one))
        assert same(other.collate(every, 0), one.collate(every, 0))
        assert other.source == one.source
        assert other.counts.tolist() == one.counts.tolist()


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ("QP", [[0, 1, 2, 3], [0, 0], [3, 3, 0]]),
        ("XPQ", [[0, 5, 6, 3], [0, 0], [3, 3, 0]]),
    ],
)
def test_tags_by_hand(types: str, expected: list[list[int]]) -> None:
    """Law: tokens have the tags of a corpus' types, special ones and padding none.

    The numbers of the types are a corpus' own; the file is made once.
    """
    texts = [
        ("abba", [(1, 3, "Q"), (3, 4, "P")]),
        ("ab", []),
        ("aab", [(0, 1, "P"), (1, 2, "P")]),
    ]
    encoded, others = (
        encode_split(marked(texts, each), letters_tokenizer("ab", 9))
        for each in (types, types[::-1])
    )
    assert encoded.source == others.source
    rows = [[IGNORED, *tags] for tags in expected]
    padded = [row + [IGNORED] * (8 - len(row)) for row in rows]
    assert encoded.collate(np.arange(3), 0, 4)["labels"].tolist() == padded
    assert (encoded.counts.tolist(), encoded.inexact) == ([4, 2, 3], 0)
    offsets = [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [0, 0]]
    assert encoded.token_offsets(0).tolist() == offsets
    tagged = [[0, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]
    assert encoded.tagged(np.arange(2)).astype(int).tolist() == tagged


def test_what_tokens_cannot_show_is_counted() -> None:
    """Law: an entity behind the cut is inexact; one before it is not."""
    texts = [("abba", [(0, 1, "P"), (3, 4, "P")]), ("ab", [(1, 2, "P")])]
    for chosen, expected in (([0, 1], 1), ([1], 0)):
        split = marked(texts, ["P"], chosen)
        assert encode_split(split, letters_tokenizer("ab", 5)).inexact == expected
        assert encode_split(split, letters_tokenizer("ab", 6)).inexact == 0


class Told:
    """A fast tokenizer whose tokens and their characters are as told."""

    is_fast = True

    def __init__(self, places: list[tuple[int, int]]) -> None:
        self._places = places

    def __call__(self, texts: list[str], *_: Any, **__: Any) -> dict[str, Any]:
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
    encoded = encode_texts(Told(places), [text], offsets=True)
    assert ids_of(encoded) == [[0, 1, 2, 3, 4, 5]]
    offsets = encoded.token_offsets(0).tolist()
    assert [text[start:end] for start, end in offsets] == [
        *("", "Ann", "in", "Rome", "", "Ann \u3000in\tRome")
    ]
    assert all(end >= start for start, end in offsets)
    assert len(encode_texts(Told(places), [], offsets=True)) == 0
    slow = Told([])
    slow.is_fast = False
    told = refused(encode_texts, slow, ["a"], offsets=True)
    assert told.startswith("Told gives no character offsets, which ner needs; use")
