"""`halfstep bench encoder` and `bench probe`: training steps of a BERT encoder.

Reports step time, memory for activations and losses in fp32, under torch.amp and at O1;
or the time that a probe adds in each mode. All contenders of a seed start from the same
weights, use the same batches and random numbers, and take turns step by step.

The texts are synthetic: tokens are divided into groups, and the label is the group that
is overrepresented. A small encoder learns this within a hundred steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import journal, measure
from halfstep.bench.contenders import ENCODER
from halfstep.bench.loops import Loop, PlainLoop, SessionLoop
from halfstep.bench.measure import MIB
from halfstep.diagnostics.probe import Probe
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from halfstep.diagnostics.probe import Event
    from halfstep.reporting.table import Cell, Table

FULL, BASELINE = "fp32", "torch.amp"

DEFAULTS: dict[str, dict[str, float]] = {
    "cpu": {"layers": 4, "hidden": 256, "heads": 4, "batch": 16, "lr": 3e-4},
    "cuda": {"layers": 12, "hidden": 768, "heads": 12, "batch": 32, "lr": 1e-4},
}
"""Device -> defaults of flags; on cuda those of BERT base, which needs a lower lr."""

CLASSES, GROUP = 4, 8  # number of labels, and tokens in the group of each
FAVOURED = 0.2  # share of tokens drawn from the label's group, besides chance
_WARM_UP = 3  # steps of each seed that are not timed
_POINTS = 10  # parts of a run whose mean losses are shown

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """What every contender trains, where, and how long."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    """"bf16" or "fp16"."""
    layers: int
    hidden: int
    heads: int
    length: int
    """Tokens per text."""
    batch: int
    """Texts per step."""
    steps: int
    seeds: int
    """Runs per contender."""
    dropout: float
    lr: float
    attention: str
    """"eager" or "sdpa"."""


