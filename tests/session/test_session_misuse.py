"""What a session says when its model or optimizer is used as without it."""

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from master_cases import adopted
from messages import Worded
from small_training import same
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from weight_averages import DocumentedAverage, averaged

import halfstep as hs
from halfstep.errors import UserError
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session


def build(kind: str, **more: Any) -> Session:
    level, dtype = kind.split()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hs.prepare(model, optimizer, level, dtype=dtype, **more)


def loss_of(session: Session, scale: float = 1.0) -> Tensor:
    with session.autocast():
        out = session.model(torch.arange(8.0).view(2, 4) * scale)
        loss: Tensor = (out.float() ** 3).mean()
    return loss


@contextlib.contextmanager
def warns_here(words: str) -> Iterator[None]:
    """Expect a warning that points to this file."""
    with pytest.warns(UserWarning, match=words) as caught:
        yield
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["O1 fp16", "O3 fp16", "O2 fp16 masters"])
def test_clipping_by_hand(kind: str) -> None:
    """Law: clipping scaled gradients says once what to call instead.

    So it does of sums of micro-batches, which lie with the master weights.
    """
    masters = kind.endswith("masters")
    session = build(kind[:7], accumulate=1 + masters)
    for number in range(2):
        for _ in range(session.accumulate - 1):
            micro(session, 0)
        session.backward(loss_of(session))
        params = adopted(session.optimizer) if masters else session.model.parameters()
        clip_grad_norm_(params, 1.0)
        if number == 0:
            with warns_here("^gradients were changed between .*prepare.*clip_grad_no"):
                session.step()
        else:
            session.step()  # said once


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"clip_grad_norm": 1.0}],
)
@pytest.mark.parametrize("kind", ["O1 fp16", "O2 fp16", "O3 fp16"])
def test_reading_and_freezing_are_no_changes(
    kind: str, options: dict[str, Any]
) -> None:
    """Law: gradients may be read, and set to None, between backward and step."""
    session = build(kind, **options)
    for _ in range(4):
        session.backward(loss_of(session))
        session.backward(loss_of(session))
        params = list(session.model.parameters())
        norms = [p.grad.norm() for p in params if p.grad is not None]
        assert all(torch.isfinite(norm.float()) or norm.isinf() for norm in norms)
        params[-1].grad = None
        session.step()


def test_clipping_by_hand_without_a_scale() -> None:
    """Law: where nothing is scaled, clipping by hand works: the step is as long."""
    session = build("O2 bf16")
    before = session.weights()["0.weight"].clone()
    session.backward(loss_of(session, 100.0))
    clip_grad_norm_(session.model.parameters(), 2.0**-10)
    session.step()
    moved = session.weights()["0.weight"] - before
    assert 0 < moved.norm() <= 0.1 * 2.0**-10 * (1 + 2.0**-7)


def test_a_plain_loop_at_o1_fp16() -> None:
    """Law: a step without a loss scale says once what to call; a scaled one raises."""
    session = build("O1 fp16")
    loss_of(session).backward()
    with pytest.warns(UserWarning, match=r"^optimizer\.step\(\) .*session\.backward"):
        session.optimizer.step()
    session.optimizer.step()  # said once
    session.zero_grad()
    session.backward(loss_of(session))
    with pytest.raises(UserError, match=r"multiplied by the loss scale: call session"):
        session.optimizer.step()
    assert session.step().complete  # gradients are kept


def test_a_plain_step_after_our_backward() -> None:
    """Law: it is told once that it leaves out clipping, window and schedule."""
    session = build("O1 bf16", accumulate=2, clip_grad_norm=1.0)
    session.backward(loss_of(session))
    words = r"^optimizer\.step\(\) .* after session\.backward\(\): .* neither clips"
    with warns_here(words):
        session.optimizer.step()
    session.optimizer.step()  # said once
    session.step()


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.GRU(4, 4)])
def test_a_call_outside_of_the_context(layer: nn.Module, worded: Worded) -> None:
    """Law: torch's error about dtypes then names the context that was left out."""
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    session = hs.prepare(layer, optimizer, "O2", dtype="bf16")
    batch = torch.ones(2, 4, 4)
    recurrent = isinstance(layer, nn.RNNBase)
    with pytest.raises(ValueError if recurrent else RuntimeError) as caught:
        layer(batch)
    first, *_, last = str(caught.value).splitlines()
    assert "type" in first  # torch's own words
    assert "outside of session.autocast()" in last
    worded(last)
    if not recurrent:
        with session.autocast():
            assert layer(batch).dtype == torch.float32


