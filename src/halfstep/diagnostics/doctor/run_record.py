"""Holds the facts of a run: settings, steps, statistics, profile, machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from halfstep.machine import hardware
from halfstep.numerics import formats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from halfstep.diagnostics.profiling import Profile
    from halfstep.nonfinite.origin import BadOp
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
    input_s: float | None = None
    total_s: float | None = None

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Step:
        """Return the step recorded in a line of metrics.jsonl."""
        seconds = {k: float(v) for k, v in (data.get("seconds") or {}).items()}
        skipped = data.get("skipped")
        return cls(
            int(data["step"]),
            _number(data, "loss"),
            _number(data, "lr"),
            _positive(_number(data, "scale")),
            None if skipped is None else bool(skipped),
            tuple(map(str, data.get("found_inf_in") or ())),
            seconds.get("input"),
            _positive(sum(seconds.values())),
        )


def _number(data: Mapping[str, Any], key: str) -> float | None:
    """Return the number at a key: NaN for null, None if the key is missing."""
    if key not in data:
        return None
    return math.nan if data[key] is None else float(data[key])


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


@dataclass(frozen=True)
class Config:
    """Settings of the run; None: unknown."""

    level: str | None = None
    """"O0" to "O3"."""
    dtype: str | None = None
    """"fp32", "bf16" or "fp16"."""
    master_weights: str | None = None
    """Encoding of the master weights; "none" without master weights."""
    loss_scale: str | None = None
    """"none", "dynamic", or a number as text."""
    device: str | None = None
    """"cpu" or "cuda"."""
    accumulate: int | None = None
    probe: str | None = None
    """"off", or the mode of the probe."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Config:
        """Return the config of settings by name; "auto" is unknown."""
        names = ("level", "dtype", "master_weights", "loss_scale", "device", "probe")
        words = {name: str(data[name]) for name in names if data.get(name) is not None}
        settings = {name: word for name, word in words.items() if word != "auto"}
        return cls(**settings, accumulate=int(data.get("accumulate") or 0) or None)

    @property
    def fixed_scale(self) -> float | None:
        """The loss scale if it is constant, else None."""
        try:
            return _positive(float(self.loss_scale or ""))
        except ValueError:
            return None


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
    def from_data(cls, data: Mapping[str, Any]) -> MachineFacts:
        """Return the facts that `machine_data` returned."""
        return cls(
            str(data["chip"]),
            tuple(map(str, data["instruction_sets"])),
            {name: float(rate) for name, rate in data["rates"].items()},
            bool(data["fp16_accumulation"]),
        )


@dataclass(frozen=True)
class LostUpdates:
    """Updates of one parameter group lost to rounding in one step."""

    step: int
    group: int
    share: float
    """Lost share of the updates, 0 to 1."""
    optimizer: str = ""
    """Type and learning rate where known."""


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
    bad_ops: tuple[BadOp, ...] = ()
    lost: tuple[LostUpdates, ...] = ()
    profile: Profile | None = None
    machine: MachineFacts | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> its format, such as "bf16", before the level was applied."""

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
