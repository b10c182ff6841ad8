"""Measures a plan beside torch.autocast and fp32, for `halfstep plan`."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.bench import measure
from halfstep.bench.training import count_casts
from halfstep.graph.planner import device_of
from halfstep.graph.rewrite import rewrite
from halfstep.numerics import formats
from halfstep.numerics.formats import tensors_in

if TYPE_CHECKING:
    from halfstep.graph.plan import Plan

BASELINE = "torch.autocast"


def count_autocast_casts(model: nn.Module, inputs: tuple[Any, ...], dtype: str) -> int:
    """Return the number of tensors that torch.autocast casts in a forward pass."""
    call = partial(_copied(model), *inputs)  # a forward pass may change buffers
    with torch.autocast(device_of(model, inputs).type, formats.parse(dtype).dtype):
        casts = count_casts(call)
    return casts - count_casts(call)


def measure_plan(
    model: nn.Module, inputs: tuple[Any, ...], chosen: Plan
) -> dict[str, float]:
    """Return milliseconds of the passes as planned, under torch.autocast, and in fp32.

    The gradients, buffers and dtypes of the model change.
    """
    fp32_model = _copied(model)
    low = formats.parse(chosen.dtype).dtype
    for name in chosen.low_weights:
        param = model.get_parameter(name)
        param.data = param.data.to(low)
    device = device_of(model, inputs).type

    def turn(run: nn.Module, *, autocasted: bool = False) -> float:
        def passes() -> None:
            with torch.autocast(device, low, enabled=autocasted):
                output = run(*inputs)
            outputs = [t for t in tensors_in(output) if t.is_floating_point()]
            loss = torch.stack([each.float().sum() for each in outputs]).sum()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

        seconds = measure.timed(passes, device)[1]
        run.zero_grad()
        return seconds

    turns = {
        "this plan": partial(turn, rewrite(model, chosen)),
        BASELINE: partial(turn, fp32_model, autocasted=True),
        "fp32": partial(turn, fp32_model),
    }
    for first in turns.values():
        first()  # warms up
    times = measure.take_turns(turns, rounds=9)
    return {name: times.median(name, 1e3) or 0.0 for name in turns}


def _copied(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # Raised inside torch, for saved programs.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        return copy.deepcopy(model)
