"""`halfstep bench train` and `ner`: whole runs of `halfstep train`.

`train` reports time, memory and quality beside a plain loop; `ner` reports scores with
confidence intervals over seeds. Each run is a process of its own, for its own peak
memory; candidates take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from halfstep.bench import commands, journal, loops, measure
from halfstep.bench.floor import Floor, counting_flops
from halfstep.bench.measure import MIB, median
from halfstep.bench.worker_process import WorkerProcess
from halfstep.machine import hardware
from halfstep.numerics import formats
from halfstep.parity.equivalence import mean_interval
from halfstep.parity.train_workload import TrainRuns
from halfstep.reporting.table import format_count
from halfstep.scaling import LossScaleCollapse
from halfstep.train.config import SETTINGS, TrainConfig
from halfstep.train.plan import lr_factor
from halfstep.train.run import build_network, run
from halfstep.train.signals import Diverged

if TYPE_CHECKING:
    from argparse import Namespace

    from halfstep.reporting.table import Cell, Table

Run = Mapping[str, Any]
"""The result of a run; one that diverged has only "seed" and "diverged"."""
Runs = Mapping[str, Sequence[Run]]
"""Candidate -> its runs, by seed."""

PLAIN = ("plain-amp", "plain-fp32")
"""The plain loops, which the speed of `bench train` is compared with."""
_FP32 = {"level": "O0"}
_O1, _O2, _O3 = ({"level": level, "dtype": "bf16"} for level in ("O1", "O2", "O3"))
_O1_FP16, _O2_FP16 = _O1 | {"dtype": "fp16"}, _O2 | {"dtype": "fp16"}
TRAIN: dict[str, dict[str, Any]] = {
    "plain-fp32": {"amp": False},
    "plain-amp": {"amp": True},
    "O0": _FP32,
    "O1-bf16": _O1,
    "O2-bf16": _O2,
    "O3-bf16": _O3,
    "O1-fp16": _O1_FP16,
    "O2-fp16": _O2_FP16,
}
"""Settings of `halfstep train`, or of the plain loop."""
NER: dict[str, dict[str, Any]] = {
    "fp32": _FP32,
    "O1-fp16-unscaled": _O1_FP16 | {"loss_scale": "none"},
    "O1-fp16-fixed": _O1_FP16 | {"loss_scale": "1024"},
    "O1-fp16": _O1_FP16 | {"loss_scale": "dynamic"},
    "O1-bf16": _O1,
    "O2-bf16": _O2,
}
BASELINE = "fp32"
PADDED = 128
"""Tokens per text in the plain loop."""
_STATE = ("weights", "masters", "moments")
_EVAL_ONLY_AT_END = 2**31 - 1
"""Evaluation interval longer than any run: the last weights are evaluated, none are
selected by dev score."""


def train(arguments: Namespace) -> list[Table]:
    """Run the candidates in turn; return medians."""
    seeds = [arguments.seed] * arguments.repeats
    runs, more = _run_all(_tasks(arguments, TRAIN, mask_tokens=0.0), seeds)
    notes = (
        f"median of {format_count(arguments.repeats, 'run')}, candidates in turn",
        "seconds: tokenising, fitting and training steps; no evaluation, no checkpoint",
        "halfstep from scratch fits a linear model beside the encoder, plain loops not",
        "train loss: mean over the last tenth of the steps; dev loss: on dev texts",
        "all: no masked tokens, which halfstep train has by default from scratch",
        "peak: the whole process; halfstep's also evaluates, saves and reports",
        "skipped, diverged: in all runs; a run that diverged has no other figure",
        *more,
    )
    return [measure.table("Training a text classifier", run_rows(runs), notes)]


def _tasks(
    arguments: Namespace,
    candidates: Mapping[str, dict[str, Any]],
    **more: str | float,
) -> dict[str, dict[str, Any]]:
    """Return the settings of each candidate's run, also those that are flags here."""
    flags = {name: value for name, value in vars(arguments).items() if name in SETTINGS}
    return {name: flags | more | candidates[name] for name in arguments.candidates}


