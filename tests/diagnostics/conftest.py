"""What all tests of diagnostics share: planted rates, and one thread."""

from collections.abc import Iterator

import pytest
from small_training import one_thread

from halfstep.machine import hardware


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant rates: to measure them is not what is tested here."""
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: a second would only wait."""
    with one_thread():
        yield
