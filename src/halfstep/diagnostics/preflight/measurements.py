"""Defines what a check measures; compares gradients and outputs with those in fp32.

The first module with a wrong output for correct inputs may, for example, compute
positions, angles or counts in 16 bits.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from halfstep.diagnostics.preflight.model_copy import ModuleCall
    from halfstep.nonfinite.origin import BadOp


@dataclass(frozen=True)
class GradientSimilarity:
    """The similarity of gradients q to their reference x, both unscaled."""

    where: str
    """The module that owns the parameters."""
    numbers: int
    cosine: float
    """<x, q> / (|x| |q|), -1 to 1; 1 if both are zero, 0 if one is; NaN if q has inf or
    NaN."""
    sqnr: float
    """10 log10(sum x**2 / sum (x - q)**2), in dB; inf if they are equal."""
    flushed: float
    """Share of the non-zero values of x that are zero in q, 0 to 1."""
    norm: float
    """|x|."""


@dataclass(frozen=True)
class OutputError:
    """A module whose output at the level differs from that in fp32."""

    path: str
    kind: str
    error: float
    """Norm of the output's difference over the norm of fp32's output."""
    inputs: float
    rule: str = ""
    """Rule that fixes it; "" if none does."""


@dataclass(frozen=True)
class ScalePoint:
    """The predicted effect of one loss scale on the gradients measured in fp32."""

    scale: float
    flushed: float
    """Share of the non-zero values that become zero, 0 to 1."""
    subnormal: float
    """Share of values that lose bits as subnormals, 0 to 1."""
    headroom: float
    """Binades from the largest gradient to overflow, rounded down; negative if it
    overflows."""


@dataclass(frozen=True)
class Cost:
    """Time and memory of training at one level."""

    seconds: float
    """Median time of a training step."""
    memory: dict[str, int]
    """Bytes of weights, gradients, master weights, moments, and of the tensors saved
    for the backward pass."""

    @property
    def bytes(self) -> int:
        """Sum of `memory`."""
        return sum(self.memory.values())


@dataclass
class Facts:
    """All measurements; None or empty where a failed pass has none."""

    level: str
    dtype: str
    reason: str
    """Why this level and dtype."""
    device: str
    policy: str
    """Includes the rules that fix overflow, if any do."""
    loss_fp32: float
    """Loss of the first batch, or of the first with a non-finite pass."""
    finite_fp32: bool
    """Whether loss and gradients are finite in fp32."""
    bad_batch: str = ""
    """The argument that is the first batch for which they are not."""
    learns: bool = True
    """Whether any parameter has a non-zero gradient in fp32."""
    optimizer: str = ""
    """Type and learning rate, and whether it is the default for a missing one."""
    loss: float | None = None
    failed: str = ""
    """The error that a pass at the level raised."""
    fault: BadOp | None = None
    """What made the first inf or NaN at the default loss scale, before any rule."""
    rules: tuple[str, ...] = ()
    """Rules added because of it, with which a pass was finite."""
    output_error: OutputError | None = None
    """The first module with a wrong output for correct inputs, under these rules."""
    default_scale: float = 1.0
    default_finite: bool = True
    """Whether gradients are finite at the default scale."""
    safe_scale: float | None = None
    """The largest power of two at which a pass was finite with a margin; None if the
    format needs no scale or none was found."""
    scale: float = 1.0
    """Loss scale at which gradients were compared."""
    curve: tuple[ScalePoint, ...] = ()
    """The first is the default scale."""
    gradients: GradientSimilarity | None = None
    """Similarity to fp32's, with the same weights, batch, buffers and random state."""
    layers: tuple[GradientSimilarity, ...] = ()
    noise: GradientSimilarity | None = None
    """Similarity of fp32 gradients of two halves of the batch, or of two batches."""
    noise_layers: tuple[GradientSimilarity, ...] = ()
    noise_of: str = "two halves of the batch"
    cost_fp32: Cost | None = None
    cost: Cost | None = None
    ratios: tuple[float, ...] = ()
    """Speed-up of each round: seconds of an fp32 step over those of the level's."""
    weights_finite: bool = True
    """Whether weights are finite after the timed steps."""
    lost: float | None = None
    """Share of the updates of one step lost to rounding, 0 to 1; None with master
    weights or fp32 weights, or without timed steps."""
    weight_nan_warning: str = ""
    """Why weights will become NaN, or ""."""
    dropout_off: bool = False
    cautions: tuple[str, ...] = ()
    """Other warnings of `prepare`."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    seconds: float = 0.0
    """Duration of the check."""

    @property
    def format(self) -> formats.FloatFormat:
        """The 16-bit format; fp32 at O0."""
        return formats.parse(self.dtype)

    @property
    def words(self) -> str:
        """Return level and dtype."""
        return f"{self.level} {self.dtype}"

    @property
    def finite(self) -> bool:
        """Whether the level's loss and gradients were finite at some scale."""
        return not self.failed and self.loss is not None and self.gradients is not None

    @property
    def loss_error(self) -> float | None:
        """Return (loss - fp32's) / |fp32's|."""
        if self.loss is None:
            return None
        if self.loss == self.loss_fp32:
            return 0.0
        if not self.loss_fp32:
            return math.inf
        return (self.loss - self.loss_fp32) / abs(self.loss_fp32)

    @property
    def speed_up(self) -> float | None:
        """Return the median speed-up over fp32 of all rounds."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def memory_saved(self) -> float | None:
        """Return the saved share of fp32's memory; negative if the level needs more."""
        if self.cost_fp32 is None or self.cost is None or not self.cost_fp32.bytes:
            return None
        return 1 - self.cost.bytes / self.cost_fp32.bytes


