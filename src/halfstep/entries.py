"""What was entered through one context manager, by any number of threads.

In: what `__enter__` made. Out: it again for the `__exit__` that belongs to it.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Entries(Generic[T]):
    """A stack for each thread; a thread without entries takes another thread's last.

    Why the latter: a generator that holds a context open may be finished, or collected,
    in another thread than it was started in.

    A copy, as `copy.deepcopy` or `pickle` makes of what holds one, is empty.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, list[T]] = {}

    def __reduce__(self) -> tuple[type[Entries[T]], tuple[()]]:
        return Entries, ()

    def __bool__(self) -> bool:
        return any(list(self._stacks.values()))

    @property
    def own(self) -> list[T]:
        """This thread's entries, the last at the end."""
        return self._stacks.setdefault(threading.get_ident(), [])

    def push(self, entry: T) -> None:
        """Add an entry of this thread."""
        self.own.append(entry)

    def pop(self) -> T:
        """Return and drop the last entry of this thread, else of another.

        Raises:
            IndexError: If there is none.
        """
        # Each `pop` either succeeds or finds the list empty: nothing is asked before.
        for stack in (self.own, *list(self._stacks.values())):
            try:
                return stack.pop()
            except IndexError:
                continue
        message = "a context was closed more often than it was opened"
        raise IndexError(message)
