"""Runs a whole training: from the settings to the final model and its report."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.diagnostics.doctor import run_record
from halfstep.distributed import ddp, process_group
from halfstep.errors import UserError
from halfstep.fast_dropout import use_fast_dropout
from halfstep.machine import hardware
from halfstep.machine.recommendation import Choice, resolve
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.reporting.table import format_count
from halfstep.session.factory import prepare
from halfstep.train import (
    checkpointing,
    dependencies,
    model,
    parallelize,
    param_groups,
    signals,
    tasks,
    wide,
)
from halfstep.train.config import (
    MASTERS,
    TrainConfig,
    read_file,
    resume_config,
    write_resolved,
)
from halfstep.train.data import tokenized
from halfstep.train.data.corpus import load
from halfstep.train.data_checks import data_findings
from halfstep.train.dry_run import dry_run
from halfstep.train.fp32_comparison import compare_with_fp32
from halfstep.train.loop import Trainer
from halfstep.train.output.progress import progress
from halfstep.train.output.run_directory import RunFolder
from halfstep.train.plan import (
    TrainJob,
    TrainState,
    lost_updates_interval,
    resolve_config,
    resolve_plan,
)
from halfstep.train.result import PreparedRun, RunResult, finish_run
from halfstep.train.signals import Stopped
from halfstep.train.step_dataset import StepDataset, TokenMasking

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from halfstep.distributed.process_group import World
    from halfstep.session.session import Session
    from halfstep.train.data.corpus import Corpus
    from halfstep.train.model import Network
    from halfstep.train.plan import Plan


def run(
    settings: Mapping[str, Any],
    *,
    resume: bool = False,
    overwrite: bool = False,
    check: bool = False,
) -> RunResult:
    """Train a model.

    Args:
        settings: Explicit settings by name; the others are defaults or, when resuming,
            the saved run's.
        resume: Continue the run in `out`. When torchrun restarts a failed launch, the
            run begun by that launch is continued even without this flag.
        overwrite: Replace the run in `out`.
        check: Dry run: train a few steps, report; write nothing to `out`.

    Raises:
        UserError: If settings, data or checkpoint are invalid.
        LossScaleCollapse: If steps overflow at the minimum scale for too long.
        Diverged: If the dev loss is non-finite.
        Stopped: If a signal was received.
        PeerLost: If another process has ended.
    """
    dependencies.check("halfstep train", dependencies.TO_TRAIN)
    folder = RunFolder(Path(settings.get("out", TrainConfig.out)))
    config = _resumed_config(folder, settings) if resume else TrainConfig(**settings)
    if config.tensorboard:
        dependencies.check("--tensorboard", dependencies.TENSORBOARD)
    device = hardware.pick_device(config.device)
    with process_group.join(device) as world, contextlib.ExitStack() as stack:
        corpus = process_group.once_per_machine(lambda: load_corpus(config))
        if not check:  # writes nothing there
            checkpointing.run_on_first_rank(
                world, lambda: stack.enter_context(folder.locked())
            )
        # Each machine reads its own copy of the data.
        if process_group.broadcast_object(corpus.fingerprint) != corpus.fingerprint:
            raise UserError(
                f"--data is not the same on {platform.node()} as on the first machine; "
                "copy it from there."
            )
        if _is_restart(folder, settings, world):
            resume, overwrite = True, False
        checkpoint = (
            checkpointing.find_resume_checkpoint(folder, world) if resume else None
        )
        notes, faults = checkpoint or (None, [])
        ready = _prepare_run(config, corpus, folder, world, notes)
        if check:
            return dry_run(ready)
        _open_folder(ready, resume=resume, overwrite=overwrite)
        outcome = _train(ready, notes, faults)
    if isinstance(outcome, Stopped):
        raise outcome
    return outcome


def _resumed_config(folder: RunFolder, settings: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of the run in a folder; the new ones must match them."""
    saved, full = folder.settings(), folder.path / "resolved.toml"
    return resume_config(saved, settings, read_file(full) if full.exists() else None)


def _is_restart(folder: RunFolder, settings: Mapping[str, Any], world: World) -> bool:
    """Return whether torchrun restarted this run, with the same settings."""

    def ask() -> bool:
        is_restart = folder.resumes_after_restart()
        if is_restart:
            _resumed_config(folder, settings)
        return is_restart

    return bool(
        process_group.broadcast_object(checkpointing.run_on_first_rank(world, ask))
    )


