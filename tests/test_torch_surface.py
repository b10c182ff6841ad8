"""What libraries reach into torch's scaler for, and find in the drop-in one."""

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

import halfstep as hs

INF = math.inf
SGD = functools.partial(torch.optim.SGD, lr=0.5)
FUSED = functools.partial(SGD, fused=True)
Make = Callable[[Any], torch.optim.Optimizer]

makes = pytest.mark.parametrize("make", [SGD, FUSED], ids=["plain", "fused"])
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


class Loop:
    """A linear layer, an optimizer and a scaler."""

    def __init__(self, scaler: Any, make: Make = SGD) -> None:
        self.model: Any = nn.Linear(2, 1)
        nn.init.ones_(self.model.weight)
        nn.init.ones_(self.model.bias)
        self.optimizer: Any = make(self.model.parameters())
        self.scaler = scaler

    def backward(self, factor: float = 1.0) -> None:
        out = self.model(torch.ones(1, 2, dtype=self.model.weight.dtype))
        self.scaler.scale(out.float().sum() * factor).backward()

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(factor)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_types_and_attributes() -> None:
    """Law: type, attributes and their types are torch's, before use and after."""
    loop = Loop(hs.GradScaler("cpu"))
    scaler = loop.scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler._scale, scaler._growth_tracker) == (None, None)
    assert (scaler._init_scale, scaler._init_growth_tracker) == (2.0**16, 0)
    assert (scaler._enabled, scaler._device) == (True, "cpu")
    given = scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval
    assert given == (2.0, 0.5, 2000)
    loop.step()
    theirs: Any = Loop(torch.amp.GradScaler("cpu"))
    theirs.step()
    for name in ("_scale", "_growth_tracker"):
        mine, other = getattr(scaler, name), getattr(theirs.scaler, name)
        same(mine, other)
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
    assert scaler._get_scale_async() is scaler._scale
    assert scaler._get_growth_tracker() == 1
    assert scaler._check_scale_growth_tracker("step")[0] is scaler._scale


def test_numbers_may_be_set_before_use() -> None:
    """Law: what others write into the first scale and tracker is where it begins."""
    loop = Loop(hs.GradScaler("cpu", growth_interval=5))
    loop.scaler._init_scale, loop.scaler._init_growth_tracker = 8.0, 4
    loop.step()
    assert loop.scaler.get_scale() == 16.0
    scaler: Any = hs.GradScaler("cpu")
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale.item() == 2.0**16


def test_a_scale_written_in_place_counts() -> None:
    """Law: whoever fills torch's tensor sets the scale, also below 1."""
    loop = Loop(hs.GradScaler("cpu"))
    loop.step()
    loop.scaler._scale.fill_(2.0**-10)
    before = loop.model.weight.detach().clone()
    loop.optimizer.zero_grad()
    loop.backward()
    loop.model.weight.grad.fill_(1e38)  # 1024 times that is inf
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    assert loop.scaler.last_step.skipped
    same(loop.model.weight.detach(), before)
    assert loop.scaler.get_scale() == 2.0**-11


@makes
def test_states_of_optimizers(make: Make) -> None:
    """Law: the table of stages and flags, by id, is torch's through an iteration."""
    seen = []
    for kind in (torch.amp.GradScaler, hs.GradScaler):
        loop = Loop(kind("cpu"), make)
        table = loop.scaler._per_optimizer_states
        assert isinstance(table, defaultdict)
        assert table[0] == {"stage": OptState.READY, "found_inf_per_device": {}}
        stages = []
        for factor in (1.0, INF):
            loop.optimizer.zero_grad()
            loop.backward(factor)
            loop.scaler.unscale_(loop.optimizer)
            state = loop.scaler._per_optimizer_states[id(loop.optimizer)]
            stages.append(state["stage"])
            flags = state["found_inf_per_device"]
            assert flags == loop.scaler._found_inf_per_device(loop.optimizer)
            stages.append({at: flag.item() for at, flag in flags.items()})
            loop.scaler.step(loop.optimizer)
            stages.append(loop.scaler._per_optimizer_states[id(loop.optimizer)])
            stages[-1] = stages[-1]["stage"]
            loop.scaler.update()
            stages.append(len(loop.scaler._per_optimizer_states))
        seen.append(stages)
    cpu = torch.device("cpu")
    ready, done = OptState.UNSCALED, OptState.STEPPED
    assert seen[0] == [ready, {cpu: 0.0}, done, 0, ready, {cpu: 1.0}, done, 0]
    assert seen[1] == seen[0]


