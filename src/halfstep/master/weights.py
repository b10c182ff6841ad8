"""fp32 master weights: the optimizer updates these, the model holds 16-bit copies.

In: an optimizer over 16-bit parameters. Out: the same optimizer over fp32 masters,
with gradients folded up to them and updated weights published down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfstep.formats import cast_floating, is_low

if TYPE_CHECKING:
    from collections.abc import Mapping


class MasterWeights:
    """fp32 masters for the 16-bit parameters of any torch optimizer.

    Why: a 16-bit weight swallows a small update. At the usual ratio of update to
    weight, 1e-3, bf16 loses more than half of all updates to rounding.

    The optimizer's parameter groups then hold the masters; its state lives in fp32,
    and learning-rate schedules, added groups and `state_dict` work as before.

    Args:
        optimizer: Over 16-bit parameters, fp32 ones, or both; fp32 ones are left.
        originals: Parameter -> fp32 values to begin with, where they are known;
            otherwise the master starts from the 16-bit weight.

    Example:
        >>> weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=2.0**-10)
        >>> masters = MasterWeights(optimizer)
        >>> for _ in range(4):
        ...     weight.sum().backward()
        ...     masters.fold()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     masters.publish()
        >>> weight[0].item(), optimizer.param_groups[0]["params"][0][0].item()
        (0.99609375, 0.99609375)

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        originals: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        """(16-bit parameter, fp32 master), in the order they were adopted."""
        self._stored: dict[Tensor, nn.Parameter] = {}
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._groups = 0
        self.adopt(originals or {})

    def adopt(self, originals: Mapping[nn.Parameter, Tensor]) -> None:
        """Give masters to those 16-bit parameters of the optimizer that have none.

        Args:
            originals: As for the class; masters take over these tensors.
        """
        self._groups = len(self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if is_low(param.dtype):
                    value = originals.get(param, param.detach())
                    group["params"][index] = self._master_of(param, value.float())

    def _master_of(self, param: nn.Parameter, value: Tensor) -> nn.Parameter:
        master = nn.Parameter(value, requires_grad=param.requires_grad)
        self.pairs.append((param, master))
        self._stored[master] = param
        if param in self.optimizer.state:
            state = self.optimizer.state.pop(param)
            self.optimizer.state[master] = cast_floating(state, torch.float32)
        return master

    def fold(self) -> None:
        """Add the gradients of the 16-bit parameters to their masters', and free them.

        Called after each backward pass, this accumulates micro-batches in fp32. The
        buffers are kept, so that no step maps fresh memory for them.
        """
        if len(self.optimizer.param_groups) != self._groups:
            self.adopt({})
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        for param, master in self.pairs:
            gradient, param.grad = param.grad, None
            if gradient is None:
                continue
            if gradient.is_sparse:
                wide = gradient.float()
                master.grad = wide if master.grad is None else master.grad + wide
                continue
            if master.grad is None:
                if master not in self._buffers:
                    self._buffers[master] = torch.empty_like(master)
                master.grad = self._buffers[master]
                new[0].append(master.grad)
                new[1].append(gradient)
            else:
                more[0].append(master.grad)
                more[1].append(gradient)
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)

    def stored(self, param: Tensor) -> Tensor:
        """Return the model's parameter behind one of the optimizer's."""
        return self._stored.get(param, param)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the 16-bit parameters."""
        if self.pairs:
            params, masters = zip(*self.pairs, strict=True)
            torch._foreach_copy_(params, masters)

    @torch.no_grad()
    def pull(self) -> None:
        """Take the 16-bit parameters as the new masters, after an outside edit."""
        if self.pairs:
            params, masters = zip(*self.pairs, strict=True)
            torch._foreach_copy_(masters, params)


class NoMasters:
    """The same interface where the optimizer updates the model's own parameters."""

    pairs: tuple[tuple[nn.Parameter, nn.Parameter], ...] = ()

    def fold(self) -> None:
        """Leave gradients where they are."""

    def publish(self) -> None:
        """Leave parameters as they are."""

    def stored(self, param: Tensor) -> Tensor:
        """Return the parameter itself."""
        return param
