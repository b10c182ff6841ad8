"""What a finished run leaves behind: summary, report, and a model to predict with.

In: a trainer that has come to the end of its plan. Out: `summary.json`,
`report.html`, `model/`, and a `Result` to show.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfstep import distributed, machine
from halfstep.master import form as forms
from halfstep.report import Cell, Chart, Curve, Section, Table, page, write_text
from halfstep.train.evaluate import baseline_accuracy
from halfstep.train.folder import RunFolder, finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.train.batches import Encoded
    from halfstep.train.config import TrainConfig
    from halfstep.train.data import Corpus
    from halfstep.train.loop import Trainer
    from halfstep.train.text import Classifier


@dataclass(frozen=True)
class Result:
    """What a finished run has to show."""

    summary: dict[str, Any]
    tables: tuple[Table, ...]
    folder: RunFolder
    examples: int
    """Texts trained on in this process, repeats counted."""


def conclude(
    config: TrainConfig,
    corpus: Corpus,
    trainer: Trainer,
    classifier: Classifier,
    test: Encoded,
    tokenise_seconds: float,
) -> Result:
    """Judge the best checkpoint and write what the run leaves behind.

    Args:
        config: As given, for the report.
        corpus: For the baseline, on the built-in data.
        trainer: Its last step done.
        classifier: The bare model and its tokenizer.
        test: Encoded test split; may be empty.
        tokenise_seconds: What it took to tokenise every split, once.
    """
    session, folder = trainer.session, trainer.folder
    precision = session.explain()
    summary: dict[str, Any] = {
        "level": session.choice.level.name,
        "dtype": session.choice.format.name,
        "master": _kept(config, trainer),
        "reason": session.choice.reason,
        "steps": trainer.plan.total_steps,
        "applied": session.steps_applied,
        "skipped": session.steps_skipped,
        "best_step": trainer.best[0],
        "loss_scale": session.scaler.state.scale.item(),
        "processes": trainer.world.size,
        "train_seconds": trainer.seconds,
        "tokenise_seconds": tokenise_seconds,
        "examples_per_s": trainer.examples / trainer.seconds
        if trainer.seconds
        else None,
    }
    trainer.load_best()
    judged = {"dev": trainer.quality(trainer.dev)}
    if len(test.labels):
        judged["test"] = trainer.quality(test)
    split, final = list(judged.items())[-1]
    tables = [final.table(f"Quality on {split}")]
    summary |= {name: asdict(quality) for name, quality in judged.items()}
    if trainer.world.leads:
        if config.data is None:
            plain = baseline_accuracy(corpus.train, corpus.test)
            summary["baseline_accuracy"] = plain
            tables.append(_beside(final.accuracy, plain, str(session.choice)))
        summary["peak_memory_bytes"] = machine.peak_memory(trainer.world.device)
        folder.publish_model(_portable(trainer, classifier), classifier.tokenizer)
        text = json.dumps(finite(summary), indent=1, allow_nan=False)
        write_text(folder.path / "summary.json", text)
        html = _page(config, corpus, trainer, (*tables, precision), summary)
        write_text(folder.path / "report.html", html)
    distributed.wait_for_all()
    return Result(summary, tuple(tables), folder, trainer.examples)


def _kept(config: TrainConfig, trainer: Trainer) -> str:
    """Return what was kept beside 16-bit weights; at most levels that is nothing."""
    return config.master if trainer.session.choice.level.masters else forms.NONE


def _beside(accuracy: float, plain: float, choice: str) -> Table:
    return Table(
        "Beside a plain baseline",
        ("classifier", "test accuracy"),
        (
            (f"this model, {choice}", accuracy),
            ("logistic regression on character 1- and 2-grams", plain),
        ),
    )


@torch.no_grad()
def _portable(trainer: Trainer, classifier: Classifier) -> Any:  # noqa: ANN401
    """Return the model in fp32, masters in place of 16-bit weights."""
    weights = trainer.session.weights()
    model = classifier.model.float()
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])
    return model


def _page(
    config: TrainConfig,
    corpus: Corpus,
    trainer: Trainer,
    tables: tuple[Table, ...],
    summary: dict[str, Any],
) -> str:
    *quality, precision = tables
    records = trainer.folder.records()
    steps = [record for record in records if "event" not in record]
    evals = [record for record in records if record.get("event") == "eval"]
    choice = trainer.session.choice
    split = "test" if "test" in summary else "dev"
    kept = f", master weights {summary['master']}" if choice.level.masters else ""
    lead = (
        f"Level {choice}{kept}: {choice.reason}. {split.capitalize()} accuracy "
        f"{summary[split]['accuracy']:.4f}; {summary['applied']} steps applied, "
        f"{summary['skipped']} skipped."
    )
    return page(
        f"halfstep run: {corpus.name}",
        (
            Section("Quality", tables=tuple(quality)),
            Section("Curves", charts=_charts(steps, evals)),
            Section("Precision", tables=(precision,)),
            Section("Cost", tables=(_cost(summary),)),
            Section("Settings", tables=(_settings(config),)),
            Section("Machine", tables=(_machine(),)),
        ),
        lead,
    )


def _charts(
    steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]
) -> tuple[Chart, ...]:
    def curve(name: str, records: Sequence[dict[str, Any]], key: str) -> Curve:
        kept = [record for record in records if record[key] is not None]
        return Curve(
            name,
            tuple(float(record["step"]) for record in kept),
            tuple(float(record[key]) for record in kept),
        )

    loss = (curve("training", steps, "loss"), curve("dev", evals, "dev_loss"))
    score = (
        curve("accuracy", evals, "dev_accuracy"),
        curve("macro F1", evals, "dev_macro_f1"),
    )
    rate = (curve("learning rate", steps, "lr"),)
    scale = (curve("loss scale", steps, "scale"),)
    norm = (curve("gradient norm", steps, "grad_norm"),)
    return (
        Chart("Loss", "step", "cross-entropy, nats", loss),
        Chart("Quality on dev", "step", "share", score),
        Chart("Learning rate", "step", "rate", rate),
        Chart("Loss scale", "step", "scale", scale, log_y=True, step=True),
        Chart("Gradient norm before clipping", "step", "norm", norm, log_y=True),
    )


def _cost(summary: dict[str, Any]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("time in training steps, s", summary["train_seconds"]),
        ("time for tokenising, once, s", summary["tokenise_seconds"]),
        ("training examples per second", summary["examples_per_s"]),
        ("peak memory, MiB", summary["peak_memory_bytes"] / 2**20),
        ("steps applied", summary["applied"]),
        ("steps skipped", summary["skipped"]),
        ("last loss scale", summary["loss_scale"]),
        ("processes", summary["processes"]),
    )
    notes = ("Times and memory are this process's, since it was started or resumed.",)
    return Table("Time and memory", ("what", "value"), rows, notes, digits=1)


def _settings(config: TrainConfig) -> Table:
    rows = tuple(
        (key, "chosen by the run" if value is None else str(value))
        for key, value in config.data_dict().items()
    )
    return Table("As given", ("setting", "value"), rows)


def _machine() -> Table:
    facts = machine.capabilities()
    sets = ", ".join(facts.instruction_sets) or "none known"
    rows = [
        ("processor", facts.cpu),
        ("cores", str(facts.cores)),
        ("threads", str(facts.threads)),
        ("instruction sets", sets),
        *(("GPU", f"{gpu.name}, {gpu.memory_bytes >> 30} GiB") for gpu in facts.gpus),
        ("torch", facts.torch),
        ("Python", platform.python_version()),
    ]
    return Table("Where it ran", ("what", "value"), tuple(rows))
