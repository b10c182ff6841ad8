"""The report of one step: what it says of applied, skipped and unfinished steps."""

import functools
import math
import pickle
from dataclasses import replace

import pytest
import torch

from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.norms import absmax_of, nonfinite_marks
from halfstep.scaling.step_report import (
    NonFiniteMarks,
    NonFiniteParam,
    StepReport,
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
    )


@pytest.mark.parametrize(
    ("flag", "complete"), [(0.0, True), (1.0, True), (2.0, True), (1.0, False)]
)
def test_the_outcome(flag: float, *, complete: bool) -> None:
    """Law: any non-zero flag means skipped, and only then are names asked for.

    While micro-batches accumulate, a step is neither applied nor skipped.
    """
    asked = []

    def culprits() -> tuple[NonFiniteParam, ...]:
        asked.append(1)
        return (NonFiniteParam("layer.weight", inf=True, nan=False),)

    seen = replace(report(flag, complete=complete), culprits=culprits)
    skipped = complete and flag > 0
    assert (seen.skipped, seen.applied) == (skipped, complete and not flag)
    assert asked == []
    names = ("layer.weight",) if skipped else ()
    assert (seen.found_inf_in, seen.inf_in, seen.nan_in) == (names, names, ())
    assert bool(asked) == skipped
    assert (seen.scale, seen.grad_norm) == (512.0, 2.5)


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


def sparse(*places: int, value: float) -> torch.Tensor:
    values = torch.full((len(places),), value)
    indices = torch.tensor([places])
    return torch.sparse_coo_tensor(indices, values, (9,), check_invariants=True)


def test_non_finite_names_every_culprit() -> None:
    """Law: names come in order; inf, -inf, NaN and sparse values all count.

    Each number counts, not their sum, but entries of one place are added.
    """
    named = {
        "inf": torch.tensor([0.0, math.inf]),
        "fine": torch.tensor([3.4e38, 3.4e38]),
        "-inf": torch.tensor([0.0, -math.inf]),
        "nan": torch.tensor([0.0, math.nan]),
        "sparse": sparse(4, value=math.inf),
        "twice": sparse(0, 0, value=3e38),
        "fp16": torch.tensor([65504.0], dtype=torch.float16),
    }
    culprits = find_nonfinite_params([*named.items()])
    assert [(each.name, each.inf, each.nan) for each in culprits] == [
        *(("inf", True, False), ("-inf", True, False), ("nan", False, True)),
        *(("sparse", True, False), ("twice", True, False)),
    ]
    assert dense_values(named["fine"]) is named["fine"]


def test_culprits_seen_later() -> None:
    """Law: what is taken down of gradients tells inf from NaN once they are gone."""
    held = {
        "fine": [0.0, 1.0],
        "inf": [-math.inf, 0.0],
        "nan": [0.0, math.nan],
        "both": [math.nan, math.inf],
        "empty": [],
    }
    grads = [*map(torch.tensor, held.values())]
    culprits = NonFiniteMarks([*held], nonfinite_marks(grads, absmax_of(grads)))
    for gradient in grads:
        gradient.zero_()
    wide = torch.tensor([1e200], dtype=torch.float64)
    complex_ = torch.tensor([3e38 + 3e38j])
    assert absmax_of([wide, complex_]).tolist() == [1e200, complex_.real.item()]
    assert culprits() == (
        NonFiniteParam("inf", inf=True, nan=False),
        NonFiniteParam("nan", inf=False, nan=True),
        NonFiniteParam("both", inf=True, nan=True),
    )


MANY = [
    *(NonFiniteParam(name, inf=True, nan=False) for name in "abcde"),
    NonFiniteParam("a", inf=False, nan=True),
]
UNKNOWN = "step 2 skipped: a gradient held inf or NaN; loss scale 1"
PRINTED: dict[str, StepReport] = {
    "step 1 is not complete: nothing is updated yet": StepReport(0, complete=False),
    "step 7 applied: loss scale 1": StepReport(7, complete=True),
    "step 3 applied: loss scale 512, gradient norm 2.5": report(0.0),
    "step 3 skipped: inf in layer.weight; loss scale 512": report(1.0),
    "step 2 skipped: inf in a, b, c and 2 more; NaN in a; loss scale 1": StepReport(
        2, complete=True, found_inf=True, culprits=lambda: tuple(MANY)
    ),
    UNKNOWN: StepReport(2, complete=True, found_inf=True),
    f"{UNKNOWN} ": StepReport(
        2,
        complete=True,
        found_inf=True,
        culprits=functools.partial(nonfinite_params_of, [None]),
    ),
    "step 9 applied: loss scale 1, not updated: a, b, c and 1 more": StepReport(
        9, complete=True, left_out=tuple("abcd")
    ),
}


@pytest.mark.parametrize("words", PRINTED)
def test_a_report_is_printed_in_one_line(words: str) -> None:
    """Law: it says what the step did, without the names of functions or addresses."""
    seen = PRINTED[words]
    assert str(seen) == repr(seen) == str(seen.read()) == words.rstrip()
