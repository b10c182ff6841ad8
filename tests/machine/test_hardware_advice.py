"""The advice that follows from a machine's rates: plain tables, and never slower."""

import platform

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.machine import Capabilities, Gpu, Recommendation, hardware
from halfstep.machine.cpu import INSTRUCTION_LIMITS
from halfstep.machine.gemm import GemmRates

RATES = {"fp32": 2.0, "bf16": 5.0, "fp16": 0.25}
GB = 2**30


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INSTRUCTION_LIMITS:
        monkeypatch.delenv(name, raising=False)


def cpu(*instruction_sets: str) -> Capabilities:
    """Return a machine without a GPU."""
    return Capabilities("a processor", 8, 4, instruction_sets, (), "2.99")


def gpu(*capability: int) -> Capabilities:
    major, minor = capability
    card = Gpu("a card", (major, minor), 16 * GB)
    return Capabilities("a processor", 8, 4, ("AMX-BF16",), (card,), "2.99")


AMX = cpu("AVX512", "AVX512-BF16", "AMX-BF16")


def plant(
    patch: pytest.MonkeyPatch, what: Capabilities, rates: dict[str, float]
) -> None:
    patch.setattr(hardware, "capabilities", lambda: what)
    patch.setattr(hardware, "gemm_rates", lambda _device=None: dict(rates))


def rates(fp32: float, bf16: float, fp16: float) -> dict[str, float]:
    return {"fp32": fp32, "bf16": bf16, "fp16": fp16}


def fast(dtype: str, times: str, where: str) -> Recommendation:
    reason = f"{dtype} matmuls run {times} times as fast as fp32 on this {where}"
    return Recommendation("O2", dtype, reason)


def slow(share: str, where: str) -> Recommendation:
    reason = (
        f"bf16 matmuls run at {share} of fp32's rate on this {where}; 1.5 is the least "
        "that pays for the casts"
    )
    return Recommendation("O0", "fp32", reason)


NONE, CC = "(no bf16 instructions)", "cuda (compute capability {})"
BF16 = "cpu (AVX512-BF16)"
ADVICE = {
    "AMX": (AMX, rates(2, 8, 2), fast("bf16", "4.0", "cpu (AVX512-BF16, AMX-BF16)")),
    "emulated": (cpu("AVX512"), rates(2, 0.5, 0.02), slow("0.25", f"cpu {NONE}")),
    "not worth it": (cpu("AVX512-BF16"), rates(2, 2.9, 2), slow("1.45", BF16)),
    "flags unknown": (cpu(), rates(2, 6, 2), fast("bf16", "3.0", "cpu")),
    "fp16 on a CPU": (cpu("AVX512-FP16"), rates(2, 2, 8), slow("1.00", f"cpu {NONE}")),
    "GPU 6.1": (gpu(6, 1), rates(10, 10, 20), slow("1.00", f"cuda {NONE}")),
    "GPU 7.5": (gpu(7, 5), rates(8, 16, 40), fast("fp16", "5.0", CC.format(7.5))),
    "GPU 9.0": (gpu(9, 0), rates(5, 70, 70), fast("bf16", "14.0", CC.format(9.0))),
}


@pytest.mark.parametrize(("what", "rate", "advice"), ADVICE.values(), ids=ADVICE)
def test_advice(
    what: Capabilities,
    rate: dict[str, float],
    advice: Recommendation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: bf16 where it is fast, fp16 only on a GPU without bf16, else fp32."""
    plant(monkeypatch, what, rate)
    assert hardware.recommend() == advice
    assert hardware.recommend(what.device) == advice


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_advice_elsewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of other devices the rates alone decide, and not what the processor has."""
    plant(monkeypatch, AMX, rates(2, 4, 8))
    assert hardware.recommend(device) == Recommendation(
        "O2", "bf16", f"bf16 matmuls run 2.0 times as fast as fp32 on this {device}"
    )
    plant(monkeypatch, AMX, rates(2, 2, 8))
    advice = hardware.recommend(device)
    assert (advice.level, advice.dtype) == ("O0", "fp32")
    assert f"rate on this {device}; " in advice.reason
    plant(monkeypatch, AMX, rates(2, 1, 8))
    warning = hardware.emulation_warning("bf16", device) or ""
    assert "fp32 at 2.000: expect 2.0 times the time" in warning


RATE = st.floats(1e-3, 1e3)
MACHINES = st.sampled_from([AMX, cpu(), gpu(6, 1), gpu(7, 0), gpu(8, 0), gpu(10, 3)])


@given(what=MACHINES, fp32=RATE, bf16=RATE, fp16=RATE)
def test_advice_is_never_slower(
    what: Capabilities, fp32: float, bf16: float, fp16: float
) -> None:
    """Law: a 16-bit format is advised only where it was measured to be worth it."""
    rate = rates(fp32, bf16, fp16)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, what, rate)
        advice = hardware.recommend()
    assert advice.level == ("O0" if advice.dtype == "fp32" else "O2")
    if advice.dtype != "fp32":
        assert rate[advice.dtype] / fp32 >= hardware.WORTH_IT > 1
    if not what.gpus:
        assert (advice.dtype == "bf16") == (bf16 / fp32 >= hardware.WORTH_IT)


