"""What all tests of diagnostics share: planted rates."""

import pytest

from halfstep.machine import hardware


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant rates: to measure them is not what is tested here."""
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
