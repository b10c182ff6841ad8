"""`halfstep bench plan`: casts and step times of planned models, against autocast.

Each model is trained under torch.autocast, under the lean policy, at levels O1 and O2,
and as planned by painting and by min-cut for the weights of both levels. Predicted
times are compared with measured ones. `measure_plan` is for `halfstep plan`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from halfstep.bench import commands, loops, measure, models
from halfstep.bench.floor import Floor
from halfstep.bench.training import Training, count_casts, measure_steps, row
from halfstep.graph.planner import METHODS, device_of
from halfstep.graph.planner import plan as make_plan
from halfstep.graph.rewrite import rewrite
from halfstep.numerics import formats
from halfstep.numerics.formats import tensors_in
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.graph.plan import Plan
    from halfstep.reporting.table import Cell, Table

BASELINE = "torch.autocast"


class StepModel(nn.Module):
    """A model that returns its loss, so that the whole step is planned."""

    def __init__(self, model: nn.Module, loss_of: loops.LossOf, key: str) -> None:
        super().__init__()
        self.model, self.loss_of, self.key = model, loss_of, key

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.loss_of(self.model, {self.key: inputs, "labels": labels})


Parts: TypeAlias = "tuple[Callable[[], nn.Module], Callable[[], Any], loops.LossOf]"
"""(returns a model, returns a batch, loss of both)."""


def _bench_parts(name: str, **settings: Any) -> Parts:  # noqa: ANN401
    """Return the parts of a workload's model, without dropout: losses are the same."""
    bench = models.BENCHES[name]
    work = Namespace(
        **{"layers": 4, "length": 128, "dropout": 0.0, "attention": "sdpa"} | settings,
        device="cpu",
        accumulate=1,
    )
    return (
        lambda: bench.make_model(work),
        lambda: next(bench.draw_batches(work, 0))[0],
        bench.loss_of,
    )


def _mlp() -> nn.Module:
    sizes = [512, 2048, 2048, 512]
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers))


MODELS: dict[str, Parts] = {
    "bert": _bench_parts("encoder", hidden=512, heads=8, batch=32),
    "resnet": _bench_parts(
        "conv", channels=32, layers=2, pixels=96, batch=16, format="channels-first"
    ),
    "gpt": _bench_parts("decoder", hidden=256, heads=8, batch=8, vocabulary=4096),
    "mlp": (
        _mlp,
        lambda: {"inputs": torch.randn(512, 512), "labels": torch.randint(512, (512,))},
        lambda model, batch: cross_entropy(model(batch["inputs"]), batch["labels"]),
    ),
}
_KEYS = {"resnet": "pixel_values", "mlp": "inputs"}


def make_model(work: Namespace) -> StepModel:
    """Build the model `work.model`."""
    make, _, loss_of = MODELS[work.model]
    return StepModel(make(), loss_of, _KEYS.get(work.model, "input_ids"))


def make_inputs(work: Namespace) -> tuple[Tensor, ...]:
    """Draw the batch of `work.model`."""
    torch.manual_seed(0)
    batch = MODELS[work.model][1]()
    return tuple(each.to(work.device) for each in batch.values())


def draw_batches(work: Namespace, _seed: int) -> Iterator[list[Any]]:
    """Yield the batch, the same for every step."""
    return itertools.repeat([make_inputs(work)])


