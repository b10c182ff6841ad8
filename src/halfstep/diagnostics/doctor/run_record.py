"""Holds the facts of a run: settings, steps, statistics, profile, machine.

Each `from_data` raises `UserError` for a value of the wrong type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from halfstep.machine import hardware
from halfstep.numerics import formats
from halfstep.reporting import json_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from halfstep.diagnostics.profiling import Profile
    from halfstep.numerics.tensor_summary import Sample


@dataclass(frozen=True, slots=True)
class Step:
    """The record of one optimizer step."""

    step: int
    loss: float | None = None
    """NaN if non-finite. None, here and below: not recorded."""
    lr: float | None = None
    scale: float | None = None
    skipped: bool | None = None
    found_inf_in: tuple[str, ...] = ()
    grad_norm: float | None = None
    input_s: float | None = None
    total_s: float | None = None

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Step:
        """Return the step recorded in a line of metrics.jsonl."""
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
    """Settings of the run; None: unknown."""

    level: str | None = None
    """"O0" to "O3"."""
    dtype: str | None = None
    """"fp32", "bf16" or "fp16"."""
    master: str | None = None
    """Encoding of the master weights; "none" without master weights."""
    loss_scale: str | None = None
    """"none", "dynamic", or a number as text."""
    device: str | None = None
    """"cpu" or "cuda"."""
    accumulate: int | None = None
    clip: float | None = None
    """Norm to which gradients are clipped."""
    probe: str | None = None
    """"off", or the mode of the probe."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Config:
        """Return the config of settings by name; "auto" is unknown."""
        names = ("level", "dtype", "master", "loss_scale", "device", "probe")
        words = {name: json_fields.optional_text(data, name) for name in names}
        values = {name: value for name, value in words.items() if value != "auto"}
        least = json_fields.integer(data, "accumulate", 0) or None
        return cls(
            **values, accumulate=least, clip=_positive(json_fields.number(data, "clip"))
        )

    @property
    def fixed_scale(self) -> float | None:
        """The loss scale if it is constant, else None."""
        try:
            return _positive(float(self.loss_scale or ""))
        except ValueError:
            return None


@dataclass(frozen=True)
class ClassCount:
    """Counts of a class, or of an entity type, on the dev split."""

    label: str
    true: int
    predicted: int


@dataclass(frozen=True)
class Evaluation:
    """The results of one evaluation on the dev split."""

    step: int
    loss: float | None = None
    classes: tuple[ClassCount, ...] = ()

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation recorded in an event "eval"."""
        counts = json_fields.mapping(data.get("classes") or {}, "classes")
        classes = []
        for label in counts:
            count = json_fields.mapping(counts[label], label)
            pair = (json_fields.integer(count, key) for key in ("true", "predicted"))
            classes.append(ClassCount(label, *pair))
        return cls(
            json_fields.integer(data, "step"),
            json_fields.number(data, "dev_loss"),
            tuple(classes),
        )


@dataclass(frozen=True)
class SplitFacts:
    """Counts of repeated texts in a split."""

    texts: int
    repeated: int
    """Texts equal to an earlier text of the split, label included."""
    contradicting: int
    """Texts that are also in the split with another label or other entities."""
    in_train: int
    """Texts that are also in train; 0 for train itself."""

    @classmethod
    def from_data(cls, data: object) -> SplitFacts:
        """Return the counts that `train.data_checks.count_repeats` returned."""
        fields = json_fields.mapping(data, "a split")
        names = ("texts", "repeated", "contradicting", "in_train")
        return cls(*(json_fields.integer(fields, name) for name in names))


@dataclass(frozen=True)
class MachineFacts:
    """Capabilities of the run's machine."""

    chip: str = ""
    instruction_sets: tuple[str, ...] = ()
    """Those of the CPU, named as in `hardware.CPU_FLAGS`."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Format -> measured matmul rate on the device, in TFLOP/s."""
    fp16_accumulation: bool | None = None
    """Whether torch may accumulate fp16 matmuls in fp16."""

    @classmethod
    def from_data(cls, data: object) -> MachineFacts:
        """Return the facts that `machine_data` returned."""
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
    """Lost share of the updates, 0 to 1."""

    @classmethod
    def from_data(cls, step: int, data: object) -> LostUpdates:
        """Return the record of a group in an event "lost_updates"."""
        group = json_fields.mapping(data, "groups")
        share = json_fields.fraction(group, "share")
        return cls(step, json_fields.integer(group, "group"), share)


