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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"steps": 100, "lr": 3e-4},
            {"O2": "equivalent", "O2:split": "equivalent", "O2:none": "worse"},
        ),
        (
            {"steps": 30, "lr": 0.5, "unit": 1e-7},
            {"O1:fp16": "equivalent", "O1:fp16:loss_scale=none": "worse"},
        ),
    ],
    ids=["bf16 weights", "tiny gradients"],
)
def test_rates(options: dict[str, Any], expected: dict[str, str]) -> None:
    """Law: what must fail fails, what must pass passes, each in every repetition."""
    levels = list(expected)
    found = [kinds(number, levels, **options) for number in range(REPETITIONS)]
    wrong = [one for one in found if one != {"O0:ulp": "equivalent", **expected}]
    assert wrong == []


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
    plan: dict[str, Any] = {"steps": steps, "gradient_steps": ()}
    result = hs.compare(make, batches, levels, seeds=seeds, **plan)
    return {level: verdict.kind for level, verdict in result.verdicts.items()}
