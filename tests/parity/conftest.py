"""What all tests of parity share: one thread."""

from collections.abc import Iterator

import pytest
from small_training import one_thread


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