@dataclass(frozen=True)
class NonFinite:
    """The non-finite tensors of one step."""

    step: int
    where: tuple[str, ...]


@dataclass(frozen=True)
class RunFacts:
    """All known facts of a run."""

    name: str = ""
    config: Config = field(default_factory=Config)
    steps: tuple[Step, ...] = ()
    stats: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """Tensor name of the probe, ending in ":output" or ":grad" -> its samples in the
    order of the run."""
    non_finite: tuple[NonFinite, ...] = ()
    bad_ops: tuple[Mapping[str, Any], ...] = ()
    """Each as `BadOp.data()` returns it, with "step"."""
    lost: tuple[LostUpdates, ...] = ()
    profile: Profile | None = None
    machine: MachineFacts | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> its format, such as "bf16", before the level was applied."""
    evaluations: tuple[Evaluation, ...] = ()
    splits: Mapping[str, SplitFacts] = field(default_factory=dict)
    """Split ("train", "dev" or "test") -> its counts, if counted."""
    problems: tuple[str, ...] = ()
    """One line for each file or record that could not be read."""

    @property
    def scale(self) -> float:
        """The last loss scale; 1 if none is known."""
        return next((s.scale for s in reversed(self.steps) if s.scale), 1.0)

    @property
    def device(self) -> str | None:
        """The device of the run: "cpu" or "cuda"."""
        return self.config.device or (self.profile.device if self.profile else None)

    @property
    def dtype(self) -> str | None:
        """The run's 16-bit format, or "fp32" without one."""
        return self.config.dtype or (self.profile.dtype if self.profile else None)

    @cached_property
    def skipped(self) -> frozenset[int]:
        """Numbers of the steps that were skipped."""
        return frozenset(step.step for step in self.steps if step.skipped)

    @cached_property
    def stuck_scale(self) -> float | None:
        """The loss scale if it is constant, so that skipped steps do not lower it.

        Taken from the settings, or else from the records: three consecutive skips at
        one scale, each of which would have lowered a dynamic one.
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
        """Tensor -> samples of its fp16 gradients.

        fp32 gradients, such as those of a norm's weight, do not underflow.
        """
        per_tensor = {
            name: tuple(
                s for s in samples if s.summary.dtype == "fp16" and s.summary.amax
            )
            for name, samples in self.samples(":grad")
        }
        return {name: samples for name, samples in per_tensor.items() if samples}

    def samples(self, ending: str) -> Iterator[tuple[str, tuple[Sample, ...]]]:
        """Yield the tensors with this name ending, without samples of skipped steps.

        Gradients of a step that overflowed contain the overflow.
        """
        lost = self.skipped
        for name, samples in self.stats.items():
            if name.endswith(ending):
                applied = tuple(each for each in samples if each.step not in lost)
                if applied:
                    yield name, applied


def machine_data(device: str) -> dict[str, Any]:
    """Return capabilities; GEMM rates of "cpu" or "cuda" are measured if not cached."""
    capabilities = hardware.capabilities()
    on_gpu = device == "cuda" and bool(capabilities.gpus)
    matmul = torch.backends.cuda.matmul
    return {
        "chip": capabilities.gpus[0].name if on_gpu else capabilities.cpu,
        "instruction_sets": list(capabilities.instruction_sets),
        "cores": capabilities.cores,
        "threads": capabilities.threads,
        "torch": capabilities.torch,
        "rates": hardware.gemm_rates(device),
        "fp16_accumulation": bool(getattr(matmul, "allow_fp16_accumulation", False)),
    }


def weight_formats(model: nn.Module) -> dict[str, str]:
    """Return the format of each trained parameter: name -> such as "bf16".

    Frozen parameters are left out: they lose no updates.
    """
    return {
        name: formats.word(param.dtype)
        for name, param in model.named_parameters()
        if param.is_floating_point() and param.requires_grad
    }
