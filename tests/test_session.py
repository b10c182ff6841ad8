"""A session at every level, format and optimizer, beside plain loops of torch."""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import machine
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep.session import Session
    from halfstep.stats import StepReport

    Make = Callable[[Any], torch.optim.Optimizer]

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# An epsilon that fp16 can hold, for O3 stores the optimizer's state in fp16.
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
OPTIMIZERS: dict[str, Make] = {
    "sgd": SGD,
    "adamw": ADAMW,
    "fused": functools.partial(ADAMW, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.02, eps=1e-3),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
}
KINDS = ["O0 fp32", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16", "O3 fp16"]
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
FP32, INF = torch.float32, math.inf

table = pytest.mark.parametrize("kind", KINDS)
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's speed out of these tests."""
    monkeypatch.setattr(machine, "emulation_warning", lambda *_: None)


def network(seed: int = 0, device: str = "cpu") -> nn.Sequential:
    """Return a small network with a normalisation layer."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(device)


def build(
    kind: str = "O0 fp32", make: Make = SGD, seed: int = 0, **more: Any
) -> Session:
    """Return a session; `kind` holds level and dtype."""
    level, dtype = kind.split()
    model = network(seed, more.pop("device", "cpu"))
    return hs.prepare(model, make(model.parameters()), level, dtype=dtype, **more)


def loss_of(model: nn.Module, seed: int, rows: slice = slice(None)) -> Tensor:
    """Return the loss of a batch of 16 rows, or some of them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 6, generator=generator)
    targets = inputs[:, :3] * inputs[:, 3:] + 0.5
    device = next(model.parameters()).device
    out = model(inputs[rows].to(device))
    return nn.functional.mse_loss(out.float(), targets[rows].to(device))


def go(session: Session, seed: int = 0, rows: slice = slice(None)) -> StepReport:
    """Run one micro-batch."""
    with session.autocast():
        loss = loss_of(session.model, seed, rows)
    session.backward(loss)
    return session.step()


def spoil(session: Session, *names: str, value: float = INF) -> Any:
    """Put `value` into the gradients of parameters from now on; return the hooks."""
    row = torch.tensor([2])
    params: dict[str, Any] = dict(session.model.named_parameters())
    return [
        params[name].register_hook(lambda grad: grad.index_fill(0, row, value))
        for name in names
    ]


def everything(session: Session) -> Any:
    """Return a copy of all that a skipped step must leave alone."""
    parts = {
        "stored": session.model.state_dict(),
        "exact": session.weights(),
        "optimizer": session.optimizer.state_dict(),
    }
    return copy.deepcopy(parts)


@table
@optimizers
def test_loss_falls_and_dtypes_hold(kind: str, make: Make) -> None:
    """Law: training works, and weights, state and masters have the promised dtypes."""
    session = build(kind, make)
    low = session.choice.format.dtype
    losses = []
    for _ in range(30):
        with session.autocast():
            loss = loss_of(session.model, 0)
        session.backward(loss)
        assert session.step().applied
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    stored = [param.dtype for param in session.model.parameters()]
    in_low = {"O0": [FP32] * 6, "O1": [FP32] * 6, "O3": [low] * 6}
    in_low["O2"] = [low, low, FP32, FP32, low, low]
    assert stored == in_low[kind[:2]]
    updated = low if kind.startswith("O3") else FP32
    (group,) = session.optimizer.param_groups
    assert {param.dtype for param in group["params"]} == {updated}
    for entry in session.optimizer.state.values():
        state = [
            v.dtype for k, v in entry.items() if torch.is_tensor(v) and k != "step"
        ]
        assert set(state) == {updated}
    for param, master in zip(session.model.parameters(), group["params"], strict=True):
        assert torch.equal(param, master.to(param.dtype))
    assert {tensor.dtype for tensor in session.weights().values()} == {updated}


