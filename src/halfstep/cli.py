"""The command line: one function a command, each importing what it needs inside.

In: words. Out: text on standard output, files where asked for, exit status 0; or one
line on standard error and status 2 for what cannot be used, 1 for a run that failed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting.argument_parser import Parser, print_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfstep.reporting.table import Table

_STANDARD_OUTPUT = Path("-")
_EPILOG = """\
examples:
  halfstep env                               what this machine can do, and why
  halfstep train                             the built-in emotions, best level for here
  halfstep train --data posts.csv --out runs/posts
  halfstep train --resume --out runs/posts   after a crash
  halfstep predict runs/latest "..."         labels, or entities
  halfstep doctor runs/latest                what went wrong or will, and what mends it
  halfstep run script.py --epochs 3          your own script, unedited, in 16 bits
  halfstep plan my_models:make_one           which operations run in 16 bits, and why
  torchrun --nproc-per-node 2 -m halfstep train
"""


def main(words: Sequence[str] | None = None) -> None:
    """Run one command and leave the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A console that lacks a character must not end a run.
            stream.reconfigure(errors="backslashreplace")
    status = run(words)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def run(words: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    try:
        arguments = _parser().parse_args(words)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            arguments.command(arguments)
    except BrokenPipeError:
        return 0  # whoever read our output has seen enough; the work is done
    except (UserError, OSError) as error:
        return print_error(error, 2)
    except KeyboardInterrupt:
        saved = "what `train` had saved can be gone on with by --resume"
        return print_error(f"interrupted; {saved}", 130)
    except Exception as error:
        status = _outcome(error)
        if status is None:
            raise
        return print_error(error, status)
    return 0


def _outcome(error: Exception) -> int | None:
    """Return the exit status of an error that is an outcome; None for a defect."""
    from halfstep.distributed.process_group import PeerLost
    from halfstep.scaling import LossScaleCollapse
    from halfstep.train.signals import Diverged, Stopped

    if isinstance(error, Stopped):
        return error.status
    return 1 if isinstance(error, LossScaleCollapse | Diverged | PeerLost) else None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,  # noqa: ANN401 -- the signature is the library's
    line: str | None = None,
) -> None:
    """Print a warning in one line, as the rest of the program speaks."""
    del category, filename, lineno, line
    words = " ".join(str(message).split())
    print(f"halfstep: warning: {words}", file=file or sys.stderr)


def _parser() -> argparse.ArgumentParser:
    from halfstep import __version__

    parser = Parser(
        prog="halfstep",
        description="Train PyTorch models in mixed precision, and see what it did.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        metavar="COMMAND", required=True, parser_class=Parser
    )
    _add_train(commands)
    _add_predict(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_run(commands)
    _add_plan(commands)
    _add_env(commands)
    _add_levels(commands)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write what is printed as data; - prints it instead, on standard output",
    )


def _show(tables: Sequence[Table], json_file: Path | None) -> None:
    """Print tables, and write them as data where asked for."""
    _print_and_write(
        lambda width: "\n\n".join(table.text(width).rstrip() for table in tables),
        lambda: [table.data() for table in tables],
        json_file,
    )


def _print_and_write(
    text: Callable[[int | None], str],
    data: Callable[[], object],
    json_file: Path | None,
) -> None:
    """Print text, and write the same as data; data alone if both go to one place."""
    from halfstep.reporting.table import terminal_width

    if json_file != _STANDARD_OUTPUT:
        print(text(terminal_width()))
    if json_file is None:
        return
    written = json.dumps(data(), indent=1, ensure_ascii=False)
    if json_file == _STANDARD_OUTPUT:
        print(written)
    else:
        _write(f"{written}\n", json_file, "--json")


def _write(text: str, path: Path, flag: str) -> None:
    from halfstep.reporting.table import write_text

    # A name in a file of JSON may hold half of a surrogate pair, which UTF-8 has not.
    text = text.encode(errors="backslashreplace").decode()
    try:
        write_text(path, text)
    except OSError as error:
        message = f"{flag} {path} cannot be written: {error.strerror}."
        raise UserError(message) from error


def _add_train(commands: Any) -> None:  # noqa: ANN401 -- argparse keeps its type private
    from halfstep.train import flags

    parser = commands.add_parser(
        "train",
        help="train a text model in mixed precision",
        usage="%(prog)s [--data PATH] [--out DIR] [flags]",
        description=flags.DESCRIPTION,
        epilog=flags.epilog(),
    )
    flags.add_flags(parser)
    modes = parser.add_argument_group("mode, at most one of")
    mode = modes.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="try settings, data and model for a few steps, show what a run would be "
        "and whether level and dtype suit it, and write nothing in --out",
    )
    mode.add_argument(
        "--resume", action="store_true", help="go on with the run in --out"
    )
    mode.add_argument(
        "--overwrite", action="store_true", help="begin a run in place of that in --out"
    )
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> None:
    from halfstep.train import dependencies
    from halfstep.train.flags import explicit_settings

    dependencies.check(
        "halfstep train", dependencies.TO_TRAIN
    )  # the next import needs some
    from halfstep.train.run import run as train

    # One process of many must not print what the first already does.
    leads = os.environ.get("RANK", "0") == "0"
    result = train(
        explicit_settings(arguments),
        resume=arguments.resume,
        overwrite=arguments.overwrite,
        check=arguments.check,
    )
    if leads:
        print()
        _show(result.tables, None)
        if not arguments.check:
            print(f"\nreport: {result.folder.path / 'report.html'}")


