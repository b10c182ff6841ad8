"""Predictions of a finished run: in order, alike in any company, refused in full."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from small_training import letters, one_thread, small_and_measured

from halfstep import checkpoint
from halfstep.errors import UserError
from halfstep.train.data import load
from halfstep.train.evaluate import EVAL_BATCH
from halfstep.train.folder import RunFolder
from halfstep.train.predict import Prediction, predict
from halfstep.train.run import run

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("晴", "rain")
LETTERS = ("abcxy", "defxy")
LONGEST = 24


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A small model gains nothing from a second thread, and waits for it."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a finished run at O2 that tells two alphabets apart, half trained."""
    folder = tmp_path_factory.mktemp("predict")
    rows = letters(120, *LETTERS, lengths=(2, 30))
    lines = [f"{row},{NAMES[label]}\n" for row, label in rows]
    (folder / "letters.csv").write_text("".join(lines), encoding="utf-8")
    settings = {
        "data": str(folder / "letters.csv"),
        "dev_share": 0.25,
        "max_length": LONGEST,
        "model": "mini",
        "level": "O2",
        "dtype": "bf16",
        "lr": 1e-3,
        "epochs": 2,
        "eval_every": 3,
        "out": str(folder / "run"),
    }
    with pytest.MonkeyPatch.context() as patch:
        small_and_measured(patch)
        run(settings)
        yield folder / "run"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may spoil."""
    return shutil.copytree(finished, tmp_path / "run")


def refusal(place: Path, *texts: str) -> str:
    """Return the message that refuses to predict, checked for its form."""
    with pytest.raises(UserError) as caught:
        predict(place, texts or ("abc",))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_form(finished: Path) -> None:
    """Law: each text has its prediction, in order: label, and shares that add to 1."""
    texts = ["abc", "defdef", "  abc  ", "天"]
    found = predict(finished, texts)
    assert [each.text for each in found] == texts
    for each in found:
        assert set(each.probabilities) == set(NAMES)
        assert sum(each.probabilities.values()) == pytest.approx(1)
        assert each.label == max(each.probabilities, key=each.probabilities.__getitem__)
    assert found[0].probabilities == pytest.approx(found[2].probabilities)
    assert predict(finished, []) == []


def test_company_does_not_matter(finished: Path) -> None:
    """Law: a text is judged alike alone and among many, shorter and longer ones."""
    texts = ["abcdef"[: 1 + n % 6] * (1 + n % 7) for n in range(EVAL_BATCH + 9)]
    together = predict(finished, texts)
    for number in (0, 5, EVAL_BATCH, EVAL_BATCH + 8):
        alone = predict(finished, [texts[number]])[0]
        assert alone.text == together[number].text
        assert alone.probabilities == pytest.approx(
            together[number].probabilities, abs=1e-5
        )


def test_long_texts_are_cut(finished: Path) -> None:
    """Law: a text is cut as in training, and no length fails."""
    long, longer = predict(finished, ["ab" * LONGEST, "ab" * 5000])
    assert long.probabilities == pytest.approx(longer.probabilities, abs=1e-6)


def test_the_same_as_in_the_run(finished: Path) -> None:
    """Law: the published model scores on dev what the summary says.

    The run computed in bf16 and this in fp32, so shares may differ by the format's
    rounding; which is larger may flip for a text in the middle, one here at most.
    """
    settings = json.loads((finished / "config.json").read_text())
    dev = load(
        Path(settings["data"]), label_names=None, limit=None, dev_share=0.25, seed=0
    ).dev
    found = predict(finished, [example.text for example in dev])
    labels = sorted(NAMES)
    right = sum(
        each.label == labels[example.label]
        for each, example in zip(found, dev, strict=True)
    )
    told = json.loads((finished / "summary.json").read_text())["dev"]["accuracy"]
    assert right / len(dev) == pytest.approx(told, abs=1.01 / len(dev))


def test_the_best_weights_are_published(finished: Path) -> None:
    """Law: the model is the best checkpoint in fp32, not its 16-bit shadow."""
    best = checkpoint.load(RunFolder(finished).best()).weights
    published = safetensors.torch.load_file(finished / "model" / "model.safetensors")
    assert published
    for name, tensor in published.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, best[name])
    low = [torch.equal(t, t.bfloat16().float()) for t in published.values()]
    assert not all(low)


def test_no_run(tmp_path: Path) -> None:
    """Law: a folder without a run, or none at all, is refused with what to do."""
    for place in (tmp_path, tmp_path / "nothing"):
        assert refusal(place) == (
            f"{place} holds no run: there is no {place / 'model'}; train with --out "
            f"{place}."
        )


def test_an_unfinished_run(copy: Path) -> None:
    """Law: a run that has checkpoints but no model is to be resumed."""
    shutil.rmtree(copy / "model")
    assert refusal(copy) == (
        f"{copy} is not finished: there is no {copy / 'model'}; train with --resume "
        f"--out {copy}."
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_model(copy: Path, name: str) -> None:
    """Law: a model whose files are cut is refused, whichever file it is."""
    damaged = copy / "model" / name
    damaged.write_bytes(damaged.read_bytes()[:40])
    start = f"{copy / 'model'} is damaged: transformers cannot load that folder: "
    assert refusal(copy).startswith(start)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (" \n\u3000", "text 2 is blank; give at least one character."),
        ("", "text 2 is blank; give at least one character."),
        ("ab\udcff", "text 2 is not UTF-8 at character 2."),
    ],
)
def test_bad_texts(finished: Path, bad: str, message: str) -> None:
    """Law: a blank or broken text is refused by its number."""
    assert refusal(finished, "abc", bad) == message


def test_modes_are_left_alone(finished: Path) -> None:
    """Law: predicting leaves gradients on for whoever trains in the same program."""
    assert isinstance(predict(finished, ["abc"])[0], Prediction)
    weight: Any = torch.ones(2, requires_grad=True)
    assert (weight * 2).requires_grad
