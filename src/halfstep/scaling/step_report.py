"""`StepReport`: what one optimizer step did; reads the device only when accessed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from halfstep._torch import async_read
from halfstep._torch.optimizer_params import first_gradient, named_parameters
from halfstep.numerics.local_tensor import dense_values
from halfstep.numerics.norms import total_norm
from halfstep.reporting.table import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


T = TypeVar("T")
_MAX_NAMES = 3


@dataclass(frozen=True)
class NonFiniteParam:
    """A parameter whose gradient held inf or NaN."""

    name: str
    inf: bool
    """Whether it held inf."""
    nan: bool
    """Whether it held NaN."""


@dataclass(frozen=True)
class Constant(Generic[T]):
    """A callable that returns a value, and can be pickled."""

    value: T

    def __call__(self) -> T:
        """Return the value."""
        return self.value


@dataclass(frozen=True, repr=False)
class StepReport(Report):
    """What one call of `step` did; prints as one line.

    `torch.amp` does not report skips, and to infer one from "was optimizer.step
    called?" is wrong for fused optimizers, which skip inside their kernel. The report
    holds the flag itself, as a tensor; its properties synchronize with the device when
    they are read.

    Example:
        >>> import halfstep as hs
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session = hs.prepare(model, optimizer, "O1", dtype="bf16")
        >>> with session.autocast():
        ...     loss = session.model(torch.full((2,), torch.inf)).sum()
        >>> session.backward(loss)
        >>> report = session.step()
        >>> report.skipped, report.inf_in
        (True, ('weight',))
    """

    step: int
    """Number of optimizer steps so far, this one and skipped ones included."""
    complete: bool
    """False for all but the last micro-batch of a step: nothing was updated."""
    scale_used: Tensor | float = 1.0
    """Loss scale of the backward pass, shape (); `scale` is the same as a float."""
    found_inf: Tensor | bool = False
    """Whether a gradient held inf or NaN; any non-zero number counts, shape ()."""
    norm: Callable[[], Tensor | float | None] = Constant(None)
    """Returns the norm of all unscaled gradients; `grad_norm` calls it."""
    culprits: Callable[[], tuple[NonFiniteParam, ...]] = Constant(())
    """Returns the parameters with non-finite gradients; `found_inf_in` calls it."""
    left_out: tuple[str, ...] = ()
    """Parameters that an applied step did not update: with `optimizer_in_backward`, a
    non-finite gradient skips its own parameter only."""

    def __repr__(self) -> str:
        """Return in one line what the step did. May synchronize."""
        if not self.complete:
            return f"step {self.step + 1} is not complete: nothing is updated yet"
        if self.skipped:
            outcome, norm = f"skipped: {self._cause()};", None
        else:
            outcome, norm = "applied:", self.grad_norm
        more = "" if norm is None else f", gradient norm {norm:.4g}"
        if self.left_out:
            more += f", not updated: {first_names(self.left_out)}"
        return f"step {self.step} {outcome} loss scale {self.scale:g}{more}"

    def _cause(self) -> str:
        try:
            names_by_kind = {"inf": self.inf_in, "NaN": self.nan_in}
        except RuntimeError:  # the gradients were cleared before they were read
            return "a gradient held inf or NaN"
        parts = [
            f"{kind} in {first_names(names)}"
            for kind, names in names_by_kind.items()
            if names
        ]
        return "; ".join(parts) or "a gradient held inf or NaN"

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped for inf or NaN. May synchronize."""
        return self.complete and bool(self.found_inf)

    @property
    def applied(self) -> bool:
        """Whether the step updated the weights. May synchronize."""
        return self.complete and not self.found_inf

    @property
    def scale(self) -> float:
        """Loss scale of the backward pass. May synchronize."""
        return float(self.scale_used)

    @property
    def grad_norm(self) -> float | None:
        """Norm of all unscaled gradients before clipping by a session; None if unknown.

        May synchronize.
        """
        norm = self.norm()
        return None if norm is None else float(norm)

    @property
    def found_inf_in(self) -> tuple[str, ...]:
        """Parameters with non-finite gradients; () if applied. May synchronize.

        Raises:
            RuntimeError: If the gradients were cleared before it was first read.
        """
        return tuple(param.name for param in self._nonfinite_params())

    @property
    def inf_in(self) -> tuple[str, ...]:
        """Parameters with inf in their gradients. May synchronize."""
        return tuple(param.name for param in self._nonfinite_params() if param.inf)

    @property
    def nan_in(self) -> tuple[str, ...]:
        """Parameters with NaN in their gradients. May synchronize."""
        return tuple(param.name for param in self._nonfinite_params() if param.nan)

    def read(self) -> StepReport:
        """Return a copy that no longer needs the gradients. Synchronizes."""
        norm = self.grad_norm
        try:
            culprits: Callable[[], tuple[NonFiniteParam, ...]] = Constant(
                self._nonfinite_params()
            )
        except RuntimeError:
            culprits = partial(nonfinite_params_of, [None])  # raises when it is read
        return replace(self, norm=Constant(norm), culprits=culprits)

    def _nonfinite_params(self) -> tuple[NonFiniteParam, ...]:
        return self.culprits() if self.skipped else ()


