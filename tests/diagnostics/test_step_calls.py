"""`hs.diagnose` sees what a program calls: scalers, schedules, sums in 16 bits.

Programs that are wrong, each with its finding and its cure, are in tests/field.
"""

import contextlib
import gc
import itertools
import json
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.diagnostics.step_calls import CHECKED
from halfstep.errors import UserError
from halfstep.reporting.finding import Finding

BF16, FP32 = torch.bfloat16, torch.float32
SCALERS = {"torch": torch.amp.GradScaler, "halfstep": hs.GradScaler}


class Loop:
    """A small fp16 program, of which nobody tells `diagnose` anything."""

    def __init__(self, kind: str = "torch") -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler: Any = SCALERS[kind]("cpu", init_scale=256.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.x = torch.randn(16, 8)

    def backward(self) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = self.model(self.x).float().square().mean()
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.update()


def found(step: Callable[[], object]) -> list[Finding]:
    findings = hs.diagnose(step).findings
    return [each for each in findings if each.rule in CHECKED]


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_is_found(kind: str) -> None:
    """Law: a scaler counts though nobody gave it, and what was checked is listed."""
    diagnosis = hs.diagnose(Loop(kind).step)
    assert "no loss scale" not in {each.rule for each in diagnosis.findings}
    assert diagnosis.calls == ()
    assert diagnosis.numerics.scales == (256, 256)
    line = "No problem found in the first 3 steps with: calls of the loss scaler, loss"
    assert line in str(diagnosis).replace("\n", " ")


@pytest.mark.parametrize("kind", SCALERS)
def test_optimizers_in_turn(kind: str) -> None:
    """Law: a scaler that a later step is the first to use is not said to be new."""
    turns = itertools.cycle([Loop(kind), Loop(kind)])
    assert found(lambda: next(turns).step()) == []


def lerp(average: Tensor, weight: Tensor) -> None:
    average.lerp_(weight.to(average.dtype), 1e-4)


def multiply_add(average: Tensor, weight: Tensor) -> None:
    average.data.mul_(0.9999).add_(weight.data.to(average.dtype), alpha=1e-4)


def foreach(average: Tensor, weight: Tensor) -> None:
    torch._foreach_lerp_([average], [weight.to(average.dtype)], 1e-4)


@pytest.mark.parametrize("average", [lerp, multiply_add, foreach])
def test_an_average_that_stands_still(
    average: Callable[[Tensor, Tensor], None],
) -> None:
    """Law: an average in 16 bits is named, however it is written; not one in fp32."""
    loop = Loop()
    low, wide = (loop.model.weight.detach().to(t, copy=True) for t in (BF16, FP32))

    def step() -> None:
        loop.step()
        with torch.no_grad():
            average(low, loop.model.weight)
            average(wide, loop.model.weight)

    (finding,) = found(step)
    assert finding.rule == "16-bit sum"
    assert finding.where == "a tensor of shape (4, 8)"


def test_a_copy_in_16_bits_is_no_average() -> None:
    """Law: weights that are published, and sums that move, are not accused."""
    loop = Loop()
    copy = loop.model.weight.detach().bfloat16()
    total = torch.zeros((), dtype=torch.bfloat16)

    def step() -> None:
        loop.step()
        copy.copy_(loop.model.weight.detach())
        total.add_(1.0)

    assert found(step) == []


def test_sums_and_logarithms_that_lose_little() -> None:
    """Law: eight gradients in bf16, and log-probabilities in a loss, are no fault."""
    loop = Loop()
    model = nn.Linear(4, 3).bfloat16()

    def step() -> None:
        loop.step()
        model.zero_grad()
        for _ in range(8):
            logp = model(torch.ones(2, 4, dtype=BF16)).log_softmax(-1)
            nn.functional.nll_loss(logp, torch.tensor([0, 1])).backward()

    assert found(step) == []


def test_a_mode_of_the_program() -> None:
    """Law: function modes that a step opens around its update are closed in order."""
    loop = Loop()

    def step() -> None:
        with torch.device("meta"):
            loop.x = torch.randn(16, 8, device="cpu")
            loop.step()
        assert torch.ones(1).device.type == "cpu"

    assert found(step) == []
    assert torch.ones(1).device.type == "cpu"


def test_masks_are_no_fault() -> None:
    """Law: -inf in a buffer, and inf that was there before, are as they were made."""
    loop = Loop()
    loop.model.register_buffer("mask", torch.full((4,), -math.inf))
    loop.model.register_buffer("lowest", torch.full((), math.inf))
    assert hs.diagnose(loop.step).numerics.buffers == ()
    assert hs.diagnose(loop.step, model=loop.model).numerics.buffers == ()


def test_nothing_stays_behind() -> None:
    """Law: classes, hooks, modes and the scaler's own watch are as they were."""
    loop = Loop("halfstep")
    scaler, optimizer = loop.scaler, loop.optimizer
    owners = [*SCALERS.values(), torch.autograd]
    gc.collect()  # the last session of earlier tests takes its patches with it

    def state() -> list[object]:
        gc.collect()
        hooks = (vars(each) for each in (scaler, optimizer))
        own = [{k: repr(v) for k, v in each.items() if "hook" in k} for each in hooks]
        modes = torch._C._len_torch_function_stack()
        modes += len(torch.nn.modules.module._global_forward_hooks)
        patched = [dict(vars(each)) for each in owners]
        return [own, vars(scaler).keys(), scaler.call_order_watch, modes, *patched]

    before = state()

    def fail() -> None:
        loop.step()
        raise ArithmeticError

    given = {"model": loop.model, "optimizer": optimizer, "scaler": scaler}
    for step in (loop.step, fail):
        for parts in ({}, given):
            with contextlib.suppress(ArithmeticError):
                hs.diagnose(step, **parts)
            assert state() == before


def test_arguments_by_name() -> None:
    """Law: a scaler may be called with keywords."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loop.model(loop.x).float().square().mean()
        loop.scaler.scale(outputs=loss).backward()
        loop.scaler.unscale_(optimizer=loop.optimizer)
        loop.scaler.step(optimizer=loop.optimizer)
        loop.scaler.update(new_scale=None)

    assert found(step) == []


def test_a_scale_by_hand() -> None:
    """Law: a loss that the program multiplies by itself counts as scaled."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loop.model(loop.x).float().square().mean()
        (loss * 256.0).backward()
        for param in loop.model.parameters():
            param.grad /= 256.0
        loop.optimizer.step()

    assert "no loss scale" not in {each.rule for each in hs.diagnose(step).findings}


def test_a_model_beside_the_one_that_trains() -> None:
    """Law: what another thread runs without autocast is its own affair."""
    loop, other = Loop(), nn.Linear(8, 4)

    def step() -> None:
        thread = threading.Thread(target=lambda: other(torch.ones(2, 8)))
        thread.start()
        loop.step()
        thread.join()

    assert found(step) == []


# Live objects in, findings out: what `hs.diagnose` knows of a program that runs.


def rules(found: Any) -> set[str]:
    return {each.rule for each in found.findings}


def by_hand(
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
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
        loss.backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


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


def test_low_weights_under_o1() -> None:
    """Law: weights that are low where the level keeps them in fp32 are named.

    The level of weights in fp32 under autocast is known.
    """
    for dtype, level in ((BF16, "O1"), (FP32, None)):
        parts, step = by_hand(dtype, autocast=BF16)
        found = hs.diagnose(step, **parts, level=level)
        assert ("weights already low" in rules(found)) == (dtype == BF16)
        assert found.facts.config.level == "O1"


def session(level: str, dtype: str, **options: Any) -> hs.Session:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    return hs.prepare(model, optimizer, level=level, dtype=dtype, **options)


def stepping(of: hs.Session) -> Callable[[Tensor], hs.StepReport]:
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
    """Law: text and data tell the same findings, worst first."""
    parts, step = by_hand(autocast=torch.float16)
    found = hs.diagnose(step, **parts)
    named = [each.rule for each in found.findings]
    assert [each["rule"] for each in found.data()["findings"]] == named
    assert json.loads(json.dumps(found.data()))["profile"]["dtype"] == "fp16"
    assert "no loss scale" in str(found)
    times = found.profile.table().text()
    assert "addmm" in times
    assert "numbers read out of tensors" in times
    assert "Not checked:" in str(hs.diagnose(step))
    assert str(found).startswith("this program: O1 fp16 on cpu: 1 error")
    assert "those of halfstep train" in str(found)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": 5}, "step is of type int; it must be a function"),
        ({"dtype": "fp8"}, "dtype='fp8' is not a format"),
        ({"level": "O9"}, "level='O9' is not a level"),
        ({"device": "meta"}, "device='meta' must be that of a device here"),
        ({"device": 1.5}, "device=1.5 must be that of a device here"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"warmup": None}, "warmup=None must be a whole number of at least 0"),
        ({"batches": 5}, "batches is of type int; it must be a collection of batches"),
        ({"session": "a"}, "session is of type str; it must be a halfstep.Session"),
        ({"optimizer": "a"}, "optimizer is of type str; it must be a torch.optim.Opt"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    """Law: what cannot be used is refused by name before any step is made."""
    calls: list[int] = []
    with pytest.raises(UserError, match=f"^{words}"):
        hs.diagnose(**{"step": lambda: calls.append(1)} | given)
    assert not calls


def lacked(found: Any) -> dict[str, str]:
    """Return the rules that had nothing to look at, and why."""
    missing = found.examination.not_evaluated
    return {rule: why for why, rules in missing.items() for rule in rules}


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
