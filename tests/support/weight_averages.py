"""The documented average of a prepared model's weights, and the same in float64.

In: a model before it is prepared; then, after each step, its fp32 weights by name and
the optimizer, whose parameters are the master weights in their order. Out: how far the
average has moved, and how far it is off.
"""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY = 0.999


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


class DocumentedAverage:
    def __init__(self, model: nn.Module) -> None:
        self.fp32_model = copy.deepcopy(model)
        self.average = averaged(self.fp32_model)
        self.exact: list[Tensor] = []
        self.steps = 0

    def update(
        self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.fp32_model.load_state_dict(weights)
        self.average.update_parameters(self.fp32_model)
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        now = [master.detach().double() for master in masters]
        self.exact = [
            old + (1 - DECAY) * (new - old)
            for old, new in zip(self.exact or now, now, strict=True)
        ]
        self.first = self.first if self.steps else now
        self.steps += 1

    def moved(self) -> float:
        return _distance(self.exact, self.first)

    def error_of(self, average: AveragedModel) -> float:
        return _distance(self.exact, list(average.parameters()))

    def assert_exact(self) -> None:
        """Require the float64 average up to one fp32 rounding in each update."""
        largest = max(value.abs().max().item() for value in self.exact)
        bound = self.steps * 2.0**-23 * largest
        error = max(
            (mine - right).abs().max().item()
            for mine, right in zip(self.average.parameters(), self.exact, strict=True)
        )
        assert error <= bound
        assert self.moved() > 100 * bound


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return sum((a.double() - b.double()).square().sum().item() for a, b in pairs) ** 0.5
