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

from halfstep.errors import UserError
from halfstep.reporting.argument_parser import Parser, print_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from halfstep.reporting.table import Table

_STANDARD_OUTPUT = Path("-")
_EPILOG = """\
examples:
  halfstep env                               16-bit speed of this machine
  halfstep train                             train on built-in data
  halfstep train --data posts.csv --out runs/posts
  halfstep train --resume --out runs/posts   continue after a crash
  halfstep predict runs/latest "..."         print labels or entities
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
            warnings.showwarning = _show_warning
            # torch warns without numpy; code that needs numpy checks for it.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            arguments.command(arguments)
    except BrokenPipeError:
        return 0  # the reader closed the pipe; the work is done
    except (UserError, OSError) as error:
        return print_error(error, 2)
    except KeyboardInterrupt:
        command = [*(sys.argv[1:] if words is None else words), ""][0]
        advice = "; `train --resume` continues from the last checkpoint, if any"
        advice = advice if command == "train" else ""
        return print_error(f"interrupted{advice}", 130)
    except Exception as error:
        status = _outcome(error)
        if status is None:
            raise
        return print_error(error, status)
    return 0


def _outcome(error: Exception) -> int | None:
    """Return the exit status of an expected error; None for a bug."""
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
    """Print a warning in one line, like the program's other messages."""
    del category, filename, lineno, line
    words = " ".join(str(message).split())
    print(f"halfstep: warning: {words}", file=file or sys.stderr)


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
    _add_train(commands)
    _add_predict(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_run(commands)
    _add_plan(commands)
    _add_compare(commands)
    _add_env(commands)
    _add_levels(commands)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the result as JSON; - prints JSON instead of text",
    )


def _show(
    tables: Sequence[Table],
    json_file: Path | None,
    data: Callable[[], object] | None = None,
) -> None:
    """Print tables, and write them, or other data, as JSON on request."""
    _print_and_write(
        lambda width: "\n\n".join(table.text(width).rstrip() for table in tables),
        data or (lambda: [table.data() for table in tables]),
        json_file,
    )


def _print_and_write(
    text: Callable[[int | None], str],
    data: Callable[[], object],
    json_file: Path | None,
) -> None:
    """Print text and write JSON; only JSON if both go to standard output."""
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

    # Names from JSON may contain unpaired surrogates, which UTF-8 cannot encode.
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
        epilog=flags.EPILOG,
    )
    flags.add_flags(parser)
    modes = parser.add_argument_group("mode, at most one of")
    mode = modes.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="train a few steps, print the time and memory that the run will take and "
        "whether level and dtype suit it, and write nothing to --out",
    )
    mode.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out from its newest checkpoint",
    )
    mode.add_argument(
        "--overwrite", action="store_true", help="replace the run in --out"
    )
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> None:
    from halfstep.reporting.table import terminal_width, wrap
    from halfstep.train import dependencies
    from halfstep.train.flags import explicit_settings

    # The next import needs some.
    dependencies.check("halfstep train", dependencies.TO_TRAIN)
    from halfstep.train.run import run as train

    # Only rank 0 prints.
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
            if result.findings:
                print()
            for line in result.findings:
                print(*wrap(line, terminal_width()), sep="\n")
            print(f"\nreport: {result.folder.path / 'report.html'}")


def _add_predict(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "predict",
        help="label texts, or find entities in them, with a trained model",
        description="Run the model of a finished run on texts: print a label and the "
        "probability of each class, or the entities.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN_DIR", help="folder of a finished run"
    )
    parser.add_argument(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="one or more texts; - reads standard input, one text per line; blank "
        "texts are left out",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write one JSON object per text to a file, and show progress instead of "
        "a table; - writes to standard output",
    )
    parser.set_defaults(command=_predict)