def _call(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(*inputs)
    return loss


def planned(task: loops.Task, *, method: str, level: str) -> loops.Loop:
    """Return a loop over the rewritten model; at O2 a session updates its weights."""
    model, dtype = task.model, task.work.dtype
    inputs = make_inputs(task.work)
    chosen = make_plan(model, inputs, dtype=dtype, method=method, level=level)
    is_o2 = level == "O2"
    session = prepare(model, task.optimizer, level, dtype=dtype) if is_o2 else None
    run = rewrite(model, chosen)

    def passes(batches: Any) -> Tensor:  # noqa: ANN401
        if session:
            with session.autocast():
                pass  # the plan casts, so no context is open while it runs
        loss = _call(run, batches[0])
        (session or torch.autograd).backward(loss)
        return loss

    def update() -> None:
        (session or task.optimizer).step()
        run.zero_grad()

    loop = loops.Loop(run, task.optimizer, passes, update, partial(_call, run), session)
    loop.facts = {"predicted": chosen.ms}
    return loop


def tables(arguments: Namespace) -> list[Table]:
    """Train each model with every candidate, in turn."""
    floor = Floor.measure(arguments.device)
    rows: list[dict[str, Cell]] = []
    gflop = []
    for name in arguments.models:
        one = {"model": name, "steps": 1, "accumulate": 1}
        work = Namespace(**vars(arguments) | one)
        # Op times are cached for the processes, which plan by themselves.
        model = make_model(work).to(arguments.device).train()
        make_plan(model, make_inputs(work), dtype=arguments.dtype, refresh=True)
        del model
        got = measure_steps(work, name)
        gflop.append(f"{name} {got.flops / 1e9:.4g}")
        for each in arguments.candidates:
            cells = row(each, got, (BASELINE,), floor, arguments)
            passes = got.passes.median(each, 1e3)
            predicted = got.facts.get(each, {}).get("predicted")
            error = predicted / passes if predicted and passes else None
            more = {"ms of passes": passes, "predicted": predicted, "x measured": error}
            rows.append({"model": name, **cells, **more})
    notes = (
        f"{measure.in_turn(arguments.rounds)} to {BASELINE}",
        *floor.notes(", ".join(gflop)),
        "casts: copies to another dtype in a step, by torch's profiler",
        "ms of passes: forward and backward, no update; predicted: by the plan",
    )
    return [measure.table("Planned models", rows, notes)]


_PLANS = {
    f"{method}{'' if level == 'O1' else f' {level}'}": loops.Candidate(
        f"planned by {method} for the weights of {level}",
        planned,
        {"method": method, "level": level},
    )
    for level in ("O1", "O2")
    for method in METHODS
}
BENCHES = {
    "plan": Training(
        run=tables,
        title="Planned models",
        description="Train four models under torch.autocast, under the lean policy, "
        "and as planned by painting and by the minimum cut; print casts, times and "
        "predicted times.",
        flags={"models": commands.names(MODELS), "rounds": commands.rounds(9)},
        kinds={
            "fp32": loops.CANDIDATES["fp32"],
            BASELINE: loops.CANDIDATES["torch.amp"],
            "lean": loops.Candidate(
                "halfstep.autocast, lean policy", loops.plain, {"policy": "lean"}
            ),
            **loops.pick("O1", "O2"),
            **_PLANS,
        },
        make_model=make_model,
        draw_batches=draw_batches,
        make_optimizer=lambda parameters, _: torch.optim.AdamW(parameters, 1e-4),
        loss_of=_call,
        splits=True,
    )
}


# For `halfstep plan`


def count_autocast_casts(model: nn.Module, inputs: tuple[Any, ...], dtype: str) -> int:
    """Return the number of tensors that torch.autocast casts in a forward pass."""
    call = partial(_copied(model), *inputs)  # a forward pass may change buffers
    with torch.autocast(device_of(model, inputs).type, formats.parse(dtype).dtype):
        casts = count_casts(call)
    return casts - count_casts(call)


def measure_plan(
    model: nn.Module, inputs: tuple[Any, ...], chosen: Plan
) -> dict[str, float]:
    """Return milliseconds of the passes as planned, under torch.autocast, and in fp32.

    The gradients, buffers and dtypes of the model change.
    """
    fp32_model = _copied(model)
    low = formats.parse(chosen.dtype).dtype
    for name in chosen.low_weights:
        param = model.get_parameter(name)
        param.data = param.data.to(low)
    device = device_of(model, inputs).type

    def turn(run: nn.Module, *, autocasted: bool = False) -> float:
        def passes() -> None:
            with torch.autocast(device, low, enabled=autocasted):
                output = run(*inputs)
            outputs = [t for t in tensors_in(output) if t.is_floating_point()]
            loss = torch.stack([each.float().sum() for each in outputs]).sum()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

        seconds = measure.timed(passes, device)[1]
        run.zero_grad()
        return seconds

    turns = {
        "this plan": partial(turn, rewrite(model, chosen)),
        BASELINE: partial(turn, fp32_model, autocasted=True),
        "fp32": partial(turn, fp32_model),
    }
    for first in turns.values():
        first()  # warms up
    times = measure.take_turns(turns, rounds=9)
    return {name: times.median(name, 1e3) or 0.0 for name in turns}


def _copied(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        # Raised inside torch, for saved programs.
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        return copy.deepcopy(model)
