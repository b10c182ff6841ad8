"""Searches for the loss scale and the fp32 modules with which passes are finite."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.preflight.measurements import (
    CLOSE,
    FAR,
    compare_gradients,
    output_errors,
)
from halfstep.diagnostics.preflight.rules import COSINE_WARN, LOSS_WARN
from halfstep.errors import UserError
from halfstep.machine.recommendation import Choice
from halfstep.numerics.exponents import largest_safe_scale
from halfstep.numerics.formats import FP16, FP32, map_tensors, tensors_in
from halfstep.policy import levels
from halfstep.policy.rules import Policy, Rule
from halfstep.scaling import ScaleRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from halfstep.diagnostics.preflight.measurements import OutputError
    from halfstep.diagnostics.preflight.model_copy import LossFn, ModelCopy, Pass
    from halfstep.nonfinite.origin import BadOp

DEFAULT_SCALE = ScaleRule().init_scale
"""Initial value of a dynamic loss scale."""

_TRIES = 12  # scales tried at most; usually one or two
_RULES = 8  # fp32 modules at most; with more, the format is unsuitable
_LOWEST, _HIGHEST = 2.0**-24, 2.0**100  # scales tried: the scaled loss must fit fp32
_LEAP = 2.0**12  # factor to the next scale if all gradients are zero
_COMPARED = 2  # batches whose gradients are kept for comparison
_FIX_ADVICE = "No level was tried: fix it, the model or the batch."
_MAX_ERROR_CHARS = 200


@dataclass(frozen=True)
class ScaleTrial:
    """The passes at the level under one policy."""

    policy: Policy
    model_copy: ModelCopy | None
    """None if a pass raised."""
    passes: tuple[Pass, ...] = ()
    safe: float | None = None
    """The largest safe scale that was found; None if the format needs no scale."""
    at_safe: Pass | None = None
    """The pass of the first batch at scale `safe`."""
    failed: str = ""
    """The error that a pass raised, in one line."""

    @property
    def finite(self) -> bool:
        """Whether all passes are finite at the default scale."""
        return all(one.sound for one in self.passes)


class ScaleSearch:
    """Runs the reference passes in fp32 and trials at a level.

    `make` copies the model.
    """

    def __init__(
        self,
        make: Callable[..., ModelCopy],
        model: nn.Module,
        loss_fn: LossFn,
        batches: Sequence[object],
        choice: Choice,
        margin: int,
    ) -> None:
        self._make, self.margin = make, margin
        self.batches, self.choice = batches, choice
        self._others = frozenset(id(param) for param in model.parameters())
        self.kinds = {path: type(m).__name__ for path, m in model.named_modules()}
        self.notes: list[str] = []
        """What was left out, and why."""
        self.cautions: list[str] = []
        """Warnings of `prepare`."""
        self._scaled = choice.format == FP16  # other formats need no scale
        self.default = DEFAULT_SCALE if self._scaled else 1.0
        """The initial loss scale of the training."""
        self.loss_fn = self._with_copied_batches(loss_fn)
        """The caller's function, called with copies of batches."""
        fp32 = Choice(levels.O0, FP32, "the reference")
        self.fp32_copy = make(choice=fp32, policy=Policy())
        self.fp32_passes = tuple(map(self._reference, range(len(batches))))

    def _with_copied_batches(self, loss_fn: LossFn) -> LossFn:
        """Return a loss function that passes copies of batches to `loss_fn`.

        Otherwise a `loss_fn` that pops labels from a dictionary or writes in place
        would change the batch of the next pass.
        """
        try:
            for batch in self.batches:
                map_tensors(batch, _copied)
        except Exception as error:  # noqa: BLE001 -- of the user's own containers
            why = line_of(error)
            self.notes.append(f"the batch is not copied ({why}): loss_fn may change it")
            return loss_fn
        return lambda model, batch: loss_fn(model, map_tensors(batch, _copied))

    def _reference(self, number: int) -> Pass:
        try:
            return self._pass(self.fp32_copy, number, 1.0)
        except UserError:
            raise
        except Exception as error:
            called = f"loss_fn(model, {self.name_of(number)})"
            raise fp32_error(called, error, _FIX_ADVICE) from error

    def name_of(self, number: int) -> str:
        """Return the argument of `check` that a batch is."""
        return f"more[{number - 1}]" if number else "batch"

    def _passes(self, model_copy: ModelCopy, scale: float) -> tuple[Pass, ...]:
        numbers = range(len(self.batches))
        return tuple(self._pass(model_copy, number, scale) for number in numbers)

    def _pass(self, model_copy: ModelCopy, number: int, scale: float) -> Pass:
        one = model_copy.run(
            self.loss_fn,
            self.batches[number],
            scale,
            others=self._others,
            counted=self._scaled,
        )
        # Other gradients are not compared and would only take memory.
        return one if number < _COMPARED else replace(one, gradients={})

    def pair(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return fp32 gradients of two batches, or of two halves of a single one."""
        if len(self.fp32_passes) > 1:
            return self.fp32_passes[0].gradients, self.fp32_passes[1].gradients
        try:
            cut = halves(self.batches[0])
            if cut is None:
                why = "the batch cannot be halved: gradient noise was not measured"
                self.notes.append(why)
                return None
            run = partial(self.fp32_copy.run, self.loss_fn, counted=False)
            one, other = map(run, cut)
        except Exception as error:  # noqa: BLE001 -- loss_fn need not support half a batch
            why = line_of(error)
            self.notes.append(
                f"half the batch does not run ({why}): gradient noise was not measured"
            )
            return None
        return one.gradients, other.gradients

    def with_fp32_rules(
        self, policy: Policy
    ) -> tuple[ScaleTrial, BadOp | None, tuple[str, ...]]:
        """Keep modules in fp32 until a trial is finite.

        Returns:
            The trial, or if rules do not help the one without them; the first fault;
            the rules that were added.
        """
        first = trial = self._trial(policy)
        begun: BadOp | None = None
        rules: list[str] = []
        while trial.model_copy is not None:
            fault, harm = self._fault(trial)
            begun = begun or fault
            if fault is None or not harm:
                return trial, begun, tuple(rules)
            # No rule matches the root module's own code or the loss function.
            rule = _rule_for(fault.module if fault.module in self.kinds else "", rules)
            if not rule or len(rules) == _RULES:
                break
            rules.append(rule)
            row = replace(Rule.parse(rule), reason="overflowed in a check")
            try:
                trial = self._trial(trial.policy + row)
            except UserError:  # the level rejects the rule, which is not the caller's
                break
        return first, begun, ()

    def output_error(self, low_copy: ModelCopy, policy: Policy) -> OutputError | None:
        """Return the first module with a wrong output, and the rule that fixes it."""
        right = self.fp32_copy.module_calls(self.loss_fn, self.batches[0])

        def errors(model_copy: ModelCopy) -> Iterator[OutputError]:
            calls = model_copy.module_calls(self.loss_fn, self.batches[0])
            return output_errors(right, calls)

        wrong = (e for e in errors(low_copy) if e.error > FAR and e.inputs <= CLOSE)
        worst = next(wrong, None)
        if worst is None or not worst.path:
            return worst
        rule = f"module:{worst.path}=fp32"
        try:
            cured = self._make(choice=self.choice, policy=policy + Rule.parse(rule))
        except UserError:  # the level rejects the rule
            return worst
        own = (each.error for each in errors(cured) if each.path == worst.path)
        return replace(worst, rule=rule) if max(own, default=0.0) <= FAR else worst

    def _trial(self, policy: Policy) -> ScaleTrial:
        try:
            model_copy = self._make(choice=self.choice, policy=policy)
            passes = self._passes(model_copy, self.default)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 -- any error of the model's code
            return ScaleTrial(policy, None, failed=line_of(error))
        self.cautions = model_copy.notes  # later steps append to this list
        trial = ScaleTrial(policy, model_copy, passes)
        good = all(math.isfinite(one.loss) for one in passes)
        if self._scaled and good:
            safe, at_safe = self._search(model_copy, passes)
            trial = replace(trial, safe=safe, at_safe=at_safe)
        return trial

    def _search(
        self, model_copy: ModelCopy, begun: Sequence[Pass]
    ) -> tuple[float | None, Pass | None]:
        """Return the largest scale at which gradients keep the margin to overflow.

        The histogram of each trial proposes the next scale, until the proposal was
        already tried and finite: the result is measured, not predicted from fp32.
        """
        proposed = self._safe(self.fp32_passes)
        scale = 1.0 if proposed is None else proposed
        ceiling = math.inf
        finite: dict[float, Pass] = {}
        for _ in range(_TRIES):
            same = scale == self.default
            passes = begun if same else self._passes(model_copy, scale)
            if all(one.finite for one in passes):
                finite[scale] = passes[0]
                safe = self._safe(passes)
                if not any(int(one.histogram.sum()) for one in passes):
                    return scale, passes[0]  # no gradient is in 16 bits
                # All zero: the scale predicted from fp32 is too small.
                following = min(scale * _LEAP if safe is None else safe, ceiling)
            else:
                following = ceiling = scale / 4
            if following in finite:
                return following, finite[following]
            if not _LOWEST <= following <= _HIGHEST:
                break
            scale = following
        lowest = min(finite, default=None)
        return lowest, None if lowest is None else finite[lowest]

    def _safe(self, passes: Sequence[Pass]) -> float | None:
        seen = torch.stack([one.histogram for one in passes]).sum(0)
        safe = largest_safe_scale(seen, torch.float16, self.margin).item()
        return None if math.isnan(safe) else min(max(safe, _LOWEST), _HIGHEST)

    def _fault(self, trial: ScaleTrial) -> tuple[BadOp | None, bool]:
        """Return the first op that made inf or NaN, and whether it needs a rule."""
        assert trial.model_copy is not None  # noqa: S101
        enough = trial.finite or (trial.safe is not None and trial.safe >= 1)
        harm = not (enough and all(math.isfinite(one.loss) for one in trial.passes))
        # fp16 only: values that overflow bf16 overflow fp32 too.
        harm = harm or (self._scaled and self._differs(trial))
        if trial.finite and not harm:
            return None, False
        for one, batch in zip(trial.passes, self.batches, strict=True):
            bad = trial.model_copy.find_nonfinite(self.loss_fn, batch, one.scale)
            if bad is not None:
                return bad, harm and not bad.normal
        return None, False

    def _differs(self, trial: ScaleTrial) -> bool:
        """Return whether loss or gradients are far from fp32's, or not finite."""
        used = trial.passes[0] if trial.finite else trial.at_safe
        right = self.fp32_passes[0]
        if used is None or abs(used.loss - right.loss) > LOSS_WARN * abs(right.loss):
            return True
        overall, _ = compare_gradients(right.gradients, used.gradients, lambda _: "")
        return not overall.cosine >= COSINE_WARN  # NaN is none


def _rule_for(path: str, rules: Sequence[str]) -> str:
    """Return a rule for a module, or for a parent if it has one; "" if none is left."""
    while path and f"module:{path}=fp32" in rules:
        path = path.rpartition(".")[0]
    return f"module:{path}=fp32" if path else ""


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def line_of(error: Exception) -> str:
    """Return the message of an error as one line of limited length."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _MAX_ERROR_CHARS else f"{words[:_MAX_ERROR_CHARS]}..."


def fp32_error(what: str, error: Exception, advice: str) -> UserError:
    """Return a `UserError` for an error that a call raised in fp32."""
    kind = type(error).__name__
    return UserError(f"{what} raised {kind} in fp32: {line_of(error)}. {advice}")


def halves(batch: Any) -> tuple[Any, Any] | None:  # noqa: ANN401
    """Return the first half of a batch's examples, and equally many of the rest.

    A tensor is split along its first dimension if that has the most common length of
    all tensors; other tensors and objects go into both halves. None if none is split.
    """
    sizes = Counter(item.shape[0] for item in tensors_in(batch) if item.ndim)
    examples = sizes.most_common(1)[0][0] if sizes else 0
    half = examples // 2

    def rows(begin: int) -> Any:  # noqa: ANN401
        def cut(item: Tensor) -> Tensor:
            is_batched = item.ndim and item.shape[0] == examples
            return item[begin : begin + half] if is_batched else item

        return map_tensors(batch, cut)

    return (rows(0), rows(half)) if half else None
