"""Warns of calls of a `GradScaler` in the wrong order, in its first iterations.

Later iterations are not watched and have no overhead.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from halfstep._torch.optimizer_params import gradients_of
from halfstep.errors import warn_caller
from halfstep.nonfinite.domains import UNSCALE
from halfstep.nonfinite.graph import is_unscaled, loss_scale_of, nodes_of
from halfstep.numerics.formats import word
from halfstep.reporting.finding import Finding
from halfstep.scaling.loss_scale import FP32_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

_ITERATIONS = 3
"""Number of iterations without overflow that are watched."""
_SCALED_LOSSES = 12
"""Maximum number of losses that are watched, with gradient accumulation."""
_SAME = 1e-3
"""Relative difference below which two numbers count as equal."""
_MAX_DIVISOR = 1 / (4 * _SAME)
"""Above it, `_SAME` does not tell a number from the next integer."""
_OWNER = "_halfstep_scaler"
"""Attribute of an optimizer: a weak reference to the scaler that steps it."""

RULE = "call order"
"""Name of the rule in each finding."""


def as_warning(finding: Finding) -> None:
    """Warn of a finding, at the user's line that called the scaler."""
    warn_caller(f"{finding.measured}. {finding.advice}")


def call_order_finding(measured: str, advice: str) -> Finding:
    """Return a finding on the calls of a step."""
    return Finding("error", RULE, "the step", measured, "", "its calls", advice, 0.9)


def backward_inside() -> Finding:
    """Return the finding on a backward pass inside the autocast context."""
    finding = call_order_finding(
        "the backward pass ran inside autocast, which may cast operations of its own",
        "Leave the context before backward().",
    )
    return replace(finding, severity="warning")


