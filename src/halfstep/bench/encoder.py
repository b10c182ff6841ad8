"""`halfstep bench encoder` and `bench probe`: training steps of a BERT encoder.

The texts are synthetic: tokens are divided into groups, and the label is the group that
is overrepresented. A small encoder learns this within a hundred steps.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import commands, loops, measure, results, training
from halfstep.diagnostics.probe import Probe
from halfstep.errors import UserError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

    from halfstep.diagnostics.probe import Event
    from halfstep.reporting.table import Table

DEFAULTS: dict[str, dict[str, float]] = {
    "cpu": {"layers": 4, "hidden": 256, "heads": 4, "batch": 16, "lr": 3e-4},
    "cuda": {"layers": 12, "hidden": 768, "heads": 12, "batch": 32, "lr": 1e-4},
}
"""Device -> defaults of flags; on cuda those of BERT base, which needs a lower lr."""

CLASSES, GROUP = 4, 8  # number of labels, and tokens in the group of each
FAVOURED = 0.2  # share of tokens drawn from the label's group, besides chance


def transformer_flags(tokens: str) -> commands.Flags:
    """Return the flags of `bench encoder` and `bench decoder`."""
    flag = commands.flag
    return {
        "layers": flag("layers (default 4; 12 on cuda)"),
        "hidden": flag("width of the residual stream (default 256; 768 on cuda)"),
        "heads": flag("attention heads (default 4; 12 on cuda)"),
        "batch": flag("texts of a micro-batch (default 16; 32 on cuda)"),
        "length": flag(tokens, 128),
        "accumulate": flag(commands.ACCUMULATE, 1),
        "steps": flag("steps of each run; the first three are not timed", 150),
        "seeds": flag("runs of each candidate", 3),
        "dropout": flag("dropout everywhere", 0.1, commands.share, "P"),
        "lr": flag(
            "learning rate of AdamW (default 0.0003; 0.0001 on cuda)",
            None,
            commands.share,
            "X",
        ),
        "attention": commands.choice(
            "eager: softmax is an operation of its own", "eager", "sdpa"
        ),
    }


def check(arguments: Namespace) -> None:
    """Fill in the defaults of the device; reject what does not fit."""
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.hidden % arguments.heads:
        message = (
            f"--hidden {arguments.hidden} must be a multiple of --heads "
            f"{arguments.heads}."
        )
        raise UserError(message)
    check_steps(arguments)


def check_steps(arguments: Namespace) -> None:
    """Reject a number of steps of which none is timed."""
    if arguments.steps <= training.WARM_UP:
        message = (
            f"--steps {arguments.steps} must be at least {training.WARM_UP + 1}; the "
            f"first {training.WARM_UP} are not timed."
        )
        raise UserError(message)


def make_model(work: Namespace) -> nn.Module:
    """Build a BERT classifier."""
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {
        "vocab_size": CLASSES * GROUP,
        "num_labels": CLASSES,
        "num_hidden_layers": work.layers,
        "hidden_size": work.hidden,
        "intermediate_size": 4 * work.hidden,
        "num_attention_heads": work.heads,
        "max_position_embeddings": work.length,
        "hidden_dropout_prob": work.dropout,
        "attention_probs_dropout_prob": work.dropout,
        "attn_implementation": work.attention,
    }
    return BertForSequenceClassification(BertConfig(**settings))


def draw_batches(
    work: Namespace, seed: int, favoured_share: float = FAVOURED
) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of each step, without end."""
    draw = torch.Generator().manual_seed(seed)
    shape = work.batch, work.length

    def batch() -> dict[str, Tensor]:
        labels = torch.randint(CLASSES, (work.batch,), generator=draw)
        any_group = torch.randint(CLASSES * GROUP, shape, generator=draw)
        offsets = torch.randint(GROUP, shape, generator=draw)
        own_group = offsets + labels[:, None] * GROUP
        favoured = torch.rand(shape, generator=draw) < favoured_share
        ids = torch.where(favoured, own_group, any_group)
        return {"input_ids": ids.to(work.device), "labels": labels.to(work.device)}

    while True:
        yield [batch() for _ in range(work.accumulate)]


