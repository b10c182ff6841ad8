"""Candidates collect garbage before they are measured; here, only their own."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen_garbage() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