def test_flags_written_from_outside_count() -> None:
    """Law: ranks that agree through `_found_inf_per_device` make a step skip."""
    for kind in (torch.amp.GradScaler, hs.GradScaler):
        for new in (False, True):
            loop = Loop(kind("cpu"))
            loop.backward()
            loop.scaler.unscale_(loop.optimizer)
            flags = loop.scaler._found_inf_per_device(loop.optimizer)
            for at, flag in list(flags.items()):
                if new:
                    flags[at] = torch.ones(())
                else:
                    flag.fill_(1.0)
            assert loop.scaler.step(loop.optimizer) is None
            loop.scaler.update()
            same(loop.model.weight.detach(), torch.ones(1, 2))
            assert loop.scaler.get_scale() == 2.0**15


def test_check_only() -> None:
    """Law: `_check_inf_per_device` looks, and leaves the gradients scaled."""
    for factor in (1.0, INF):
        loop = Loop(hs.GradScaler("cpu"))
        loop.backward(factor)
        (flag,) = loop.scaler._check_inf_per_device(loop.optimizer).values()
        assert bool(flag) == (factor == INF)
        assert loop.model.bias.grad.item() == factor * 2.0**16


class Sharing(hs.GradScaler):
    """What subclasses of others do: fp16 allowed, flags and steps counted."""

    asked = 0
    taken = 0

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        assert allow_fp16 is False
        self.asked += 1
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)  # noqa: FBT003

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        self.taken += 1
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def test_subclasses() -> None:
    """Law: methods that subclasses override are those that are called."""
    loop = Loop(Sharing("cpu", init_scale=8.0))
    loop.model.half()
    for factor in (1.0, INF, 1.0):
        loop.step(factor)
    assert (loop.scaler.asked, loop.scaler.taken) == (3, 3)
    # Two steps of 0.5 * 1 from 1; the one between was skipped.
    assert loop.model.weight.tolist() == [[0.0, 0.0]]


@makes
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, hs.GradScaler])
def test_a_patched_step(make: Make, kind: Any) -> None:
    """Law: Accelerate's way to see whether a step was taken sees it."""
    loop = Loop(kind("cpu"), make)
    called = []
    original = loop.optimizer.step

    def patched(*args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return original(*args, **kwargs)

    for factor in (1.0, INF, 1.0):
        loop.optimizer.zero_grad()
        loop.backward(factor)
        loop.optimizer.step = patched
        loop.scaler.step(loop.optimizer, None)
        loop.scaler.update()
        loop.optimizer.step = original
    # A fused optimizer's step is always called: its kernel skips.
    assert len(called) == (3 if make is FUSED else 2)
    same(loop.model.weight.detach(), torch.zeros(1, 2))


def test_lightning_unscales_in_a_hook() -> None:
    """Law: stages read from outside say whether gradients are unscaled yet."""
    loop = Loop(hs.GradScaler("cpu"))
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.backward()
        for _ in range(2):
            state = loop.scaler._per_optimizer_states[id(loop.optimizer)]
            if state["stage"] is OptState.READY:
                loop.scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_value_(loop.model.parameters(), 0.5)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    # Two steps of 0.5 times a gradient of 1, cut to 0.5.
    same(loop.model.weight.detach(), torch.full((1, 2), 0.5))


class Watcher(torch.optim.SGD):
    """A fused optimizer of somebody's own, that looks at what its step is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.5, fused=True)
        self.seen: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        self.seen += look(self)
        return super().step(closure)


def look(optimizer: Any) -> list[Any]:
    grads = [param.grad for param in optimizer.param_groups[0]["params"]]
    return [copy.deepcopy((optimizer.grad_scale, optimizer.found_inf, grads))]


def given(kind: Any, way: str, *, unscaled: bool) -> list[Any]:
    loop = Loop(kind("cpu", init_scale=4.0), Watcher if way == "subclass" else FUSED)
    seen: list[Any] = []
    original = loop.optimizer.step

    def patched(*args: Any, **kwargs: Any) -> Any:
        seen.extend(look(loop.optimizer))
        return original(*args, **kwargs)

    if way == "patch":
        loop.optimizer.step = patched
    elif way == "hook":
        loop.optimizer.register_step_pre_hook(lambda one, *_: seen.extend(look(one)))
    for factor in (1.0, INF, 1.0):
        loop.optimizer.zero_grad()
        loop.backward(factor)
        if unscaled:
            loop.scaler.unscale_(loop.optimizer)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    return [*seen, *getattr(loop.optimizer, "seen", [])]


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("way", ["subclass", "patch", "hook"])
def test_a_step_that_skips_by_itself_is_given_what_torch_gives(
    way: str, unscaled: bool
) -> None:
    """Law: code that is not torch's own sees the scale, the flag, scaled gradients."""
    theirs = given(torch.amp.GradScaler, way, unscaled=unscaled)
    assert len(theirs) == 3
    assert all((scale is None) == unscaled for scale, _, _ in theirs)
    ours = given(hs.GradScaler, way, unscaled=unscaled)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
