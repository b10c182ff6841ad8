"""Hashed features of tokens, against a twin in plain Python."""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.train import model
from halfstep.train.data.tokenized import encode_texts
from halfstep.train.token_features import TokenFeatures, is_unspaced

ALPHABET = "abcABC12-,北京 "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return model.character_tokenizer([ALPHABET] * 2, 64)


@pytest.fixture(scope="module")
def features(tokenizer: Any) -> TokenFeatures:
    made = TokenFeatures(len(tokenizer))
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    made.set_vocabulary(tokens, len(model.SPECIAL_TOKENS))
    return made


def texts() -> list[str]:
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    return ["".join(draw.choices(ALPHABET, k=draw.randint(1, 20))) for _ in range(60)]


def encode(tokenizer: Any, written: Sequence[str]) -> torch.Tensor:
    encoding: dict[str, torch.Tensor]
    encoding = tokenizer(written, padding=True, return_tensors="pt")
    return encoding["input_ids"]


def kind_of(character: str) -> str:
    if len(character) > 1 or is_unspaced(character):
        return "single" if len(character) == 1 else "special"
    kinds = {character.isalpha(): "letter", character.isdigit(): "digit"}
    return kinds.get(True, "other")


def lower(token: str) -> str:
    return token if token in model.SPECIAL_TOKENS else token.lower()


def words_of(tokens: Sequence[str], written: Sequence[str]) -> list[list[int]]:
    """Return the positions of each word's characters."""
    words: list[list[int]] = []
    for at, character in enumerate(written):
        kind = kind_of(character)
        joins = kind in ("letter", "digit") and tokens[at] == character
        if joins and at and kind == kind_of(written[at - 1]):
            words[-1].append(at)
        else:
            words.append([at])
    return words


def ending(word: str | None) -> str | None:
    if word is None or is_unspaced(word):
        return None
    return word if word in model.SPECIAL_TOKENS else word[-3:]


def shape_of(word: Sequence[str]) -> tuple[str, bool, bool, bool]:
    """Return the class and case of a word's first character, and if later ones vary."""
    kind, upper = kind_of(word[0]), [each != lower(each) for each in word]
    has_lower = kind == "letter" and not all(upper)
    return kind, upper[0], any(upper[1:]), has_lower


def twin(tokens: Sequence[str]) -> list[list[Any]]:
    """Return the templates of each token, as what they are the hashes of."""
    written = [
        token if token in model.SPECIAL_TOKENS else token.removeprefix("▁") or token
        for token in tokens
    ]
    words = words_of(tokens, written)
    real = range(len(words))

    def word(number: int) -> str | None:
        if number not in real:
            return None
        return "".join(lower(written[at]) for at in words[number])

    def shape(number: int) -> Any:
        return shape_of([written[at] for at in words[number]]) if number in real else ()

    def left(at: int) -> str | None:
        return lower(written[at]) if 0 <= at < len(written) else None

    rows = []
    for number, places in enumerate(words):
        w = [word(number + distance) for distance in range(-2, 3)]
        s = [shape(number + distance) for distance in (-1, 0, 1)]
        here = [lower(written[at]) for at in places]
        for at in places:
            c = [left(at + distance) for distance in range(-2, 3)]
            keys: list[Any] = [c[1], c[2], c[3], c[1:3], c[2:4], c[:3], c[1:4], c[2:]]
            if is_unspaced(written[at][0]):
                keys = [None] * len(keys)
            keys += [*w, w[:2], w[1:3], w[2:4], w[3:], w[:3], w[1:4], w[2:]]
            keys += [s[1], s, (w[1], s[1]), (w[3], s[1])]
            affixes = [here[:2], here[:3], here[-2:], here[-3:]]
            keys += [None] * 4 if is_unspaced(here[0]) else affixes
            keys += [ending(w[1]), ending(w[3])]
            rows.append([(key, at > places[0]) for key in map(str, keys)])
    return rows


def test_against_a_twin(tokenizer: Any, features: TokenFeatures) -> None:
    """Law: tokens have the same hash of a template where the twin has the same key."""
    hashes_of, keys_of = defaultdict(set), defaultdict(set)
    for text in texts():
        ids = encode(tokenizer, [text])
        rows = twin(tokenizer.convert_ids_to_tokens(ids[0]))
        hashes = features(ids)[0].tolist()
        assert len(hashes) == len(rows)
        for keys, numbers in zip(rows, hashes, strict=True):
            assert len(keys) == len(numbers) == features.count
            for place, (key, number) in enumerate(zip(keys, numbers, strict=True)):
                hashes_of[place, key].add(number)
                keys_of[number].add((place, key))
    assert {len(numbers) for numbers in hashes_of.values()} == {1}
    assert {len(keys) for keys in keys_of.values()} == {1}


def test_padding_changes_nothing(tokenizer: Any, features: TokenFeatures) -> None:
    """Law: a text has the same features alone and in a batch of longer ones."""
    written = texts()
    batch, ids = features(encode(tokenizer, written)), encode(tokenizer, written)
    for row, text in enumerate(written):
        alone = features(encode(tokenizer, [text]))[0]
        assert torch.equal(batch[row, : len(alone)], alone)
    assert ids.shape == batch.shape[:2]


def test_case_and_blanks(tokenizer: Any) -> None:
    """Law: case and words are in the tokens, blanks beside Han characters are not."""
    spaced, dense = encode(tokenizer, ["北 京 ab Ab", "北京ab Ab"])
    assert torch.equal(spaced, dense)
    tokens = tokenizer.convert_ids_to_tokens(dense)
    assert tokens[1:-1] == ["北", "京", "a", "b", "▁A", "b"]


@settings(max_examples=60)
@given(text=st.text("aAbω1,北京 \t\u3000", min_size=1, max_size=20))
def test_tokens_cover_each_character(tokenizer: Any, text: str) -> None:
    """Law: each character that is not blank has one token, a blank has none."""
    offsets = encode_texts(tokenizer, [text], offsets=True).token_offsets(0).tolist()
    covered = [(start, end) for start, end in offsets if start < end]
    assert covered == [(i, i + 1) for i, each in enumerate(text) if not each.isspace()]