def _predict(arguments: argparse.Namespace) -> None:
    from halfstep.train import dependencies

    dependencies.check("halfstep predict", dependencies.TO_PREDICT)
    from halfstep.train import predict

    predictor = predict.Predictor(arguments.run)
    numbered: Iterable[tuple[int, str]]
    notes: tuple[str, ...] = ()
    if arguments.texts == ["-"]:
        numbered = predict.lines(sys.stdin.buffer)
    else:
        numbered, notes = predict.drop_blank(arguments.texts)
    if arguments.json:
        direct = arguments.json == _STANDARD_OUTPUT
        results = predictor.predict(text for _, text in numbered)
        predict.write(results, None if direct else arguments.json, notes)
    else:
        numbers, texts = zip(*numbered, strict=True)
        results = predictor.predict(texts)
        _show(predict.tables(results, predictor.outputs, numbers, notes), None)


def _add_doctor(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "doctor",
        help="find numerical and speed problems of a run, and their fixes",
        description="Check a run from its files: metrics, statistics of a probe, "
        "profile, machine. Print the problems, the worst first, with their fixes, and "
        "the checks for which data is missing. Problems do not change the exit status: "
        "programs read --json.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of a run")
    _add_json(parser)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page with histograms and profile",
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
    from halfstep.bench.commands import add_workloads

    parser = commands.add_parser(
        "bench",
        help="compare levels and other libraries in time, memory and accuracy",
        description="Measure halfstep against torch.amp and other libraries, in turn "
        "in one run.",
    )
    add_workloads(parser)
    parser.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> None:
    from halfstep.bench.commands import run_workload

    run_workload(arguments, lambda tables, data: _show(tables, arguments.json, data))


def _add_run(commands: Any) -> None:  # noqa: ANN401
    from halfstep.launch import DTYPES

    parser = commands.add_parser(
        "run",
        help="run an unmodified training script in mixed precision",
        usage="%(prog)s [--level LEVEL] [--dtype DTYPE] [-m] SCRIPT [ARGUMENT ...]",
        description="Run an unmodified PyTorch script in mixed precision: its modules "
        "compute in 16 bits, fp16 losses are scaled, and optimizer steps with inf or "
        "NaN in a gradient are skipped. The environment variable HALFSTEP=bf16 does "
        "the same for any program.",
    )
    parser.add_argument(
        "--level",
        default="O1",
        help="O1; O0 (the script as it is); or auto: O1 if 16 bits were measured to be "
        "faster on this machine, otherwise O0 (default O1)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help=f"{', '.join(DTYPES)} (default auto: bf16; fp16 on a GPU without bf16)",
    )
    parser.add_argument(
        "-m",
        action="store_true",
        dest="module",
        help="SCRIPT is the name of a module, as in python -m",
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
    "allow": "to run in 16 bits",
    "infer": "to run in 16 bits if a neighbour does",
    "clear": "that only move data, in the dtype of their neighbours",
    "deny": "to keep in fp32",
}


def _add_plan(commands: Any) -> None:  # noqa: ANN401
    from halfstep.bench.commands import positive_int

    parser = commands.add_parser(
        "plan",
        help="plan which operations of a model run in 16 bits, and print why",
        usage="%(prog)s [flags] MODEL",
        description="Plan the precision of a model for this machine: measure the time "
        "of its operations and casts, and print the fastest assignment of dtypes that "
        "the policy allows.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="module:function that returns a model and a tuple of inputs; a .pt2 file "
        "of torch.export.save; or the folder of a transformers model or of a run "
        "(weights are not read)",
    )
    parser.add_argument("--dtype", default="bf16", help="bf16 or fp16 (default bf16)")
    parser.add_argument(
        "--policy",
        default="lean",
        help="lean or torch, and rules after it, such as 'lean + op:softmax=fp32' "
        "(default lean)",
    )
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
        "--batch",
        type=positive_int,
        default=8,
        metavar="N",
        help="texts of a batch, for a folder (default 8)",
    )
    parser.add_argument(
        "--length",
        type=positive_int,
        default=128,
        metavar="N",
        help="tokens of a text, for a folder (default 128)",
    )
    parser.add_argument(
        "--trust-file",
        action="store_true",
        help="load a .pt2 file, which can run code that it holds",
    )
    parser.add_argument(
        "--explain",
        metavar="NODE",
        help="print inputs, casts, users and times of one operation",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also run the planned model, torch.autocast and fp32, and print times",
    )
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="measure all operations again instead of using cached times",
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="print the plan in a file instead of planning",
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
    """Return operation -> kind from the flags."""
    kinds: dict[str, str] = {}
    for kind in _KINDS:
        for op in filter(None, getattr(arguments, kind).split(",")):
            if op in kinds:
                raise UserError(f"{op} is given to both --{kinds[op]} and --{kind}.")
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