def _train(
    ready: PreparedRun, notes: Mapping[str, Any] | None, faults: Sequence[str]
) -> RunResult | Stopped:
    """Train until the end or until asked to stop.

    Returns Stopped instead of raising it: all ranks stop at the same step, so they can
    leave the process group in the normal way.
    """
    trainer = ready.trainer
    total, leads = trainer.job.plan.total_steps, trainer.world.is_first
    display = progress(total, trainer.state.step, leads=leads)
    findings = data_findings(trainer)
    lines = _opening_lines(trainer, ready.network, notes)
    for line in (*faults, *lines, *findings):
        display.print_line(line)
    try:
        with signals.stop_on_signals(trainer.stop, trainer.world.size):
            _fit_wide(ready)
            trainer.fit(display)
    except Stopped as stopped:
        return stopped
    finally:
        display.close()
        trainer.close()
    findings = (*faults, *findings)
    return finish_run(ready, findings, lambda: _compare_with_fp32(ready))


def _fit_wide(ready: PreparedRun) -> None:
    """Fit the linear model of a classifier that has one, before the first step."""
    trainer, model = ready.trainer, ready.network.model
    encoded = trainer.job.encoded
    if wide.is_used(model, encoded["train"]) and not trainer.state.step:
        objective: Any = trainer.job.steps.objective
        began = time.perf_counter()
        wide.fit(model, encoded["train"], encoded["dev"], objective.weights)
        trainer.seconds["fit"] = time.perf_counter() - began


def _compare_with_fp32(ready: PreparedRun) -> dict[str, Any] | None:
    trainer = ready.trainer
    job, world, config = trainer.job, trainer.world, trainer.job.plan.config
    if config.compare_fp32 is None:
        return None
    if world.is_first:
        print(f"comparing {config.compare_fp32} steps with fp32", flush=True)  # noqa: T201

    def new_trainer(choice: Choice) -> Trainer:
        torch.manual_seed(config.seed)
        network, plan = build_network(config, job.corpus), job.plan
        if not choice.level.low:  # fp32 takes neither
            own = replace(config, loss_scale="auto", master_weights=MASTERS[0])
            plan = replace(plan, config=own)
        session, _ = _session(network, plan, choice, world)
        return Trainer(session, job, world, trainer.folder)

    choice, steps = trainer.session.choice, config.compare_fp32
    return compare_with_fp32(new_trainer, choice, steps, world)


def _prepare_run(
    config: TrainConfig,
    corpus: Corpus,
    folder: RunFolder,
    world: World,
    notes: Mapping[str, Any] | None,
) -> PreparedRun:
    """Build a trainer, from the checkpoint of `notes` if given."""
    if notes is not None and notes["fingerprint"] != corpus.fingerprint:
        raise UserError(
            "--resume: the checkpoint was made from other data; resume with the data "
            "it was trained on."
        )
    torch.manual_seed(config.seed)
    network = build_network(config, corpus)
    job, tokenise_seconds = make_job(config, corpus, network, world)
    weights = run_record.weight_formats(network.model)
    choice = _choice(config, notes, world)
    session, originals = _session(network, job.plan, choice, world)
    trainer = Trainer(session, job, world, folder)
    if notes is not None:
        names = [field.name for field in fields(TrainState)]
        trainer.state = TrainState(**{name: notes[name] for name in names})
        checkpointing.load(session, folder.checkpoint_path(trainer.state.step))
    return PreparedRun(trainer, network, originals, weights, tokenise_seconds)


def load_corpus(config: TrainConfig) -> Corpus:
    """Read the texts of a run, and draw its dev split if there is none."""
    return load(
        config.data,
        config.data_format,
        label_names=config.label_names,
        dev_share=config.dev_share,
        seed=config.seed,
    )


def build_network(config: TrainConfig, corpus: Corpus) -> Network:
    """Build the tokenizer and the model of a run; weights are drawn from torch."""
    task = tasks.TASKS[config.problem]
    return model.build(
        config.model,
        corpus.train.texts(),
        task.output_names(corpus.labels),
        head=task.head,
        config_entries=task.config_entries(corpus.train),
        max_length=config.max_length,
        dropout=config.dropout,
    )


def make_job(
    config: TrainConfig, corpus: Corpus, network: Network, world: World
) -> tuple[TrainJob, float]:
    """Return what a run trains on, and the seconds that tokenizing took."""
    began = time.perf_counter()
    encoded = process_group.once_per_machine(
        lambda: {
            split: tokenized.encode_split(getattr(corpus, split), network.tokenizer)
            for split in ("train", "dev", "test")
        }
    )
    tokenise_seconds = time.perf_counter() - began
    plan = resolve_plan(config, corpus, world, scratch=network.from_scratch)
    objective = tasks.TASKS[config.problem].objective(config, corpus)
    tokenizer, masking = network.tokenizer, None
    if plan.mask_tokens:
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"--mask-tokens {plan.mask_tokens}: this model's tokenizer has no mask "
                "token; use --mask-tokens 0."
            )
        special = torch.tensor(tokenizer.all_special_ids)
        masking = TokenMasking(plan.mask_tokens, tokenizer.mask_token_id, special)
    steps = StepDataset(
        encoded["train"],
        plan.order,
        objective,
        world,
        pad_id=tokenizer.pad_token_id,
        multiple=model.PAD_MULTIPLE if world.device.type == "cuda" else 1,
        masking=masking,
    )
    job = TrainJob(corpus, encoded, steps, plan, tokenizer.model_max_length)
    return job, tokenise_seconds


