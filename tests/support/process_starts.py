"""Which tests start processes: seen in what they, their fixtures and helpers name."""

import functools
import inspect
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
from forks import run_forked

TESTS = Path(__file__).parent.parent
STARTERS = {
    *(run_forked, os.fork, subprocess.run, subprocess.Popen, ProcessPoolExecutor),
    *(multiprocessing.Process, torch.multiprocessing.spawn),
}


def starts_processes(test: pytest.Function) -> bool:
    """Return whether a test, or a fixture of it, starts a process."""
    fixtures = test._fixtureinfo.name2fixturedefs.values()
    return any(map(starts, [test.function, *(each[-1].func for each in fixtures)]))


@functools.cache
def starts(function: Callable[..., Any]) -> bool:
    """Return whether a function of the tests starts a process, or calls what does."""
    waiting, seen = [function], set[Any]()
    while waiting:
        called = inspect.unwrap(waiting.pop())
        if called in STARTERS:
            return True
        if called not in seen:
            seen.add(called)
            waiting += _called(called)
    return False


def _called(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield functions and classes that a function of the tests names."""
    code = getattr(function, "__code__", None)
    if code is None or TESTS not in Path(code.co_filename).parents:
        return
    names = set(_names(code))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        inside = vars(value) if isinstance(value, ModuleType) else {name: value}
        for each in names & inside.keys():
            if inspect.isroutine(inside[each]) or inspect.isclass(inside[each]):
                yield inside[each]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
