"""Steps lost to overflow under each library's loss scale rule.

    python benchmarks/loss_scale_rules.py [--steps N]

A trace is the largest gradient of each step, recorded from a training run or synthetic.
Each rule is applied to the same traces: a step is lost if its largest gradient times
the scale overflows fp16. Nothing is timed. The rules of other libraries are
reimplemented here; halfstep's is a LossScaler.
"""

from __future__ import annotations

import argparse
import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- torch's own name for it

from halfstep.bench import measure
from halfstep.scaling import LossScaleCollapse, LossScaler, ScaleRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from halfstep.reporting.table import Cell

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


Replay: TypeAlias = "Callable[[Sequence[float], float], Iterator[float]]"
"""(peaks, initial scale) -> the scale of each step and the one after the last; ends
early if the library raises."""


@dataclass(frozen=True)
class LibraryRule:
    """Halves the scale after an overflow, and doubles it after clean steps in a row."""

    first: float
    """Initial scale."""
    interval: int
    """Clean steps until the scale doubles."""
    floor: float = 1.0
    """Smallest scale."""
    hysteresis: int = 1
    """Overflows until the scale is halved; only doubling restores it."""
    restores: bool = False
    """Whether each clean step restores the hysteresis."""
    raises: bool = False
    """Whether an overflow at the smallest scale raises."""

    def replay(self, peaks: Sequence[float], first: float) -> Iterator[float]:
        """Yield the scale of each step, and the one after the last."""
        scale, clean, left = first, 0, self.hysteresis
        for peak in peaks:
            yield scale
            if overflows(peak, scale):
                clean = 0
                if left > 1:
                    left -= 1
                elif self.raises and scale <= self.floor:
                    return
                else:
                    scale = max(scale / 2, self.floor)
                continue
            clean += 1
            left = self.hysteresis if self.restores else left
            if clean == self.interval:
                scale *= 2
                clean, left = 0, self.hysteresis
        yield scale


def replay_torch(peaks: Sequence[float], first: float) -> Iterator[float]:
    """Run the kernel of torch's GradScaler, with its defaults."""
    scaler = torch.amp.GradScaler("cpu")
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    scale, tracker = torch.tensor(first), torch.tensor(0, dtype=torch.int32)
    for peak in peaks:
        yield scale.item()
        found_inf = torch.tensor(float(overflows(peak, scale.item())))
        interval = scaler.get_growth_interval()
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
    yield scale.item()


def replay_halfstep(
    rule: ScaleRule, peaks: Sequence[float], first: float
) -> Iterator[float]:
    """Run a LossScaler.

    Its graph has a single 16-bit gradient, that of the trace.
    """
    scaler = LossScaler(rule)
    scaler.state = replace(scaler.state, scale=torch.tensor(first))
    weight = torch.ones((), requires_grad=True)
    warnings.simplefilter("ignore")  # of traces with NaN
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


_DEEPSPEED = LibraryRule(2.0**16, 1000, hysteresis=2, raises=True)
LIBRARIES = {
    "Megatron": LibraryRule(2.0**32, 1000, hysteresis=2),
    "DeepSpeed": _DEEPSPEED,
    "DeepSpeed, consecutive": replace(_DEEPSPEED, restores=True),
}
"""Name -> rule, with the library's defaults."""
RULES = {
    "halfstep": ScaleRule(),
    "halfstep, hysteresis 2": ScaleRule(hysteresis=2),
    "halfstep, hysteresis 2, clean": ScaleRule(hysteresis=2, refill="clean"),
}
CANDIDATES: dict[str, tuple[float, Replay]] = {
    "torch.amp": (2.0**16, replay_torch),
    **{name: (rule.first, rule.replay) for name, rule in LIBRARIES.items()},
    **{n: (r.init_scale, partial(replay_halfstep, r)) for n, r in RULES.items()},
}
"""Name -> (initial scale, how it is applied)."""


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
    maxima: list[Tensor] = []

    def observe(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(lambda grad: maxima.append(grad.abs().amax()))  # type: ignore[no-untyped-call]

    for module in model:
        module.register_forward_hook(observe)
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
        maxima += [gradient.abs().amax() for gradient in gradients]
        largest = torch.stack([each.float() for each in maxima]).amax()
        peaks.append(largest.item() / scale)
        maxima.clear()
        torch._foreach_div_(gradients, scale)
        optimizer.step()
        optimizer.zero_grad()
    level = [
        max(peaks[max(step - _WINDOW, 0) : step + _WINDOW]) for step in range(steps)
    ]
    return Trace(f"recorded, loss: {reduction} of {batch}", peaks, level, first=None)


def replay(trace: Trace, first: float, play: Replay) -> dict[str, Cell]:
    """Apply a rule to a trace; return the cells of its row.

    A step is lost if it overflowed. Steps to recover: the longest run of steps, lost or
    not, outside half to all of the largest safe scale; None if the trace ends in it.
    Binades unused: mean log2 of the largest safe scale over the scale, over the steps
    that were not lost; NaN if all were, inf if the scale was 0.
    """
    scales = list(play(trace.peaks, first if trace.first is None else trace.first))
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


def main() -> None:
    """Replay each trace under each rule; print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000, help="of each trace")
    steps: int = parser.parse_args().steps
    recorded = [record_trace(steps, reduction) for reduction in ("mean", "sum")]
    for trace in [*synthetic_traces(steps), *recorded]:
        rows = [
            {"rule": name, **replay(trace, first, play)}
            for name, (first, play) in CANDIDATES.items()
        ]
        print(measure.table(trace.name, rows, (), digits=2).text())  # noqa: T201
    print(_NOTES)  # noqa: T201


_NOTES = """
steps lost: the largest gradient times the scale does not fit in fp16
steps to recover: longest stretch with the scale not right; -: it ends so
right: the largest power of two that is safe for the trace, or half of it
binades unused: mean of log2(largest safe scale / scale), steps lost left out
first scale: 2**14, which is safe, but in cold starts; recorded: each its own"""

if __name__ == "__main__":
    main()
