"""Programs of Accelerate on a session, against Accelerate itself."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from weight_averages import DocumentedAverage

from halfstep import UserError
from halfstep.compat.accelerate import Accelerator
from halfstep.testing import assert_unchanged, overflow_in_backward

LOW_SCALE = GradScalerKwargs(init_scale=1024.0)  # from 2**16 two steps are skipped


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps what the first Accelerator of a process was told."""
    yield
    _reset()


def make(fused: bool = False) -> tuple[nn.Module, Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)
    )
    optimizer = AdamW(model.parameters(), 1e-2, fused=fused)
    inputs = torch.randn(80, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    return model, optimizer, StepLR(optimizer, 1, 0.95), DataLoader(data, 8)


def train(accelerator: accelerate.Accelerator, parts: Any, epochs: int = 3) -> float:
    model, optimizer, scheduler, loader = parts
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return loss.item()


def run(kind: Callable[..., Any], epochs: int = 3, **kwargs: Any) -> tuple[float, Any]:
    _reset()
    accelerator = kind(cpu=True, **kwargs)
    parts = accelerator.prepare(*make())
    return train(accelerator, parts, epochs), (accelerator, parts)


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("steps", [1, 4])
def test_in_fp32_it_is_accelerate_to_the_bit(steps: int) -> None:
    """Law: at O0 losses, clipping, schedule and a ragged window are Accelerate's."""
    theirs, (_, before) = run(accelerate.Accelerator, gradient_accumulation_steps=steps)
    ours, (_, after) = run(Accelerator, gradient_accumulation_steps=steps)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert before[2].get_last_lr() == after[2].get_last_lr()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "no"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_told(precision: str, fused: bool) -> None:
    """Law: an overflow leaves all as it was, is told, and stops the schedule."""
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, kwargs_handlers=[LOW_SCALE]
    )
    model, optimizer, scheduler, loader = accelerator.prepare(*make(fused))
    assert not optimizer.step_was_skipped
    inputs, targets = next(iter(loader))
    skipped = []
    with overflow_in_backward(model, at=2):
        for number in range(3):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            rate = scheduler.get_last_lr()
            if number == 1:
                with assert_unchanged(model, optimizer.optimizer):
                    optimizer.step()
            else:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
            assert accelerator.optimizer_step_was_skipped == skipped[-1]
            assert (scheduler.get_last_lr() == rate) == skipped[-1]
    assert skipped == [False, True, False]
    assert optimizer.last_step.applied


def test_the_norm_is_that_of_unscaled_gradients() -> None:
    """Law: clip_grad_norm_ returns the norm before clipping, and the step clips."""
    norms = []
    for precision in ("no", "fp16"):
        _reset()
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, kwargs_handlers=[LOW_SCALE]
        )
        model, optimizer, _, loader = accelerator.prepare(*make())
        inputs, targets = next(iter(loader))
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        assert optimizer.last_step.grad_norm == pytest.approx(norms[-1], rel=1e-6)
        assert accelerator.session.clip_grad_norm is None  # for that step alone
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert norms[0] > 0.1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, level: str) -> None:
    """Law: save_state and load_state go on as if nothing had happened, and warn not."""
    kwargs = {"mixed_precision": "fp16", "level": level}
    _, (accelerator, parts) = run(Accelerator, 1, **kwargs)
    accelerator.save_state(str(tmp_path))
    straight = train(accelerator, parts, 1)
    _reset()
    accelerator = Accelerator(cpu=True, **kwargs)
    parts = accelerator.prepare(*make())
    with warnings.catch_warnings(action="error"):
        accelerator.load_state(str(tmp_path))
    assert train(accelerator, parts, 1) == straight