def first_names(names: Sequence[str]) -> str:
    """Return the first names and the number of others, as text."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


class OptimizerGrads:
    """The gradients an optimizer was stepped with, by weak reference.

    Why: keeping them would cost their memory in the next forward pass, and reading them
    would cost a pass over memory in each step. On a CPU, where an overflow is known
    without synchronization, those of a skipped step are read at once.

    Args:
        optimizer: The optimizer, just stepped.
        flags: Its found_inf flag for each device, each of shape ().
    """

    def __init__(self, optimizer: Optimizer, flags: Iterable[Tensor]) -> None:
        # The scaler must not keep its last optimizer alive.
        self._optimizer = weakref.ref(optimizer)
        first = first_gradient(optimizer)
        self._first_grad = None if first is None else weakref.ref(first)
        self._version = 0 if first is None else first._version  # noqa: SLF001
        self._nonfinite: tuple[NonFiniteParam, ...] | None = None
        flags = list(flags)
        if all(flag.device.type in async_read.READABLE_DEVICES for flag in flags):
            pairs = self.gradients() if any(map(bool, flags)) else None
            self._nonfinite = find_nonfinite_params(pairs or [])

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it was deleted."""
        return self._optimizer()

    def gradients(self) -> list[tuple[str, Tensor]] | None:
        """Return (name, gradient) pairs; None once they were cleared or changed."""
        first = None if self._first_grad is None else self._first_grad()
        optimizer = self.optimizer
        current = None if optimizer is None else first_gradient(optimizer)
        if optimizer is None or first is None or current is not first:
            return None
        if first._version != self._version:  # noqa: SLF001
            return None
        pairs = named_parameters(optimizer)
        return [(name, param.grad) for name, param in pairs if param.grad is not None]

    def nonfinite_params(self) -> tuple[NonFiniteParam, ...] | None:
        """Return the non-finite ones; None if the gradients no longer exist."""
        if self._nonfinite is not None:
            return self._nonfinite
        gradients = self.gradients()
        return None if gradients is None else find_nonfinite_params(gradients)


def optimizers_of(grads: Sequence[OptimizerGrads]) -> list[Optimizer]:
    """Return the optimizers that still exist."""
    return [part.optimizer for part in grads if part.optimizer is not None]


def norm_of(grads: Sequence[OptimizerGrads]) -> Tensor | None:
    """Return the norm of all gradients; None if some no longer exist."""
    all_grads: list[Tensor] = []
    for part in grads:
        pairs = part.gradients()
        if pairs is None:
            return None
        all_grads += [grad for _, grad in pairs]
    return total_norm(all_grads) if grads else None


def nonfinite_params_of(
    grads: Sequence[OptimizerGrads | None],
) -> tuple[NonFiniteParam, ...]:
    """Return the parameters with non-finite gradients.

    Raises:
        RuntimeError: If some gradients no longer exist.
    """
    nonfinite: list[NonFiniteParam] = []
    for part in grads:
        params = None if part is None else part.nonfinite_params()
        if params is None:
            raise RuntimeError(
                "the gradients of the skipped step are gone; read found_inf_in before "
                "they are cleared, that is, before optimizer.zero_grad()."
            )
        nonfinite += params
    return tuple(nonfinite)


def remaining_nonfinite(grads: Sequence[OptimizerGrads]) -> tuple[NonFiniteParam, ...]:
    """Return the parameters with non-finite gradients, among those still readable."""
    return tuple(culprit for part in grads for culprit in part.nonfinite_params() or ())


def find_nonfinite_params(
    pairs: Iterable[tuple[str, Tensor]],
) -> tuple[NonFiniteParam, ...]:
    """Return the tensors that hold inf or NaN. Synchronizes with the device."""
    params = []
    for name, tensor in pairs:
        values = dense_values(tensor)
        # The sum is non-finite if an element is; this mostly saves the other passes.
        if values.numel() and not bool(torch.isfinite(values.sum())):
            inf, nan = bool(values.isinf().any()), bool(values.isnan().any())
            if inf or nan:
                params.append(NonFiniteParam(name, inf, nan))
    return tuple(params)


@dataclass(frozen=True, eq=False)
class NonFiniteMarks:
    """Names the non-finite gradients when called, after they may have been cleared."""

    names: Sequence[str]
    marks: Tensor
    """`norms.nonfinite_marks` of the gradients, on the device."""

    def __call__(self) -> tuple[NonFiniteParam, ...]:
        """Return the parameters with non-finite gradients. Synchronizes."""
        return self.nonfinite_params(self.marks.flatten().tolist())

    def nonfinite_params(self, marks: Sequence[float]) -> tuple[NonFiniteParam, ...]:
        """Return the parameters with inf or NaN; `marks` are all inf, then all NaN."""
        inf, nan = marks[: len(self.names)], marks[len(self.names) :]
        return tuple(
            NonFiniteParam(name, bool(has_inf), bool(has_nan))
            for name, has_inf, has_nan in zip(self.names, inf, nan, strict=True)
            if has_inf or has_nan
        )
