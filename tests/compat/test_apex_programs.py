"""A whole program of apex, run with nothing changed but what `import apex` finds.

Under torchrun, `ranks` runs the cases of this file in each of two processes.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from apex_programs.process import LEVELS, fresh
from ranks import agreed, cases, start
from torch import nn

from halfstep.compat import apex
from halfstep.compat.apex import amp, parallel

IMAGENET = Path(__file__).parents[1] / "support" / "apex_programs" / "imagenet.py"


@pytest.fixture(autouse=True)
def _apex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("apex", "apex.amp", "apex.parallel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    apex.install()
    with fresh():
        yield
    for name in list(sys.modules):
        if name.partition(".")[0] == "apex":
            del sys.modules[name]


def imagenet(*words: str) -> Any:
    with fresh():
        return runpy.run_path(str(IMAGENET))["main"]([*words])


@pytest.mark.parametrize("level", LEVELS)
def test_imagenet(level: str, tmp_path: Path) -> None:
    """Law: apex's example learns at every level, and resumes to the bit."""
    words = ["--opt-level", level, "--save", str(tmp_path / "c")]
    whole = imagenet(*words)
    (loss, *_), (last, _, right) = whole
    assert last < loss
    assert right > 75  # per cent; a quarter is chance
    assert imagenet(*words, "--resume", str(tmp_path / "c.1")) == whole[1:]


def train(_: object, level: str) -> dict[str, Any]:
    """Train three steps, the second with an inf on the last rank."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net: Any = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    net.append(nn.Linear(4 * 16, 3))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scales = []
    with fresh():
        net, optimizer = amp.initialize(
            net, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic"
        )
        model = parallel.DistributedDataParallel(net)
        before = net[-1].weight.detach().clone()
        for step in range(3):
            x, y = torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))
            if step == 1 and rank:
                x[0, 0, 0, 0] = torch.inf
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    masters = [master.detach() for master in amp.master_params(optimizer)]
    params = [param.detach() for param in net.parameters()]
    pairs = zip(params, masters, strict=True)
    return {
        "masters": masters,
        "params": params,
        "model is master": all(torch.equal(p, m.to(p.dtype)) for p, m in pairs),
        "learnt": not torch.equal(net[-1].weight, before),
        "scales": scales,
    }


CASES = cases(train, *LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_two_processes(level: str) -> None:
    """Law: ranks that began apart hold equal masters; an inf on one skips on both."""
    ranks = start(2, ("tests.compat.test_apex_programs",))
    seen = agreed(ranks, f"train {level}", "masters", "params", "scales")
    assert seen["model is master"]
    assert seen["learnt"]
    assert seen["scales"] == [65536.0, 32768.0, 32768.0]
