"""Finishes a run: evaluates the best checkpoint, writes summary, report and model."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.doctor import examine, run_reader
from halfstep.machine import hardware
from halfstep.masters import encoding as forms
from halfstep.reporting.table import Table, format_count
from halfstep.session import fsdp_checkpoint
from halfstep.train import checkpointing
from halfstep.train.data_checks import constant_finding
from halfstep.train.fp32_comparison import comparison_table
from halfstep.train.output import html_report
from halfstep.train.output.run_directory import RunFolder, finite
from halfstep.train.plan import resolve_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from halfstep.reporting.finding import Finding
    from halfstep.train.config import TrainConfig
    from halfstep.train.loop import Trainer
    from halfstep.train.model import Network
    from halfstep.train.tasks import SplitOutputs

_CHOSEN_ON_DEV = (
    "The thresholds of the labels were chosen on dev, so its scores are a little too "
    "good: evaluate on other texts, such as a file test.* beside train.* and dev.*."
)
_MAX_FINDINGS = 3  # lines at the end of a run


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start or resume."""

    trainer: Trainer
    network: Network
    """The unwrapped model and its tokenizer."""
    originals: Mapping[str, torch.Tensor]
    """Original values of frozen parameters that 16-bit storage rounds."""
    weights: Mapping[str, str]
    """Parameter -> its dtype before `prepare`."""
    tokenise_seconds: float
    """Seconds to tokenize all splits, or to load them from the cache."""

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights by name, gathered if sharded; a collective call."""
        weights = self.trainer.session.weights()
        return {**fsdp_checkpoint.full_tensors(weights), **self.originals}


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run or a dry run."""

    summary: dict[str, Any]
    tables: tuple[Table, ...]
    folder: RunFolder
    examples: int
    findings: tuple[str, ...] = ()


def finding_lines(findings: Sequence[Finding], run: Path) -> tuple[str, ...]:
    """Return the worst findings, a line each, and the command that shows them all."""
    worst = findings[:_MAX_FINDINGS]
    lines = [
        f"{each.severity}: {each.rule}: {each.where}: {each.measured}" for each in worst
    ]
    if findings:
        these = f"{format_count(len(findings), 'finding')} and what to do"
        lines.append(f"{these}: halfstep doctor {shlex.quote(str(run))}")
    return tuple(lines)


def finish_run(
    ready: PreparedRun,
    data_findings: Sequence[str],
    compare_with_fp32: Callable[[], dict[str, Any] | None],
) -> RunResult:
    """Evaluate the best checkpoint; write summary, report and final model.

    `data_findings` are lines about damaged checkpoints and about the examples.
    """
    trainer = ready.trainer
    session, plan = trainer.session, trainer.job.plan
    choice = session.choice
    config = resolve_config(plan, choice.level.name, choice.format.name)
    precision = session.explain()
    summary = _summary(config, trainer, ready.tokenise_seconds)
    # After this, the session's counters are those of the best step.
    best = trainer.state.best_step
    if best not in {0, trainer.state.step}:
        checkpointing.load(session, trainer.folder.checkpoint_path(best))
    job, task = trainer.job, trainer.task
    outputs = _final_outputs(trainer)
    metrics = {name: task.compute_metrics(each) for name, each in outputs.items()}
    final = list(outputs)[-1]
    constant = constant_finding(final, metrics[final], config)
    data_findings = (*constant, *data_findings)
    if outputs[final].thresholds is not None and final == "dev":
        data_findings = (*data_findings, _CHOSEN_ON_DEV)
    form = f", master weights {config.master_weights}" if choice.level.masters else ""
    table = metrics[final].table(f"Quality on {final}")
    summary |= {name: one.data() for name, one in metrics.items()}
    baseline = checkpointing.run_on_first_rank(
        trainer.world, lambda: task.baseline(job.corpus, final)
    )
    lines: tuple[str, ...] = ()
    if baseline is not None:
        table = replace(table, notes=(*table.notes, baseline.line()))
        scores = {"name": baseline.name, "split": final, **baseline.scores}
        summary["baseline"] = scores
        line = baseline.finding(metrics[final], final, summary["best_by"])
        lines = (line,) if line else ()
    tables = [table]
    weights = ready.full_weights()
    checkpointing.run_on_first_rank(trainer.world, lambda: _save_model(ready, weights))
    summary["peak_memory_bytes"] = hardware.peak_memory(trainer.world.device)
    folder = trainer.folder
    findings = checkpointing.run_on_first_rank(
        trainer.world, lambda: examine(run_reader.read(folder.path))
    )
    findings = findings or []
    against_fp32: Table | None = None

    def write() -> None:
        report = html_report.ReportData(
            title=f"halfstep run: {job.corpus.name}",
            lead=f"{job.corpus.sizes} {task.description(job.corpus)}. "
            f"Level {choice}{form}: {choice.reason}.",
            settings=config.data_dict(),
            chosen=_chosen(config, plan.config),
            metrics=metrics,
            worst_examples=task.worst_examples(outputs[final]),
            loss_unit=task.loss_unit,
            against_fp32=against_fp32,
            precision=precision,
            records=folder.records(),
            summary=summary,
            data_findings=(*data_findings, *lines),
            baseline=baseline,
            findings=tuple(findings),
        )
        folder.write("report.html", html_report.page(report))
        text = json.dumps(finite(summary), indent=1, allow_nan=False)
        folder.write("summary.json", text)

    checkpointing.run_on_first_rank(trainer.world, write)
    facts = compare_with_fp32()  # may fail, for lack of memory perhaps
    if facts is not None:
        summary["fp32"] = facts
        against_fp32 = comparison_table(facts, choice)
        tables.append(against_fp32)
        checkpointing.run_on_first_rank(trainer.world, write)
    lines = (*constant, *lines, *finding_lines(findings, folder.path))
    return RunResult(summary, tuple(tables), folder, trainer.examples, lines)


