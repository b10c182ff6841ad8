"""The report of one step: what it says of applied, skipped and unfinished steps."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from halfstep.stats import StepReport, dense, non_finite


def report(flag: float, *, complete: bool = True) -> StepReport:
    """Return a report with every field away from its default."""
    return StepReport(
        step=3,
        complete=complete,
        scale_used=torch.tensor(512.0),
        found_inf=torch.tensor(flag),
        norm=torch.tensor(2.5),
        names=lambda: ("layer.weight",),
    )


@pytest.mark.parametrize("flag", [1.0, 2.0])
def test_skipped(flag: float) -> None:
    """Law: any non-zero flag means skipped, and only then are names told."""
    seen = report(flag)
    assert (seen.skipped, seen.applied) == (True, False)
    assert seen.found_inf_in == ("layer.weight",)
    assert (seen.scale, seen.grad_norm) == (512.0, 2.5)


def test_applied() -> None:
    """Law: a zero flag means applied; a name that slipped in is not told."""
    seen = report(0.0)
    assert (seen.skipped, seen.applied) == (False, True)
    assert seen.found_inf_in == ()


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_unfinished(flag: float) -> None:
    """Law: while micro-batches accumulate, a step is neither applied nor skipped."""
    seen = report(flag, complete=False)
    assert (seen.skipped, seen.applied) == (False, False)
    assert seen.found_inf_in == ()


def test_plain_numbers() -> None:
    """Law: the defaults read as a step at scale 1 without a norm."""
    seen = StepReport(1, complete=True)
    assert (seen.skipped, seen.applied, seen.scale) == (False, True, 1.0)
    assert seen.grad_norm is None
    assert seen.found_inf_in == ()


def test_names_are_asked_for_late() -> None:
    """Law: nobody looks for culprits before `found_inf_in` is read on a skip."""
    asked = []

    def names() -> tuple[str, ...]:
        asked.append(1)
        return ("w",)

    applied = StepReport(1, complete=True, found_inf=torch.tensor(0.0), names=names)
    skipped = StepReport(1, complete=True, found_inf=torch.tensor(1.0), names=names)
    assert applied.found_inf_in == ()
    assert asked == []
    assert skipped.found_inf_in == ("w",)
    assert asked == [1]


def test_a_report_is_a_value() -> None:
    """Law: no field of a report can be changed afterwards."""
    seen = report(0.0)
    for field in fields(StepReport):
        with pytest.raises(FrozenInstanceError):
            setattr(seen, field.name, None)


def test_non_finite_names_every_culprit() -> None:
    """Law: names come in order; inf, -inf, NaN and sparse values all count."""
    bad = [math.inf, -math.inf, math.nan]
    named = [(str(value), torch.tensor([0.0, value])) for value in bad]
    named.insert(1, ("fine", torch.tensor([3.4e38])))
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[4]]), torch.tensor([math.inf]), (9,), check_invariants=True
    )
    named.append(("sparse", sparse))
    named.append(("fp16", torch.tensor([65504.0], dtype=torch.float16)))
    assert non_finite(named) == ("inf", "-inf", "nan", "sparse")


def test_dense_sums_what_a_sparse_tensor_holds_twice() -> None:
    """Law: entries of one place are added: 3e38 twice is inf, though each is not."""
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([3e38, 3e38]), (2,), check_invariants=True
    )
    assert dense(twice).tolist() == [math.inf]
    plain = torch.ones(2)
    assert dense(plain) is plain
