"""Every form of masters under every optimizer of torch, beside torch's own in fp32."""

from typing import Any

import kernel_twin as twin
import master_cases as cases
import pytest
import torch
from master_cases import Make
from small_training import same
from torch import Tensor, nn

from halfstep.masters import MasterWeights, generic_step
from halfstep.masters.encoding import MasterParam, RoundingRng
from halfstep.masters.fused_step import ParamUpdate
from halfstep.session.session import Session

every_optimizer = pytest.mark.parametrize("name", cases.OPTIMIZERS)


def stored(
    form: str, slot: MasterParam, right: Tensor, state: dict[str, Any], rng: RoundingRng
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return weight and residual, and the state, that torch's results become."""
    keys = [k for k, v in state.items() if k != "step" and v.shape == right.shape]
    kind = torch.bfloat16 if form in twin.LEAN else torch.float32
    moments, place = tuple(state[key] for key in keys), (None, False, slot.param_index)
    kept = tuple(moment.to(kind) for moment in moments)
    like = ParamUpdate(slot.weight.detach(), right, slot.residual, kept, *place)
    plain = ParamUpdate(right, right, None, moments, *place)
    parts = [*twin.in_form(plain, like, form, (rng.seed, rng.step))]
    count = len(parts) - len(keys)
    return parts[:count], state | dict(zip(keys, parts[count:], strict=True))


def assert_step(
    session: Session, make: Make, form: str, *slopes: dict[str, Tensor]
) -> None:
    seen = cases.Watched(session.model)
    torchs = cases.Twin(make, session)
    masters = cases.masters_of(session)
    clock = masters.rng
    assert cases.go(session, *slopes).applied
    torchs.step(seen.seen, session.clip_grad_norm)
    for name, held in cases.by_name(session).items():
        right, slot = torchs.params[name], masters.master_params.get(held)
        state = torchs.optimizer.state.get(right, {})
        if slot is None:
            assert torch.equal(held, right), name
            assert same(session.optimizer.state.get(held, {}), dict(state)), name
            continue
        got = [slot.weight.detach()]
        if slot.residual is not None:
            got.append(slot.residual)
        if name not in seen.seen and form == "stochastic":
            # Rounding what bf16 holds changes nothing, whatever was drawn.
            assert torch.equal(right, slot.weight.float())
        parts, rounded = stored(form, slot, right.detach(), dict(state), clock)
        assert same(got, parts), (name, form)
        if name not in seen.seen:
            rounded = {k: v.to(rounded[k].dtype) for k, v in state.items()}
        assert same(dict(session.optimizer.state.get(held, {})), rounded), name


@every_optimizer
@cases.every_form
@cases.windows
def test_a_step_is_torchs_own(
    name: str,
    form: str,
    accumulate: int,
    clip: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: each step is torch's own in fp32 from what is stored, then one rounding."""
    monkeypatch.setattr(generic_step, "MAX_PIECE_NUMEL", 20)
    make = cases.OPTIMIZERS[name]
    model = cases.model_for(name)
    more = {"accumulate": accumulate, "clip_grad_norm": clip}
    session = cases.start(make, form, model, kernel=False, **more)
    for number in range(2):
        seeds = range(number * accumulate, (number + 1) * accumulate)
        assert_step(session, make, form, *(cases.slopes_of(model, s) for s in seeds))


@cases.every_form
@pytest.mark.parametrize("shape", [(), (1,), (0, 3)])
@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam", "asgd"])
def test_odd_shapes(form: str, shape: tuple[int, ...], name: str) -> None:
    """Law: scalars and empty tensors follow a plain fp32 loop, counters included.

    SGD's roundings in a lean form only add up: 2**-17 of a weight of 1 a step with
    kahan, an ulp of 2**-7 at random. Elsewhere moments are rounded, counters never.
    """
    weight = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    wide = nn.Parameter(torch.ones(shape))
    make = cases.OPTIMIZERS[name]
    optimizer, reference = make([weight]), make([wide])
    masters = MasterWeights(optimizer, master=form)
    steps = 5
    for _ in range(steps):
        weight.grad, wide.grad = torch.ones_like(weight), torch.ones_like(wide)
        masters.step()
        optimizer.zero_grad()
        reference.step()
    (held,) = cases.adopted(optimizer)
    truth = masters.fp32_value(held)
    if form in {"fp32", "split"}:
        assert torch.equal(truth, wide)
        assert same(optimizer.state_dict(), reference.state_dict())
    elif weight.numel() and name == "sgd":
        loss = 2.0**-17 + 2.0**-23 if form == "kahan" else 2.0**-7
        assert (truth - wide).abs().max() <= steps * loss
    for key, value in reference.state.get(wide, {}).items():
        if key in {"step", "mu_product", "eta", "mu"} and not value.dim():
            assert torch.equal(optimizer.state[held][key], value), key


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
