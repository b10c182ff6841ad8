"""Features of a token from the characters and words around it, as sparse hashes.

In: ids of `model.character_tokenizer`, one per character. Out: for each token a fixed
number of int64 hashes, one per template: the word that the token is in, the word before
it, its ending, its letter case, and so on. A linear model of such features is what
recognized entities before neural networks did (Ratinov and Roth, "Design Challenges and
Misconceptions in Named Entity Recognition", 2009); names that are not in the training
texts are recognized by their neighbors and their shape.

A character of a script without blanks is a word of its own, so templates of words are
character n-grams there.

Shapes: B texts, T tokens, F templates.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana, Han characters
)
"""The characters of scripts written without blanks, as in a class of `re`."""

WORD_START = "\u2581"
"""Begins a token that follows a blank."""

UPPER, STARTS = 1, 2  # flags of a token
NUM_FLAGS = 4

_SPECIAL, _LETTER, _DIGIT, _OTHER, _UNSPACED = range(5)  # classes of characters
_REACH = 2  # words before and after a token that templates include
_AFFIXES = 2, 3  # characters of a word's first and last parts


def mix(numbers: Tensor) -> Tensor:
    """Return a hash of each int64; 0 for 0 (the finalizer of SplitMix64)."""
    numbers = numbers ^ ((numbers >> 30) & 0x3FFFFFFFF)
    numbers = numbers * -0x40A7B892E31B1A47
    numbers = numbers ^ ((numbers >> 27) & 0x1FFFFFFFFF)
    numbers = numbers * -0x6B2FB644ECCEEE15
    return numbers ^ ((numbers >> 31) & 0x1FFFFFFFF)


def chain(first: Tensor, *others: Tensor) -> Tensor:
    """Return a hash of sequences of int64, which depends on their order."""
    for other in others:
        first = mix(first) + other
    return first


class TokenFeatures(nn.Module):
    """Computes the hashes of each token's templates."""

    count = 30
    """F, the number of templates."""

    def __init__(self, vocabulary_size: int, pad_id: int = 0) -> None:
        super().__init__()
        self.pad_id = pad_id
        for name in ("characters", "flags", "classes"):
            self.register_buffer(name, torch.zeros(vocabulary_size, dtype=torch.long))
        self.characters: Tensor
        """Id of each token's character in lower case, without its flags."""
        self.flags: Tensor
        """Sum of UPPER and STARTS."""
        self.classes: Tensor
        usable = torch.ones(vocabulary_size, dtype=torch.bool)
        self.register_buffer("is_usable", usable)
        self.is_usable: Tensor
        """Whether a token stands for itself: not padding, unknown, or a mask."""

    def set_vocabulary(self, tokens: Sequence[str], num_special: int) -> None:
        """Set the buffers for the tokens by id, of which the first are special.

        The last of the special tokens is the mask, which stands for a letter: it does
        not split a word.
        """
        ids = {token: index for index, token in enumerate(tokens)}
        self.is_usable[[0, 1, num_special - 1]] = False
        for index, token in enumerate(tokens):
            character = token.removeprefix(WORD_START) or token
            lower = character.lower()
            self.characters[index] = ids.get(lower, ids.get(character, index))
            if index < num_special:
                self.classes[index] = _LETTER if index == num_special - 1 else _SPECIAL
                continue
            self.flags[index] = UPPER * (lower != character)
            self.flags[index] += STARTS * (character != token)
            self.classes[index] = _class_of(character)

    def forward(self, ids: Tensor) -> Tensor:
        """Return int64 hashes of shape (B, T, F), for ids of shape (B, T).

        They do not depend on padding. Words are summed by `scatter_add`, exactly: sums
        of integers do not depend on the order.
        """
        characters = self.characters[ids]
        classes, upper = self.classes[ids], self.flags[ids] & UPPER
        starts, _ = starts_of_words(ids, self)
        word_of = starts.long().cumsum(1) - 1
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        index = place - torch.where(starts, place, 0).cummax(1).values
        real = ids != self.pad_id

        def by_word(values: Tensor) -> Tensor:
            """Return the sum over each word, at the word's number; (B, T)."""
            zeros = torch.zeros_like(ids)
            return zeros.scatter_add(1, word_of, (values * real).long())

        def near(words: Tensor, distance: int) -> Tensor:
            """Return what belongs to the word at a distance from each token's."""
            both = pad(words, (_REACH, _REACH))
            return both.gather(1, word_of + (_REACH + distance))

        from_end = near(by_word(torch.ones_like(ids)), 0) - 1 - index
        first, later = index == 0, index > 0
        words = by_word(mix(1 + characters * 64 + index.clamp(max=63)))
        shapes = by_word((1 + classes + 8 * upper) * first)
        shapes += 16 * by_word(upper * later).clamp(max=1)
        shapes += 32 * by_word((classes == _LETTER) & (upper == 0)).clamp(max=1)
        # Characters that are words are in the templates of words already; twice, their
        # weights grow twice as fast, and built-in entities lose 0.04 of F1.
        spaced = classes != _UNSPACED
        prefixes, suffixes = (
            [
                by_word(mix(1 + characters * 64 + at) * ((at < size) & spaced))
                for size in _AFFIXES
            ]
            for at in (index, from_end)
        )
        two_before, previous, word, following, two_after = (
            near(words, distance) for distance in range(-_REACH, _REACH + 1)
        )
        shape_before, shape, shape_after = (near(shapes, n) for n in (-1, 0, 1))
        around = pad((1 + characters) * real, (_REACH, _REACH))
        two_left, left, here, right, two_right = (
            around[:, start : start + ids.shape[1]] for start in range(2 * _REACH + 1)
        )
        characters_near = (
            *(left, here, right),
            *(chain(left, here), chain(here, right)),
            chain(two_left, left, here),
            chain(left, here, right),
            chain(here, right, two_right),
        )
        templates = (
            *(template * spaced for template in characters_near),
            *(two_before, previous, word, following, two_after),
            chain(two_before, previous),
            chain(previous, word),
            chain(word, following),
            chain(following, two_after),
            chain(two_before, previous, word),
            chain(previous, word, following),
            chain(word, following, two_after),
            shape,
            chain(shape_before, shape, shape_after),
            chain(previous, shape),
            chain(following, shape),
            *(near(affix, 0) for affix in (*prefixes, *suffixes)),
            *(near(suffixes[-1], distance) for distance in (-1, 1)),
        )
        numbers = torch.arange(1, self.count + 1, device=ids.device)
        # An entity begins at the first character of a word only.
        return mix(chain(numbers, torch.stack(templates, -1)) * 2 + later[..., None])


def starts_of_words(ids: Tensor, features: TokenFeatures) -> tuple[Tensor, Tensor]:
    """Return where a word begins, and where words are; bool, shape (B, T).

    Punctuation and special tokens stand for themselves, and are no words.
    """
    classes, flags = features.classes[ids], features.flags[ids]
    sign = (classes == _SPECIAL) | (classes == _OTHER)
    before = pad(classes, (1, 0))[:, :-1]
    starts = (flags >= STARTS) | (classes != before) | sign | (classes == _UNSPACED)
    starts[:, 0] = True
    return starts, ~sign


def is_unspaced(character: str) -> bool:
    """Return whether a character is of a script written without blanks."""
    return re.match(f"[{UNSPACED}]", character) is not None


def _class_of(character: str) -> int:
    if is_unspaced(character):
        return _UNSPACED
    if character.isalpha():
        return _LETTER
    return _DIGIT if character.isnumeric() else _OTHER
