"""Shows how far a long task is: reading, tokenizing, evaluating."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, TypeVar

from halfstep.distributed import process_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sized

T = TypeVar("T", bound="Sized")

_DELAY = 2.0  # seconds; a shorter task shows nothing
_MANY_TEXTS = 2_000  # a linear model of fewer takes seconds
_INTERVAL = 10.0  # seconds between lines on a pipe


def track(
    parts: Iterable[T], name: str, unit: str, total: int | None = None
) -> Iterator[T]:
    """Yield the parts of a task; `counter` shows how many, as their lengths add up."""
    with counter(name, unit, total) as advance:
        for part in parts:
            yield part
            advance(len(part))


@contextlib.contextmanager
def counter(
    name: str, unit: str, total: int | None = None
) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with how many units of a task were done since.

    The first rank shows the sum on standard error: a bar on a terminal, otherwise a
    line every ten seconds. Not on standard output, where a command may print JSON.

    Args:
        name: What is done, such as "tokenizing".
        unit: What is counted, in the plural.
        total: Sum of all counts, if known.
    """
    if process_group.rank() > 0:
        yield lambda _: None
        return
    if sys.stderr.isatty():
        from tqdm import tqdm

        words = {"desc": name, "unit": f" {unit}", "delay": _DELAY}
        with tqdm(total=total, leave=False, file=sys.stderr, **words) as bar:
            yield bar.update
        return
    began, done = time.perf_counter(), 0
    next_line = began + _DELAY

    def advance(count: int) -> None:
        nonlocal done, next_line
        done += count
        now = time.perf_counter()
        if now < next_line:
            return
        next_line = now + _INTERVAL
        of, left, rate = "", "", done / (now - began)
        if total is not None:
            of = f" of {total:,}"
            left = f"  {(total - done) / max(rate, 1e-9):.0f} s left"
        _print(f"{name}: {done:,}{of} {unit}, {rate:,.1f}/s{left}")

    yield advance


def announce(name: str, count: int) -> None:
    """Show on the first rank a task of many texts that cannot tell how far it is."""
    if process_group.rank() == 0 and count >= _MANY_TEXTS:
        _print(f"{name} to {count:,} texts ...")


def _print(line: str) -> None:
    # A closed pipe must not end the training.
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201
