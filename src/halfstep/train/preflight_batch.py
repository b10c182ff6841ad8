"""A check of a run's precision on its first batch: `halfstep.check` for `--check`.

In: a run that is ready to begin. Out: a `CheckReport`. What trains is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.preflight import check
from halfstep.session import fsdp_checkpoint
from halfstep.train import checkpointing, fast_dropout, parallelize, param_groups
from halfstep.train.result import portable_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from halfstep.diagnostics.preflight import CheckReport
    from halfstep.train.config import TrainConfig
    from halfstep.train.result import PreparedRun

_TIMED = 3  # steps of each kind: the dry run has timed those of the run


def check_first_batch(ready: PreparedRun, config: TrainConfig) -> CheckReport | None:
    """Check level and format of a run on its first batch; all processes must call it.

    The model is the run's, in fp32, with its frozen parameters and its activation
    checkpoints, in one process and not compiled.

    Returns:
        None on all processes but the first.
    """
    session = ready.trainer.session
    # Of a sharded model each process holds a part: all take part.
    weights = {**fsdp_checkpoint.full_tensors(session.weights()), **ready.originals}
    return checkpointing.run_on_first_rank(
        ready.trainer.world, lambda: _check(ready, config, weights)
    )


def _check(
    ready: PreparedRun, config: TrainConfig, weights: Mapping[str, Tensor]
) -> CheckReport:
    trainer = ready.trainer
    job, world, session = trainer.job, trainer.world, trainer.session
    step_batch = job.steps[1]
    share = world.size * session.accumulate / step_batch.weight
    batch = {name: one.to(world.device) for name, one in step_batch.parts[0].items()}

    def loss_fn(model: nn.Module, part: dict[str, Any]) -> Tensor:
        inputs = dict(part)
        targets = inputs.pop("labels")
        return job.objective.loss_sum(model(**inputs).logits, targets) * share

    model = _model(ready, config, weights)
    optimizer = torch.optim.AdamW(
        param_groups.make_param_groups(model, config.weight_decay, config.layer_decay),
        lr=job.plan.lr,
        fused=True,
    )
    return check(
        model,
        loss_fn,
        batch,
        level=session.choice,
        policy=config.policy,
        optimizer=optimizer,
        master=config.master,
        steps=_TIMED,
    )


def _model(
    ready: PreparedRun, config: TrainConfig, weights: Mapping[str, Tensor]
) -> nn.Module:
    """Return the run's model as it was before it was prepared, with its weights."""
    world, choice = ready.trainer.world, ready.trainer.session.choice
    model: nn.Module = portable_model(ready.network, weights).to(world.device).train()
    param_groups.freeze(model, config.frozen)
    fast_dropout.use_fast_dropout(model)
    if config.recompute:
        parallelize.parallelize_model(
            model, choice, world, parallel="ddp", recompute=True, compiled=False
        )
    return model
