"""What most tests of training share: runs that take a moment."""

from collections.abc import Iterator

import pytest
from small_training import small_and_measured, without_figures


@pytest.fixture(scope="module")
def small_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_and_measured(patch)
        without_figures(patch)
        yield
