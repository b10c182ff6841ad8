"""What holds for every test: a private cache, and marks by what a test does."""

import os
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from process_starts import starts_processes

RATES = '{"cpu": {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}}'
"""GEMM rates of every machine, in TFLOP/s."""

TESTS = Path(__file__).parent

# Programs that a test runs; they import what it puts there.
collect_ignore = ["support/apex_programs"]

# A busy machine may take any time over one example; a slow test is no wrong one. The
# same examples each time: what passed once passes again. `--hypothesis-profile=explore`
# draws others.
settings.register_profile("halfstep", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("halfstep")


_NUMERIC = {
    "casting": """
        autocast autocast_checkpoint autocast_defects autocast_policies
        autocast_torch_lists convert_model custom_functions
        custom_functions_autograd dispatch_kernels dtype_mismatch grad_accumulation
        weight_cache
    """,
    "compat": "apex_casts",
    "diagnostics": """
        planted_faults preflight_rules probe replay replay_losses
        replay_odd
    """,
    "masters": """
        bf16_codecs cpu_kernels master masters_direct masters_forms
        optimizer_in_backward
    """,
    "nonfinite": "graph optimizer_eps",
    "numerics": "exponents tensor_stats",
    "policy": "decisions levels op_tables",
    "scaling": "scaler",
    "session": "autocast_contexts running_stats session_grad session_traps",
}
NUMERIC = {
    f"{package}/test_{name}"
    for package, names in _NUMERIC.items()
    for name in names.split()
}
"""Test files that compute in 16 bits: marked `numeric`."""


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, Any, list[pytest.Collector]]:
    """Look for no examples in docstrings of tests."""
    collectors = yield
    return [each for each in collectors if type(each).__name__ != "DoctestModule"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--third",
        action="append",
        default=[],
        metavar="MARK",
        help="of the tests with this mark, run a fixed third",
    )


def is_left_out(item: pytest.Item) -> bool:
    """Return whether an item is one of the two thirds that `--third` leaves out."""
    if not any(map(item.get_closest_marker, item.config.option.third)):
        return False
    return zlib.crc32(item.nodeid.encode()) % 3 > 0  # the same on every machine


@pytest.hookimpl(tryfirst=True)  # before pytest asks for marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark what is numeric and what starts processes; put files with these first.

    Skip what needs a GPU where there is none, and say so.
    """
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        name = item.path.relative_to(TESTS).with_suffix("").as_posix()
        if name in NUMERIC:
            item.add_marker("numeric")
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("integration")
    left_out = list(filter(is_left_out, items))
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(item)]
    # What takes longest comes first: the processes of xdist end together.
    long = {item.path for item in items if item.get_closest_marker("integration")}
    items.sort(key=lambda item: item.path not in long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device, or none asked for by `-m gpu`")
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
        here = [str(TESTS.parent), str(TESTS / "support")]
        there = os.environ.get("PYTHONPATH")
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([*here, *([there] if there else [])])
        )
        cache = str(tmp_path_factory.mktemp("rows"))
        patch.setenv("HF_DATASETS_CACHE", cache)
        if "datasets" in sys.modules:  # which has read the variable
            patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        yield
