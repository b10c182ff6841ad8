"""Counts of updates that rounding swallowed, beside a count of every number."""

from collections.abc import Callable
from functools import partial
from typing import Any

import master_cases as cases
import pytest
import torch
from master_cases import Make
from small_training import same
from torch import Tensor

from halfstep.errors import UserError
from halfstep.masters import rounding_loss
from halfstep.session.session import Session

WORDS = (*cases.FORMS, "none")
TINY: Make = partial(torch.optim.SGD, lr=2.0**-12)
"""Its updates are below half an ulp of bf16, and far above one of fp32."""


def held(session: Session) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    truth = {name: value.clone() for name, value in session.weights().items()}
    state = session.model.state_dict()
    return truth, {name: value.clone() for name, value in state.items()}


def by_hand(
    session: Session,
    slopes: dict[str, Tensor],
    pick: Callable[[str, Tensor], Tensor] = lambda _, flat: flat,
) -> tuple[list[int], rounding_loss.RoundingLoss]:
    before = held(session)
    assert cases.go(session, slopes).applied
    after = held(session)
    counts = [0, 0, 0]
    for name, slope in slopes.items():
        moves = pick(name, (slope != 0).reshape(-1))
        counts[0] += int(moves.sum())
        for place in (0, 1):
            stayed = before[place][name] == after[place][name]
            counts[1 + place] += int((pick(name, stayed.reshape(-1)) & moves).sum())
    (found,) = session.lost_updates()
    return counts, found


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    ("make", "clip"),
    [(cases.SGD, None), (TINY, 0.5), (cases.ADAMW, None), (torch.optim.RMSprop, 0.5)],
)
def test_counts(word: str, make: Make, clip: float | None) -> None:
    """Law: counts are those of a comparison of all numbers; slopes of 0 are out.

    Weights and state are those of a session that does not count.
    """
    session, other = (cases.start(make, word, clip_grad_norm=clip) for _ in range(2))
    session.count_rounding_loss(every=1)
    for number in range(3):
        slopes = cases.slopes_of(session.model, number)
        for slope in slopes.values():
            slope.view(-1)[0] = 0.0
        counts, found = by_hand(session, slopes)
        cases.go(other, slopes)
        assert same(held(session), held(other))
        assert found.counts.tolist() == counts
        assert (found.step, found.group) == (number + 1, 0)
        had, stayed, hidden = counts
        assert found.below_publish == hidden / had
        assert found.share == (0.0 if word == "stochastic" else stayed / had)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_an_update_of_zero_is_not_lost(rate: Any) -> None:
    """Law: at a rate of 0, as in a warm-up's first step, there is nothing to lose."""
    session = cases.start(cases.ADAMW, "none")
    session.count_rounding_loss(every=1)
    (group,) = session.optimizer.param_groups
    usual, group["lr"] = group["lr"], rate
    cases.go(session, cases.slopes_of(session.model, 0))
    (found,) = session.lost_updates()
    assert found.counts.tolist() == [0, 0, 0]
    assert found.share is None
    group["lr"] = usual
    counts, _ = by_hand(session, cases.slopes_of(session.model, 1))
    assert counts[0] > 0


def test_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of a large group numbers drawn once count, the same in each step."""
    monkeypatch.setattr(rounding_loss, "SAMPLE", 20)
    session = cases.start(TINY, "split")
    session.count_rounding_loss(every=1)
    counter = session._rounding_loss
    assert counter is not None
    cases.go(session, cases.slopes_of(session.model, 0))
    masters = cases.masters_of(session)
    names = {id(p): name for name, p in session.model.named_parameters()}
    drawn = {
        names[id(masters.model_param(param))]: places
        for param, places in counter._sample_indices.items()
    }
    looked = sum(places.numel() for places in drawn.values())
    assert abs(looked - 20) <= len(drawn)  # each is rounded, and has one at least

    def pick(name: str, flat: Tensor) -> Tensor:
        return flat[drawn[name]]

    slopes = cases.slopes_of(session.model, 1)
    slopes["other.weight"] = torch.eye(4, 3).bfloat16()
    counts, found = by_hand(session, slopes, pick)
    assert found.counts.tolist() == counts


@pytest.mark.parametrize("every", [1, 3])
@cases.both_ways
def test_every_so_many_steps(every: int, *, kernel: bool) -> None:
    """Law: only then is anything counted; a skipped step is not."""
    session = cases.start(cases.SGD, "split", kernel=kernel)
    session.count_rounding_loss(every=every)
    seen = []
    for number in range(1, 10):
        slopes = cases.slopes_of(session.model, 1)
        if number == 9:
            slopes["conv.bias"].fill_(torch.inf)
        cases.go(session, slopes)
        seen.append([found.step for found in session.lost_updates()])
    assert seen[:4] == ([[1], [2], [3], [4]] if every == 1 else [[], [], [3], [3]])
    assert seen[8] == seen[7]


def test_groups() -> None:
    """Law: each group has its count; one without any gradient has no share."""
    model = cases.Mixed()
    groups = [
        {"params": [*model.linear.parameters()]},
        {"params": [*model.conv.parameters()], "lr": 1e-30},
        {"params": [model.other.weight, *model.norm.parameters()]},
    ]
    optimizer = torch.optim.SGD(groups, 0.5)
    session = cases.prepare(model, optimizer)
    session.count_rounding_loss(every=1)
    names = ("linear.weight", "linear.bias", "conv.weight", "conv.bias")
    slopes = {n: torch.ones_like(model.get_parameter(n)) for n in names}
    cases.go(session, slopes)
    one, two, three = session.lost_updates()
    assert [found.group for found in (one, two, three)] == [0, 1, 2]
    assert one.share == 0.0
    assert two.share == two.below_publish == 1.0
    assert three.share is None
    assert three.below_publish is None
    assert three.counts.tolist() == [0, 0, 0]


def test_refused() -> None:
    """Law: less than a step is refused, and updates inside the backward pass are."""
    with pytest.raises(UserError, match="every=0"):
        cases.start(cases.SGD, "split").count_rounding_loss(every=0)
    early = cases.start(cases.SGD, "split", optimizer_in_backward=True)
    with pytest.raises(UserError, match=r"^optimizer_in_backward=True .* excludes"):
        early.count_rounding_loss()
