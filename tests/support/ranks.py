"""Programs over several ranks, all of them in one start of processes."""

import contextlib
import functools
import importlib
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forks import run_ranks
from processes import group
from small_training import same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

FILES = (
    "tests.scaling.test_scaler_ranks",
    "tests.session.test_session_ranks",
    "tests.scaling.test_scaler_sharded",
)
"""Test files whose `CASES` are run, where no others are named."""
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce", "barrier")
PATIENCE = timedelta(seconds=8)
"""After which a collective of a case's own group counts as stuck."""
STEPS = 8
FOUR = pytest.param(4, marks=pytest.mark.slow)
"""Processes; they find what two do not, and take as long as a hundred other tests."""
INTERVAL = 3
"""Clean steps before the scale grows."""
FIRST = 2.0**10
"""A first scale far from overflow in fp16."""


@dataclass(frozen=True)
class Plant:
    rank: int
    param: int
    value: float

    def here(self) -> bool:
        return dist.get_rank() == self.rank


def plants(seed: int) -> dict[int, Plant]:
    """Return what is planted at which step: three of all, drawn from a seed."""
    draw = random.Random(seed)  # noqa: S311 -- no secret
    values = (float("inf"), -float("inf"), float("nan"))
    return {
        step: Plant(
            draw.randrange(dist.get_world_size()),
            draw.randrange(4),
            draw.choice(values),
        )
        for step in sorted(draw.sample(range(STEPS), 3))
    }


def scales(
    bad: Collection[int],
    first: float = FIRST,
    steps: int = STEPS,
    interval: int = INTERVAL,
) -> list[float]:
    """Return the scale before each step and after the last, by hand."""
    scale, clean, found = first, 0, [first]
    for step in range(steps):
        clean = 0 if step in bad else clean + 1
        if step in bad:
            scale /= 2
        elif clean == interval:
            scale, clean = scale * 2, 0
        found.append(scale)
    return found


def net() -> nn.Sequential:
    """Return the same small network on every rank: four parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step: int) -> Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def average(tensors: Iterable[Tensor | None], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        if tensor is not None:
            dist.all_reduce(tensor, group=group)
            tensor.div_(dist.get_world_size())


def watch(
    params: Iterable[Tensor], box: list[Plant], group: dist.ProcessGroup | None = None
) -> None:
    """Plant what is in a box, in each backward pass.

    Args:
        params: Of a network.
        box: Holds a plant, or none.
        group: First average each gradient over these ranks.
    """
    for index, param in enumerate(params):
        change = functools.partial(_changed, box, index, group)
        param.register_hook(change)  # type: ignore[no-untyped-call]


def _changed(
    box: list[Plant], index: int, group: dist.ProcessGroup | None, gradient: Tensor
) -> Tensor:
    changed = gradient.clone()
    if group is not None:
        average([changed], group)
    spoil(box, index, changed)
    return changed


def spoil(box: list[Plant], index: int, gradient: Tensor | None) -> None:
    for plant in box:
        if gradient is not None and plant.here() and plant.param == index:
            gradient.view(-1)[0] = plant.value


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    calls: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, spy(name)))
        yield calls


def held(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "state": [_copy(o.state_dict()["state"]) for o in optimizers],
    }


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return value


def cases(run: Callable[..., Any], *choices: Any) -> dict[str, Any]:
    """Return cases by name, one for each choice of arguments after the group."""
    return {f"{run.__name__} {c}": functools.partial(_with, run, c) for c in choices}


def _with(run: Callable[..., Any], choice: Any, group: dist.ProcessGroup) -> Any:
    return run(group, *(choice if isinstance(choice, tuple) else (choice,)))


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shared() -> Path:
    """Return the folder for files that outlive the processes."""
    return Path(sys.argv[2])


def process(folder: Path, *files: str) -> None:
    warnings.simplefilter("ignore")
    with group(timedelta(seconds=60)):
        found = {
            name: _attempt(name, case)
            for file in files
            for name, case in importlib.import_module(file).CASES.items()
        }
        torch.save(found, folder / f"{dist.get_rank()}.pt")


def _attempt(name: str, case: Callable[[dist.ProcessGroup], dict[str, Any]]) -> Any:
    # Ranks meet by the store, which bears that one of them has waited in vain; the
    # group that did so is of no further use, so each case has its own.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name} {dist.get_rank()}", "here")
    everybody = [f"{name} {rank}" for rank in range(dist.get_world_size())]
    store.wait(everybody, 4 * PATIENCE)
    group = dist.new_group(timeout=PATIENCE)
    try:
        return case(group)
    except Exception:  # noqa: BLE001 -- told by the test
        return traceback.format_exc()


@functools.cache
def start(
    processes: int, files: tuple[str, ...] = FILES, common: str = ""
) -> list[dict[str, Any]]:
    """Return what each of some processes saw, by the name of the case.

    Args:
        processes: How many.
        files: Test files whose `CASES` are run.
        common: What `shared` returns.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = (folder, common, *files)
        run_ranks(__file__, *words, processes=processes, timeout=240)
        found = [Path(folder) / f"{rank}.pt" for rank in range(processes)]
        # These processes have just written them; some tell of objects.
        return [torch.load(path, weights_only=False) for path in found]


def saw(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """Return what each rank saw in one case, which must have failed on none."""
    for rank, found in enumerate(ranks):
        assert isinstance(found[case], dict), f"rank {rank}: {found[case]}"
    return [found[case] for found in ranks]


def agreed(ranks: list[dict[str, Any]], case: str, *keys: str) -> dict[str, Any]:
    first, *others = saw(ranks, case)
    for key in keys or first:
        for rank, other in enumerate(others, 1):
            assert same(first[key], other[key]), f"{key} of rank {rank} differs"
    return first


if __name__ == "__main__":
    process(Path(sys.argv[1]), *sys.argv[3:])