@table
@optimizers
@pytest.mark.parametrize("value", [INF, math.nan])
def test_a_skipped_step_changes_nothing(kind: str, make: Make, value: float) -> None:
    """Law: on overflow weights, masters, state and counters stay, and it is reported."""
    session, clean = build(kind, make), build(kind, make)
    for number in range(2):
        before, scale = everything(session), session.scaler.state.scale.item()
        hooks = spoil(session, "0.bias", "3.weight", value=value)
        report = go(session, 5)
        same(everything(session), before)
        assert (report.skipped, report.applied, report.complete) == (True, False, True)
        assert report.found_inf_in == ("0.bias", "3.weight")
        assert (report.step, report.scale) == (3 * number + 1, scale)
        assert all(param.grad is None for param in session.model.parameters())
        for hook in hooks:
            hook.remove()
        with session.autocast():
            loss = loss_of(session.model, 5) * INF
        session.backward(loss)
        assert session.step().found_inf_in == NAMES
        same(everything(session), before)
        clean.scaler.load_state_dict(session.scaler.state_dict())
        assert go(session, number).applied
        assert go(clean, number).applied
        same(everything(session), everything(clean))
    assert (session.steps_skipped, session.steps_applied) == (4, 2)
    dynamic = session.choice.format.name == "fp16"
    assert session.scaler.state.scale.item() == (2.0**12 if dynamic else 1.0)


@table
@optimizers
def test_state_round_trip(kind: str, make: Make) -> None:
    """Law: a fresh session that loads a state goes on exactly as the first does."""
    session, fresh = build(kind, make), build(kind, make, seed=1)
    for seed in range(3):
        go(session, seed)
    (hook,) = spoil(session, "0.bias")
    go(session, 3)
    hook.remove()
    state = copy.deepcopy(session.state_dict())
    assert (state["level"], state["dtype"]) == tuple(kind.split())
    fresh.load_state_dict(copy.deepcopy(state))
    same(fresh.state_dict(), state)
    assert (fresh.steps_applied, fresh.steps_skipped) == (3, 1)
    for seed in range(4, 7):
        reports = [go(each, seed) for each in (session, fresh)]
        assert reports[0].step == reports[1].step == seed + 1
        same(everything(fresh), everything(session))
    same(fresh.state_dict(), session.state_dict())


def plain_loop(make: Make, clip: float | None, dtype: torch.dtype | None) -> Any:
    """Train as torch's documentation does it, one overflow among the steps."""
    model = network()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    seen = []
    for seed in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = loss_of(model, seed)
        torch.autograd.backward(scaler.scale(loss))
        if seed == 2 and scaler.is_enabled():
            assert model[0].bias.grad is not None
            model[0].bias.grad[1] = INF
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip or INF)
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss.item(), norm.item(), scaler.get_scale()))
    return model.state_dict(), optimizer.state_dict()["state"], seen


@pytest.mark.parametrize("kind", ["O0 fp32", "O1 bf16", "O1 fp16"])
@pytest.mark.parametrize("clip", [None, 0.1])
@optimizers
def test_equals_a_plain_loop(kind: str, clip: float | None, make: Make) -> None:
    """Law: O0 is plain torch, O1 is torch.amp with GradScaler, to the last bit."""
    session = build(kind, make, clip_grad_norm=clip)
    low = session.choice.format.dtype
    model, state, theirs = plain_loop(make, clip, None if low is FP32 else low)
    for seed, (loss, norm, scale) in enumerate(theirs):
        with session.autocast():
            ours = loss_of(session.model, seed)
        hooks = spoil(session, "0.bias") if seed == 2 and low is torch.float16 else []
        session.backward(ours)
        report = session.step()
        for hook in hooks:
            hook.remove()
        assert report.skipped == bool(hooks)
        assert ours.item() == loss
        assert session.scaler.state.scale.item() == scale
        if clip is None:
            assert report.grad_norm is None
        elif not hooks:
            assert report.grad_norm == norm
    same(session.model.state_dict(), model)
    same(session.optimizer.state_dict()["state"], state)


