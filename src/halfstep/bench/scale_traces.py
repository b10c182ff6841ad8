"""`halfstep bench traces`: steps lost to overflow under each library's scale rule.

A trace is the largest gradient of each step, recorded from a training run or synthetic.
Each rule is applied to the same traces: a step is lost if its largest gradient times
the scale overflows fp16. Nothing is timed.

The rules of other libraries are reimplemented here; halfstep's is a LossScaler that
runs on a graph whose only 16-bit gradient is the trace's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import journal, measure
from halfstep.scaling import LossScaleCollapse, LossScaler, ScaleRule

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from halfstep.reporting.table import Cell, Table

LARGEST = 65520.0
"""Half a unit above fp16's largest number, 65504: rounds to inf from here on."""

_PEAK = 3.0  # its largest safe scale is 2**14
_SAFE = 2.0**14
_WINDOW = 50
_STUCK = 10  # consecutive lost steps at one scale: more than any hysteresis


def overflows(peak: float, scale: float) -> bool:
    """Return whether the largest gradient of a step is non-finite in fp16."""
    return not abs(peak) * scale < LARGEST  # NaN overflows too


def largest_safe_scale(peak: float) -> float:
    """Return the largest power of two at which a gradient fits in fp16."""
    return 2.0 ** (math.ceil(math.log2(LARGEST / peak)) - 1)


# The rules of other libraries


@dataclass(frozen=True)
class ScalerState:
    """The state of a loss scale rule between steps."""

    scale: float
    clean_steps: int = 0
    """Steps without overflow since the scale last changed, or since an overflow."""
    overflows_left: int = 1
    """Overflows until the scale is reduced: the remaining hysteresis."""


Rule: TypeAlias = "Callable[[ScalerState, bool], ScalerState | None]"
"""(state, whether the step overflowed) -> next state; None: the library raises."""


def torch_amp(state: ScalerState, found_inf: bool) -> ScalerState:
    """Halve at each overflow; double after 2,000 consecutive clean steps; no bounds."""
    if found_inf:
        return ScalerState(_fp32(state.scale / 2))
    if state.clean_steps + 1 < 2000:  # noqa: PLR2004 -- torch's default
        return replace(state, clean_steps=state.clean_steps + 1)
    doubled = _fp32(state.scale * 2)
    return ScalerState(doubled if math.isfinite(doubled) else state.scale)


def megatron(state: ScalerState, found_inf: bool) -> ScalerState:
    """Tolerate one overflow, then halve at each; double after 1,000 clean steps.

    The scale is at least 1. Only doubling resets the hysteresis.
    """
    if found_inf:
        overflows_left = state.overflows_left - 1
        scale = state.scale if overflows_left > 0 else max(_fp32(state.scale / 2), 1.0)
        return ScalerState(scale, overflows_left=overflows_left)
    if state.clean_steps + 1 < 1000:  # noqa: PLR2004 -- Megatron's default
        return replace(state, clean_steps=state.clean_steps + 1)
    return ScalerState(_fp32(state.scale * 2), overflows_left=2)


def deepspeed(
    state: ScalerState, found_inf: bool, *, consecutive: bool = False
) -> ScalerState | None:
    """Like Megatron, but raise instead of staying at 1.

    Args:
        state: Before the step.
        found_inf: Whether the step overflowed.
        consecutive: Each clean step resets the hysteresis, not only doubling.
    """
    if found_inf and state.overflows_left > 1:
        return ScalerState(state.scale, overflows_left=state.overflows_left - 1)
    if found_inf:
        return (
            ScalerState(max(state.scale / 2, 1.0), overflows_left=1)
            if state.scale != 1
            else None
        )
    overflows_left = 2 if consecutive else state.overflows_left
    if state.clean_steps + 1 < 1000:  # noqa: PLR2004 -- DeepSpeed's default
        return ScalerState(state.scale, state.clean_steps + 1, overflows_left)
    return ScalerState(state.scale * 2, overflows_left=2)


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


# Applying rules to traces


@dataclass(frozen=True)
class Contender:
    """A rule with its initial scale."""

    first: float
    """Initial scale of the library."""
    play: Callable[[Sequence[float], float], Iterator[float]]
    """(peaks, initial scale) -> the scale of each step and the one after the last; ends
    early if the library raises."""


