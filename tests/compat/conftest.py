"""amp's process-wide state is fresh in each test of apex's interface."""

from collections.abc import Iterator

import pytest
from apex_programs.process import fresh


@pytest.fixture(autouse=True)
def fresh_amp() -> Iterator[None]:
    with fresh():
        yield
