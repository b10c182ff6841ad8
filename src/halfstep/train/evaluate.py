"""Evaluates a split on all ranks, each example once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.distributed import ddp, process_group
from halfstep.train.data.length_batches import ordered
from halfstep.train.tasks import Objective

if TYPE_CHECKING:
    from halfstep.distributed.process_group import World
    from halfstep.session.session import Session
    from halfstep.train.data.tokenized import EncodedTexts
    from halfstep.train.tasks import Task

EVAL_BATCH = 128
"""Texts per batch: without gradients, about the memory of a training batch of 32."""

_UNWEIGHTED = Objective(None, 0.0)


@torch.no_grad()
def collect_outputs(
    session: Session,
    task: Task,
    encoded: EncodedTexts,
    world: World,
    *,
    pad_id: int,
    multiple: int,
) -> tuple[torch.Tensor, float]:
    """Return the outputs of every example, and the mean loss, on each rank.

    Ranks take batches in turn and fill their rows of `task.empty_outputs`, which are
    summed. The loss is the mean cross-entropy of all targets, without class weights
    and label smoothing.
    """
    model: Any = ddp.unwrap(session.model)
    outputs = task.empty_outputs(encoded, model.config.num_labels)
    sums = torch.zeros(2, dtype=torch.float64)
    batches = ordered(encoded.lengths, EVAL_BATCH)
    model.eval()
    # FSDP gathers the weights collectively, so all ranks run equally many batches.
    for start in range(0, len(batches), world.size):
        own_batch = start + world.rank
        counts = own_batch < len(batches)
        indices = batches[own_batch if counts else 0]
        inputs = encoded.collate(indices, pad_id, multiple)
        moved = {name: tensor.to(world.device) for name, tensor in inputs.items()}
        targets = moved.pop("labels")
        with session.autocast():
            logits = model(**moved).logits.float()
        if counts:
            loss = _UNWEIGHTED.loss_sum(logits, targets)
            num_targets = float(encoded.counts[indices].sum())
            sums += torch.tensor([float(loss), num_targets], dtype=torch.float64)
            task.write_outputs(outputs, encoded, indices, logits)
    model.train()
    all_outputs = process_group.all_reduce_sum(outputs.to(world.device)).cpu()
    summed, count = process_group.all_reduce_sum(sums.to(world.device)).tolist()
    return all_outputs, summed / max(1.0, count)  # texts may have no tokens