def _session(
    network: Network, plan: Plan, choice: Choice, world: World
) -> tuple[Session, dict[str, Tensor]]:
    """Return the session, and frozen parameters that 16-bit storage rounds, by name."""
    config = plan.config
    model = network.model.to(world.device).train()
    if wide.is_part_of(model):
        model.wide.double()  # no level rounds float64
    param_groups.freeze(model, config.frozen)
    if not config.compile:  # a compiler generates its own masks
        use_fast_dropout(model)
    originals = {}
    if choice.level.low_weights:
        originals = {
            name: param.detach().cpu().clone()
            for name, param in model.named_parameters()
            if not param.requires_grad
        }
    parallelize.parallelize_model(model, config, choice, world)
    optimizer = param_groups.make_optimizer(model, config, plan.lr)
    session = prepare(
        model,
        optimizer,
        choice,
        policy=config.policy,
        loss_scale=config.loss_scale,
        clip_grad_norm=plan.clip,
        accumulate=config.accumulate,
        master=config.master_weights,
    )
    interval = lost_updates_interval(plan, choice.level)
    if interval is not None:
        session.count_rounding_loss(every=interval)
    if config.parallel != parallelize.FSDP2:  # which has changed it in place
        session.model = ddp.data_parallel(model, world)
    return session, originals


def _choice(
    config: TrainConfig, notes: Mapping[str, Any] | None, world: World
) -> Choice:
    """Return the saved choice, or that of the first rank: measurements may differ."""
    if notes is None:
        return process_group.broadcast_object(
            resolve(config.level, config.dtype, world.device.type)
        )
    level, dtype = levels.parse(notes["level"]), formats.parse(notes["dtype"])
    return Choice(level, dtype, notes["reason"])


def _open_folder(ready: PreparedRun, *, resume: bool, overwrite: bool) -> None:
    """Prepare the folder of a run, and write its settings and environment."""
    trainer = ready.trainer
    folder, plan, choice = trainer.folder, trainer.job.plan, trainer.session.choice
    config = plan.config

    def make() -> None:
        if resume:
            folder.rewind(trainer.state.step)
            folder.prune(config.keep)  # a run may have been killed before it did
        else:
            folder.begin(config.data_dict(), overwrite=overwrite)
        path = folder.path / "resolved.toml"
        if not path.exists():  # missing if a run was killed before this
            full = resolve_config(plan, choice.level.name, choice.format.name)
            write_resolved(path, full.data_dict())
        machine = run_record.machine_data(plan.device)
        text = json.dumps({"machine": machine, "weights": ready.weights}, indent=1)
        folder.write("environment.json", text)
        trainer.open(tensorboard=config.tensorboard, probe=config.probe)

    checkpointing.run_on_first_rank(trainer.world, make)


def _load_lines(world: World) -> list[str]:
    """Return a line if other programs keep the CPU of a run on a CPU busy."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if world.device.type != "cpu" or load <= cores:
        return []
    busy = f"load average {load:.1f} on {format_count(cores, 'core')}"
    advice = "OMP_WAIT_POLICY=PASSIVE in the environment makes it less"
    return [f"{busy}: other programs slow each step; {advice}"]


def _opening_lines(
    trainer: Trainer, network: Network, notes: Mapping[str, Any] | None
) -> list[str]:
    choice, job, world = trainer.session.choice, trainer.job, trainer.world
    corpus, plan, step = job.corpus, job.plan, trainer.state.step
    num_params = sum(param.numel() for param in network.model.parameters())
    processes = ""
    if world.size > 1:
        processes = f" on {world.size} processes, {plan.config.parallel}"
    master_weights = (
        f", master weights {plan.config.master_weights}" if choice.level.masters else ""
    )
    task = tasks.TASKS[plan.config.problem]
    start = f", from step {step}" if step else ""
    size, batch = num_params / 1e6, plan.order.batch_size
    steps = f"{format_count(plan.total_steps, 'step')} of {format_count(batch, 'text')}"
    lines = [
        f"level {choice}{master_weights}: {choice.reason}",
        *_load_lines(world),
        f"{corpus.name}: {corpus.sizes} {task.description(corpus)}",
        f"model of {size:.1f} million parameters, {steps}{processes}{start}",
    ]
    if notes is None and network.new_weights:
        lines.append(network.new_weights_line())
    if notes is not None and notes["processes"] != world.size:
        before = format_count(notes["processes"], "process", "processes")
        lines.append(
            f"the run was on {before} and is on {world.size}: it goes on with the same "
            "batches, and other dropout masks"
        )
    return lines
