"""What most people write instead: the plain loop, to be measured beside ours.

In: the settings of the bench. Out: time, losses and accuracy. The loop is not tuned
and not spoiled: every text is padded to 128 and tokenised in the collate function,
the optimizer is AdamW as torch has it (not fused, everything decays), mixed precision
is torch.autocast with torch.amp.GradScaler, on a GPU in fp16. Model, vocabulary, split,
schedule and clipping are those of `halfstep train`.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from halfstep.distributed.process_group import World
from halfstep.train import model as train_model
from halfstep.train.config import TrainConfig
from halfstep.train.data import tokenized
from halfstep.train.data.corpus import load
from halfstep.train.plan import lr_factor, resolve_plan
from halfstep.train.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.train.data.corpus import Split

    Example = tuple[str, int]
    """A text and its class."""

PADDED = 128


def plain_loop(
    *,
    data: str | None,
    limit: int | None,
    seed: int,
    epochs: int,
    model: str,
    amp: bool,
) -> dict[str, Any]:
    """Train and evaluate as tutorials do; return what was measured.

    Args:
        data: File or folder; None is the built-in data.
        limit: First rows only.
        seed: Of the split, the weights and the order.
        epochs: Passes over the data.
        model: As `--model` takes it.
        amp: With torch.autocast and torch.amp.GradScaler; otherwise fp32.
    """
    config = TrainConfig(data=data, limit=limit, seed=seed, epochs=epochs, model=model)
    corpus = load(
        Path(data) if data else None,
        task=config.task,
        label_names=None,
        limit=limit,
        dev_share=config.dev_share,
        seed=seed,
    )
    torch.manual_seed(seed)
    network = train_model.build(
        model,
        partial(tokenized.character_counts, corpus.train),
        corpus.labels,
        head="SequenceClassification",
        max_length=PADDED,
        dropout=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    alone = World(0, 1, torch.device(device))
    plan = resolve_plan(config, corpus, alone, scratch=network.from_scratch)
    train, dev = _examples(corpus.train), _examples(corpus.dev)

    def collate(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        batch = network.tokenizer(
            [text for text, _ in examples],
            padding="max_length",
            truncation=True,
            max_length=PADDED,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([label for _, label in examples])
        return {name: tensor.to(device) for name, tensor in batch.items()}

    loader: DataLoader[Any] = DataLoader(
        train,  # type: ignore[arg-type]
        config.batch_size,
        shuffle=True,
        collate_fn=collate,
    )
    net = network.model.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), plan.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, plan.total_steps, plan.warmup)
    )
    scaler = torch.amp.GradScaler(device, enabled=amp)
    low_dtype = torch.float16 if device == "cuda" else torch.bfloat16
    losses, skipped = [], 0
    clock = Timers()
    began = time.perf_counter()
    for _ in range(epochs):
        source = iter(loader)
        while True:
            with clock.time("input"):
                batch = next(source, None)
            if batch is None:
                break
            with clock.time("forward"), torch.autocast(device, low_dtype, enabled=amp):
                loss = net(**batch).loss
            with clock.time("backward"):
                scaler.scale(loss).backward()
            with clock.time("update"):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), config.clip)
                scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                if scaler.get_scale() >= scale:
                    schedule.step()
                else:
                    skipped += 1
                optimizer.zero_grad()
            losses.append(loss.item())
    seconds = time.perf_counter() - began
    clock.seconds["rest"] = seconds - sum(clock.seconds.values())
    dev_loss, dev_accuracy = _evaluate(net, dev, collate)
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "seconds": seconds,
        "examples_per_s": epochs * len(train) / seconds,
        "train_loss": sum(last) / len(last),
        "dev_loss": dev_loss,
        "dev_accuracy": dev_accuracy,
        "skipped": skipped,
        "steps": len(losses),
        "parts": clock.seconds,
    }


def _examples(split: Split) -> list[Example]:
    """Return a split as tutorials hold it: all of it, in memory."""
    return list(zip(split.texts(), split.labels().tolist(), strict=True))


@torch.no_grad()
def _evaluate(net: Any, dev: Sequence[Example], collate: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return loss and accuracy in fp32."""
    net.eval()
    loss, right = 0.0, 0
    for start in range(0, len(dev), 128):
        batch = collate(dev[start : start + 128])
        out = net(**batch)
        loss += out.loss.item() * len(batch["labels"])
        right += int((out.logits.argmax(-1) == batch["labels"]).sum())
    return loss / len(dev), right / len(dev)
