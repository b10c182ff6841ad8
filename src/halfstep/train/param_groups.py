"""Builds the optimizer: frozen parameters and weight decay."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch.optim import AdamW

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from halfstep.train.config import TrainConfig


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match.

    Shell patterns; one that matches a module freezes all of its parameters.

    Raises:
        UserError: If a pattern matches nothing, or no trainable parameter is left.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        both = pattern, f"{pattern}.*"
        matched = [n for n in named if any(fnmatchcase(n, each) for each in both)]
        if not matched:
            parts = {name.rpartition(".")[0] for name in named}
            near = difflib.get_close_matches(pattern, sorted(parts), 1) or sorted(parts)
            raise UserError(
                f"--freeze {pattern} matches no parameter; nearest module: {near[0]}."
            )
        for name in matched:
            named[name].requires_grad_(False)  # noqa: FBT003 -- torch takes it by position
    if not any(param.requires_grad for param in named.values()):
        raise UserError(f"--freeze {','.join(patterns)} leaves no parameter to learn.")


def make_optimizer(model: nn.Module, config: TrainConfig, lr: float) -> AdamW:
    """Return an AdamW of the trainable parameters.

    Weight decay applies to matrices, not to biases and normalization: for a scale of
    one, zero is no sensible prior.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    decayed = [param for param in trained if param.dim() > 1]
    others = [param for param in trained if param.dim() <= 1]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (others, 0.0))
        if params
    ]
    return AdamW(groups, lr=lr, fused=True)
