"""`halfstep bench encoder`: a BERT encoder in fp32, under torch.amp, and at O1.

In: flags. Out: a table of step time, memory for activations and last losses, and one
of losses over time. All contenders of a seed begin with the same weights, read the
same batches and draw the same random numbers, and take turns step by step.

The texts are made up: of a few groups of tokens the label names the one that the text
favours. Counting learns it, and a small encoder does within a hundred steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.bench import journal, measure
from halfstep.bench.loops import Loop, PlainLoop, SessionLoop
from halfstep.errors import UserError
from halfstep.numerics import formats
from halfstep.reporting.table import Cell, Table
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

FULL, BASELINE = "fp32", "torch.amp"
CONTENDERS = {FULL: None, BASELINE: None, "O1 torch": "torch", "O1 lean": "lean"}
"""Name -> policy of a Session at O1; None: a plain loop."""

DEFAULTS: dict[str, dict[str, float]] = {
    "cpu": {"layers": 4, "hidden": 256, "heads": 4, "batch": 16, "lr": 3e-4},
    "cuda": {"layers": 12, "hidden": 768, "heads": 12, "batch": 32, "lr": 1e-4},
}
"""Device -> what is not set by a flag; on cuda BERT base, which bears a lower rate."""

_CLASSES, _GROUP = 4, 8  # labels, and tokens that each has for its own
_FAVOURED = 0.2  # share of tokens drawn from the label's own group, on top of chance
_WARM_UP = 3  # steps of each seed whose time does not count
_POINTS = 10  # parts of a run whose mean losses are shown
_MIB = 2**20

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
    """Tokens of a text."""
    batch: int
    """Texts of a step."""
    steps: int
    seeds: int
    """Runs of each contender."""
    dropout: float
    lr: float
    attention: str
    """"eager" or "sdpa"."""


@dataclass
class TrainingResult:
    """Times and losses of one contender."""

    seconds: list[float] = field(default_factory=list)
    """Of each step, seed after seed, without those that warm up."""
    losses: list[list[float]] = field(default_factory=list)
    """Of each seed, step by step."""

    def last_losses(self) -> list[float]:
        """Return each seed's mean loss over the last tenth of its steps."""
        return [fmean(run[-max(1, len(run) // 10) :]) for run in self.losses]


def tables(arguments: argparse.Namespace) -> list[Table]:
    """Train every contender from every seed; return what it took and came to.

    Raises:
        UserError: If a flag contradicts another or the machine, or transformers is
            not installed.
    """
    work = work_of(arguments)
    batch = next(draw_batches(work, 0))
    memory = {
        name: memory_of(make_loop(name, work, 0), batch, work.device)
        for name in CONTENDERS
    }
    results = {name: TrainingResult() for name in CONTENDERS}
    for seed in range(work.seeds):
        _train(work, seed, results)
        last = ", ".join(
            f"{name} {f.last_losses()[-1]:.3f}" for name, f in results.items()
        )
        measure.progress(f"seed {seed + 1}/{work.seeds}: last losses {last}")
    more = measure.conditions("encoder", work.device, arguments)
    return [_table(work, results, memory, more), _curves(work, results)]


def work_of(arguments: argparse.Namespace) -> Workload:
    """Fill in what no flag set, and check what flags set."""
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
    names = [name for name in Workload.__dataclass_fields__ if name != "device"]
    return Workload(device, **{name: getattr(arguments, name) for name in names})


# Training


def draw_batches(work: Workload, seed: int) -> Iterator[Batch]:
    """Yield the batch of each step."""
    draw = torch.Generator().manual_seed(seed)
    shape = work.batch, work.length
    for _ in range(work.steps):
        labels = torch.randint(_CLASSES, (work.batch,), generator=draw)
        any_group = torch.randint(_CLASSES * _GROUP, shape, generator=draw)
        own_group = torch.randint(_GROUP, shape, generator=draw) + (
            labels[:, None] * _GROUP
        )
        favoured = torch.rand(shape, generator=draw) < _FAVOURED
        ids = torch.where(favoured, own_group, any_group)
        yield {"input_ids": ids.to(work.device), "labels": labels.to(work.device)}


def make_loop(name: str, work: Workload, seed: int) -> Loop:
    """Return a contender; all of one seed begin with the same weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    words: dict[str, Any] = {
        "vocab_size": _CLASSES * _GROUP,
        "num_labels": _CLASSES,
        "num_hidden_layers": work.layers,
        "hidden_size": work.hidden,
        "intermediate_size": 4 * work.hidden,
        "num_attention_heads": work.heads,
        "max_position_embeddings": work.length,
        "hidden_dropout_prob": work.dropout,
        "attention_probs_dropout_prob": work.dropout,
        "attn_implementation": work.attention,
    }
    model: nn.Module = BertForSequenceClassification(BertConfig(**words))
    model = model.to(work.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), work.lr)
    policy = CONTENDERS[name]
    if policy is None:
        dtype = None if name == FULL else formats.parse(work.dtype).dtype
        return PlainLoop(model, optimizer, loss_of, work.device, dtype)
    session = prepare(model, optimizer, "O1", dtype=work.dtype, policy=policy)
    return SessionLoop(session, loss_of)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross entropy of a batch."""
    loss: Tensor = model(**batch).loss
    return loss


def _train(work: Workload, seed: int, results: dict[str, TrainingResult]) -> None:
    """Train all contenders from one seed, in turn step by step."""
    loops = {name: make_loop(name, work, seed) for name in results}
    for each in results.values():
        each.losses.append([])
    for number, batch in enumerate(draw_batches(work, seed)):
        for name in measure.order(loops, number):
            torch.manual_seed(seed * work.steps + number)  # the same dropout for all
            step = partial(loops[name].step, [batch])
            loss, took = measure.timed(step, work.device)
            results[name].losses[-1].append(loss.item())
            journal.record(name, seed=seed, step=number, loss=loss.item(), seconds=took)
            if number >= _WARM_UP:
                results[name].seconds.append(took)


# Memory


@dataclass(frozen=True)
class Memory:
    """What a step takes, in bytes."""

    activations: int
    """Kept by the forward pass for the backward pass, without weights."""
    casts: int
    """Weights in 16 bits that are kept for it."""
    peak: int | None
    """Allocated on a GPU beyond what was there before the step; None on a CPU."""


def memory_of(loop: Loop, batch: Batch, device: str) -> Memory:
    """Measure a step, not the first: by then the optimizer has its state."""
    loop.step([batch])
    activations, casts = saved_for_backward(loop, batch)
    if device == "cpu":
        return Memory(activations, casts, None)
    measure.synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loop.step([batch])
    return Memory(activations, casts, torch.cuda.max_memory_allocated() - before)


def saved_for_backward(loop: Loop, batch: Batch) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps, each piece of memory counted once.

    Returns:
        Those of activations, and those of casts of weights; weights do not count.
    """
    saved: dict[int, Tensor] = {}
    casts: set[int] = set()
    weights = {w.untyped_storage().data_ptr() for w in loop.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            # Holding the tensor keeps its address from being given to another.
            saved[place] = tensor
            if comes_from_weight(tensor):
                casts.add(place)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loop.forward(batch)
    sizes = {place: t.untyped_storage().nbytes() for place, t in saved.items()}
    of_casts = sum(sizes[place] for place in casts)
    return sum(sizes.values()) - of_casts, of_casts


_RESHAPES_OR_CASTS = {
    "ToCopyBackward0",
    "_CachedCastBackward",
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ExpandBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
}
"""Nodes of autograd behind which a weight is still a weight."""


def comes_from_weight(tensor: Tensor) -> bool:
    """Say whether a tensor is a leaf that learns, but for its dtype and shape."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _RESHAPES_OR_CASTS:
        node = node.next_functions[0][0]
    return node is not None and hasattr(node, "variable")  # it gathers a gradient


# What is told


def _table(
    work: Workload,
    results: dict[str, TrainingResult],
    memory: dict[str, Memory],
    more: list[str],
) -> Table:
    times = measure.Times({name: each.seconds for name, each in results.items()})
    full = results[FULL].last_losses()
    rows: list[tuple[Cell, ...]] = []
    for name, each in results.items():
        last, took = each.last_losses(), memory[name]
        rows.append(
            (
                name,
                times.median(name) * 1e3,
                times.ratio(name, BASELINE),
                took.activations / _MIB,
                took.casts / _MIB,
                None if took.peak is None else took.peak / _MIB,
                fmean(last),
                max(abs(own - other) for own, other in zip(last, full, strict=True)),
            )
        )
    columns = (
        "contender",
        "ms a step",
        f"x {BASELINE}",
        "activations MiB",
        "casts MiB",
        "GPU peak MiB",
        "last loss",
        f"most off {FULL}",
    )
    spread = max(full) - min(full)
    notes = (
        measure.in_turn(len(results[FULL].seconds)),
        f"{BASELINE} runs beside kernels of ours, whose price `bench autocast` tells",
        "activations: bytes kept for the backward pass, exact, without weights",
        "casts: weights kept in 16 bits for it; GPU peak: allocated in a step, at most",
        "last loss: mean over the last tenth of the steps, and over seeds",
        f"most off {FULL}: in last loss, of any seed",
        f"{FULL}'s own last losses span {spread:.4f} over {work.seeds} seeds",
    )
    return Table("Training an encoder", columns, tuple(rows), (*notes, *more), digits=4)


def _curves(work: Workload, results: dict[str, TrainingResult]) -> Table:
    """Return mean losses of equal parts of each run."""
    parts = min(_POINTS, work.steps)
    bounds = [work.steps * part // parts for part in range(parts + 1)]
    rows: list[tuple[Cell, ...]] = []
    for seed in range(work.seeds):
        for start, end in pairwise(bounds):
            means = (fmean(each.losses[seed][start:end]) for each in results.values())
            rows.append((seed, f"{start + 1} to {end}", *means))
    return Table("Mean loss", ("seed", "steps", *results), tuple(rows), digits=4)
