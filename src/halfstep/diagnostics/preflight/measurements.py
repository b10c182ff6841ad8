"""What a check before training has measured, as plain values."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.numerics import formats

if TYPE_CHECKING:
    from halfstep.diagnostics.preflight.gradient_similarity import GradientSimilarity
    from halfstep.diagnostics.preflight.output_comparison import OutputError
    from halfstep.nonfinite.origin import BadOp


@dataclass(frozen=True)
class Range:
    """How large the numbers of one module get, in fp32."""

    path: str
    kind: str
    """Class name."""
    output: float
    """Largest absolute value of its outputs."""
    gradient: float
    """Largest absolute value of their gradients, unscaled; NaN where none came."""


@dataclass(frozen=True)
class ScalePoint:
    """What one loss scale would do to the gradients that were seen in fp32."""

    scale: float
    flushed: float
    """Share of the numbers other than zero that become zero, 0 to 1."""
    subnormal: float
    """Share that loses bits, 0 to 1."""
    headroom: float
    """Binades from the largest gradient to the format's limit, less than one too few;
    negative where it overflows."""


@dataclass(frozen=True)
class Cost:
    """What training at one level takes."""

    seconds: float
    """Median of a whole training step."""
    memory: dict[str, int]
    """Bytes of weights, gradients, masters, moments, and of what the forward pass
    saves for the backward pass."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Facts:
    """All that was measured. What a broken pass did not show is None or empty."""

    level: str
    dtype: str
    reason: str
    """Why this level and dtype."""
    device: str
    policy: str
    """With the rules that cure overflow, where some do."""
    loss_fp32: float
    """Of the first batch, or the first whose pass is not finite."""
    finite_fp32: bool
    """Loss and gradients are, in fp32."""
    bad_batch: str = ""
    """The argument that is the first batch of which they are not."""
    learns: bool = True
    """Some parameter has a gradient other than zero, in fp32."""
    optimizer: str = ""
    """Its kind and learning rate, and whether it stands for one that was not given."""
    loss: float | None = None
    failed: str = ""
    """What the level's pass raised."""
    fault: BadOp | None = None
    """What made the first inf or NaN at the default loss scale, before any rule."""
    rules: tuple[str, ...] = ()
    """Rules added because of it, with which a pass was finite."""
    output_error: OutputError | None = None
    """The first module whose output is another than in fp32, though its inputs agree,
    with the rules above."""
    hidden_overflow: BadOp | None = None
    """What overflows in it, or in a pass whose loss is another, and leaves no inf."""
    default_scale: float = 1.0
    default_finite: bool = True
    """Gradients are finite at it."""
    safe_scale: float | None = None
    """The largest power of two at which a pass was finite with a margin; None where
    the format needs no scale, or none was found."""
    scale: float = 1.0
    """At which gradients were compared."""
    curve: tuple[ScalePoint, ...] = ()
    """The first is of the default scale."""
    gradients: GradientSimilarity | None = None
    """Against fp32's, same weights, batch, buffers and random state."""
    layers: tuple[GradientSimilarity, ...] = ()
    noise: GradientSimilarity | None = None
    """The same of fp32 gradients of two halves of the batch."""
    noise_layers: tuple[GradientSimilarity, ...] = ()
    noise_of: str = "two halves of the batch"
    ranges: tuple[Range, ...] = ()
    cost_fp32: Cost | None = None
    cost: Cost | None = None
    ratios: tuple[float, ...] = ()
    """fp32's seconds over the level's, of each round of a step of both."""
    weights_finite: bool = True
    """They were after the steps that were made."""
    lost: float | None = None
    """Share of the updates of one step lost to rounding, 0 to 1; None where
    no 16-bit weight is updated by itself, or no step was made."""
    weight_nan_warning: str = ""
    """The caution that says that weights will be NaN."""
    dropout_off: bool = False
    cautions: tuple[str, ...] = ()
    """What else `prepare` warned of."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    seconds: float = 0.0
    """The check itself took."""

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
        """The level's loss and gradients were finite at some scale."""
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
        """Return fp32's seconds over the level's; of several rounds, the median."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def memory_saved(self) -> float | None:
        """Return the share of fp32's bytes that the level does without."""
        if self.cost_fp32 is None or self.cost is None or not self.cost_fp32.bytes:
            return None
        return 1 - self.cost.bytes / self.cost_fp32.bytes

    @property
    def distance(self) -> float:
        """Return 1 - cosine of the gradients; inf where it is not a number."""
        return math.inf if self.gradients is None else cosine_distance(self.gradients)


def cosine_distance(similarity: GradientSimilarity) -> float:
    """Return 1 - cosine, 0 or more; inf where it is not a number."""
    far = 1 - similarity.cosine
    return math.inf if math.isnan(far) else max(far, 0.0)
