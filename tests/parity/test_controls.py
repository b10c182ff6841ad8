"""How often the verdicts are right, over 20 repetitions with other seeds and data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import halfstep as hs

if TYPE_CHECKING:
    from torch import Tensor

REPETITIONS = 20
pytestmark = pytest.mark.slow


def kinds(
    number: int, levels: list[str], *, steps: int, lr: float, unit: float = 1.0
) -> dict[str, str]:
    """Return the verdicts on a small classifier; a small `unit` scales the loss."""
    draw = torch.Generator().manual_seed(number)
    teacher = torch.randn(16, 4, generator=draw)
    inputs = torch.randn(20, 64, 16, generator=draw)
    batches = [(x, (x @ teacher).argmax(1)) for x in inputs]

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        if unit == 1:
            return model, torch.optim.AdamW(model.parameters(), lr), loss_fn
        return model, torch.optim.SGD(model.parameters(), lr / unit), loss_fn

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * unit

    seeds = range(3 * number, 3 * number + 3)
    options: dict[str, Any] = {"steps": steps, "gradient_steps": ()}
    result = hs.compare(make, batches, levels, seeds=seeds, **options)
    return {level: verdict.kind for level, verdict in result.verdicts.items()}


def rates(**kind_of: list[str]) -> dict[str, dict[str, int]]:
    """Return level -> verdict -> how often."""
    return {k: {kind: v.count(kind) for kind in set(v)} for k, v in kind_of.items()}


def test_rates_of_bf16_weights() -> None:
    """Law: bf16 weights without master weights fail; one ulp, O2 and split pass."""
    levels = ["O2", "O2:split", "O2:none"]
    found = [kinds(number, levels, steps=100, lr=3e-4) for number in range(REPETITIONS)]
    counts = rates(**{level: [one[level] for one in found] for level in found[0]})
    assert counts["O2:none"] == {"worse": REPETITIONS}, counts
    for level in ("O0:ulp", "O2", "O2:split"):
        assert counts[level] == {"equivalent": REPETITIONS}, counts


def test_rates_of_fp16() -> None:
    """Law: fp16 without a loss scale fails on tiny gradients; with it, it passes."""
    levels = ["O1:fp16", "O1:fp16:loss_scale=none"]
    found = [
        kinds(number, levels, steps=30, lr=0.5, unit=1e-7)
        for number in range(REPETITIONS)
    ]
    counts = rates(**{level: [one[level] for one in found] for level in found[0]})
    assert counts["O1:fp16:loss_scale=none"] == {"worse": REPETITIONS}, counts
    assert counts["O1:fp16"] == {"equivalent": REPETITIONS}, counts
    assert counts["O0:ulp"] == {"equivalent": REPETITIONS}, counts
