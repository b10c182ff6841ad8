"""Steps that overflow: reported, without effect, run again, and not for ever."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_training import (
    interrupt_before,
    overflow_in,
    small_settings,
    steps_of,
    write_letters,
)
from torch import Tensor

import halfstep as hs
from halfstep import LossScaleCollapse
from halfstep.nonfinite.origin import BadOp
from halfstep.scaling.collapse import LossHistory
from halfstep.train import replay_step
from halfstep.train.loop import Trainer
from halfstep.train.output import html_report
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.run import run
from halfstep.train.signals import Diverged
from halfstep.train.step_dataset import StepBatch
from halfstep.train.tasks import SplitOutputs

pytestmark = pytest.mark.usefixtures("small_runs")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    source = write_letters(tmp_path, 100, "abcx", "defx")
    return small_settings(tmp_path, source, lr=3e-3, epochs=10)


def records_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return RunFolder(Path(settings["out"])).records()


def events(settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [r for r in records_of(settings) if r.get("event") == "bad_op"]


@pytest.mark.parametrize("kind", ["O0 auto", "O2 fp16"])
def test_a_skipped_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Law: it is reported by name; a scale that moves halves; the schedule waits."""
    overflow_in(monkeypatch, 5)
    level, dtype = kind.split()
    run(settings | {"level": level, "dtype": dtype, "epochs": 2})
    steps = steps_of(records_of(settings))
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
    page = Mock(return_value="<html></html>")
    monkeypatch.setattr(html_report, "page", page)
    # At this rate nothing is learned, so the first evaluation is the best.
    more = {"lr": 1e-12, "eval_every": 2, "best_by": "accuracy", "epochs": 2}
    overflow_in(monkeypatch, 4, 6, 8, 10, 11)
    result = run(settings | more | {"level": "O1", "dtype": "fp16"})
    assert (result.summary["best_step"], result.summary["skipped"]) == (2, 5)
    (report,) = page.call_args.args
    said = [each.measured for each in report.findings]
    assert any(words.startswith("5 of 12 steps were skipped") for words in said)


def spoil(monkeypatch: pytest.MonkeyPatch, *steps: int, factor: float) -> None:
    clean = Trainer.micro_batch_loss

    def loss(self: Trainer, part: dict[str, Tensor]) -> Tensor:
        names = {name for name, _ in self.session.model.named_modules()}
        path = next(n for n in sorted(names) if n.endswith("output.dense"))
        module = self.session.model.get_submodule(path)
        forward = type(module).forward
        bad = self.state.step + 1 in steps
        if bad:
            module.forward = lambda x: forward(module, x) * factor
        try:
            return clean(self, part)
        finally:
            vars(module).pop("forward", None)

    monkeypatch.setattr(Trainer, "micro_batch_loss", loss)


@pytest.mark.parametrize(("kind", "accumulate"), [("O1 fp16", 1), ("O2 bf16", 2)])
def test_a_step_that_failed_is_told(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    accumulate: int,
) -> None:
    """Law: a loss that is not finite is traced to module and operation, at once.

    The run goes on as if nobody had looked: its other steps are the same to the bit.
    """
    level, dtype = kind.split()
    spoil(monkeypatch, 4, 5, 9, factor=math.inf)
    more = {"level": level, "dtype": dtype, "epochs": 2, "accumulate": accumulate}
    watched = run(settings | more).folder.records()
    told = events(settings)
    assert [event["step"] for event in told] == [4, 9]
    for event in told:
        bad = BadOp.from_data(event)
        assert bad.module.endswith("output.dense")
        assert bad.op == "mul"
        assert bad.reproduced
    watcher = replay_step.SkipWatcher
    monkeypatch.setattr(watcher, "should_replay", lambda *_, **__: False)
    out = {"out": settings["out"] + "2"}
    alone = run(settings | more | out).folder.records()
    keep = ("step", "loss", "scale", "skipped", "grad_norm")
    plain = [
        [{k: r[k] for k in keep} for r in each if "event" not in r]
        for each in (watched, alone)
    ]
    assert plain[0] == plain[1]


def test_fifty_skips_end_a_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where no scale can fall, fifty in a row do; all others are on record."""
    overflow_in(monkeypatch, *range(3, 99))
    with pytest.raises(LossScaleCollapse, match=r"^50 steps in a row were skipped"):
        run(settings | {"level": "O2", "dtype": "bf16", "epochs": 20})
    steps = steps_of(records_of(settings))
    assert [r["skipped"] for r in steps] == [False, False, *[True] * 49]


def test_a_collapse_carries_the_operation(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the error that ends a run names module and operation, and is on record.

    Halving 2**16 sixteen times has led to 1.
    """
    spoil(monkeypatch, *range(3, 99), factor=1e6)
    with pytest.raises(LossScaleCollapse, match=r"^17 steps in a row were") as caught:
        run(settings | {"level": "O1", "dtype": "fp16"})
    steps = steps_of(records_of(settings))
    assert [r["skipped"] for r in steps] == [False, False, *[True] * 16]
    bad = caught.value.bad_op
    assert bad is not None
    assert bad.module.endswith("output.dense")
    assert str(bad) in str(caught.value)
    assert caught.value.cause == bad.cause
    told = events(settings)
    assert told[-1]["step"] == bad.step
    assert BadOp.from_data(told[-1]) == bad


