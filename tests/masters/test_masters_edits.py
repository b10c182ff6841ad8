"""Weights that others write to, placeholders that nobody may, states that are loaded.

In: sessions over masters. Out: masters that follow an edit, and say so; no word over
ordinary training; runs that go on to the bit.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable

import master_cases as cases
import pytest
import torch
from small_training import same
from torch import nn

from halfstep.masters import MasterWeights
from halfstep.session.session import Session

TOLD = "weights were changed outside the optimizer"


def loaded(session: Session) -> None:
    held = session.model.state_dict()
    session.model.load_state_dict({k: v + 0.5 for k, v in held.items()})


def clamped(session: Session) -> None:
    with torch.no_grad():
        session.model.linear.weight.clamp_(-0.125, 0.125)


@cases.every_form
@pytest.mark.parametrize("edit", [loaded, clamped])
@cases.both_ways
@pytest.mark.parametrize("release", [True, False])
def test_masters_follow(
    form: str, edit: Callable[[Session], None], *, kernel: bool, release: bool
) -> None:
    """Law: the next step starts from the edited weights; a loss of bits is told."""
    session = cases.trained(form, optimizer_in_backward=release, kernel=kernel)
    session.optimizer.param_groups[0]["lr"] = 0.0  # and so no weight decay
    edit(session)
    found = copy.deepcopy(session.model.state_dict())
    slopes = cases.slopes_of(session.model, 1)
    if form == "stochastic":
        cases.go(session, slopes)  # nothing is kept that could be lost
    else:
        with pytest.warns(UserWarning, match=TOLD):
            cases.go(session, slopes)
    assert same(dict(session.model.state_dict()), dict(found))
    edit(session)
    found = copy.deepcopy(session.model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cases.go(session, slopes)  # followed again, and told once
    changed = session.weights()
    for name, value in found.items():
        assert torch.equal(changed[name].to(value.dtype), value), name


@cases.every_form
@cases.both_ways
@pytest.mark.parametrize("release", [True, False])
def test_masters_follow_assigned_data(
    form: str, *, kernel: bool, release: bool
) -> None:
    """Law: `p.data = ...` between steps is followed; compact forms lose no bits."""
    session = cases.trained(form, optimizer_in_backward=release, kernel=kernel)
    session.optimizer.param_groups[0]["lr"] = 0.0
    params = [*session.model.linear.parameters()]
    before = torch.nn.utils.parameters_to_vector(params)
    torch.nn.utils.vector_to_parameters(before / 2, params)
    told = pytest.warns(UserWarning, match=TOLD)
    with told if form == "fp32" else contextlib.nullcontext():
        cases.go(session, cases.slopes_of(session.model, 1))
    after = torch.nn.utils.parameters_to_vector(params)
    # At powers of two the old compensation exceeds half an ulp of the number below.
    torch.testing.assert_close(after, before / 2, rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize("release", [True, False])
def test_only_what_was_changed_follows(*, release: bool) -> None:
    """Law: with fp32 masters one edited number is one that is lost, and one is told."""
    session = cases.trained("fp32", optimizer_in_backward=release)
    masters = cases.masters_of(session)
    before = {n: v.clone() for n, v in session.weights().items()}
    session.optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        session.model.linear.weight[2, 1] = 7.0
    with pytest.warns(UserWarning, match=r"\(1 numbers\)"):
        cases.go(session, cases.slopes_of(session.model, 1))
    before["linear.weight"][2, 1] = 7.0
    assert same(session.weights(), before)
    # The truth has more bits than the weights show, or this says nothing.
    (held,) = (s for s in masters.master_params.values() if s.weight.shape == (6, 5))
    assert not torch.equal(held.master, held.weight.float())


def ordinary(session: Session, number: int) -> None:
    session.model.eval()
    with torch.no_grad(), session.autocast():
        session.model(cases.slopes_of(session.model, number))
    session.model.train()
    session.weights()
    session.memory()
    session.explain()
    state = copy.deepcopy(session.state_dict())
    if number % 3 == 2:
        session.load_state_dict(state)
    session.optimizer.state_dict()
    session.model.state_dict(keep_vars=True)
    session.model.zero_grad()


@cases.every_form
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.5)])
@cases.both_ways
def test_no_false_alarm(
    form: str, accumulate: int, clip: float | None, *, kernel: bool
) -> None:
    """Law: no warning over ordinary training, skipped steps and added groups."""
    model = cases.Mixed()
    later = [*model.conv.parameters()]
    first = [p for n, p in model.named_parameters() if not n.startswith("conv")]
    session = cases.prepare(
        model,
        torch.optim.AdamW(first, 0.01),
        kernel=kernel,
        master=form,
        accumulate=accumulate,
        clip_grad_norm=clip,
    )
    session.scheduler = torch.optim.lr_scheduler.StepLR(session.optimizer, 2, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the loss is nan")  # of the skipped step
        for number in range(6):
            slopes = cases.slopes_of(model, number)
            if number == 3:
                next(iter(slopes.values())).fill_(torch.nan)
            cases.go(session, *[slopes] * accumulate)
            ordinary(session, number)
            if number == 4:
                session.optimizer.add_param_group({"params": later})
                model.zero_grad()


@cases.every_form
def test_no_false_alarm_where_gradients_are_released(form: str) -> None:
    """Law: updates inside the backward pass are no edits, nor is a look in between."""
    session = cases.start(cases.ADAMW, form, optimizer_in_backward=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            slopes = cases.slopes_of(session.model, number)
            with session.autocast():
                loss = session.model(slopes)
            session.backward(loss)
            with torch.no_grad(), session.autocast():
                session.model(slopes)
            before = cases.everything(session)[:3]
            session.step()
            assert same(cases.everything(session)[:3], before)
            ordinary(session, number)


def test_equal_weights_at_another_address() -> None:
    """Law: new layouts, a swap there and back, and edits of masters are no edits."""
    session = cases.trained("fp32", 1)
    session.model.conv.to(memory_format=torch.contiguous_format)
    held = [param.data.clone() for param in session.model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cases.go(session, cases.slopes_of(session.model, 1))
        for param in session.model.parameters():
            other, param.data = param.data, held.pop(0)
            param.data = other
        for master in cases.adopted(session.optimizer):
            master.data.mul_(1.0001)
        cases.go(session, cases.slopes_of(session.model, 2))


@cases.every_lean
def test_placeholders(form: str) -> None:
    """Law: between steps a lean master reads as NaN, takes no memory and no writes."""
    session = cases.trained(form)
    for param in cases.masters_of(session).master_params:
        assert bool(param.isnan().all())
        assert param.untyped_storage().nbytes() == 4
        assert param.dtype == torch.float32
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory"):
            param.add_(1.0)
    truths = session.weights().values()
    assert all(bool(torch.isfinite(truth).all()) for truth in truths)


def test_masters_that_are_shared_follow_an_edit() -> None:
    """Law: weights loaded before a model is wrapped in DDP are the ones it starts from.

    As on the first rank, which gives what it has: then nothing is rounded off either.
    """
    session = cases.trained("fp32")
    masters = cases.masters_of(session)
    exact = session.weights()["conv.weight"].clone()
    with torch.no_grad():
        session.model.linear.weight.fill_(7.0)
    masters.broadcast_(lambda _: None)
    assert bool((session.weights()["linear.weight"] == 7.0).all())
    assert torch.equal(session.weights()["conv.weight"], exact)


@cases.both_ways
def test_two_pairs_of_one_sum(*, kernel: bool) -> None:
    """Law: of two pairs of bf16 that have one sum, a resumed run finds the same.

    1 + 2**-8 + 2**-18 is stored as 1 + 2**-7 and -2**-8, as the rest has 8 bits; their
    sum alone, 1 + 2**-8, would be stored as 1 and 2**-8.
    """
    sides = []
    for value in (1 + 2.0**-8 + 2.0**-18, 0.0):
        model = nn.Linear(2, 2, bias=False)
        model.weight.data.fill_(value)
        sides.append(cases.start(cases.SGD, "kahan", model, kernel=kernel))
    whole, other = sides
    assert bool((whole.model.weight == 1 + 2.0**-7).all())
    other.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert same(cases.everything(whole), cases.everything(other))


def test_a_later_seed_is_another_run() -> None:
    """Law: the seed of random rounding decides, and torch's own does not."""
    found = []
    for seed, others in ((0, 1), (0, 2), (5, 1)):
        torch.manual_seed(others)
        weight = nn.Parameter(torch.full((64,), 1.25, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], 2.0**-9)
        masters = MasterWeights(optimizer, master="stochastic", seed=seed)
        weight.grad = torch.ones_like(weight)
        masters.step()
        found.append(weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
