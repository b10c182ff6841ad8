"""amp's process-wide state, as each test finds it and leaves it.

In: nothing. Out: a state as before the first `initialize`, and afterwards too.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import fields

from halfstep.compat.apex.state import STATE, AmpState

LEVELS = ("O0", "O1", "O2", "O3")


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Begin with no amp; end with none, whatever happened."""
    try:
        yield
    finally:
        if STATE.handle is not None:
            STATE.handle.close()
        for field in fields(AmpState):
            setattr(STATE, field.name, getattr(AmpState(), field.name))