def test_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: fp16 tensor cores came with 7.0, bf16 ones with 8.0; 10 is after 8.

    On a CPU only instruction sets of the format itself count.
    """
    for where, bf16, fp16 in (
        (gpu(6, 1), "", ""),
        (gpu(7, 0), "", "compute capability 7.0"),
        (gpu(7, 5), "", "compute capability 7.5"),
        (gpu(8, 0), *["compute capability 8.0"] * 2),
        (gpu(10, 0), *["compute capability 10.0"] * 2),
        (cpu("AVX512", "AVX512-BF16", "NEON-FP16"), "AVX512-BF16", "NEON-FP16"),
        (cpu("AVX512"), "", ""),
    ):
        plant(monkeypatch, where, RATES)
        assert (hardware.native("bf16"), hardware.native("fp16")) == (bf16, fp16)
        if where.gpus:
            assert hardware.native("bf16", "cpu") == "AMX-BF16"


def test_emulation_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a format slower than fp32 is named with both rates, cause and remedy."""
    plant(monkeypatch, cpu("AVX512"), rates(0.5, 0.125, 0.5))
    assert hardware.emulation_warning("bf16") == (
        "dtype=bf16: this cpu runs bf16 matmuls at 0.125 TFLOP/s, fp32 at "
        "0.500 (it has no instructions for it): expect 4.0 times the time. "
        "Use level O0."
    )
    assert hardware.emulation_warning("fp16") is None
    assert hardware.emulation_warning("fp32") is None
    plant(monkeypatch, cpu("AVX512-FP16"), rates(1.0, 1.0, 0.1))
    assert hardware.emulation_warning("fp16", "cpu") == (
        "dtype=fp16: this cpu runs fp16 matmuls at 0.100 TFLOP/s, fp32 at "
        "1.000 (although it has AVX512-FP16): expect 10.0 times the time. "
        "Use level O0."
    )
    plant(monkeypatch, cpu("AVX512-BF16"), rates(1.0, 2.0, 0.1))
    assert (hardware.emulation_warning("fp16") or "").endswith("Use dtype='bf16'.")


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where instructions are limited, what the CPU has is not the whole cause."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    plant(monkeypatch, cpu("AVX512-BF16"), rates(1.0, 0.1, 1.0))
    limits = "ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2"
    limited = f"AVX512-BF16, limited by {limits}"
    assert f"(although it has {limited})" in (hardware.emulation_warning("bf16") or "")
    assert f"({limited})" in hardware.recommend().reason
    plant(monkeypatch, cpu(), rates(1.0, 0.1, 1.0))
    assert "(no bf16 instructions)" in hardware.recommend().reason


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the tables show rates over fp32's, spread and age, limits and the advice."""
    planted = {"cuda": rates(10, 150, 160), "cpu": rates(2, 1, 0.5)}
    plant(monkeypatch, gpu(8, 0), planted["cuda"])
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setattr(hardware.time, "time", lambda: 1e9)
    ages = {"cuda": 3 * 86400 + 5, "cpu": 0}
    asked: list[tuple[str, bool]] = []

    def measured(where: str, *, refresh: bool = False) -> GemmRates:
        asked.append((where, refresh))
        spread = dict(zip(RATES, (0.1, 0.2, 0.3), strict=True))
        return GemmRates(planted[where], spread, 0.0, time=1e9 - ages[where])

    monkeypatch.setattr(hardware, "measured_rates", measured)
    facts, shown, advice = hardware.tables(refresh=True)
    assert {row[0]: row[1] for row in facts.rows} == {
        "processor": "a processor",
        "cores": "8",
        "Python": platform.python_version(),
        "torch": "2.99, 4 threads",
        "instruction sets": "AMX-BF16",
        "instruction limits": "MKL_CBWR=AVX2",
        "GPU": "a card, compute capability 8.0, 16 GiB",
    }
    old, new = "3 days ago", "now"
    assert shown.columns[3:6] == ("x fp32", "spread", "measured")
    assert shown.rows == (
        ("cuda", "fp32", 10, 1, 0.1, old, "-"),
        ("cuda", "bf16", 150, 15, 0.2, old, "compute capability 8.0"),
        ("cuda", "fp16", 160, 16, 0.3, old, "compute capability 8.0"),
        ("cpu", "fp32", 2, 1, 0.1, new, "-"),
        ("cpu", "bf16", 1, 0.5, 0.2, new, "AMX-BF16"),
        ("cpu", "fp16", 0.5, 0.25, 0.3, new, "-"),
    )
    assert shown.notes == ()
    assert [row[:2] for row in advice.rows] == [("O2", "bf16")]
    # What was just measured is not measured again for the advice.
    assert asked == [("cuda", True), ("cpu", True)]