def _final_outputs(trainer: Trainer) -> dict[str, SplitOutputs]:
    """Return the outputs on dev, and on test if there are texts.

    Thresholds of labels go into the model's config. They are chosen on dev, for test
    too: chosen on test, they would make its scores too good.
    """
    splits = [name for name in ("dev", "test") if len(trainer.job.encoded[name])]
    outputs = {name: trainer.collect_outputs(name) for name in splits}
    thresholds = trainer.task.thresholds(outputs["dev"])
    if thresholds is None:
        return outputs
    outputs["dev"].config.thresholds = thresholds.tolist()
    return {
        name: replace(each, thresholds=thresholds) for name, each in outputs.items()
    }


def _save_model(ready: PreparedRun, weights: Mapping[str, torch.Tensor]) -> None:
    """Write the final model, in fp32, with its tokenizer."""
    tokenizer = ready.network.tokenizer
    if tokenizer.is_fast:
        # Its last call left truncation on; with cached splits there was no call.
        tokenizer.backend_tokenizer.no_truncation()
    model = portable_model(ready.network, weights)
    ready.trainer.folder.save_model(model, tokenizer)


def _summary(
    config: TrainConfig, trainer: Trainer, tokenise_seconds: float
) -> dict[str, Any]:
    session, seconds = trainer.session, trainer.seconds
    has_masters = session.choice.level.masters
    spent = seconds["train"]
    return {
        "task": config.task,
        "level": session.choice.level.name,
        "dtype": session.choice.format.name,
        "master_weights": config.master_weights if has_masters else forms.NONE,
        "reason": session.choice.reason,
        "steps": trainer.state.step,
        "planned_steps": trainer.job.plan.total_steps,
        "applied": session.steps_applied,
        "skipped": session.steps_skipped,
        "best_step": trainer.state.best_step,
        "best_by": trainer.job.plan.config.best_score,
        "loss_scale": session.scaler.state.scale.item(),
        "processes": trainer.world.size,
        "parallel": trainer.job.plan.config.parallel,
        "train_seconds": spent,
        "fit_seconds": seconds["fit"],
        "evaluate_seconds": seconds["evaluate"],
        "save_seconds": seconds["save"],
        "tokenise_seconds": tokenise_seconds,
        "examples_per_s": trainer.examples / spent if spent else None,
        "padded_share": 1 - trainer.tokens / trainer.padded_tokens
        if trainer.padded_tokens
        else None,
        "memory": session.memory(),
    }


def _chosen(config: TrainConfig, requested: TrainConfig) -> frozenset[str]:
    """Return the settings left open by the user and chosen by the run."""
    before = requested.data_dict()
    return frozenset(
        name
        for name, value in config.data_dict().items()
        if value is not None and before[name] in {None, "auto"}
    )


@torch.no_grad()
def portable_model(network: Network, weights: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """Build an unsharded fp32 model from master weights."""
    model: Any = network.model
    # The trained one may be sharded: FSDP2 makes a subclass of the model's class.
    kind = next(
        kind
        for kind in type(model).__mro__
        if kind.__module__.startswith(("transformers.", "halfstep.train."))
    )
    fp32_model = kind(model.config)
    fp32_model.load_state_dict(dict(weights))
    return fp32_model.float()