def test_other_errors_arrive_as_they_are() -> None:
    """Law: errors inside the context, and errors of another kind, are not changed."""
    session = build("O2 bf16")
    with pytest.raises(RuntimeError) as caught:
        session.model(torch.ones(2, 5, dtype=torch.bfloat16))
    assert "session.autocast" not in str(caught.value)
    with session.autocast(), pytest.raises(RuntimeError) as caught:
        session.model(torch.ones(2, 5))
    assert "session.autocast" not in str(caught.value)


def test_a_state_dict_of_low_weights() -> None:
    """Law: `model.state_dict()` says once that its weights are 16-bit."""
    session = build("O2 bf16")
    words = r"^model\.state_dict\(\) holds bf16 weights: use session\.weights\(\)"
    with warns_here(words):
        state = session.model.state_dict()
    assert state["0.weight"].dtype == torch.bfloat16
    session.model.state_dict()  # said once


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel])
def test_a_copy_of_low_weights(copied: Callable[[nn.Module], nn.Module]) -> None:
    """Law: `copy.deepcopy(model)` says once that the copy is 16-bit; pickling does not.

    Nor do copies of the copy, nor of a model whose session is gone. A copy of a part
    does, and then the model's is silent.
    """
    session = build("O2 bf16")
    pickle.loads(pickle.dumps(session.model))  # noqa: S301 -- our own
    with warns_here("^the copy of the model holds bf16 weights.* session.weights()"):
        twin = copied(session.model)
    assert next(twin.parameters()).dtype == torch.bfloat16
    copied(session.model).state_dict()
    copied(twin)
    other = build("O2 bf16").model
    gc.collect()
    copied(other)
    part = build("O2 bf16")
    assert isinstance(part.model, nn.Sequential)
    with warns_here("^the copy of the model holds bf16 weights"):
        copied(part.model[0])
    copied(part.model)


def test_an_average_of_weights() -> None:
    """Law: the documented average of an O2 model is that of its master weights.

    An average of the 16-bit weights is not.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    average = DocumentedAverage(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    session = hs.prepare(model, optimizer, "O2", dtype="bf16")
    with pytest.warns(UserWarning, match="loses small updates"):
        low_average = averaged(model)
    for _ in range(60):
        inputs = torch.randn(16, 8)
        with session.autocast():
            loss = (session.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        session.backward(loss)
        session.step()
        average.update(session.weights(), session.optimizer)
        low_average.update_parameters(model)
    average.assert_exact()
    assert average.error_of(low_average) > average.moved() / 4


@pytest.mark.filterwarnings("error")
def test_states_that_are_right_say_nothing() -> None:
    """Law: a session's own states, levels without masters, and copies do not warn."""
    session = build("O2 bf16")
    session.state_dict()
    session.weights()
    session.load_state_dict(session.state_dict())
    pickle.loads(pickle.dumps(session.model)).state_dict()  # noqa: S301 -- our own
    model = nn.Linear(4, 3).bfloat16()
    model.register_buffer("turns", torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = hs.prepare(model, optimizer, "O2", dtype="bf16")
    session.weights()
    session.state_dict()
    for kind, more in (
        ("O1 bf16", {}),
        ("O3 bf16", {}),
        ("O2 bf16", {"master": "none"}),
    ):
        build(kind, **more).model.state_dict()


def micro(session: Session, *numbers: int) -> list[StepReport]:
    reports = []
    for number in numbers:
        session.backward(loss_of(session, 1 + number / 4))
        reports.append(session.step())
    return reports


KINDS = pytest.mark.parametrize("kind", ["O0 fp32", "O1 fp16", "O2 bf16"])


@KINDS
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}])
def test_flush_is_a_smaller_window(kind: str, options: dict[str, Any]) -> None:
    """Law: 2 of 8 micro-batches, flushed, are a step of 2: to the bit, 8/2 is exact.

    A backward pass without its `step` counts; without any, nothing changes.
    """
    scale = 1024.0 if kind.endswith("fp16") else "auto"  # neither overflows
    session = build(kind, accumulate=8, loss_scale=scale, **options)
    twin = build(kind, accumulate=2, loss_scale=scale, **options)
    assert not session.flush().complete
    for number in range(2):
        if number == 0:
            assert not any(report.complete for report in micro(session, 1, 2))
        else:
            micro(session, 1)
            session.backward(loss_of(session, 1.5))
        report = session.flush()
        (_, expected) = micro(twin, 1, 2)
        assert (report.step, report.applied) == (expected.step, expected.applied)
        assert report.grad_norm == expected.grad_norm
        assert same(session.weights(), twin.weights())
    assert same(session.state_dict()["optimizer"], twin.state_dict()["optimizer"])
    # The next window is whole.
    assert [r.complete for r in micro(session, *range(8))] == [False] * 7 + [True]
    before = session.weights()["0.bias"].clone()
    report = session.flush()
    assert (report.complete, report.step) == (False, 3)
    assert torch.equal(session.weights()["0.bias"], before)


