"""The built-in data: enough, balanced, well formed, and as it was checked by hand.

What the sentences with entities hold to:

- PER is a person, LOC a place, ORG an organisation, TIME a date or a time of day.
- Of nested entities the outermost is marked: a school with its town's name is one ORG,
  a memorial hall with a person's name is one ORG, a road with a town's name is one LOC.
  Places that follow one another in an address are one LOC.
- Titles and words of kinship are no part of PER: a surname before "teacher" or "aunt"
  is PER alone, of one character. "Little Li" and "Old Zhang" are PER, and so are
  nicknames and persons of legend.
- A country or city that stands for its government is LOC; a team with its name is ORG.
- Schools, hospitals, hotels, shops and papers with a name are ORG, wherever they stand;
  stations, parks, squares, bridges, roads and sights are LOC. Offices of state by their
  short name (water bureau, customs) are ORG; common nouns (school, company, court,
  station) are nothing, and so are products, numbered lines and the titles of works.
- A place name before a dish, a dialect or a people is LOC.
- TIME is an absolute or relative date, a time of day, weekday, season, feast, dynasty
  or solar term, what recurs ("every Monday"), and a duration that places an event
  ("three days ago"). Bare durations, ages, vague words ("now", "that day", "all day
  long") and events ("before the exam") are not; "around", "before" and "during" after
  a date stay outside it.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from halfstep.train.data.corpus import load

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPLITS = ("train", "dev", "test")
KINDS = {"PER", "LOC", "ORG", "TIME"}
LENGTHS = {"emotions": (7, 36), "entities": (7, 48)}  # neither a cry nor an essay
CLASSES = {"other", "like", "sad", "disgust", "angry", "happy"}
LINE = re.compile(r"(\S) (O|[BMES]-(?:PER|LOC|ORG|TIME))")
CHECKED = {
    "emotions/dev.tsv": "b755f913bb27d38f2ab369fd81d62341"
    "a96f49b11c1f5c86f2a838c3e757c7cb",
    "emotions/test.tsv": "499825b8fa5a96eb6de7711212a10017"
    "54be8692827b2f7d7e93646e15072374",
    "emotions/train.tsv": "893bd60fb14a11b3b397c567aaf6ef57"
    "26bee09018c1068a3035d76740189c68",
    "entities/dev.bmes": "eda1d9a18ed5ee0db43e90012ce0a983"
    "1b8156716eb0f9862bec26944c627b88",
    "entities/test.bmes": "9eb511a464a5cc08fa84c5c445d80f52"
    "5ea1f86f2434986c8e3ef4a9b14d7ab3",
    "entities/train.bmes": "f946ee19fa7dbc77f7b444c330b7c7c9"
    "251989e3297abd67eb4e34270d535a83",
}
"""File -> its SHA-256."""

Sentence = tuple[tuple[str, str], ...]


@cache
def sentences(split: str) -> tuple[Sentence, ...]:
    """Return the sentences of a split, each of (character, tag) pairs."""
    source = files("halfstep.train") / "entities" / f"{split}.bmes"
    text = source.read_bytes().decode("utf-8")
    assert "\r" not in text
    assert text.endswith("\n")
    return tuple(parsed(block) for block in text[:-1].split("\n\n"))


def parsed(block: str) -> Sentence:
    """Return the (character, tag) pairs of the lines of one sentence."""
    found = []
    for line in block.split("\n"):
        match = LINE.fullmatch(line)
        assert match, f"{line!r} in {block!r}"
        found.append((match[1], match[2]))
    return tuple(found)


def every() -> list[Sentence]:
    """Return the sentences of all splits."""
    return [sentence for split in SPLITS for sentence in sentences(split)]


def text_of(sentence: Sentence) -> str:
    """Return a sentence as it reads."""
    return "".join(character for character, _ in sentence)


def bare(text: str) -> str:
    """Return a sentence without punctuation, symbols and white space."""
    return "".join(c for c in text if unicodedata.category(c)[0] not in "PSZC")


def well_formed(tags: Sequence[str]) -> bool:
    """Say whether each entity begins, goes on in one type, and ends."""
    for before, after in pairwise(["O", *tags, "O"]):
        inside = before[0] in "BM"
        if inside != (after[0] in "ME") or (inside and before[2:] != after[2:]):
            return False
    return True


@cache
def emotions(split: str) -> tuple[tuple[str, str], ...]:
    """Return the (text, label) rows of a split as its file holds them."""
    source = files("halfstep.train") / "emotions" / f"{split}.tsv"
    head, *lines, end = source.read_text(encoding="utf-8").split("\n")
    assert (head, end) == ("text\tlabel", "")
    rows = tuple((text, label) for text, label in (line.split("\t") for line in lines))
    assert all("\t" not in label for _, label in rows)
    return rows


@cache
def texts_of(data: str) -> tuple[str, ...]:
    """Return the sentences of all splits."""
    if data == "entities":
        return tuple(map(text_of, every()))
    return tuple(text for split in SPLITS for text, _ in emotions(split))


@pytest.mark.parametrize("path", CHECKED)
def test_as_checked(path: str) -> None:
    """Law: no byte has changed since the whole of it was checked.

    No two sentences differ in one word or one entity only; a tenth has no entity, a
    quarter several; 30 forms or more have two types; 30 % of those of test are new.
    """
    source = files("halfstep.train") / path
    assert hashlib.sha256(source.read_bytes()).hexdigest() == CHECKED[path]


@pytest.mark.parametrize("data", LENGTHS)
def test_sentences(data: str) -> None:
    """Law: at least 1,200, of sane length, of plain characters, and none twice."""
    texts = texts_of(data)
    counts = Counter(map(bare, texts))
    assert len(counts) >= 1200
    assert [text for text, count in counts.items() if count > 1] == []
    shortest, longest = LENGTHS[data]
    assert [text for text in counts if not shortest <= len(text) <= longest] == []
    # Mark-up, and what is left of it.
    odd = "" if data == "emotions" else "[]|{}<>_ \u3000"
    for text in texts:
        assert text == text.strip()
        assert unicodedata.is_normalized("NFC", text), text
        assert not [c for c in text if unicodedata.category(c)[0] == "C"], text
        assert not set(odd) & set(text), text


@pytest.mark.parametrize("split", SPLITS)
def test_emotions(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the six classes are equally frequent; `load` returns these rows."""
    rows = emotions(split)
    counts = Counter(label for _, label in rows)
    assert counts.keys() == CLASSES
    assert len(set(counts.values())) == 1
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))
    corpus = load(
        None, task="classify", label_names=None, limit=None, dev_share=0.08, seed=0
    )
    assert corpus.name == "emotions"
    loaded = getattr(corpus, split)
    labels = [corpus.labels[label] for label in loaded.labels()]
    assert list(zip(loaded.texts(), labels, strict=True)) == list(rows)


@pytest.mark.parametrize("split", SPLITS)
def test_tags(split: str) -> None:
    """Law: each entity begins, goes on in one type, and ends; all four tags occur."""
    wrong = [s for s in sentences(split) if not well_formed([tag for _, tag in s])]
    assert wrong == []
    used = {tag for sentence in sentences(split) for _, tag in sentence}
    assert used >= {f"{place}-PER" for place in "BMES"}
    assert used >= {f"{place}-{kind}" for place in "BME" for kind in KINDS} | {"O"}
