"""Reads the facts of a run from its folder.

A damaged file becomes a line in `RunFacts.problems` instead of an exception.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from halfstep.diagnostics.doctor.run_record import (
    Config,
    Evaluation,
    LostUpdates,
    MachineFacts,
    NonFinite,
    RunFacts,
    SplitFacts,
    Step,
)
from halfstep.diagnostics.profiling import Profile
from halfstep.errors import UserError
from halfstep.numerics.tensor_summary import Sample, TensorSummary
from halfstep.reporting import json_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")

METRICS, PROFILE = "metrics.jsonl", "profile.json"
ENVIRONMENT, SUMMARY = "environment.json", "summary.json"
DATA = "data.json"
SETTINGS = ("resolved.toml", "config.json")
"""Files of settings; the first that is valid is used."""
_READ = (METRICS, *SETTINGS, SUMMARY, PROFILE, ENVIRONMENT, DATA)
_MOST_SAMPLES = 256  # events "stats" kept in memory
_MOST_LINES = 5  # damaged lines that are listed
_BAD_OP_TEXTS = ("phase", "op", "kind", "nonfinite_kind", "evidence", "advice", "rule")


def read(folder: Path) -> RunFacts:
    """Return the facts in a run's folder; raise UserError if it holds no run."""
    try:
        is_folder = folder.is_dir()
        present_files = [name for name in _READ if (folder / name).exists()]
    except OSError as error:
        message = f"{folder} cannot be read: {error.strerror or error}."
        raise UserError(message) from error
    if not is_folder:
        message = f"{folder} is not a folder; give the folder of a run (--out of train)"
        raise UserError(message + ".")
    if not present_files:
        message = f"{folder} holds no run: neither {METRICS} nor any other file of one."
        raise UserError(message)
    reader = _Reader(folder)
    settings = dict(next(filter(None, map(reader.mapping, SETTINGS)), {}))
    summary, environment = map(reader.mapping, (SUMMARY, ENVIRONMENT))
    profile = reader.parse(PROFILE, Profile.from_data)
    splits = reader.parse(DATA, splits_of)
    metrics = _Metrics()
    reader.metrics(metrics)
    for name in ("level", "dtype", "master"):
        if name in summary:
            settings[name] = summary[name]

    def weights() -> dict[str, str]:
        formats = json_fields.mapping(environment.get("weights") or {}, "weights")
        return {n: json_fields.optional_text(formats, n) or "unknown" for n in formats}

    def machine() -> MachineFacts | None:
        has_it = "machine" in environment
        return MachineFacts.from_data(environment["machine"]) if has_it else None

    config = reader.try_parse("settings", lambda: Config.from_data(settings))
    return RunFacts(
        name=str(folder),
        config=config or Config(),
        steps=tuple(metrics.steps),
        stats=metrics.stats(),
        non_finite=metrics.events(NonFinite),
        bad_ops=metrics.events(dict),
        lost=metrics.events(LostUpdates),
        profile=profile,
        machine=reader.try_parse(ENVIRONMENT, machine),
        weights=reader.try_parse(ENVIRONMENT, weights) or {},
        evaluations=metrics.evaluations(),
        splits=splits or {},
        problems=tuple(reader.problems),
    )


def splits_of(data: object) -> dict[str, SplitFacts]:
    """Return the counts in data.json, by split; raise UserError if it is damaged."""
    splits = json_fields.mapping(data, DATA)
    return {name: SplitFacts.from_data(splits[name]) for name in splits}


def _loads(text: bytes) -> Any:  # noqa: ANN401 -- any JSON value
    """Parse JSON; replace lone surrogates, which UTF-8 cannot encode."""
    value = json.loads(text)
    if b"\\ud" in text.lower():
        value = json.loads(
            json.dumps(value, ensure_ascii=False).encode(errors="replace")
        )
    return value


