"""What a session says: names, refusals and its table."""

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from messages import Worded
from session_cases import build, network
from torch import nn

import halfstep as hs
from halfstep.machine import hardware
from halfstep.masters import cpu_kernels
from halfstep.policy.levels import LEVELS
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def go(session: Session) -> StepReport:
    with session.autocast():
        loss = session.model(torch.ones(4, 6)).float().square().mean()
    session.backward(loss)
    return session.step()


def test_complex_gradients_have_a_norm() -> None:
    """Law: a complex gradient counts with both its parts."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([1 + 1j]))])
    session = hs.prepare(model, optimizer_of(model), "O0", clip_grad_norm=math.inf)
    session.backward((model[0] * (3 - 4j)).real.sum())
    assert session.step().grad_norm == 5.0


@pytest.mark.parametrize("named", [True, False])
def test_names(named: bool) -> None:
    """Law: reports use the names given, then the model's, then the optimizer's.

    A parameter that the model got after `prepare` is named, too. One that no module
    has goes by the optimizer's name for it, or by its place there.
    """
    model, outside = network(), nn.Linear(2, 3)
    options = {"named_parameters": [("w", model[0].weight)]} if named else {}
    params = [*model.named_parameters(), *outside.named_parameters(prefix="teacher")]
    if not named:
        params = [param for _, param in params]
    made = torch.optim.SGD(params, 0.05)
    session = hs.prepare(model, made, "O2", dtype="bf16", **options)
    model.append(nn.Linear(3, 1).bfloat16())
    late = model[-1].bias
    made.add_param_group({"params": [("late", late) if named else late]})
    weights = model[0].weight, model[3].bias, outside.weight, late
    with session.autocast():
        loss = sum((weight.float() * math.inf).sum() for weight in weights)
    session.backward(loss)
    names = ("w", "teacher.weight") if named else ("0.weight", "group 0 parameter")
    first, second, third, last = session.step().found_inf_in
    assert (first, second, last) == (names[0], "3.bias", f"{len(model) - 1}.bias")
    assert third.startswith(names[1])


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: "auto" is what the machine recommends, with its reason."""
    advice = hardware.Recommendation("O2", "bf16", "measured")
    monkeypatch.setattr(hardware, "recommend", lambda _: advice)
    model = network()
    session = hs.prepare(model, optimizer_of(model))
    assert (str(session.choice), session.choice.reason) == ("O2 bf16", "measured")
    assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("level", "width", "rows", "is_small"),
    [
        ("auto", 64, 8, True),
        ("auto", 64, 65536, False),  # 9.7 ms of matmuls, half of them saved
        ("auto", 512, 8, False),  # an update of 262,144 weights
        ("O2", 64, 8, False),
    ],
)
def test_a_model_too_small_to_gain(
    level: str, width: int, rows: int, is_small: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: where the machine chose 16 bits, and the model cannot gain, it is said once.

    The tests' rates are 1 TFLOP/s in fp32, 2 in bf16.
    """
    embed = nn.Embedding(9, width)
    layers = nn.Linear(width, width), nn.Conv1d(1, 4, 3), nn.Linear(width - 2, 1)
    model = nn.Sequential(embed, *layers)
    session = hs.prepare(model, optimizer_of(model), level)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            with session.autocast():
                batch = torch.zeros(rows, 1, dtype=torch.int64)
                loss = session.model(batch).float().mean()
            session.backward(loss)
            session.step()
    said = [each for each in caplog.messages if "level='auto' chose O2 bf16" in each]
    assert len(said) == is_small
    # (64 * 64 + 4 * 3 * 62 + 4 * 62) * 8 multiply-adds; three passes of two operations.
    assert all("take only 0.244 us of a step in fp32" in each for each in said)


def test_emulation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a format that this machine is slow in is warned of, once."""
    monkeypatch.setattr(hardware, "emulation_warning", lambda *_: "slow here")
    with pytest.warns(UserWarning, match="^slow here$"):
        build("O1 fp16")


@pytest.mark.parametrize("level", LEVELS)
def test_float64_weights(level: str) -> None:
    """Law: a level with 16 bits warns, and explains, that it does not cast them."""
    model = nn.Linear(2, 2).double()
    with warnings.catch_warnings(record=True, action="always") as caught:
        table = hs.prepare(model, optimizer_of(model), level).explain()
    said = any(str(each.message) in table.notes[0] for each in caught)
    assert (said, table.rows[0][4]) == (level != "O0", "float64")


def test_explain() -> None:
    """Law: one row for each type of module, as stored and run at O2, and why."""
    policy = hs.Policy((hs.Rule("module", "3", "fp32", "my logits"),))
    session = build("O2 bf16", policy=policy)
    seen = session.explain()
    assert seen.columns == ("module", "count", "parameters", "stored", "runs in", "why")
    rows = {(row[0], row[3]): row for row in seen.rows}
    assert rows.keys() == {
        ("Linear", "bf16"),
        ("Linear", "fp32"),
        ("LayerNorm", "fp32"),
    }
    # 6 * 16 + 16, 16 * 3 + 3 and 2 * 16 numbers.
    assert rows["Linear", "bf16"][1:5] == (1, 112, "bf16", "bf16")
    assert rows["Linear", "fp32"][1:5] == (1, 51, "fp32", "fp32")
    assert rows["LayerNorm", "fp32"][1:4] == (1, 32, "fp32")
    assert seen.notes == (
        "level O2 bf16: level O2 was asked for",
        "policy: torch + module:3=fp32 + type:RMSNorm=fp32",
        "master weights of 112 numbers: fp32, exact",
        f"update: SGD in one pass over memory: {cpu_kernels.describe()}",
        "loss scale: 1, fixed",
    )
    moving = build("O1 fp16").explain()
    assert moving.notes[-1] == "loss scale: 65536, dynamic"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.SGD, "SGD's own step"),
        (
            torch.optim.AdamW,
            "AdamW's own step; fused=True makes it one pass over memory",
        ),
        (partial(torch.optim.Adam, fused=True), "Adam's own step"),
    ],
)
def test_own_step(make: Any, text: str) -> None:
    """Law: at O1 a session says whose step it is, and what would make it faster."""
    model = nn.Linear(2, 2)
    session = hs.prepare(model, make(model.parameters(), lr=0.1), "O1", dtype="bf16")
    assert f"update: {text}" in session.explain().notes


