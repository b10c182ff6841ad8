"""A stack per thread, for context managers that several threads enter at once."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThreadStack(Generic[T]):
    """A stack for each thread; a thread without entries pops from another thread's.

    Why: a generator with an open context may be finished, or garbage-collected, in
    another thread than it was started in.

    Copies (`copy.deepcopy`, `pickle`) are empty.
    """

    def __init__(self) -> None:
        # Keyed by the thread object: thread ids are reused after a thread ends.
        self._stacks: dict[threading.Thread, list[T]] = {}

    def __reduce__(self) -> tuple[type[PerThreadStack[T]], tuple[()]]:
        return PerThreadStack, ()

    def __bool__(self) -> bool:
        return any(list(self._stacks.values()))

    def push(self, entry: T) -> None:
        """Push an entry of this thread."""
        self._stacks.setdefault(threading.current_thread(), []).append(entry)

    def pop_own(self) -> T | None:
        """Pop the last entry of this thread; None if it has none."""
        return self._pop_of(threading.current_thread())

    def pop(self) -> T:
        """Pop the last entry of this thread, else of another, ended threads first.

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
        # Another thread may pop concurrently, so no earlier check is relied on.
        entry = stack.pop() if stack else None
        if not stack:
            self._stacks.pop(thread, None)
        return entry