def _add_predict(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "predict",
        help="label texts, or find entities in them, with a finished run",
        description="Print what a finished run makes of texts: a label and the "
        "probability of each class, or the entities.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a finished run")
    parser.add_argument(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="texts to read; - reads standard input, one a line; blank ones are left "
        "out",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write one JSON object a text to a file, and show progress instead of "
        "a table: for many texts; - is standard output",
    )
    parser.set_defaults(command=_predict)


def _predict(arguments: argparse.Namespace) -> None:
    from halfstep.train import dependencies

    dependencies.check("halfstep predict", dependencies.TO_PREDICT)
    from halfstep.train import predictions
    from halfstep.train.predict import Predictor

    predictor = Predictor(arguments.run)
    notes: tuple[str, ...] = ()
    if arguments.texts == ["-"]:
        results = predictor.predict(predictions.lines(sys.stdin.buffer))
    else:
        texts, notes = predictions.drop_blank(arguments.texts)
        results = predictor.predict(texts)
    if arguments.json:
        direct = arguments.json == _STANDARD_OUTPUT
        predictions.write(results, None if direct else arguments.json, notes)
    else:
        _show(predictions.tables(results, predictor.outputs, notes), None)


def _add_doctor(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "doctor",
        help="what went wrong in a run or will, and what mends it",
        description="Judge a run by its files alone: steps, statistics of a probe, "
        "profile, machine. Worst first, then what could not be looked at. The exit "
        "status is 0 whatever is found: --json is for programs.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder of a run")
    _add_json(parser)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page with histograms and profile; it needs no network",
    )
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    from halfstep.diagnostics.doctor import examination, html_report, run_reader, text

    facts = run_reader.read(arguments.run)
    result = examination(facts)
    _print_and_write(
        lambda width: text.text(facts, result, width or text.WIDTH),
        lambda: text.data(facts, result),
        arguments.json,
    )
    if arguments.html:
        _write(html_report.page(facts, result), arguments.html, "--html")


def _add_bench(commands: Any) -> None:  # noqa: ANN401
    from halfstep.bench.commands import BENCHES

    parser = commands.add_parser(
        "bench",
        help="measure levels and peers side by side",
        description="Measure halfstep beside what people use instead, in one run.",
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True, parser_class=Parser)
    for word, bench in BENCHES.items():
        kind = kinds.add_parser(
            word,
            usage="%(prog)s [flags]",
            help=bench.summary,
            description=bench.description,
        )
        bench.add_flags(kind)
        _add_json(kind)
        kind.set_defaults(command=_bench, tables=bench.tables)


def _bench(arguments: argparse.Namespace) -> None:
    from halfstep.bench import journal

    with journal.open_journal(arguments.json):
        _show(arguments.tables(arguments), arguments.json)


def _add_run(commands: Any) -> None:  # noqa: ANN401
    from halfstep.launch import DTYPES

    parser = commands.add_parser(
        "run",
        help="train with an unedited script in mixed precision",
        usage="%(prog)s [--level LEVEL] [--dtype DTYPE] [-m] SCRIPT [ARGUMENT ...]",
        description="Run a PyTorch script that nobody edits: its modules are called in "
        "16 bits, fp16 losses are scaled, and steps with inf or NaN are skipped. "
        "HALFSTEP=bf16 in the environment of any program does the same.",
    )
    parser.add_argument(
        "--level",
        default="O1",
        help="O1, O0 (the script as it is), or auto: O1 where 16 bits were measured to "
        "be faster here (default O1)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help=f"{', '.join(DTYPES)} (default auto: bf16; fp16 on a GPU without bf16)",
    )
    parser.add_argument(
        "-m", action="store_true", dest="module", help="SCRIPT is a module's name"
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the script, and its own arguments",
    )
    parser.set_defaults(command=_run)


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
    "allow": "that gain by 16 bits",
    "infer": "that go with their neighbours",
    "clear": "that only move values",
    "deny": "that stay fp32",
}


