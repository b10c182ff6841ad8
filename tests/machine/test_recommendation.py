"""Words to a level and a format: every pair, with the reason or the refusal."""

from itertools import product
from typing import Any

import pytest
import torch
from data_files import refused

from halfstep.machine import Recommendation, hardware
from halfstep.machine.recommendation import resolve
from halfstep.numerics import formats
from halfstep.numerics.formats import BF16, FP16, FP32
from halfstep.policy import levels
from halfstep.policy.levels import LEVELS, O0, O1, O2, O3

DEVICES = ("cpu", "cuda")


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    def recommend(device: str) -> Recommendation:
        return Recommendation("O1", "fp16", f"a coin was tossed on the {device}")

    monkeypatch.setattr(hardware, "recommend", recommend)
    monkeypatch.setattr(
        hardware, "native", lambda name, _where: "" if name == "bf16" else "7.5"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_all_auto_asks_the_machine(device: str) -> None:
    """Law: with nothing fixed, level, format and reason are the machine's."""
    choice = resolve("auto", "auto", device)
    assert (choice.level, choice.format) == (O1, FP16)
    assert choice.reason == f"a coin was tossed on the {device}"
    assert str(choice) == "O1 fp16"


@pytest.mark.parametrize(
    ("dtype", "level"), [("fp32", O0), ("bf16", O2), ("fp16", O2), (torch.half, O2)]
)
def test_level_follows_from_dtype(
    dtype: str | torch.dtype, level: levels.Level
) -> None:
    """Law: a 16-bit format asks for O2, fp32 for O0, whatever the machine says."""
    choice = resolve("auto", dtype, "cpu")
    assert (choice.level, choice.format) == (level, formats.parse(dtype))
    assert choice.reason == f"dtype {choice.format} was asked for"


@pytest.mark.parametrize("level", [O1, O2, O3], ids=str)
def test_dtype_follows_from_level(
    level: levels.Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: bf16, unless the device is a GPU without it."""
    assert resolve(str(level), "auto", "cpu").format is BF16
    assert resolve(str(level), "auto", "cuda").format is FP16
    monkeypatch.setattr(hardware, "native", lambda _name, _where: "8.0")
    choice = resolve(str(level), "auto", "cuda")
    assert (choice.level, choice.format) == (level, BF16)
    assert choice.reason == f"level {level} was asked for"


PAIRS = [*product(LEVELS.values(), (FP32, BF16, FP16))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("level", "dtype"), PAIRS, ids=str)
def test_both_given(level: Any, dtype: formats.FloatFormat, device: str) -> None:
    """Law: what was asked for is taken; fp32 above O0 is refused; O0 takes any."""
    if level is not O0 and dtype is FP32:
        assert refused(resolve, str(level), str(dtype), device) == (
            f"level={level} needs dtype bf16 or fp16; fp32 training is level O0."
        )
        return
    choice = resolve(str(level), str(dtype), device)
    runs_in = FP32 if level is O0 else dtype
    assert (choice.level, choice.format) == (level, runs_in)
    assert str(choice) == f"{level} {runs_in}"
    no_effect = f"; dtype={dtype} has no effect: O0 is fp32 throughout"
    if level is O0:
        more = "" if dtype is FP32 else no_effect
        assert choice.reason == f"level O0 was asked for{more}"
