"""Predictions of a finished run: in order, alike in any company; how they leave."""

import io
import itertools
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_files import refused
from safetensors.torch import load_file, save_file
from small_corpora import letters_tokenizer
from small_training import letters, seal_again, small_settings

from halfstep.errors import UserError
from halfstep.train import model
from halfstep.train import predict as predicting
from halfstep.train.data.corpus import load
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.predict import (
    Entities,
    Entity,
    Label,
    Predictor,
    drop_blank,
    lines,
    tables,
    write,
)
from halfstep.train.run import run
from halfstep.train.tasks import EVAL_BATCH

pytestmark = pytest.mark.usefixtures("small_runs")

NAMES = ("rain", "晴")
LETTERS = ("defxy", "abcxy")


LONGEST = 24
CLOSE = 1e-5  # sums of fp32 in another order, through a layer and its norms


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run that tells two alphabets apart, half trained."""
    folder = tmp_path_factory.mktemp("predict")
    rows = letters(120, *LETTERS, lengths=(2, 30))
    told = [f"{row},{NAMES[label]}\n" for row, label in rows]
    (folder / "letters.csv").write_text("".join(told), encoding="utf-8")
    more = {"dev_share": 0.25, "max_length": LONGEST, "level": "O0", "batch_size": 32}
    more |= {"lr": 1e-3, "epochs": 2}
    return run(small_settings(folder, folder / "letters.csv", **more)).folder.path


@pytest.fixture(scope="module")
def predictor(finished: Path) -> Predictor:
    return Predictor(finished)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


class Copyist(torch.nn.Module):
    """A model by which b begins an entity, c goes on with it, and a is outside."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        del attention_mask
        tags = (input_ids - self.first).clamp(0, 2)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(tags, 3).float())


@pytest.fixture
def tagger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    """Return what finds entities by the rule of `Copyist`."""
    tokenizer = letters_tokenizer("abc", 8)
    head = {"head": "TokenClassification", "max_length": 8, "dropout": None}
    network = model.build("mini", ["abc"] * 2, ("O", "B-PER", "I-PER"), **head)
    folder = RunFolder(tmp_path / "run")
    folder.begin({"task": "ner"}, overwrite=False)
    folder.save_model(network.model, tokenizer)
    made = Predictor(folder.path)
    monkeypatch.setattr(made, "_model", Copyist(tokenizer.get_vocab()["a"]))
    return made


def test_form(predictor: Predictor) -> None:
    """Law: each text has its prediction, in order: label, and shares that add to 1."""
    texts = ["abc", "defdef", "  abc  ", "天"]
    found = list(predictor.predict(texts))
    assert [each.text for each in found] == texts
    assert predictor.outputs == NAMES
    for each in found:
        assert isinstance(each, Label)
        assert tuple(each.probabilities) == NAMES
        assert sum(each.probabilities.values()) == pytest.approx(1)
        assert each.label == max(each.probabilities, key=each.probabilities.__getitem__)
    assert found[0].probabilities == pytest.approx(found[2].probabilities)
    assert list(predictor.predict([])) == []


