"""What holds for every program here: planted rates, and no process group after it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from halfstep.machine import hardware


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plant rates, and end what processes a program has joined."""
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