def _add_compare(commands: Any) -> None:  # noqa: ANN401
    from halfstep.bench.commands import positive_int

    parser = commands.add_parser(
        "compare",
        help="test over seeds whether levels train as well as fp32",
        usage="%(prog)s [--train FILE] [--out DIR] [flags]",
        description="Train in fp32 and at other levels, in pairs that start alike, and "
        "say for each level whether it is as good as fp32, by how much it is worse, or "
        "how many seeds it takes to know. Finished runs are stored in --out: the same "
        "command continues there, also with more levels or seeds.",
    )
    parser.add_argument(
        "--train",
        type=Path,
        metavar="FILE",
        help="settings of halfstep train, as for its --config: task, data, model, "
        "epochs; the resolved.toml of a run, too (default: the built-in sentences)",
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        default=["O1", "O2"],
        metavar="LEVEL",
        help="O1 to O3; after a colon each, bf16 or fp16, form of the master weights, "
        "loss_scale=: O2:split O1:fp16 O1:fp16:loss_scale=none (default O1 O2)",
    )
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=5,
        metavar="N",
        help="pairs of runs of each level, 2 or more (default 5)",
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help="largest difference of the score that counts as none (default: 1 %% of "
        "fp32's score)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="folder of the runs and of report.html (default runs/compare)",
    )
    _add_json(parser)
    parser.set_defaults(command=_compare)


def _compare(arguments: argparse.Namespace) -> None:
    from halfstep.parity.candidate import parse_all
    from halfstep.parity.compare_levels import run_comparison
    from halfstep.train.dependencies import TO_TRAIN, check

    check("halfstep compare", TO_TRAIN)  # the next import needs some
    from halfstep.parity.train_workload import train_workload

    levels = parse_all(arguments.levels)
    try:
        result = run_comparison(
            train_workload(arguments.train),
            levels,
            arguments.seeds,
            margin=arguments.margin,
            out=arguments.out,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        advice = "the same command continues after the last finished run"
        sys.exit(print_error(f"interrupted; {advice}", 130))
    result.page(arguments.out / "report.html")
    _print_and_write(
        lambda width: "\n\n".join(
            [
                *(table.text(width).rstrip() for table in result.tables()),
                f"report: {arguments.out / 'report.html'}",
            ]
        ),
        result.data,
        arguments.json,
    )


def _add_env(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "env",
        help="print the 16-bit speed of this machine and the recommended level",
        description="Print what this machine has, the measured rates of matmuls, and "
        "the recommended level and dtype.",
    )
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="measure again instead of using cached rates",
    )
    _add_json(parser)
    parser.set_defaults(command=_env)


def _env(arguments: argparse.Namespace) -> None:
    from halfstep.machine import hardware

    _show(hardware.tables(refresh=arguments.refresh), arguments.json)


def _add_levels(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "levels",
        help="print the levels O0 to O3 as a table",
        description="Print what each level stores and computes in 16 bits.",
    )
    _add_json(parser)
    parser.set_defaults(command=_levels)


def _levels(arguments: argparse.Namespace) -> None:
    from halfstep.policy import levels

    _show([levels.table()], arguments.json)
