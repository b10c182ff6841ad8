"""Where the time of a step goes.

In: regions of a program. Out: seconds, by what they went to.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Timers:
    """Seconds by what they went to.

    On a GPU these are the host's: work goes on after the region that began it, and the
    region that waits for it is charged.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the time of the region to a part."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.seconds[part] = self.seconds.get(part, 0.0) + spent