def run_rows(runs: Runs) -> list[dict[str, Cell]]:
    """Return a row of medians for each candidate, over the runs that ended well."""

    def middle(name: str, key: str) -> float | None:
        return median([each[key] for each in _ended(runs.get(name, ()))])

    def speedup(name: str, base: str) -> float | None:
        own, other = (middle(each, "examples_per_s") for each in (name, base))
        return own / other if own and other else None

    return [
        {
            "candidate": name,
            "seconds": middle(name, "seconds"),
            "floor s": middle(name, "floor_seconds"),
            **{f"x {base}": speedup(name, base) for base in PLAIN},
            "train loss": middle(name, "train_loss"),
            "dev loss": middle(name, "dev_loss"),
            "accuracy": median([each["scores"]["accuracy"] for each in _ended(own)]),
            **_last_cells(own),
        }
        for name, own in runs.items()
    ]


def _last_cells(runs: Sequence[Run]) -> dict[str, Cell]:
    """Return the cells with which the rows of all tables end."""
    own = _ended(runs)
    return {
        "texts/s": median([each["examples_per_s"] for each in own]),
        "of floor": median([each["floor_seconds"] / each["seconds"] for each in own]),
        "peak MiB": median([each["peak_bytes"] / MIB for each in own]),
        "skipped": sum(each["skipped"] for each in own) if own else None,
        "diverged": len(runs) - len(own),
    }


def _ended(runs: Sequence[Run]) -> list[Run]:
    return [each for each in runs if "diverged" not in each]


def ner(arguments: Namespace) -> list[Table]:
    """Train every candidate of `bench ner` with every learning rate and seed."""
    tasks = {
        f"{name}, lr {lr:g}": task
        for lr in arguments.lr
        for name, task in _tasks(arguments, NER, task="ner", lr=lr).items()
    }
    runs, notes = _run_all(tasks, range(arguments.seeds))
    return [
        score_table(
            f"Entities over seeds, learning rate {lr:g}",
            {name: runs[f"{name}, lr {lr:g}"] for name in arguments.candidates},
            notes,
        )
        for lr in arguments.lr
    ]


def _run_all(
    tasks: Mapping[str, dict[str, Any]], seeds: Sequence[int]
) -> tuple[Runs, list[str]]:
    """Run each candidate with each seed; return the results, and notes on the data."""
    common = {k: v for k, v in next(iter(tasks.values())).items() if k != "amp"}
    plan = TrainRuns(TrainConfig(**common))  # fails early if the data are invalid
    score = "F1" if plan.config.task == "ner" else "accuracy"
    texts = getattr(plan.corpus, plan.split)
    evaluated = (
        f"{score}: of {len(texts)} {plan.split} texts, by which nothing was chosen: "
        f"the last weights are evaluated; trained on {len(plan.corpus.train)}"
    )
    # Rates are measured once here rather than in a candidate's time.
    floor = Floor.measure(plan.world.device.type)
    flops = matmul_flops(plan)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for number, seed in enumerate(seeds):
        for name in measure.order(tasks, number):
            task = {"settings": tasks[name] | {"seed": seed}}
            with WorkerProcess(name, __name__, task, {}) as process:
                result = process.request()
            if "diverged" not in result:
                state, dtype = result["state_bytes"], result["dtype"]
                ms = floor.ms(dtype, flops, result["steps"] * state)
                result["floor_seconds"] = ms / 1e3
            journal.record(name, seed=seed, **result)
            runs[name].append(result)
            text = result.get("diverged") or (
                f"{score} {result['scores'][score.lower()]:.4f}, "
                f"dev loss {result['dev_loss']:.4f}, "
                f"{result['seconds']:.1f} s, {result['peak_bytes'] / MIB:.0f} MiB"
            )
            measure.progress(f"run {number + 1}/{len(seeds)} {name}: {text}")
    notes = (
        *floor.notes(f"{flops / 1e9:.4g}", "run"),
        "GFLOP: without padding, whose cost is a part of what a run loses",
    )
    return runs, [evaluated, *notes]


def matmul_flops(runs: TrainRuns) -> float:
    """Return the FLOPs of a run's matmuls, without those of padding.

    One text of mean length, forward and backward, times the texts of all epochs. So
    attention, which grows with the square of the length, is slightly underestimated.
    """
    job = runs.job(runs.config.seed)
    encoded, epochs = job.encoded["train"], job.plan.order.epochs
    model: Any = build_network(runs.config, runs.corpus).model.train()
    length = round(encoded.lengths.mean())
    with counting_flops() as counter:
        output = model(input_ids=torch.zeros(1, length, dtype=torch.long))
        output.logits.sum().backward()
    return float(counter.get_total_flops() * len(encoded) * epochs)