def test_company_does_not_matter(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a text is judged alike alone and among many, shorter and longer ones."""
    monkeypatch.setattr(predicting, "_AHEAD", EVAL_BATCH + 3)
    texts = ["abcdef"[: 1 + n % 6] * (1 + n % 7) for n in range(2 * EVAL_BATCH + 9)]
    together = list(predictor.predict(texts))
    assert [each.text for each in together] == texts
    for number in (0, 5, EVAL_BATCH, EVAL_BATCH + 3, len(texts) - 1):
        (alone,) = predictor.predict([texts[number]])
        assert alone.probabilities == pytest.approx(
            together[number].probabilities, abs=CLOSE
        )


def test_as_they_come(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: texts without end have predictions; no more are read than were said.

    Gradients stay on for whoever trains in the same program.
    """
    monkeypatch.setattr(predicting, "_AHEAD", 4)
    read = itertools.count()
    endless = ("ab" * (1 + next(read) % 3) for _ in itertools.repeat(None))
    found = predictor.predict(endless)
    assert next(read) == 0
    assert len(list(itertools.islice(found, 5))) == 5
    assert next(read) == 1 + 8
    assert torch.is_grad_enabled()


def test_the_same_as_in_the_run(finished: Path, predictor: Predictor) -> None:
    """Law: the published model scores on dev what the summary says."""
    source = Path(RunFolder(finished).settings()["data"])
    given = {"label_names": None, "limit": None, "dev_share": 0.25, "seed": 0}
    dev = load(source, task="classify", **given).dev
    found = [each.label for each in predictor.predict(dev.texts())]
    truth = [NAMES[label] for label in dev.labels()]
    right = sum(map(str.__eq__, found, truth))
    told = json.loads((finished / "summary.json").read_text())["dev"]["accuracy"]
    assert right / len(dev) == pytest.approx(told)


def test_cut(predictor: Predictor) -> None:
    """Law: a text is cut as in training, and told so; one that just fits is not."""
    fits = LONGEST - 2  # beside the marks of start and end
    one, *others = predictor.predict("a" * n for n in (fits, fits + 1, 2, 5000))
    cut = [one.cut, *(each.cut for each in others)]
    assert json.dumps(cut) == "[false, true, false, true]"  # no values of NumPy
    for each in others[::2]:
        assert each.probabilities == pytest.approx(one.probabilities, abs=CLOSE)


def test_entities(tagger: Predictor) -> None:
    """Law: entities are characters of the text as given; none is past the cut."""
    texts = ["a b c a", "aaa", " BCb", "aaaaab", "aaaaaab"]
    found = list(tagger.predict(texts))
    b, c = Entity("PER", 1, 3, "BC"), Entity("PER", 3, 4, "b")
    assert found == [
        Entities("a b c a", (Entity("PER", 2, 5, "b c"),), cut=False),
        Entities("aaa", (), cut=False),
        Entities(" BCb", (b, c), cut=False),
        Entities("aaaaab", (Entity("PER", 5, 6, "b"),), cut=False),
        Entities("aaaaaab", (), cut=True),
    ]


def test_no_run(copy: Path, tmp_path: Path) -> None:
    """Law: a folder without a run, or none at all, is refused with what to do.

    A run that has checkpoints but no model is to be resumed.
    """
    for place in (tmp_path, tmp_path / "no thing"):
        assert refused(Predictor, place) == (
            f"{place} holds no run: there is no {place / 'model'}; train with --out "
            f"{shlex.quote(str(place))}."
        )
    inside = copy / "model"
    assert refused(Predictor, inside) == f"{inside} is the model of a run; give {copy}."
    shutil.move(inside, copy / "elsewhere")
    unfinished = copy
    for name in (copy.name, "model"):
        unfinished = unfinished.rename(tmp_path / name)
        assert refused(Predictor, unfinished) == (
            f"{unfinished} is not finished: there is no {unfinished / 'model'}; train "
            f"with --resume --out {unfinished}."
        )


def without_classifier(path: Path) -> None:
    weights = load_file(path)
    del weights["classifier.weight"]
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("config.json", lambda path: path.write_text("{}"), "transformers cannot load"),
        ("model.safetensors", without_classifier, "it lacks weights classifier.weight"),
        ("tokenizer.json", Path.unlink, "backend tokenizer"),  # transformers' words
    ],
)
def test_a_sealed_folder_that_is_no_model(
    copy: Path, name: str, spoil: Callable[[Path], object], reason: str
) -> None:
    """Law: a model that lacks a weight, or its vocabulary, predicts nothing."""
    spoil(copy / "model" / name)
    seal_again(copy / "model")
    message = refused(Predictor, copy)
    assert message.startswith(f"{copy / 'model'} is damaged: ")
    assert reason in message
    assert "Train again" in message


BLANK = "it is blank; give at least one character."
CUT = "a character is cut in half (a lone surrogate); fix or drop it."
NUL = "it holds a NUL character; remove it."


@pytest.mark.parametrize(
    ("bad", "message"),
    [(" \n\u3000", BLANK), ("", BLANK), ("ab\udcff", CUT), ("ab\0", NUL)],
)
def test_bad_texts(predictor: Predictor, bad: str, message: str) -> None:
    """Law: a blank or broken text is refused by its number."""
    line = refused(lambda: list(predictor.predict(["abc", bad])))
    assert line == f"text 2 cannot be used: {message}"


# On their way out: tables to read, and a file whole or not at all

SUNNY = Label("abc", "sun", {"rain": 0.25, "sun": 0.75}, cut=False)
RAINY = Label("天" * 9, "rain", {"rain": 0.5, "sun": 0.5}, cut=True)
ADA = Entity("PER", 0, 3, "Ada")
PARIS = Entity("LOC", 7, 12, "Paris")
BOTH = Entities("Ada in Paris", (ADA, PARIS), cut=False)
NONE = Entities("so it is", (), cut=False)
OUTPUTS = ("rain", "sun")
CUT_NOTE = "cut at --max-length of the run; what follows was not read."


