"""Names of apex that are torch's here, and the alias for programs left as they are."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.compat import apex
from halfstep.compat.apex import amp, fp16_utils, optimizers, parallel

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


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedAdagrad"])
def test_fused_classes(name: str) -> None:
    """Law: a fused name is a class: instances are of it and of torch's, heirs too."""
    kind = getattr(optimizers, name)
    base = {"FusedAdam": "AdamW"}.get(name, name.removeprefix("Fused"))
    heir = type("Heir", (kind,), {})([nn.Parameter(torch.ones(1))], lr=0.5)
    assert isinstance(heir, kind)
    assert isinstance(heir, getattr(torch.optim, base))
    assert heir.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("way", ["load", "pickle", "copy"])
def test_mode_of_decay_stays(way: str, decoupled: bool) -> None:
    """Law: a loaded, pickled or copied FusedAdam decays as before; groups added too."""

    def made(mode: bool) -> optimizers.FusedAdam:
        weight = nn.Parameter(torch.ones(1))
        return optimizers.FusedAdam([weight], adam_w_mode=mode, weight_decay=0.1)

    one = made(decoupled)
    if way == "load":
        # What apex or torch has saved may tell another mode, or none.
        one.load_state_dict(made(not decoupled).state_dict())
    elif way == "pickle":
        one = pickle.loads(pickle.dumps(one))  # noqa: S301
    else:
        one = copy.deepcopy(one)
    one.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    modes = [group["decoupled_weight_decay"] for group in one.param_groups]
    assert modes == [decoupled] * 2


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
    assert isinstance(converted[0], parallel.SyncBatchNorm)


def test_sync_batch_norm() -> None:
    """Law: apex's arguments reach torch's layer; one that applies ReLU is refused."""
    layer = parallel.SyncBatchNorm(3, 0.5, 0.25, False, channel_last=True)  # noqa: FBT003
    assert isinstance(layer, nn.SyncBatchNorm)
    assert (layer.num_features, layer.eps, layer.momentum) == (3, 0.5, 0.25)
    assert (layer.affine, layer.track_running_stats) == (False, True)
    x = torch.randn(4, 3)
    expected = nn.BatchNorm1d(3, 0.5, 0.25, affine=False).eval()(x)
    assert torch.equal(layer.eval()(x), expected)
    with pytest.raises(amp.AmpError, match="fuse_relu=True has no counterpart"):
        parallel.SyncBatchNorm(3, fuse_relu=True)


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: after install() `import apex` finds us, in all the ways it is written."""
    for name in ("apex", *(f"apex.{part}" for part in vars(apex))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.delitem(sys.modules, "amp_C", raising=False)
    for part in (*apex._MODULES, *apex._SUBMODULES):
        monkeypatch.setitem(sys.modules, f"apex.{part}", None)
    program = """
import apex
from apex import amp
from apex.amp import _amp_state
from apex.amp._amp_state import _amp_state as inner, maybe_print, master_params
from apex.amp.frontend import initialize
from apex.amp.handle import disable_casts, scale_loss
from apex.amp.scaler import LossScaler as AmpLossScaler
from apex.fp16_utils import *
from apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from apex.fp16_utils.fp16util import network_to_half
from apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler
import apex.amp.scaler, apex.fp16_utils.fp16util
attributes = apex.amp.scaler.LossScaler, apex.fp16_utils.fp16util.tofp16
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
from apex.multi_tensor_apply import multi_tensor_applier
from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply
from apex.parallel.LARC import LARC
import amp_C
"""
    with pytest.raises(ModuleNotFoundError):
        exec(program, {})  # noqa: S102 -- a program is what is tested
    apex.install()
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert names["amp"] is amp
    assert names["FP16_Optimizer"] is fp16_utils.FP16_Optimizer
    assert names["_amp_state"] is names["inner"] is amp._amp_state
    assert names["scale_loss"] is amp.scale_loss
    assert names["network_to_half"] is fp16_utils.network_to_half
    assert names["LossScaler"] is fp16_utils.LossScaler
    assert names["attributes"] == (names["AmpLossScaler"], fp16_utils.tofp16)
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    (scaler,) = amp._amp_state.loss_scalers
    assert isinstance(scaler, names["AmpLossScaler"])
    assert names["DDP"] is parallel.DistributedDataParallel
    assert names["LARC"] is parallel.LARC is names["apex"].parallel.LARC
    assert isinstance(names["multi_tensor_applier"], names["MultiTensorApply"])
    assert names["amp_C"] is apex.amp_C
