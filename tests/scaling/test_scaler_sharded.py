"""Scalers over weights of which each rank holds a part: FSDP2, tensor parallel, both.

Under torchrun, `ranks` runs the cases of this file in each of several processes. All
numbers are small multiples of powers of two, and no gradient depends on a weight: every
sum is exact in whatever order ranks form it, and whole weights are the oracle.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import (
    FIRST,
    FOUR,
    INTERVAL,
    STEPS,
    Plant,
    agreed,
    counted,
    plants,
    scales,
    start,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import halfstep as hs
from halfstep.scaling import ScaleRule

Group = dist.ProcessGroup

SGD = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD,
    "adamw": ADAM,
    "fused adamw": functools.partial(ADAM, fused=True),
}
MESHES = {
    "fsdp": ("data",),
    "tp": ("tensor",),
    "hsdp": ("replicas", "data"),
    "fsdp x tp": ("data", "tensor"),
}
"""Directions of the mesh; two of them need 4 ranks."""
ROWS = 4
RUNS = [
    (kind, name, clip)
    for kind, name, clip in itertools.product(MESHES, OPTIMIZERS, (None, 0.5))
    # torch neither clips nor fuses where plain weights, or two meshes, are mixed in.
    if "tensor" not in MESHES[kind] or (clip is None and "fused" not in name)
]
RULE = ScaleRule(init_scale=8.0, growth_interval=INTERVAL)
"""Small enough that sums in fp16 stay exact."""
SESSIONS = list(itertools.product(MESHES, ("O0 fp32", "O1 fp16")))


class Sides(nn.Module):
    """Layers side by side, so that no gradient depends on another's weight.

    The bias of `plain` has 3 numbers: of 4 ranks one gets none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(8, 8)
        self.plain = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        left = (self.left(inputs) * _weights(8)).sum()
        right = (self.right(inputs.repeat(1, 2)[:, :8]) * _weights(8)).sum()
        plain = (self.plain(inputs) * _weights(3)).sum()
        return left + right + plain


def _weights(size: int) -> Tensor:
    return torch.arange(1.0, size + 1) - 3


def sides() -> Sides:
    torch.manual_seed(0)
    return Sides()


def batch(step: int, share: int) -> Tensor:
    """Return small integers; ranks of the same share see the same."""
    generator = torch.Generator().manual_seed(100 * step + share)
    return torch.randint(-4, 5, (ROWS, 6), generator=generator).float()


def sharded(kind: str) -> tuple[nn.Module, int, int]:
    size, names = dist.get_world_size(), MESHES[kind]
    shape = (size,) if len(names) == 1 else (2, size // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model: nn.Module = sides()
    if "tensor" in names:
        # The result of each is whole on every rank, and so is what comes back.
        plan = {
            "left": ColwiseParallel(output_layouts=Replicate()),
            "right": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], plan)
    if kind == "fsdp x tp":
        fully_shard(model, mesh=mesh["data"])
        return model, mesh.get_local_rank("data"), 2
    if kind == "tp":
        return model, 0, 1
    fully_shard(model, mesh=mesh)
    return model, dist.get_rank(), size


