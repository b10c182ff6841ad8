"""Names of apex that are torch's here, and the alias for programs left as they are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from apex_programs.process import fresh
from torch import nn

from halfstep.compat import apex
from halfstep.compat.apex import amp, fp16_utils, optimizers, parallel

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


STEPS: dict[str, tuple[Any, Any]] = {
    "FusedAdam": (
        lambda p: optimizers.FusedAdam(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    ),
    "FusedAdam L2": (
        lambda p: optimizers.FusedAdam(p, 0.1, adam_w_mode=False, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    ),
    "FusedSGD": (
        lambda p: optimizers.FusedSGD(p, 0.1, 0.9, 0.0, 0.1, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.0, 0.1, nesterov=True),
    ),
    "FusedAdagrad": (
        lambda p: optimizers.FusedAdagrad(p, 0.1, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_fused_names(name: str) -> None:
    """Law: a fused name is torch's optimizer of the same arithmetic, under amp."""
    ours, torchs = (nn.Linear(2, 2) for _ in range(2))
    torchs.load_state_dict(ours.state_dict())
    one, other = STEPS[name][0](ours.parameters()), STEPS[name][1](torchs.parameters())
    amp.initialize(ours, one, opt_level="O0", verbosity=0)
    for _ in range(3):
        with amp.scale_loss(ours(torch.ones(1, 2)).pow(2).sum(), one) as scaled:
            scaled.backward()
        torchs(torch.ones(1, 2)).pow(2).sum().backward()
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, ours.parameters(), torchs.parameters()))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("FusedAdam", {"bias_correction": False}),
        ("FusedAdam", {"amsgrad": True}),
        ("FusedAdam", {"master_weights": True}),
        ("FusedSGD", {"wd_after_momentum": True}),
        ("FusedAdagrad", {"adagrad_w_mode": True}),
        ("FusedLAMB", {}),
        ("FusedNovoGrad", {}),
    ],
)
def test_fused_refusals(name: str, kwargs: dict[str, bool]) -> None:
    """Law: what torch cannot do is refused by name, not approximated."""
    with pytest.raises(amp.AmpError, match=name):
        getattr(optimizers, name)(nn.Linear(1, 1).parameters(), **kwargs)


def test_parallel_refusals() -> None:
    """Law: arguments of apex's wrapper that torch has no place for are refused."""
    with pytest.raises(amp.AmpError, match="gradient_average=False has no"):
        parallel.DistributedDataParallel(nn.Linear(1, 1), gradient_average=False)
    converted = parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))
    assert isinstance(converted[0], parallel.SyncBatchNorm)  # type: ignore[index]


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: after install() `import apex` finds us, in all the ways it is written."""
    for name in ("apex", *(f"apex.{part}" for part in vars(apex))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "apex", None)  # type: ignore[arg-type]
    for part in ("amp", "fp16_utils", "optimizers", "parallel"):
        monkeypatch.setitem(sys.modules, f"apex.{part}", None)  # type: ignore[arg-type]
    program = """
import apex
from apex import amp
from apex.amp import _amp_state
from apex.fp16_utils import *
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
"""
    with pytest.raises(ModuleNotFoundError):
        exec(program, {})  # noqa: S102 -- a program is what is tested
    apex.install()
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert names["amp"] is amp
    assert names["FP16_Optimizer"] is fp16_utils.FP16_Optimizer
    assert names["_amp_state"] is amp._amp_state
    assert names["DDP"] is parallel.DistributedDataParallel
