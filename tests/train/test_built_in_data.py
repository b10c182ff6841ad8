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

import hashlib
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from halfstep.train.data.corpus import load
from halfstep.train.data.data_format import DataFormat

CHECKED = "4bb123a623b08b12ee9dc5eb132047141750b5826ee67e5bc6b226371b935090"
"""SHA-256 of all files, in the order of their names."""


def test_as_checked() -> None:
    """Law: no byte has changed since the whole of it was checked.

    No sentence twice; no two that differ in one word or one entity only; classes are as
    frequent, tags well formed; a tenth has no entity, a quarter several; 30 forms or
    more have two types; 30 % of those of test are new.
    """
    root = files("halfstep.train")
    names = ("emotions/{}.tsv", "entities/{}.bmes")
    splits = ("dev", "test", "train")
    paths = [root / name.format(split) for name in names for split in splits]
    content = b"".join(path.read_bytes() for path in paths)
    assert hashlib.sha256(content).hexdigest() == CHECKED


def test_emotions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: `load` returns the splits, in each of which six classes are as frequent."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    corpus = load(None, DataFormat(), label_names=None, dev_share=0.08, seed=0)
    assert corpus.name == "emotions"
    for split in (corpus.train, corpus.dev, corpus.test):
        counts = Counter(split.labels().tolist())
        assert set(counts) == set(range(6))
        assert len(set(counts.values())) == 1
