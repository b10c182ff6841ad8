"""Measured rates on disk: reused under the same conditions, and under no others."""

import json
import math
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from halfstep.errors import UserError
from halfstep.machine import Capabilities, Gpu, cpu, gemm, hardware, rate_cache
from halfstep.machine.gemm import GemmRates
from halfstep.numerics import formats

RATES = {"fp32": 2.0, "bf16": 5.0, "fp16": 0.25}
MEASURED = GemmRates(RATES, dict.fromkeys(RATES, 0.05))
AMX = Capabilities("a processor", 8, 4, ("AVX512", "AMX-BF16"), (), "2.99")
DAY = 24 * 3600.0


class Machine:
    """A machine whose measurements are planted and counted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.found, self.now = folder, 0, MEASURED, 1e9

    def measure(self, _device: str) -> GemmRates:
        self.count += 1
        return replace(self.found, time=self.now)

    def time(self) -> float:
        return self.now

    def files(self) -> list[Path]:
        place = self.folder / "halfstep" / "rates"
        return sorted(place.iterdir()) if place.exists() else []


def new_process() -> None:
    hardware._process_rates.clear()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    planted = Machine(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HALFSTEP_RATES", raising=False)
    for name in cpu.INSTRUCTION_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "facts", dict)
    monkeypatch.setattr(hardware, "capabilities", lambda: AMX)
    monkeypatch.setattr(gemm, "measure", planted.measure)
    monkeypatch.setattr(hardware.time, "time", planted.time)
    monkeypatch.setattr(hardware, "_process_rates", {})
    return planted


def test_measured_once(here: Machine) -> None:
    """Law: one measurement a machine; the process and the disk both remember."""
    found = replace(MEASURED, time=1e9)
    assert hardware.measured_rates() == hardware.measured_rates("cpu") == found
    new_process()
    here.now += DAY
    assert hardware.measured_rates() == found
    assert here.count == 1
    assert [file.suffix for file in here.files()] == [".json"]


def _replaced(owner: object, name: str, value: object) -> Any:
    return lambda patch: patch.setattr(owner, name, lambda *_: value)


CARD = Gpu("a card", (8, 0), 2**34)
OTHERS: dict[str, Any] = {
    "processor": _replaced(hardware, "capabilities", replace(AMX, cpu="another")),
    "GPU": _replaced(hardware, "capabilities", replace(AMX, gpus=(CARD,))),
    "flags": _replaced(hardware, "capabilities", replace(AMX, instruction_sets=())),
    "host": _replaced(platform, "node", "another"),
    "limit": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "in use": _replaced(torch.backends.cpu, "get_cpu_capability", "DEFAULT"),
    "threads": _replaced(torch, "get_num_threads", 63),
    "torch": lambda patch: patch.setattr(torch, "__version__", "99.0"),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_conditions_are_measured_anew(
    change: Callable[[pytest.MonkeyPatch], None], here: Machine
) -> None:
    """Law: whatever decides the rates has an entry of its own, and none is lost."""
    hardware.measured_rates()
    slow = {"fp32": 2.0, "bf16": 0.026, "fp16": 0.02}
    here.found = replace(MEASURED, rates=slow)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        for _ in range(2):
            assert hardware.measured_rates().rates == slow
            new_process()
    assert hardware.measured_rates().rates == RATES
    assert here.count == 2
    assert len(here.files()) == 2


def test_refresh_measures_each_time(here: Machine) -> None:
    """Law: `refresh` measures whenever it is asked to, and the new figures stay."""
    hardware.measured_rates()
    here.found = replace(
        MEASURED, rates={name: 2 * rate for name, rate in RATES.items()}
    )
    assert hardware.measured_rates(refresh=True).rates == here.found.rates
    new_process()
    assert hardware.measured_rates().rates == here.found.rates
    assert here.count == 2


@pytest.mark.parametrize(("later", "count"), [(DAY, 1), (30 * DAY, 2), (-30 * DAY, 2)])
def test_old_rates_are_measured_again(later: float, count: int, here: Machine) -> None:
    """Law: rates serve 30 days at most; those from the future serve not at all."""
    hardware.measured_rates()
    new_process()
    here.now += later
    hardware.measured_rates()
    assert here.count == count


BROKEN = {
    "not UTF-8": b"\xff\xfe",
    "cut": b"{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
}
ALTERED: dict[str, Any] = {
    "word": {"rates": {"fp32": "fast", "bf16": 1, "fp16": 1}},
    "a format less": {"rates": {"fp32": 1.0}},
    "zero": {"rates": {"fp32": 0, "bf16": 1, "fp16": 1}},
    "nan": {"rates": {"fp32": math.nan, "bf16": 1, "fp16": 1}},
    "infinite": {"rates": {"fp32": 1, "bf16": math.inf, "fp16": 1}},
    "no time": {"time": None},
    "foreign": {"key": "another"},
}


@pytest.mark.parametrize("case", [*BROKEN, *ALTERED])
def test_broken_entry_is_replaced(case: str, here: Machine) -> None:
    """Law: a file that holds anything but rates of here counts as absent."""
    hardware.measured_rates()
    (file,) = here.files()
    if case in BROKEN:
        file.write_bytes(BROKEN[case])
    else:
        file.write_text(json.dumps(json.loads(file.read_text()) | ALTERED[case]))
    for _ in range(2):
        new_process()
        assert hardware.measured_rates() == replace(MEASURED, time=1e9)
    assert here.count == 2
    assert here.files() == [file]


def test_unwritable_cache_is_told(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where nothing can be kept, each process measures once and says why."""
    (here.folder / "file").touch()
    # A path through a file can be made by nobody, not even by root.
    monkeypatch.setenv("XDG_CACHE_HOME", str(here.folder / "file"))
    for processes in (1, 2):
        new_process()
        assert hardware.measured_rates() is hardware.measured_rates()
        assert "cannot be written" in hardware.measured_rates().why_not_cached
        assert here.count == processes


