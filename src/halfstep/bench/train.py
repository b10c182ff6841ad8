"""`halfstep bench train`: the text classifier at each level, and a plain loop.

Reports time, memory and quality, and the time per part of a step. Each contender runs
in its own process, for its own peak memory; contenders take turns, so that a slow
period of the machine affects all of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from halfstep.bench import contenders, measure, worker_process
from halfstep.bench.accuracy import EVAL_ONLY_AT_END, load_corpus
from halfstep.distributed.process_group import World
from halfstep.machine import hardware
from halfstep.train import model as train_model
from halfstep.train.config import TrainConfig
from halfstep.train.data import tokenized
from halfstep.train.plan import lr_factor, resolve_plan
from halfstep.train.run import run
from halfstep.train.train_state import Timers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from halfstep.reporting.table import Cell, Table
    from halfstep.train.data.corpus import Split

    Example = tuple[str, int]
    """A text and its class."""

BASELINES = ("plain-amp", "plain-fp32")
"""Contenders that the speed of the others is compared with."""

PARTS = ("tokenise", "input", "forward", "backward", "update", "rest")
"""Parts of a run's time; the plain loop tokenizes in its input."""

PADDED = 128
"""Tokens per text in the plain loop."""

Runs = dict[str, list[dict[str, Any]]]
"""Contender -> the result of each run."""


def train(arguments: argparse.Namespace) -> list[Table]:
    """Run the contenders in turn; return medians, and the time per part."""
    keys = ("data", "limit", "seed", "epochs", "model")
    settings = {key: getattr(arguments, key) for key in keys}
    load_corpus(TrainConfig(**settings))  # fails early if the data are invalid
    results: Runs = {name: [] for name in arguments.contenders}
    for repeat in range(arguments.repeats):
        for name in measure.order(results, repeat):
            task = {"settings": contenders.TRAIN[name] | settings}
            result = worker_process.run_once(name, __name__, task)
            results[name].append(result)
            seconds = f"{result['seconds']:.1f} s"
            measure.progress(f"run {repeat + 1}/{arguments.repeats} {name}: {seconds}")
    facts = hardware.capabilities()
    notes = (
        ", ".join(f"{key} {value}" for key, value in settings.items())
        + f"; median of {arguments.repeats} runs, contenders in turn",
        f"{facts.cpu}, {facts.threads} threads, torch {facts.torch}",
        "seconds: tokenising and training steps; no evaluation, no checkpoint",
        "train loss: mean over the last tenth of the steps; dev: of the last weights",
        "all: no masked tokens, which halfstep train has by default from scratch",
        "peak: the whole process; halfstep's also evaluates, saves and reports",
    )
    part_notes = (
        "mean over a run's steps, median over runs",
        "tokenise: done once a run, spread over its steps",
        "input: the plain loop tokenises and pads there",
        "rest: reading the loss, seeds and rates; metrics.jsonl is not in it",
        "on a GPU: of the processor that gives it work",
    )
    title = "Where the time of a step goes, ms"
    return [
        measure.table("Training a text classifier", run_rows(results), notes),
        measure.table(title, part_rows(results), part_notes, digits=1),
    ]


def run_rows(results: Runs) -> list[dict[str, Cell]]:
    """Return a row of medians for each contender."""

    def median(name: str, key: str) -> float:
        return statistics.median(float(each[key]) for each in results[name])

    def speed(name: str, base: str) -> float | None:
        rates = [median(each, "examples_per_s") for each in (name, base)]
        return rates[0] / rates[1]

    return [
        {
            "contender": name,
            "seconds": median(name, "seconds"),
            "examples/s": median(name, "examples_per_s"),
            **{f"x {b}": speed(name, b) if b in results else None for b in BASELINES},
            "peak MiB": median(name, "peak_memory_bytes") / measure.MIB,
            "train loss": median(name, "train_loss"),
            "dev loss": median(name, "dev_loss"),
            "dev accuracy": median(name, "dev_accuracy"),
            "skipped": int(median(name, "skipped")),
        }
        for name in results
    ]


def part_rows(results: Runs) -> list[dict[str, Cell]]:
    """Return the milliseconds per step of each part."""
    rows: list[dict[str, Cell]] = []
    for name, runs in results.items():
        medians = {
            part: statistics.median(
                1000 * each["parts"].get(part, 0.0) / each["steps"] for each in runs
            )
            for part in PARTS
        }
        rows.append({"contender": name, **medians, "sum": sum(medians.values())})
    return rows


# One run, in its own process