def compare_gradients(
    reference: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    owner: Callable[[str], str],
) -> tuple[GradientSimilarity, tuple[GradientSimilarity, ...]]:
    """Compare gradients, all together and by the module that owns them.

    Sums are computed in fp64 on the device.

    Args:
        reference: Parameter name -> gradient x.
        other: Parameter name -> gradient q; a missing one on either side is zeros.
        owner: Returns the group of a name.

    Returns:
        Similarity of all ("all"), and of each group in the order of its first name.
    """
    sums: dict[str, list[Tensor]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for name in dict.fromkeys([*reference, *other]):
        like = reference[name] if name in reference else other[name]
        pair = (each.get(name, torch.zeros_like(like)) for each in (reference, other))
        x, q = (each.double() for each in pair)
        sums[owner(name)].append(_sums(x, q).cpu())
        sizes[owner(name)] += like.numel()
    groups = {name: torch.stack(rows).sum(0) for name, rows in sums.items()}
    layers = tuple(_similarity(name, sizes[name], row) for name, row in groups.items())
    rows = [*groups.values()] or [torch.zeros(6, dtype=torch.float64)]
    return _similarity("all", sum(sizes.values()), torch.stack(rows).sum(0)), layers


def worst_first(rows: Iterable[GradientSimilarity]) -> list[GradientSimilarity]:
    """Return the rows in the order of their cosines, NaN first."""
    return sorted(rows, key=lambda row: (not math.isnan(row.cosine), row.cosine))


def _sums(x: Tensor, q: Tensor) -> Tensor:
    """Return <x, q>, |x|**2, |q|**2, |x - q|**2, numbers of flushed and non-zero x."""
    seen = x != 0
    return torch.stack(
        [
            (x * q).sum(),
            (x * x).sum(),
            (q * q).sum(),
            (x - q).square().sum(),
            (seen & (q == 0)).sum().double(),
            seen.sum().double(),
        ]
    )


def _similarity(where: str, numbers: int, sums: Tensor) -> GradientSimilarity:
    product, xx, qq, error, lost, seen = sums.tolist()
    cosine = sqnr = math.nan
    if math.isfinite(xx) and math.isfinite(qq):
        cosine = float(xx == qq)
        if xx and qq:
            cosine = product / math.sqrt(xx) / math.sqrt(qq)
        sqnr = -math.inf if error else math.inf
        if xx and error:
            sqnr = 10 * math.log10(xx / error)
    flushed = lost / seen if seen else 0.0
    return GradientSimilarity(where, numbers, cosine, sqnr, flushed, math.sqrt(xx))


FAR = 0.2
"""Relative error above which an output is wrong. Our choice: 50 roundings to bf16 in
one direction."""
CLOSE = 0.05
"""Relative error up to which inputs are correct."""


def output_errors(
    right: Sequence[ModuleCall], low: Sequence[ModuleCall]
) -> Iterator[OutputError]:
    """Yield the errors of each call, in the order in which modules return.

    None if the two passes ran different modules.
    """
    if [call.path for call in right] == [call.path for call in low]:
        for one, other in zip(right, low, strict=True):
            error = _error(one.outputs, other.outputs)
            inputs = _error(one.inputs, other.inputs)
            yield OutputError(one.path, one.kind, error, inputs)


def _error(right: list[Tensor], low: list[Tensor]) -> float:
    """Return the largest relative error; 0 if no tensors can be compared."""
    errors = [0.0]
    for one, other in zip(right, low, strict=False):
        if one.shape == other.shape and bool(one.isfinite().all()):
            difference, size = float((other - one).norm()), float(one.norm())
            errors.append(difference / size if size else 0.0)
    return max(errors)