def test_flush_without_accumulation() -> None:
    """Law: where each backward pass is a step, flush ends the one under way."""
    for more in ({}, {"optimizer_in_backward": True}):
        session = build("O2 bf16", **more)
        session.backward(loss_of(session))
        assert session.flush().applied
        assert not session.flush().complete


def test_evaluation_with_micro_batches_pending() -> None:
    """Law: weights that lack micro-batches are not evaluated in silence; once."""
    session = build("O1 bf16", accumulate=2)
    with torch.no_grad():
        loss_of(session)
    micro(session, 1)
    session.model.eval()
    words = r"^evaluation with 1 of 2 micro-batches pending: .* session\.flush\(\)"
    with torch.no_grad():
        with warns_here(words):
            loss_of(session)
        loss_of(session)


def test_forward_passes_without_gradients_in_a_window() -> None:
    """Law: a teacher, a metric, and a checkpoint's inner region are no evaluation."""
    session = build("O1 bf16", accumulate=3)
    micro(session, 1)
    with torch.no_grad():
        loss_of(session)  # in training mode: a metric, or a teacher
    session.model.eval()  # as for layers whose statistics are frozen

    def block(batch: Tensor) -> Tensor:
        with session.autocast():
            out: Tensor = session.model(batch)
        return out

    with session.autocast():
        batch = torch.ones(2, 4, requires_grad=True)
        out = checkpoint(block, batch, use_reentrant=True)
    session.backward(out.float().sum())
    session.step()


@KINDS
def test_gradients_cleared_between_micro_batches(kind: str) -> None:
    """Law: the habitual `optimizer.zero_grad()` at the top of the loop is told once."""
    session = build(kind, accumulate=4)
    session.optimizer.zero_grad()
    micro(session, 1)
    session.optimizer.zero_grad()
    words = r"^gradients of 1 of 4 micro-batches were cleared .*session\.step\(\) clear"
    with warns_here(words):
        micro(session, 2)
    session.optimizer.zero_grad()
    micro(session, 3)  # said once


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_schedule_stepped_by_both(by_hand: bool) -> None:
    """Law: a schedule that the session steps, and the loop too, is told once."""
    session = build("O0 fp32")
    schedule = torch.optim.lr_scheduler.StepLR(session.optimizer, 1, 0.5)
    session.scheduler = schedule
    micro(session, 1)
    if by_hand:
        schedule.step()
        words = "^the StepLR was given to prepare, .* by hand"
        with warns_here(words):
            micro(session, 2)
        schedule.step()
    micro(session, 3)


@KINDS
def test_a_step_for_each_window(kind: str) -> None:
    """Law: a loop that counts micro-batches itself, as the session does, is told.

    But losses of one region, as many as `accumulate`, are one micro-batch.
    """
    session = build(kind, accumulate=3)
    for complete in (False, False, True):
        with session.autocast():
            parts = [session.model(torch.ones(2, 4)).float() for _ in range(3)]
        for part in parts:
            session.backward(part.sum())
        assert session.step().complete == complete
    for _ in range(3):
        session.backward(loss_of(session))
    words = "^session.step.* after 3 backward passes, .* one micro-batch of 3: call"
    with warns_here(words):
        session.step()