class CallOrderWatch:
    """Watches the first iterations of one scaler.

    Warns of: gradients changed before they are unscaled; an optimizer stepped without
    the scaler; a backward pass, or gradients cleared, between `unscale_` and `step`; a
    backward pass inside autocast; a loss computed outside of it; a new scaler in each
    epoch; `update` between the steps of two optimizers; a penalty on gradients of a
    scaled loss.

    Args:
        say: Called with each finding, once.
    """

    def __init__(self, say: Callable[[Finding], None] = as_warning) -> None:
        self._say = say
        self._num_iterations = self._num_losses = 0
        self._is_pending = False
        """A loss was scaled, and neither `unscale_` nor `step` was called since."""
        self._num_moves = 0
        """Consecutive losses before which weights changed without such a call."""
        self._weights: list[tuple[weakref.ref[Tensor], int]] = []
        """(weight that the last loss reaches, its version counter)."""
        self._sample: tuple[weakref.ref[Tensor], Tensor] | None = None
        """The smallest weight and a copy: fused optimizers do not change versions."""
        self._grads: dict[int, tuple[int, Tensor]] = {}
        """id -> (version, norm) of gradients after the last backward pass."""
        self._used: set[int] = set()
        """ids of those that an optimizer has stepped with."""
        self._overdue: dict[int, int] = {}
        """id -> version of gradients that no optimizer used before `update`."""
        self._multiplied = math.nan, math.nan
        """(factor applied to all gradients before the last unscaling, norm after)."""
        self._unscaled: dict[int, set[int]] = {}
        """id of an optimizer unscaled but not stepped -> ids of its parameters."""
        self._stepped: set[int] = set()
        """ids of optimizers that were stepped, which unscales too."""
        self._has_scaled_graph = False
        """A scaled loss was differentiated with `create_graph=True`."""
        self._undivided_scale: float | None = None
        """Loss scale by which no later loss divides; 0: one does; None: no loss."""
        self._reported: set[str] = set()

    @property
    def is_over(self) -> bool:
        """Whether the watch has ended."""
        return self._num_iterations >= _ITERATIONS or self._num_losses >= _SCALED_LOSSES

    def on_scale(self, loss: Tensor, scaled: Tensor) -> None:
        """Check the graph of a loss, and what happened since the last one."""
        moved = self._is_pending and self._weights_have_moved()
        self._num_moves = self._num_moves + 1 if moved else 0
        if self._num_moves > 1:  # once is allowed: SAM perturbs the weights
            self._find(
                "weights changed after scaler.scale(loss).backward(), and the scaler "
                "was not asked: they were updated with scaled gradients",
                "Call scaler.step(optimizer) in place of optimizer.step(), then "
                "scaler.update().",
            )
        self._num_losses += 1
        self._overdue = {}
        if loss.grad_fn is None:
            return
        _refuse_mixed_loss(loss)
        if self._has_scaled_graph and self._undivided_scale != 0:
            scale = loss_scale_of(scaled)
            self._undivided_scale = 0.0 if is_unscaled(loss, scale) else scale
        self._is_pending = True
        nodes: set[Any] = nodes_of(loss.grad_fn)
        weights = [node.variable for node in nodes if hasattr(node, "variable")]
        self._weights = [(weakref.ref(each), each._version) for each in weights]  # noqa: SLF001
        smallest = min(weights, key=Tensor.numel, default=None)
        if smallest is not None:
            self._sample = weakref.ref(smallest), smallest.detach().clone()
        scaled.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _weights_have_moved(self) -> bool:
        """Return whether weights have changed since the last scaled loss."""
        weights = ((reference(), version) for reference, version in self._weights)
        if any(w is not None and w._version != version for w, version in weights):  # noqa: SLF001
            return True
        if self._sample is None:
            return False
        reference, before = self._sample
        sample = reference()
        return sample is not None and not torch.equal(sample.detach(), before)

    def _in_backward(self, gradient: Tensor) -> None:
        """Queue `_after_backward` for the end of this pass, after DDP's callbacks."""
        if torch.is_grad_enabled():
            self._has_scaled_graph = True
            return
        is_inside = torch.is_autocast_enabled(gradient.device.type)

        def after_others() -> None:
            _queue(lambda: self._after_backward(is_inside))

        _queue(after_others)

    def _after_backward(self, is_inside: bool) -> None:
        """Store versions and norms of the gradients."""
        references = (reference() for reference, _ in self._weights)
        weights = [each for each in references if each is not None]
        if set(map(id, weights)) & set().union(*self._unscaled.values()):
            self._find(
                "a backward pass came after scaler.unscale_(optimizer): scaled "
                "gradients were added to unscaled ones",
                "Call unscale_ once, after the last micro-batch.",
            )
        grads = [each.grad for each in weights]
        dense = [
            grad
            for grad in grads
            if type(grad) is Tensor and grad.layout == torch.strided and grad.numel()
        ]
        if dense and is_inside:
            self._say_once(backward_inside())
        norms = torch._foreach_norm(dense) if dense else ()  # noqa: SLF001
        self._grads = {
            id(grad): (grad._version, norm)  # noqa: SLF001
            for grad, norm in zip(dense, norms, strict=True)
        }

    def on_unscale(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Compare gradients with those after the backward pass."""
        self._is_pending = False
        grads = gradients_of(optimizer)
        if grads and id(optimizer) not in self._stepped:
            groups = optimizer.param_groups
            params = (param for group in groups for param in group["params"])
            self._unscaled[id(optimizer)] = set(map(id, params))
        if any(self._overdue.get(id(grad)) == grad._version for grad in grads):  # noqa: SLF001
            self._find(
                "scaler.update() came between the steps of two optimizers: gradients "
                "of the second are unscaled by a scale that they were not made at",
                "Call scaler.update() once, after the last scaler.step().",
            )
        records = [
            (grad, *self._grads[id(grad)]) for grad in grads if id(grad) in self._grads
        ]
        by_hand = dist.is_available() and dist.is_initialized()  # averaged over ranks
        all_changed = all(grad._version != version for grad, version, _ in records)  # noqa: SLF001
        if len(records) < 2 or by_hand or not all_changed:  # noqa: PLR2004 -- or by chance
            return
        grads = [grad for grad, _, _ in records]
        before = torch.stack([norm for _, _, norm in records])
        norms = torch.stack(torch._foreach_norm(grads))  # noqa: SLF001
        if not bool(before.isfinite().all()):
            return  # with inf, a clip cannot be recognized
        ratios = (norms / before)[before > 0]
        if not len(ratios) or float(ratios.max()) > 1 - _SAME:
            return
        peaks = torch.stack([grad.abs().amax() for grad in grads])
        if _is_one_number(ratios):
            factor, norm = float(ratios.max()), float(norms.norm())
            is_clip = self._is_clip(factor, norm)
            self._multiplied = factor, norm
            what = f"multiplied by {factor:.2g}"
        else:
            is_clip = _is_one_number(peaks)
            what = f"cut at {float(peaks.max()):.2g}"
        if is_clip:
            self._find(
                f"gradients were {what} at loss scale {float(scale):g}, before "
                "unscale_",
                "To clip true gradients call scaler.unscale_(optimizer) first, or "
                "train with halfstep.prepare(clip_grad_norm=).",
            )

    def _is_clip(self, factor: float, norm: float) -> bool:
        """Return whether a factor is a clip, not a division by a number of items.

        Clips repeat the norm with different factors; a factor 1 / n is no clip.
        """
        last_factor, last_norm = self._multiplied
        if abs(norm - last_norm) <= _SAME * norm:
            bound = float(f"{norm:.0e}")  # typical limits: 1.0, 0.5, 1e-3
            is_bound = abs(norm - bound) <= _SAME * bound
            return is_bound or abs(factor - last_factor) > _SAME * factor
        divisor = 1 / max(factor, 1 / FP32_MAX)
        remainder = abs(divisor - round(divisor))
        return divisor < _MAX_DIVISOR and remainder > _SAME * divisor

    def on_step(
        self, scaler: object, optimizer: Optimizer, *, unscaled: bool, is_new: bool
    ) -> None:
        """Check an optimizer that is about to be stepped.

        Args:
            scaler: The scaler that steps it.
            optimizer: The optimizer.
            unscaled: `unscale_` was called on it in this iteration.
            is_new: No state was loaded into the scaler.
        """
        self._is_pending = False
        grads = gradients_of(optimizer)
        if unscaled and not grads:
            self._find(
                "no gradient is left to step with: they were dropped between "
                "scaler.unscale_(optimizer) and scaler.step(optimizer)",
                "Call zero_grad() after the step, or before the backward pass.",
            )
        self._used.update(map(id, grads))
        self._stepped.add(id(optimizer))
        self._unscaled.pop(id(optimizer), None)
        owner = getattr(optimizer, _OWNER, lambda: scaler)()
        if owner is None and is_new:
            self._find(
                "this optimizer was stepped by a GradScaler that is gone, and the new "
                "one begins to look for a loss scale anew",
                "Make one before the loop, or hand its state_dict() on.",
            )
        setattr(optimizer, _OWNER, weakref.ref(scaler))

    def on_update(self) -> None:
        """End an iteration."""
        if self._undivided_scale:
            self._find(
                "gradients were taken of scaler.scale(...) with create_graph=True, and "
                "no loss after that divides them by the loss scale "
                f"{self._undivided_scale:g}: a penalty on them grows with it",
                UNSCALE,
            )
        norms = [norm for _, norm in self._grads.values()]
        if not norms or bool(torch.stack(norms).isfinite().all()):
            self._num_iterations += 1  # iterations with overflow do not count
        self._is_pending = self._has_scaled_graph = False
        self._undivided_scale = None
        self._overdue = {
            key: version
            for key, (version, _) in self._grads.items()
            if self._used and key not in self._used
        }
        self._grads, self._used = {}, set()
        self._unscaled, self._stepped = {}, set()

    def _find(self, measured: str, advice: str) -> None:
        self._say_once(call_order_finding(measured, advice))

    def _say_once(self, finding: Finding) -> None:
        if finding.advice not in self._reported:
            self._reported.add(finding.advice)
            self._say(finding)


def _is_one_number(values: Tensor) -> bool:
    """Return whether positive numbers are equal up to rounding."""
    return float(values.max() - values.min()) <= _SAME * float(values.max())


def _queue(callback: Callable[[], None]) -> None:
    """Call a function when the current backward pass has ended."""
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001


def _refuse_mixed_loss(loss: Tensor) -> None:
    """Raise for a Huber loss of mixed dtypes, whose backward pass torch rejects.

    Raises:
        RuntimeError: With torch's own message and how to fix it.
    """
    node: Any = loss.grad_fn
    if type(node).__name__ != "HuberLossBackward0":  # others support mixed dtypes
        return
    predictions, target = node._saved_self.dtype, node._saved_target.dtype  # noqa: SLF001
    if predictions != target:
        raise RuntimeError(
            f"Found dtype {word(target)} but expected {word(predictions)}: the Huber "
            "loss was computed outside autocast, of 16-bit predictions and an fp32 "
            "target. Compute it inside the context, or of predictions.float()."
        )
