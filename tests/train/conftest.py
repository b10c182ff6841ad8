"""What most tests of training share: one thread, and runs that take a moment."""

from collections.abc import Iterator

import pytest
import torch
from small_training import small_and_measured, without_figures


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sums depend on how many threads share them, and small models need one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        small_and_measured(patch)
        without_figures(patch)
        yield
