"""The command line: one function per command, with its imports inside.

Commands print text, write files on request, and exit with status 0. Errors are one line
on standard error, with status 2 for unusable input and 1 for a failed run.
"""

from __future__ import annotations

import argparse
import atexit
import codecs
import gc
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.bench.commands import add_workloads, flag, positive_float, run_workload
from halfstep.errors import UserError
from halfstep.launch import DTYPES
from halfstep.reporting.argument_parser import Parser, print_error
from halfstep.reporting.table import printable, terminal_width, wrap, write_text
from halfstep.train import flags as train_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.bench.commands import Flags
    from halfstep.reporting.table import Table

_STANDARD_OUTPUT = Path("-")
_CONTINUED = {
    "train": "; `train --resume` continues from the last checkpoint, if any",
    "compare": "; the same command continues after the last finished run",
}
"""Command -> what to do after Ctrl-C."""
_EPILOG = """\
examples:
  halfstep env                               16-bit speed of this machine
  halfstep train                             train on built-in data
  halfstep train --data posts.csv --out runs/posts
  halfstep train --resume --out runs/posts   continue after a crash
  halfstep predict runs/latest "..."         print labels or entities
  halfstep predict runs/posts --data new.csv --out labelled.csv
  halfstep doctor runs/latest                find problems of a run
  halfstep run script.py --epochs 3          your own script in 16 bits
  halfstep plan my_models:make_one           a plan for one model
  halfstep compare --levels O1 O2            levels against fp32, over seeds
  torchrun --nproc-per-node 2 -m halfstep train
"""


def _end_soon() -> None:
    """Spare the end of the interpreter all of torch's objects: it takes seconds."""
    if "triton" not in sys.modules:  # newer ones print what was not collected
        gc.freeze()