@pytest.mark.parametrize("make", [SGD, OPTIMIZERS["fused"]], ids=["sgd", "fused"])
def test_accumulation_is_one_big_batch(make: Make) -> None:
    """Law: four quarters make the step of the whole batch, and only the last counts."""
    whole, parts = build(make=make), build(make=make, accumulate=4)
    for seed in range(3):
        go(whole, seed)
        reports = [go(parts, seed, slice(i, i + 4)) for i in range(0, 16, 4)]
        assert [r.complete for r in reports] == [False, False, False, True]
        assert [r.applied for r in reports] == [False, False, False, True]
        assert [r.step for r in reports] == [seed, seed, seed, seed + 1]
    # Sums of 16 terms in another order: a few ulps of fp32, three steps.
    torch.testing.assert_close(
        parts.weights(), whole.weights(), rtol=2.0**-18, atol=2.0**-20
    )


@table
def test_accumulation_is_the_mean(kind: str) -> None:
    """Law: the same micro-batch four times is the micro-batch once, to the bit."""
    once, four = build(kind), build(kind, accumulate=4)
    go(once, 0)
    for _ in range(4):
        go(four, 0)
    same(everything(four), everything(once))


@table
def test_overflow_in_one_micro_batch(kind: str) -> None:
    """Law: inf in any micro-batch skips the whole window; the next begins afresh."""
    session = build(kind, accumulate=3)
    before = everything(session)
    go(session, 0)
    hooks = spoil(session, "3.bias")
    go(session, 1)
    hooks[0].remove()
    report = go(session, 2)
    assert report.skipped
    assert report.found_inf_in == ("3.bias",)
    same(everything(session), before)
    assert [go(session, s).applied for s in range(3)] == [False, False, True]


def test_several_losses() -> None:
    """Law: two backward passes before one step add up."""
    one, two = build(), build()
    one.backward(loss_of(one.model, 0) + loss_of(one.model, 1))
    for seed in (0, 1):
        two.backward(loss_of(two.model, seed))
    one.step()
    two.step()
    torch.testing.assert_close(one.weights(), two.weights())


