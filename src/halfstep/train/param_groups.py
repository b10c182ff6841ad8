"""Builds the optimizer: frozen parameters, layer-wise learning rates, weight decay."""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.optim import AdamW

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from halfstep.train.config import TrainConfig

LR_FACTOR = "rate_share"
"""Key in a param group: factor on the learning rate."""

# Lists of equal blocks: bert.encoder.layer.3, model.layers.3, transformer.h.3.
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe|shared)\.")


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Freeze the parameters whose names match; return the number of values frozen.

    Shell patterns; one that matches a module freezes all of its parameters.

    Raises:
        UserError: If a pattern matches nothing, or no trainable parameter is left.
    """
    named = dict(model.named_parameters())
    frozen = 0
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
            frozen += named[name].numel() * named[name].requires_grad
            named[name].requires_grad_(False)  # noqa: FBT003 -- torch takes it by position
    if not any(param.requires_grad for param in named.values()):
        raise UserError(f"--freeze {','.join(patterns)} leaves no parameter to learn.")
    return frozen


def layer_depth(name: str, blocks: int) -> int:
    """Return a parameter's depth: embeddings 0, blocks from 1, others the highest."""
    match = _BLOCK.search(name)
    if match:
        return int(match[1]) + 1
    return 0 if _EMBEDDING.search(name) else blocks + 1


def make_optimizer(model: nn.Module, config: TrainConfig, lr: float) -> AdamW:
    """Return the optimizer of a run, AdamW."""
    groups = make_param_groups(model, config.weight_decay, config.layer_decay)
    return AdamW(groups, lr=lr, fused=True)


def make_param_groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Return the param groups of the trainable parameters.

    Weight decay applies to matrices, not to biases and normalization: for a scale of
    one, zero is no sensible prior. Each block has `layer_decay` (0 to 1) times the
    learning rate of the block above, embeddings the lowest, because lower layers are
    more general (Howard and Ruder, "Universal Language Model Fine-tuning for Text
    Classification", 2018).
    """
    named = list(model.named_parameters())
    # Counts frozen blocks too, so that depths do not shift.
    blocks = max(
        (int(m[1]) + 1 for n, _ in named if (m := _BLOCK.search(n))), default=0
    )
    if layer_decay < 1 and not blocks:
        raise UserError(
            f"--layer-decay {layer_decay}: {type(model).__name__} has no blocks of its "
            "own number (layer.0, layer.1, ...), so no layer is below another."
        )
    by_key: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, param in named:
        if not param.requires_grad:
            continue
        depth = layer_depth(name, blocks) if layer_decay < 1 else blocks + 1
        decays = param.dim() > 1
        group = by_key.setdefault(
            (depth, not decays),
            {
                "params": [],
                "weight_decay": weight_decay if decays else 0.0,
                LR_FACTOR: layer_decay ** (blocks + 1 - depth),
            },
        )
        group["params"].append(param)
    return [by_key[key] for key in sorted(by_key)]