def _escape(error: UnicodeError) -> tuple[str, int]:
    """Escape as JSON does, unlike "backslashreplace": JSON is printed, too."""
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 -- only for writing
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def main(words: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    atexit.register(_end_soon)
    codecs.register_error("json", _escape)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the program
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the console lacks must not end a run.
            stream.reconfigure(errors="json")
    status = run(words)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at exit, and would report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def run(words: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    try:
        arguments = _parser().parse_args(words)
        # transformers imports torchao, which logs kernels that do not load here.
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_, **__: _show_warning(text)
            # torch warns without numpy; code that needs numpy checks for it.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            arguments.command(arguments)
    except BrokenPipeError:
        return 0  # the reader closed the pipe; the work is done
    except (UserError, OSError) as error:
        return print_error(error, 2)
    except KeyboardInterrupt:
        command = [*(sys.argv[1:] if words is None else words), ""][0]
        return print_error(f"interrupted{_CONTINUED.get(command, '')}", 130)
    except Exception as error:
        from halfstep.distributed.process_group import PeerLost
        from halfstep.scaling import LossScaleCollapse
        from halfstep.train.signals import Diverged, Stopped

        if not isinstance(error, Stopped | LossScaleCollapse | Diverged | PeerLost):
            raise
        return print_error(error, getattr(error, "status", 1))
    return 0


def _show_warning(message: Warning | str) -> None:
    """Print a warning in one line, like the program's other messages."""
    words = printable(" ".join(str(message).split()))
    print(f"halfstep: warning: {words}", file=sys.stderr)


_COMMANDS: dict[str, tuple[Callable[..., None], Flags, dict[str, Any]]] = {}
"""Name -> function, its flags, and texts of its help; in the order of the help."""


def _command(
    flags: Flags, **texts: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a function as the command of its name."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _COMMANDS[function.__name__.removeprefix("_")] = function, flags, texts
        return function

    return register


def _parser() -> argparse.ArgumentParser:
    from halfstep import __version__

    parser = Parser(
        prog="halfstep",
        description="Train PyTorch models in mixed precision.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        metavar="COMMAND", required=True, parser_class=Parser
    )
    for name, (function, flags, texts) in _COMMANDS.items():
        command = commands.add_parser(name, **texts)
        command.set_defaults(command=function)
        for each, arguments in flags.items():
            command.add_argument(each, **arguments)
        if function is _train:
            train_flags.add_flags(command)
        elif function is _bench:
            add_workloads(command)
    return parser


def _file(text: str) -> dict[str, Any]:
    return flag(text, None, Path, "FILE")


def _switch(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


_JSON = {"--json": _file("write the result as JSON; - prints JSON instead of text")}


def _show(
    parts: Sequence[Table | str],
    json_file: Path | None = None,
    data: Callable[[], object] | None = None,
) -> None:
    """Print tables and texts; write the tables, or other data, as JSON on request.

    Only JSON is printed if both go to standard output.
    """
    if json_file != _STANDARD_OUTPUT:
        width = terminal_width()
        texts = (
            part if isinstance(part, str) else part.text(width).rstrip()
            for part in parts
        )
        print("\n\n".join(texts))
    if json_file is None:
        return
    content = (
        data() if data else [part.data() for part in parts if not isinstance(part, str)]
    )
    written = json.dumps(content, indent=1, ensure_ascii=False)
    if json_file == _STANDARD_OUTPUT:
        print(written)
    else:
        _write(f"{written}\n", json_file, "--json")


def _write(text: str, path: Path, flag: str) -> None:
    # Names from JSON may contain unpaired surrogates, which UTF-8 cannot encode.
    text = text.encode(errors="backslashreplace").decode()
    try:
        write_text(path, text)
    except OSError as error:
        message = f"{flag} {path} cannot be written: {error.strerror}."
        raise UserError(message) from error


@_command(
    {},
    help="train a text model in mixed precision",
    usage="%(prog)s [--data PATH] [--out DIR] [flags]",
    description="Train a model that classifies texts, or finds entities in them. "
    "Without flags, a small model learns six emotions from built-in sentences, at the "
    "level recommended for this machine.",
    epilog=train_flags.EPILOG,
)
def _train(arguments: argparse.Namespace) -> None:
    from halfstep.train import dependencies

    # The next import needs some.
    dependencies.check("halfstep train", dependencies.TO_TRAIN)
    from halfstep.train.run import run as train

    # Only rank 0 prints.
    leads = os.environ.get("RANK", "0") == "0"
    result = train(
        train_flags.explicit_settings(arguments),
        resume=arguments.resume,
        overwrite=arguments.overwrite,
        check=arguments.check,
    )
    if leads:
        print()
        _show(result.tables)
        if not arguments.check:
            if result.findings:
                print()
            for line in result.findings:
                print(*wrap(line, terminal_width()), sep="\n")
            print(f"\nreport: {result.folder.path / 'report.html'}")


@_command(
    {
        "run": flag("folder of a finished run", None, Path, "RUN"),
        "texts": flag(
            "texts; - reads standard input, one text per line, without blank lines",
            None,
            str,
            "TEXT",
        )
        | {"nargs": "*"},
        "--data": flag(
            "file whose rows are predicted, of a format that `halfstep train` reads; "
            "labels are not needed",
            None,
            str,
            "FILE",
        ),
        "--out": _file(
            "write the rows, with all their columns and the predictions after them, as "
            ".csv, .tsv or .jsonl (default: the first rows as a table on a "
            "terminal, all of them as JSON lines on a pipe)"
        ),
        "--json": _file("write JSON lines; - writes them to standard output"),
        "--text-column": flag(
            "column or key of the text, or two of a pair of texts, A,B (default: that "
            "of the run)",
            None,
            str,
            "NAME",
        ),
        "--encoding": flag("encoding of the file (default: UTF-8)", None, str, "NAME"),
        "--delimiter": flag(
            "what separates cells (default: seen from the file)", None, str, "D"
        ),
        "--skip-bad-rows": _switch("leave out rows without a text, and count them"),
        "--device": flag("auto, cpu or cuda", "auto", str, "DEVICE"),
    },
    help="label texts, or find entities in them, with a trained model",
    usage="%(prog)s RUN [TEXT ... | --data FILE] [flags]",
    description="Run the model of a finished run on texts, or on the rows of a file: "
    "a label or labels with the probability of each, a number, or the entities.",
)
def _predict(arguments: argparse.Namespace) -> None:
    from halfstep.train import dependencies

    dependencies.check("halfstep predict", dependencies.TO_PREDICT)
    from halfstep.train import predict, prediction_files
    from halfstep.train.data.source import bad_row_notes

    run, texts, data = arguments.run, arguments.texts, arguments.data
    how = ("text_column", "encoding", "delimiter", "skip_bad_rows")
    given = {name: getattr(arguments, name) for name in how}
    predict.check_texts(run, texts, data, given)
    target = prediction_files.target(arguments.out, arguments.json, data)
    predictor = predict.Predictor(run, arguments.device)
    bad_rows: list[Any] = []
    if data is not None:
        rows = predictor.read_rows(data, bad_rows, **given)
    elif texts == ["-"]:
        rows = predict.line_rows(sys.stdin.buffer, arguments.encoding)
    else:
        rows = predict.text_rows(texts)
    is_stream = data is not None or texts == ["-"]
    if target is not None or (is_stream and not sys.stdout.isatty()):
        prediction_files.write(predictor, rows, *(target or (None, ".jsonl")))
    else:
        _show([prediction_files.table(predictor, rows)])
    for note in bad_row_notes(data or "", bad_rows):
        print(note, file=sys.stderr)


@_command(
    {
        "run": flag("folder of a run", None, Path, "RUN_DIR"),
        **_JSON,
    },
    help="find numerical and speed problems of a run, and their fixes",
    description="Check a run from its files: metrics, statistics of a probe, "
    "profile, machine. Print the problems, the worst first, with their fixes, and "
    "the checks for which data is missing. Problems do not change the exit status: "
    "programs read --json.",
)
def _doctor(arguments: argparse.Namespace) -> None:
    from halfstep.diagnostics.doctor import examination, run_reader, text

    facts = run_reader.read(arguments.run)
    result = examination(facts)
    _show(
        [text.text(facts, result, terminal_width() or text.WIDTH)],
        arguments.json,
        lambda: text.data(facts, result),
    )


@_command(
    {},
    help="compare levels and torch.amp in time, memory and accuracy",
    description="Measure halfstep against torch.amp, in turn in one run.",
)
def _bench(arguments: argparse.Namespace) -> None:
    run_workload(arguments, lambda tables, data: _show(tables, arguments.json, data))


@_command(
    {
        "--level": flag(
            "O1; O0 (the script as it is); or auto: O1 if 16 bits were measured to be "
            "faster on this machine, otherwise O0",
            "O1",
            str,
            "LEVEL",
        ),
        "--dtype": {
            "default": "auto",
            "help": f"{', '.join(DTYPES)} (default auto: bf16; fp16 on a GPU without "
            "bf16)",
        },
        "-m": _switch("SCRIPT is the name of a module, as in python -m")
        | {"dest": "module"},
        "words": {
            "nargs": argparse.REMAINDER,
            "metavar": "SCRIPT",
            "help": "the script, and its own arguments",
        },
    },
    help="run an unmodified training script in mixed precision",
    usage="%(prog)s [--level LEVEL] [--dtype DTYPE] [-m] SCRIPT [ARGUMENT ...]",
    description="Run an unmodified PyTorch script in mixed precision: its modules "
    "compute in 16 bits, fp16 losses are scaled, and optimizer steps with inf or "
    "NaN in a gradient are skipped. The environment variable HALFSTEP=bf16 does "
    "the same for any program.",
)
def _run(arguments: argparse.Namespace) -> None:
    from halfstep.launch.command import exec_script

    words = arguments.words
    exec_script(
        words[1:] if words[:1] == ["--"] else words,
        level=arguments.level,
        dtype=arguments.dtype,
        module=arguments.module,
    )


_KINDS = {
    "allow": "to run in 16 bits",
    "infer": "to run in 16 bits if a neighbour does",
    "clear": "that only move data, in the dtype of their neighbours",
    "deny": "to keep in fp32",
}


def _given_kinds(arguments: argparse.Namespace) -> dict[str, str]:
    """Return operation -> kind from the flags."""
    kinds: dict[str, str] = {}
    for kind in _KINDS:
        for op in filter(None, getattr(arguments, kind).split(",")):
            if op in kinds:
                raise UserError(f"{op} is given to both --{kinds[op]} and --{kind}.")
            kinds[op] = kind
    return kinds


@_command(
    {
        "model": {
            "metavar": "MODEL",
            "help": "module:function that returns a model and a tuple of inputs; a "
            ".pt2 file of torch.export.save; or the folder of a transformers model or "
            "of a run (weights are not read)",
        },
        "--dtype": flag("bf16 or fp16", "bf16", str, "DTYPE"),
        "--policy": flag(
            "lean or torch, and rules after it, such as 'lean + op:softmax=fp32'",
            "lean",
            str,
            "POLICY",
        ),
        "--level": flag(
            "O1, fp32 weights; or O2, weights stored in 16 bits", "O1", str, "LEVEL"
        ),
        "--method": flag(
            "min-cut, the least predicted time; or painting, TensorFlow's rule",
            "min-cut",
            str,
            "METHOD",
        ),
        **{
            f"--{kind}": flag(f"operations {which}", None, str, "OP,OP")
            | {"default": ""}
            for kind, which in _KINDS.items()
        },
        "--batch": flag("texts of a batch, for a folder", 8),
        "--length": flag("tokens of a text, for a folder", 128),
        "--trust-file": _switch("load a .pt2 file, which can run code that it holds"),
        "--explain": flag(
            "print inputs, casts, users and times of one operation", None, str, "NODE"
        ),
        "--measure": _switch(
            "also run the planned model, torch.autocast and fp32, and print times"
        ),
        "--refresh": _switch(
            "measure all operations again instead of using cached times"
        ),
        "--load": _file("print the plan in a file instead of planning"),
        "--save": _file("write the plan as TOML, to edit"),
        "--html": _file("write a page with the graph"),
        **_JSON,
    },
    help="plan which operations of a model run in 16 bits, and print why",
    usage="%(prog)s [flags] MODEL",
    description="Plan the precision of a model for this machine: measure the time "
    "of its operations and casts, and print the fastest assignment of dtypes that "
    "the policy allows.",
)
def _plan(arguments: argparse.Namespace) -> None:
    from halfstep.bench import plan_model, plan_report, plan_times
    from halfstep.graph import load_plan
    from halfstep.graph.planner import plan

    kinds = _given_kinds(arguments)
    defaults = {"dtype": "bf16", "policy": "lean", "level": "O1", "method": "min-cut"}
    changed = [n for n, word in defaults.items() if getattr(arguments, n) != word]
    if arguments.load and (changed or kinds):
        flag = next(iter([*changed, *kinds.values()]))
        raise UserError(
            f"--{flag} has no effect on the plan in {arguments.load}: leave it out, "
            "edit runs_in in the file, or plan anew without --load."
        )
    model, inputs = plan_model.load_model(
        arguments.model,
        arguments.batch,
        arguments.length,
        trusts_file=arguments.trust_file,
    )
    if arguments.load:
        chosen = load_plan(arguments.load, model, inputs)
    else:
        words = {name: getattr(arguments, name) for name in (*defaults, "refresh")}
        chosen = plan(model, inputs, kinds=kinds, **words)
    tables = plan_report.tables(
        chosen,
        plan_times.count_autocast_casts(model, inputs, chosen.dtype),
        plan_times.measure_plan(model, inputs, chosen) if arguments.measure else {},
    )
    if arguments.explain:
        tables = [plan_report.explain(chosen, arguments.explain)]
    _show(
        tables,
        arguments.json,
        lambda: [table.data() for table in (*tables, chosen.table())],
    )
    if arguments.save:
        chosen.save(arguments.save)
    if arguments.html:
        page = plan_report.page(arguments.model, chosen, tables)
        _write(page, arguments.html, "--html")


@_command(
    {
        "--train": _file(
            "settings of halfstep train, as for its --config: task, data, model, "
            "epochs; the resolved.toml of a run, too (default: the built-in sentences)"
        ),
        "--levels": flag(
            "O1 to O3; after a colon each, bf16 or fp16, form of the master weights, "
            "loss_scale=: O2:split O1:fp16 O1:fp16:loss_scale=none (default O1 O2)",
            None,
            str,
            "LEVEL",
        )
        | {"nargs": "+", "default": ["O1", "O2"]},
        "--seeds": flag("pairs of runs of each level, 2 or more", 5),
        "--margin": flag(
            "largest difference of the score that counts as none (default: 1 %% of "
            "fp32's score)",
            None,
            positive_float,
            "X",
        ),
        "--out": flag(
            "folder of the runs and of report.html", Path("runs/compare"), Path, "DIR"
        ),
        **_JSON,
    },
    help="test over seeds whether levels train as well as fp32",
    usage="%(prog)s [--train FILE] [--out DIR] [flags]",
    description="Train in fp32 and at other levels, in pairs that start alike, and "
    "say for each level whether it is as good as fp32, by how much it is worse, or "
    "how many seeds it takes to know. Finished runs are stored in --out: the same "
    "command continues there, also with more levels or seeds.",
)
def _compare(arguments: argparse.Namespace) -> None:
    from halfstep.parity.candidate import parse_all
    from halfstep.parity.compare_levels import run_comparison
    from halfstep.train.dependencies import TO_TRAIN, check

    check("halfstep compare", TO_TRAIN)  # the next import needs some
    from halfstep.parity.train_workload import train_workload

    levels = parse_all(arguments.levels)
    result = run_comparison(
        train_workload(arguments.train),
        levels,
        arguments.seeds,
        margin=arguments.margin,
        out=arguments.out,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report = arguments.out / "report.html"
    result.page(report)
    _show([*result.tables(), f"report: {report}"], arguments.json, result.data)


@_command(
    {"--refresh": _switch("measure again instead of using cached rates"), **_JSON},
    help="print the 16-bit speed of this machine and the recommended level",
    description="Print what this machine has, the measured rates of matmuls, and "
    "the recommended level and dtype.",
)
def _env(arguments: argparse.Namespace) -> None:
    from halfstep.machine import hardware

    _show(hardware.tables(refresh=arguments.refresh), arguments.json)


@_command(
    _JSON,
    help="print the levels O0 to O3 as a table",
    description="Print what each level stores and computes in 16 bits.",
)
def _levels(arguments: argparse.Namespace) -> None:
    from halfstep.policy import levels

    _show([levels.table()], arguments.json)