def test_saved_weights_are_the_masters(tmp_path: Path) -> None:
    """Law: at O2 what is saved is fp32, and finer than the model's 16 bits."""
    _, (accelerator, (model, *_)) = run(Accelerator, mixed_precision="bf16", level="O2")
    state = accelerator.get_state_dict(model)
    stored = dict(model.named_parameters())
    assert stored["0.weight"].dtype == torch.bfloat16
    assert state["0.weight"].dtype == torch.float32
    assert not torch.equal(state["0.weight"], stored["0.weight"].float())
    assert torch.equal(state["0.weight"].bfloat16(), stored["0.weight"])
    accelerator.save_model(model, str(tmp_path))
    fresh = make()[0]
    accelerate.load_checkpoint_in_model(fresh, str(tmp_path))
    assert torch.equal(fresh.get_parameter("0.weight"), state["0.weight"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_average_of_weights(level: str) -> None:
    """Law: the documented average is that of the master weights.

    A copy of the prepared model computes with its own weights.
    """
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", level=level)
    model, optimizer, _, loader = make()
    average = DocumentedAverage(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(6):
        for inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            average.update(accelerator.get_state_dict(model), optimizer)
    average.assert_exact()
    words = "loses small updates"
    with pytest.warns(UserWarning, match=words) if level == "O2" else nullcontext():
        twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(twin(inputs), model(inputs))
        for param in twin[3].parameters():
            param.zero_()
        assert not twin(inputs).any()


def test_what_runs_where() -> None:
    """Law: the forward pass is in 16 bits, what it returns and `autocast` as told.

    Evaluation without training has the same formats.
    """
    seen: list[torch.dtype] = []
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, _, _, loader = accelerator.prepare(*make())
    inputs, _ = next(iter(loader))
    with accelerator.autocast():
        assert (inputs @ inputs.T).dtype == torch.bfloat16
    with accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
        assert (inputs @ inputs.T).dtype == torch.float32
    _reset()
    other = Accelerator(cpu=True, mixed_precision="bf16")
    for each in (model, other.prepare_model(make()[0], evaluation_mode=True)):
        each[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
        with torch.set_grad_enabled(each is model):
            assert each(inputs).dtype == torch.float32
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_backward_without_the_accelerator(level: str, precision: str) -> None:
    """Law: clipping and the step raise, and name the accelerator's call."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision, level=level)
    model, optimizer, _, loader = accelerator.prepare(*make())
    inputs, targets = next(iter(loader))
    nn.functional.mse_loss(model(inputs), targets).backward()
    message = r"call accelerator\.backward\(loss\)"
    with pytest.raises(RuntimeError, match=message):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_calls_without_a_backward_pass() -> None:
    """Law: the errors name Accelerate's calls."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, *_ = accelerator.prepare(*make())
    calls = [optimizer.step, lambda: accelerator.clip_grad_norm_(model.parameters(), 1)]
    for call in calls:
        with pytest.raises((RuntimeError, UserError)) as error:
            call()
        assert "accelerator.backward(loss)" in str(error.value)
        assert "session.step" not in str(error.value)
        assert "prepare()" not in str(error.value)


def test_the_handler_of_the_loss_scale_is_obeyed() -> None:
    """Law: GradScalerKwargs gives the first loss scale."""
    handler = GradScalerKwargs(init_scale=256.0, growth_interval=7)
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[handler]
    )
    accelerator.prepare(*make())
    assert accelerator.session.scaler.state.scale == 256
    assert accelerator.session.scaler.rule.growth_interval == 7


def _refusals() -> dict[str, tuple[Callable[[Accelerator], object], str]]:
    model, optimizer, _, _ = make()
    other = nn.Linear(1, 1)

    def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any]:
        return accelerator.prepare(*make()[:2])  # type: ignore[no-any-return]

    def clip_part(accelerator: Accelerator) -> Tensor:
        return accelerator.clip_grad_norm_(
            list(prepared(accelerator)[0].parameters())[1:], 1.0
        )

    return {
        "a model alone": (lambda a: a.prepare(model), "1 model and 0 optimizers:"),
        "no model": (lambda a: a.prepare(optimizer), "0 models and 1 optimizer:"),
        "two models": (lambda a: a.prepare(model, other, optimizer), "2 models and"),
        "second": (lambda a: (prepared(a), a.prepare(other)), "after a first pair"),
        "no session": (
            lambda a: a.backward(torch.ones(())),
            "before accelerator.prepare",
        ),
        "a part": (clip_part, "without 1 of 6 parameters"),
        "by value": (lambda a: a.clip_grad_value_([], 1.0), "clip_grad_norm_"),
        "unscale": (lambda a: a.unscale_gradients(), "session.grads()"),
        "closure": (lambda a: prepared(a)[1].step(lambda: None), "closure"),
        "kwargs": (
            lambda a: (prepared(a), a.backward(torch.ones(()), retain_graph=True)),
            "retain_graph",
        ),
    }


@pytest.mark.parametrize("case", _refusals())
def test_refusals(case: str) -> None:
    """Law: what a session cannot do is refused in a line, with what can be done."""
    call, expected = _refusals()[case]
    with pytest.raises(
        UserError, match=expected.replace("(", r"\(").replace(")", r"\)")
    ):
        call(Accelerator(cpu=True, mixed_precision="bf16"))