def score_table(title: str, runs: Runs, more: Sequence[str]) -> Table:
    """Return scores, losses and costs of each candidate, and differences to fp32.

    There are equally many seeds per candidate.
    """
    parts = "precision", "recall"
    rows: list[dict[str, Cell]] = []
    for name, all_runs in runs.items():
        own = _ended(all_runs)
        # Not compared with itself; the baseline may also not have run.
        bases = () if name == BASELINE else runs.get(BASELINE, ())
        both = zip(all_runs, bases, strict=False)
        pairs = [pair for pair in both if len(_ended(pair)) == len(pair)]
        points = {
            part: [100 * each["scores"][part] for each in own]
            for part in ("f1", *parts)
        }
        value, half = _interval(points["f1"])
        difference, its_half = _interval(
            [100 * (a["scores"]["f1"] - b["scores"]["f1"]) for a, b in pairs]
        )
        loss_difference, loss_half = _interval(
            [a["dev_loss"] - b["dev_loss"] for a, b in pairs]
        )
        rows.append(
            {
                "candidate": name,
                "F1 %": value,
                "+-": half,
                f"to {BASELINE}": difference,
                f"+- to {BASELINE}": its_half,
                "result": measure.verdict(difference, its_half, "worse", "better"),
                **{f"{part} %": _interval(points[part])[0] for part in parts},
                "dev loss": _interval([each["dev_loss"] for each in own])[0],
                f"loss to {BASELINE}": loss_difference,
                "+- of loss": loss_half,
                f"time x {BASELINE}": median(
                    [a["train_seconds"] / b["train_seconds"] for a, b in pairs]
                ),
                **_last_cells(all_runs),
            }
        )
    seeds = len(next(iter(runs.values())))
    notes = (
        f"seeds: {seeds}, the same for all; candidates in turn",
        "a seed draws first weights, order and dropout; of a single file, the split",
        "+-: half of Student's 95 % interval for the mean over seeds",
        f"to {BASELINE}: mean of the differences, seed by seed, in points",
        "one such interval in twenty misses the true mean by chance",
        f"time: of training steps, median of the ratios to {BASELINE} seed by seed",
        "peak: the whole process with its libraries, or the GPU; median",
        *(
            f"{name}, seed {seed + 1}: {each['diverged']}"
            for name, own in runs.items()
            for seed, each in enumerate(own)
            if "diverged" in each
        ),
        *more,
    )
    return measure.table(title, rows, notes)


_interval = partial(mean_interval, probability=0.975)
"""Mean and half of Student's 95 % interval."""


# One run, in its own process


def worker(settings: dict[str, Any]) -> Callable[[object], dict[str, Any]]:
    """Return the function that runs a candidate."""
    return lambda _: run_once(settings)


