"""What was entered through one context manager, by any number of threads.

In: what `__enter__` made. Out: it again for the `__exit__` that belongs to it.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThreadStack(Generic[T]):
    """A stack for each thread; a thread without entries takes another thread's last.

    Why the latter: a generator that holds a context open may be finished, or collected,
    in another thread than it was started in.

    A copy, as `copy.deepcopy` or `pickle` makes of what holds one, is empty.
    """

    def __init__(self) -> None:
        # By the thread itself: another one may get the number of one that has ended.
        self._stacks: dict[threading.Thread, list[T]] = {}

    def __reduce__(self) -> tuple[type[PerThreadStack[T]], tuple[()]]:
        return PerThreadStack, ()

    def __bool__(self) -> bool:
        return any(list(self._stacks.values()))

    def push(self, entry: T) -> None:
        """Add an entry of this thread."""
        self._stacks.setdefault(threading.current_thread(), []).append(entry)

    def pop_own(self) -> T | None:
        """Return and drop the last entry of this thread; None if it has none."""
        return self._pop_of(threading.current_thread())

    def pop(self) -> T:
        """Return and drop the last entry of this thread, else of another.

        Of others, one that has ended comes first.

        Raises:
            IndexError: If there is none.
        """
        current = threading.current_thread()
        others = sorted(self._stacks, key=threading.Thread.is_alive)
        for thread in (current, *others):
            entry = self._pop_of(thread)
            if entry is not None:
                return entry
        message = "a context was closed more often than it was opened"
        raise IndexError(message)

    def _pop_of(self, thread: threading.Thread) -> T | None:
        stack = self._stacks.get(thread)
        if stack is None:
            return None
        # Another thread may be closing the same: nothing is asked before.
        entry = stack.pop() if stack else None
        if not stack:
            self._stacks.pop(thread, None)
        return entry