def test_a_divergence_carries_what_the_last_batch_shows(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the model's loss on dev is not a number, its weights are looked at."""
    collect = Trainer.collect_outputs

    def ruin(self: Trainer, split: str) -> SplitOutputs:
        named = dict(self.session.model.named_parameters())
        name = next(name for name in named if name.endswith("dense.weight"))
        with torch.no_grad():
            named[name].view(-1)[0] = math.nan
        return collect(self, split)

    monkeypatch.setattr(Trainer, "collect_outputs", ruin)
    with pytest.raises(Diverged) as caught:
        run(settings | {"level": "O0", "epochs": 1})
    bad = caught.value.bad_op
    assert bad is not None
    assert bad.cause == "weight"
    assert str(bad) in str(caught.value)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_resumed_run_is_not_young(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, resumed: bool
) -> None:
    """Law: what overflows soon after a run was resumed is not laid to its start."""
    given = settings | {"level": "O1", "dtype": "fp16"}
    cut_at = 25 if resumed else 0
    if resumed:
        interrupt_before(monkeypatch, cut_at + 1)
        with pytest.raises(KeyboardInterrupt):
            run(given | {"eval_every": 5})
        given = {"out": given["out"]}
    # By its second step, the loss of a new run has not fallen yet.
    first = cut_at + (3 if resumed else 12)
    spoil(monkeypatch, *range(first, 99), factor=1e6)
    histories, find = [], replay_step.replay

    def found(*args: Any, losses: LossHistory, **more: Any) -> BadOp | None:
        histories.append(losses)
        return find(*args, losses=losses, **more)

    monkeypatch.setattr(replay_step, "replay", found)
    with pytest.raises(LossScaleCollapse) as caught:
        run(given, resume=resumed)
    assert all(math.isnan(losses.first) == resumed for losses in histories)
    bad = caught.value.bad_op
    assert bad is not None
    # The loss had fallen: not the learning rate in any case.
    assert bad.cause == "forward range"


def test_a_replay_that_fails_ends_no_run(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the run goes on with a warning, and no hardware is accused."""
    spoil(monkeypatch, 4, factor=math.inf)
    full = Mock(side_effect=RuntimeError("out of memory"))
    monkeypatch.setattr(replay_step, "find_nonfinite", full)
    with pytest.warns(UserWarning, match="step 4 failed, and could not .* of memory"):
        result = run(settings | {"level": "O0", "epochs": 1})
    assert not events(settings)
    assert result.folder.records()[-1]["step"] > 4


@pytest.mark.filterwarnings("ignore:level O. with dtype fp16")
@pytest.mark.parametrize(("level", "told"), [("O3", True), ("O2", False)])
def test_the_sum_of_micro_batches_is_looked_at(level: str, *, told: bool) -> None:
    """Law: fp16 gradients that overflow as they are added up are told; masters' none.

    Each of the micro-batches is finite by itself: that is no fault of hardware.
    """
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    more: dict[str, Any] = {"loss_scale": 1.0, "accumulate": 4}
    session = hs.prepare(model, optimizer, level, dtype="fp16", **more)
    part = {"x": torch.ones(1, 4)}
    work = StepBatch(3, 0, [part] * 4, [True] * 4, 4, 1.0, 4, 4)

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        with session.autocast():
            return (session.model(part["x"]) * 3e4).float().sum()

    seeded: list[int] = []
    how: dict[str, Any] = {"scale": 1.0, "losses": LossHistory(), "failed": told}
    seed = lambda: seeded.append(1)  # noqa: E731
    bad = replay_step.replay(session, work, loss_of, seed, **how)
    assert seeded
    assert (bad is not None) == told
    if bad is not None:
        assert (bad.module, bad.op, bad.cause) == ("model", "add", "backward range")
        assert "of 4 micro-batches are finite, up to 3.0e+04" in bad.evidence
        assert bad.step == 3


def test_when_a_step_is_run_again() -> None:
    """Law: once in a row of skips; at once where no smaller scale can help."""
    watcher = replay_step.SkipWatcher()
    good, skip = {"skipped": False, "loss": 1.0}, {"skipped": True, "loss": 1.0}
    rows = [skip] * 7 + [good] + [skip] * 5 + [good]
    due = [watcher.should_replay(row, is_dynamic=True) for row in rows]
    assert [place for place, is_due in enumerate(due) if is_due] == [4, 12]
    assert watcher.losses.applied == 2
    worse = skip | {"loss": math.nan}
    due = [watcher.should_replay(worse, is_dynamic=True) for _ in range(3)]
    assert due == [True, False, False]
    assert not watcher.should_replay(good, is_dynamic=False)
    due = [watcher.should_replay(skip, is_dynamic=False) for _ in range(3)]
    assert due == [True, False, False]
    watcher.replays_left = 0
    watcher.should_replay(good, is_dynamic=False)
    assert not watcher.should_replay(skip, is_dynamic=False)
