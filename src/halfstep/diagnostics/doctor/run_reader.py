"""Reads the facts of a run from its folder; raises `UserError` for a damaged file."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from halfstep.diagnostics.doctor.run_record import (
    Config,
    LostUpdates,
    MachineFacts,
    NonFinite,
    RunFacts,
    Step,
)
from halfstep.diagnostics.profiling import Profile
from halfstep.errors import UserError
from halfstep.nonfinite.origin import BadOp
from halfstep.numerics.tensor_summary import Sample, TensorSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

METRICS, PROFILE = "metrics.jsonl", "profile.json"
ENVIRONMENT, SUMMARY = "environment.json", "summary.json"
SETTINGS = ("resolved.toml", "config.json")
"""Files of settings; the first that exists is used."""
_READ = (METRICS, *SETTINGS, SUMMARY, PROFILE, ENVIRONMENT)
_MOST_SAMPLES = 256  # events "stats" kept in memory


def read(folder: Path) -> RunFacts:
    """Return the facts in a run's folder, each file of which may be missing.

    Raises:
        UserError: If the folder holds no run, or a file is damaged or unreadable.
    """
    with _named(folder):
        present = [name for name in _READ if (folder / name).exists()]
    if not present:
        raise UserError(
            f"{folder} holds no run: neither {METRICS} nor any other file of one; give "
            "the folder of a run (--out of train)."
        )
    settings = next((name for name in SETTINGS if name in present), SETTINGS[-1])
    config = _parse(folder / settings, Config.from_data) or Config()
    metrics = _Metrics()
    if METRICS in present:
        metrics.read(folder / METRICS)
    machine, weights = _parse(folder / ENVIRONMENT, _environment) or (None, {})
    return RunFacts(
        name=str(folder),
        config=replace(config, **_parse(folder / SUMMARY, _chosen) or {}),
        steps=tuple(metrics.steps),
        stats=metrics.stats(),
        non_finite=metrics.events(NonFinite),
        bad_ops=metrics.events(BadOp),
        lost=metrics.events(LostUpdates),
        profile=_parse(folder / PROFILE, Profile.from_data),
        machine=machine,
        weights=weights,
    )


@contextlib.contextmanager
def _named(path: Path, line: int | None = None) -> Iterator[None]:
    """Turn an error of reading or parsing into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}."
        raise UserError(message) from error
    except UserError:  # names the file, and its line
        raise
    except (
        ArithmeticError,  # int(1e999), float(10**400)
        AttributeError,
        LookupError,
        RecursionError,  # brackets nested too deep
        TypeError,
        ValueError,
    ) as error:
        place = path if line is None else f"{path} line {line}"
        message = f"{place} is damaged: {type(error).__name__}: {error}."
        raise UserError(message) from error


def _parse(path: Path, make: Callable[[dict[str, Any]], T]) -> T | None:
    """Return what `make` makes of a JSON or TOML file; None if there is none."""
    parse = tomllib.loads if path.suffix == ".toml" else json.loads
    with _named(path):
        return make(parse(path.read_text("utf-8"))) if path.exists() else None


def _environment(
    data: dict[str, Any],
) -> tuple[MachineFacts | None, dict[str, str]]:
    machine = data.get("machine")
    weights = {name: str(word) for name, word in data.get("weights", {}).items()}
    return None if machine is None else MachineFacts.from_data(machine), weights


def _chosen(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a run has chosen where they were "auto"."""
    names = ("level", "dtype", "master_weights")
    return {name: str(summary[name]) for name in names if name in summary}


class _Event(NamedTuple):
    """An event, and the number of step records before it."""

    step: int
    num_records: int
    value: Any


class _Metrics:
    """Collects the records of metrics.jsonl in order.

    If a step number is not above the last one, the run was resumed from an earlier step
    or another run began in the folder: earlier records from that step on are removed.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._num_records = 0
        self._events: list[_Event] = []
        self._stats: list[_Event] = []
        """Samples by tensor, of every `_stride`-th event."""
        self._num_stats = 0
        self._stride = 1

    def read(self, path: Path) -> None:
        """Add the records of a file; a torn last line is still being written."""
        with _named(path), path.open("rb") as file:
            for number, line in enumerate(file, 1):
                with _named(path, number):
                    try:
                        record = json.loads(line)
                    except ValueError:
                        if line.endswith(b"\n"):
                            raise
                        return
                    self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        step, kind = int(record["step"]), record.get("event")
        if kind is None:
            self._add_step(Step.from_data(record))
        elif kind == "stats":
            self._add_stats(step, record)
        elif kind == "non_finite":
            self._note(step, NonFinite(step, tuple(map(str, record["where"]))))
        elif kind == "bad_op":
            self._note(step, BadOp.from_data(record))
        elif kind == "lost_updates":
            for group in record["groups"]:
                share = float(group["share"])
                self._note(step, LostUpdates(step, int(group["group"]), share))

    def _note(self, step: int, value: object) -> None:
        self._events.append(_Event(step, self._num_records, value))

    def _add_step(self, step: Step) -> None:
        # Equal numbers: two processes write to the file; their events are kept.
        if self.steps and step.step < self.steps[-1].step:
            self._events = self._before(step, self._events)
            self._stats = self._before(step, self._stats)
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
        self.steps.append(step)
        self._num_records += 1

    def _before(self, step: Step, events: list[_Event]) -> list[_Event]:
        """Return the events of earlier steps, and those since the last record."""
        now = self._num_records  # such an event may be of this step
        return [e for e in events if e.step < step.step or e.num_records == now]

    def _add_stats(self, step: int, record: dict[str, Any]) -> None:
        """Add every n-th event, with n doubled as needed to limit memory."""
        self._num_stats += 1
        if (self._num_stats - 1) % self._stride:
            return
        scale = float(record.get("scale") or 0.0)
        samples = {
            name: Sample(step, TensorSummary.from_data(tensor), scale)
            for name, tensor in record["tensors"].items()
        }
        self._stats.append(_Event(step, self._num_records, samples))
        if len(self._stats) > _MOST_SAMPLES:
            self._stride *= 2
            del self._stats[1::2]

    def events(self, kind: type[T]) -> tuple[T, ...]:
        """Return the events of one type."""
        return tuple(e.value for e in self._events if isinstance(e.value, kind))

    def stats(self) -> dict[str, tuple[Sample, ...]]:
        """Return the samples of each tensor, gradients with their loss scale.

        The scale is that of the event, or else of the step's record.
        """
        scales = {step.step: step.scale for step in self.steps if step.scale}
        per_tensor: dict[str, list[Sample]] = defaultdict(list)
        for step, _, samples in self._stats:
            for name, each in samples.items():
                is_grad = name.endswith(":grad")
                scale = (each.scale or scales.get(step, 1.0)) if is_grad else 1.0
                per_tensor[name].append(replace(each, scale=scale))
        return {name: tuple(samples) for name, samples in per_tensor.items()}