def replay_library_rule(
    rule: Rule, hysteresis: int, peaks: Sequence[float], first: float
) -> Iterator[float]:
    """Run another library's rule; it tolerates `hysteresis` - 1 overflows."""
    state = ScalerState(first, overflows_left=hysteresis)
    for peak in peaks:
        yield state.scale
        next_state = rule(state, overflows(peak, state.scale))
        if next_state is None:
            return
        state = next_state
    yield state.scale


def replay_halfstep_rule(
    rule: ScaleRule, peaks: Sequence[float], first: float
) -> Iterator[float]:
    """Run a LossScaler, including its strategy."""
    scaler = LossScaler(rule)
    scaler.state = replace(scaler.state, scale=torch.tensor(first))
    weight = torch.ones((), requires_grad=True)
    for peak in peaks:
        loss = weight.half().float() * peak
        scaler.observe_loss(loss)
        yield scaler.state.scale.item()
        (gradient,) = torch.autograd.grad(scaler.scale(loss), weight)
        try:
            scaler.update(scaler.unscale_([gradient]))
        except LossScaleCollapse:
            return
    yield scaler.state.scale.item()


def _halfstep(rule: ScaleRule) -> Contender:
    return Contender(rule.init_scale, partial(replay_halfstep_rule, rule))


def _library(rule: Rule, first: float, hysteresis: int) -> Contender:
    return Contender(first, partial(replay_library_rule, rule, hysteresis))


CONTENDERS = {
    "torch.amp": _library(torch_amp, 2.0**16, 1),
    "Megatron": _library(megatron, 2.0**32, 2),
    "DeepSpeed": _library(deepspeed, 2.0**16, 2),
    "DeepSpeed, consecutive": _library(
        partial(deepspeed, consecutive=True), 2.0**16, 2
    ),
    "halfstep": _halfstep(ScaleRule()),
    "halfstep, hysteresis 2": _halfstep(ScaleRule(hysteresis=2)),
    "halfstep, hysteresis 2, clean": _halfstep(ScaleRule(hysteresis=2, refill="clean")),
    "halfstep, measured": _halfstep(ScaleRule.parse("measured")),
    "halfstep, logmax": _halfstep(ScaleRule.parse("logmax")),
}
"""Name -> rule, with the library's defaults."""


# Traces


@dataclass(frozen=True)
class Trace:
    """A sequence of gradient magnitudes."""

    name: str
    peaks: Sequence[float]
    """Largest |gradient| of each step, unscaled; NaN if non-finite."""
    level: Sequence[float]
    """The same without outliers; determines the right scale."""
    first: float | None = _SAFE
    """Initial scale for every rule; None: each library's own."""


def synthetic_traces(steps: int) -> list[Trace]:
    """Return typical shapes of gradient magnitudes."""
    flat = [_PEAK] * steps
    at = steps // 10
    growth = [_PEAK * 2 ** (step / 500) for step in range(steps)]
    decay = [_PEAK / 2 ** (step / 500) for step in range(steps)]
    # 51, so that a rule that acts every 100 steps meets some of them, not all or none.
    spikes = [_PEAK * (8 if step % 51 == 50 else 1) for step in range(steps)]  # noqa: PLR2004
    nan = math.nan
    return [
        Trace("cold start from 2**32", flat, flat, 2.0**32),
        Trace("cold start from 2**16", flat, flat, 2.0**16),
        Trace("one bad batch", [*flat[:at], nan, *flat[at + 1 :]], flat),
        Trace("three bad batches", [*flat[:at], nan, nan, nan, *flat[at + 3 :]], flat),
        Trace("gradients double every 500 steps", growth, growth),
        Trace("gradients halve every 500 steps", decay, decay),
        Trace("8 times as large every 51 steps", spikes, flat),
        Trace("NaN for ever", [*flat[:at], *[nan] * (steps - at)], flat),
    ]


