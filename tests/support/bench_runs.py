"""Settings and runs of `halfstep bench`, as the command line reads them."""

import json
import shlex
from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any, Self

import pytest
from data_files import leave, refused_command

from halfstep.bench import commands, results, training
from halfstep.bench.floor import Floor
from halfstep.machine import hardware
from halfstep.reporting.table import Cell, Table


def flags(bench: str, words: str) -> Namespace:
    parser = ArgumentParser()
    commands.add_flags(parser, bench)
    arguments = parser.parse_args(shlex.split(words))
    if hasattr(arguments, "device"):
        arguments.device = hardware.pick_device(arguments.device)
    return arguments


def tables(bench: str, words: str) -> list[Table]:
    arguments = flags(bench, words)
    chosen = commands.load(bench)
    chosen.check(arguments)
    return results.with_conditions(chosen.run(arguments), arguments)


def run(bench: str, words: str) -> int:
    return leave("bench", bench, *shlex.split(words))


def rejected(bench: str, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    return refused_command(capsys, "bench", bench, *shlex.split(words), most=200)


def rows(table: Table) -> list[dict[str, Cell]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def planted_rates(patch: pytest.MonkeyPatch) -> None:
    """Plant the rates of the machine: 1 GFLOP/s in fp32, 2 in bf16, 1 GB/s."""
    rates = {"fp32": 1e-3, "bf16": 2e-3, "fp16": 2e-3}
    patch.setattr(Floor, "measure", lambda _device: Floor(rates, 1.0))
    patch.setattr(training.hardware, "gemm_rates", lambda *_: rates)


class Candidate:
    """A `WorkerProcess` that starts none: it answers in this process."""

    log: list[Any]

    def __init__(
        self, name: str, module: str, task: dict[str, Any], _: Any = None
    ) -> None:
        self.name = name
        self.answer = import_module(module).worker(**json.loads(json.dumps(task)))

    def request(self, question: Any = None) -> Any:
        return json.loads(json.dumps(self.answer(question)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
