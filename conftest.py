"""Code blocks of Markdown pages are tests: what they say is run.

Blocks of a page share their names, in order, and a folder of their own.

- `python` is run. An HTML comment `invisible-code-block: python` holds set-up that a
  reader need not see.
- `output` is what the python block before it printed; `...` stands for any text.
- `console` has lines `$ command` and what they print. `halfstep`, `python FILE` and
  `torchrun` are run, in a process forked from one that has torch; output that is shown
  is compared as above. `make` is asked with -n, which runs nothing, whether the goal
  exists. A translated page whose commands and output are those of the English page does
  not run them again.
- `toml` and `json` are parsed; the added side of a `diff` is Python that
  compiles, and what it takes from halfstep exists.
- `text` is not run. A comment `skip: next "reason"` before a block skips it; a reason
  is required.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import gc
import io
import json
import logging
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forks import run_forked
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.myst import CodeBlockParser, SkipParser
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["messages"]
RATES = '{"cpu": {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}}'
"""GEMM rates of every machine, in TFLOP/s, so that pages print the same everywhere."""

ROOT = Path(__file__).parent
SOURCE = ROOT / "src"
COMMANDS = {"halfstep", "python", "torchrun"}
"""What a page may start; pip and git would change this machine."""

gc.disable()  # until all tests are collected
SCRATCH = tempfile.TemporaryDirectory(prefix="halfstep-docs-")


def same_text(expected: str, printed: str) -> str | None:
    """Return None, or a diff, of lines that may hold `...` for any text."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    checker = doctest.OutputChecker()
    if checker.check_output(expected, printed, flags):
        return None
    example = doctest.Example("", expected)
    return checker.output_difference(example, printed, flags | doctest.REPORT_NDIFF)


class RunPython(PythonEvaluator):
    """Runs a block and keeps what it prints, for the block of output after it."""

    def __call__(self, example: Example) -> str | None:
        """Run the block; an exception fails the test."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            super().__call__(example)
        example.namespace["_printed"] = printed.getvalue()
        return None


def compare_output(example: Example) -> str | None:
    """Compare a block with what the python block before it printed."""
    return same_text(example.parsed, example.namespace.get("_printed", ""))


@functools.cache
def is_translated(page: Path) -> bool:
    """Return whether all console blocks of a page are those of the page in English."""
    english = Path(str(page).replace("docs/zh/", "docs/").replace(".zh-CN", ""))
    if english == page:
        return False
    texts = [re.sub(r"#.*| +", " ", p.read_text("utf-8")) for p in (page, english)]
    block = re.compile(r"```console\n(.*?)```", re.DOTALL)
    return set(block.findall(texts[0])) <= set(block.findall(texts[1]))


def run_console(example: Example) -> str | None:
    """Run each `$ command` and compare what it prints where the page shows it."""
    before, *parts = ("\n" + example.parsed).split("\n$ ")
    if before.strip() or not parts:
        return "a console block begins with a line `$ command`, or nothing is run"
    if is_translated(Path(example.path)):
        return None
    return next(filter(None, map(run_command, parts)), None)


def run_command(part: str) -> str | None:
    """Run a command; compare what it prints with the lines after it, if any."""
    command, _, expected = part.replace("\\\n", " ").partition("\n")
    words = shlex.split(command, comments=True)
    added = {"WIDE_MATMULS": "1"}
    while words and "=" in words[0]:
        name, _, added[name] = words.pop(0).partition("=")
    if words[0] == "make":
        words[1:1] = ["-n", "-C", str(ROOT)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    elif words[0] in COMMANDS:
        name = words.pop(0)
        if name != "python":
            words.insert(0, str(Path(sys.executable).with_name(name)))
        for _attempt in range(3):
            (done,) = run_forked(*words, environments=[added], timeout=600)
            # torch's gloo aborts a process now and then, on a machine under load.
            if "SIGABRT" not in done.stderr:
                break
    else:
        return f"{words[0]!r} may not be run from a page: skip it with a reason"
    if done.returncode:
        return f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    # torch 2.9's gloo prints its connections on standard output.
    printed = re.sub(r"^\[Gloo\].*\n", "", done.stdout, flags=re.MULTILINE)
    return same_text(expected, printed) if expected.strip() else None


def compile_diff(example: Example) -> str | None:
    """Compile the added side of a diff, and look up what it takes from halfstep."""
    lines = example.parsed.splitlines()
    added = "\n".join(line[1:] for line in lines if not line.startswith(("-", "@@")))
    names = []
    for node in ast.walk(ast.parse(textwrap.dedent(added))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("halfstep"):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("hs."):
            names.append(ast.unparse(node).replace("hs.", "halfstep.", 1))
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            return f"{name}: {error}"
    return None


def parse_toml(example: Example) -> None:
    """Parse a block of TOML."""
    tomllib.loads(example.parsed)


def parse_json(example: Example) -> None:
    """Parse a block of JSON."""
    json.loads(example.parsed)


class SkipWithReason(SkipParser):
    """Skips a block, as sybil does, if the page says why."""

    def __call__(self, document: Document) -> Iterator[Region]:
        """Yield the comments that skip something; raise for one without a reason."""
        for region in super().__call__(document):
            action, reason = region.parsed
            if action != "end" and not re.search(r"\w", reason or ""):
                line = document.text.count("\n", 0, region.start) + 1
                message = f'{document.path}, line {line}: skip: {action} "reason"'
                raise ValueError(message)
            yield region


EVALUATORS = {
    "python": RunPython(),
    "output": compare_output,
    "console": run_console,
    "diff": compile_diff,
    "toml": parse_toml,
    "json": parse_json,
}


def wrap_nothing() -> None:
    """Wrap no output to a width, in this process or in programs that tests start.

    pytest imports readline, which puts COLUMNS and LINES into the environment of C:
    os.environ does not show them, yet workers of pytest-xdist and programs get them.
    """
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
        os.unsetenv(name)


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Begin with the same random numbers; end with torch's state as it was."""
    # torch.manual_seed notes the stack, for each kind of device that is not there.
    on_gpu = torch.cuda.is_available()
    (torch.manual_seed if on_gpu else torch.default_generator.manual_seed)(0)
    threads = torch.get_num_threads()
    yield
    left_on = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    threads_now = torch.get_num_threads()
    in_mode = _python_dispatch._is_in_torch_dispatch_mode
    # The next test must not pay for this one.
    for device in left_on:
        torch.set_autocast_enabled(device, False)  # noqa: FBT003 -- torch's own
    torch.set_num_threads(threads)
    flags = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
    vars(_python_dispatch).update(dict.fromkeys(flags, False))
    assert not left_on, f"the test left autocast on for {left_on}"
    assert threads_now == threads, f"the test left torch at {threads_now} threads"
    assert not in_mode, "the test left torch to think that a dispatch mode is entered"


