"""Resolves the defaults of a run for its data, model and device; its job and state."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from halfstep.policy import levels
from halfstep.train import model
from halfstep.train.step_dataset import Order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from halfstep.distributed.process_group import World
    from halfstep.policy.levels import Level
    from halfstep.train.config import TrainConfig
    from halfstep.train.data.corpus import Corpus
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.step_dataset import StepDataset

FEW_EXAMPLES = 5000
EPOCHS_FEW, EPOCHS_MANY = {"classify": 10, "ner": 12}, 3
LR_SCRATCH = {"classify": 5e-4, "ner": 1e-3}
LR_TUNE = 3e-5
CLIP_SCRATCH = {"classify": 25.0, "ner": 3.0}
"""With the mean over tokens the norm is about 10 in each step of a classifier."""
CLIP_TUNE = 1.0
MASK_SCRATCH = {"classify": 0.3, "ner": 0.1}  # a tag depends on its own token
WORKERS_GPU = 2  # a GPU step is short enough for batch preparation to matter


@dataclass(frozen=True)
class Plan:
    """The settings of a run and their resolved defaults."""

    config: TrainConfig
    order: Order
    lr: float
    clip: float
    dropout: float | None
    """None: the pretrained model's own."""
    mask_tokens: float
    eval_every: int
    total_steps: int
    workers: int
    device: str


@dataclass(frozen=True)
class TrainJob:
    """The inputs of the training loop."""

    corpus: Corpus
    encoded: Mapping[str, EncodedTexts]
    """The splits "train", "dev" and "test"."""
    steps: StepDataset
    plan: Plan
    longest: int

    def loss_sum(self, model: Any, part: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401 -- of transformers
        """Return the summed loss of a micro-batch, which is moved to the device."""
        device = self.steps.world.device
        moved = {k: tensor.to(device, non_blocking=True) for k, tensor in part.items()}
        targets = moved.pop("labels")
        return self.steps.objective.loss_sum(model(**moved).logits, targets)


@dataclass
class TrainState:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0
    best_step: int = 0
    """Step of the best checkpoint; 0 if there is none or it is damaged."""
    best_score: float | None = None
    """Its score, negated for a loss. None before the first evaluation."""
    waited: int = 0


@dataclass
class Timers:
    """Seconds spent in each part of a step, on the host."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add the duration of the context to a part."""
        began = time.perf_counter()
        yield
        spent = time.perf_counter() - began
        self.seconds[part] = self.seconds.get(part, 0.0) + spent


def resolve_plan(
    config: TrainConfig, corpus: Corpus, world: World, *, scratch: bool
) -> Plan:
    """Resolve the settings for this data, model and device."""
    count = len(corpus.train)
    few = scratch and count < FEW_EXAMPLES
    steps = math.ceil(count / config.batch_size)
    epochs = config.epochs
    if epochs is None and config.max_steps is not None:
        epochs = math.ceil(config.max_steps / steps)
    epochs = epochs or (EPOCHS_FEW[corpus.task] if few else EPOCHS_MANY)
    mask = config.mask_tokens
    if mask is None:
        mask = MASK_SCRATCH[corpus.task] if scratch else 0.0
    dropout = config.dropout
    if dropout is None and scratch:
        dropout = model.DROPOUT
    workers = config.workers
    if workers is None:
        workers = WORKERS_GPU if world.device.type == "cuda" else 0
    return Plan(
        config,
        order=Order(config.batch_size, epochs, config.accumulate, config.seed),
        lr=config.lr or (LR_SCRATCH[corpus.task] if scratch else LR_TUNE),
        clip=config.clip or (CLIP_SCRATCH[corpus.task] if scratch else CLIP_TUNE),
        dropout=dropout,
        mask_tokens=mask,
        eval_every=config.eval_every or steps,
        total_steps=min(epochs * steps, config.max_steps or epochs * steps),
        workers=workers,
        device=world.device.type,
    )


def lost_updates_interval(plan: Plan, level: Level) -> int | None:
    """Return every how many steps updates lost to rounding are counted; None: never.

    They are counted in the step before each evaluation, if 16-bit weights have no
    master weights or residual.
    """
    config = plan.config
    has_master_weights = level.masters and config.master_weights != "none"
    if not level.low_weights or has_master_weights or config.parallel != "ddp":
        return None
    return plan.eval_every


def resolve_config(plan: Plan, level: str, dtype: str) -> TrainConfig:
    """Return the settings with every default filled in.

    None remains where there is no value: no limit, labels from the data, and dropout
    rates of a pretrained model, which may have several.
    """
    config = plan.config
    scale = config.loss_scale
    if scale == "auto":
        scale = levels.DEFAULT_LOSS_SCALE[dtype]
    return replace(
        config,
        epochs=plan.order.epochs,
        lr=plan.lr,
        clip=plan.clip,
        dropout=plan.dropout,
        mask_tokens=plan.mask_tokens,
        eval_every=plan.eval_every,
        workers=plan.workers,
        device=plan.device,
        best_by=plan.config.best_score,
        level=level,
        dtype=dtype,
        loss_scale=scale,
    )


def lr_factor(applied: int, total: int, warmup: float) -> float:
    """Return the learning rate after `applied` steps, as a share of its peak.

    Rises linearly over the first `warmup * total` steps, then falls linearly to zero at
    step `total`.

    Example:
        >>> [round(lr_factor(step, 10, 0.2), 3) for step in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.125]
    """
    rising = math.ceil(warmup * total)
    if applied < rising:
        return (applied + 1) / rising
    return max(0.0, (total - applied) / max(1, total - rising))
