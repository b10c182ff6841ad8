"""amp's process-wide state is fresh in each test of apex's interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from apex_programs.process import fresh

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def fresh_amp() -> Iterator[None]:
    with fresh():
        yield
