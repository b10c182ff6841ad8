"""Several labels and numbers, from a file to a finished model, and a useless one."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import transformers
from small_training import small_settings, steps_of

from halfstep.train.data.tokenized import EncodedTexts
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.run import run
from halfstep.train.tasks import TASKS

pytestmark = pytest.mark.usefixtures("small_runs")

Row = tuple[str, str]
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
KINDS: dict[str, dict[str, Any]] = {
    "class": {},
    "multi_label": {"multi_label": True, "label_separator": "|"},
    "regression": {"regression": True},
}
"""Kind of label -> its settings."""


def marked_row(draw: random.Random, kind: str) -> Row:
    """Return a text whose letters a, b and c tell its label."""
    true = [letter for letter, share in SHARES.items() if draw.random() < share]
    text = draw.choices("uvwxyz", k=6)
    for letter in true:
        text.insert(draw.randint(0, len(text)), letter)
    number = 100 + 10 * len(true)
    labels = {"multi_label": "|".join(true), "regression": str(number)}
    return "".join(text), labels[kind]


def write_splits(folder: Path, **rows: list[Row]) -> Path:
    data = folder / "data"
    data.mkdir()
    for split, its_rows in rows.items():
        with (data / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *its_rows])
    return data


def settings_of(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    draw = random.Random(0)  # noqa: S311 -- texts are no secret
    sizes = {"train": 300, "dev": 60, "test": 60}
    rows = {
        split: [marked_row(draw, kind) for _ in range(size)]
        for split, size in sizes.items()
    }
    told = {"level": "O0", "lr": 1e-2, "epochs": 6, "mask_tokens": 0.0} | more
    return small_settings(folder, write_splits(folder, **rows), **KINDS[kind], **told)


@pytest.fixture(scope="module", params=["multi_label", "regression"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return settings_of(tmp_path_factory.mktemp(kind), kind) | {"kind": kind}


@pytest.fixture(scope="module")
def finished(trained: dict[str, Any]) -> Any:
    return run({name: value for name, value in trained.items() if name != "kind"})


def test_it_learns(kind: str, finished: Any) -> None:
    """Law: labels that letters tell are learned; the report has no confusion."""
    score = {"multi_label": "micro_f1", "regression": "spearman"}[kind]
    assert finished.summary["best_by"] == score
    assert finished.summary["test"][score] > 0.85
    assert not any(line.startswith("WARNING") for line in finished.findings)
    assert (finished.folder.path / "report.html").exists()


def test_the_saved_model_scores_as_reported(
    kind: str, trained: dict[str, Any], finished: Any
) -> None:
    """Law: transformers loads the model, and its predictions have the reported score.

    With the thresholds, or the mean and the scale, that its config holds.
    """
    folder = finished.folder.model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.problem_type == TASKS[kind].problem_type
    with (Path(trained["data"]) / "test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    nothing = EncodedTexts.build([]), np.arange(0)
    found = TASKS[kind].predictions(logits, model.config, *nothing)
    reported = finished.summary["test"]
    if kind == "regression":
        truth = [float(row["label"]) for row in rows]
        values = [each["value"] for each in found]
        assert reported["spearman"] == pytest.approx(
            scipy.stats.spearmanr(values, truth)[0], abs=1e-3
        )
        errors = np.array(values) - truth
        rmse = float(np.sqrt(np.square(errors).mean()))
        assert reported["rmse"] == pytest.approx(rmse, rel=1e-3)
        return
    sets = [
        [[letter in labels for letter in SHARES] for labels in every]
        for every in (
            [row["label"].split("|") for row in rows],
            [each["labels"] for each in found],
        )
    ]
    assert not all(map(any, sets[0]))  # some texts have no label
    micro = sklearn.metrics.f1_score(*sets, average="micro")
    assert reported["micro_f1"] == pytest.approx(micro)


def test_micro_batches_change_nothing(kind: str, tmp_path: Path) -> None:
    """Law: a step has the same loss in one micro-batch and in three."""
    losses = []
    for accumulate in (1, 3):
        folder = tmp_path / str(accumulate)
        folder.mkdir()
        short = {"accumulate": accumulate, "max_steps": 4, "dropout": 0.0, "lr": 1e-3}
        result = run(settings_of(folder, kind, **short))
        losses.append([step["loss"] for step in steps_of(result.folder.records())])
    assert len(losses[0]) == 4
    # Adam divides by the gradient's size, so that rounding grows over four steps.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_useless_model_is_reported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a model that predicts the same for all texts is found, and what to do.

    Here each text is one character of its own, which no model can know.
    """
    labels = {"class": "ab", "multi_label": ("a", "b"), "regression": "19"}[kind]
    rows = [(chr(0x4E00 + i), labels[i % 2]) for i in range(60)]
    data = write_splits(tmp_path, train=rows[:40], dev=rows[40:])
    result = run(small_settings(tmp_path, data, max_steps=2, **KINDS[kind]))
    finding = result.findings[0]  # the doctor's, of speed perhaps, come after it
    assert finding.startswith("WARNING: the model is useless: it predicts ")
    assert "--epochs" in finding
    said = [line for line in capsys.readouterr().out.splitlines() if "dev loss" in line]
    assert all("WARNING: the model predicts" in line for line in said)
    events = [r for r in RunFolder(result.folder.path).records() if "event" in r]
    assert events
    assert all(event["constant"] for event in events)
    assert json.loads((result.folder.path / "summary.json").read_text())