def break_off(session: Session) -> BaseException:
    """Return the error of a pass that fails after the last layer's gradients."""

    def fail(_: Tensor) -> None:
        message = "out of memory"
        raise RuntimeError(message)

    hidden: list[Tensor] = []
    handle = session.model[0].register_forward_hook(lambda *x: hidden.append(x[2]))
    loss = loss_of(session)
    handle.remove()
    hidden[0].register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        session.backward(loss)
    return caught.value


@KINDS
def test_a_backward_pass_that_fails(kind: str) -> None:
    """Law: it drops its window whole; a step has nothing then, the next pass begins."""
    session, twin = (build(kind, accumulate=2) for _ in range(2))
    for first in (False, True):
        if not first:
            micro(session, 3)
        break_off(session)
        assert session.state_dict()  # no gradient is pending
        for call in (session.step, session.flush):
            with pytest.raises(RuntimeError, match=r"exception.* were dropped: begin"):
                call()
        assert same(*([r.applied for r in micro(s, 1, 2)] for s in (session, twin)))
        assert same(session.weights(), twin.weights())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("O1 bf16", "fp32"), ("O2 bf16", "the dtypes of the weights")]
)
def test_a_loop_without_the_context(kind: str, dtype: str) -> None:
    """Law: a model that begins with an embedding runs; the first pass warns, once."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    level, low = kind.split()
    session = hs.prepare(model, optimizer, level, dtype=low)
    assert "outside" not in str(session.explain())
    outside = r"^the forward pass ran outside session\.autocast\(\), .* it ran in "
    with warns_here(outside + dtype):
        session.backward(model(torch.arange(4)).float().mean())
    assert {row[5] for row in session.explain().rows} == {
        "no forward pass ran inside session.autocast()"
    }
    assert {row[3] for row in session.explain().rows} == {
        row[4] for row in session.explain().rows
    }
    session.step()
    session.backward(model(torch.arange(4)).float().mean())  # warned once
    with session.autocast():
        model(torch.arange(4))
    assert "no forward pass" not in str(session.explain())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["O0 fp32", "O1 bf16", "O2 bf16", "O3 bf16"])
def test_a_context_of_another_session(kind: str) -> None:
    """Law: a context opened anywhere counts; levels without autocast need none."""
    session, other = build(kind), build("O1 bf16")
    with other.autocast():
        out: Tensor = session.model(other.model[0].weight)
    session.backward(out.float().sum())
    assert session.step().complete
    if kind in {"O0 fp32", "O3 bf16"}:
        session = build(kind)
        session.backward(session.model(torch.ones(2, 4)).sum())


@pytest.mark.parametrize("make", [torch.amp.GradScaler, hs.GradScaler])
@pytest.mark.parametrize(
    "total",
    [
        lambda scaler, loss: scaler.scale(loss) / 4,
        lambda scaler, loss: torch.tensor(0.5) * scaler.scale(loss.reshape(1)).mean(),
        lambda scaler, loss: 0.1 * loss - scaler.scale(-loss),
        lambda scaler, loss: torch.stack([loss, scaler.scale(loss)]).sum(),
        lambda scaler, loss: -scaler.scale(loss.reshape(1)).squeeze(),
    ],
)
def test_a_loss_scaled_by_a_scaler(
    make: Callable[[str], torch.amp.GradScaler],
    total: Callable[[torch.amp.GradScaler, Tensor], Tensor],
) -> None:
    """Law: `session.backward(scaler.scale(loss))` raises; the loss itself is right."""
    session, scaler = build("O1 bf16"), make("cpu")
    loss = loss_of(session)
    words = r"scale\(loss\).*call session\.backward\(loss\)"
    with pytest.raises(UserError, match=words):
        session.backward(total(scaler, loss))
    session.backward(loss)
    assert session.step().applied


@pytest.mark.parametrize("factor", [torch.tensor(65536.0), 65536.0, torch.ones(1)])
def test_a_loss_with_a_weight(factor: Tensor | float) -> None:
    """Law: a loss times a number is not taken for a scaled one, whatever the number.

    Looking for the factor of a loss does not recompute a checkpointed one.
    """
    torch.amp.GradScaler("cpu").scale(torch.ones(()))
    session, calls = build("O0 fp32"), []

    def loss_in_block(batch: Tensor) -> Tensor:
        calls.append(batch)
        return (session.model(batch).sum() * factor).sum() / 3

    loss = checkpoint(loss_in_block, torch.ones(2, 4), use_reentrant=False)
    session.backward(loss)
    assert len(calls) == 2
    session.step()
    session.backward((loss_of(session) * factor).sum() / 3)
    assert session.step().complete


def test_clipping_of_another_model() -> None:
    """Law: a pending window changes no call of torch's for other models."""
    session = build("O2 bf16", accumulate=2)
    micro(session, 0)
    assert clip_grad_norm_([], 1.0) == 0


