"""The built-in data: enough, balanced, well formed, and no sentence a variant.

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

import re
import unicodedata
from collections import Counter, defaultdict
from functools import cache
from importlib.resources import files
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.train.data.corpus import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SPLITS = ("train", "dev", "test")
KINDS = {"PER", "LOC", "ORG", "TIME"}
SHORTEST, LONGEST = 7, 48  # characters; a message, neither a cry nor an essay
FAIR = 12  # per cent of the entities, the least of a type in a split
LENGTHS = {"emotions": (7, 36), "entities": (7, 48)}  # neither a cry nor an essay
UNSEEN = 30  # per cent of the surface forms of test, the least that train lacks
CLASSES = {"other", "like", "sad", "disgust", "angry", "happy"}
LINE = re.compile(r"(\S) (O|[BMES]-(?:PER|LOC|ORG|TIME))")
LATIN = re.compile("[A-Za-z]+")
WORDS = {"B", "CA", "CZ", "HR", "K", "T", "offer"}  # gates, flights, trains, T-shirts
# Half of five characters, spread over two ends, leaves two at one of them.
KEY = 2

Sentence = tuple[tuple[str, str], ...]
Span = tuple[int, int, str]


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


def spans(sentence: Sentence) -> list[Span]:
    """Return the (first, past, type) entities of a well-formed sentence."""
    found = []
    first = 0
    for place, (_, tag) in enumerate(sentence):
        if tag[0] in "BS":
            first = place
        if tag[0] in "ES":
            found.append((first, place + 1, tag[2:]))
    return found


def forms(split: str) -> Counter[tuple[str, str]]:
    """Count the (surface form, type) pairs of a split."""
    return Counter(
        (text_of(sentence)[first:past], kind)
        for sentence in sentences(split)
        for first, past, kind in spans(sentence)
    )


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


def one_entity_apart(many: Iterable[Sentence]) -> list[str]:
    """Return the frames that two sentences share but for one entity.

    A frame is a sentence with one entity cut out; what is cut may have any length.
    """
    frames: dict[str, set[str]] = defaultdict(set)
    for sentence in many:
        text = text_of(sentence)
        for first, past, _ in spans(sentence):
            frames[f"{text[:first]}|{text[past:]}"].add(text)
    return [frame for frame, texts in frames.items() if len(texts) > 1]


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


def variants(texts: Sequence[str]) -> set[tuple[str, str]]:
    """Return the pairs of texts that differ in one slot only, whatever it holds.

    Only pairs with the same two characters at an end are compared: all others share
    one at each end at most. Texts have five characters or more.
    """
    alike = defaultdict(list)
    for text in texts:
        alike["starts", text[:KEY]].append(text)
        alike["ends", text[-KEY:]].append(text)
    return {
        pair
        for group in alike.values()
        for pair in combinations(group, 2)
        if differ_in_one_slot(*pair)
    }


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


@pytest.mark.parametrize("data", LENGTHS)
def test_no_variants(data: str) -> None:
    """Law: no two sentences share half of their characters around one slot.

    A sentence with one word replaced, added or moved would be found.
    """
    texts = [bare(text) for text in texts_of(data)]
    assert variants(texts) == set()
    text = max(texts, key=len)
    middle = len(text) // 2
    for twin in (
        f"{text[:middle]}甲{text[middle:]}",
        f"{text[:middle]}甲{text[middle + 5 :]}",
        f"甲乙丙{text[3:]}",
        f"{text[:-3]}甲乙丙",
    ):
        assert variants([*texts, twin]) == {(text, twin)}


@given(st.lists(st.text("ab", min_size=5, max_size=9), max_size=12, unique=True))
def test_variants_are_those_of_all_pairs(texts: list[str]) -> None:
    """Law: the index by ends finds what comparing all pairs finds."""
    assert variants(texts) == {
        pair for pair in combinations(texts, 2) if differ_in_one_slot(*pair)
    }


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
def test_balance(split: str) -> None:
    """Law: the four types each have a fair share of the entities of a split."""
    counts = Counter(kind for (_, kind), n in forms(split).items() for _ in range(n))
    assert counts.keys() == KINDS
    assert 100 * min(counts.values()) >= FAIR * sum(counts.values()), counts


@pytest.mark.parametrize("split", SPLITS)
def test_tags(split: str) -> None:
    """Law: each entity begins, goes on in one type, and ends; all four tags occur."""
    wrong = [s for s in sentences(split) if not well_formed([tag for _, tag in s])]
    assert wrong == []
    used = {tag for sentence in sentences(split) for _, tag in sentence}
    assert used >= {f"{place}-PER" for place in "BMES"}
    assert used >= {f"{place}-{kind}" for place in "BME" for kind in KINDS} | {"O"}


@pytest.mark.parametrize(
    ("tags", "right"),
    [
        (["O", "S-PER", "S-PER", "O"], True),
        (["B-LOC", "M-LOC", "E-LOC", "B-ORG", "E-ORG"], True),
        (["B-LOC", "E-ORG"], False),
        (["B-LOC", "O"], False),
        (["B-LOC", "M-LOC"], False),
        (["M-LOC", "E-LOC"], False),
        (["S-PER", "E-PER"], False),
        (["B-PER", "B-PER", "E-PER"], False),
        (["O", "E-TIME"], False),
    ],
)
def test_tags_would_be_found(tags: list[str], right: bool) -> None:
    """Law: a sequence that leaves, enters or changes an entity midway is refused."""
    assert well_formed(tags) is right


def test_no_entity_and_many() -> None:
    """Law: about a tenth of the sentences has no entity, and a quarter has several."""
    counts = [len(spans(sentence)) for sentence in every()]
    assert 0.08 <= counts.count(0) / len(counts) <= 0.15
    assert sum(n >= 2 for n in counts) >= len(counts) / 4


def test_edges() -> None:
    """Law: entities stand at the very start, at the very end but for the stop, amid."""
    starts = ends = amid = 0
    for sentence in every():
        last = len(bare(text_of(sentence)))
        for first, past, _ in spans(sentence):
            starts += first == 0
            ends += len(bare(text_of(sentence[:past]))) == last
            amid += first > 0
    assert min(starts, amid) >= 400
    assert ends >= 40


def test_context_decides() -> None:
    """Law: many forms have two types, which only the sentence tells apart."""
    kinds = defaultdict(set)
    for split in SPLITS:
        for form, kind in forms(split):
            kinds[form].add(kind)
    assert sum(len(found) > 1 for found in kinds.values()) >= 30


def test_no_two_one_entity_apart() -> None:
    """Law: no two sentences differ in one entity only."""
    assert one_entity_apart(every()) == []


def test_one_entity_apart_would_be_found() -> None:
    """Law: a sentence with one name replaced, by a longer one even, is found."""
    taken = next(s for s in sentences("train") if len(spans(s)) == 2)
    first, past, kind = spans(taken)[1]
    other = ((("甲", f"B-{kind}"),), (("乙", f"M-{kind}"),) * 7, (("丙", f"E-{kind}"),))
    twin = (*taken[:first], *other[0], *other[1], *other[2], *taken[past:])
    text = text_of(taken)
    assert one_entity_apart([*every(), twin]) == [f"{text[:first]}|{text[past:]}"]


def test_no_placeholder() -> None:
    """Law: Latin words are those that print has; no name is an X or a so-and-so."""
    texts = [text_of(sentence) for sentence in every()]
    assert {word for text in texts for word in LATIN.findall(text)} == WORDS
    assert [text for text in texts if "某某" in text or "甲某" in text] == []
    assert sum(bool(re.search("[A-Za-z0-9]", text)) for text in texts) >= 10


def test_test_has_unseen_names() -> None:
    """Law: a fair part of the forms in test is not in train, and a part is."""
    seen = forms("train").keys()
    asked = forms("test").keys()
    assert 100 * len(asked - seen) >= UNSEEN * len(asked)
    assert asked & seen
    for kind in KINDS:
        assert any(form[1] == kind for form in asked - seen), kind
