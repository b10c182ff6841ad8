"""Checks the calls of training steps: loss scalers, autocast, schedule, 16-bit sums.

Methods of the scaler and autocast classes are patched while the steps run. The
originals are called; other threads are unaffected.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

from halfstep._torch.optimizer_params import gradients_of
from halfstep._torch.patches import replaced
from halfstep.casting import dtype_mismatch
from halfstep.diagnostics import step_checks
from halfstep.nonfinite.graph import nodes_of, saved_numbers
from halfstep.numerics import formats
from halfstep.scaling import call_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from halfstep.casting.dtype_mismatch import DtypeMismatch
    from halfstep.reporting.finding import Finding

CHECKED = {
    call_order.RULE: "calls of the loss scaler",
    step_checks.SCALED_LOSS: "losses that it scales",
    "autocast": "autocast in forward and backward pass",
    "log-probabilities": "dtype of log-probabilities",
    "schedule": "the learning rate after skipped steps",
    "gradients not cleared": "gradients after skipped steps",
    step_checks.ROUNDED_STATE: "weights and moments rounded to 16 bits",
    step_checks.LOW_SUM: "averages and sums in 16 bits",
}
"""Rule of a finding -> what it checks."""

_SCALER_PER_STEP = (
    "each step makes a new GradScaler, which restarts the search for a loss scale",
    "Make one before the loop, or load the state_dict() of the last one.",
)
_BESIDES = (
    "optimizer.step() was called besides scaler.step(optimizer): no step is skipped",
    "Remove optimizer.step().",
)
_LEAST_SCALE = 8.0
"""Smaller factors of a loss are taken as weights of losses, not as loss scales."""
_NEW_SCALER_STEPS = 20
"""If an optimizer has made this many steps, an unused GradScaler was not restored."""


class StepCalls:
    """Observes the calls of a program's steps.

    Attributes:
        scalers: Scaler that was called -> its scale before.
        dtypes: Dtypes of the autocast contexts that were entered.
    """

    def __init__(self) -> None:
        self.scalers: dict[Any, float] = {}
        self.dtypes: set[torch.dtype] = set()
        self.scale_by_hand = 1.0
        """Largest power of two that a program without scaler multiplied a loss by."""
        self._is_watching, self._num_watched = False, 0
        self._steps_of_new: dict[Any, int] = {}
        """Scaler that only one step has used -> number of that step."""
        self._thread, self._depth = threading.get_ident(), 0
        self._findings = step_checks.Findings()
        self._watches: dict[Any, call_order.CallOrderWatch] = {}
        self._own_watches: dict[Any, object] = {}
        """The `call_order_watch` of halfstep's scalers, switched off meanwhile."""
        self._new: set[int] = set()
        """id() of scalers that were neither used before nor restored."""
        self._skipped: dict[Optimizer, list[float]] = {}
        """Optimizer whose last step was skipped -> its learning rates then."""
        self._stale: dict[Optimizer, bool] = {}
        """Optimizer whose last step was skipped -> whether a backward pass began with
        its non-finite gradients."""
        self._why_no_effect: set[str] = set()
        """Reasons why autocast may have no effect."""
        self._has_run_inside = self._is_outside = False
        """Whether any forward pass ran in autocast; whether the last did not."""
        self._stepped: set[Optimizer] = set()
        """Optimizers stepped by a scaler since the last backward pass."""
        self._losses = step_checks.ScaledLosses(self._findings)
        self._rounded = step_checks.RoundedState(self._findings)
        self._sums = step_checks.LowPrecisionSums()
        self._grads = step_checks.LowPrecisionGrads()
        self._before_pass: RemovableHandle | None = None

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings, those of calls first, in the order of the calls."""
        if len({*self._steps_of_new.values()}) > 1:
            self._findings.add(call_order.call_order_finding(*_SCALER_PER_STEP))
        for each in (self._sums, self._grads):
            each.report(self._findings)
        return tuple(self._findings.values())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Patch scaler and autocast methods for all steps that run inside."""
        methods: dict[str, Callable[..., None]] = {
            "scale": self._scale,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
        }
        try:
            with contextlib.ExitStack() as stack:
                for owner in _with_subclasses(TorchGradScaler):
                    for name, watch in methods.items():
                        if name in vars(owner):
                            method = self._patched(vars(owner)[name], watch)
                            stack.enter_context(replaced(owner, name, method))
                enter = self._entering(torch_autocast.__enter__)
                stack.enter_context(replaced(torch_autocast, "__enter__", enter))
                yield
        finally:
            self.end_update()
            for scaler, own in self._own_watches.items():
                scaler.call_order_watch = own

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the calls of the one step that runs inside."""
        self._is_watching, self._num_watched = True, self._num_watched + 1
        self._sums.on_step()
        try:
            yield
        finally:
            self.end_update()
            self._losses.end_step()
            self._check_rates()
            self._is_watching = False

    @contextlib.contextmanager
    def backward_pass(
        self, loss: object, params: Iterable[Tensor] = ()
    ) -> Iterator[None]:
        """Check the backward pass that runs inside, and the gradients of `params`."""
        self.end_update()
        if self._is_watching:
            self._on_backward(loss)
        with self._grads.backward_pass(params if self._is_watching else ()):
            yield
        if self._is_observed():
            self._look(after_backward=True)

    def on_forward(self, module: nn.Module) -> None:
        """Record whether a model runs inside or outside autocast."""
        device = next((param.device.type for param in module.parameters()), "cpu")
        is_inside = torch.is_autocast_enabled(device)
        self._has_run_inside = self._has_run_inside or is_inside
        self._is_outside = bool(self.dtypes) and not is_inside
        if self._is_outside and threading.get_ident() != self._thread:
            self._why_no_effect.add(f"{type(module).__name__} runs in another thread")

    def explain(self, error: Exception) -> DtypeMismatch | None:
        """Return the DtypeMismatch to raise for an error of the step, or None."""
        dtype_mismatch.add_cure(error)
        mismatch = dtype_mismatch.explain(error)
        if mismatch is not None and self._is_outside:
            outside = "-> This pass ran outside autocast, and another one inside: open "
            mismatch.args = (f"{mismatch}\n{outside}the same context around both.",)
        return mismatch

    def on_fp32_products(self) -> None:
        """Report why autocast had no effect, given that no matmul ran in 16 bits."""
        if not self._has_run_inside:
            for why in sorted(self._why_no_effect):
                self._findings.record(
                    *("autocast", "forward pass"),
                    f"autocast was entered, and has no effect: {why}",
                    "Open the context inside of it, around each forward pass.",
                )

    def _on_backward(self, loss: object) -> None:
        self._stepped.clear()
        device = loss.device.type if isinstance(loss, Tensor) else "cpu"
        if torch.is_autocast_enabled(device):
            self._findings.add(call_order.backward_inside())
        if isinstance(loss, Tensor):
            self._check_log_softmax(loss)
        if self.scalers:
            self._losses.on_backward(loss)
        elif isinstance(loss, Tensor):
            factors = [n for _, n in saved_numbers(loss.grad_fn, "Mul")]
            powers = [n for n in factors if n >= _LEAST_SCALE and not math.log2(n) % 1]
            self.scale_by_hand = max(self.scale_by_hand, *powers, 1.0)
        for optimizer in list(self._stale):
            if all(bool(each.isfinite().all()) for each in gradients_of(optimizer)):
                del self._stale[optimizer]
            else:
                self._stale[optimizer] = True

    def _check_log_softmax(self, loss: Tensor) -> None:
        """Report 16-bit log-probabilities, except those inside a cross entropy."""
        nodes: set[Any] = nodes_of(loss.grad_fn)
        for node in nodes:
            for argument, _ in node.next_functions:
                name = "" if argument is None else argument.name()
                if name.startswith("LogSoftmax") and "NllLoss" not in node.name():
                    (result,) = argument._input_metadata  # noqa: SLF001
                    if formats.is_low(result.dtype):
                        step = f"{1 / (8 * torch.finfo(result.dtype).eps):g}"
                        self._findings.record(
                            *("log-probabilities", "log_softmax"),
                            f"ran in {formats.word(result.dtype)}, where "
                            f"log-probabilities near -8 are multiples of 1/{step}: a "
                            "ratio to those of another pass is not 1",
                            "Compute it of logits.float(), wherever log-probabilities "
                            "are compared.",
                            "note",
                        )

    def _patched(
        self, original: Callable[..., Any], watch: Callable[..., None]
    ) -> Callable[..., Any]:
        """Wrap a scaler's method so that `watch` gets the outermost of nested calls."""

        def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            elsewhere = threading.get_ident() != self._thread
            if elsewhere or self._depth or not scaler.is_enabled():
                return original(scaler, *args, **kwargs)
            if watch == self._scale:
                self.end_update()
            given = (*args, *kwargs.values())
            self._depth += 1
            if self._steps_of_new.get(scaler, self._num_watched) < self._num_watched:
                del self._steps_of_new[scaler]
            try:
                if scaler not in self.scalers:
                    self._meet(scaler)
                # If all checked steps overflowed, later ones are checked too.
                watches = self._is_watching or bool(self._watches)
                if watch != self._scale and watches:
                    watch(scaler, *given)
                result = original(scaler, *args, **kwargs)
            finally:
                self._depth -= 1
            if watch == self._scale and watches:
                watch(scaler, *given, result)
            elif watch == self._step and self._is_watching:
                self._after_step(scaler, given[0])
            return result

        return method

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap autocast's `__enter__` so that it records the dtype."""

        def enter(context: Any) -> Any:  # noqa: ANN401 -- torch's, or a subclass
            if context._enabled and threading.get_ident() == self._thread:  # noqa: SLF001
                self.dtypes.add(context.fast_dtype)
                function = sys._getframe(1).f_locals.get("func")  # noqa: SLF001
                if inspect.isgeneratorfunction(function):
                    what = f"{function.__name__}() is a generator function"
                    self._why_no_effect.add(f"{what}: its decorator is left at once")
            return original(context)

        return enter

    def _meet(self, scaler: Any) -> None:  # noqa: ANN401 -- torch's, or a subclass
        if scaler._scale is None and not scaler._init_growth_tracker:  # noqa: SLF001
            self._new.add(id(scaler))
        self.scalers[scaler] = float(scaler.get_scale())
        self._steps_of_new[scaler] = self._num_watched
        self._watches[scaler] = call_order.CallOrderWatch(self._findings.add)
        if hasattr(scaler, "call_order_watch"):
            self._own_watches[scaler] = scaler.call_order_watch
            scaler.call_order_watch = None

    # Calls of a scaler's methods

    def _scale(self, scaler: object, outputs: object, scaled: object) -> None:
        for each in _pytree.tree_leaves(scaled):
            if isinstance(each, Tensor) and self._is_watching:
                self._losses.on_scale(scaler, each)
        watch = self._watches.get(scaler)
        if watch and isinstance(outputs, Tensor) and isinstance(scaled, Tensor):
            watch.on_scale(outputs, scaled)

    def _unscale(self, scaler: Any, optimizer: Optimizer) -> None:  # noqa: ANN401
        watch, scale = self._watches.get(scaler), scaler._scale  # noqa: SLF001
        if watch and scale is not None:
            watch.on_unscale(optimizer, scale)

    def _step(self, scaler: Any, optimizer: Optimizer, *given: object) -> None:  # noqa: ANN401
        if self._is_watching:
            self._check_rates()
        if any(map(callable, _pytree.tree_leaves(given))):
            self._watches.pop(scaler, None)  # a closure calls the scaler itself
            return
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]  # noqa: SLF001
        unscaled = stage is OptState.UNSCALED
        if not unscaled:
            self._unscale(scaler, optimizer)
        for watch in self._watches.values():  # another scaler may have scaled some
            watch.on_step(scaler, optimizer, unscaled=unscaled, is_new=False)
        if self._stale.pop(optimizer, False):
            self._findings.record(
                *("gradients not cleared", "the step"),
                "gradients of a skipped step were still there when the next backward "
                "pass began: inf and NaN stay, however low the scale falls",
                "Call optimizer.zero_grad() in each iteration, skipped or not.",
            )
        counts = (int(each.get("step", 0)) for each in optimizer.state.values())
        num_steps = max(counts, default=0)
        if id(scaler) in self._new and num_steps >= _NEW_SCALER_STEPS:
            finding = call_order.call_order_finding(
                f"the optimizer has made {num_steps} steps, and the GradScaler is new: "
                "its state_dict() was not loaded",
                "Save and load scaler.state_dict() beside the optimizer's.",
            )
            self._findings.add(replace(finding, severity="warning"))
        self._losses.on_step(optimizer)

    def _after_step(self, scaler: Any, optimizer: Optimizer) -> None:  # noqa: ANN401
        state = scaler._per_optimizer_states[id(optimizer)]  # noqa: SLF001
        self._new.discard(id(scaler))
        self._stepped.add(optimizer)
        self._skipped.pop(optimizer, None)
        if any(float(flag) for flag in state["found_inf_per_device"].values()):
            self._skipped[optimizer] = _rates(optimizer)
            self._stale[optimizer] = False

    def _update(self, scaler: object, *_: object) -> None:
        watch = self._watches.get(scaler)
        if watch is not None:
            watch.on_update()
            if watch.is_over:
                del self._watches[scaler]

    def _check_rates(self) -> None:
        """Report learning rates that changed although the last step was skipped."""
        for optimizer, rates in self._skipped.items():
            now = _rates(optimizer)
            if now != rates:
                self._findings.record(
                    *("schedule", "learning rate"),
                    "it moved after a step that was skipped, from "
                    f"{rates[0]:.3g} to {now[0]:.3g}",
                    "Step the schedule after applied steps only: with scale = "
                    "scaler.get_scale() before scaler.update(), if scaler.get_scale() "
                    ">= scale; with halfstep, if scaler.last_step.applied.",
                    "warning",
                )
                self._skipped[optimizer] = now

    # Updates, and the code after them

    def _is_observed(self) -> bool:
        """Whether a checked step makes this call, in its own thread."""
        elsewhere = threading.get_ident() != self._thread
        return self._is_watching and not elsewhere and not torch.compiler.is_compiling()

    def before_update(self, optimizer: Optimizer) -> None:
        """Check the state of an optimizer that is about to be stepped."""
        self.end_update()
        if not self._is_observed():
            return
        self._rounded.on_update(optimizer)
        if not self._depth:
            self._losses.on_step(optimizer)
            if optimizer in self._stepped:
                self._findings.add(call_order.call_order_finding(*_BESIDES))

    def after_update(self) -> None:
        """Observe what is computed after an update."""
        if self._is_observed():
            self._look()

    def _look(self, *, after_backward: bool = False) -> None:
        """Observe what is computed until the next pass or update."""
        self._sums.begin(after_backward=after_backward)
        if self._before_pass is None:  # short-lived: compiled modules warn of the hook
            self._before_pass = register_module_forward_pre_hook(
                lambda *_: self.end_update()
            )

    def end_update(self) -> None:
        """Stop observing, because the next pass or update begins."""
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
