"""What the steps of a program call: its scalers, in which order, and its averages.

In: some steps of any loop, torch's scalers or ours. Out: findings that no number alone
shows. Methods of the scaler classes are patched meanwhile, and call the originals;
other threads are unaffected.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree

from halfstep._torch.optimizer_params import gradients_of
from halfstep.numerics import formats
from halfstep.reporting.finding import Finding
from halfstep.scaling import call_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

CHECKED = {
    call_order.RULE: "calls of the loss scaler",
    "schedule": "the learning rate after skipped steps",
    "gradients not cleared": "gradients after skipped steps",
    "16-bit sum": "averages and sums in 16 bits",
}
"""Rules of the findings here, and what each looks at."""

_STILL = 0.9
"""Share of the numbers that should have changed and did not, from which it counts."""

_MADE_ANEW = (
    "a step makes a GradScaler of its own, which begins to look for a loss scale anew",
    "Make one before the loop, or hand its state_dict() on.",
)
_FP32_NOISE = 2.0**-20
"""Relative change that fp32's own rounding may make."""


def _finding(rule: str, where: str, measured: str, advice: str) -> Finding:
    return Finding("error", rule, where, measured, "", "its calls", advice, 0.8)


class StepCalls:
    """Watches the calls of a program's steps.

    `scalers` are those that scaled a loss, each with the scale it had before.
    """

    def __init__(self) -> None:
        self.scalers: dict[Any, float] = {}
        self._is_watching = self._meets = False
        self._num_meetings = 0
        """Steps that used a scaler for the first time."""
        self._thread, self._depth = threading.get_ident(), 0
        self._findings: dict[str, Finding] = {}
        self._watches: dict[Any, call_order.CallOrderWatch] = {}
        self._own_watches: dict[Any, object] = {}
        """Of our scalers, which warn by themselves where nobody diagnoses."""
        self._skipped: dict[Optimizer, list[float]] = {}
        """Whose last step was skipped, with the learning rates then."""
        self._sums = _LowPrecisionSums()
        self._before_pass: RemovableHandle | None = None

    def findings(self) -> tuple[Finding, ...]:
        """Return what was found, in the order of the calls."""
        return (*self._findings.values(), *self._sums.findings())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the calls of scalers, and at what follows an update."""
        methods: dict[str, Callable[..., None]] = {
            "scale": self._scale,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
        }
        hooks = (
            register_optimizer_step_pre_hook(lambda *_: self.end_update()),
            register_optimizer_step_post_hook(self._after_update),
        )
        try:
            with contextlib.ExitStack() as stack:
                for owner in _with_subclasses(TorchGradScaler):
                    for name, watch in methods.items():
                        if name in vars(owner):
                            method = self._patched(vars(owner)[name], watch)
                            stack.enter_context(replaced(owner, name, method))
                yield
        finally:
            self.end_update()
            for hook in hooks:
                hook.remove()
            for scaler, own in self._own_watches.items():
                scaler.call_order_watch = own

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what is called in here: one step."""
        self._is_watching, self._meets = True, False
        self._sums.on_step()
        try:
            yield
        finally:
            self.end_update()
            self._check_rates()
            self._is_watching = False
            self._num_meetings += self._meets
            if self._num_meetings > 1:
                self._add(call_order.call_order_finding(*_MADE_ANEW))

    def on_backward(self, loss: object) -> None:
        """Look at what a backward pass begins in."""
        self.end_update()
        device = loss.device.type if isinstance(loss, Tensor) else "cpu"
        if self._is_watching and torch.is_autocast_enabled(device):
            self._add(call_order.backward_inside())

    def _patched(
        self, original: Callable[..., Any], watch: Callable[..., None]
    ) -> Callable[..., Any]:
        """Return a scaler's method that is watched; of nested calls, the outermost."""

        def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            elsewhere = threading.get_ident() != self._thread
            if elsewhere or self._depth or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            if watch == self._scale:
                self.end_update()
            if scaler not in self.scalers:
                self._meet(scaler)
            self._depth += 1
            try:
                result = None
                if watch != self._scale and self._watches_calls(scaler):
                    watch(scaler, *args, *kwargs.values())
                result = original(scaler, *args, **kwargs)
            finally:
                self._depth -= 1
            if watch == self._scale and self._watches_calls(scaler):
                watch(scaler, *args, result)
            elif watch == self._step and self._is_watching:
                self._after_step(scaler, args[0])
            return result

        return method

    def _meet(self, scaler: Any) -> None:  # noqa: ANN401 -- torch's, or a subclass
        """Take a scaler down that was not seen before."""
        self.scalers[scaler] = float(scaler.get_scale())
        self._meets = True
        self._watches[scaler] = call_order.CallOrderWatch(self._add)
        if hasattr(scaler, "call_order_watch"):
            self._own_watches[scaler] = scaler.call_order_watch
            scaler.call_order_watch = None

    def _watches_calls(self, scaler: object) -> bool:
        return self._is_watching and scaler in self._watches

    def _add(self, finding: Finding) -> None:
        self._findings.setdefault(finding.advice, finding)

    # What a scaler is called for

    def _scale(self, scaler: object, outputs: object, scaled: object) -> None:
        for optimizer in self._skipped:
            if not all(bool(each.isfinite().all()) for each in gradients_of(optimizer)):
                self._add(
                    _finding(
                        "gradients not cleared",
                        "the step",
                        "gradients of a skipped step are still there when the next "
                        "loss is scaled: inf and NaN stay, however low the scale falls",
                        "Call optimizer.zero_grad() in each iteration, skipped or not.",
                    )
                )
        if isinstance(outputs, Tensor) and isinstance(scaled, Tensor):
            self._watches[scaler].on_scale(outputs, scaled)

    def _unscale(self, scaler: Any, optimizer: Optimizer) -> None:  # noqa: ANN401
        if scaler._scale is not None:  # noqa: SLF001
            self._watches[scaler].on_unscale(optimizer, scaler._scale)  # noqa: SLF001

    def _step(self, scaler: Any, optimizer: Optimizer, *given: object) -> None:  # noqa: ANN401
        self._check_rates()
        if any(map(callable, _pytree.tree_leaves(given))):
            del self._watches[scaler]  # a closure scales and steps by itself
            return
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]  # noqa: SLF001
        unscaled = stage is OptState.UNSCALED
        if not unscaled:
            self._unscale(scaler, optimizer)
        watch = self._watches[scaler]
        watch.on_step(scaler, optimizer, unscaled=unscaled, is_new=False)

    def _after_step(self, scaler: Any, optimizer: Optimizer) -> None:  # noqa: ANN401
        state = scaler._per_optimizer_states[id(optimizer)]  # noqa: SLF001
        self._skipped.pop(optimizer, None)
        if any(float(flag) for flag in state["found_inf_per_device"].values()):
            self._skipped[optimizer] = _rates(optimizer)

    def _update(self, scaler: object, *_: object) -> None:
        self._watches[scaler].on_update()

    def _check_rates(self) -> None:
        """See whether the rates have moved though the last step was skipped."""
        for optimizer, rates in self._skipped.items():
            now = _rates(optimizer)
            if now != rates:
                self._add(
                    replace(
                        _finding(
                            "schedule",
                            "learning rate",
                            "it moved after a step that was skipped, from "
                            f"{rates[0]:.3g} to {now[0]:.3g}",
                            "Step the schedule after applied steps only: with "
                            "scale = scaler.get_scale() before scaler.update(), if "
                            "scaler.get_scale() >= scale; with halfstep, if "
                            "scaler.last_step.applied.",
                        ),
                        severity="warning",
                    )
                )
                self._skipped[optimizer] = now

    # What follows an update

    def _after_update(self, *_: object) -> None:
        elsewhere = threading.get_ident() != self._thread
        if self._is_watching and not elsewhere and not torch.compiler.is_compiling():
            self._sums.begin()
            if self._before_pass is None:  # while it is there, compiled modules warn
                self._before_pass = register_module_forward_pre_hook(
                    lambda *_: self.end_update()
                )

    def end_update(self) -> None:
        """Look no longer at what is written: the next pass begins."""
        if threading.get_ident() == self._thread:
            self._sums.end()
            if self._before_pass is not None:
                self._before_pass.remove()
                self._before_pass = None


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        yield from _with_subclasses(each)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:  # noqa: ANN401
    """Give an object an attribute of its own for a while."""
    own = vars(owner)
    before = own.get(name, replaced)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is replaced:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@dataclass
class _LowPrecisionSum:
    """A tensor in 16 bits that is written in place, and what fp32 would have made."""

    target: Tensor
    before: Tensor
    """Its numbers before this update."""
    exact: Tensor
    """The same, in fp32, with the same operations applied."""
    num_updates: int = 0
    num_due: int = 0
    """Numbers that fp32 would have changed, over all updates."""
    num_changed: int = 0
    """Of these, how many changed."""

    def restart(self) -> None:
        """Take down how it is before an update."""
        self.before, self.exact = self.target.clone(), self.target.float()

    def close(self) -> None:
        """Count what an update has changed."""
        before = self.before.float()
        due = (self.exact - before).abs() > _FP32_NOISE * before.abs()
        self.num_updates += 1
        self.num_due += int(due.sum())
        self.num_changed += int((due & (self.target != self.before)).sum())

    @property
    def stands_still(self) -> bool:
        """Whether all but a few of its numbers stay, though fp32 would move them."""
        lost = self.num_due - self.num_changed
        return self.num_updates > 1 and lost > 0 and lost >= _STILL * self.num_due


_IN_PLACE = {
    **dict.fromkeys(("add_", "__iadd__"), "add_"),
    **dict.fromkeys(("sub_", "__isub__"), "sub_"),
    **dict.fromkeys(("mul_", "__imul__"), "mul_"),
    **dict.fromkeys(("div_", "__itruediv__"), "div_"),
    **{name: name for name in ("lerp_", "addcmul_", "addcdiv_")},
}