def test_gradients_of_a_plain_backward() -> None:
    """Law: gradients that others made make no step, and the error says whose could."""
    session = build("O2 bf16")
    loss_of(session).backward()
    assert not session.flush().complete
    words = r"session\.backward\(loss\) in place of loss\.backward\(\), or of another"
    with pytest.raises(RuntimeError, match=words):
        session.step()


@pytest.mark.parametrize("again", [hs.Session.step, hs.Session.flush])
@pytest.mark.parametrize(("kind", "accumulate"), [("O1 bf16", 1), ("O2 bf16", 2)])
def test_a_step_that_raised(
    kind: str, accumulate: int, again: Callable[[Session], StepReport]
) -> None:
    """Law: no step uses its gradients, which may be unscaled already, again.

    The next window is whole.
    """
    session = build(kind, accumulate=accumulate)

    def fail(*_: object) -> None:
        handle.remove()
        raise KeyError

    handle = session.optimizer.register_step_pre_hook(fail)
    session.backward(loss_of(session))
    with pytest.raises(KeyError):
        session.flush()
    with pytest.raises(RuntimeError, match=r"or step ended with.* were dropped"):
        again(session)
    assert (session.steps_applied, session.steps_skipped) == (0, 0)
    reports = micro(session, *range(accumulate))
    assert [r.complete for r in reports] == [False] * (accumulate - 1) + [True]


@pytest.mark.parametrize("more", [{"accumulate": 2}, {"optimizer_in_backward": True}])
def test_a_window_without_gradients(more: dict[str, Any]) -> None:
    """Law: a step that finds no gradient raises, and the next window is whole."""
    session, twin = (build("O2 bf16", **more) for _ in range(2))
    other = torch.ones((), requires_grad=True)
    for number in range(session.accumulate):
        if number:
            session.step()
        with session.autocast():
            loss = other * 2
        session.backward(loss)
    with pytest.raises(RuntimeError, match="no parameter of the optimizer has a grad"):
        session.step()
    numbers = range(2 * session.accumulate)
    assert same(*([r.applied for r in micro(s, *numbers)] for s in (session, twin)))
    assert same(session.weights(), twin.weights())


def test_updates_in_backward_before_an_error() -> None:
    """Law: the error says how many parameters keep one; the next step is whole."""
    session = build("O2 bf16", optimizer_in_backward=True)
    before = copy.deepcopy(session.weights())
    (note,) = break_off(session).__notes__
    assert "2 of 4 parameters were updated before the error" in note
    changed = [
        n for n, weight in session.weights().items() if not same(before[n], weight)
    ]
    assert changed == ["1.weight", "1.bias"]
    micro(session, 1)
    assert (session.steps_applied, session.steps_skipped) == (1, 0)


def test_a_session_is_not_a_pair() -> None:
    """Law: `model, optimizer = prepare(...)`, as in apex, says what to write."""
    words = r"write session = .*session\.model.*session\.optimizer"
    with pytest.raises(TypeError, match=words):
        _model, _optimizer = build("O1 bf16")


@pytest.mark.parametrize("kind", ["O1 bf16", "O0 fp32", "O1 fp16"])
def test_plain_steps_that_are_right(kind: str) -> None:
    """Law: where there is no loss scale, a plain step is right, and says nothing.

    Nor does one without gradients, which quiets torch's schedules; and once the
    session is gone, an optimizer is anybody's.
    """
    session = build(kind)
    session.optimizer.step()
    model, optimizer = session.model, session.optimizer
    before = model[0].weight.detach().clone()
    if kind == "O1 fp16":
        session.backward(loss_of(session))
        del session
        gc.collect()
    else:
        loss_of(session).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