def enter_folder(namespace: dict[str, Any]) -> None:
    """Before a page: an empty folder, a fixed seed, and rates that are not measured."""
    wrap_nothing()
    stack = contextlib.ExitStack()
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("HALFSTEP_RATES", RATES)
    patch.setenv("XDG_CACHE_HOME", str(Path(SCRATCH.name) / "cache"))
    patch.setenv("HF_DATASETS_CACHE", str(Path(SCRATCH.name) / "rows"))
    patch.chdir(tempfile.mkdtemp(dir=SCRATCH.name))
    stack.enter_context(nothing_left_behind())
    namespace.update(__name__="__main__", _stack=stack)


def leave_folder(namespace: dict[str, Any]) -> None:
    """After a page."""
    namespace["_stack"].close()


PARSERS = [
    SkipWithReason(),
    *(CodeBlockParser(name, evaluate) for name, evaluate in EVALUATORS.items()),
]

pytest_collect_file = Sybil(
    parsers=PARSERS,
    patterns=["*.md", "benchmarks/*.md", "docs/**/*.md", "docs/*.md"],
    excludes=[
        "docs/decisions/*.md",
        "docs/examples.md",  # generated from programs that are tests
    ],
    setup=enter_folder,
    teardown=leave_folder,
).pytest()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for examples only where there are some.

    pytest asks a module for each of its names, and the adapter of transformers would
    import all of that library: tests/compat/test_transformers.py runs its example.
    """
    if collection_path.suffix != ".py" or SOURCE not in collection_path.parents:
        return None
    is_library = collection_path == SOURCE / "halfstep" / "compat" / "transformers.py"
    return is_library or ">>> " not in collection_path.read_text("utf-8") or None


def pytest_configure(config: pytest.Config) -> None:
    """Give tests, and programs they start, one thread; GPUs to those marked `gpu`.

    Sums depend on how many threads share them. The other tests compare with a CPU.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Spare each test what has nothing to do with it.

    pytest gives each logger that does not propagate, of which torch has many, a handler
    for each phase of a test. No gc.freeze: hypothesis 6.100 finds examples flaky then.
    """
    for logger in logging.root.manager.loggerDict.values():
        logger.propagate = True
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_terminal() -> None:
    wrap_nothing()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield
