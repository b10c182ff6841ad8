"""What holds for every program here: no process group after it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """End what processes a program has joined."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
