"""Facts about a run from its folder alone.

In: a folder with a `metrics.jsonl`, and what else `halfstep train` and a probe write.
Out: `RunFacts`. A damaged or missing file is a line in `problems`, never a traceback.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from halfstep.doctor import plain
from halfstep.doctor.facts import (
    Config,
    LostUpdates,
    MachineFacts,
    NonFinite,
    ProfileFacts,
    RunFacts,
    Step,
    sample,
)
from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from halfstep.doctor.tally import Sample

T = TypeVar("T")

METRICS, PROFILE = "metrics.jsonl", "profile.json"
ENVIRONMENT, SUMMARY = "environment.json", "summary.json"
SETTINGS = ("resolved.toml", "config.json")
"""The first that is there tells how the run was set up."""
_READ = (METRICS, *SETTINGS, SUMMARY, PROFILE, ENVIRONMENT)
_MOST_SAMPLES = 256  # of a tensor: more tell no more, and fill the memory
_MOST_LINES = 5  # that are damaged and named


def read(folder: Path) -> RunFacts:
    """Return what a run's folder tells.

    Raises:
        UserError: If it is no folder, or holds none of the files of a run.
    """
    if not folder.is_dir():
        message = f"{folder} is not a folder; give the folder of a run (--out of train)"
        raise UserError(message + ".")
    there = [name for name in _READ if (folder / name).exists()]
    if not there:
        message = f"{folder} holds no run: neither {METRICS} nor any other file of one."
        raise UserError(message)
    reader = _Reader(folder)
    settings = reader.settings()
    summary = reader.json(SUMMARY, lambda data: plain.mapping(data, SUMMARY)) or {}
    environment = (
        reader.json(ENVIRONMENT, lambda data: plain.mapping(data, ENVIRONMENT)) or {}
    )
    profile = reader.json(PROFILE, ProfileFacts.from_data)
    metrics = _Metrics()
    reader.metrics(metrics)
    known = {
        name: summary[name] for name in ("level", "dtype", "master") if name in summary
    }

    def config() -> Config:
        return Config.from_data({**settings, **known})

    def weights() -> dict[str, str]:
        found = plain.mapping(environment.get("weights") or {}, "weights")
        return {name: plain.word(found, name) or "unknown" for name in found}

    machine = None
    if "machine" in environment:
        machine = reader.understood(
            ENVIRONMENT, lambda: MachineFacts.from_data(environment["machine"])
        )
    return RunFacts(
        name=str(folder),
        config=reader.understood("settings", config) or Config(),
        steps=tuple(metrics.steps),
        stats=metrics.stats(),
        non_finite=tuple(metrics.non_finite),
        bad_ops=tuple(metrics.bad_ops),
        lost=tuple(metrics.lost),
        profile=profile,
        machine=machine,
        weights=reader.understood(ENVIRONMENT, weights) or {},
        padding=reader.understood(
            SUMMARY, lambda: plain.number(summary, "padded_share")
        ),
        problems=tuple(reader.problems),
    )


def _loads(text: bytes) -> Any:  # noqa: ANN401 -- any JSON value
    """Return what JSON says, halves of surrogate pairs replaced: UTF-8 has none."""
    found = json.loads(text)
    return _whole(found) if b"\\ud" in text.lower() else found


def _whole(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_whole(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


class _Metrics:
    """What the lines of metrics.jsonl tell, in their order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.non_finite: list[NonFinite] = []
        self.bad_ops: list[Mapping[str, Any]] = []
        self.lost: list[LostUpdates] = []
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        self._seen = 0
        self._stride = 1

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in the record of one line.

        Raises:
            UserError: If it is damaged.
        """
        event = plain.word(record, "event")
        step = plain.whole(record, "step")
        if event is None:
            self.steps.append(Step.from_data(record))
        elif event == "stats":
            self._take_stats(step, record)
        elif event == "non_finite":
            self.non_finite.append(NonFinite(step, plain.words(record, "where")))
        elif event == "bad_op":
            self.bad_ops.append(dict(record))
        elif event == "lost_updates":
            groups = plain.items(record.get("groups"), "groups")
            for group in groups:
                told = plain.mapping(group, "groups")
                self.lost.append(LostUpdates.from_data(step, told))

    def _take_stats(self, step: int, record: Mapping[str, Any]) -> None:
        """Keep every so manieth event, so that a long run fits the memory."""
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        tensors = plain.mapping(record.get("tensors"), "tensors")
        scale = plain.number(record, "scale") or 0.0
        found = {name: sample(step, tensors[name], scale) for name in tensors}
        for name, each in found.items():
            self._samples[name].append(each)
        if max(map(len, self._samples.values()), default=0) > _MOST_SAMPLES:
            self._stride *= 2
            for name, kept in self._samples.items():
                self._samples[name] = kept[::2]

    def stats(self) -> dict[str, tuple[Sample, ...]]:
        """Return the samples of each tensor, gradients with their step's loss scale.

        An event may name the scale; if not, it is that in the record of its step.
        """
        scales = {step.step: step.scale for step in self.steps if step.scale}

        def scaled(name: str, each: Sample) -> Sample:
            scale = 1.0
            if name.endswith(":grad"):
                scale = each.scale or scales.get(each.step) or 1.0
            return type(each)(each.step, each.tally, scale)

        return {
            name: tuple(scaled(name, each) for each in samples)
            for name, samples in self._samples.items()
        }


class _Reader:
    """Reads files of a folder, and notes what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []

    def understood(self, name: str, make: Callable[[], T]) -> T | None:
        """Return what `make` does; None, and a line, where it cannot."""
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

    def json(self, name: str, make: Callable[[object], T]) -> T | None:
        """Return what a file of JSON tells; None where it is not there, or damaged."""
        path = self.folder / name
        if not path.exists():
            return None
        return self.understood(name, lambda: make(_loads(path.read_bytes())))

    def settings(self) -> Mapping[str, Any]:
        """Return the settings from the first file that can be used."""
        for name in SETTINGS:
            path = self.folder / name

            def load(name: str = name, path: Path = path) -> Mapping[str, Any]:
                text = path.read_text(encoding="utf-8")
                found = tomllib.loads(text) if name.endswith("toml") else None
                return found or plain.mapping(_loads(text.encode()), name)

            if path.exists():
                told = self.understood(name, load)
                if told is not None:
                    return told
        return {}

    def metrics(self, metrics: _Metrics) -> None:
        """Take in all lines of metrics.jsonl but those that are damaged."""
        if not (self.folder / METRICS).exists():
            self.problems.append(f"{METRICS} is missing: nothing is known of the steps")
            return

        def take() -> int:
            damaged = 0
            for number, line in self._lines():
                try:
                    metrics.take(plain.mapping(_loads(line), "the line"))
                except (UserError, ValueError, RecursionError) as error:
                    damaged += 1
                    if damaged <= _MOST_LINES:
                        why = error if isinstance(error, UserError) else "not JSON."
                        self.problems.append(f"{METRICS} line {number}: {why}")
            return damaged

        damaged = self.understood(METRICS, take) or 0
        if damaged > _MOST_LINES:
            rest = damaged - _MOST_LINES
            self.problems.append(f"{METRICS}: {rest:,} more damaged lines.")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with (self.folder / METRICS).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
