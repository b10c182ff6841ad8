"""A whole run, from settings to a finished model and its report.

In: a `TrainConfig`. Out: the run's folder, and a `Result` to show.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep import checkpoint, distributed, formats, levels, machine
from halfstep.choice import Choice, choose
from halfstep.errors import UserError
from halfstep.preparing import prepare
from halfstep.train import text
from halfstep.train.batches import Encoded
from halfstep.train.config import TrainConfig, resumed
from halfstep.train.data import load
from halfstep.train.folder import RunFolder
from halfstep.train.loop import Plan, Trainer, parameter_groups
from halfstep.train.progress import progress
from halfstep.train.result import Result, conclude

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from halfstep.distributed import World
    from halfstep.train.data import Corpus, Example
    from halfstep.train.text import Classifier

_FEW_EXAMPLES = 5000
_EPOCHS_FEW, _EPOCHS_MANY = 20, 3
_LR_SCRATCH, _LR_TUNE = 5e-4, 3e-5
_MASK_SCRATCH = 0.3


def run(
    given: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
) -> Result:
    """Train a text classifier as the settings say.

    Args:
        given: Settings by name, as typed; the rest are defaults or, when resuming,
            the saved run's.
        resume: Go on with the run in `out`.
        overwrite: Replace the run in `out`.

    Raises:
        UserError: If settings, data or checkpoint cannot be used.
        LossScaleCollapse: If no step could be applied for too long.
    """
    check_installed()
    folder = RunFolder(Path(given.get("out", TrainConfig.out)))
    saved = folder.settings() if resume else None
    config = TrainConfig(**given) if saved is None else resumed(saved, dict(given))
    device = pick_device(config.device)
    corpus = load(
        None if config.data is None else Path(config.data),
        label_names=config.label_names,
        limit=config.limit,
        dev_share=config.dev_share,
        seed=config.seed,
    )
    with distributed.join(device) as world:
        return _run(config, corpus, folder, world, resume=resume, overwrite=overwrite)


def check_installed() -> None:
    """Find every library that a run will need, before it begins.

    Raises:
        UserError: If one is missing.
    """
    needed = {"transformers", "sklearn", "safetensors", "rich", "matplotlib", "jinja2"}
    missing = sorted(name for name in needed if find_spec(name) is None)
    if missing:
        message = (
            f"training needs {', '.join(missing)}: install with pip install "
            "'halfstep[train,report]'."
        )
        raise UserError(message)


def pick_device(word: str) -> str:
    """Return "cpu" or "cuda".

    Raises:
        UserError: If cuda is asked for and there is none.
    """
    if word == "cuda" and not torch.cuda.is_available():
        message = "--device cuda: torch sees no CUDA device here; use --device cpu."
        raise UserError(message)
    return machine.capabilities().device if word == "auto" else word


def _run(
    config: TrainConfig,
    corpus: Corpus,
    folder: RunFolder,
    world: World,
    *,
    resume: bool,
    overwrite: bool,
) -> Result:
    torch.manual_seed(config.seed)
    classifier = text.build(
        config.model,
        [example.text for example in corpus.train],
        corpus.labels,
        max_length=config.max_length,
        dropout=config.dropout,
    )
    began = time.perf_counter()
    splits = {
        name: _encode(classifier.tokenizer, getattr(corpus, name))
        for name in ("train", "dev", "test")
    }
    tokenise_seconds = time.perf_counter() - began
    plan = resolve(config, corpus, from_scratch=classifier.from_scratch)
    model = classifier.model.to(world.device).train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay), lr=plan.lr, fused=True
    )
    found = None
    if resume and folder.has_checkpoint():
        found = checkpoint.load(folder.last())
    session = prepare(
        model,
        optimizer,
        _choice(config, found, world),
        policy=config.policy,
        loss_scale=config.loss_scale,
        clip_grad_norm=config.clip,
        accumulate=config.accumulate,
        master=config.master,
    )
    session.model = distributed.data_parallel(model, world)
    trainer = Trainer(
        session,
        splits["train"],
        splits["dev"],
        corpus.labels,
        plan,
        classifier.tokenizer,
        world,
        folder,
    )
    if found is not None:
        trainer.load(found)
    _open(config, trainer, resume=resume, overwrite=overwrite)
    shown = progress(plan.total_steps, trainer.step_done, leads=world.leads)
    shown.say(_opening(config, corpus, classifier, trainer))
    try:
        trainer.fit(shown)
    finally:
        shown.close()
    return conclude(
        config, corpus, trainer, classifier, splits["test"], tokenise_seconds
    )


def _choice(
    config: TrainConfig, found: checkpoint.Checkpoint | None, world: World
) -> Choice:
    """Return the level and format of the run, the same on every process.

    Why: "auto" measures, and two measurements may differ. A run goes on as it began,
    and its processes follow the first.
    """
    if found is None or "level" not in found.state:  # no run's: `load` will say so
        return distributed.same_everywhere(
            choose(config.level, config.dtype, world.device.type)
        )
    level, dtype = found.state["level"], found.state["dtype"]
    reason = found.state.get("run", {}).get("reason", "as the run began")
    return Choice(levels.parse(level), formats.parse(dtype), reason)


def _open(
    config: TrainConfig, trainer: Trainer, *, resume: bool, overwrite: bool
) -> None:
    """Let the first process make the folder ready; where it fails, all fail.

    Why: processes that wait for one that has left end in a traceback each.
    """
    fault: UserError | OSError | None = None
    if trainer.world.leads:
        try:
            if resume:
                trainer.folder.rewind(trainer.step_done)
            else:
                trainer.folder.begin(config.data_dict(), overwrite=overwrite)
        except (UserError, OSError) as error:
            fault = error
    failed = torch.tensor(float(fault is not None), device=trainer.world.device)
    if distributed.total(failed):
        message = "the first process could not make the run's folder ready."
        raise fault or UserError(message)


def _encode(tokenizer: Any, examples: Sequence[Example]) -> Encoded:  # noqa: ANN401
    ids = text.encode(tokenizer, [example.text for example in examples])
    return Encoded.build(ids, [example.label for example in examples])


def resolve(config: TrainConfig, corpus: Corpus, *, from_scratch: bool) -> Plan:
    """Return the plan that settings come to for this data and model."""
    count = len(corpus.train)
    few = from_scratch and count < _FEW_EXAMPLES
    epochs = config.epochs or (_EPOCHS_FEW if few else _EPOCHS_MANY)
    steps = math.ceil(count / config.batch_size)
    mask = config.mask_tokens
    if mask is None:
        mask = _MASK_SCRATCH if from_scratch else 0.0
    splits = [[(e.label, e.text) for e in part] for part in (corpus.train, corpus.dev)]
    told = json.dumps([corpus.labels, *splits])
    return Plan(
        epochs=epochs,
        batch_size=config.batch_size,
        lr=config.lr or (_LR_SCRATCH if from_scratch else _LR_TUNE),
        warmup=config.warmup,
        mask_tokens=mask,
        eval_every=config.eval_every or steps,
        seed=config.seed,
        total_steps=epochs * steps,
        fingerprint=hashlib.sha256(told.encode()).hexdigest(),
    )


def _opening(
    config: TrainConfig, corpus: Corpus, classifier: Classifier, trainer: Trainer
) -> str:
    choice, plan = trainer.session.choice, trainer.plan
    numbers = sum(param.numel() for param in classifier.model.parameters())
    start = f", from step {trainer.step_done}" if trainer.step_done else ""
    processes = f" on {trainer.world.size} processes" if trainer.world.size > 1 else ""
    kept = f", master weights {config.master}" if choice.level.masters else ""
    return (
        f"level {choice}{kept}: {choice.reason}\n"
        f"{corpus.name}: {len(corpus.train)} train, {len(corpus.dev)} dev, "
        f"{len(corpus.test)} test texts in {len(corpus.labels)} classes\n"
        f"model of {numbers / 1e6:.1f} million parameters, {plan.total_steps} steps of "
        f"{plan.batch_size} texts{processes}{start}"
    )