def test_user_without_a_home(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a container's nameless user trains all the same, and is told what to set."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    no_home = RuntimeError("Could not determine home directory.")
    monkeypatch.setattr(Path, "home", Mock(side_effect=no_home))
    assert hardware.measured_rates().why_not_cached == (
        "the cache folder cannot be written: this user has no home folder; "
        "set XDG_CACHE_HOME"
    )
    assert here.count == 1


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: XDG_CACHE_HOME, and without it (or empty) ~/.cache, hold the figures."""
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert rate_cache.folder() == Path("/elsewhere/halfstep/rates")
    for gone in (monkeypatch.delenv, lambda name: monkeypatch.setenv(name, "")):
        gone("XDG_CACHE_HOME")
        assert rate_cache.folder() == Path("/somebody/.cache/halfstep/rates")


def test_threads_measure_one_after_the_other(here: Machine) -> None:
    """Law: threads that ask at once share one measurement."""
    threads = [threading.Thread(target=hardware.measured_rates) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert here.count == 1


def test_oldest_files_go(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the folder does not grow: jobs on ever new processors leave few files."""
    monkeypatch.setattr(rate_cache, "MAX_FILES", 3)
    for number in range(5):
        rate_cache.save(f"host {number}", replace(MEASURED, time=1e9))
        for file in here.files():  # a second passes
            age = file.stat().st_mtime - 1
            os.utime(file, (age, age))
    left = [number for number in range(5) if rate_cache.load(f"host {number}")]
    assert left == [2, 3, 4]


def test_rates_that_are_given(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: HALFSTEP_RATES replaces the measurement, of the devices that it names."""
    monkeypatch.setenv("HALFSTEP_RATES", json.dumps({"cpu": RATES}))
    given = hardware.measured_rates("cpu")
    assert (given.rates, given.why_not_cached) == (RATES, "set by HALFSTEP_RATES")
    assert hardware.tables()[1].rows[0][5] == "-"  # nobody knows when
    assert here.count == 0
    monkeypatch.setenv("HALFSTEP_RATES", '{"cuda": {"fp32": 1}}')
    hardware.measured_rates("cpu")
    assert here.count == 1


def test_bad_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an environment that tells no rates is refused, with what would be right."""
    rates = '{"cpu": {"fp32": 1, "bf16": %s, "fp16": 1}}'
    cut = '{"cpu": {"fp32": 1}}'
    for word in ("x", "[]", '{"cpu": 1}', cut, rates % "0", rates % "NaN"):
        monkeypatch.setenv("HALFSTEP_RATES", word)
        with pytest.raises(UserError, match=r"holds no rates; it must look like \{"):
            hardware.measured_rates("cpu")


@pytest.mark.gpu
def test_gpu_is_measured() -> None:
    """Law: on a real GPU every format has a positive, finite rate."""
    found = hardware.measured_rates("cuda", refresh=True).rates
    assert found.keys() == formats.FORMATS.keys()
    assert all(0 < rate < math.inf for rate in found.values())
