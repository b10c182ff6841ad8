"""What holds for every test: a fixed seed, a private cache, and nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from halfstep import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

# Programs that a test runs; they import what it puts there.
collect_ignore = ["apex_programs"]

# A busy machine may take any time over one example; a slow test is no wrong one. The
# same examples each time: what passed once passes again. `--hypothesis-profile=explore`
# draws others.
settings.register_profile("halfstep", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("halfstep")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured rates, and rows and tokens, away from the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HALFSTEP_CACHE", str(tmp_path_factory.mktemp("rows")))
        yield


_measured = machine.gemm_rates


@pytest.fixture(autouse=True, scope="session")
def _same_rates() -> Iterator[None]:
    """Give every machine the same GEMM rates: what is slow here must change no test.

    A test about rates plants its own; programs that a test starts measure theirs.
    """
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "gemm_rates", lambda *_, **__: dict(rates))
        yield


@pytest.fixture
def measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure GEMM rates as programs do."""
    monkeypatch.setattr(machine, "gemm_rates", _measured)


@pytest.fixture
def any_machine() -> None:
    """Train in any format, itself, without a word about how slow it is here."""


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Begin with the same random numbers; end with torch's state as it was."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    left_on = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    threads_now = torch.get_num_threads()
    # The next test must not pay for this one.
    for device in left_on:
        torch.set_autocast_enabled(device, False)  # noqa: FBT003 -- torch's own
    torch.set_num_threads(threads)
    assert not left_on, f"the test left autocast on for {left_on}"
    assert threads_now == threads, f"the test left torch at {threads_now} threads"
