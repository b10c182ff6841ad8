"""Live objects in, findings out: what `hs.diagnose` knows of a program that runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from collections.abc import Callable

RATES = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant rates: to measure them is not what is tested here."""
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: RATES)


def rules(found: hs.diagnostics.step_diagnosis.Diagnosis) -> set[str]:
    """Return the names of the rules that found something."""
    return {each.rule for each in found.findings}


def by_hand(
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    lr: float = 1e-3,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return a program without a session: its parts, and its step."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    x = torch.randn(32, 64, dtype=dtype)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(x).float().square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
            return
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return parts, step


@pytest.mark.parametrize(("lr", "swamped"), [(1e-6, True), (1.0, False)])
def test_lost_updates_of_low_weights(lr: float, swamped: bool) -> None:
    """Law: updates too small for bf16 weights are counted, and told of."""
    parts, step = by_hand(torch.bfloat16, lr=lr)
    found = hs.diagnose(step, **parts)
    assert ("swamped updates" in rules(found)) == swamped
    (lost,) = found.facts.lost
    assert (lost.share > 0.9) if swamped else (lost.share < 0.05)


@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_were_none_are_not_lost(fused: bool) -> None:
    """Law: neither a rate of 0 nor an overflow counts; the next update does."""
    parts, step = by_hand(torch.bfloat16, lr=1.0)
    optimizer, calls = parts["optimizer"], []
    optimizer.param_groups[0]["fused"] = fused

    def warm() -> None:
        calls.append(1)
        first = len(calls) == 1
        optimizer.param_groups[0]["lr"] = 0.0 if first and not fused else 1.0
        if fused:  # as torch's scaler does
            optimizer.found_inf = torch.tensor(float(first))
            optimizer.grad_scale = None
        step()

    found = hs.diagnose(warm, **parts)
    assert "swamped updates" not in rules(found)
    (lost,) = found.facts.lost
    assert lost.share < 0.05


def test_counting_leaves_no_trace() -> None:
    """Law: the optimizer has no hooks left, whether the step succeeds or not."""
    parts, step = by_hand(torch.bfloat16)
    hs.diagnose(step, **parts)
    optimizer = parts["optimizer"]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    assert not any(hooks)

    def fail() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        hs.diagnose(fail, **parts)
    assert not any(hooks)


def test_low_weights_under_o1() -> None:
    """Law: weights that are low where the level keeps them in fp32 are told of."""
    parts, step = by_hand(torch.bfloat16, autocast=torch.bfloat16)
    assert "weights already low" in rules(hs.diagnose(step, **parts, level="O1"))
    parts, step = by_hand(autocast=torch.bfloat16)
    found = hs.diagnose(step, **parts)
    assert found.facts.config.level == "O1"
    assert "weights already low" not in rules(found)


def session(level: str, dtype: str, **options: Any) -> hs.Session:
    """Return a small session."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    return hs.prepare(model, optimizer, level=level, dtype=dtype, **options)


def stepping(of: hs.Session) -> Callable[[Tensor], hs.StepReport]:
    """Return what makes one step of a session."""

    def step(x: Tensor) -> hs.StepReport:
        with of.autocast():
            loss = of.model(x).float().square().mean()
        of.backward(loss)
        return of.step()

    return step


@pytest.mark.parametrize(
    ("level", "dtype", "scale", "word"),
    [
        ("O0", "fp32", "auto", "none"),
        ("O1", "bf16", "auto", "none"),
        ("O2", "fp16", "auto", "dynamic"),
        ("O2", "fp16", 128.0, "128"),
        ("O2", "fp16", "measured", "measured"),
    ],
)
def test_a_session_tells_of_itself(
    level: str, dtype: str, scale: str | float, word: str
) -> None:
    """Law: level, format and loss scale are the session's; batches are fetched."""
    of = session(level, dtype, loss_scale=scale)
    found = hs.diagnose(stepping(of), session=of, batches=[torch.randn(8, 64)])
    config = found.facts.config
    assert (config.level, config.dtype, config.device) == (level, dtype, "cpu")
    assert config.loss_scale == word
    assert config.accumulate == 1
    assert not {"no loss scale", "needless loss scale"} & rules(found)
    assert of.steps_applied + of.steps_skipped == 3 + 3 + 3


def test_a_session_tells_what_it_lost() -> None:
    """Law: lost updates are those that the session counted."""
    of = session("O3", "bf16")
    of.count_rounding_loss(every=1)
    found = hs.diagnose(stepping(of), session=of, batches=[torch.randn(8, 64)])
    (lost,) = found.facts.lost
    (counted,) = of.lost_updates()
    assert (lost.step, lost.share) == (counted.step, counted.share)


def test_what_it_says() -> None:
    """Law: text, tables and data tell the same findings, worst first."""
    parts, step = by_hand(autocast=torch.float16)
    found = hs.diagnose(step, **parts)
    findings, times = found.tables()
    named = [row["rule"] for row in findings.data()["rows"]]  # type: ignore[attr-defined]
    assert named == [each.rule for each in found.findings]
    assert [each["rule"] for each in found.data()["findings"]] == named
    assert json.loads(json.dumps(found.data()))["profile"]["dtype"] == "fp16"
    assert "no loss scale" in str(found)
    assert "addmm" in times.text()
    assert "numbers read out of tensors" in times.text()
    alone, _ = hs.diagnose(step).tables()
    assert any("not checked" in note for note in alone.notes)
    assert str(found).startswith("this program: O1 fp16 on cpu: 1 error")
    assert "those of halfstep train" in str(found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "fp8"}, "dtype='fp8' is not a format"),
        ({"dtype": 5}, "dtype=5 is not a format"),
        ({"level": "O9"}, "level='O9' is not a level"),
        ({"level": 2}, "level=2 is not a level"),
        ({"device": "gpu"}, "device='gpu' must be that of a device here"),
        ({"device": "meta"}, "device='meta' must be that of a device here"),
        ({"device": 1.5}, "device=1.5 must be that of a device here"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"steps": "3"}, "steps='3' must be a whole number of at least 1"),
        ({"warmup": None}, "warmup=None must be a whole number of at least 0"),
        ({"profiled": 1.5}, "profiled=1.5 must be a whole number of at least 1"),
        ({"batches": 5}, "batches is of type int; it must be a collection of batches"),
        ({"session": "a"}, "session is of type str; it must be a halfstep.Session"),
        ({"model": "a"}, "model is of type str; it must be a torch.nn.Module"),
        ({"optimizer": "a"}, "optimizer is of type str; it must be a torch.optim.Opt"),
        ({"scaler": "a"}, "scaler is of type str; it must be a GradScaler"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    """Law: what cannot be used is refused by name before any step is made."""
    calls: list[int] = []
    with pytest.raises(UserError, match=f"^{words}"):
        hs.diagnose(lambda: calls.append(1), **given)
    assert not calls


def test_a_step_that_is_none() -> None:
    """Law: a step is a function."""
    with pytest.raises(UserError, match=r"^step is of type int; it must be a function"):
        hs.diagnose(5)  # type: ignore[arg-type]


def lacked(found: hs.diagnostics.step_diagnosis.Diagnosis) -> dict[str, str]:
    """Return the rules that had nothing to look at, and why."""
    return {
        rule: each.why
        for each in found.examination.not_evaluated
        for rule in each.rules
    }


def test_what_it_lacks_can_be_given() -> None:
    """Law: only what an argument of the call would have told is missed, by its name."""
    _, step = by_hand(torch.bfloat16)
    assert lacked(hs.diagnose(step)) == {
        "swamped updates": "updates were not counted (optimizer=)",
        "no masters": "the level is not known (level=)",
        "gradients summed low": "the level is not known (level=)",
        "weights already low": "the level is not known (level=)",
    }
    told = lacked(hs.diagnose(step, level="O1"))
    assert told == {"weights already low": "the weights are not known (model=)"}
    parts, step = by_hand(torch.bfloat16)
    assert lacked(hs.diagnose(step, **parts, level="O3")) == {}


def test_what_a_session_lacks() -> None:
    """Law: a session is told how to count; all else it tells of itself."""
    of = session("O3", "bf16")
    found = hs.diagnose(stepping(of), session=of, batches=[torch.randn(8, 64)])
    why = "updates were not counted (session.count_rounding_loss(every=1))"
    assert lacked(found) == {"swamped updates": why}
    assert "metrics.jsonl" not in str(found)
