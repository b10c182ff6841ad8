"""`halfstep compare`: its runs are those of `halfstep train`; what it prints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import refused_command
from small_training import small_and_measured, write_letters, write_marked

from halfstep import cli
from halfstep.train.run import run


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_and_measured(patch)
        yield


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings_file(folder: Path, task: str, **more: Any) -> dict[str, Any]:
    path = folder / "letters.json"
    if task == "ner":
        path = write_marked(folder, 60)
    else:
        write_letters(path, 60)
    settings = {
        "task": task,
        "data": str(path),
        "model": "mini",
        "epochs": 2,
        "batch_size": 16,
        "dropout": 0.0,  # a run draws other masks
        **more,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (folder / "compare.toml").write_text("\n".join(lines), encoding="utf-8")
    return settings


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("classify", {}),
        ("ner", {"accumulate": 3, "best_by": "loss", "freeze": "*.bias"}),
    ],
)
def test_runs_are_those_of_train(
    task: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Law: losses and score in fp32 are those of `halfstep train` with the seed."""
    settings = settings_file(tmp_path, task, **more)
    words = ("compare", "--train", "compare.toml", "--levels", "O1", "--seeds", "2")
    assert cli.run([*words, "--out", "pairs"]) == 0
    stored = (tmp_path / "pairs" / "runs.jsonl").read_text(encoding="utf-8")
    data = json.loads(stored.splitlines()[0])["run"]
    own = {"level": "O0", "out": str(tmp_path / "run"), "eval_every": 1000}
    summary = run(settings | own).summary
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in lines.splitlines()]
    losses = [record["loss"] for record in records if "event" not in record]
    assert data["losses"] == pytest.approx(losses, rel=1e-5)
    score = more.get("best_by", "macro_f1")
    assert data["metric"] == pytest.approx(summary["dev"][score], rel=1e-5)


def test_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a line a run as it ends, then tables; a page and, on request, JSON."""
    settings_file(tmp_path, "classify", level="O3", keep=1, best_by="loss")
    words = ("compare", "--train", "compare.toml", "--levels", "O2:split")
    more = ("--seeds", "2", "--margin", "0.5", "--json", "result.json")
    assert cli.run([*words, *more]) == 0
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in err.splitlines()] == [
        *("seed 0 (1 of 2), O0", "seed 0 (1 of 2), O0", "seed 0 (1 of 2), O2"),
        *("seed 1 (2 of 2), O0", "seed 1 (2 of 2), O2", "seed 1 (2 of 2), O0"),
    ]
    assert "equivalent within 0.5" in out
    assert "settings of compare.toml without effect here: level, keep" in out
    assert out.endswith("report: runs/compare/report.html\n")
    assert "<svg" in (tmp_path / "runs/compare/report.html").read_text("utf-8")
    data = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert data["verdicts"]["O2:split"]["kind"] == "equivalent"
    # The same command goes on there, and --json - prints JSON alone.
    assert cli.run([*words, "--seeds", "2", "--margin", "0.5", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert err.count("from an earlier call") == 6
    assert json.loads(out) == data
    settings_file(tmp_path, "classify", lr=0.1, best_by="loss")
    assert cli.run([*words, "--seeds", "2"]) == 0
    assert "from an earlier call" not in capsys.readouterr().err


def test_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: Ctrl-C leaves the finished runs, says how to go on, and exits with 130."""
    settings_file(tmp_path, "classify", max_steps=2)
    real, calls = torch.optim.AdamW.__init__, []

    def interrupting(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        real(*args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", interrupting)
    words = ("compare", "--train", "compare.toml", "--levels", "O1", "--seeds", "2")
    assert cli.run(words) == 130
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == (
        "halfstep: error: interrupted; the same command continues after the last "
        "finished run"
    )
    finished = err.count("seed ")
    assert finished > 0
    assert cli.run(words) == 0
    assert capsys.readouterr().err.count("from an earlier call") == finished


def test_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: an unusable flag is one line, with status 2, before anything is trained."""
    line = refused_command(capsys, "compare", "--train", "none.toml")
    assert line.startswith("--train none.toml cannot be read: No such file or ")