Losses = dict[str, list[list[float]]]
"""Contender -> losses of each step, by seed."""


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender with every seed; return times, memory and losses."""
    work = workload_of(arguments)
    batch = next(draw_batches(work, 0))
    memory = {
        name: memory_of(make_loop(name, work, 0), batch, work.device)
        for name in ENCODER
    }
    losses: Losses = {name: [] for name in ENCODER}
    seconds: dict[str, list[float]] = defaultdict(list)
    for seed in range(work.seeds):
        loops = {name: make_loop(name, work, seed) for name in ENCODER}
        for name, each in train_in_turn(loops, work, seed, seconds).items():
            losses[name].append(each)
        last = ", ".join(f"{n} {last_losses(losses[n])[-1]:.3f}" for n in losses)
        measure.progress(f"seed {seed + 1}/{work.seeds}: last losses {last}")
    times = measure.Times(seconds)
    full = last_losses(losses[FULL])
    rows = [
        {
            "contender": name,
            "ms a step": times.median(name, 1e3),
            f"x {BASELINE}": times.ratio(name, BASELINE),
            **memory[name],
            "last loss": fmean(last_losses(losses[name])),
            f"most off {FULL}": max(
                abs(own - other)
                for own, other in zip(last_losses(losses[name]), full, strict=True)
            ),
        }
        for name in ENCODER
    ]
    spread = max(full) - min(full)
    notes = (
        measure.in_turn(len(seconds[FULL])),
        f"{BASELINE} runs beside our dispatch kernels; see `bench autocast`",
        "activations: bytes saved for the backward pass, exact, without weights",
        "casts: weights saved in 16 bits for it; GPU peak: most allocated in a step",
        "last loss: mean over the last tenth of the steps, and over seeds",
        f"most off {FULL}: in last loss, of any seed",
        f"{FULL}'s own last losses span {spread:.4f} over {work.seeds} seeds",
        *measure.conditions("encoder", work.device, arguments),
    )
    return [
        measure.table("Training an encoder", rows, notes, digits=4),
        _curves(work, losses),
    ]


def _curves(work: Workload, losses: Losses) -> Table:
    """Return the mean losses over equal parts of each run."""
    parts = min(_POINTS, work.steps)
    bounds = [work.steps * part // parts for part in range(parts + 1)]
    rows: list[dict[str, Cell]] = [
        {
            "seed": seed,
            "steps": f"{start + 1} to {end}",
            **{name: fmean(each[seed][start:end]) for name, each in losses.items()},
        }
        for seed in range(work.seeds)
        for start, end in pairwise(bounds)
    ]
    return measure.table("Mean loss", rows, (), digits=4)


def last_losses(losses: list[list[float]]) -> list[float]:
    """Return each seed's mean loss over the last tenth of its steps."""
    return [fmean(run[-max(1, len(run) // 10) :]) for run in losses]


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Return the workload; fill in defaults and validate flags."""
    if find_spec("transformers") is None:
        message = (
            "bench encoder needs transformers: install with pip install "
            "'halfstep[train]'."
        )
        raise UserError(message)
    device = measure.pick_device(arguments.device)
    for name, value in DEFAULTS[device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.hidden % arguments.heads:
        message = (
            f"--hidden {arguments.hidden} must be a multiple of --heads "
            f"{arguments.heads}."
        )
        raise UserError(message)
    if arguments.steps <= _WARM_UP:
        message = (
            f"--steps {arguments.steps} must be at least {_WARM_UP + 1}; the first "
            f"{_WARM_UP} are not timed."
        )
        raise UserError(message)
    return measure.from_flags(Workload, arguments, device=device)


# Training


def draw_batches(
    work: Workload, seed: int, favoured_share: float = FAVOURED
) -> Iterator[Batch]:
    """Yield the batch of each step."""
    draw = torch.Generator().manual_seed(seed)
    shape = work.batch, work.length
    for _ in range(work.steps):
        labels = torch.randint(CLASSES, (work.batch,), generator=draw)
        any_group = torch.randint(CLASSES * GROUP, shape, generator=draw)
        offsets = torch.randint(GROUP, shape, generator=draw)
        own_group = offsets + labels[:, None] * GROUP
        favoured = torch.rand(shape, generator=draw) < favoured_share
        ids = torch.where(favoured, own_group, any_group)
        yield {"input_ids": ids.to(work.device), "labels": labels.to(work.device)}


def make_loop(name: str, work: Workload, seed: int) -> Loop:
    """Build a contender; all of one seed start from the same weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
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
    model: nn.Module = BertForSequenceClassification(BertConfig(**settings))
    model = model.to(work.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), work.lr)
    policy = ENCODER[name]
    if policy is None:
        dtype = None if name == FULL else formats.parse(work.dtype).dtype
        return PlainLoop(model, optimizer, loss_of, work.device, dtype)
    session = prepare(model, optimizer, "O1", dtype=work.dtype, policy=policy)
    return SessionLoop(session, loss_of)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of a batch."""
    loss: Tensor = model(**batch).loss
    return loss


def train_in_turn(
    loops: Mapping[str, Loop],
    work: Workload,
    seed: int,
    seconds: Mapping[str, list[float]],
    after_step: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Train contenders with one seed, in turn step by step; return their losses.

    Args:
        loops: The contenders.
        work: Steps and batches.
        seed: Seed of the batches and dropout.
        seconds: Receives the time of each step after warm-up.
        after_step: Called with the contender's name; its time counts.
    """
    losses: dict[str, list[float]] = {name: [] for name in loops}

    def step(name: str, batch: Batch) -> Tensor:
        loss = loops[name].step([batch])
        after_step(name)
        return loss

    for number, batch in enumerate(draw_batches(work, seed)):
        for name in measure.order(loops, number):
            torch.manual_seed(seed * work.steps + number)  # same dropout for all
            loss, took = measure.timed(partial(step, name, batch), work.device)
            losses[name].append(loss.item())
            journal.record(name, seed=seed, step=number, loss=loss.item(), seconds=took)
            if number >= _WARM_UP:
                seconds[name].append(took)
    return losses


# Memory


def memory_of(loop: Loop, batch: Batch, device: str) -> dict[str, float | None]:
    """Measure the memory of a second step, when the optimizer state exists."""
    loop.step([batch])
    activations, casts = saved_for_backward(loop, batch)
    peak = None
    if device == "cuda":
        measure.synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loop.step([batch])
        peak = (torch.cuda.max_memory_allocated() - before) / MIB
    return {
        "activations MiB": activations / MIB,
        "casts MiB": casts / MIB,
        "GPU peak MiB": peak,
    }


def saved_for_backward(loop: Loop, batch: Batch) -> tuple[int, int]:
    """Return the bytes that a forward pass saves for backward; shared storages once.

    Returns:
        Bytes of activations, and bytes of cast weights; weights do not count.
    """
    saved: dict[int, Tensor] = {}
    casts: set[int] = set()
    weights = {w.untyped_storage().data_ptr() for w in loop.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            # Keeping the tensor alive prevents reuse of its address.
            saved[address] = tensor
            if comes_from_weight(tensor):
                casts.add(address)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loop.forward(batch)
    sizes = {address: t.untyped_storage().nbytes() for address, t in saved.items()}
    of_casts = sum(sizes[address] for address in casts)
    return sum(sizes.values()) - of_casts, of_casts


_RESHAPES_OR_CASTS = {
    *("ToCopyBackward0", "_CachedCastBackward", "TBackward0", "TransposeBackward0"),
    *("PermuteBackward0", "ExpandBackward0", "ViewBackward0"),
    *("UnsafeViewBackward0", "ReshapeAliasBackward0"),
}
"""Autograd nodes that only cast or reshape a weight."""


def comes_from_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a trainable leaf, cast or reshaped."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _RESHAPES_OR_CASTS:
        node = node.next_functions[0][0]
    return node is not None and hasattr(node, "variable")  # an AccumulateGrad node


# Probes

NONE, FLAGS, BETWEEN, STATISTICS = "none", "flags", "between samples", "full"
SAMPLED = "sampled"
"""Computed: one of `every` steps as `STATISTICS`, the others as `BETWEEN`."""

PROBES: dict[str, dict[str, Any]] = {
    NONE: {},
    FLAGS: {"mode": "flags"},
    BETWEEN: {"mode": "sampled", "every": 2**31 - 1},
    STATISTICS: {"mode": "full"},
}
"""Contender of `bench probe` -> settings of its probe; empty: no probe."""

TARGETS = {FLAGS: 1.03, SAMPLED: 1.03}
"""Maximum step time relative to no probe, for modes that are meant to stay on.
Statistics in every step are for debugging."""


def probe_tables(arguments: argparse.Namespace) -> list[Table]:
    """Train with a probe in each mode and without, in turn."""
    work = workload_of(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in PROBES}
    numbers = 0
    for seed in range(work.seeds):
        probes = train_probed(arguments.loop, work, seed, seconds)
        numbers = sum(each.count for each in probes[STATISTICS].stats.values())
        measure.progress(f"seed {seed + 1}/{work.seeds}: done")
    seconds[SAMPLED] = amortised(seconds, arguments.every)
    times = measure.Times(seconds)
    rows = [
        {
            "probe": name,
            "ms a step": times.median(name, 1e3),
            f"x {NONE}": (ratio := times.ratio(name, NONE)),
            "+-": times.spread(name, NONE),
            "target": TARGETS.get(name),
            "within": measure.within(ratio, TARGETS.get(name)),
        }
        for name in seconds
    ]
    mean = (
        f"of {arguments.every} steps one as {STATISTICS!r}, the others as {BETWEEN!r}"
    )
    count = f"{numbers / 1e6:.1f}"
    notes = (
        measure.in_turn(len(seconds[NONE])),
        f"x {NONE}: median of the ratios within a round; {measure.SPREAD}",
        f"{SAMPLED}: computed; {mean}",
        f"{STATISTICS}: {count} million numbers counted and cast twice a step",
        f"trained: {arguments.loop}",
        *measure.conditions("probe", work.device, arguments),
    )
    return [measure.table("A probe on an encoder", rows, notes)]


def train_probed(
    loop: str, work: Workload, seed: int, seconds: Mapping[str, list[float]]
) -> dict[str, Probe]:
    """Train all contenders of `bench probe` with one seed; return their probes.

    Events are formatted as for metrics.jsonl, and discarded.
    """
    loops = {name: make_loop(loop, work, seed) for name in PROBES}
    probes = {
        name: Probe(loops[name].model, log=_to_text, **settings)
        for name, settings in PROBES.items()
        if settings
    }

    def after_step(name: str) -> None:
        if name in probes:
            probes[name].step()

    train_in_turn(loops, work, seed, seconds, after_step)
    return probes


def _to_text(event: Event) -> None:
    json.dumps(event, allow_nan=False)


def amortised(seconds: Mapping[str, list[float]], every: int) -> list[float]:
    """Return, by round, the mean step time with a sample every `every` steps."""
    pairs = zip(seconds[BETWEEN], seconds[STATISTICS], strict=True)
    return [((every - 1) * between + full) / every for between, full in pairs]