class _LowPrecisionSums(TorchFunctionMode):
    """Sees what a program writes in place between an update and the next pass."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[tuple[int, torch.Size], _LowPrecisionSum] = {}
        self._open: set[tuple[int, torch.Size]] = set()
        self._is_on = False
        self._outer: object = None
        """The mode that was open when the step began."""

    def on_step(self) -> None:
        """Take down what is open."""
        self._outer = _get_current_function_mode()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Look at what is written from now on, unless the step has a mode open."""
        outer = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if not self._is_on and outer is self._outer:
            self._is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Look no longer, and compare."""
        is_top = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if self._is_on and is_top:  # else the program has a mode of its own open
            self._is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for key in self._open:
                self._sums[key].close()
            self._open.clear()

    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong with sums and averages that stand still."""
        still = [each for each in self._sums.values() if each.stands_still]
        if not still:
            return ()
        first = still[0].target
        others = f" and {len(still) - 1} more" if len(still) > 1 else ""
        word = formats.word(first.dtype)
        measured = (
            f"averaged or summed in place in {word}, and at least {_STILL:.0%} of its "
            f"numbers stood still in {still[0].num_updates} steps: what is added is "
            "lost to rounding"
        )
        advice = (
            "Keep averages and sums in float32; average weights of O2 and O3 inside "
            "session.weights()."
        )
        where = f"a tensor of shape {tuple(first.shape)}{others}"
        return (_finding("16-bit sum", where, measured, advice),)

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function; apply it in fp32, too, where it writes to 16 bits."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", "")).removeprefix("_foreach_")
        if args and name in _IN_PLACE:
            many = isinstance(args[0], list | tuple)
            rows = _rows(args) if many else [tuple(args)]
            with torch.no_grad():
                for row in rows:
                    self._apply(_IN_PLACE[name], row, kwargs)
        return func(*args, **kwargs)

    def _apply(self, name: str, row: Sequence[Any], kwargs: dict[str, Any]) -> None:
        target = row[0]
        if type(target) not in {Tensor, torch.nn.Parameter}:
            return
        if not formats.is_low(target.dtype) or target.layout != torch.strided:
            return
        key = target.data_ptr(), target.shape
        if key not in self._open:
            self._open.add(key)
            if key not in self._sums:
                low = target.detach()
                self._sums[key] = _LowPrecisionSum(low, low, low)
            self._sums[key].restart()
        others = [
            each.float()
            if isinstance(each, Tensor) and each.is_floating_point()
            else each
            for each in row[1:]
        ]
        getattr(self._sums[key].exact, name)(*others, **kwargs)


def _rows(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the calls that a call over lists stands for."""
    count = len(args[0])
    columns = [
        each if isinstance(each, list | tuple) else [each] * count for each in args
    ]
    return list(zip(*columns, strict=True))
