"""The training loop: the work of each step in, applied steps out.

In: a prepared session, and a `Job` that says what to do. Out: metrics, checkpoints,
and the best weights. Every random number of a step is drawn from (seed, step, rank),
so a resumed run needs no saved generators to continue to the bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.probe import Probe
from halfstep.distributed import process_group
from halfstep.reporting.table import count
from halfstep.scaling import LossScaleCollapse
from halfstep.train import checkpointing, profile_step, replay_step
from halfstep.train.evaluate import noted
from halfstep.train.metrics.result import words_of
from halfstep.train.output.tensorboard import Board
from halfstep.train.param_groups import SHARE
from halfstep.train.plan import rate_factor
from halfstep.train.signals import Diverged, Stop, Stopped
from halfstep.train.step_dataset import feed
from halfstep.train.timers import Clock
from halfstep.train.train_state import Job, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from halfstep.distributed.process_group import World
    from halfstep.nonfinite.origin import BadOp
    from halfstep.reporting.table import Table
    from halfstep.session.session import Session
    from halfstep.train.metrics.result import Judged
    from halfstep.train.output.progress import Progress
    from halfstep.train.output.run_directory import RunFolder
    from halfstep.train.step_dataset import Work

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _seed(number: int, device: torch.device) -> None:
    """Seed what a step draws from, as `torch.manual_seed` does.

    Why not by that: it notes a stack trace for each kind of device that is not there,
    a thirtieth of a millisecond each.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


