"""Steps that overflow: reported by name, without effect, and not for ever."""

import json
from pathlib import Path
from typing import Any

import pytest
from small_training import overflow_in, small_settings, steps_of, write_letters

from halfstep import LossScaleCollapse
from halfstep.train.output import html_report
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    source = write_letters(tmp_path, 100, "abcx", "defx")
    return small_settings(tmp_path, source, lr=3e-3, epochs=2)


def train(settings: dict[str, Any], kind: str, **more: Any) -> list[dict[str, Any]]:
    level, dtype = kind.split()
    result = run(settings | {"level": level, "dtype": dtype} | more)
    return steps_of(result.folder.records())


@pytest.mark.parametrize("kind", ["O0 auto", "O2 fp16"])
def test_a_skipped_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Law: it is reported by name; a scale that moves halves; the schedule waits."""
    overflow_in(monkeypatch, 5)
    steps = train(settings, kind)
    assert [record["step"] for record in steps if record["skipped"]] == [5]
    spoilt, after, then = steps[4:7]
    assert len(spoilt["found_inf_in"]) == 3
    assert spoilt["skipped_total"] == then["skipped_total"] == 1
    assert spoilt["lr"] == after["lr"] != then["lr"]
    assert after["scale"] == spoilt["scale"] / (2 if kind.endswith("fp16") else 1)


def test_the_report_speaks_of_the_whole_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: steps that were skipped after the best checkpoint count in the findings."""
    told: list[html_report.ReportData] = []

    def keep(one: html_report.ReportData) -> str:
        told.append(one)
        return "<html></html>"

    monkeypatch.setattr(html_report, "page", keep)
    # At this rate nothing is learned, so the first evaluation is the best.
    more = {"lr": 1e-12, "eval_every": 2, "best_by": "accuracy"}
    overflow_in(monkeypatch, 4, 6, 8, 10, 11)
    result = run(settings | more | {"level": "O1", "dtype": "fp16"})
    assert (result.summary["best_step"], result.summary["skipped"]) == (2, 5)
    (one,) = told
    said = [words for card in one.cards for _, words in card.lines]
    assert any(words.startswith("5 of 12 steps were skipped") for words in said)


@pytest.mark.parametrize(("kind", "skips"), [("O2 bf16", 50), ("O1 fp16", 17)])
def test_a_run_that_always_overflows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, skips: int
) -> None:
    """Law: too many skips in a row end the run; those before the last are on record.

    Fifty are too many; and fewer where halving 2**16 sixteen times has led to 1.
    """
    overflow_in(monkeypatch, *range(3, 99))
    message = f"^{skips} steps in a row were skipped"
    with pytest.raises(LossScaleCollapse, match=message):
        train(settings, kind, epochs=20)
    lines = (Path(settings["out"]) / "metrics.jsonl").read_text().splitlines()
    steps = [r for r in map(json.loads, lines) if "event" not in r]
    assert [r["skipped"] for r in steps] == [False, False, *[True] * (skips - 1)]
