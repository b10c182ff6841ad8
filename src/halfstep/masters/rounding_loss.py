"""Counts updates lost to rounding, on a sample of the weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.errors import require_int
from halfstep.numerics.local_tensor import local_part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halfstep.masters import MasterWeights
    from halfstep.scaling.step_report import StepReport

SAMPLE = 1 << 16
"""Elements sampled per group; the standard error of the share is about 0.2 points."""


@dataclass(frozen=True)
class RoundingLoss:
    """Updates lost to rounding in one parameter group in one step."""

    step: int
    """Optimizer steps attempted so far."""
    group: int
    """Index in `optimizer.param_groups`."""
    counts: Tensor
    """float64, shape (3,): sampled elements with non-zero gradient and learning rate;
    those whose fp32 value did not change; those whose 16-bit weight did not."""
    is_stochastic: bool
    """Whether rounding is stochastic: then no update is lost on average."""

    @property
    def share(self) -> float | None:
        """Share of the updates that were lost, 0 to 1; None without updates.

        May synchronize with the device.
        """
        had, stayed, _ = self.counts.tolist()
        if not had:
            return None
        return 0.0 if self.is_stochastic else stayed / had

    @property
    def below_publish(self) -> float | None:
        """Share of the updates that did not change the model's 16-bit weights.

        They would be lost without master weights. None without updates. May
        synchronize with the device.
        """
        had, _, hidden = self.counts.tolist()
        return hidden / had if had else None


class RoundingLossCounter:
    """Counts updates lost to rounding every `every` steps, >= 1."""

    def __init__(self, masters: MasterWeights, every: int) -> None:
        self.every = require_int("every", every, 1)
        self.last: tuple[RoundingLoss, ...] = ()
        self._masters = masters
        self._sample_indices: dict[Tensor, Tensor] = {}

    @contextlib.contextmanager
    def measure(self, report: StepReport) -> Iterator[None]:
        """Compare weights before and after an update that is applied, if it is due."""
        # The session's step count, so that a resumed run counts at the same steps.
        if report.step % self.every:
            yield
            return
        before = self._sample_groups()
        yield
        if report.applied:
            self.last = tuple(self._compare(report.step, before, self._sample_groups()))

    def _sample_groups(self) -> list[list[tuple[Tensor, ...]]]:
        """Return `_sample_values` of the parameters of each group."""
        samples = []
        for group in self._masters.optimizer.param_groups:
            model_param = self._masters.model_param
            unique = dict.fromkeys(group["params"])  # torch allows repeats
            params = [p for p in unique if model_param(p).requires_grad]
            total = sum(param.numel() for param in params)
            share, lr = min(1.0, SAMPLE / max(total, 1)), lr_of(group)
            places = [(param, self._indices_of(param, share)) for param in params]
            samples.append([self._sample_values(*place, lr) for place in places])
        return samples

    def _compare(
        self,
        step: int,
        before: list[list[tuple[Tensor, ...]]],
        after: list[list[tuple[Tensor, ...]]],
    ) -> Iterator[RoundingLoss]:
        random = self._masters.encoding.residual is None
        for group, (old, new) in enumerate(zip(before, after, strict=True)):
            counts = []
            for old_values, new_values in zip(old, new, strict=True):
                moves = old_values[2]
                stayed = (new_values[0] == old_values[0]) & moves
                hidden = (new_values[1] == old_values[1]) & moves
                counted = torch.stack([t.sum() for t in (moves, stayed, hidden)])
                counts.append(counted.double())
            if counts:
                home = counts[0].device
                total = torch.stack([count.to(home) for count in counts]).sum(0)
                yield RoundingLoss(step, group, total, random)

    def _indices_of(self, param: Tensor, share: float) -> Tensor | None:
        """Return random indices, the same at each count; None: all elements.

        Why random: every hundredth element of a matrix may be a single column.
        """
        if share >= 1 or not param.numel():
            return None
        numel = local_part(param).numel()
        count = max(1, round(share * numel))
        indices = self._sample_indices.get(param)
        if indices is None or indices.numel() != count:
            generator = torch.Generator().manual_seed(len(self._sample_indices))
            drawn = torch.randint(numel, (count,), generator=generator)
            indices = self._sample_indices[param] = drawn.to(param.device)
        return indices

    @torch.no_grad()
    def _sample_values(
        self, param: Tensor, indices: Tensor | None, lr: float | Tensor
    ) -> tuple[Tensor, ...]:
        """Return fp32 values, weights, and a mask of elements that get an update."""
        master_param = self._masters.master_params.get(param)
        weight = _take(param if master_param is None else master_param.weight, indices)
        fp32 = weight
        if master_param is not None:
            residual = master_param.residual
            residual = None if residual is None else _take(residual, indices)
            fp32 = torch.empty_like(weight, dtype=torch.float32)
            self._masters.encoding.decode_(weight, residual, fp32)
        gradient = param.grad
        if gradient is None and master_param is not None:
            gradient = master_param.weight.grad
        if gradient is None or gradient.layout != torch.strided:
            moves = torch.zeros_like(weight, dtype=torch.bool)
        else:
            moves = _take(gradient, indices) != 0
        if torch.is_tensor(lr):  # do not synchronize with the device
            moves = moves & (lr.reshape(()) != 0).to(moves.device)
        elif not lr:
            moves = torch.zeros_like(moves)
        return fp32, weight, moves


def lr_of(group: dict[str, Any]) -> float | Tensor:
    """Return the learning rate of a parameter group; 1 if it has none."""
    rate: float | Tensor | None = group.get("lr")
    return 1.0 if rate is None else rate


def _take(tensor: Tensor, indices: Tensor | None) -> Tensor:
    """Return a copy of some elements of a tensor, or of all."""
    flat = local_part(tensor).detach().reshape(-1)
    return flat.clone() if indices is None else flat[indices]
