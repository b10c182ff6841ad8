"""Programs that are well, as people write them: none may be accused of anything."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.field import nets
from tests.field.report import Amp, Program
from torch import Tensor, nn

HEALTHY: dict[str, Callable[[Amp], Program]] = {}
"""By name: each builds its program with torch's classes or with ours."""


def healthy(build: Callable[[Amp], Program]) -> Callable[[Amp], Program]:
    assert build.__name__ not in HEALTHY, f"{build.__name__}: two bear this name"
    HEALTHY[build.__name__] = build
    return build


def load() -> None:
    for path in sorted(Path(__file__).parent.glob("healthy_*.py")):
        importlib.import_module(f"tests.field.{path.stem}")


def loop(
    amp: Amp,
    model: nn.Module,
    loss_of: Callable[[Any, Any], Tensor],
    batch: object,
    *,
    dtype: torch.dtype = torch.float16,
    optimizer: torch.optim.Optimizer | None = None,
) -> Program:
    """Return the loop of torch's own examples, and what `hs.check` needs."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = amp.scaler(enabled=dtype == torch.float16)
    check = {"loss_fn": loss_of, "batch": batch, "level": "O1", "dtype": dtype}
    return nets.loop(
        amp,
        model,
        lambda: loss_of(model, batch),
        optimizer,
        scaler,
        dtype=dtype,
        check={**check, "steps": 0},
    )
