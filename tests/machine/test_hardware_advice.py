"""The advice that follows from a machine's rates: plain tables, and never slower."""

import platform
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.machine import Capabilities, Gpu, Recommendation, hardware
from halfstep.machine.cpu import INSTRUCTION_LIMITS
from halfstep.machine.gemm import GemmRates

RATES = {"fp32": 2.0, "bf16": 5.0, "fp16": 0.25}
LOW = ("bf16", "fp16")
GB = 2**30


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HALFSTEP_RATES", *INSTRUCTION_LIMITS):
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


def slow(dtype: str, share: str, where: str) -> str:
    return (
        f"{dtype} matmuls run at {share} of fp32's rate on this {where}; 1.5 is the "
        "least that pays for the casts"
    )


def fp32(*reasons: str) -> Recommendation:
    return Recommendation("O0", "fp32", "; ".join(reasons))


LACKING, CC = "this {} has no {} instructions", "cuda (compute capability {})"
BF16 = "cpu (AVX512-BF16)"
ADVICE = {
    "AVX2": (cpu("AVX2"), None, fp32(LACKING.format("cpu", "bf16"))),
    "AVX-512": (cpu("AVX2", "AVX512"), None, fp32(LACKING.format("cpu", "bf16"))),
    "BF16": (cpu("AVX512-BF16"), rates(2, 6, 2), fast("bf16", "3.0", BF16)),
    "AMX": (AMX, rates(2, 8, 2), fast("bf16", "4.0", "cpu (AVX512-BF16, AMX-BF16)")),
    "limited": (cpu("AVX512-BF16"), rates(2, 1, 2), fp32(slow("bf16", "0.50", BF16))),
    "flags unknown": (cpu(), rates(2, 6, 2), fast("bf16", "3.0", "cpu")),
    "fp16 on a CPU": (cpu("AVX512-FP16"), None, fp32(LACKING.format("cpu", "bf16"))),
    "GPU 6.1": (gpu(6, 1), None, fp32(*(LACKING.format("cuda", t) for t in LOW))),
    "GPU 7.5": (gpu(7, 5), rates(8, 16, 40), fast("fp16", "5.0", CC.format(7.5))),
    "GPU 9.0": (gpu(9, 0), rates(5, 70, 70), fast("bf16", "14.0", CC.format(9.0))),
}


@pytest.mark.parametrize(("what", "rate", "advice"), ADVICE.values(), ids=ADVICE)
def test_advice(
    what: Capabilities,
    rate: dict[str, float] | None,
    advice: Recommendation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law: bf16 where it is fast, fp16 only on a GPU without bf16, else fp32.

    What has no instructions for a format is not measured.
    """
    plant(monkeypatch, what, rate or {})
    assert hardware.recommend() == advice
    assert hardware.recommend(what.device) == advice


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_advice_elsewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: of other devices the rates alone decide, and not what the processor has."""
    plant(monkeypatch, cpu("AVX2"), rates(2, 4, 8))
    assert hardware.recommend(device) == fast("bf16", "2.0", device)
    plant(monkeypatch, AMX, rates(2, 1, 8))
    assert hardware.recommend(device) == fp32(slow("bf16", "0.50", device))


RATE = st.floats(1e-3, 1e3)
MACHINES = st.sampled_from(
    [AMX, cpu("AVX2"), cpu(), gpu(6, 1), gpu(7, 0), gpu(8, 0), gpu(10, 3)]
)


@given(what=MACHINES, fp32=RATE, bf16=RATE, fp16=RATE)
def test_advice_is_never_slower(
    what: Capabilities, fp32: float, bf16: float, fp16: float
) -> None:
    """Law: a 16-bit format is advised only where it was measured to be worth it."""
    rate = rates(fp32, bf16, fp16)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HALFSTEP_RATES", raising=False)
        plant(patch, what, rate)
        advice = hardware.recommend()
    assert advice.level == ("O0" if advice.dtype == "fp32" else "O2")
    if advice.dtype != "fp32":
        assert rate[advice.dtype] / fp32 >= hardware.WORTH_IT > 1
    if not what.gpus and what.instruction_sets != ("AVX2",):
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
        "0.500 (no bf16 instructions): expect 4.0 times the time. "
        "Use level O0."
    )
    assert hardware.emulation_warning("fp16") is None
    assert hardware.emulation_warning("fp32") is None
    plant(monkeypatch, cpu("AVX512-BF16"), rates(1.0, 2.0, 0.1))
    assert (hardware.emulation_warning("fp16") or "").endswith("Use dtype='bf16'.")


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where instructions are limited, what the CPU has is not the whole cause."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    plant(monkeypatch, cpu("AVX512-BF16"), rates(1.0, 0.1, 1.0))
    limits = "ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2"
    limited = f"(AVX512-BF16, limited by {limits})"
    assert limited in (hardware.emulation_warning("bf16") or "")
    assert limited in hardware.recommend().reason


def test_rates_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: with HALFSTEP_RATES, the advice is what a machine with those rates gets."""
    monkeypatch.setattr(hardware, "capabilities", lambda: cpu("AVX2"))
    monkeypatch.setenv("HALFSTEP_RATES", '{"cpu": {"fp32": 1, "bf16": 2, "fp16": 2}}')
    assert hardware.recommend() == fast("bf16", "2.0", "cpu")
    assert hardware.emulation_warning("bf16") is None


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the tables show rates over fp32's, spread and day, limits and the advice."""
    planted = {"cuda": rates(10, 150, 160), "cpu": rates(2, 1, 0.5)}
    plant(monkeypatch, gpu(8, 0), planted["cuda"])
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    asked: list[tuple[str, bool]] = []

    def measured(where: str, *, refresh: bool = False) -> GemmRates:
        asked.append((where, refresh))
        spread = dict(zip(RATES, (0.1, 0.2, 0.3), strict=True))
        return GemmRates(planted[where], spread, time=1e9)

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
    day = time.strftime("%Y-%m-%d", time.localtime(1e9))
    assert shown.columns[3:6] == ("x fp32", "spread", "measured")
    assert shown.rows == (
        ("cuda", "fp32", 10, 1, 0.1, day, "-"),
        ("cuda", "bf16", 150, 15, 0.2, day, "compute capability 8.0"),
        ("cuda", "fp16", 160, 16, 0.3, day, "compute capability 8.0"),
        ("cpu", "fp32", 2, 1, 0.1, day, "-"),
        ("cpu", "bf16", 1, 0.5, 0.2, day, "AMX-BF16"),
        ("cpu", "fp16", 0.5, 0.25, 0.3, day, "-"),
    )
    assert shown.notes == ()
    assert [row[:2] for row in advice.rows] == [("O2", "bf16")]
    # What was just measured is not measured again for the advice.
    assert asked == [("cuda", True), ("cpu", True)]
