"""Corpora: splits, label ids, entities, and each refusal in full."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import cells, in_tmp_path, refused  # noqa: F401
from data_files import write as write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import UserError
from halfstep.train.data import example_store, labelled_text
from halfstep.train.data.corpus import Corpus, Split, dev_counts, load, random_splits
from halfstep.train.data.example_store import open_store


def write(name: str, labels: str) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    lines = [f"t{row},{label}\n" for row, label in enumerate(labels.split())]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def corpus(path: Path, task: str = "classify", **more: Any) -> Corpus:
    given: dict[str, Any] = {"label_names": None, "limit": None, "seed": 0}
    return load(path, task=task, **given | {"dev_share": 0.2} | more)


def pairs(split: Split) -> list[tuple[str, int]]:
    return list(zip(split.texts(), split.labels().tolist(), strict=True))


def shuffled(seed: int, rows: int) -> list[str]:
    texts = [f"t{row}" for row in range(rows)]
    random.Random(seed).shuffle(texts)  # noqa: S311 - a split is no secret
    return texts


def folder(train: str, dev: str, test: str = "") -> Path:
    write("posts/train.csv", train)
    write("posts/dev.csv", dev)
    if test:
        write("posts/test.csv", test)
    return Path("posts")


def test_a_directory_is_taken_as_it_is() -> None:
    """Law: given splits keep their rows and their order, duplicates included."""
    path = folder("b a b b", "a b", "b")
    Path("posts/train.csv").write_text("x,b\ny,a\nx,b\n", encoding="utf-8")
    write("posts/notes.csv", "q q")
    write("posts/train.old.csv", "q q")
    got = corpus(path)
    assert (got.name, got.task, got.labels) == ("posts", "classify", ("a", "b"))
    assert pairs(got.train) == [("x", 1), ("y", 0), ("x", 1)]
    assert pairs(got.dev) == [("t0", 0), ("t1", 1)]
    assert pairs(got.test) == [("t0", 1)]


def test_a_directory_may_mix_suffixes_and_lack_test() -> None:
    write("posts/dev.csv", "0 1")
    Path("posts/train.JSONL").write_text('["x", 1]\n["y", "0"]\n', encoding="utf-8")
    got = corpus(Path("posts"))
    assert pairs(got.train) == [("x", 1), ("y", 0)]
    assert (len(got.test), pairs(got.test)) == (0, [])


@settings(max_examples=30)
@given(
    texts=st.lists(st.integers(0, 99), min_size=2, max_size=200),
    dev_share=st.floats(0, 1, exclude_min=True, exclude_max=True),
    seed=st.integers(),
)
def test_a_file_is_cut_in_two(texts: list[int], dev_share: float, seed: int) -> None:
    """Law: dev has its share of the distinct texts, and none of train; rows once."""
    texts[:2] = [100, 101]
    Path("posts.csv").write_text("".join(f"{t},a\n" for t in texts), encoding="utf-8")
    store = open_store(Path("posts.csv"), "classify", None)
    whole = Split(store, np.arange(len(texts)), np.zeros(1, np.int64))
    splits, repeats = random_splits(whole, dev_share, seed)
    assert list(splits) == ["train", "dev"]
    number = len({*texts})
    assert repeats == len(texts) - number
    train, dev = ({*split.texts()} for split in splits.values())
    assert len(dev) == min(max(round(number * dev_share), 1), number - 1)
    assert not train & dev
    drawn = [*splits["train"].rows, *splits["dev"].rows]
    assert sorted(drawn) == list(range(len(texts)))
    again, _ = random_splits(whole, dev_share, seed)
    assert [*again["train"].rows, *again["dev"].rows] == drawn


def test_a_frequent_text_is_drawn_like_others() -> None:
    """Law: how often a text occurs does not decide on which side it is."""
    path = write("posts.csv", "")
    rows = ["spam,a\n"] * 300 + [f"{n},{'ab'[n % 2]}\n" for n in range(99)]
    path.write_text("".join(rows), encoding="utf-8")
    sides = [
        "spam" in {*corpus(path, seed=seed, dev_share=0.2).dev.texts()}
        for seed in range(20)
    ]
    # Binomial(20, 0.2): outside of these with a chance of 0.015, were no seed fixed.
    assert 1 <= sum(sides) <= 10


def test_repeats_are_one_text_of_dev() -> None:
    """Law: the texts that a score is measured on are counted once each."""
    path = write("posts.csv", "")
    path.write_text("x,a\ny,a\nz,b\nw,b\n" * 10, encoding="utf-8")
    dev = corpus(path, dev_share=0.5).dev
    assert len(dev) == 20
    assert dev.distinct().label_counts(2).sum() == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_text_with_two_labels(seed: int) -> None:
    """Law: train keeps a text of each label that a text of dev also has."""
    path = write("posts.csv", "a b c " * 4)
    path.write_text("x,a\nx,b\ny,c\n x ,b\n" + path.read_text(), encoding="utf-8")
    got = corpus(path, seed=seed, dev_share=0.4)
    assert got.repeats == 2
    assert {*got.dev.labels()} <= {*got.train.labels()}


def test_the_seed_draws_the_split() -> None:
    """Law: of each label the first in the order of random.Random(seed) are dev."""
    path = write("posts.csv", "0 1 " * 50)
    got = corpus(path, seed=7)
    order = shuffled(7, 100)
    even = [text for text in order if int(text[1:]) % 2 == 0]
    dev = {*even[:10], *[text for text in order if text not in even][:10]}
    assert list(got.dev.texts()) == [text for text in order if text in dev]
    assert list(got.train.texts()) == [text for text in order if text not in dev]
    assert pairs(corpus(path, seed=8).dev) != pairs(got.dev)


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    seats=st.integers(1, 200),
)
def test_shares_of_dev(counts: list[int], seats: int) -> None:
    """Law: train keeps one of each label; no label has two before all have one."""
    got = dev_counts(np.array(counts), seats).tolist()
    assert sum(got) == min(seats, sum(counts) - len(counts))
    for count, taken in zip(counts, got, strict=True):
        assert 0 <= taken <= count - 1
        if count > 1 and not taken:
            assert max(got) <= 1
    pairs_of = list(zip(counts, got, strict=True))
    for one, two in itertools.permutations(pairs_of, 2):
        if one[0] > two[0] and two[1] > 1:  # the more rows, the more of them in dev
            assert one[1] >= two[1]


def test_limit_takes_the_first_rows() -> None:
    """Law: a file counts as its first rows; in a directory only train is cut."""
    path = write("posts.csv", "0 1 " * 10 + "2 2 2 2")
    got = corpus(path, limit=20)
    assert {*got.train.texts(), *got.dev.texts()} == {f"t{row}" for row in range(20)}
    assert got.labels == ("0", "1")
    assert len(corpus(path, limit=1000).train) + len(corpus(path).dev) == 24
    fixed = corpus(folder("a b a b", "a b a", "b b b"), limit=2)
    assert [len(fixed.train), len(fixed.dev), len(fixed.test)] == [2, 3, 3]


@pytest.mark.parametrize(
    ("labels", "given", "names", "ids"),
    [
        ("2 0 2", None, "0 1 2", [2, 0, 2]),
        ("02 0 2", None, "0 1 2", [2, 0, 2]),
        ("1 0 1", "no yes maybe", "no yes maybe", [1, 0, 1]),
        ("sad angry like sad", None, "angry like sad", [2, 0, 1, 2]),
        ("sad like sad", "sad like happy", "sad like happy", [0, 1, 0]),
        ("10 9 9", None, "0 1 2 3 4 5 6 7 8 9 10", [10, 9, 9]),
    ],
)
def test_labels_become_ids(
    labels: str, given: str | None, names: str, ids: list[int]
) -> None:
    """Law: numbers are ids; words are sorted; given names fix number and order."""
    label_names = tuple(given.split()) if given else None
    got = corpus(folder(labels, labels), label_names=label_names)
    assert got.labels == tuple(names.split())
    assert got.train.labels().tolist() == ids


FEELINGS = ("other", "like", "sad", "disgust", "angry", "happy")
CODES = tuple(f"c{number:02}" for number in range(13))
ONE = "train holds only one class"
BAD = f"""
0 1 sad | no names | line 3: label 'sad' does not go with '0' in posts.csv line
0 1 6 7 | feelings | line 3: labels out of range: 6 is not in 0 to 5; give\x20
0 65536 | no names | line 2: labels out of range: 65536 is not in 0 to 65535; co
sad sda | feelings | line 2: label 'sda' is unknown, perhaps 'sad'; use other, like
c01 zz | codes | line 2: label 'zz' is unknown; use c00, c01, c02, c03, c04,
sad sad sad | no names | : {ONE} 'sad'; a classifier needs at least two.
sad | no names | : no text can go to dev, for train would lack its label; add di
"""


@pytest.mark.parametrize(("labels", "names", "fault"), cells(BAD))
def test_bad_labels_of_a_file_are_refused(labels: str, names: str, fault: str) -> None:
    """Law: a label that has no id names its line, what is known and the cure."""
    known = {"feelings": FEELINGS, "codes": CODES}.get(names)
    line = refused(corpus, write("posts.csv", labels), label_names=known)
    assert line.startswith(f"posts.csv{' ' * (fault[0] != ':')}{fault}")
    assert line.endswith(", c11, ....") == (names == "codes")


ABSENT = "is absent from train; add rows with it"
BAD_SPLITS = f"""
a b | a c | | /dev.csv line 2: label 'c' of dev {ABSENT}
a b | a | b a c | /test.csv line 3: label 'c' of test {ABSENT}
0 2 | 1 | | /dev.csv line 1: label '1' of dev {ABSENT}
a b | 0 | | /dev.csv line 1: label '0' does not go with 'a' in\x20
a a | b | | : {ONE} 'a'
"""


@pytest.mark.parametrize(("train", "dev", "test", "fault"), cells(BAD_SPLITS))
def test_bad_labels_of_a_directory_are_refused(
    train: str, dev: str, test: str, fault: str
) -> None:
    """Law: dev and test hold no label that train lacks; file and line are named."""
    names = ("a", "b", "c") if test else None
    line = refused(corpus, folder(train, dev, test), label_names=names)
    assert line.startswith(f"posts{fault}")


def test_a_directory_without_its_splits_is_refused() -> None:
    """Law: a directory needs one train and one dev file."""
    path = write("posts/train.csv", "a b").parent
    write("posts/dev.txt", "a b")
    lacks = "posts holds no dev file; name one dev with .json, .jsonl, .ndjson, .csv o"
    assert refused(corpus, path).startswith(lacks)
    write("posts/dev.csv", "a b")
    write("posts/train.tsv", "a b")
    both = "posts/train.csv and train.tsv are both train; keep one."
    assert refused(corpus, path) == both


def test_the_fingerprint_is_that_of_the_examples() -> None:
    """Law: only a text, a label, their order or names change it, not the place."""
    path = write("posts.csv", "a b a b")
    mark = corpus(path).fingerprint
    assert len(mark) == 64
    path.write_text("\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert corpus(path).fingerprint == mark
    assert corpus(path.rename("other.csv")).fingerprint == mark
    assert corpus(Path("other.csv"), label_names=("b", "a")).fingerprint != mark
    assert corpus(Path("other.csv"), seed=1).fingerprint != mark
    for labels in ("a b b a", "b a b a", "a b a b a"):
        assert corpus(write("posts.csv", labels)).fingerprint != mark
    path.write_text("t0,a\nt1,b\nt2,a\nT3,b\n", encoding="utf-8")
    assert corpus(path).fingerprint != mark


ANN = ("Ann in Rome", [(0, 3, "PER"), (7, 11, "LOC")])
BOB = ("Bob", [(0, 3, "PER")])
NIL = ("nobody", [])
Told = tuple[str, list[tuple[int, int, str]]]


def told(name: str, *texts: Told) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    objects = [{"text": text, "entities": found} for text, found in texts]
    path.write_text("".join(f"{json.dumps(o)}\n" for o in objects), encoding="utf-8")
    return path


def entities(split: Split, labels: tuple[str, ...]) -> list[Told]:
    return [
        (text, [(start, end, labels[kind]) for start, end, kind in split.spans(i)])
        for i, text in enumerate(split.texts())
    ]


def test_texts_with_entities_are_a_corpus() -> None:
    """Law: texts, offsets and kinds come back; kinds are sorted, or as given."""
    told("posts/train.jsonl", NIL, ANN, BOB, NIL)
    told("posts/dev.jsonl", BOB, NIL)
    got = corpus(Path("posts"), "ner")
    assert (got.task, got.labels) == ("ner", ("LOC", "PER"))
    assert entities(got.train, got.labels) == [NIL, ANN, BOB, NIL]
    assert entities(got.dev, got.labels) == [BOB, NIL]
    assert entities(got.test, got.labels) == []
    given = corpus(Path("posts"), "ner", label_names=("PER", "ORG", "LOC"))
    assert entities(given.train, given.labels) == [NIL, ANN, BOB, NIL]
    assert given.train.spans(1) == [(0, 3, 0), (7, 11, 2)]


def test_many_texts_with_entities() -> None:
    """Law: more texts than are held at a time come back, each with its entities."""
    kinds = [f"K{n}" for n in range(5)]
    texts: list[Told] = [
        ("so good a day", [(k, k + 1, kinds[(n + k) % 5]) for k in (0, 3, 8)[: n % 4]])
        for n in range(1025)
    ]
    told("posts/train.jsonl", *texts)
    told("posts/dev.jsonl", *texts[:9])
    got = corpus(Path("posts"), "ner")
    assert entities(got.train, got.labels) == texts


@pytest.mark.parametrize(
    ("train", "dev", "message"),
    [
        ([NIL], [NIL], ": train holds no entity; annotate some, or take more"),
        ([NIL, BOB], [NIL, NIL], ": dev holds no entity to choose the best m"),
        ([BOB], [NIL, ANN], "/dev.jsonl line 2: entity type 'LOC' of dev is "),
        ([NIL, ANN], [BOB], "/train.jsonl line 2: entity type 'LOC'"),
    ],
)
def test_bad_kinds_are_refused(
    train: list[Told], dev: list[Told], message: str
) -> None:
    """Law: kinds must be known and in train; file and line are named."""
    told("posts/train.jsonl", *train)
    told("posts/dev.jsonl", *dev)
    names = ("PER", "LO") if ANN in train else None
    line = refused(corpus, Path("posts"), "ner", label_names=names)
    assert line.startswith(f"posts{message}")


@pytest.mark.parametrize("seed", range(2))
def test_a_rare_kind_stays_in_train(seed: int) -> None:
    """Law: with any seed train holds each kind, though one stands in one text alone."""
    bobs = [(f"Bob {number}", BOB[1]) for number in range(8)]
    path = told("marked.jsonl", ANN, *bobs, NIL)
    got = corpus(path, "ner", seed=seed)
    assert got.train.words() == {"PER", "LOC"}
    assert (len(got.train), len(got.dev)) == (8, 2)


def test_a_file_that_changes_while_it_is_read_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: nothing holds the rows of one content under the name of another."""
    path = write("posts.csv", "a b a b")
    read = labelled_text.read

    def change(path: Path, **more: Any) -> object:
        write("posts.csv", "b b a b")
        return read(path, **more)

    monkeypatch.setattr(labelled_text, "read", change)
    fault = "posts.csv changed while it was read; start when it is whole."
    assert refused(corpus, path) == fault


