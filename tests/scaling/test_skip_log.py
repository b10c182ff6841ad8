"""Skipped steps and losses that are not finite are reported when they happen."""

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_scalars import slow_device  # noqa: F401
from torch import Tensor, nn

import halfstep as hs
from halfstep._torch import async_read
from halfstep.scaling import LossScaler, ScaleRule

Step = Callable[[float], bool]

LOGGER = "halfstep.scaling.skip_log"


def loss_of(model: nn.Module, factor: float) -> Tensor:
    out: Tensor = model(torch.ones(1, 2))
    return out.float().sum() * factor


def by_scaler(scale: float, **more: Any) -> Step:
    """Return a training step with `GradScaler`; it says whether it was skipped."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.named_parameters(), 1e-9)
    scaler = hs.GradScaler("cpu", scale, **more)

    def step(factor: float) -> bool:
        scaler.scale(loss_of(model, factor)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.last_step.skipped

    return step


def by_session(scale: float, **more: Any) -> Step:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    bounds: dict[str, Any] = {"min_scale": 2.0**-24, "max_scale": 2.0**127}
    rule = ScaleRule(scale, **bounds | more)
    session = hs.prepare(model, optimizer, "O0", loss_scale=rule)

    def step(factor: float) -> bool:
        with session.autocast():
            loss = loss_of(session.model, factor)
        session.backward(loss)
        return session.step().skipped

    return step


WAYS = pytest.mark.parametrize("way", [by_scaler, by_session])
OVER = 1e38
"""Times any scale of 8 or more, beyond fp32's range of 3.4e38."""


@WAYS
def test_five_of_five(
    way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    """Law: of five steps all skipped the first is logged, and the fifth warned of.

    2**16 halved four times is 4096. Records are the 1st, 2nd and 4th, at INFO: a
    dynamic scale loses some steps before it has found its level.
    """
    step = way(2.0**16)
    assert not step(1.0)
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(4):
            assert step(OVER)
        with pytest.warns(UserWarning, match="^5 steps") as caught:
            assert step(OVER)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        "5 steps in a row were skipped: non-finite gradient of weight at loss scale "
        "4096. halfstep.find_nonfinite(model, step) finds the operation."
    )
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert [record.getMessage() for record in caplog.records] == [
        f"step skipped: non-finite gradient of weight at loss scale {scale} ({n} so "
        "far)."
        for scale, n in ((65536, 1), (32768, 2), (8192, 4))
    ]