def whole(tensor: Any) -> Any:
    """Return the tensor of which this rank holds a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.state_dict()["state"].items()
    return {
        "weights": [whole(param.detach()) for param in model.parameters()],
        "state": {
            at: {
                key: whole(v) if torch.is_tensor(v) else v for key, v in values.items()
            }
            for at, values in state
        },
    }


@contextlib.contextmanager
def planted(
    model: nn.Module, loss: Tensor, plant: Plant | None, kind: str
) -> Iterator[Tensor]:
    """Give a loss for a backward pass; spoil the last part of a gradient after it.

    Replicas hold the same parts: of these only a rank's own loss can differ.
    """
    here = plant is not None and plant.here()
    yield loss * plant.value if here and kind == "hsdp" else loss
    if here and kind != "hsdp":
        part: Any = list(model.parameters())[plant.param].grad
        part.to_local().view(-1)[-1] = plant.value


def train(group: Group, kind: str, name: str, clip: float | None) -> dict[str, Any]:
    """Train parts by a scaler; one part of a gradient is spoilt on one rank."""
    del group
    plan, (model, share, shares) = plants(29), sharded(kind)
    scaler = hs.GradScaler("cpu", init_scale=FIRST, growth_interval=INTERVAL)
    optimizer = OPTIMIZERS[name](model.parameters())
    calls, skipped = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, share)) / ROWS
        with planted(model, loss, plan.get(step), kind) as spoilt:
            scaler.scale(spoilt).backward()
        if clip is not None:
            with counted() as first:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        with counted() as then:
            scaler.step(optimizer)
            scaler.update()
        calls.append(len(then) + (len(first) if clip is not None else 0))
        skipped.append(scaler.last_step.skipped)
    return held(model, optimizer) | {
        "skipped": skipped,
        "bad": list(plan),
        "calls": calls,
        "scale": scaler.get_scale(),
        "scaler": scaler.state_dict(),
        "plain": without(plan, name, clip, shares),
    }


def without(
    plan: dict[int, Plant], name: str, clip: float | None, shares: int
) -> dict[str, Any]:
    """Train whole weights in one process on all shares; leave out what is spoilt."""
    model = sides()
    optimizer = OPTIMIZERS[name](model.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for share in range(shares):
            (model(batch(step, share)) / ROWS / shares).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        norms.append(torch.cat(grads).norm().item())
        if step not in plan:
            optimizer.step()
    return held(model, optimizer) | {"norms": norms}


def session(group: Group, kind: str, level: str) -> dict[str, Any]:
    """Train parts by a session, which takes norms, and clips."""
    del group
    plan, (model, share, shares) = plants(31), sharded(kind)
    optimizer = ADAM(model.parameters())
    name, dtype = level.split()
    trained = hs.prepare(
        model, optimizer, name, dtype=dtype, loss_scale=RULE, clip_grad_norm=0.5
    )
    norms, skipped, calls = [], [], []
    for step in range(STEPS):
        with trained.autocast():
            loss = trained.model(batch(step, share)) / ROWS
        with planted(model, loss, plan.get(step), kind) as spoilt:
            trained.backward(spoilt)
        with counted() as count:
            report = trained.step()
        calls.append(len(count))
        norms.append(None if step in plan else report.grad_norm)
        skipped.append(report.skipped)
    return held(model, optimizer) | {
        "norms": norms,
        "skipped": skipped,
        "calls": calls,
        "bad": list(plan),
        "scale": trained.scaler.state.scale.item(),
        # No gradient depends on a weight: these norms are those before clipping.
        "plain norms": without(plan, "adamw", None, shares)["norms"],
        "plain": without(plan, "adamw", 0.5, shares),
    }


def _with(run: Callable[..., Any], choice: Any, group: Group) -> Any:
    # A mesh in two directions needs 4 ranks.
    if len(MESHES[choice[0]]) > 1 and dist.get_world_size() < 4:
        return {}
    return run(group, *choice)


CASES: dict[str, Callable[[Group], dict[str, Any]]] = {
    **{f"sharded {run}": functools.partial(_with, train, run) for run in RUNS},
    **{f"parts {run}": functools.partial(_with, session, run) for run in SESSIONS},
}


@pytest.fixture(scope="module", params=[2, FOUR])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param)


def shown(ranks: list[dict[str, Any]], case: str, kind: str) -> dict[str, Any]:
    """Return what all ranks saw; skip where there are not enough of them."""
    if len(MESHES[kind]) > 1 and len(ranks) < 4:
        pytest.skip("a mesh in two directions needs 4 ranks")
    return agreed(ranks, case)


def directions(kind: str) -> int:
    return len({"data", "tensor"} & {*MESHES[kind]})


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_parts(ranks: list[dict[str, Any]], run: tuple[str, str, float | None]) -> None:
    """Law: inf in one rank's part skips on all, as if the step never was."""
    kind, name, clip = run
    seen = shown(ranks, f"sharded {run}", kind)
    exact = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
    # Norms are rounded; fused kernels round the ends of a tensor, or a part, otherwise.
    rounds = clip is not None or "fused" in name
    check = torch.testing.assert_close if rounds else exact
    check(seen["weights"], seen["plain"]["weights"])
    check(seen["state"], seen["plain"]["state"])
    assert [step for step, bad in enumerate(seen["skipped"]) if bad] == seen["bad"]
    assert seen["scale"] == scales(seen["bad"])[-1]
    assert seen["calls"] == [directions(kind)] * STEPS


@pytest.mark.parametrize("run", SESSIONS, ids=str)
def test_sessions(ranks: list[dict[str, Any]], run: tuple[str, str]) -> None:
    """Law: a session skips, clips and reports as with whole weights."""
    seen = shown(ranks, f"parts {run}", run[0])
    for step, plain in enumerate(seen["plain norms"]):
        if step not in seen["bad"]:
            assert seen["norms"][step] == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(seen["weights"], seen["plain"]["weights"])
    assert [step for step, bad in enumerate(seen["skipped"]) if bad] == seen["bad"]
    assert seen["scale"] == scales(seen["bad"], RULE.init_scale)[-1]
    assert seen["calls"] == [directions(run[0])] * STEPS
