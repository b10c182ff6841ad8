"""What all tests of parity share: one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from small_training import one_thread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