def _add_plan(commands: Any) -> None:  # noqa: ANN401
    from halfstep.bench.commands import positive_int

    parser = commands.add_parser(
        "plan",
        help="which operations of a model run in 16 bits, and why",
        usage="%(prog)s [flags] MODEL",
        description="Plan the precision of a model for this machine: operations and "
        "casts are timed, and the cheapest assignment that the policy allows is shown.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:function, which returns a model and a tuple of inputs; a .pt2 "
        "file of torch.export.save; or the folder of a transformers model, or of a run "
        "(weights are not read)",
    )
    parser.add_argument("--dtype", default="bf16", help="bf16 or fp16 (default bf16)")
    parser.add_argument("--policy", default="lean", help="(default lean)")
    parser.add_argument(
        "--level",
        default="O1",
        help="O1, fp32 weights; or O2, weights stored in 16 bits (default O1)",
    )
    parser.add_argument(
        "--method",
        default="min-cut",
        help="min-cut, the least predicted time; or painting, TensorFlow's rule "
        "(default min-cut)",
    )
    for kind, which in _KINDS.items():
        parser.add_argument(
            f"--{kind}", metavar="OP,OP", default="", help=f"operations {which}"
        )
    parser.add_argument(
        "--batch", type=positive_int, default=8, metavar="N", help="texts (default 8)"
    )
    parser.add_argument(
        "--length",
        type=positive_int,
        default=128,
        metavar="N",
        help="tokens of a text (default 128)",
    )
    parser.add_argument(
        "--trust-file",
        action="store_true",
        help="load a .pt2 file, which can run code that it holds",
    )
    parser.add_argument("--explain", metavar="NODE", help="all about one operation")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run it, torch.autocast and fp32 in turn, and show their times, too",
    )
    parser.add_argument(
        "--refresh", action="store_true", help="time all operations again"
    )
    parser.add_argument(
        "--load", type=Path, metavar="FILE", help="show the plan in a file instead"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the plan as TOML, to edit"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the graph"
    )
    _add_json(parser)
    parser.set_defaults(command=_plan)


def _given_kinds(arguments: argparse.Namespace) -> dict[str, str]:
    """Return operation -> kind, as flags say."""
    kinds: dict[str, str] = {}
    for kind in _KINDS:
        for op in filter(None, getattr(arguments, kind).split(",")):
            if op in kinds:
                message = f"{op} is given to both --{kinds[op]} and --{kind}."
                raise UserError(message)
            kinds[op] = kind
    return kinds


def _plan(arguments: argparse.Namespace) -> None:
    from halfstep.bench import plan as measuring
    from halfstep.bench import plan_model, plan_report
    from halfstep.graph import load_plan
    from halfstep.graph.planner import plan

    kinds = _given_kinds(arguments)
    defaults = {"dtype": "bf16", "policy": "lean", "level": "O1", "method": "min-cut"}
    changed = [n for n, word in defaults.items() if getattr(arguments, n) != word]
    if arguments.load and (changed or kinds):
        flag = next(iter([*changed, *kinds.values()]))
        message = (
            f"--{flag} has no effect on the plan in {arguments.load}: leave it out, "
            "edit runs_in in the file, or plan anew without --load."
        )
        raise UserError(message)
    model, inputs = plan_model.load_model(
        arguments.model,
        arguments.batch,
        arguments.length,
        trusts_file=arguments.trust_file,
    )
    if arguments.load:
        chosen = load_plan(arguments.load, model, inputs)
    else:
        chosen = plan(
            model,
            inputs,
            dtype=arguments.dtype,
            policy=arguments.policy,
            method=arguments.method,
            level=arguments.level,
            kinds=kinds,
            refresh=arguments.refresh,
        )
    tables = plan_report.tables(
        chosen,
        measuring.count_autocast_casts(model, inputs, chosen.dtype),
        measuring.measure_plan(model, inputs, chosen) if arguments.measure else {},
    )
    if arguments.explain:
        tables = [plan_report.explain(chosen, arguments.explain)]
    _print_and_write(
        lambda width: "\n\n".join(table.text(width).rstrip() for table in tables),
        lambda: [table.data() for table in (*tables, chosen.table())],
        arguments.json,
    )
    if arguments.save:
        chosen.save(arguments.save)
    if arguments.html:
        page = plan_report.page(arguments.model, chosen, tables)
        _write(page, arguments.html, "--html")


def _add_env(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "env",
        help="what this machine can do, and the level to use",
        description="Show the machine, its measured matrix-product rates, and the "
        "level and dtype that follow from them.",
    )
    parser.add_argument(
        "--refresh", action="store_true", help="measure again instead of remembering"
    )
    _add_json(parser)
    parser.set_defaults(command=_env)


def _env(arguments: argparse.Namespace) -> None:
    from halfstep.machine import hardware

    _show(hardware.tables(refresh=arguments.refresh), arguments.json)


def _add_levels(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "levels",
        help="the levels O0 to O3 as a table",
        description="Show what each level stores and computes in 16 bits.",
    )
    _add_json(parser)
    parser.set_defaults(command=_levels)


def _levels(arguments: argparse.Namespace) -> None:
    from halfstep.policy import levels

    _show([levels.table()], arguments.json)
