"""`halfstep bench` on the command line: its workloads and their flags.

Importing this loads no torch: a workload's file is imported when its name is on the
command line.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.reporting.argument_parser import Parser
from halfstep.train import dependencies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from halfstep.reporting.table import Table

Flags = dict[str, dict[str, Any]]
"""Name of a flag -> arguments of `add_argument`."""

# Readers of flag values; argparse prints the flag's name before their messages.


def number(
    kind: Callable[[str], Any], is_valid: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    """Return a parser of numbers in a range."""

    def read(text: str) -> Any:  # noqa: ANN401 -- of the kind
        with contextlib.suppress(ValueError):
            if is_valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} must be {expected}")

    return read


positive_int = number(int, lambda x: x > 0, "a whole number of at least 1")
positive_float = number(float, lambda x: 0 < x < math.inf, "a number above 0")
share = number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")


def list_of(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of comma-separated values, each of which counts once."""
    return lambda text: [*dict.fromkeys(map(read, text.split(",")))]


# Flags


def flag(
    text: str,
    default: Any = None,  # noqa: ANN401 -- what the reader returns
    read: Callable[[str], Any] = positive_int,
    metavar: str = "N",
) -> dict[str, Any]:
    """Return a flag; its help ends with the default, if any."""
    if default is not None:
        words = ",".join(map(str, default)) if isinstance(default, list) else default
        text = f"{text} (default {words})"
    return {"type": read, "default": default, "metavar": metavar, "help": text}


def choice(text: str, *choices: str) -> dict[str, Any]:
    """Return a flag with fixed choices; by default the first."""
    text = f"{text} (default {choices[0]})"
    return {"choices": choices, "default": choices[0], "help": text}


def names(choices: Collection[str]) -> dict[str, Any]:
    """Return a flag of comma-separated names, all of them by default."""
    listed = ", ".join(choices)

    def read(name: str) -> str:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} must be all or of {listed}")
        return name

    def read_all(text: str) -> list[str]:
        return [*choices] if text == "all" else list_of(read)(text)

    text = f"of {listed}; all for all of them (the default)"
    return flag(text, None, read_all, "NAME,NAME") | {"default": [*choices]}


DEVICE = {"choices": ("cpu", "cuda"), "help": "(default cuda if there is one)"}
DTYPE = choice("16-bit format", "bf16", "fp16")
PLACE: Flags = {"dtype": DTYPE, "device": DEVICE}
ACCUMULATE = "micro-batches of one step"


@dataclass
class Bench:
    """What the file of a workload declares."""

    run: Callable[[argparse.Namespace], list[Table]]
    """Measures, and returns tables."""
    description: str
    """What is compared."""
    flags: Flags
    candidates: Mapping[str, str] | None = None
    """Name -> description, for the help; None if names need none."""
    check: Callable[[argparse.Namespace], None] = lambda _: None
    """Fills in defaults that depend on others, and rejects what does not fit."""
    program: str = "halfstep bench"
    """Command that has the workload with these candidates."""


@dataclass(frozen=True)
class Row:
    """A workload as `halfstep bench --help` lists it."""

    module: str
    """File in this package; its `BENCHES` has the `Bench`."""
    summary: str
    extras: str = ""
    """The extras of halfstep that it needs, as pip takes them."""


_TRANSFORMERS = dependencies.TO_PREDICT
_TRAIN = dependencies.TO_TRAIN
BENCHES = {
    "recipe": Row("recipe", "large linear layers: all levels, torch.amp"),
    "encoder": Row("models", "a BERT encoder", _TRANSFORMERS),
    "decoder": Row("models", "a small GPT", _TRANSFORMERS),
    "conv": Row("models", "a small ResNet", _TRANSFORMERS),
    "train": Row("jobs", "halfstep train against a plain torch.amp loop", _TRAIN),
    "ner": Row(
        "jobs", "F1 of an entity tagger: formats, loss scales, learning rates", _TRAIN
    ),
}
"""Name on the command line -> workload."""

_EPILOG = """\
examples:
  halfstep bench recipe                      a few minutes on two cores
  halfstep bench recipe --width 513          widths that are no multiple of 8
  halfstep bench recipe --accumulate 8       eight micro-batches a step
  halfstep bench encoder --json now.json
  halfstep bench encoder --json new.json --against now.json
Each table ends with its conditions and with the command that repeats it. A difference \
smaller than the column +- is no difference."""


def load(name: str) -> Bench:
    """Import a workload."""
    row = BENCHES[name]
    if row.extras:
        dependencies.check(f"halfstep bench {name}", row.extras)
    module = import_module(f"halfstep.bench.{row.module}")
    bench: Bench = module.BENCHES[name]
    return bench


def add_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags of a workload, and those of all."""
    bench = load(name)
    parser.description = bench.description
    if bench.candidates:
        width = max(map(len, bench.candidates)) + 2
        lines = (f"  {each:<{width}}{text}" for each, text in bench.candidates.items())
        parser.epilog = "\n".join(["candidates:", *lines])
    for word, arguments in bench.flags.items():
        parser.add_argument(f"--{word}", **arguments)
    outputs = {
        "json": "write the tables and each measurement as JSON; - prints JSON instead "
        "of tables. While it runs, FILE.part has what was measured so far",
        "against": "compare the times with a file of --json, from the same machine "
        "and settings",
    }
    for word, text in outputs.items():
        parser.add_argument(f"--{word}", type=Path, metavar="FILE", help=text)
    parser.set_defaults(workload=name, program=bench.program)


class _WorkloadParser(Parser):
    """Adds the flags of a workload when its name was on the command line."""

    name = ""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        if self.get_default("workload") is None:
            add_flags(self, self.name)
        return super().parse_known_args(args, namespace)


def add_workloads(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each workload."""
    parser.epilog = _EPILOG
    kinds = parser.add_subparsers(
        metavar="WHAT", required=True, parser_class=_WorkloadParser
    )
    for name, row in BENCHES.items():
        kind = kinds.add_parser(name, usage="%(prog)s [flags]", help=row.summary)
        kind.name = name


def run_workload(
    arguments: argparse.Namespace,
    show: Callable[[list[Table], Callable[[], object]], None],
) -> None:
    """Run a workload, and show its tables; `show` also gets what makes the JSON."""
    from halfstep.bench import journal, results
    from halfstep.machine import hardware

    bench = load(arguments.workload)
    if hasattr(arguments, "device"):
        arguments.device = hardware.pick_device(arguments.device)
    bench.check(arguments)
    path = arguments.against
    earlier = results.load_earlier(path, arguments) if path else None
    with journal.open_journal(arguments.json) as log:
        tables = results.with_conditions(bench.run(arguments), arguments)
        seconds = log.seconds()
        if earlier:
            tables.append(results.against(path, earlier, seconds))
        show(tables, partial(results.data, arguments, tables, seconds))
