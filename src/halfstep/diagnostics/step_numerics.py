"""Checks losses, gradients and weights of training steps; replays one that fails.

`torch.autograd.backward` is patched while the steps run: it is the only place where the
loss of a user's code is visible. The original is called; other threads are unaffected.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree

from halfstep._torch.optimizer_params import gradients_of
from halfstep._torch.patches import replaced
from halfstep._torch.rng_state import RandomState
from halfstep.diagnostics.replay import find_nonfinite
from halfstep.diagnostics.replay.gradients import exchanges
from halfstep.diagnostics.replay.tensor_facts import floats
from halfstep.diagnostics.step_calls import StepCalls
from halfstep.errors import UserError
from halfstep.nonfinite.domains import CHECKPOINT, RUNNING_STATS
from halfstep.numerics import formats
from halfstep.reporting.finding import Finding
from halfstep.reporting.table import Report
from halfstep.scaling import LossScaleCollapse
from halfstep.scaling.step_report import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim import Optimizer

    from halfstep.nonfinite.origin import BadOp
    from halfstep.session.session import Session


@dataclass(frozen=True, repr=False)
class Numerics(Report):
    """Which values of some training steps were non-finite; step numbers start at 1."""

    steps: int
    """Steps that ran."""
    checked: int
    """How many of them, from the first, had gradients and updates checked too."""
    losses: tuple[int, ...] = ()
    """Steps with a non-finite loss."""
    gradients: tuple[int, ...] = ()
    """Checked steps with a non-finite gradient."""
    skipped: int = 0
    """Steps skipped because of it; without a session a lower bound."""
    weights: tuple[str, ...] = ()
    """Parameters that are non-finite after the last step."""
    buffers: tuple[str, ...] = ()
    """Buffers with NaN or +inf after the last step; -inf is usual in masks."""
    buffers_dtype: str = ""
    """Dtype of the first of `buffers`."""
    buffers_since: int = 0
    """First checked step after which a buffer was non-finite; 0 if none was."""
    scales: tuple[float, float] | None = None
    """Loss scale before the first step and after the last; None without a scaler."""
    bad_op: BadOp | None = None
    """Result of `find_nonfinite` for the first failed step, or, if that was normal, for
    the first with a non-finite loss."""
    unreplayed: str = ""
    """Why there is no `bad_op`, or none of a non-finite loss."""

    @property
    def failed(self) -> tuple[int, ...]:
        """Steps with a non-finite loss or gradient."""
        return tuple(sorted({*self.losses, *self.gradients}))

    def findings(self) -> tuple[Finding, ...]:
        """Return a finding of what is non-finite and one of its cause, or none.

        Of a loss scale that settles it is one note.
        """
        measured = self._measured()
        if not measured:
            return ()
        first = next(iter(self.losses or self.failed), 0)
        if self._is_explained and self.bad_op is not None:
            first = self.bad_op.step or first
        is_damaged = self.losses or self.weights or self.buffers
        recovers = not self._is_explained and not is_damaged and not self._fixed
        advice = self._advice(first)
        if self.buffers and self.failed:
            advice += f" {self._advice_on_buffers()}"
        what = Finding(
            "note" if recovers and self.skipped else "error",
            "non-finite numbers",
            *(f"step {first}" if first else "the steps", measured, ""),
            *("the program's own steps", advice, 1.0),
        )
        if self.bad_op is None or what.severity == "note":
            return (what,)
        why = self.bad_op.finding()
        if self.bad_op.normal and self._fixed:
            why = replace(why, severity="error", advice=what.advice)
        return what, why

    @property
    def _is_explained(self) -> bool:
        """Whether a replay found a fault, not only a loss scale that settles."""
        return self.bad_op is not None and not self.bad_op.normal

    @property
    def _fixed(self) -> bool:
        """Whether the loss scale is the same after the steps as before."""
        return self.scales is not None and self.scales[0] == self.scales[1]

    def _measured(self) -> str:
        measured, of = [], f"of {self.steps} steps"
        if self.losses:
            measured.append(f"the loss is not finite in {len(self.losses)} {of}")
        if self.gradients:
            count = f"{len(self.gradients)} of {self.checked} checked steps"
            measured.append(f"gradients are not finite in {count}")
        if self.skipped:
            measured.append(f"{self.skipped} {of} were skipped")
        if self.skipped and self.scales is not None and self.scales != (1, 1):
            before, after = self.scales
            moved = "throughout" if self._fixed else f"to {after:g}"
            measured.append(f"loss scale {before:g} {moved}")
        since = f", since step {self.buffers_since}" if self.buffers_since else ""
        for what, names, more in (
            ("parameters", self.weights, ""),
            ("buffers", self.buffers, since),
        ):
            if names:
                count = f"{len(names)} ({names[0]} first){more}"
                measured.append(f"{what} that hold inf or NaN now: {count}")
        return "; ".join(measured)

    def _advice(self, first: int) -> str:
        if self._is_explained:
            return (
                f"halfstep.find_nonfinite ran step {first} again: see the finding "
                "'bad op'."
            )
        if self.unreplayed and (self.losses or self.bad_op is None):
            return f"halfstep.find_nonfinite did not run it again: {self.unreplayed}"
        if self.bad_op is not None and self._fixed:
            return (
                "Lower the loss scale, or let it be dynamic: a fixed one never falls."
            )
        if self.weights:
            return CHECKPOINT
        if self.bad_op is not None:
            return self.bad_op.advice
        later = f"Steps after the first {self.checked} are not run again (warmup=)."
        return self._advice_on_buffers() if self.buffers else later

    def _advice_on_buffers(self) -> str:
        """Return how to fix a non-finite buffer; skipping a step restores no buffer."""
        first = self.buffers[0]
        if self.buffers_dtype == "fp16" and not self.skipped:
            return (
                f"{first} is stored in float16, which holds 65504: keep norms in "
                "float32, as level O2 does."
            )
        if first.endswith(("running_mean", "running_var")):
            return RUNNING_STATS
        return f"Set {first} anew: a skipped step restores no buffer."

    def __str__(self) -> str:
        """Return what was checked, and what is non-finite, in a sentence."""
        if self._measured():
            return f"Not finite: {self._measured()}."
        if not self.checked:
            return (
                f"Losses of {self.steps} steps, weights and buffers are finite; "
                "gradients and calls were not checked (warmup=0)."
            )
        return (
            f"Losses of {self.steps} steps, gradients of the first {self.checked}, "
            "weights and buffers are finite."
        )

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        bad = None if self.bad_op is None else self.bad_op.data()
        return {**asdict(self), "bad_op": bad}


class _BackwardReached(BaseException):
    """Ends a replayed step at its backward pass; `except Exception` lets it pass."""


class CheckedSteps:
    """Runs training steps of a program and checks that their values are finite.

    Args:
        step: Runs one step.
        checked: Number of steps whose gradients are checked, which synchronizes.
        same_batch: Whether `step` takes its batch, so that a replay gets the same one.
        session: The session that the steps use.
        model: The model that they train. None: the models that the first step runs.
        scaler: The GradScaler of the steps, of torch, halfstep or another.
    """

    def __init__(
        self,
        step: Callable[..., object],
        checked: int,
        *,
        same_batch: bool,
        session: Session | None,
        model: nn.Module | None,
        scaler: Any | None,  # noqa: ANN401 -- torch's, ours or another
    ) -> None:
        self._step, self._checked, self._same_batch = step, checked, same_batch
        self._session, self._given_scaler, self._model = session, scaler, model
        self.calls = StepCalls()
        self._outermost: list[nn.Module] = []
        self._infinite_at_first: set[int] = set()
        """id() of buffers that start with inf by design, such as observed ranges."""
        if model is not None:
            self._take_down_buffers(model)
        self._thread = threading.get_ident()
        self._number = self._part = self._depth = self._applied = 0
        self._losses: list[tuple[int, Tensor]] = []
        self._nonfinite_loss_steps: set[int] = set()
        self._nonfinite_grad_steps: set[int] = set()
        self._skipped = self._buffers_since = 0
        self._weights: list[tuple[Tensor, Tensor]] = []
        self._target: int | None = None
        self._captured: list[Tensor] = []
        self._bad_op: BadOp | None = None
        self._unreplayed = ""
        self._scale_before = self._scale()
        self._skips = 0 if session is None else session.steps_skipped

    # Running a step

    def __call__(self, *batch: object) -> None:
        """Run one step, and replay it if it fails and none before explains it."""
        self._number += 1
        self._part = self._applied = 0
        if self._number > self._checked:
            self._step(*batch)
            return
        # Not around the later steps, which are timed: a session does not use its
        # kernels for an optimizer with hooks.
        with (
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            self._checked_step(batch)

    def _checked_step(self, batch: tuple[object, ...]) -> None:
        scale_now, random = self._scale(), self._random_state()
        skips = 0 if self._session is None else self._session.steps_skipped
        try:
            with self.calls.watching(), self._discovering():
                self._step(*batch)
        except LossScaleCollapse as error:
            self._replay_step(batch, scale_now or self._before, random)
            if self._bad_op is not None and not self._bad_op.normal:
                error.attach_replay(self._bad_op)
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            mismatch = self.calls.explain(error)
            if mismatch is None:
                raise
            raise mismatch from error
        skipped = self._session is not None and self._session.steps_skipped > skips
        if skipped:
            self._nonfinite_grad_steps.add(self._number)
        failed = self._has_failed()
        self._skipped += failed and not self._applied and self._session is None
        is_first = self._bad_op is None and not self._unreplayed
        if failed and (is_first or self._is_first_fault()):
            self._replay_step(batch, scale_now or self._before, random)
        if not self._buffers_since and any(self._nonfinite_buffers()):
            self._buffers_since = self._number
        self._weights = []

    @property
    def _is_unexplained(self) -> bool:
        """Whether no replay has found a fault so far."""
        return self._bad_op is None or self._bad_op.normal

    def _is_first_fault(self) -> bool:
        """Whether this loss is the first to be non-finite, and not by its weights.

        While a loss scale settles, steps before it fail that are no fault.
        """
        is_lost = self._nonfinite_loss_steps == {self._number}
        before = [copy for _, copy in self._weights] or self._params()
        return is_lost and self._is_unexplained and _finite(before)

    def _has_failed(self) -> bool:
        return self._number in self._nonfinite_loss_steps | self._nonfinite_grad_steps

    def numerics(self) -> Numerics:
        """Return the results of all steps. Synchronizes with the device."""
        lost = {number for number, loss in self._losses if not self._good(loss)}
        after = self._scale()
        scales, skipped = None, self._skipped
        if self._before is not None and after is not None:
            scales = self._before, after
        if self._session is not None:
            skipped = self._session.steps_skipped - self._skips
        elif scales is not None and not skipped:
            skipped = int(scales[1] < scales[0])
        why = self._unreplayed
        if lost and not self._nonfinite_loss_steps and self._is_unexplained and not why:
            why = (
                f"the loss of the first {self._checked} steps is finite, and only "
                "these are. Call diagnose again with a larger warmup, from weights "
                "that are finite."
            )
        model, buffers = self._root(), tuple(self._nonfinite_buffers())
        dtype, weights = "", []
        if model is not None:
            named = model.named_parameters()
            weights = [name for name, param in named if not _finite([param])]
            if buffers:
                dtype = formats.word(model.get_buffer(buffers[0]).dtype)
        return Numerics(
            steps=self._number,
            checked=min(self._checked, self._number),
            losses=tuple(sorted(self._nonfinite_loss_steps | lost)),
            gradients=tuple(sorted(self._nonfinite_grad_steps)),
            skipped=skipped,
            weights=tuple(weights),
            buffers=buffers,
            buffers_dtype=dtype,
            buffers_since=self._buffers_since,
            scales=scales,
            bad_op=self._bad_op,
            unreplayed=why,
        )

    def _nonfinite_buffers(self) -> Iterator[str]:
        model = self._root()
        for name, buffer in () if model is None else model.named_buffers():
            if id(buffer) not in self._infinite_at_first and _holds_inf(buffer):
                yield name

    @property
    def scaler(self) -> Any:  # noqa: ANN401 -- torch's, ours or another; or None
        """The scaler given by the caller, or else the first that a step called."""
        return self._given_scaler or next(iter(self.calls.scalers), None)

    def _scale(self) -> float | None:
        if self._session is not None:
            return float(self._session.scaler.state.scale)
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        return float(self.scaler.get_scale())

    @property
    def _before(self) -> float | None:
        if self._scale_before is not None:
            return self._scale_before
        return next(iter(self.calls.scalers.values()), None)

    def _random_state(self) -> RandomState:
        return RandomState({param.device for param in self._params()})

    def _params(self) -> list[nn.Parameter]:
        model = self._root()
        return [] if model is None else [*model.parameters()]

    def _root(self) -> nn.Module | None:
        if self._model is None and self._outermost:
            many = len(self._outermost) > 1
            return nn.ModuleList(self._outermost) if many else self._outermost[0]
        return self._model

    # Checks during a step

    @contextlib.contextmanager
    def watched(self) -> Iterator[CheckedSteps]:
        """Check the backward passes that run inside this context."""
        # Calls of these nest; the loss is an argument of the outermost.
        owners: list[Any] = [] if self._session is None else [self._session]
        owners += [torch.autograd]
        with self.calls.watched(), contextlib.ExitStack() as stack:
            for owner in owners:
                backward = self._passes(owner.backward)
                stack.enter_context(replaced(owner, "backward", backward))
            yield self

    def _passes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that runs a backward pass with the checks."""

        def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if self._depth or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            given = *args, kwargs.get("loss", kwargs.get("tensors"))
            loss = given[0]
            if self._target is not None:
                return self._capture(loss)
            self._depth += 1
            self._part += 1
            try:
                self._check_loss(loss)
                with contextlib.ExitStack() as calls:
                    if self._session is None:
                        watched = self.calls.backward_pass(loss, self._params())
                        calls.enter_context(watched)
                    result = original(*args, **kwargs)
            finally:
                self._depth -= 1
            close = self._number <= self._checked and self._session is None
            if close and not _finite(param.grad for param in self._params()):
                self._nonfinite_grad_steps.add(self._number)
            return result

        return backward

    def _check_loss(self, loss: object) -> None:
        """Check a loss before its backward pass, or record it for `numerics`."""
        tensors = loss if isinstance(loss, list | tuple) else [loss]
        for one in tensors:
            if not isinstance(one, Tensor):
                continue
            if self._number > self._checked:
                if one.numel() == 1:
                    self._losses.append((self._number, one.detach()))
            elif not self._good(one):
                self._nonfinite_loss_steps.add(self._number)

    def _good(self, loss: Tensor) -> bool:
        """Return whether a loss is finite; a 16-bit loss times its scale may be inf."""
        scaled = self._session is None and self._before is not None
        if scaled and loss.itemsize < torch.float32.itemsize:
            return not bool(loss.isnan().any())
        return _finite([loss])

    def _before_update(self, optimizer: Optimizer, *given: object) -> None:
        """Copy the weights before an update that makes them non-finite, to replay."""
        self.calls.before_update(optimizer)
        if threading.get_ident() != self._thread:
            return
        closure = any(map(callable, _pytree.tree_leaves(given)))
        if self._target is not None:
            # The optimizer calls the closure, whose backward pass comes before updates.
            if self._target == 0 and closure:
                return
            raise UserError("step() of diagnose updates weights before a backward pass")
        if self._number > self._checked or not self._changes_weights(optimizer):
            return
        if not _finite(gradients_of(optimizer)):
            self._nonfinite_grad_steps.add(self._number)
        failed = closure or self._has_failed()
        if failed and not self._weights and self._is_unexplained:
            self._weights = [(p, p.detach().clone()) for p in self._params()]

    def _after_update(self, optimizer: Optimizer, *_: object) -> None:
        counts = threading.get_ident() == self._thread
        counts = counts and self._number <= self._checked
        self._applied += counts and self._changes_weights(optimizer)
        self.calls.after_update()

    @staticmethod
    def _changes_weights(optimizer: Optimizer) -> bool:
        """Return whether a step changes weights; a fused one skips by `found_inf`."""
        return not float(getattr(optimizer, "found_inf", None) or 0.0)

    @contextlib.contextmanager
    def _discovering(self) -> Iterator[None]:
        """Record the outermost models that the first step runs, if none was given."""
        if self._model is not None or self._outermost:
            yield
            return

        def enter(module: nn.Module, *_: object) -> None:
            if torch.compiler.is_compiling():  # inside a module already recorded
                return
            is_recorded = any(module is one for one in self._outermost)
            learns = any(param.requires_grad for param in module.parameters())
            if learns:
                self.calls.on_forward(module)
            if learns and not is_recorded and not self._inside:
                self._outermost.append(module)
                self._take_down_buffers(module)
            self._inside += 1

        def leave(*_: object) -> None:
            self._inside -= not torch.compiler.is_compiling()

        self._inside = 0
        with (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
            warnings.catch_warnings(),  # torch warns of these two hooks
        ):
            warnings.filterwarnings("ignore", "Using `torch.compile")
            yield

    def _take_down_buffers(self, model: nn.Module) -> None:
        infinite = (id(buffer) for buffer in model.buffers() if _holds_inf(buffer))
        self._infinite_at_first.update(infinite)

    # Replay of a failed step

    def _replay_step(
        self, batch: tuple[object, ...], scale: float | None, random: RandomState
    ) -> None:
        """Run the step again under `find_nonfinite`, up to each backward pass."""
        model = self._root()
        if model is None:
            self._unreplayed = "the model is not known (model=)."
            return
        if exchanges(model):
            self._unreplayed = (
                "its passes wait for other processes. "
                "Call halfstep.find_nonfinite on all."
            )
            return
        now, weights = self._random_state(), [p.data for p, _ in self._weights]
        for param, before in self._weights:
            param.data = before
        random.restore()
        try:
            bad_op = self._replayed(model, batch, scale or 1.0)
            is_lost = self._number in self._nonfinite_loss_steps
            self._bad_op, self._unreplayed = bad_op or self._bad_op, ""
            if bad_op is None or (is_lost and bad_op.normal):
                self._unreplayed = _why_finite(model)
        except Exception as error:  # noqa: BLE001 -- any code of the user's may fail
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            self._unreplayed = reason.rstrip(".") + "."
        finally:
            now.restore()
            for (param, _), after in zip(self._weights, weights, strict=True):
                param.data = after

    def _replayed(
        self, model: nn.Module, batch: tuple[object, ...], scale: float
    ) -> BadOp | None:
        masters = self._session is not None and self._session.choice.level.masters
        parts = range(max(1, self._part))
        with self._replaying():
            bad_op = find_nonfinite(
                model,
                [partial(self._loss_of, part, batch) for part in parts],
                scale=scale,
                number=self._number,
                failed=self._same_batch,
                summed_in=torch.float32 if masters else None,
            )
        return bad_op or None

    def _loss_of(self, part: int, batch: tuple[object, ...]) -> Tensor:
        """Return the loss of the step's backward pass number `part`; run none."""
        self._target = part
        self._captured.clear()
        try:
            self._step(*batch)
        except _BackwardReached:
            pass
        finally:
            self._target = None
        if not self._captured:
            raise UserError("step() of diagnose ran fewer backward passes than before")
        loss = self._captured.pop()
        return loss if self._session is None else loss / self._session.accumulate

    def _capture(self, loss: object) -> None:
        """Record the loss of the requested backward pass and end the step there."""
        if self._target:
            self._target -= 1
            return
        single = loss[0] if isinstance(loss, list | tuple) and len(loss) == 1 else loss
        if not isinstance(single, Tensor):
            message = "step() of diagnose runs one backward pass of several losses"
            raise UserError(message)
        self._captured.append(single)
        raise _BackwardReached

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[None]:
        """Replace methods of scaler and session, so that a replay changes neither."""
        with contextlib.ExitStack() as stack:
            seen = {id(each): each for each in (self.scaler, *self.calls.scalers)}
            for scaler in filter(None, seen.values()):
                stack.enter_context(replaced(scaler, "scale", lambda outputs: outputs))
                for name in ("unscale_", "step", "update"):
                    if hasattr(scaler, name):
                        nothing = replaced(scaler, name, lambda *_, **__: None)
                        stack.enter_context(nothing)
            if self._session is not None:
                report = StepReport(self._number, complete=False)
                stack.enter_context(replaced(self._session, "step", lambda: report))
            yield


def _why_finite(model: nn.Module) -> str:
    hooks = [hook.__name__ for hook, _ in getattr(model, "_comm_hooks", ())]
    if hooks:
        return (
            f"all was finite before DDP's communication hook {hooks[0]}: what it sends "
            "in float16 ends at 65504. Leave it out, or send bfloat16."
        )
    return "all was finite then. Give batches=, so that it has the same batch."


def _holds_inf(buffer: Tensor) -> bool:
    """Return whether a buffer has NaN or +inf; -inf is usual in masks."""
    return not all(bool((part < torch.inf).all()) for part in floats(buffer))


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether all tensors are finite. Synchronizes with the device."""
    return all(bool(part.isfinite().all()) for part in floats([*tensors]))
