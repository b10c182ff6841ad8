"""Shows how far a long task is: reading, tokenizing, evaluating."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, TypeVar

from halfstep.distributed import process_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

T = TypeVar("T", bound="Sized")

_DELAY = 2.0  # seconds; a shorter task shows nothing
_INTERVAL = 10.0  # seconds between lines on a pipe


def track(
    parts: Iterable[T], name: str, unit: str, total: int | None = None
) -> Iterator[T]:
    """Yield the parts of a task; the first rank shows on standard error what is done.

    A bar on a terminal, otherwise a line every ten seconds. Not on standard output,
    where a command may print JSON.

    Args:
        parts: Their lengths are counted.
        name: What is done, such as "tokenizing".
        unit: What the lengths count, in the plural.
        total: Sum of all lengths, if known.
    """
    if process_group.rank() > 0:
        yield from parts
    elif sys.stderr.isatty():
        from tqdm import tqdm

        words = {"desc": name, "unit": f" {unit}", "delay": _DELAY}
        with tqdm(total=total, leave=False, file=sys.stderr, **words) as bar:
            for part in parts:
                yield part
                bar.update(len(part))
    else:
        began, done = time.perf_counter(), 0
        next_line = began + _DELAY
        for part in parts:
            yield part
            done += len(part)
            now = time.perf_counter()
            if now >= next_line:
                next_line = now + _INTERVAL
                of, left = "", ""
                if total is not None:
                    of = f" of {total:,}"
                    left = (
                        f"  {(now - began) / max(1, done) * (total - done):.0f} s left"
                    )
                # A closed pipe must not end the training.
                with contextlib.suppress(BrokenPipeError):
                    line = f"{name}: {done:,}{of} {unit}{left}"
                    print(line, file=sys.stderr, flush=True)  # noqa: T201