def test_too_many_labels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a column that is no label is refused at its first row too many."""
    monkeypatch.setattr(example_store, "MAX_LABELS", 3)
    monkeypatch.setattr(example_store, "MAX_KINDS", 3)
    assert len(corpus(write("posts.csv", "w0 w1 w2 " * 3)).labels) == 3
    line = refused(corpus, write("posts.csv", "w0 w1 w2 w3 " * 3))
    assert line.startswith("posts.csv line 4: 'w3' is one label more than 3; is it a")
    texts: list[Told] = [
        ("x y", [(0, 1, one), (2, 3, other)]) for one, other in ("AB", "CD")
    ]
    line = refused(corpus, told("a.jsonl", *texts), "ner")
    assert line.startswith("a.jsonl line 2: 'D' is one label more")


def test_too_many_sentences_with_invalid_tags_are_refused() -> None:
    """Law: more than one in a hundred is refused, with the first and their number."""
    good, bad = [f"A{n} B-PER\n\n" for n in range(99)], "Ann O\nLee I-PER\n\n"
    (fault,) = corpus(write_file("a.bio", "".join(good) + bad), "ner").left_out
    assert "line 200" in fault
    path = write_file("a.bio", "".join(good[1:]) + bad)
    with pytest.raises(UserError, match=r"line 198: .*Such tags are in 1 of 99 sent"):
        corpus(path, "ner")


# Headers of tables


def splits(
    suffix: str, train: str, dev: str, names: tuple[str, ...] | None = None
) -> Corpus:
    """Load a directory of two splits, given as contents."""
    write_file(f"posts/train{suffix}", train)
    write_file("posts/dev.csv", dev)
    return corpus(Path("posts"), label_names=names)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".csv", "sentence,class\nx,a\ny,a\nz,b\nv,b\n"),
        (".tsv", "\nsentence\tclass\nx\ta\ny\tb\n"),
    ],
)
def test_a_header_with_other_names_is_no_row(suffix: str, content: str) -> None:
    """Law: a first label that stands nowhere else is not taken for a class."""
    line = refused(splits, suffix, content, "x,a\n")
    number = 1 + content.startswith("\n")
    start = f"posts/train{suffix} line {number}: label 'class' stands in no other row: "
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("suffix", "content", "labels"),
    [
        (".csv", "x,class\ny,a\nz,a\nv,class\n", ("a", "class")),
        (".csv", "x,class\ny,a\n", ("a", "class")),
        (".csv", "text,label\nx,class\ny,a\nz,a\nv,b\n", ("a", "b", "class")),
        (".csv", "x,2\ny,1\nz,1\nv,0\n", ("0", "1", "2")),
        (".jsonl", '["x", "class"]\n["y", "a"]\n["z", "a"]\n', ("a", "class")),
    ],
)
def test_a_first_row_may_be_data(
    suffix: str, content: str, labels: tuple[str, ...]
) -> None:
    """Law: a label that comes again, one below a header, and a number are labels."""
    assert splits(suffix, content, f"x,{labels[-2]}\n").labels == labels


def test_a_rare_label_may_come_first() -> None:
    """Law: a label that train holds heads no dev, and one that was named no train."""
    assert len(splits(".csv", "x,a\ny,b\nz,a\nv,b\n", "x,a\ny,b\nz,b\n").dev) == 3
    assert len(splits(".csv", "x,a\ny,b\nz,b\n", "x,b\n", ("a", "b")).train) == 3
