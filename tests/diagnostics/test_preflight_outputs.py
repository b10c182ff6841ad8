"""`hs.check` compares what each module gives with what it gives in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.machine import hardware


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant rates: to measure them is not what is tested here."""
    rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
    monkeypatch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)


class Rope(nn.Module):
    """Turns features by angles, in the dtype it is given or in one of its own."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return features of each position, turned."""
        dtype = self.dtype or x.dtype
        angles = torch.arange(x.shape[1], dtype=dtype)[:, None] * torch.tensor(
            [1.0, 0.1], dtype=dtype
        )
        return x * torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)


def model(dtype: torch.dtype | None = None) -> nn.Module:
    """Return a layer, a rope, and a layer."""
    torch.manual_seed(0)
    parts = {"inner": nn.Linear(4, 4), "rope": Rope(dtype), "outer": nn.Linear(4, 4)}
    net = nn.Sequential()
    for name, part in parts.items():
        net.add_module(name, part)
    return net


def check(net: nn.Module, level: str = "O1", **options: str) -> hs.CheckReport:
    """Check it in bf16."""
    x = torch.randn(2, 2000, 4)
    return hs.check(
        net,
        lambda net, x: net(x).float().square().mean(),
        x,
        level=level,
        dtype="bf16",
        steps=0,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_positions_in_16_bits(level: str) -> None:
    """Law: the module is named, not what follows; and the rule is seen to work."""
    report = check(model(), level)
    found = [each for each in report.findings if each.rule == "output"]
    assert [each.where for each in found] == ["rope (Rope)"]
    assert "policy='lean + module:rope=fp32'" in found[0].advice
    assert not report.good
    assert check(model(), level, policy="lean + module:rope=fp32").good


def test_code_of_the_model_itself() -> None:
    """Law: where no rule helps none is proposed, and fp32 by hand is well."""

    class Whole(nn.Module):
        def __init__(self, dtype: torch.dtype | None) -> None:
            super().__init__()
            self.inner, self.turn = nn.Linear(4, 4), Rope(dtype).forward

        def forward(self, x: Tensor) -> Tensor:
            return self.turn(self.inner(x))

    (found,) = (each for each in check(Whole(None)).findings if each.rule == "output")
    assert found.where == "model (Whole)"
    assert found.advice.startswith("No rule helps")
    assert check(Whole(torch.float32)).good


def test_modules_that_write_in_place() -> None:
    """Law: what a later module overwrites is compared as it was given."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(2000), nn.ReLU(inplace=True))
    assert check(net).good
