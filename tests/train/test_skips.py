"""Steps that overflow: reported by name, without effect, and not for ever."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import (
    same,
    small_settings,
    steps_of,
    write_letters,
)
from torch import Tensor

from halfstep import LossScaleCollapse
from halfstep.train.loop import Trainer
from halfstep.train.output import html_report
from halfstep.train.run import run

pytestmark = pytest.mark.usefixtures("small_runs")

CULPRIT = "classifier.weight"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of twelve steps on texts whose characters tell their class."""
    source = write_letters(tmp_path, 100, "abcx", "defx")
    return small_settings(tmp_path, source, lr=3e-3, epochs=2)


def train(settings: dict[str, Any], kind: str, **more: Any) -> list[dict[str, Any]]:
    """Train; return the records of the steps."""
    level, dtype = kind.split()
    result = run(settings | {"level": level, "dtype": dtype} | more)
    return steps_of(result.folder.records())


def clone(state: Any) -> Any:
    """Return a deep copy of a nested state."""
    if isinstance(state, dict):
        return {key: clone(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [clone(value) for value in state]
    return state.clone() if isinstance(state, Tensor) else state


def poison(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the loss of some optimizer steps inf."""
    clean = Trainer.micro_batch_loss

    def loss(self: Trainer, part: dict[str, Tensor]) -> Tensor:
        bad = self.state.step + 1 in steps
        return clean(self, part) * (math.inf if bad else 1.0)

    monkeypatch.setattr(Trainer, "micro_batch_loss", loss)


@pytest.mark.parametrize("kind", ["O0 auto", "O1 fp16", "O2 fp16", "O2 bf16"])
def test_an_overflow_in_one_gradient(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Law: a step with inf in a gradient is reported by name and changes nothing.

    Weights, 16-bit and masters, optimizer state and its counters stay to the bit; the
    scale halves where it moves; the schedule stands still.
    """
    seen: dict[int, dict[str, Any]] = {}
    step, loss, bad = Trainer.train_step, Trainer.micro_batch_loss, 5
    planted: list[int] = []

    def snapshot(trainer: Trainer) -> dict[str, Any]:
        state = trainer.session.state_dict()
        stored = dict(trainer.session.model.named_parameters())
        state["stored"] = {name: p.detach() for name, p in stored.items()}
        for group in state["optimizer"]["param_groups"]:
            group.pop("lr")  # set anew at the start of each step
        return clone(state)  # type: ignore[no-any-return]

    def watched(self: Trainer, work: Any, *rest: Any) -> dict[str, Any]:
        seen[work.number] = snapshot(self)
        record = step(self, work, *rest)
        seen[work.number + 1] = snapshot(self)
        return record

    def hooked(self: Trainer, part: dict[str, Tensor]) -> Tensor:
        if self.state.step + 1 == bad and not planted:  # a replay plants no more
            planted.append(bad)
            weight = dict(self.session.model.named_parameters())[CULPRIT]
            handle = weight.register_hook(partial(torch.mul, other=math.inf))  # type: ignore[no-untyped-call]
            weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: handle.remove()
            )
        return loss(self, part)

    monkeypatch.setattr(Trainer, "train_step", watched)
    monkeypatch.setattr(Trainer, "micro_batch_loss", hooked)
    steps = train(settings, kind)
    assert [record["step"] for record in steps if record["skipped"]] == [bad]
    spoilt, after = steps[bad - 1], steps[bad]
    assert spoilt["found_inf_in"] == [CULPRIT]
    assert after["lr"] == spoilt["lr"]
    assert steps[bad + 1]["lr"] != after["lr"]
    before, then = seen[bad], seen[bad + 1]
    for part in ("weights", "stored", "optimizer"):
        assert same(before[part], then[part]), part
        assert not same(then[part], seen[bad + 2][part]), part
    attempted, skipped = before["steps"].values()
    assert then["steps"] == {"attempted": attempted + 1, "skipped": skipped + 1}
    moves = kind.endswith("fp16")
    assert after["scale"] == spoilt["scale"] / (2 if moves else 1)
    assert then["scales"][""]["skips_in_a_row"] == 1
    assert seen[bad + 2]["scales"][""]["skips_in_a_row"] == 0


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
    poison(monkeypatch, 4, 6, 8, 10, 11)
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
    poison(monkeypatch, *range(3, 99))
    with pytest.raises(
        LossScaleCollapse, match=f"^{skips} steps in a row were skipped"
    ):
        train(settings, kind, epochs=20)
    lines = (Path(settings["out"]) / "metrics.jsonl").read_text().splitlines()
    steps = [r for r in map(json.loads, lines) if "event" not in r]
    assert [r["skipped"] for r in steps] == [False, False, *[True] * (skips - 1)]
