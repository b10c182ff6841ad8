"""Names of apex that are torch's here, its alias, and multi_tensor_apply."""

import copy
import math
import pickle
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.compat import apex
from halfstep.compat.apex import amp, amp_C, fp16_utils, optimizers, parallel
from halfstep.compat.apex.amp import AmpError
from halfstep.compat.apex.multi_tensor_apply import multi_tensor_applier

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


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


scale = partial(multi_tensor_applier, amp_C.multi_tensor_scale)
axpby = partial(multi_tensor_applier, amp_C.multi_tensor_axpby)
l2norm = partial(multi_tensor_applier, amp_C.multi_tensor_l2norm)


def flag() -> Tensor:
    return torch.zeros(1, dtype=torch.int32)


def two(dtype: torch.dtype, *, spoilt: float = 0.5) -> list[Tensor]:
    return [torch.tensor([1.0, -2.0, spoilt], dtype=dtype), torch.ones(2, 2).to(dtype)]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_scale(source: torch.dtype, target: torch.dtype) -> None:
    """Law: outputs are inputs times the scale, in the outputs' dtype."""
    seen, outputs = flag(), [torch.zeros(3, dtype=target), torch.empty(2, 2).to(target)]
    scale(seen, [two(source), outputs], 1 / 4)
    assert torch.equal(outputs[0], torch.tensor([0.25, -0.5, 0.125], dtype=target))
    assert torch.equal(outputs[1], torch.full((2, 2), 0.25, dtype=target))
    assert seen.item() == 0


def test_scale_in_place_and_in_fp32() -> None:
    """Law: an input may be its output; 60000 * 2 / 4 does not pass through inf."""
    tensors = [torch.tensor([60000.0]).half()]
    scale(flag(), [tensors, tensors], 0.5)
    assert tensors[0].item() == 30000
    seen = flag()
    wide = [torch.zeros(1)]
    scale(seen, [[torch.tensor([60000.0]).half()], wide], 2.0)
    assert (wide[0].item(), seen.item()) == (120000, 0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_flag_of_scale(bad: float) -> None:
    """Law: an input that is not finite sets the flag and goes on; nothing clears it."""
    seen, outputs = flag(), two(torch.float32)
    for spoilt in (bad, 0.5):
        inputs = two(torch.float16, spoilt=spoilt)
        scale(seen, [inputs, outputs], 1.0)
        assert seen.item() == 1
        expected = torch.tensor(spoilt)
        assert torch.equal(outputs[0][2].isfinite(), expected.isfinite())


@pytest.mark.parametrize(
    ("check", "x_bad", "y_bad", "found"),
    [
        (-1, True, False, 1),
        (-1, False, True, 1),
        (-1, False, False, 0),
        (0, True, False, 1),
        (0, False, True, 0),
        (1, True, False, 0),
        (1, False, True, 1),
    ],
)
def test_axpby(check: int, x_bad: bool, y_bad: bool, found: int) -> None:
    """Law: a*x + b*y, and the flag looks at x (0), y (1) or both (-1)."""
    x = two(torch.float16, spoilt=math.inf if x_bad else 0.5)
    y = two(torch.float32, spoilt=math.nan if y_bad else 0.5)
    seen = flag()
    axpby(seen, [x, y, y], 2.0, -3.0, check)
    # 2 * 1 - 3 * 1, 2 * -2 - 3 * -2; and of ones.
    assert y[0][:2].tolist() == [-1.0, 2.0]
    assert torch.equal(y[1], torch.full((2, 2), -1.0))
    assert seen.item() == found


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype: torch.dtype) -> None:
    """Law: the root of all squares, in fp32, and of each tensor where asked."""
    tensors = [
        torch.tensor([3.0, 4.0], dtype=dtype),
        torch.full((4, 36), 1.0).to(dtype),
    ]
    norm, each = l2norm(flag(), [tensors], True)  # noqa: FBT003
    assert (norm.dtype, norm.tolist(), each.tolist()) == (
        torch.float32,
        [13.0],
        [5.0, 12.0],
    )
    _, none = l2norm(flag(), [tensors])
    assert none.shape == (0,)


def test_l2norm_beyond_fp16_and_fp32() -> None:
    """Law: squares beyond fp16 count; beyond fp32 the norm is inf and sets the flag."""
    seen = flag()
    large = [torch.full((4,), 30000.0).half()]
    norm, _ = l2norm(seen, [large])
    assert (norm.item(), seen.item()) == (60000, 0)
    huge = [torch.full((4,), 1e38)]
    norm, _ = l2norm(seen, [huge])
    assert (norm.item(), seen.item()) == (math.inf, 1)


def test_nothing_in_the_lists() -> None:
    """Law: empty lists write nothing, and have norm 0."""
    seen = flag()
    scale(seen, [[], []], 1.0)
    axpby(seen, [[], [], []], 1.0, 1.0, -1)
    norm, each = l2norm(seen, [[]], True)  # noqa: FBT003
    assert (norm.tolist(), each.tolist(), seen.item()) == ([0.0], [], 0)


def test_refusals() -> None:
    """Law: lists that do not match, and what is not there, are named."""
    one = [torch.ones(1)]
    with pytest.raises(
        AmpError, match=r"takes 2 lists of one length, not of.*\[1, 0\]"
    ):
        scale(flag(), [one, []], 1.0)
    with pytest.raises(AmpError, match="arg_to_check=2 must be 0"):
        axpby(flag(), [one, one, one], 1.0, 1.0, 2)
    with pytest.raises(AttributeError, match=r"amp_C\.multi_tensor_lamb is not here"):
        amp_C.multi_tensor_lamb  # noqa: B018
    assert not hasattr(amp_C, "multi_tensor_adam")
    multi_tensor_applier.check_avail()
    assert multi_tensor_applier.available
