"""The workload of `halfstep compare`: what `halfstep train` trains, for any seed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR

from halfstep.distributed.process_group import World
from halfstep.fast_dropout import use_fast_dropout
from halfstep.machine import hardware
from halfstep.machine.recommendation import resolve
from halfstep.parity.training_run import Workload
from halfstep.policy.levels import O0
from halfstep.train import parallelize, param_groups, run
from halfstep.train.config import TrainConfig, read_file
from halfstep.train.plan import lr_factor
from halfstep.train.tasks import TASKS, collect_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor, nn

    from halfstep.parity.training_run import TrainingParts
    from halfstep.session.session import Session
    from halfstep.train.plan import TrainJob

    MicroBatch = tuple[dict[str, Tensor], float]

_OF_LEVELS = ("level", "dtype", "loss_scale", "master_weights")
_UNUSED = (
    *("out", "keep", "tensorboard", "probe", "workers", "parallel"),
    *("patience", "eval_every", "compare_fp32"),
)
"""Settings of files and processes, and of a choice among checkpoints: the weights of
the last step are evaluated."""


@dataclass(frozen=True)
class _Evaluated:
    """A model in an open autocast context, for `collect_outputs`."""

    model: nn.Module

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class TrainRuns:
    """What runs of `halfstep train` with these settings train, by seed.

    Like a run of one process, but all steps are trained, the weights of the last one
    are evaluated, and there are no files. A classifier from scratch is its encoder
    alone: no level trains the linear model beside it.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        device = torch.device(hardware.pick_device(config.device))
        self.world = World(0, 1, device)
        self.corpus = run.load_corpus(config)
        self.split = "test" if self.corpus.test else "dev"
        self.job = lru_cache(maxsize=2)(self._make_job)
        """Returns the job of a seed; those of the last two seeds are kept."""

    def _make_job(self, seed: int) -> TrainJob:
        config = replace(self.config, seed=seed)
        network = run.build_network(config, self.corpus)
        return run.make_job(config, self.corpus, network, self.world)[0]

    def make(self, seed: int) -> TrainingParts:
        """Return model, optimizer, loss function and arguments of `prepare`."""
        config, world, job = self.config, self.world, self.job(seed)
        torch.manual_seed(seed)  # the job has drawn numbers, if it was not there
        network = run.build_network(config, self.corpus)
        model = network.model.to(world.device).train()
        param_groups.freeze(model, config.frozen)
        if not config.compile:  # a compiler generates its own masks
            use_fast_dropout(model)
        fp32 = resolve(O0.name, "auto", world.device.type)
        parallelize.parallelize_model(model, config, fp32, world)
        optimizer = param_groups.make_optimizer(model, config, job.plan.lr)

        def factor(applied: int) -> float:
            return lr_factor(applied, job.plan.total_steps, config.warmup)

        def loss_fn(model: Any, batch: MicroBatch) -> Tensor:  # noqa: ANN401
            part, weight = batch
            return job.loss_sum(model, part) * weight

        arguments = {
            "policy": config.policy,
            "clip_grad_norm": job.plan.clip,
            "accumulate": config.accumulate,
            "scheduler": LambdaLR(optimizer, factor),
        }
        return model, optimizer, loss_fn, arguments

    def batches(self, seed: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of all steps, with the weight of the loss."""
        job = self.job(seed)
        for number in range(1, job.plan.total_steps + 1):
            batch = job.steps[number]
            for part, is_real in zip(batch.parts, batch.is_real, strict=True):
                yield part, is_real * self.config.accumulate / batch.weight

    def metric(self, model: nn.Module) -> float:
        """Return the score of a model that selects checkpoints in a run."""
        return self.scores(model, self.split)[self.config.best_score]

    @torch.no_grad()
    def scores(self, model: nn.Module, split: str) -> dict[str, float]:
        """Return the loss and all scores of a model, in the dtypes that it runs in."""
        job, session = self.job(self.config.seed), cast("Session", _Evaluated(model))
        outputs = collect_outputs(session, job, split)
        metrics = TASKS[job.plan.config.problem].compute_metrics(outputs)
        return {"loss": metrics.loss, **metrics.scores}


def train_workload(file: Path | None) -> Workload:
    """Return the workload of a settings file of `halfstep train`; None: the defaults.

    A seed draws first weights, order, dropout and masked tokens; the split of a single
    file is that of `seed` in the settings.
    """
    given = {} if file is None else read_file(file, "--train")
    config = TrainConfig(**{k: v for k, v in given.items() if k not in _OF_LEVELS})
    runs, score = TrainRuns(config), config.best_score
    corpus = runs.corpus
    notes = [f"{corpus.name}: {corpus.sizes}; {score} of {runs.split}"]
    left_out = [name for name in given if name in (*_OF_LEVELS, *_UNUSED)]
    if left_out:
        notes.append(f"settings of {file} without effect here: {', '.join(left_out)}")
    settings = {k: v for k, v in config.data_dict().items() if k not in _UNUSED}
    return Workload(
        runs.make,
        runs.batches,
        runs.job(config.seed).plan.total_steps,
        runs.metric,
        score,
        lower_is_better=score == "loss",
        settings=settings | {"data": corpus.fingerprint},
        notes=tuple(notes),
    )
