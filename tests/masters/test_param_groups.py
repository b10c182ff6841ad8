"""Parameter groups that change, or hold a weight twice, over master weights.

The oracle is torch, whose optimizers find the state of a parameter by the parameter.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import master_cases as cases
import portable
import pytest
import torch
from small_training import same
from torch import nn

import halfstep as hs
from halfstep.session.session import Session

FEW_BITS = 2.0**-7
"""Relative, of weights in bf16."""


def in_a_new_group(session: Session) -> None:
    session.optimizer.param_groups.clear()
    session.optimizer.add_param_group({"params": [*session.model.parameters()]})


def in_the_same_group(session: Session) -> None:
    session.optimizer.param_groups[0]["params"] = [*session.model.parameters()]


WAYS = [in_a_new_group, in_the_same_group]


@cases.every_form
@cases.both_ways
@pytest.mark.parametrize("give_back", WAYS)
def test_weights_that_come_back(
    form: str, give_back: Callable[[Session], None], *, kernel: bool
) -> None:
    """Law: they keep their masters and moments to the bit."""
    stays, session = (cases.trained(form, kernel=kernel) for _ in range(2))
    give_back(session)
    for each in (stays, session):
        if not kernel:
            cases.masters_of(each).add_new_params()
            cases.masters_of(each).kernel = None
        cases.go(each, cases.slopes_of(each.model, 2))
    assert same(cases.everything(session), cases.everything(stays))


@cases.every_form
@pytest.mark.parametrize("give_back", WAYS)
def test_moments_loaded_for_weights_that_come_back(
    form: str, give_back: Callable[[Session], None]
) -> None:
    """Law: they are taken, as torch casts them: to the dtype of the 16-bit weight."""
    session = cases.trained(form)
    saved = copy.deepcopy(session.optimizer.state_dict())
    give_back(session)
    for each in session.optimizer.state.values():
        each["exp_avg"].zero_()
    session.optimizer.load_state_dict(saved)
    moments = session.state_dict()["optimizer"]["state"]
    torch.testing.assert_close(moments, saved["state"], rtol=2.0**-8, atol=0)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
@cases.every_form
@cases.both_ways
@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 2}, {"optimizer_in_backward": True}], ids=str
)
def test_a_weight_that_was_away(
    form: str, settings: dict[str, Any], *, kernel: bool
) -> None:
    """Law: nobody updates it meanwhile, and its gradients of meanwhile are cleared."""
    model = cases.Mixed()
    with torch.no_grad():
        model.linear.weight *= 1000  # and so are the compensation terms
    # The group holds one weight twice, as torch allows.
    optimizer = torch.optim.SGD([*model.parameters(), model.linear.bias], 0.125)
    session = cases.prepare(model, optimizer, kernel=kernel, master=form, **settings)
    micro_batches = [{n: torch.ones_like(p) for n, p in model.named_parameters()}]
    micro_batches *= settings.get("accumulate", 1)
    cases.go(session, *micro_batches)
    (group,) = optimizer.param_groups
    held = cases.by_name(session)
    bias = held["linear.bias"]
    kept = [p for name, p in held.items() if name != "linear.weight"]
    group["params"] = [*kept, bias]
    cases.go(session, *micro_batches)
    weight = model.linear.weight
    weight.data.fill_(0.5)  # autograd does not count it
    for _ in range(2):
        cases.go(session, *micro_batches)
    assert weight.eq(0.5).all()
    optimizer.add_param_group({"params": [weight]})
    cases.go(session, *micro_batches)
    right = torch.full((6, 5), 0.375)
    torch.testing.assert_close(
        session.weights()["linear.weight"], right, rtol=FEW_BITS, atol=0
    )


@cases.every_form
def test_groups_that_are_refused(form: str) -> None:
    """Law: nothing has changed then, whoever looks first: the context or the step."""
    stays, session = (cases.trained(form) for _ in range(2))
    model, optimizer = session.model, session.optimizer
    refused: list[Any] = [
        ([model.linear.weight], r"shape \(6, 5\) is in .* groups 0 and 1")
    ]
    if form != "fp32":
        dtypes = torch.bfloat16, torch.float16
        two = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
        refused.append((two, "needs bf16 weights, not torch.float16"))
    slopes = cases.slopes_of(model, 2)
    for params, words in refused:
        optimizer.add_param_group({"params": params})
        with pytest.raises(hs.UserError, match=words), session.autocast():
            pass
        optimizer.param_groups.pop()
    with session.autocast():
        loss = model(slopes)
    session.backward(loss)
    for params, words in refused:
        optimizer.add_param_group({"params": params})
        with pytest.raises(hs.UserError, match=words):
            session.step()
        optimizer.param_groups.pop()
    session.step()
    cases.go(stays, slopes)
    assert same(cases.everything(session), cases.everything(stays))


@cases.every_form
def test_a_group_amid_a_step_in_backward(form: str) -> None:
    """Law: what looks at weights before the step takes no update of it for an edit."""
    stays, session = (cases.trained(form, optimizer_in_backward=True) for _ in range(2))
    slopes = cases.slopes_of(session.model, 2)
    for each in (stays, session):
        with each.autocast():
            loss = each.model(slopes)
        each.backward(loss)
        if each is session:
            extra = nn.Parameter(torch.ones(2))
            session.weights()
            session.optimizer.add_param_group({"params": [extra]})
            session.model.eval()
            with torch.no_grad(), session.autocast():
                session.model(slopes)
            session.model.train()
        each.step()
        cases.go(each, slopes)
    assert same(cases.everything(session), cases.everything(stays))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
@pytest.mark.parametrize("kind", portable.KINDS)
@pytest.mark.parametrize(
    ("make", "losses"), [(torch.optim.SGD, 2), (torch.optim.AdamW, 1)]
)
def test_a_weight_twice_in_its_group(
    kind: str, losses: int, make: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Law: as torch does, it is updated twice; and it is unscaled and measured once."""
    plain = nn.Parameter(torch.ones(2, 2))
    plain.grad = torch.ones(2, 2)
    make([plain] * 2, lr=0.25).step()
    level, dtype, master = kind.split()
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = make([model.weight] * 2, lr=0.25)
    more: dict[str, Any] = {"loss_scale": 64.0, "clip_grad_norm": 4.0}
    session = hs.prepare(model, optimizer, level, dtype=dtype, master=master, **more)
    first_moments = session.first_moments()
    session.count_rounding_loss(every=1)
    for _ in range(losses):
        with session.autocast():
            loss = session.model(torch.ones(1, 2)).float().sum()
        session.backward(loss / losses)
    assert [name for name, _ in session.grads()] == ["weight"]
    assert session.grad_norm() == session.step().grad_norm == 2.0
    weight = session.weights()["weight"]
    torch.testing.assert_close(weight, plain.detach(), rtol=FEW_BITS, atol=0)
    assert session.lost_updates()[0].counts[0] == weight.numel()
    state = copy.deepcopy(session.state_dict())
    (moments,) = state["optimizer"]["state"].values() or [{}]
    separate = [value for value in moments.values() if value is not None]
    assert len(first_moments) == sum(value.dim() > 0 for value in separate)
    hs.fsdp.save(session, tmp_path / "at")
    hs.fsdp.load(session, tmp_path / "at")
    assert same(session.state_dict(), state)
