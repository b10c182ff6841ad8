"""The training loop: batches in, applied steps out.

In: a prepared session, encoded examples, settings. Out: metrics, checkpoints, and the
best weights. Every random number of a step is drawn from (seed, step, rank), so a
resumed run needs no saved generators to continue to the bit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep import checkpoint, distributed
from halfstep.errors import UserError
from halfstep.train.batches import batches, share
from halfstep.train.evaluate import judge, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from halfstep.distributed import World
    from halfstep.session import Session
    from halfstep.train.batches import Encoded
    from halfstep.train.evaluate import Quality
    from halfstep.train.folder import RunFolder
    from halfstep.train.progress import Progress


@dataclass(frozen=True)
class Plan:
    """What a run will do, every default resolved."""

    epochs: int
    batch_size: int
    lr: float
    warmup: float
    mask_tokens: float
    eval_every: int
    seed: int
    total_steps: int
    fingerprint: str
    """SHA-256 of the examples: a checkpoint of other data is refused."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices decay, biases and normalisation do not.

    Why: a decay pulls towards zero; for a scale of one or an offset that is no prior.
    """
    decay = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    spared = [(n, p) for n, p in model.named_parameters() if p.dim() <= 1]
    return [
        {"params": [p for _, p in decay], "weight_decay": weight_decay},
        {"params": [p for _, p in spared], "weight_decay": 0.0},
    ]


def rate_factor(applied: int, total: int, warmup: float) -> float:
    """Return the share of the peak learning rate after some applied steps.

    Formula: rises linearly over the first `warmup * total` steps, then falls linearly
    and would reach zero after the last.

    Example:
        >>> [round(rate_factor(step, 10, 0.2), 3) for step in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.125]
    """
    rising = math.ceil(warmup * total)
    if applied < rising:
        return (applied + 1) / rising
    return max(0.0, (total - applied) / max(1, total - rising))


class Diverged(RuntimeError):  # noqa: N818 -- an outcome, as LossScaleCollapse is
    """The weights give a loss that is not a number."""


class Trainer:
    """Trains a session on encoded examples.

    Args:
        session: Prepared, its model wrapped for data parallelism.
        train: What to learn from.
        dev: What to choose the best checkpoint by.
        labels: Names of the classes.
        plan: What to do.
        tokenizer: For padding and hidden tokens.
        world: This process among all.
        folder: Where metrics and checkpoints go.
    """

    def __init__(
        self,
        session: Session,
        train: Encoded,
        dev: Encoded,
        labels: Sequence[str],
        plan: Plan,
        tokenizer: Any,  # noqa: ANN401
        world: World,
        folder: RunFolder,
    ) -> None:
        self.session = session
        self.train = train
        self.dev = dev
        self.labels = labels
        self.plan = plan
        self.world = world
        self.folder = folder
        self.pad_id = tokenizer.pad_token_id
        self._mask_id = tokenizer.mask_token_id
        if plan.mask_tokens and self._mask_id is None:
            message = (
                f"--mask-tokens {plan.mask_tokens}: this model's tokenizer has no mask "
                "token; use --mask-tokens 0."
            )
            raise UserError(message)
        self._special = torch.tensor(tokenizer.all_special_ids)
        self.step_done = 0
        self.seconds = 0.0
        """Time spent in training steps, in this process."""
        self.examples = 0
        self.best: tuple[int, float] = (0, -1.0)
        """(step, macro F1) of the best checkpoint."""

    def fit(self, progress: Progress) -> None:
        """Train to the end of the plan, evaluating and saving on the way."""
        number = 0
        for epoch in range(self.plan.epochs):
            order = batches(
                self.train.lengths,
                self.plan.batch_size,
                seed=self.plan.seed,
                epoch=epoch,
            )
            for batch in order:
                number += 1
                if number <= self.step_done:
                    continue
                record = self._train_step(number, epoch, batch)
                self.step_done = number
                self._log(record)
                progress.step(record)
                if (
                    number % self.plan.eval_every == 0
                    or number == self.plan.total_steps
                ):
                    progress.say(self._evaluate_and_save(number))

    def _train_step(self, number: int, epoch: int, batch: list[int]) -> dict[str, Any]:
        """Make one optimizer step on a global batch; return its record."""
        began = time.perf_counter()
        session, world, plan = self.session, self.world, self.plan
        torch.manual_seed(
            (plan.seed * plan.total_steps + number) * world.size + world.rank
        )
        rate = plan.lr * rate_factor(
            session.steps_applied, plan.total_steps, plan.warmup
        )
        for group in session.optimizer.param_groups:
            group["lr"] = rate
        mine = share(batch, self.train.lengths, world.rank, world.size)
        micro = session.accumulate
        # The mean is over the global batch: DDP divides by the processes, the
        # session by the micro-batches.
        weight = world.size * micro / len(batch)
        summed = torch.zeros((), device=world.device)
        for part in (mine[start::micro] for start in range(micro)):
            # Without examples left, a process still takes part: DDP waits for it.
            loss = self._loss(part or batch[:1]) * bool(part)
            session.backward(loss * weight)
            report = session.step()
            summed += loss.detach()
        mean = float(distributed.total(summed)) / len(batch)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.examples += len(batch)
        return {
            "step": number,
            "epoch": epoch,
            "loss": mean,
            "lr": rate,
            "scale": report.scale,
            "skipped": report.skipped,
            "skipped_total": session.steps_skipped,
            "found_inf_in": list(report.found_inf_in[:3]),
            "grad_norm": report.grad_norm,
            "examples_per_s": len(batch) / spent,
        }

    def _loss(self, indices: Sequence[int]) -> Tensor:
        """Return the summed cross-entropy of some training examples."""
        inputs = self.train.collate(indices, self.pad_id)
        truth = inputs.pop("labels").to(self.world.device)
        if self.plan.mask_tokens:
            inputs["input_ids"] = self._hide(inputs["input_ids"])
        moved = {name: tensor.to(self.world.device) for name, tensor in inputs.items()}
        with self.session.autocast():
            logits = self.session.model(**moved).logits
            return torch.nn.functional.cross_entropy(
                logits.float(), truth, reduction="sum"
            )

    def _hide(self, ids: Tensor) -> Tensor:
        """Replace a random share of the tokens, special ones apart, by the mask."""
        chosen = torch.rand(ids.shape) < self.plan.mask_tokens
        return ids.masked_fill(chosen & ~torch.isin(ids, self._special), self._mask_id)

    def _log(self, record: dict[str, Any]) -> None:
        if self.world.leads:
            self.folder.log(record)

    def _evaluate_and_save(self, number: int) -> str:
        """Judge the model on the dev split, write a checkpoint; return a line."""
        quality = self.quality(self.dev)
        if not math.isfinite(quality.loss):
            message = (
                f"the model's loss on dev is {quality.loss} at step {number}: training "
                "has diverged. The last good checkpoint is kept; lower --lr"
                f"{' or use --level O2' if self.session.choice.level.low else ''}."
            )
            raise Diverged(message)
        better = quality.macro_f1 > self.best[1]
        if better:
            self.best = (number, quality.macro_f1)
        if self.world.leads:
            self._log(
                {
                    "step": number,
                    "event": "eval",
                    "dev_loss": quality.loss,
                    "dev_accuracy": quality.accuracy,
                    "dev_macro_f1": quality.macro_f1,
                }
            )
            self._save(number, better)
        distributed.wait_for_all()
        star = " (best)" if better else ""
        return (
            f"step {number}: dev loss {quality.loss:.4f}, accuracy "
            f"{quality.accuracy:.4f}, macro F1 {quality.macro_f1:.4f}{star}"
        )

    def quality(self, encoded: Encoded) -> Quality:
        """Return the model's quality on encoded examples."""
        logits, truth = predict(self.session, encoded, self.world, self.pad_id)
        return judge(logits, truth, self.labels)

    def _save(self, number: int, best: bool) -> None:
        state = self.session.state_dict()
        weights = state.pop("weights")
        state["run"] = {
            "step": number,
            "best": self.best,
            "fingerprint": self.plan.fingerprint,
            "processes": self.world.size,
            "reason": self.session.choice.reason,
        }
        notes = {
            "step": number,
            "level": state["level"],
            "dtype": state["dtype"],
            "master": state["masters"]["form"],
            "labels": list(self.labels),
        }
        self.folder.save(number, weights, state, notes, best=best)

    def load(self, source: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint of this run.

        Raises:
            UserError: If it is of other data or of another number of processes.
        """
        run = source.state.get("run", {})
        if run.get("fingerprint") != self.plan.fingerprint:
            message = (
                "--resume: the checkpoint was made from other data; resume with the "
                "data it was trained on."
            )
            raise UserError(message)
        if run["processes"] != self.world.size:
            message = (
                f"--resume: the checkpoint was made by {run['processes']} processes, "
                f"this is {self.world.size}; resume with {run['processes']}."
            )
            raise UserError(message)
        self.session.load_state_dict(source.state | {"weights": source.weights})
        self.step_done = run["step"]
        self.best = tuple(run["best"])

    def load_best(self) -> None:
        """Put the weights of the best checkpoint into the model."""
        best = checkpoint.load(self.folder.best())
        self.session.load_state_dict(best.state | {"weights": best.weights})
