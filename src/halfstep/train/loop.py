"""The training loop: steps, evaluations, checkpoints, logging.

Random numbers of a step depend on (seed, step, rank) only, so a resumed run continues
bit-exactly without saved generator states.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

from halfstep.diagnostics.probe import Probe
from halfstep.diagnostics.profiling.profile_step import summary, watched
from halfstep.distributed import ddp, process_group
from halfstep.reporting.table import format_count
from halfstep.scaling import LossScaleCollapse
from halfstep.train import checkpointing, replay_step, wide
from halfstep.train.metrics import score_title, score_value
from halfstep.train.output.progress import TensorBoardWriter
from halfstep.train.plan import Timers, TrainJob, TrainState, lr_factor
from halfstep.train.signals import SIGNALS, Diverged, Stopped, StopRequest
from halfstep.train.step_dataset import iterate_steps
from halfstep.train.tasks import TASKS, collect_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from halfstep.diagnostics.profiling.profile_result import Profile
    from halfstep.distributed.process_group import World
    from halfstep.machine.recommendation import Choice
    from halfstep.nonfinite.origin import BadOp
    from halfstep.session.session import Session
    from halfstep.train.output.progress import Progress
    from halfstep.train.output.run_directory import RunFolder
    from halfstep.train.step_dataset import StepBatch
    from halfstep.train.tasks import SplitOutputs, Task


T = TypeVar("T")

_PROFILED_STEP = 20
"""By this step memory is allocated and caches are full. A shorter run profiles its last
step."""

_PROFILED_DEVICES = {"cpu"}
"""Where profiling is known to be cheap. On a GPU the profiler first loads a driver
library, whose cost was not measured."""


class Trainer:
    """Trains a session, its model wrapped for data parallelism, on a job."""

    def __init__(
        self, session: Session, job: TrainJob, world: World, folder: RunFolder
    ) -> None:
        self.session = session
        self.job = job
        self.world = world
        self.folder = folder
        self.stop = StopRequest()
        self._tensorboard: TensorBoardWriter | None = None
        self._probe: Probe | None = None
        self.state = TrainState()
        self._peak_rates = [group["lr"] for group in session.optimizer.param_groups]
        parts = ("fit", "train", "input", "evaluate", "save")
        self.seconds = dict.fromkeys(parts, 0.0)
        """Seconds spent by this process since its start; "train" includes "input", and
        "fit" is of a linear model."""
        self.examples = 0
        """Texts trained on by all ranks since the start, repeats counted."""
        self.tokens = 0
        self.padded_tokens = 0
        """Tokens of this rank since the start, without and with padding."""
        self._stop_signal = 0
        self._skip_watcher = replay_step.SkipWatcher()
        self._last_batch: StepBatch | None = None
        self._linear_outputs: Tensor | None = None
        """Logits on dev of a classifier's linear model, which does not change."""

    @property
    def task(self) -> Task:
        """What the run learns."""
        return TASKS[self.job.plan.config.problem]

    def open(self, *, tensorboard: bool, probe: str) -> None:
        """Start TensorBoard logging and the probe, if enabled."""
        if tensorboard:
            folder = self.folder.path / "tensorboard"
            self._tensorboard = TensorBoardWriter(folder, self.state.step)
        if probe != "off":
            mode: Any = probe  # checked by TrainConfig
            self._probe = Probe(
                self.session.model,
                mode,
                after=self.state.step,
                log=self.folder.log,
            )

    def close(self) -> None:
        """Stop TensorBoard logging and the probe."""
        if self._probe is not None:
            self._probe.detach()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def fit(self, progress: Progress) -> None:
        """Train to the end; raise Stopped after a signal, Diverged for the dev loss."""
        plan, pin = self.job.plan, self.world.device.type == "cuda"
        if self._is_patience_exhausted():
            return
        first, last = self.state.step + 1, plan.total_steps
        source = iterate_steps(
            self.job.steps, first, last, workers=plan.workers, pin=pin
        )
        # Workers ignore signals: one left running would keep the program from exiting.
        with contextlib.closing(source):
            for number in range(first, last + 1):
                clock = Timers()
                with clock.time("input"):
                    batch = next(source)
                record = self._step_with_replay(batch, clock)
                self.state.step = number
                self._log(record)
                if self._probe is not None:
                    self._probe.step(number)
                progress.step(record)
                if number % plan.eval_every == 0 or number == last:
                    progress.print_line(self._evaluate_and_save())
                    # An evaluation can take long: check for a signal again.
                    nothing = torch.zeros((), device=self.world.device)
                    self._reduce_loss_and_stop(nothing)
                    if self._is_patience_exhausted():
                        name, best = plan.config.best_score, self.state.best_step
                        waited = format_count(self.state.waited, "evaluation")
                        progress.print_line(
                            f"stopped early after step {number}: {name} has not "
                            f"improved in {waited}; the best is of step {best}"
                        )
                        return
                elif self._stop_signal:
                    self._save()
                if self._stop_signal and number < last:
                    raise Stopped(self._stop_signal, number, last, self.folder.path)

    def _step_with_replay(self, batch: StepBatch, clock: Timers) -> dict[str, Any]:
        """Run one step; replay it if it fails repeatedly or for good."""
        self._last_batch = batch
        try:
            record = self._step_with_profile(batch, clock)
        except LossScaleCollapse as error:
            origin = self._replay(batch, error.history[-1], failed=True)
            if origin is not None:
                error.attach_replay(origin)
            if self._probe is not None:
                self._probe.step(batch.number)
            raise
        is_dynamic = self.session.scaler.rule.backoff_factor < 1
        if self._skip_watcher.should_replay(record, is_dynamic=is_dynamic):
            self._replay(batch, record["scale"], failed=True)
        return record

    def _replay(self, batch: StepBatch, scale: float, *, failed: bool) -> BadOp | None:
        """Replay a step, and log the origin of its non-finite values."""
        origin = replay_step.replay(
            self.session,
            batch,
            self.micro_batch_loss,
            lambda: self._seed(batch),
            scale=scale,
            losses=self._skip_watcher.history(self.session.steps_applied),
            failed=failed,
        )
        if origin is not None and self.world.is_first:
            event = {"step": batch.number, "event": "bad_op"}
            self.folder.log(origin.data() | event)
        return origin

    def _seed(self, batch: StepBatch) -> None:
        """Seed the random generators of a step.

        Not with `torch.manual_seed`: it records a stack trace for each device type that
        is not initialized, at 30 microseconds each.
        """
        number = self.job.steps.seed_of(batch.number)
        torch.default_generator.manual_seed(number)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def _step_with_profile(self, batch: StepBatch, clock: Timers) -> dict[str, Any]:
        """Run a step; profile one early in the run and write its profile."""
        total, device = self.job.plan.total_steps, self.world.device
        if not (self.world.is_first and is_profile_step(batch.number, total, device)):
            return self.train_step(batch, clock)
        record, profile = run_profiled(
            lambda: self.train_step(batch, clock), clock, self.session.choice
        )
        if profile is not None:
            self.folder.write("profile.json", json.dumps(profile.data()))
        return record

    def _is_patience_exhausted(self) -> bool:
        patience = self.job.plan.config.patience
        return patience is not None and self.state.waited >= patience

    def train_step(self, batch: StepBatch, clock: Timers) -> dict[str, Any]:
        """Run one optimizer step on a global batch; return its record."""
        began = time.perf_counter()
        session, world, plan = self.session, self.world, self.job.plan
        self._seed(batch)
        applied = session.steps_applied
        factor = lr_factor(applied, plan.total_steps, plan.config.warmup)
        groups = session.optimizer.param_groups
        for group, peak in zip(groups, self._peak_rates, strict=True):
            group["lr"] = peak * factor
        # The mean over the global batch: DDP divides by the ranks, the session by the
        # micro-batches.
        weight = world.size * session.accumulate / batch.weight
        summed = torch.zeros((), device=world.device)
        for part, real in zip(batch.parts, batch.is_real, strict=True):
            with clock.time("forward"):
                loss = self.micro_batch_loss(part) * real
            with clock.time("backward"):
                session.backward(loss * weight)
            with clock.time("update"):
                report = session.step()
            summed += loss.detach()
        mean = self._reduce_loss_and_stop(summed) / batch.weight
        spent = time.perf_counter() - began
        waited = clock.seconds["input"]
        clock.seconds["rest"] = spent + waited - sum(clock.seconds.values())
        self.seconds["train"] += spent + waited
        self.seconds["input"] += waited
        self.examples += batch.size
        self.tokens += batch.tokens
        self.padded_tokens += batch.padded_tokens
        return {
            "step": batch.number,
            "epoch": batch.epoch,
            "loss": mean,
            "lr": plan.lr * factor,
            "scale": report.scale,
            "skipped": report.skipped,
            "skipped_total": session.steps_skipped,
            "found_inf_in": list(report.found_inf_in[:3]),
            "grad_norm": report.grad_norm,
            "examples_per_s": batch.size / (spent + waited),
            "seconds": clock.seconds,
        }

    def micro_batch_loss(self, part: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of a micro-batch."""
        with self.session.autocast():
            return self.job.loss_sum(self.session.model, part)

    def _reduce_loss_and_stop(self, summed: Tensor) -> float:
        """Sum the loss over all ranks; the same all-reduce agrees on a stop signal."""
        asked = [float(self.stop.signal == number) for number in SIGNALS]
        values = torch.cat([summed[None], torch.tensor(asked, device=summed.device)])
        total, *votes = process_group.all_reduce_sum(values).tolist()
        for number, vote in zip(SIGNALS, votes, strict=True):
            if vote and not self._stop_signal:
                self._stop_signal = number
        return float(total)

    def _log(self, record: Mapping[str, Any]) -> None:
        if self.world.is_first:
            self.folder.log(record)
            if self._tensorboard is not None:
                self._tensorboard.write(record)

    def _evaluate_and_save(self) -> str:
        """Evaluate the dev split, save a checkpoint; return a line for the console."""
        began = time.perf_counter()
        probe = self._probe
        with contextlib.nullcontext() if probe is None else probe.paused():
            metrics = self.task.compute_metrics(self._dev_outputs())
        self.seconds["evaluate"] += time.perf_counter() - began
        number, name = self.state.step, self.job.plan.config.best_score
        if not math.isfinite(metrics.loss):
            # The last batch has updated the weights since, so it may not fail again.
            batch = self._last_batch
            origin = batch and self._replay(batch, 1.0, failed=False)
            raise Diverged(self._divergence_message(metrics.loss), origin)
        score = -metrics.loss if name == "loss" else metrics.scores[name]
        before = self.state.best_score
        better = before is None or score > before
        if better:
            self.state.best_step, self.state.best_score = number, score
        self.state.waited = 0 if better else self.state.waited + 1
        # Scores may differ in the last digit between CPU types, so rank 0 decides.
        self.state = process_group.broadcast_object(self.state)
        better = self.state.best_step == number
        scores = {f"dev_{key}": value for key, value in metrics.scores.items()}
        dev_metrics = {"dev_loss": metrics.loss, **scores, "constant": metrics.constant}
        self._log({"step": number, "event": "eval", **dev_metrics})
        self._log_lost_updates()
        self._save()
        star = " (best)" if better else ""
        values = {"loss": metrics.loss, **metrics.scores}
        words = ", ".join(
            f"{score_title(key)} {score_value(key, value)}"
            for key, value in values.items()
        )
        constant = f"; WARNING: the model predicts {metrics.constant} for every text"
        return f"step {number}: dev {words}{star}{constant if metrics.constant else ''}"

    def _dev_outputs(self) -> SplitOutputs:
        """Return the outputs on dev; set how much of them is the encoder's."""
        classifier: Any = ddp.unwrap(self.session.model)
        if not wide.is_used(classifier, self.job.encoded["dev"]):
            return self.collect_outputs("dev")
        if self._linear_outputs is None:
            classifier.share.fill_(0.0)
            self._linear_outputs = self.collect_outputs("dev").outputs
        classifier.share.fill_(1.0)
        found, linear = self.collect_outputs("dev"), self._linear_outputs
        objective: Any = self.job.steps.objective
        parts = linear, found.outputs - linear
        chosen = wide.choose_share(classifier, *parts, found.targets, objective.weights)
        return replace(found, outputs=chosen)

    def _log_lost_updates(self) -> None:
        step = self.state.step
        groups = [
            {"group": lost.group, "share": lost.share}
            for lost in self.session.lost_updates()
            if lost.step == step and lost.share is not None
        ]
        if groups and self.world.is_first:
            self.folder.log({"step": step, "event": "lost_updates", "groups": groups})

    def _divergence_message(self, loss: float) -> str:
        is_saved = self.state.best_step > 0
        lower = "The last good checkpoint is kept; lower" if is_saved else "Lower"
        level = self.session.choice.level
        level_hint = " or use --level O2" * (level.low_weights and not level.masters)
        return (
            f"the model's loss on dev is {loss} at step {self.state.step}: training "
            f"has diverged. {lower} --lr{level_hint}."
        )

    def collect_outputs(self, split: str) -> SplitOutputs:
        """Return the outputs of a split, on each rank."""
        return collect_outputs(self.session, self.job, split)

    def _save(self) -> None:
        began = time.perf_counter()
        checkpointing.save(self.session, self.state, self.job, self.folder)
        self.seconds["save"] += time.perf_counter() - began


def is_profile_step(number: int, total: int, device: torch.device) -> bool:
    """Return whether to profile this step."""
    ours = number == min(_PROFILED_STEP, total) and device.type in _PROFILED_DEVICES
    return ours and not _profiler_enabled()  # the program may itself be profiled


def run_profiled(
    step: Callable[[], T], clock: Timers, choice: Choice
) -> tuple[T, Profile | None]:
    """Run a step under the profiler; its results are the same as without.

    If the profile cannot be read, warns and returns None for it.
    """
    results: list[T] = []
    try:
        timeline = watched(lambda: results.append(step()))
        waited = clock.seconds["input"]
        wall = timeline.length / 1e9 + waited
        level, dtype = choice.level.name, choice.format.name
        return results[0], summary(timeline, wall, waited, level=level, dtype=dtype)
    except Exception as error:
        if not results:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        message = f"where the time of a step goes could not be read: {reason}"
        warnings.warn(f"{message}; training goes on.", stacklevel=2)
    return results[0], None