def test_printed() -> None:
    """Law: a session says what is trained how, and how far; all of it can be read."""
    torch.manual_seed(0)
    session = build("O2 bf16", accumulate=2)
    for _ in range(3):
        go(session)
    # 6 * 16 + 16, 2 * 16 and 16 * 3 + 3 numbers.
    first, *notes, window, steps = str(session).splitlines()
    assert first == "Session of Sequential and SGD, 195 parameters on cpu"
    assert notes == [*session.explain().notes]
    assert window == "micro-batches a step: 2, 1 of the next"
    assert steps == "steps: 1 applied, 0 skipped"
    assert repr(session) == "<Session of Sequential and SGD at O2 bf16>"
    assert str(session.explain()) == session.explain().text()
    assert repr(session.scaler).startswith("<LossScaler at 1: ScaleRule(")
    for thing in (session.explain(), session.memory(), session.scaler, go(session)):
        assert " at 0x" not in repr(thing)
        assert "<function" not in repr(thing)


def test_step_needs_a_backward_pass_and_a_gradient(worded: Worded) -> None:
    """Law: a step that has nothing new is refused; the session goes on after it."""
    session = build("O2 bf16")
    go(session)
    with pytest.raises(RuntimeError, match=r"step\(\) .* 1 steps") as caught:
        session.step()
    worded(caught.value)
    with session.autocast():
        loss = torch.ones((), requires_grad=True) * 2
    session.backward(loss)
    with pytest.raises(RuntimeError, match="gradient") as caught:
        session.step()
    worded(caught.value)
    assert go(session).applied


def test_a_state_of_half_a_window(worded: Worded) -> None:
    """Law: gradients that no step has used yet are not lost in silence."""
    session = build("O2 bf16", accumulate=2)
    go(session)
    with pytest.raises(RuntimeError, match="1 of 2 micro-batches") as half:
        session.state_dict()
    worded(half.value)