def make_optimizer(
    parameters: Iterable[Tensor], work: Namespace
) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, work.lr)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that a model of transformers computes."""
    loss: Tensor = model(**batch).loss
    return loss


KINDS = loops.pick(
    *("fp32", "torch.amp", "accelerate", "fabric-mixed", "fabric-true", "trainer"),
    *("torchao-8bit", "O1 torch", "O1 lean", "O2", "O2-split", "O3"),
)
"""Candidates of `bench encoder`, `bench decoder` and `bench conv`."""
WITH_DROPOUT = KINDS | loops.pick("torch.amp-fast", "O2-fast")
"""Those of models with dropout."""

# Probes

NONE, FLAGS, BETWEEN, STATISTICS = "none", "flags", "between samples", "full"
SAMPLED = "sampled"
"""Computed: one of `every` steps as `STATISTICS`, the others as `BETWEEN`."""

TARGETS = {FLAGS: 1.03, SAMPLED: 1.03}
"""Maximum step time relative to no probe, for modes that are meant to stay on.
Statistics in every step are for debugging."""


def _probed_loop(task: loops.Task, **probe: Any) -> loops.Loop:  # noqa: ANN401
    """Return the loop of `--loop`, with a probe whose events are discarded."""
    kind = loops.CANDIDATES[task.work.loop]
    loop = kind.make(task, **kind.settings)
    if not probe:
        return loop
    update, own = loop.update, Probe(loop.model, log=_to_text, **probe)

    def update_and_probe() -> None:
        update()
        own.step()

    loop.update = update_and_probe
    return loop


def _to_text(event: Event) -> None:
    json.dumps(event, allow_nan=False)


def _probed(description: str, **probe: Any) -> loops.Candidate:  # noqa: ANN401
    return loops.Candidate(description, _probed_loop, probe)


def probe_tables(arguments: Namespace) -> list[Table]:
    """Train with a probe in each mode and without, in turn."""
    seconds = dict(training.measure_steps(arguments).times.rounds)
    every = arguments.every
    if STATISTICS in seconds and BETWEEN in seconds:
        pairs = zip(seconds[STATISTICS], seconds[BETWEEN], strict=True)
        seconds[SAMPLED] = [
            full / every + between * (1 - 1 / every) for full, between in pairs
        ]
    times = measure.Times(seconds)
    rows = [
        {
            "probe": name,
            "ms a step": times.median(name, 1e3),
            **times.compared(name, NONE),
            "target": TARGETS.get(name),
            "within": measure.within(times.ratio(name, NONE), TARGETS.get(name)),
        }
        for name in seconds
    ]
    notes = (
        f"{measure.in_turn(len(next(iter(seconds.values()))))} to {NONE}",
        f"{SAMPLED}: computed; 1 of {every} steps {STATISTICS!r}, others {BETWEEN!r}",
        f"trained: {arguments.loop}",
        *results.conditions(arguments),
    )
    return [measure.table("A probe on an encoder", rows, notes)]


_ENCODER: Any = {
    "check": check,
    "make_model": make_model,
    "draw_batches": draw_batches,
    "make_optimizer": make_optimizer,
    "loss_of": loss_of,
}
BENCHES = {
    "encoder": training.training(
        title="Training an encoder",
        description="Train a BERT encoder from scratch on synthetic texts, several "
        "seeds of each candidate; print time, memory and losses.",
        flags=transformer_flags("tokens of a text"),
        kinds=WITH_DROPOUT,
        **_ENCODER,
    ),
    "probe": training.training(
        run=probe_tables,
        title="A probe on an encoder",
        description="Train a BERT encoder from scratch on synthetic texts without a "
        "probe, and with one in each mode, in turn; print the time of a step.",
        flags={
            **transformer_flags("tokens of a text"),
            "every": commands.flag("steps from one sample to the next", 100),
            "loop": commands.choice(
                "training loop",
                "fp32",
                "torch.amp",
                "O1 torch",
                "O1 lean",
                default="O1 lean",
            ),
        },
        kinds={
            NONE: _probed("no probe"),
            FLAGS: _probed("which tensors are non-finite", mode="flags"),
            BETWEEN: _probed(
                "statistics, a step without", mode="sampled", every=2**31 - 1
            ),
            STATISTICS: _probed("statistics in each step", mode="full"),
        },
        **_ENCODER,
    ),
}
