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
from collections import Counter
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

from halfstep.train.data.corpus import load

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize("path", CHECKED)
def test_as_checked(path: str) -> None:
    """Law: no byte has changed since the whole of it was checked.

    No sentence twice; no two that differ in one word or one entity only; classes are as
    frequent, tags well formed; a tenth has no entity, a quarter several; 30 forms or
    more have two types; 30 % of those of test are new.
    """
    source = files("halfstep.train") / path
    assert hashlib.sha256(source.read_bytes()).hexdigest() == CHECKED[path]


def test_emotions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: `load` returns the splits, in each of which six classes are as frequent."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))
    corpus = load(
        None, task="classify", label_names=None, limit=None, dev_share=0.08, seed=0
    )
    assert corpus.name == "emotions"
    for split in (corpus.train, corpus.dev, corpus.test):
        counts = Counter(split.labels().tolist())
        assert set(counts) == set(range(6))
        assert len(set(counts.values())) == 1
