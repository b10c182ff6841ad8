"""What is known of a run: settings, steps, statistics, profile, machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from halfstep.reporting import json_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from halfstep.diagnostics.profiling import Profile
    from halfstep.numerics.tensor_summary import Sample


@dataclass(frozen=True, slots=True)
class Step:
    """The record of one optimizer step."""

    step: int
    loss: float | None = None
    """NaN where it was not finite; None where it was not recorded, as below."""
    lr: float | None = None
    scale: float | None = None
    skipped: bool | None = None
    found_inf_in: tuple[str, ...] = ()
    grad_norm: float | None = None
    input_s: float | None = None
    """Seconds of waiting for a batch."""
    total_s: float | None = None
    """Seconds of the whole step."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Step:
        """Return the step that a line of metrics.jsonl tells of.

        Raises:
            UserError: If a value has the wrong type.
        """
        parts = json_fields.mapping(data.get("seconds") or {}, "seconds")
        spent = [json_fields.real(value, name) for name, value in parts.items()]
        scale = json_fields.number(data, "scale")
        return cls(
            json_fields.integer(data, "step"),
            json_fields.number(data, "loss"),
            json_fields.number(data, "lr"),
            scale if scale is not None and json_fields.is_scale(scale) else None,
            json_fields.optional_bool(data, "skipped"),
            json_fields.texts(data, "found_inf_in"),
            json_fields.number(data, "grad_norm"),
            json_fields.non_negative(parts, "input") if "input" in parts else None,
            _positive(sum(spent)),
        )


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


@dataclass(frozen=True)
class Config:
    """How the run was set up; None is: not known."""

    level: str | None = None
    """"O0" to "O3"."""
    dtype: str | None = None
    """"fp32", "bf16" or "fp16"."""
    master: str | None = None
    """Form of the master weights; "none" where there are none."""
    loss_scale: str | None = None
    """"none", "dynamic", another strategy, or a number in words."""
    device: str | None = None
    """"cpu" or "cuda"."""
    accumulate: int | None = None
    """Micro-batches in one optimizer step."""
    clip: float | None = None
    """Largest norm that gradients keep."""
    probe: str | None = None
    """"off", or the mode of the probe."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Config:
        """Return what settings by name tell; "auto" tells nothing.

        Raises:
            UserError: If a value has the wrong type.
        """
        names = ("level", "dtype", "master", "loss_scale", "device", "probe")
        words = {name: json_fields.optional_text(data, name) for name in names}
        values = {name: value for name, value in words.items() if value != "auto"}
        least = json_fields.integer(data, "accumulate", 0) or None
        return cls(
            **values, accumulate=least, clip=_positive(json_fields.number(data, "clip"))
        )

    @property
    def fixed_scale(self) -> float | None:
        """The loss scale, where it is a number that never moves."""
        try:
            return _positive(float(self.loss_scale or ""))
        except ValueError:
            return None


@dataclass(frozen=True)
class ClassCount:
    """How often a class, or an entity type, is in the dev split."""

    label: str
    true: int
    predicted: int
    """How often the model predicts it."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on the dev split."""

    step: int
    loss: float | None = None
    classes: tuple[ClassCount, ...] = ()

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Evaluation:
        """Return what an event "eval" tells.

        Raises:
            UserError: If a value has the wrong type.
        """
        counts = json_fields.mapping(data.get("classes") or {}, "classes")
        classes = []
        for label in counts:
            count = json_fields.mapping(counts[label], label)
            true, predicted = (
                json_fields.integer(count, key) for key in ("true", "predicted")
            )
            classes.append(ClassCount(label, true, predicted))
        return cls(
            json_fields.integer(data, "step"),
            json_fields.number(data, "dev_loss"),
            tuple(classes),
        )


@dataclass(frozen=True)
class SplitFacts:
    """Texts of a split that come more than once."""

    texts: int
    repeated: int
    """Texts that an earlier text of the split equals."""
    contradicting: int
    """Texts that the split also holds with another label, or other entities."""
    in_train: int
    """Texts that train holds too; 0 of train itself."""

    @classmethod
    def from_data(cls, data: object) -> SplitFacts:
        """Return what `train.findings.repeats` wrote down of a split.

        Raises:
            UserError: If it is nothing of the kind.
        """
        fields = json_fields.mapping(data, "a split")
        names = ("texts", "repeated", "contradicting", "in_train")
        return cls(*(json_fields.integer(fields, name) for name in names))