def worker(settings: dict[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return the function that runs a contender."""
    return lambda _: train_once(settings)


def train_once(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one contender; return time, memory, losses and accuracy."""
    losses, result = (_plain if "amp" in settings else _halfstep)(**settings)
    last = losses[-max(1, len(losses) // 10) :]
    return result | {
        "train_loss": sum(last) / len(last),
        "steps": len(losses),
        "peak_memory_bytes": hardware.peak_memory(hardware.capabilities().device),
    }


def _halfstep(**settings: Any) -> tuple[list[float], dict[str, Any]]:  # noqa: ANN401
    """Run `halfstep train` like the plain loop.

    Masks no tokens, and evaluates the last weights; none are selected by dev score.
    """
    more = {"mask_tokens": 0.0, "eval_every": EVAL_ONLY_AT_END}
    with tempfile.TemporaryDirectory() as folder:
        # An empty cache, since tokenizing is part of the measured time.
        os.environ["HALFSTEP_CACHE"] = str(Path(folder) / "cache")
        result = run(settings | more | {"out": str(Path(folder) / "run")})
        records = [r for r in result.folder.records() if "event" not in r]
    summary = result.summary
    seconds = summary["tokenise_seconds"] + summary["train_seconds"]
    return [record["loss"] for record in records], {
        "seconds": seconds,
        "examples_per_s": result.examples / seconds,
        "dev_loss": summary["dev"]["loss"],
        "dev_accuracy": summary["dev"]["accuracy"],
        "skipped": summary["skipped"],
        "parts": sum_parts([record["seconds"] for record in records])
        | {"tokenise": summary["tokenise_seconds"]},
    }


def sum_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the total seconds of each part, over all steps."""
    return {
        part: sum(step.get(part, 0.0) for step in steps)
        for part in dict.fromkeys(part for step in steps for part in step)
    }


def _plain(
    *,
    data: str | None,
    limit: int | None,
    seed: int,
    epochs: int,
    model: str,
    amp: bool,
) -> tuple[list[float], dict[str, Any]]:
    """Train and evaluate as in tutorials; return losses and measurements.

    The loop is neither tuned nor slowed: every text is padded to 128 and tokenized in
    the collate function, the optimizer is AdamW with torch's defaults (not fused,
    weight decay for all), mixed precision is torch.autocast with torch.amp.GradScaler,
    on a GPU in fp16. Model, vocabulary, split, schedule and clipping are those of
    `halfstep train`.
    """
    config = TrainConfig(data=data, limit=limit, seed=seed, epochs=epochs, model=model)
    corpus = load_corpus(config)
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
    train_examples, dev_examples = _examples(corpus.train), _examples(corpus.dev)

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
        train_examples,  # type: ignore[arg-type]
        config.batch_size,
        shuffle=True,
        collate_fn=collate,
    )
    net = network.model.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), plan.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, plan.total_steps, config.warmup)
    )
    scaler = torch.amp.GradScaler(device, enabled=amp)
    low_dtype = torch.float16 if device == "cuda" else torch.bfloat16
    losses, skipped = [], 0
    timers = Timers()
    start = time.perf_counter()
    for _ in range(epochs):
        source = iter(loader)
        while True:
            with timers.time("input"):
                batch = next(source, None)
            if batch is None:
                break
            with timers.time("forward"), torch.autocast(device, low_dtype, enabled=amp):
                loss = net(**batch).loss
            with timers.time("backward"):
                scaler.scale(loss).backward()
            with timers.time("update"):
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
    seconds = time.perf_counter() - start
    timers.seconds["rest"] = seconds - sum(timers.seconds.values())
    dev_loss, dev_accuracy = _evaluate(net, dev_examples, collate)
    return losses, {
        "seconds": seconds,
        "examples_per_s": epochs * len(train_examples) / seconds,
        "dev_loss": dev_loss,
        "dev_accuracy": dev_accuracy,
        "skipped": skipped,
        "parts": timers.seconds,
    }


def _examples(split: Split) -> list[Example]:
    """Load a whole split into memory, as tutorials do."""
    return list(zip(split.texts(), split.labels().tolist(), strict=True))


@torch.no_grad()
def _evaluate(net: Any, dev: Sequence[Example], collate: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return loss and accuracy in fp32."""
    net.eval()
    loss, correct = 0.0, 0
    for start in range(0, len(dev), 128):
        batch = collate(dev[start : start + 128])
        out = net(**batch)
        loss += out.loss.item() * len(batch["labels"])
        correct += int((out.logits.argmax(-1) == batch["labels"]).sum())
    return loss / len(dev), correct / len(dev)
