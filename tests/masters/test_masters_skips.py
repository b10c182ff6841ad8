"""Steps that must change nothing: inf and NaN, in every form, by kernel and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import master_cases as cases
import pytest
import torch
from small_training import same

if TYPE_CHECKING:
    from master_cases import Make

    from halfstep.session.session import Session

BAD = {"-inf": -torch.inf, "nan": torch.nan}


def poisoned(session: Session, seed: int, value: float, *names: str) -> dict:  # type: ignore[type-arg]
    """Return slopes with one number that is not finite in some parameters."""
    slopes = cases.slopes_of(session.model, seed)
    for name in names:
        slopes[name].view(-1)[-1] = value
    return slopes


@cases.every_form
@pytest.mark.parametrize("make", [cases.MOMENTUM, cases.ADAM])
@cases.both_ways
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_moves(
    form: str, make: Make, value: float, accumulate: int, *, kernel: bool
) -> None:
    """Law: weights, what is beside them, moments, counters, clock: not one bit.

    Before the first good step, and after some; afterwards the run is that of a session
    which never saw the bad step.
    """
    more = {"kernel": kernel, "accumulate": accumulate, "clip_grad_norm": 1.0}
    session, calm = (cases.start(make, form, **more) for _ in range(2))
    for number in range(3):
        before = cases.everything(session)
        bad = poisoned(session, 9, value, "linear.weight", "norm.bias")
        good = [cases.slopes_of(session.model, 2 * number + i) for i in range(2)]
        report = cases.go(session, *[bad, good[0]][:accumulate])
        assert report.skipped
        assert set(report.found_inf_in) == {"linear.weight", "norm.bias"}
        named = report.nan_in if value != value else report.inf_in  # noqa: PLR0124
        assert set(named) == {"linear.weight", "norm.bias"}
        assert same(cases.everything(session), before)
        for each in (session, calm):
            assert cases.go(each, *good[:accumulate]).applied
    assert same(cases.everything(session), cases.everything(calm))
    assert session.steps_skipped == 3
    assert session.steps_applied == 3


@cases.every_form
@pytest.mark.parametrize("name", ["nadam", "asgd", "rmsprop", "adagrad"])
def test_nothing_moves_elsewhere(form: str, name: str) -> None:
    """Law: the same for optimizers that step themselves."""
    session = cases.start(cases.OPTIMIZERS[name], form)
    cases.go(session, cases.slopes_of(session.model, 1))
    before = cases.everything(session)
    assert cases.go(session, poisoned(session, 2, torch.nan, "conv.weight")).skipped
    assert same(cases.everything(session), before)


@cases.every_form
@cases.both_ways
def test_an_overflow_of_the_sum(form: str, *, kernel: bool) -> None:
    """Law: micro-batches whose sum alone is infinite skip the step as well."""
    session = cases.start(cases.SGD, form, kernel=kernel, accumulate=3)
    before = cases.everything(session)
    # Each gradient is a third of it, and fp32 ends at 3.4e38.
    slopes = {"linear.weight": torch.full((6, 5), 3.0e38).bfloat16()}
    assert cases.go(session, slopes, slopes, slopes).applied
    assert not same(cases.everything(session), before)
    before = cases.everything(session)
    session.model.linear.weight.register_hook(lambda gradient: gradient * 3.0)
    assert cases.go(session, slopes, slopes, slopes).skipped
    assert same(cases.everything(session), before)