@dataclass(frozen=True)
class MachineFacts:
    """What the run's machine can do."""

    chip: str = ""
    """Name of the processor or GPU that trains."""
    instruction_sets: tuple[str, ...] = ()
    """Of the CPU, in the words of `hardware.CPU_FLAGS`."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Format -> measured rate of matrix products on the device, TFLOP/s."""
    fp16_accumulation: bool | None = None
    """torch may sum products of fp16 numbers in fp16."""

    @classmethod
    def from_data(cls, data: object) -> MachineFacts:
        """Return what `environment.machine_data` wrote down.

        Raises:
            UserError: If it is nothing of the kind.
        """
        fields = json_fields.mapping(data, "machine")
        rates = json_fields.mapping(fields.get("rates") or {}, "rates")
        return cls(
            json_fields.optional_text(fields, "chip") or "",
            json_fields.texts(fields, "instruction_sets"),
            {name: json_fields.non_negative(rates, name) for name in rates},
            json_fields.optional_bool(fields, "fp16_accumulation"),
        )


@dataclass(frozen=True)
class LostUpdates:
    """Updates of one parameter group lost to rounding in one step."""

    step: int
    group: int
    share: float
    """Part of the updates that is gone for good, 0 to 1."""

    @classmethod
    def from_data(cls, step: int, data: object) -> LostUpdates:
        """Return what a group in an event "lost_updates" tells."""
        group = json_fields.mapping(data, "groups")
        share = json_fields.fraction(group, "share")
        return cls(step, json_fields.integer(group, "group"), share)


@dataclass(frozen=True)
class NonFinite:
    """Tensors that held inf or NaN at one step."""

    step: int
    where: tuple[str, ...]
    """Names as the probe gives them, the first one made first."""


@dataclass(frozen=True)
class RunFacts:
    """All that is known of a run."""

    name: str = ""
    """What to call it, such as its folder."""
    config: Config = field(default_factory=Config)
    steps: tuple[Step, ...] = ()
    """In the order of the run."""
    stats: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Name of a tensor -> its samples in the order of the run. Names end in ":output"
    or ":grad", as the probe gives them."""
    non_finite: tuple[NonFinite, ...] = ()
    bad_ops: tuple[Mapping[str, Any], ...] = ()
    """As `BadOp.data()` gives them, each with "step"."""
    lost: tuple[LostUpdates, ...] = ()
    profile: Profile | None = None
    machine: MachineFacts | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> word of the format that it was in before the level was applied."""
    evaluations: tuple[Evaluation, ...] = ()
    """In the order of the run."""
    splits: Mapping[str, SplitFacts] = field(default_factory=dict)
    """"train", "dev" and "test", those that were counted."""
    problems: tuple[str, ...] = ()
    """What could not be read, a line each."""

    @property
    def scale(self) -> float:
        """The last loss scale; 1 where none is known."""
        return next((s.scale for s in reversed(self.steps) if s.scale), 1.0)

    @property
    def device(self) -> str | None:
        """Where it ran: "cpu" or "cuda"."""
        return self.config.device or (self.profile.device if self.profile else None)

    @property
    def dtype(self) -> str | None:
        """Word of the run's 16-bit format; "fp32" where it has none."""
        return self.config.dtype or (self.profile.dtype if self.profile else None)

    @cached_property
    def skipped(self) -> frozenset[int]:
        """Numbers of the steps that were skipped."""
        return frozenset(step.step for step in self.steps if step.skipped)

    @cached_property
    def stuck_scale(self) -> float | None:
        """The loss scale, where it does not fall although steps are skipped.

        By the settings, or by the records: three skips in a row at one scale, where
        each would have lowered one that moves.
        """
        fixed = self.config.fixed_scale
        if fixed is not None or self.config.loss_scale not in {None, "none"}:
            return fixed
        for at, first in enumerate(self.steps[:-2]):
            three = self.steps[at : at + 3]
            if all(step.skipped and step.scale == first.scale for step in three):
                return first.scale
        return None

    @cached_property
    def gradients(self) -> Mapping[str, tuple[Sample, ...]]:
        """Tensor -> samples of its gradients while they were in fp16.

        Why not of others: a gradient in fp32, such as that of a norm's weight, loses
        nothing however small it is.
        """
        per_tensor = {
            name: tuple(
                s for s in samples if s.summary.dtype == "fp16" and s.summary.amax
            )
            for name, samples in self.samples(":grad")
        }
        return {name: samples for name, samples in per_tensor.items() if samples}

    def samples(self, ending: str) -> Iterator[tuple[str, tuple[Sample, ...]]]:
        """Yield tensors whose names end so, without steps that were skipped.

        Why: gradients of a step that overflowed are as the overflow left them.
        """
        lost = self.skipped
        for name, samples in self.stats.items():
            if name.endswith(ending):
                applied = tuple(each for each in samples if each.step not in lost)
                if applied:
                    yield name, applied
