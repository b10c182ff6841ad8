"""What holds for every test: a fixed seed, a private cache, and nothing left behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

RATES = '{"cpu": {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}}'
"""GEMM rates of every machine, in TFLOP/s."""

# Programs that a test runs; they import what it puts there.
collect_ignore = ["apex_programs"]

# A busy machine may take any time over one example; a slow test is no wrong one. The
# same examples each time: what passed once passes again. `--hypothesis-profile=explore`
# draws others.
settings.register_profile("halfstep", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("halfstep")


NUMERIC = {
    *("test_apex_casts", "test_autocast_defects", "test_autocast_gaps"),
    *("test_autocast_torch_lists", "test_autopsy", "test_cast_cache_gradients"),
    *("test_casting", "test_casting_checkpoint", "test_casting_policies"),
    *("test_chunked", "test_convert", "test_convert_norms", "test_decisions"),
    *("test_emulated", "test_exponents", "test_fidelity", "test_fold", "test_forward"),
    *("test_functions", "test_functions_autograd", "test_functions_operators"),
    *("test_isolated_passes", "test_kahan", "test_kernels", "test_levels"),
    *("test_logmax", "test_master", "test_masters_direct", "test_masters_forms"),
    *("test_mismatch", "test_native", "test_optable_lean", "test_optable_results"),
    *("test_planted_faults", "test_preflight_models", "test_probe", "test_release"),
    *("test_replay", "test_replay_losses", "test_replay_sums", "test_scaler"),
    *("test_session_traps", "test_split", "test_stochastic", "test_tensor_stats"),
    "test_twin",
}
"""Test files that compute in 16 bits: marked `numeric`."""


@pytest.hookimpl(tryfirst=True)  # before pytest asks for marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is numeric; skip what needs a GPU where there is none, and say so."""
    for item in items:
        if item.path.stem in NUMERIC:
            item.add_marker("numeric")
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
        # For programs that a test starts too: no test depends on what is fast here.
        patch.setenv("HALFSTEP_RATES", RATES)
        patch.setenv("HALFSTEP_CACHE", str(tmp_path_factory.mktemp("rows")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_terminal() -> None:
    """Wrap no output to a width, in this process or in programs that tests start.

    pytest imports readline, which puts COLUMNS and LINES into the environment of C:
    os.environ does not show them, yet workers of pytest-xdist and programs get them.
    """
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
        os.unsetenv(name)


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