def record_trace(steps: int, reduction: str) -> Trace:
    """Train a small classifier in fp16 autocast; return the peaks of 16-bit gradients.

    The scale is too low to overflow, so that no rule influences the trace.

    Args:
        steps: Number of steps.
        reduction: Of the loss over a batch, "mean" or "sum".
    """
    torch.manual_seed(0)
    teacher = torch.randn(32, 10)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )
    batch, scale = 32, 2.0**6
    lr = 0.05 / (batch if reduction == "sum" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    seen: list[Tensor] = []

    def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: seen.append(gradient.abs().amax()))  # type: ignore[no-untyped-call]

    for module in model:
        module.register_forward_hook(see)
    peaks = []
    for _ in range(steps):
        inputs = torch.randn(batch, 32)
        with torch.autocast("cpu", torch.float16):
            outputs = model(inputs)
        labels = (inputs @ teacher).argmax(1)
        loss = F.cross_entropy(outputs.float(), labels, reduction=reduction)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Under autocast, weight gradients were also computed in 16 bits.
        seen += [gradient.abs().amax() for gradient in gradients]
        peaks.append(torch.stack([each.float() for each in seen]).amax().item() / scale)
        seen.clear()
        torch._foreach_div_(gradients, scale)
        optimizer.step()
        optimizer.zero_grad()
    level = [
        max(peaks[max(step - _WINDOW, 0) : step + _WINDOW]) for step in range(steps)
    ]
    return Trace(f"recorded, loss: {reduction} of {batch}", peaks, level, first=None)


# The results


def replay(trace: Trace, contender: Contender) -> dict[str, Cell]:
    """Apply a rule to a trace; return the cells of its row.

    A step is lost if it overflowed. Steps to recover: the longest run of steps, lost or
    not, outside half to all of the largest safe scale; None if the trace ends in it.
    Binades unused: mean log2 of the largest safe scale over the scale, over the steps
    that were not lost; NaN if all were, inf if the scale was 0.
    """
    first = contender.first if trace.first is None else trace.first
    scales = list(contender.play(trace.peaks, first))
    used = scales[: len(trace.peaks)]
    raised = len(scales) == len(used)
    lost = [overflows(p, s) for p, s in zip(trace.peaks, used, strict=False)]
    safe = [largest_safe_scale(level) for level in trace.level]
    near = [high / 2 <= s <= high for s, high in zip(used, safe, strict=False)]
    off = [len(list(run)) for is_near, run in groupby(near) if not is_near]
    unused = [
        math.log2(high / s) if s else math.inf
        for s, high, overflowed in zip(used, safe, lost, strict=False)
        if not overflowed
    ]
    return {
        "steps lost": sum(lost),
        "steps to recover": None if raised or not near[-1] else max(off, default=0),
        "last scale": "raises" if raised else _scale_text(scales[-1], used, lost),
        "binades unused": sum(unused) / len(unused) if unused else math.nan,
    }


def _scale_text(last: float, used: list[float], lost: list[bool]) -> str:
    """Format a scale: its power of two, 0.0, or that it is stuck."""
    if last == 0:
        return "0.0"
    if all(lost[-_STUCK:]) and set(used[-_STUCK:]) == {last}:
        return f"stuck at {last:g}"
    return f"2**{math.log2(last):g}"


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Replay each trace under each rule."""
    steps: int = arguments.steps
    traces = [
        *synthetic_traces(steps),
        record_trace(steps, "mean"),
        record_trace(steps, "sum"),
    ]
    notes = (
        "steps lost: the largest gradient times the scale does not fit in fp16",
        "steps to recover: longest stretch with the scale not right; -: it ends so",
        "right: the largest power of two that is safe for the trace, or half of it",
        "binades unused: mean of log2(largest safe scale / scale), steps lost left out",
        "first scale: 2**14, which is safe, but in cold starts; recorded: each its own",
        f"torch {torch.__version__}; halfstep bench traces --steps {steps}",
    )
    trace_tables = []
    for trace in traces:
        rows: list[dict[str, Cell]] = []
        for name, contender in CONTENDERS.items():
            cells = replay(trace, contender)
            journal.record(f"{trace.name}: {name}", **cells)
            rows.append({"rule": name, **cells})
        more = notes if trace is traces[-1] else ()
        trace_tables.append(measure.table(trace.name, rows, more, digits=2))
        measure.progress(f"{trace.name}: done")
    return trace_tables