def run_once(settings: dict[str, Any]) -> dict[str, Any]:
    """Run one candidate; return its scores, losses, time and memory."""
    try:
        losses, result = (_plain if "amp" in settings else _halfstep)(settings)
    except (Diverged, LossScaleCollapse) as error:
        return {"diverged": " ".join(str(error).split())}
    last = losses[-max(1, len(losses) // 10) :]
    device = settings.get("device") or hardware.capabilities().device
    return result | {
        "train_loss": statistics.fmean(last),
        "peak_bytes": hardware.peak_memory(device),
    }


def _halfstep(settings: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Run `halfstep train`; only the last weights are evaluated."""
    import datasets

    with tempfile.TemporaryDirectory() as folder:
        # An empty cache, since tokenizing is part of the measured time.
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        own = {"out": str(Path(folder) / "run"), "eval_every": _EVAL_ONLY_AT_END}
        result = run(settings | own)
        records = [r for r in result.folder.records() if "event" not in r]
    summary = result.summary
    scores = summary.get("test", summary["dev"])
    # The scores are those of the linear model too.
    parts = ("tokenise_seconds", "fit_seconds", "train_seconds")
    seconds = sum(summary[part] for part in parts)
    return [record["loss"] for record in records], {
        **{key: summary[key] for key in ("skipped", "steps", "train_seconds")},
        "scores": {k: v for k, v in scores.items() if isinstance(v, float)},
        "dev_loss": summary["dev"]["loss"],
        "state_bytes": sum(summary["memory"][part] for part in _STATE),
        "dtype": summary["dtype"],
        "seconds": seconds,
        "examples_per_s": result.examples / seconds,
    }


def _plain(settings: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Train as in tutorials; return losses and measurements.

    The loop is neither tuned nor slowed: every text is padded to 128 and tokenized in
    the collate function, the optimizer is AdamW with torch's defaults (not fused,
    weight decay for all), mixed precision is torch.autocast with torch.amp.GradScaler,
    on a GPU in fp16. Model, vocabulary, split, schedule and clipping are those of
    `halfstep train`.
    """
    amp = settings["amp"]
    config = TrainConfig(**{k: v for k, v in settings.items() if k != "amp"})
    runs = TrainRuns(config)
    data, plan = runs.corpus, runs.job(config.seed).plan
    device = runs.world.device.type
    torch.manual_seed(config.seed)
    network = build_network(replace(config, max_length=PADDED), data)

    def collate(examples: Sequence[tuple[str, int]]) -> dict[str, torch.Tensor]:
        batch = network.tokenizer(
            [text for text, _ in examples],
            padding="max_length",
            truncation=True,
            max_length=PADDED,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([label for _, label in examples])
        return {name: tensor.to(device) for name, tensor in batch.items()}

    examples = [*zip(data.train.texts(), data.train.labels().tolist(), strict=True)]
    loader: DataLoader[Any] = DataLoader(
        examples,  # type: ignore[arg-type]
        config.batch_size,
        shuffle=True,
        collate_fn=collate,
    )
    net: Any = network.model.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), plan.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, plan.total_steps, config.warmup)
    )

    # Not in a step that the scaler skips.
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    dtype = "fp16" if device == "cuda" else "bf16"
    low = formats.parse(dtype).dtype
    scaler = torch.amp.GradScaler(device, enabled=amp)
    losses = []
    start = time.perf_counter()
    for _ in range(settings["epochs"]):
        for batch in loader:
            labels = batch.pop("labels")
            with torch.autocast(device, low, enabled=amp):
                loss = cross_entropy(net(**batch).logits, labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            clip_grad_norm_(net.parameters(), plan.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    seconds = time.perf_counter() - start
    return losses, {
        "scores": runs.scores(net, runs.split),
        "dev_loss": runs.scores(net, "dev")["loss"],
        "skipped": len(losses) - schedule.last_epoch,
        "steps": len(losses),
        "state_bytes": loops.state_bytes(net, optimizer),
        "dtype": dtype if amp else "fp32",
        "seconds": seconds,
        "examples_per_s": settings["epochs"] * len(examples) / seconds,
    }


_RUNS = "runs of each candidate"


def _data(what: str) -> commands.Flags:
    return {
        "data": commands.flag(
            f"{what} to train on (default built-in)", None, str, "PATH"
        ),
        "limit": commands.flag("first N rows only"),
        "model": commands.flag(
            "tiny, small, or a name that transformers loads", "tiny", str, "NAME"
        ),
    }


BENCHES = {
    "train": commands.Bench(
        train,
        "Train the same model on the same texts at each level and with a plain "
        "torch.amp loop; print time, memory and quality.",
        {
            **_data("texts"),
            "seed": commands.flag("seed", 123, int),
            "epochs": commands.flag("passes over the data", 1),
            "repeats": commands.flag(_RUNS, 1),
            "candidates": commands.names(TRAIN),
        },
    ),
    "ner": commands.Bench(
        ner,
        "Train the same entity tagger from the same seeds in fp32, in fp16 without, "
        "with a fixed and with a dynamic loss scale, and in bf16; print F1 with "
        "confidence intervals, precision, recall, memory and speed.",
        {
            **_data("entities"),
            # So that the default table takes less than an hour on two cores with fp16.
            "epochs": commands.flag("passes over the data", 15),
            "batch-size": commands.flag("texts of one step", 32),
            "lr": commands.flag(
                "learning rates, a table each; a pretrained model needs lower ones",
                [3e-4, 1e-3, 3e-3],
                commands.list_of(commands.positive_float),
                "X,X",
            ),
            "mask-tokens": commands.flag(
                "share of tokens masked (default as halfstep train)",
                None,
                commands.share,
                "P",
            ),
            "max-length": commands.flag("tokens after which a text is cut", 192),
            "seeds": commands.flag(_RUNS, 2),
            "candidates": commands.names(NER),
            "device": commands.DEVICE,
        },
    ),
}