def failing() -> Iterator[Label]:
    yield SUNNY
    raise UserError("text 2 is blank.")


def test_table_of_labels() -> None:
    """Law: a row a text, the probabilities in the order of the outputs."""
    (table,) = tables([SUNNY, RAINY], OUTPUTS, [1, 2])
    assert table.columns == ("label", "p(rain)", "p(sun)", "text")
    assert table.rows == (
        ("sun", 0.25, 0.75, SUNNY.text),
        ("rain", 0.5, 0.5, RAINY.text),
    )
    assert table.notes == (f"1 text was {CUT_NOTE}",)
    assert tables([SUNNY], OUTPUTS, [1])[0].notes == ()
    odd = Label("abc", "label", {"text": 0.25, "label": 0.75}, cut=False)
    (table,) = tables([odd], ("text", "label"), [1])
    assert table.rows == (("label", 0.25, 0.75, "abc"),)


def test_table_of_entities() -> None:
    """Law: a row an entity with the number of its text; a text without one has one."""
    numbered, notes = drop_blank([BOTH.text, " ", NONE.text])
    assert notes == ("text 2 is blank, and left out.",)
    (table,) = tables([BOTH, NONE], ("O",), [number for number, _ in numbered])
    assert table.columns == ("text", "type", "entity", "start", "end")
    assert table.rows == (
        (1, "PER", "Ada", 0, 3),
        (1, "LOC", "Paris", 7, 12),
        (3, "-", "no entity", None, None),
    )
    assert len(table.notes) == 1


def test_nothing_but_blanks() -> None:
    with pytest.raises(UserError, match=r"^text 1, 2 is blank; give at least one"):
        drop_blank([" ", ""])


def test_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: one JSON object a text, in UTF-8; what was cut is told beside it."""
    path = tmp_path / "out.jsonl"
    write([SUNNY, RAINY, RAINY], path)
    told = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert told == [
        {"text": o.text, "label": o.label, "probabilities": o.probabilities}
        | {"cut": o.cut}
        for o in (SUNNY, RAINY, RAINY)
    ]
    assert "天" in path.read_text("utf-8")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("3 texts, ")
    assert f"2 texts were {CUT_NOTE}" in err


@pytest.mark.parametrize("before", [None, "what was there\n"])
def test_whole_or_not_at_all(tmp_path: Path, before: str | None) -> None:
    """Law: a failure on the way leaves the file as it was, and nothing beside it."""
    path = tmp_path / "out.jsonl"
    if before is not None:
        path.write_text(before, encoding="utf-8")
    with pytest.raises(UserError, match=r"^text 2 is blank\.$"):
        write(failing(), path)
    left = [each.read_text("utf-8") for each in tmp_path.iterdir()]
    assert left == ([] if before is None else [before])
    write([SUNNY], path)
    assert json.loads(path.read_text("utf-8"))["label"] == "sun"


def test_through_a_link(tmp_path: Path) -> None:
    """Law: a link stays one; the file that it leads to is replaced."""
    real, link = tmp_path / "real.jsonl", tmp_path / "there" / "out.jsonl"
    real.touch()
    link.parent.mkdir()
    link.symlink_to(real)
    write([SUNNY], link)
    assert link.is_symlink()
    assert json.loads(real.read_text("utf-8"))["label"] == "sun"


def test_into_a_pipe(tmp_path: Path) -> None:
    """Law: what is no plain file is written directly, and stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")))
    reader.start()
    write([SUNNY], pipe)
    reader.join()
    assert json.loads(read[0])["label"] == "sun"
    assert pipe.is_fifo()


def test_cannot_be_written(tmp_path: Path) -> None:
    """Law: a place that cannot be written is refused with the system's reason."""
    for path, why in (
        (tmp_path / "none" / "out.jsonl", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        assert (
            refused(write, [SUNNY], path) == f"--json {path} cannot be written: {why}."
        )


def test_lines() -> None:
    """Law: a text a line, blank ones and the mark of UTF-8 left out."""
    source = io.BytesIO("\ufeffab c\r\n\n  \n 天 \nlast".encode())
    assert list(lines(source)) == [(1, "ab c"), (4, "天"), (5, "last")]


def test_lines_refused() -> None:
    """Law: a stream without a text, or of other bytes, is refused by its line."""
    none = "standard input holds no text; give one a line."
    latin = "standard input line 2 is not UTF-8: byte 0xff at offset 4; s"
    for data, message in ((b"", none), (b" \n\n", none), (b"ab\nc\xff\n", latin)):
        with pytest.raises(UserError, match=f"^{message}"):
            list(lines(io.BytesIO(data)))
