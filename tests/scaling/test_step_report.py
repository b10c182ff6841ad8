"""The report of one step: what it says of applied, skipped and unfinished steps."""

from __future__ import annotations

import functools
import math
import pickle

import pytest
import torch

from halfstep.numerics.local_tensor import dense_values
from halfstep.scaling.step_report import (
    NonFiniteParam,
    StepReport,
    deferred_nonfinite,
    find_nonfinite_params,
    nonfinite_params_of,
)


def report(flag: float, *, complete: bool = True) -> StepReport:
    return StepReport(
        step=3,
        complete=complete,
        scale_used=torch.tensor(512.0),
        found_inf=torch.tensor(flag),
        norm=lambda: torch.tensor(2.5),
        culprits=lambda: (NonFiniteParam("layer.weight", inf=True, nan=False),),
        dropped=torch.tensor(2.0),
    )


@pytest.mark.parametrize(
    ("flag", "complete"), [(0.0, True), (1.0, True), (2.0, True), (1.0, False)]
)
def test_the_outcome(flag: float, *, complete: bool) -> None:
    """Law: any non-zero flag means skipped, and only then are names told.

    While micro-batches accumulate, a step is neither applied nor skipped.
    """
    seen = report(flag, complete=complete)
    skipped = complete and flag > 0
    assert (seen.skipped, seen.applied) == (skipped, complete and not flag)
    names = ("layer.weight",) if skipped else ()
    assert (seen.found_inf_in, seen.inf_in, seen.nan_in) == (names, names, ())
    assert (seen.scale, seen.grad_norm) == (512.0, 2.5)
    assert seen.microbatches_dropped == 2


def test_plain_numbers() -> None:
    """Law: the defaults read as a step at scale 1 without a norm."""
    seen = StepReport(1, complete=True)
    assert (seen.skipped, seen.applied, seen.scale) == (False, True, 1.0)
    assert seen.grad_norm is None
    assert seen.found_inf_in == ()


def test_names_are_asked_for_late() -> None:
    """Law: nobody looks for culprits before `found_inf_in` is read on a skip."""
    asked = []

    def culprits() -> tuple[NonFiniteParam, ...]:
        asked.append(1)
        return (NonFiniteParam("w", inf=False, nan=True),)

    flags = torch.tensor(0.0), torch.tensor(1.0)
    applied, skipped = (
        StepReport(1, complete=True, found_inf=flag, culprits=culprits)
        for flag in flags
    )
    assert applied.found_inf_in == ()
    assert asked == []
    assert skipped.found_inf_in == ("w",)
    assert asked == [1]
    assert skipped.nan_in == ("w",)


def test_a_report_that_was_read_needs_no_gradients() -> None:
    """Law: `read` gives an equal report, for pickle and for when gradients go."""
    held = [NonFiniteParam("w", inf=True, nan=True)]
    live = StepReport(
        4,
        complete=True,
        found_inf=torch.tensor(1.0),
        norm=lambda: torch.tensor(float(len(held))),
        culprits=lambda: tuple(held),
    )
    kept = pickle.loads(pickle.dumps(live.read()))  # noqa: S301 -- our own
    held.clear()
    assert live.found_inf_in == ()
    assert (kept.step, kept.skipped, kept.grad_norm) == (4, True, 1.0)
    assert (kept.found_inf_in, kept.inf_in, kept.nan_in) == (("w",), ("w",), ("w",))


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
    seen = [
        (culprit.name, culprit.inf, culprit.nan)
        for culprit in find_nonfinite_params(named)
    ]
    assert seen == [
        ("inf", True, False),
        ("-inf", True, False),
        ("nan", False, True),
        ("sparse", True, False),
    ]


def test_finite_numbers_whose_sum_overflows_are_no_culprits() -> None:
    """Law: each number counts, not their sum: two of 3e38 are finite."""
    assert find_nonfinite_params([("large", torch.full((2,), 3e38))]) == ()


def test_dense_sums_what_a_sparse_tensor_holds_twice() -> None:
    """Law: entries of one place are added: 3e38 twice is inf, though each is not."""
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([3e38, 3e38]), (2,), check_invariants=True
    )
    assert dense_values(twice).tolist() == [math.inf]
    plain = torch.ones(2)
    assert dense_values(plain) is plain


def test_culprits_seen_later() -> None:
    """Law: what is taken down of gradients tells inf from NaN once they are gone."""
    held = {"fine": 1.0, "inf": -math.inf, "nan": math.nan}
    pairs = [(name, torch.tensor([0.0, value])) for name, value in held.items()]
    culprits = deferred_nonfinite(pairs)
    for _, gradient in pairs:
        gradient.zero_()
    assert culprits() == (
        NonFiniteParam("inf", inf=True, nan=False),
        NonFiniteParam("nan", inf=False, nan=True),
    )
    assert deferred_nonfinite([])() == ()


def names(count: int, *, inf: bool) -> tuple[NonFiniteParam, ...]:
    return tuple(
        NonFiniteParam(name, inf=inf, nan=not inf) for name in "abcdef"[:count]
    )


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            StepReport(0, complete=False),
            "step 1 is not complete: nothing is updated yet",
        ),
        (StepReport(7, complete=True), "step 7 applied: loss scale 1"),
        (
            report(0.0),
            (
                "step 3 applied: loss scale 512, gradient norm 2.5, micro-batches "
                "dropped: 2"
            ),
        ),
        (
            report(1.0),
            (
                "step 3 skipped: inf in layer.weight; loss scale 512, micro-batches "
                "dropped: 2"
            ),
        ),
        (
            StepReport(
                2,
                complete=True,
                found_inf=True,
                culprits=lambda: (*names(5, inf=True), *names(1, inf=False)),
            ),
            "step 2 skipped: inf in a, b, c and 2 more; NaN in a; loss scale 1",
        ),
        (
            StepReport(2, complete=True, found_inf=True),
            "step 2 skipped: a gradient held inf or NaN; loss scale 1",
        ),
        (
            StepReport(
                2,
                complete=True,
                found_inf=True,
                culprits=functools.partial(nonfinite_params_of, [None]),
            ),
            "step 2 skipped: a gradient held inf or NaN; loss scale 1",
        ),
        (
            StepReport(9, complete=True, left_out=tuple("abcd")),
            "step 9 applied: loss scale 1, not updated: a, b, c and 1 more",
        ),
    ],
)
def test_a_report_is_printed_in_one_line(seen: StepReport, words: str) -> None:
    """Law: it says what the step did, without the names of functions or addresses."""
    assert str(seen) == words
    assert repr(seen) == words
    assert str(seen.read()) == words
