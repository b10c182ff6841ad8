"""A session's regions under DDP: torch.amp's bits on each of two processes."""

import functools
import itertools
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_ranks
from torch import Tensor, nn

from halfstep.distributed import process_group

LOOPS = runpy.run_path(str(Path(__file__).with_name("test_autocast_regions.py")))
"""A session, torch's loop, and programs for both."""
Ours, Torchs = LOOPS["Ours"], LOOPS["Torchs"]
exact, train = LOOPS["exact"], LOOPS["train"]
NAMES = ("plain", "fp16 clipped", "skipped", "recomputed", "evaluation")
if LOOPS["forgets_gradients"]():
    NAMES = NAMES[:-1]


def process(folder: Path) -> None:
    found = {}
    with process_group.join("cpu") as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, accumulate in itertools.product(range(len(NAMES)), (1, 4)):
            name, views = NAMES[number], (number + accumulate) % 2 > 0
            program = LOOPS["PROGRAMS"][name]
            found[name, accumulate, views] = [
                under_ddp(kind, program, accumulate, views, world.rank)
                for kind in (Ours, Torchs)
            ]
        torch.save(found, folder / f"{world.rank}.pt")


def under_ddp(
    kind: Any, program: Any, accumulate: int, views: bool, rank: int
) -> list[Tensor]:
    loop = kind(program, accumulate)
    loop.wrap(
        functools.partial(
            nn.parallel.DistributedDataParallel, gradient_as_bucket_view=views
        )
    )

    def micro(loop: Any, seed: int) -> Any:
        return program.micro(loop, seed + 1000 * rank)

    return train(loop, program._replace(micro=micro), accumulate)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def test_torchs_bits_under_ddp(ranks: list[dict[Any, Any]]) -> None:
    """Law: on each rank losses and weights are torch.amp's, and ranks agree."""
    for rank in ranks:
        for ours, torchs in rank.values():
            exact(ours, torchs)
    for run, (ours, _) in ranks[0].items():
        exact(ours[1:], ranks[1][run][0][1:])
        assert not torch.equal(ours[0], ranks[1][run][0][0])


if __name__ == "__main__":
    process(Path(sys.argv[1]))
