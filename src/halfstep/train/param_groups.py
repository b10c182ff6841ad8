"""Builds the optimizer: frozen parameters, layer-wise learning rates, weight decay."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch.optim import AdamW

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from halfstep.train.config import TrainConfig

# Lists of equal blocks: bert.encoder.layer.3, model.layers.3, transformer.h.3.
_BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*embed\w*|wte|wpe|shared)\.")


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


def layer_depth(name: str, blocks: int) -> int:
    """Return a parameter's depth: embeddings 0, blocks from 1, others the highest."""
    if match := _BLOCK.search(name):
        return int(match[1]) + 1
    return 0 if _EMBEDDING.search(name) else blocks + 1


def make_optimizer(model: nn.Module, config: TrainConfig, lr: float) -> AdamW:
    """Return an AdamW of the trainable parameters.

    Weight decay applies to matrices, not to biases and normalization: for a scale of
    one, zero is no sensible prior. Each block has `layer_decay` times the learning rate
    of the block above, embeddings the lowest, because lower layers are more general
    (Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification",
    2018).
    """
    named = list(model.named_parameters())
    # Counts frozen blocks too, so that depths do not shift.
    numbers = [int(match[1]) for name, _ in named if (match := _BLOCK.search(name))]
    blocks = max(numbers, default=-1) + 1
    if config.layer_decay < 1 and not blocks:
        raise UserError(
            f"--layer-decay {config.layer_decay}: {type(model).__name__} has no blocks "
            "of its own number (layer.0, layer.1, ...), so no layer is below another."
        )
    groups: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, param in named:
        if param.requires_grad:
            below_head = blocks + 1 - layer_depth(name, blocks)
            groups[lr * config.layer_decay**below_head, param.dim() <= 1].append(param)
    return AdamW(
        [
            {
                "params": groups[rate, is_vector],
                "lr": rate,
                "weight_decay": 0.0 if is_vector else config.weight_decay,
            }
            for rate, is_vector in sorted(groups)
        ],
        fused=True,
    )
