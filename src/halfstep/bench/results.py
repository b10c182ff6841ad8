"""What a bench run leaves besides its tables: `--json`, and `--against` such a file."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.bench import measure
from halfstep.errors import UserError
from halfstep.machine import hardware

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from halfstep.reporting.table import Cell, Table

_INTERNAL = {"json", "against", "command", "workload", "program", "device"}
"""Arguments that are no settings of a measurement, or noted by themselves."""
_MAY_DIFFER = {"rounds", "candidates"}
"""Settings in which a run may differ from the one of `--against`."""


def settings(arguments: Namespace) -> dict[str, Any]:
    """Return the settings of a workload, defaults too, since those may change."""
    items = vars(arguments).items()
    return {name: value for name, value in items if name not in _INTERNAL}


def command(arguments: Namespace) -> str:
    """Return the command that repeats a run."""
    words = []
    for name, value in settings(arguments).items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name.replace('_', '-')} {shlex.quote(str(text))}")
    device = getattr(arguments, "device", None)
    words += [f"--device {device}"] if device else []
    return " ".join([arguments.program, arguments.workload, *words])


def machine(arguments: Namespace) -> dict[str, Any]:
    """Return what times depend on besides the settings.

    The host is a hash of its name, so that published files do not tell it.
    """
    facts = hardware.capabilities()
    device = getattr(arguments, "device", None) or facts.device
    return {
        "device": device,
        "processor": facts.gpus[0].name if device == "cuda" else facts.cpu,
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "cores": facts.cores,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES"),
    }


def with_conditions(tables: Sequence[Table], arguments: Namespace) -> list[Table]:
    """Add the notes that every table ends with."""
    notes = conditions(arguments)
    return [replace(table, notes=(*table.notes, *notes)) for table in tables]


def conditions(arguments: Namespace) -> list[str]:
    """Return the notes of every table: date, machine, and the command to repeat it."""
    of = machine(arguments)
    tunables = of["GLIBC_TUNABLES"]
    today = time.strftime("%Y-%m-%d")
    version = torch.__version__
    return [
        f"{today}, torch {version}, {of['processor']}, threads: {of['threads']}",
        command(arguments),
        *([f"GLIBC_TUNABLES={tunables}"] if tunables else []),
    ]


def data(
    arguments: Namespace, tables: Sequence[Table], seconds: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """Return the tables for `--json`; the first also has the run, under "run"."""
    from halfstep import __version__

    run = {
        "workload": arguments.workload,
        "settings": settings(arguments),
        "machine": machine(arguments),
        "versions": {"halfstep": __version__, "torch": torch.__version__},
        "seconds": dict(seconds),
    }
    first, *others = (table.data() for table in tables)
    return [first | {"run": run}, *others]


# --against


def load_earlier(path: Path, arguments: Namespace) -> dict[str, Any]:
    """Return the run in a file of `--json`."""
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))[0]["run"]
        earlier = _conditions(run["workload"], run["settings"], run["machine"])
        for rounds in run["seconds"].values():
            list(map(float, rounds))  # fails before hours of measuring
    except OSError as error:
        raise UserError(
            f"--against {path} cannot be read: {error.strerror}."
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--against {path} holds no run of halfstep bench: use its --json."
        ) from error
    now = _conditions(arguments.workload, settings(arguments), machine(arguments))
    for name in {**now, **earlier}:
        if earlier.get(name) != now.get(name):
            raise UserError(
                f"--against {path}: {name} was {earlier.get(name)} there and is "
                f"{now.get(name)} here; times compare only with the same workload, "
                "settings and machine."
            )
    return run


def _conditions(
    workload: str, settings: Mapping[str, Any], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what two runs must share so that their times compare."""
    flags = {
        f"--{name.replace('_', '-')}": value
        for name, value in settings.items()
        if name not in _MAY_DIFFER
    }
    return {"workload": workload, **flags, **machine}


def against(
    path: Path, earlier: Mapping[str, Any], seconds: Mapping[str, list[float]]
) -> Table:
    """Return each time as a multiple of that in an earlier run.

    The spread is that of both runs: half of each interquartile range, relative to the
    median, added.
    """
    rows: list[dict[str, Cell]] = []
    for name, now in seconds.items():
        before = earlier["seconds"].get(name) or ()
        ratio = spread = result = None
        if before:
            ratio = statistics.median(now) / statistics.median(before)
            spread = ratio * sum(
                measure.half_quartile_range(each) / statistics.median(each)
                for each in (before, now)
            )
            if min(len(before), len(now)) >= measure.MIN_ROUNDS:
                result = measure.verdict(ratio - 1, spread)
        rows.append(
            {
                "what": name,
                "ms before": measure.median([1e3 * each for each in before]),
                "ms now": measure.median([1e3 * each for each in now]),
                "x before": ratio,
                "+-": spread,
                "result": result,
            }
        )
    versions = ", ".join(f"{n} {v}" for n, v in earlier["versions"].items())
    notes = (
        f"before: {path}, with {versions}; -: not in it",
        "x before: of the medians; +-: the spreads of both runs, added",
        "a machine changes from run to run: if a baseline changed as much, it did",
    )
    return measure.table("Against an earlier run", rows, notes)
