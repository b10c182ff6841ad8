"""A skipped step leaves running statistics of batch norms as they were before it."""

from typing import Any

import pytest
import torch
from session_cases import same
from torch import Tensor, nn

import halfstep as hs
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

BAD = 2
"""The batch that holds an inf."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def build(
    kind: str = "O0 fp32", model: nn.Module | None = None, **more: Any
) -> Session:
    """Return a session; a fixed scale makes runs of other lengths comparable."""
    level, dtype = kind.split()
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scale = {"loss_scale": 256.0} if dtype == "fp16" else {}
    return hs.prepare(model, optimizer, level, dtype=dtype, **scale, **more)


def batch(number: int) -> Tensor:
    inputs = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
    if number == BAD:
        inputs[0, 0] = torch.inf
    return inputs


def go(session: Session, number: int) -> StepReport:
    with session.autocast():
        loss = session.model(batch(number)).float().square().mean()
    session.backward(loss)
    return session.step()


def stats(session: Session) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in session.model.named_buffers()}


def assert_a_skip_restores(session: Session) -> None:
    before = stats(session)
    assert go(session, BAD).skipped
    same(stats(session), before)


@pytest.mark.parametrize(
    "kind", ["O0 fp32", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16"]
)
def test_a_skipped_batch_was_never_seen(kind: str) -> None:
    """Law: weights, moments and buffers go on as in a run without that batch."""
    session, without = build(kind), build(kind)
    skipped = [go(session, number).skipped for number in range(5)]
    assert skipped == [number == BAD for number in range(5)]
    for number in range(5):
        if number != BAD:
            assert go(without, number).applied
    same(session.model.state_dict(), without.model.state_dict())
    same(session.optimizer.state_dict(), without.optimizer.state_dict())


def test_a_program_without_contexts() -> None:
    """Law: at a level without autocast the same holds if no context is opened."""
    session = build()
    for number in range(4):
        before = stats(session)
        session.backward(session.model(batch(number)).square().mean())
        if session.step().skipped:
            assert number == BAD
            same(stats(session), before)
    assert all(buffer.isfinite().all() for buffer in session.model.buffers())


def test_a_window_is_undone_as_a_whole() -> None:
    """Law: an inf in one micro-batch takes back those of all the window's."""
    session = build(accumulate=2)
    before = stats(session)
    assert not go(session, BAD).complete
    assert go(session, 0).skipped
    same(stats(session), before)
    assert not go(session, 0).complete
    assert go(session, 1).applied
    assert stats(session)["1.num_batches_tracked"] == 2


def test_parameters_left_out_of_an_update() -> None:
    """Law: where weights are updated in backward, an inf there takes them back too."""
    session = build(optimizer_in_backward=True)
    go(session, 0)
    before = stats(session)
    assert go(session, BAD).left_out
    same(stats(session), before)


def test_what_is_computed_between_steps_stays() -> None:
    """Law: what a pass without gradients wrote, or a hand, is not taken back."""
    session = build("O1 bf16")
    go(session, 0)
    with torch.no_grad(), session.autocast():
        session.model(batch(7))
    assert_a_skip_restores(session)
    session.model[1].running_mean = torch.full((8,), 3.0)
    assert go(session, BAD).skipped
    assert bool((stats(session)["1.running_mean"] == 3).all())


def test_a_loaded_session() -> None:
    """Law: a skip after `load_state_dict` goes back to the loaded statistics."""
    session, fresh = build(), build()
    go(session, 0)
    fresh.load_state_dict(session.state_dict())
    fresh.backward(fresh.model(batch(BAD)).square().mean())
    assert fresh.step().skipped
    same(stats(fresh), stats(session))


def test_a_compiled_model() -> None:
    """Law: the same of a compiled model."""
    session = build("O1 bf16")
    session.model = torch.compile(session.model, backend="aot_eager")
    go(session, 0)
    assert_a_skip_restores(session)
    assert go(session, 1).applied


def test_norms_without_statistics() -> None:
    """Law: norms that keep none, and those that are frozen, change nothing."""
    model = network()
    model[1] = nn.BatchNorm1d(8, track_running_stats=False)
    assert go(build(model=model), BAD).skipped
    frozen = network()
    frozen[1].eval()
    assert_a_skip_restores(build(model=frozen))