class Trainer:
    """Trains a session at a job.

    Args:
        session: Prepared, its model wrapped for data parallelism.
        job: What to do.
        world: This process among all.
        folder: Where metrics and checkpoints go.
    """

    def __init__(
        self,
        session: Session,
        job: Job,
        world: World,
        folder: RunFolder,
    ) -> None:
        self.session = session
        self.job = job
        self.world = world
        self.folder = folder
        self.stop = Stop()
        self._board: Board | None = None
        self._probe: Probe | None = None
        self.standing = Standing()
        self.seconds = dict.fromkeys(("train", "input", "evaluate", "save"), 0.0)
        """What this process spent, since it was started; input is a part of train."""
        self.examples = 0
        """Texts trained on by all processes since then, repeats counted."""
        self.tokens = 0
        self.places = 0
        """Tokens of this process since then, without and with padding."""
        self._asked = 0
        self._failures = replay_step.Watcher()
        self._last: Work | None = None

    def open(self, *, tensorboard: bool, probe: str) -> None:
        """Begin to write what TensorBoard reads, and to observe, where asked for.

        Args:
            tensorboard: Write for TensorBoard.
            probe: "off", or a mode of `Probe`, whose events join the metrics.
        """
        if tensorboard:
            folder = self.folder.path / "tensorboard"
            self._board = Board(folder, self.standing.step)

        if probe != "off":
            mode: Any = probe  # a word that the settings have checked
            self._probe = Probe(
                self.session.model,
                mode,
                after=self.standing.step,
                log=self.folder.log if self.world.leads else None,
                over_ranks=self.world.size > 1,
            )

    def close(self) -> None:
        """End writing and observing."""
        if self._probe is not None:
            self._probe.detach()
        if self._board is not None:
            self._board.close()

    def _unseen(self) -> AbstractContextManager[None]:
        """Return what keeps the probe from looking: a pass that trains nothing."""
        return contextlib.nullcontext() if self._probe is None else self._probe.paused()

    def fit(self, progress: Progress) -> None:
        """Train to the end of the plan, evaluating and saving on the way.

        Raises:
            Stopped: If a signal asked for it; a checkpoint was saved before.
            Diverged: If the loss is not a number.
        """
        plan, pin = self.job.plan, self.world.device.type == "cuda"
        if self._is_over():
            return
        first, last = self.standing.step + 1, plan.total_steps
        source = feed(self.job.steps, first, last, workers=plan.workers, pin=pin)
        # Workers heed no signal: one that is left would keep the program from ending.
        with contextlib.closing(source):
            self._fit(source, progress)

    def _fit(self, source: Iterator[Work], progress: Progress) -> None:
        """Take the steps that a source prepares."""
        plan = self.job.plan
        while True:
            clock = Clock()
            with clock.time("input"):
                work = next(source, None)
            if work is None:
                return
            record = self._watched_step(work, clock)
            number = self.standing.step = work.number
            self._note(record)
            if self._probe is not None:
                self._probe.step(number)
            progress.step(record)
            if number % plan.eval_every == 0 or number == plan.total_steps:
                progress.say(self._evaluate_and_save())
                self._agree_to_stop()
                if self._is_over():
                    progress.say(self._early(number))
                    return
            elif self._asked:
                self._save()
            if self._asked and number < plan.total_steps:
                out = self.folder.path
                raise Stopped(self._asked, number, plan.total_steps, out)

    def _watched_step(self, work: Work, clock: Clock) -> dict[str, Any]:
        """Make one step; where it fails for good or without end, see why.

        Raises:
            LossScaleCollapse: With what was found.
        """
        self._last = work
        try:
            record = self._taken(work, clock)
        except LossScaleCollapse as error:
            bad = self._again(work, error.history[-1], failed=True)
            if bad is not None:
                error.tell(bad)
            if self._probe is not None:
                self._probe.step(work.number)
            raise
        moves = self.session.scaler.rule.backoff_factor < 1
        if self._failures.due(record, moves=moves):
            self._again(work, record["scale"], failed=True)
        return record

    def _again(self, work: Work, scale: float, *, failed: bool) -> BadOp | None:
        """Run a step again, and write down what was bad in it."""
        bad = replay_step.found(
            self.session,
            work,
            self._loss,
            lambda: self._seed(work),
            scale=scale,
            losses=self._failures.history(self.session.steps_applied),
            failed=failed,
        )
        if bad is not None and self.world.leads:
            event = {"step": work.number, "event": "bad_op"}
            self.folder.log(bad.data() | event)
        return bad

    def _seed(self, work: Work) -> None:
        _seed(self.job.steps.seed_of(work.number), self.world.device)

    def _taken(self, work: Work, clock: Clock) -> dict[str, Any]:
        """Make a step; of one early in the run, write down where its time went."""
        total, device = self.job.plan.total_steps, self.world.device
        if not (self.world.leads and profile_step.due(work.number, total, device)):
            return self.train_step(work, clock)
        record, found = profile_step.looked(
            lambda: self.train_step(work, clock), clock, self.session.choice
        )
        if found is not None:
            self.folder.write("profile.json", json.dumps(found.data()))
        return record

    def _is_over(self) -> bool:
        """Say whether patience has run out."""
        patience = self.job.plan.patience
        return patience is not None and self.standing.waited >= patience

    def _early(self, number: int) -> str:
        name = self.job.plan.best_by
        return (
            f"stopped early after step {number}: {name} has not improved in "
            f"{count(self.standing.waited, 'evaluation')}; the best is of step "
            f"{self.standing.best_step}"
        )

    def train_step(self, work: Work, clock: Clock) -> dict[str, Any]:
        """Make one optimizer step on a global batch; return its record."""
        began = time.perf_counter()
        session, world, plan = self.session, self.world, self.job.plan
        self._seed(work)
        applied = session.steps_applied
        rate = plan.lr * rate_factor(applied, plan.total_steps, plan.warmup)
        for group in session.optimizer.param_groups:
            group["lr"] = rate * group[SHARE]
        # The mean is over the global batch: DDP divides by the processes, the
        # session by the micro-batches.
        weight = world.size * session.accumulate / work.weight
        summed = torch.zeros((), device=world.device)
        for part, real in zip(work.parts, work.real, strict=True):
            with clock.time("forward"):
                loss = self._loss(part) * real
            with clock.time("backward"):
                session.backward(loss * weight)
            with clock.time("update"):
                report = session.step()
            summed += loss.detach()
        mean = self._agreed(summed) / work.weight
        spent = time.perf_counter() - began
        waited = clock.parts["input"]
        clock.parts["rest"] = spent + waited - sum(clock.parts.values())
        self.seconds["train"] += spent + waited
        self.seconds["input"] += waited
        self.examples += work.size
        self.tokens += work.tokens
        self.places += work.places
        return {
            "step": work.number,
            "epoch": work.epoch,
            "loss": mean,
            "lr": rate,
            "scale": report.scale,
            "skipped": report.skipped,
            "skipped_total": session.steps_skipped,
            "found_inf_in": list(report.found_inf_in[:3]),
            "grad_norm": report.grad_norm,
            "examples_per_s": work.size / (spent + waited),
            "seconds": clock.parts,
        }

    def _loss(self, part: dict[str, Tensor]) -> Tensor:
        """Return the summed loss of a micro-batch."""
        device = self.world.device
        moved = {
            name: tensor.to(device, non_blocking=True) for name, tensor in part.items()
        }
        targets = moved.pop("labels")
        with self.session.autocast():
            logits = self.session.model(**moved).logits
            return self.job.objective.summed(logits, targets)

    def _agreed(self, summed: Tensor) -> float:
        """Return a sum over all processes; learn on the way who is asked to stop."""
        asked = [float(self.stop.signal == number) for number in _SIGNALS]
        told = torch.cat([summed[None], torch.tensor(asked, device=summed.device)])
        total, *votes = process_group.total(told).tolist()
        for number, vote in zip(_SIGNALS, votes, strict=True):
            if vote and not self._asked:
                self._asked = number
        return float(total)

    def _agree_to_stop(self) -> None:
        """Ask all processes once more: an evaluation may take long."""
        self._agreed(torch.zeros((), device=self.world.device))

    def _note(self, record: Mapping[str, Any]) -> None:
        if self.world.leads:
            self.folder.log(record)
            if self._board is not None:
                self._board.write(record)

    def _evaluate_and_save(self) -> str:
        """Judge the model on the dev split, write a checkpoint; return a line."""
        began = time.perf_counter()
        with self._unseen():
            judged = self.judge("dev", *self.noted("dev"))
        self.seconds["evaluate"] += time.perf_counter() - began
        number, name = self.standing.step, self.job.plan.best_by
        if not math.isfinite(judged.loss):
            # The weights are those after its update, so it need not fail again.
            work = self._last
            bad = work and self._again(work, 1.0, failed=False)
            raise Diverged(self._diverged(judged.loss), bad)
        score = -judged.loss if name == "loss" else judged.scores[name]
        before = self.standing.best_score
        better = before is None or score > before
        if better:
            self.standing.best_step, self.standing.best_score = number, score
        self.standing.waited = 0 if better else self.standing.waited + 1
        # Processors of several kinds may differ in a last digit, and so in a decision.
        self.standing = process_group.same_everywhere(self.standing)
        better = self.standing.best_step == number
        scores = {f"dev_{key}": value for key, value in judged.scores.items()}
        told = {"dev_loss": judged.loss, **scores, "classes": judged.classes()}
        self._note({"step": number, "event": "eval", **told})
        self._note_lost()
        self._save()
        star = " (best)" if better else ""
        shown = {"loss": judged.loss, **judged.scores}
        words = ", ".join(f"{words_of(key)} {shown[key]:.4f}" for key in shown)
        return f"step {number}: dev {words}{star}"

    def _note_lost(self) -> None:
        """Write down which updates rounding swallowed, where they were counted."""
        step = self.standing.step
        groups = [
            {"group": lost.group, "share": lost.share}
            for lost in self.session.lost_updates()
            if lost.step == step and lost.share is not None
        ]
        if groups and self.world.leads:
            self.folder.log({"step": step, "event": "lost_updates", "groups": groups})

    def _diverged(self, loss: float) -> str:
        kept = "The last good checkpoint is kept; " * (self.standing.best_step > 0)
        level = self.session.choice.level
        other = " or use --level O2" * (level.low_weights and not level.masters)
        return (
            f"the model's loss on dev is {loss} at step {self.standing.step}: training "
            f"has diverged. {kept}lower --lr{other}."
        )

    def judge(self, split: str, made: Tensor, loss: float) -> Judged:
        """Return how good the model is on a split, from what was noted."""
        job = self.job
        rows, labels = getattr(job.corpus, split), job.corpus.labels
        return job.task.judge(made, job.encoded[split], rows, labels, loss)

    def mistakes(self, split: str, made: Tensor) -> Table:
        """Return the errors on a split that are worth reading."""
        job = self.job
        rows, labels = getattr(job.corpus, split), job.corpus.labels
        return job.task.mistakes(made, job.encoded[split], rows, labels)

    def noted(self, split: str) -> tuple[Tensor, float]:
        """Return what the task notes of a split, and the loss."""
        job = self.job
        return noted(
            self.session,
            job.task,
            job.encoded[split],
            self.world,
            pad_id=job.pad_id,
            multiple=job.multiple,
        )

    def _save(self) -> None:
        began = time.perf_counter()
        checkpointing.save(
            self.session, self.standing, self.job, self.folder, self.world
        )
        self.seconds["save"] += time.perf_counter() - began

    def load_best(self) -> None:
        """Put the weights of the best checkpoint into the model."""
        best = self.standing.best_step
        if best not in {0, self.standing.step}:
            checkpointing.load(self.session, self.folder.checkpoint_path(best))