@pytest.mark.parametrize("name", ["fused", "fused sgd", "fused adam"])
@pytest.mark.parametrize("kind", ["O0 fp32", "O1 fp16", "O2 fp16", "O2 bf16"])
def test_a_kernel_that_skips(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the path that never asks the device ends where the asking one does."""
    more = {"fused sgd": functools.partial(SGD, fused=True)}
    more["fused adam"] = functools.partial(OPTIMIZERS["adam"], fused=True)
    make = (OPTIMIZERS | more)[name]
    ends = []
    for inside in (False, True):
        monkeypatch.setattr(hs.Session, "_skips_on_device", inside)
        session = build(kind, make, clip_grad_norm=0.5)
        reports = []
        for seed in range(5):
            hooks = spoil(session, "0.weight", "1.bias") if seed in (0, 3) else []
            before = everything(session)
            reports.append(go(session, seed))
            if seed == 3:
                same(everything(session), before)
            for hook in hooks:
                hook.remove()
        assert [r.skipped for r in reports] == [True, False, False, True, False]
        assert reports[3].found_inf_in == ("0.weight", "1.bias")
        assert reports[4].found_inf_in == ()
        ends.append((everything(session), [r.grad_norm for r in reports]))
    same(ends[0], ends[1], equal_nan=True)


def test_clipping_is_torchs() -> None:
    """Law: `math.inf` measures and does not clip; a low norm clips at every level."""
    free, measured = build(), build(clip_grad_norm=INF)
    go(free)
    assert (go(measured).grad_norm or 0) > 0
    same(everything(measured), everything(free))
    for kind in KINDS:
        session = build(kind, functools.partial(torch.optim.SGD, lr=1.0))
        session.clip_grad_norm = 2.0**-4
        before = copy.deepcopy(session.weights())
        go(session)
        moved = [v - before[k] for k, v in session.weights().items()]
        norm = math.sqrt(sum(m.float().square().sum().item() for m in moved))
        # O3 rounds each weight of about 1/2 to 8 bits; its step is lost or doubled.
        assert norm == pytest.approx(2.0**-4, rel=0.5 if kind[1] == "3" else 1e-4)


def test_complex_gradients_have_a_norm() -> None:
    """Law: a complex gradient counts with both its parts."""
    model = nn.ParameterList([nn.Parameter(torch.tensor([1 + 1j]))])
    session = hs.prepare(model, SGD(model.parameters()), "O0", clip_grad_norm=INF)
    session.backward((model[0] * (3 - 4j)).real.sum())
    assert session.step().grad_norm == 5.0


def test_collapse_at_the_floor() -> None:
    """Law: with fp16, the 17th skip in a row, the first at scale 1, is the last."""
    session = build("O2 fp16")
    before = everything(session)
    spoil(session, "0.bias", "1.weight", "3.weight", "3.bias")
    for exponent in range(16, 0, -1):
        assert go(session).scale == 2.0**exponent
    with pytest.raises(hs.LossScaleCollapse) as caught:
        go(session)
    assert str(caught.value) == (
        "17 steps in a row overflowed, the last at loss scale 1: not finite: gradients "
        "of 0.bias, 1.weight, 3.weight and 1 more. A smaller scale cannot mend this: "
        "look for a loss or input that is not finite, lower the learning rate, or "
        "train in bf16 (--dtype bf16)."
    )
    same(everything(session), before)


@pytest.mark.parametrize("kind", ["O0 fp32", "O2 bf16"])
def test_collapse_without_a_moving_scale(kind: str) -> None:
    """Law: fifty skips in a row end any run; forty-nine and a step do not."""
    session = build(kind)
    for rounds in range(2):
        hooks = spoil(session, "0.bias")
        for _ in range(49):
            assert go(session).skipped
        if rounds == 0:
            hooks[0].remove()
            assert go(session).applied
    with pytest.raises(hs.LossScaleCollapse, match="^50 steps in a row overflowed"):
        go(session)


def test_step_needs_a_backward_pass() -> None:
    """Law: a step that has nothing new is refused; the session goes on after it."""
    session = build()
    go(session)
    with pytest.raises(RuntimeError) as caught:
        session.step()
    assert str(caught.value) == (
        "session.step() was called without a backward pass since the last; 1 steps "
        "are done. Call session.backward(loss) first; to sum over 4 batches, set "
        "accumulate=4 in prepare()."
    )
    assert go(session).applied


@pytest.mark.parametrize("kind", ["O0 fp32", "O2 bf16"])
def test_step_needs_a_gradient(kind: str) -> None:
    """Law: a loss that reaches no parameter is refused; the session goes on."""
    session = build(kind)
    session.backward(torch.ones((), requires_grad=True) * 2)
    with pytest.raises(RuntimeError) as caught:
        session.step()
    assert str(caught.value) == (
        "no parameter of the optimizer has a gradient: is the loss computed from "
        "session.model, and do its parameters require gradients?"
    )
    assert go(session).applied


def test_names() -> None:
    """Law: reports use the names given; a parameter without one goes by its shape."""
    model = network()
    session = hs.prepare(
        model,
        SGD(model.parameters()),
        "O2",
        dtype="bf16",
        names=[("w", model[0].weight)],
    )
    spoil(session, "0.weight", "3.bias")
    assert go(session).found_inf_in == ("w", "a parameter of shape (3,)")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"accumulate": 0}, "accumulate=0 must be at least 1 micro-batch a step."),
    ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0 must be above 0, or None."),
    ({"clip_grad_norm": math.nan}, "clip_grad_norm=nan must be above 0, or None."),
    (
        {"master": "split"},
        "master='split' is not a form of master weights; choose 'fp32'.",
    ),
    (
        {"level": "O0", "dtype": "bf16"},
        "level=O0 is fp32 throughout; dtype=bf16 needs O1 to O3.",
    ),
    (
        {"level": "O2", "dtype": "fp32"},
        "level=O2 needs dtype bf16 or fp16; fp32 training is level O0.",
    ),
    ({"policy": "lean"}, "policy='lean' is not known; the named policy is 'torch'."),
    (
        {"loss_scale": -1},
        "loss_scale=-1 is not a scale; choose auto, dynamic, none or a positive number "
        "such as 1024.",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_messages(given: dict[str, Any], message: str) -> None:
    """Law: each word or number that does not fit is named, and the model untouched."""
    model = network()
    arguments = {"level": "O1"} | given
    with pytest.raises(UserError) as caught:
        hs.prepare(model, SGD(model.parameters()), **arguments)
    assert str(caught.value) == message
    assert {param.dtype for param in model.parameters()} == {FP32}


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: "auto" is what the machine recommends, with its reason."""
    advice = machine.Recommendation("O2", "bf16", "measured")
    monkeypatch.setattr(machine, "recommend", lambda _: advice)
    model = network()
    session = hs.prepare(model, SGD(model.parameters()))
    assert (str(session.choice), session.choice.reason) == ("O2 bf16", "measured")
    assert model[0].weight.dtype == torch.bfloat16


def test_emulation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a format that this machine is slow in is warned of, once."""
    monkeypatch.setattr(machine, "emulation_warning", lambda *_: "slow here")
    with pytest.warns(UserWarning, match="^slow here$"):
        build("O1 fp16")


def test_explain() -> None:
    """Law: a row for each type of module and treatment; O2 stores and runs as it says."""
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
        "policy: torch + module:3=fp32",
        "fp32 master weights: 112",
        "loss scale: 1, fixed",
    )
    moving = build("O1 fp16").explain()
    assert moving.notes[-1] == "loss scale: 65536, dynamic"


def test_state_crosses_levels() -> None:
    """Law: O0 to O2 and back, no bit of weights or optimizer state is lost."""
    first, middle, last = (
        build(make=ADAMW),
        build("O2 bf16", ADAMW, 1),
        build(make=ADAMW),
    )
    for seed in range(3):
        go(first, seed)
    middle.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(
        middle.model[0].weight,
        first.model[0].weight.bfloat16(),  # type: ignore[index,union-attr]
    )
    last.load_state_dict(copy.deepcopy(middle.state_dict()))
    same(everything(last), everything(first))
    go(last, 3)
    go(first, 3)
    same(everything(last), everything(first))


def test_states_that_do_not_fit() -> None:
    """Law: another version, another model, a window half done: each is refused."""
    session = build("O2 bf16", accumulate=2)
    state = session.state_dict()
    with pytest.raises(UserError) as version:
        session.load_state_dict(state | {"version": 0})
    assert str(version.value) == (
        "session state has version 0; this halfstep reads version 1."
    )
    before = everything(session)
    for weights, words in (
        (
            {"3.bias": torch.ones(4)},
            "'3.bias': the state holds shape (4,), the model shape (3,)",
        ),
        (
            {"more": torch.ones(1)},
            "'more': the state holds shape (1,), the model nothing",
        ),
    ):
        with pytest.raises(UserError) as caught:
            session.load_state_dict(state | {"weights": state["weights"] | weights})
        assert str(caught.value) == f"weight {words}; build the model that was saved."
    same(everything(session), before)
    go(session)
    with pytest.raises(RuntimeError) as half:
        session.state_dict()
    assert str(half.value) == (
        "session.state_dict() after 1 of 2 micro-batches would lose their gradients; "
        "call it after a full step."
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_gpu(kind: str) -> None:
    """Law: with a fused optimizer no step asks the device, and a skip changes nothing."""
    session = build(kind, OPTIMIZERS["fused"], device="cuda", clip_grad_norm=1.0)
    go(session)
    for inject in (False, True):
        hooks = spoil(session, "3.bias") if inject else []
        before = everything(session)
        with session.autocast():
            loss = loss_of(session.model, 1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.backward(loss)
            report = session.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert report.skipped == inject
        assert report.found_inf_in == (("3.bias",) if inject else ())
        if inject:
            same(everything(session), before)
        for hook in hooks:
            hook.remove()