class _Metrics:
    """Collects the records of metrics.jsonl in order.

    If a step number is not above the last one, the run was resumed from an earlier step
    or another run began in the folder: earlier records from that step on are removed.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.void = 0
        """Number of removed step records."""
        self._events: list[tuple[int, object]] = []
        self._samples: list[tuple[int, dict[str, Sample]]] = []
        self._num_before_step = (0, 0)
        """Lengths of both at the last step record; later ones may be of the next."""
        self._seen = 0
        self._stride = 1

    def take(self, record: Mapping[str, Any]) -> None:
        """Add the record of one line; raise UserError if it is damaged."""
        event = json_fields.optional_text(record, "event")
        step = json_fields.integer(record, "step")
        if event is None:
            self._take_step(Step.from_data(record))
        elif event == "stats":
            self._take_stats(step, record)
        elif event == "non_finite":
            self._note(step, NonFinite(step, json_fields.texts(record, "where")))
        elif event == "bad_op":
            for key in _BAD_OP_TEXTS:
                json_fields.optional_text(record, key)
            for key in ("module", "cause"):
                json_fields.text(record, key)
            self._note(step, dict(record))
        elif event == "eval":
            self._note(step, Evaluation.from_data(record))
        elif event == "lost_updates":
            groups = json_fields.items(record.get("groups"), "groups")
            for lost in [LostUpdates.from_data(step, group) for group in groups]:
                self._note(step, lost)

    def _note(self, step: int, value: object) -> None:
        self._events.append((step, value))

    def _take_step(self, step: Step) -> None:
        # Equal numbers: two processes write to the file; their events are kept.
        if self.steps and step.step < self.steps[-1].step:
            _void(self._events, self._num_before_step[0], step.step)
            _void(self._samples, self._num_before_step[1], step.step)
        while self.steps and self.steps[-1].step >= step.step:
            self.steps.pop()
            self.void += 1
        self.steps.append(step)
        self._num_before_step = len(self._events), len(self._samples)

    def events(self, kind: type[T]) -> tuple[T, ...]:
        """Return the events of one type."""
        return tuple(value for _, value in self._events if isinstance(value, kind))

    def evaluations(self) -> tuple[Evaluation, ...]:
        """Return the last evaluation of each step."""
        by_step = {each.step: each for each in self.events(Evaluation)}
        return tuple(by_step[step] for step in sorted(by_step))

    def _take_stats(self, step: int, record: Mapping[str, Any]) -> None:
        """Add every n-th event, with n doubled as needed to limit memory."""
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        tensors = json_fields.mapping(record.get("tensors"), "tensors")
        scale = json_fields.loss_scale(record, "scale") or 0.0
        samples = {
            name: Sample(step, TensorSummary.from_data(tensors[name]), scale)
            for name in tensors
        }
        self._samples.append((step, samples))
        if len(self._samples) > _MOST_SAMPLES:
            self._stride *= 2
            del self._samples[1::2]
            num_events, num_samples = self._num_before_step
            self._num_before_step = num_events, (num_samples + 1) // 2

    def stats(self) -> dict[str, tuple[Sample, ...]]:
        """Return the samples of each tensor, gradients with their loss scale.

        The scale is that of the event, or else of the step's record.
        """
        scales = {step.step: step.scale for step in self.steps if step.scale}
        per_tensor: dict[str, list[Sample]] = defaultdict(list)
        for step, samples in self._samples:
            for name, each in samples.items():
                is_grad = name.endswith(":grad")
                scale = (each.scale or scales.get(step) or 1.0) if is_grad else 1.0
                per_tensor[name].append(replace(each, scale=scale))
        return {name: tuple(samples) for name, samples in per_tensor.items()}


def _void(entries: list[tuple[int, T]], num_before_step: int, first: int) -> None:
    """Remove, from the first `num_before_step`, entries of step `first` or later."""
    before = entries[:num_before_step]
    entries[:num_before_step] = [entry for entry in before if entry[0] < first]


class _Reader:
    """Reads the files of a folder and collects their problems."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def try_parse(self, name: str, make: Callable[[], T]) -> T | None:
        """Return the result of `make`; if it fails, add a problem and return None."""
        try:
            return make()
        except UserError as error:
            self.problems.append(f"{name} is damaged: {error}")
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror or error}.")
        except (ValueError, RecursionError):
            kind = "TOML" if name.endswith(".toml") else "JSON"
            self.problems.append(f"{name} is damaged: it is not valid {kind}.")
        return None

    def parse(self, name: str, make: Callable[[object], T]) -> T | None:
        """Parse a JSON or TOML file with `make`; None if it is missing or damaged."""
        path = self.folder / name

        def load() -> T:
            content = path.read_bytes()
            if path.suffix != ".toml":
                return make(_loads(content))
            if settings := tomllib.loads(content.decode()):
                return make(settings)
            raise ValueError  # a run writes settings: the file was cut off

        return self.try_parse(name, load) if path.exists() else None

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return the object in a file; empty if it is missing or damaged."""
        return self.parse(name, lambda data: json_fields.mapping(data, name)) or {}

    def metrics(self, metrics: _Metrics) -> None:
        """Add all valid lines of metrics.jsonl to `metrics`."""
        if not (self.folder / METRICS).exists():
            self.problems.append(f"{METRICS} is missing: nothing is known of the steps")
            return

        def take() -> int:
            damaged = 0
            with (self.folder / METRICS).open("rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        if line.strip():
                            metrics.take(json_fields.mapping(_loads(line), "the line"))
                    except (UserError, ValueError, RecursionError) as error:
                        damaged += 1
                        if damaged <= _MOST_LINES:
                            why = error if isinstance(error, UserError) else "not JSON."
                            self.problems.append(f"{METRICS} line {number}: {why}")
            return damaged

        damaged = self.try_parse(METRICS, take) or 0
        if damaged > _MOST_LINES:
            rest = damaged - _MOST_LINES
            self.problems.append(f"{METRICS}: {rest:,} more damaged lines.")
        if metrics.void:
            text = f"{metrics.void:,} record{'s' * (metrics.void != 1)} of steps that"
            self.problems.append(
                f"{METRICS}: {text} come again or out of order; the later ones count."
            )