@WAYS
def test_a_search_from_above_is_no_fault(
    way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    """Law: 18 skips from 2**32 down to 2**14 neither warn nor print."""
    step = way(2.0**32)
    with caplog.at_level(logging.WARNING, LOGGER):
        for exponent in range(32, 14, -1):
            # inf at this scale and above
            assert step(2.0 ** (128 - exponent))
        assert not step(2.0 ** (128 - 15))
    assert not caplog.records


@pytest.mark.filterwarnings("error:.*in a row")
@WAYS
def test_a_first_search_goes_lower(way: Callable[..., Step]) -> None:
    """Law: down to 256 nothing is warned of before a step is applied; there it is."""
    step = way(2.0**16)
    for _ in range(8):
        assert step(OVER)
    with pytest.warns(UserWarning, match=r"^9 steps .* at loss scale 256\."):
        assert step(OVER)


@WAYS
def test_a_fixed_scale_warns_at_any_level(
    way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    """Law: the first skip at a scale that cannot move is printed, and so are rows."""
    fixed = {"backoff_factor": 1.0}
    if way is by_scaler:
        fixed = {"strategy": "none"}
    step = way(1.0, **fixed)
    for _ in range(4):
        assert step(math.inf)
    with pytest.warns(UserWarning, match=r"^5 steps in a row"):
        assert step(math.inf)
    assert not step(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert step(OVER * 1e10)
    said = [r.getMessage() for r in caplog.records if "skipped" in r.getMessage()]
    assert [text.rpartition("(")[2] for text in said] == [
        f"{n} so far)." for n in (1, 2, 4, 8, 10)
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@WAYS
def test_a_loss_that_is_not_finite(
    way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    """Law: it is warned of before its backward pass, with cause and place, once."""
    step = way(1.0)
    words = "^the loss is nan before the backward pass. Cause: "
    with pytest.warns(UserWarning, match=words) as caught:
        step(math.nan)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(math.nan)
    said = [r.getMessage() for r in caplog.records if "loss is" in r.getMessage()]
    assert said == ["the loss is nan; not finite 2 times."]


@pytest.mark.usefixtures("slow")
@WAYS
def test_late_steps(way: Callable[..., Step], caplog: pytest.LogCaptureFixture) -> None:
    """Law: where numbers come late, names are taken once a skip has arrived."""
    step = way(2.0**16)
    step(1.0)
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(6):
            step(OVER)
        with pytest.warns(UserWarning, match="^5 steps .* gradient of weight at "):
            step(OVER)
    # A session that reads the flag itself, to skip, knows names at once.
    early = "s" if way is by_scaler else " of weight"
    assert [record.getMessage() for record in caplog.records] == [
        f"step skipped: non-finite gradient{early} at loss scale 65536 (1 so far).",
        f"step skipped: non-finite gradient{early} at loss scale 32768 (2 so far).",
        "step skipped: non-finite gradient of weight at loss scale 8192 (4 so far).",
    ]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("number", range(3))
def test_late_losses(number: int) -> None:
    """Law: of three micro-batches any is reported; the loss is read with its step."""
    scaler = LossScaler(ScaleRule())
    for micro in range(3):
        scaler.observe_loss(torch.tensor(math.inf if micro == number else 1.0))
    for _ in range(async_read.DELAY_STEPS):
        scaler.update(torch.tensor(0.0))
    with pytest.warns(UserWarning, match=r"^the loss is inf before .*find_nonfinite"):
        scaler.update(torch.tensor(0.0))


def test_what_is_lost_is_called_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """Law: a step that is applied in part is not called skipped."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = hs.prepare(model, optimizer, "O0", optimizer_in_backward=True)
    for factor in (math.inf, 1.0):
        loss = session.model(torch.ones(1, 2)).sum()
        loss.register_hook(lambda grad, by=factor: grad * by)
        session.backward(loss)
        session.step()
    (record,) = caplog.records
    assert record.getMessage().startswith("parameters left out: non-finite gradient")


@pytest.mark.filterwarnings("error:steps were")
@WAYS
def test_skips_that_are_not_in_a_row(way: Callable[..., Step]) -> None:
    """Law: every other step skipped is warned of once, by the sixth skip."""
    step = way(1.0)
    for _ in range(5):
        assert step(math.inf)
        assert not step(1.0)
    with pytest.warns(UserWarning, match=r"^steps .* 6 times within 11: .* weight at "):
        assert step(math.inf)
    for _ in range(10):
        assert not step(1.0)
        assert step(math.inf)


@pytest.mark.filterwarnings("error:steps were")
@WAYS
def test_skips_far_apart_are_no_fault(way: Callable[..., Step]) -> None:
    """Law: one skip in twelve steps, and a row of skips, warn of nothing."""
    step = way(2.0**24)
    for number in range(8 * 12):
        assert step(math.inf if number % 12 == 0 else 1.0) == (number % 12 == 0)


@WAYS
def test_a_skip_at_the_floor(
    way: Callable[..., Step], caplog: pytest.LogCaptureFixture
) -> None:
    """Law: no lower scale is to be had: the first skip there is printed."""
    step = way(2.0, min_scale=1.0)
    for factor in (math.inf, 1.0, math.inf):
        step(factor)
    printed = [(record.levelname, record.getMessage()) for record in caplog.records]
    said = [line for line in printed if "skipped" in line[1]]
    expected = "step skipped: non-finite gradient of weight at loss scale 1 (2 so far)."
    assert said == [("WARNING", expected)]
