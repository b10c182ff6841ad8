"""apex's LARC: the formula in float64, around any optimizer, under amp."""

import copy
import pickle
from typing import Any

import pytest
import torch
from apex_programs.process import LEVELS
from torch import Tensor, nn

from halfstep.compat.apex import amp, fp16_utils
from halfstep.compat.apex.parallel import LARC

TRUST, EPS, LR, DECAY = 0.02, 1e-8, 0.5, 0.1


def adapted(weight: Tensor, grad: Tensor, lr: float, *, clip: bool) -> Tensor:
    weight, grad = weight.double(), grad.double()
    size, slope = weight.square().sum().sqrt(), grad.square().sum().sqrt()
    if size == 0 or slope == 0:
        return grad
    trust = TRUST * size / (slope + DECAY * size + EPS)
    return (grad + DECAY * weight) * (min(trust / lr, 1.0) if clip else trust)


def weights() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.randn(5, 3, generator=draw)) for _ in range(4)]
    grads = [torch.randn(5, 3, generator=draw) for _ in range(3)]
    params[2].data.zero_()
    for param, grad, size in zip(params, grads, (1.0, 1e-6, 1.0), strict=False):
        param.grad = size * grad
    return params


# A norm of 15 numbers, a quotient and three products: some 20 roundings, each 2**-24.
NEAR = {"rtol": 20 * 2.0**-24, "atol": 1e-9}


@pytest.mark.parametrize("clip", [True, False])
def test_formula(clip: bool) -> None:
    """Law: weights move by lr * adapted gradient; no decay is added to it."""
    params = weights()
    expected = [
        p.double() - LR * adapted(p.detach(), p.grad, LR, clip=clip)
        for p in params
        if p.grad is not None
    ]
    inner = torch.optim.SGD(params, LR, weight_decay=DECAY)
    untouched = params[3].detach().clone()
    LARC(inner, TRUST, clip, EPS).step()
    for param, right in zip(params, expected, strict=False):
        torch.testing.assert_close(param.double(), right, **NEAR)
    assert torch.equal(params[3], untouched)
    assert inner.param_groups[0]["weight_decay"] == DECAY


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, LR, momentum=0.9, weight_decay=DECAY),
    "Adam": lambda p: torch.optim.Adam(p, LR, weight_decay=DECAY),
    "Adagrad": lambda p: torch.optim.Adagrad(p, LR, weight_decay=DECAY),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name: str) -> None:
    """Law: it is the same as the optimizer given adapted gradients, and no decay."""
    ours, twins = [weights()[0]], [nn.Parameter(weights()[0].detach().double())]
    larc, twin = LARC(OPTIMIZERS[name](ours), TRUST), OPTIMIZERS[name](twins)
    twin.param_groups[0]["weight_decay"] = 0
    draw = torch.Generator().manual_seed(5)
    for _ in range(4):
        grad = torch.randn(5, 3, generator=draw)
        ours[0].grad = grad.clone()
        twins[0].grad = adapted(twins[0].detach(), grad, LR, clip=True)
        larc.step()
        twin.step()
    # Four steps of Adam at most double an error each; 100 * 2**-24 is generous.
    torch.testing.assert_close(ours[0].double(), twins[0], rtol=1e-4, atol=1e-5)


def test_it_is_the_optimizer_it_wraps() -> None:
    """Law: groups, state, checkpoints, copies and pickles are the optimizer's."""
    params = weights()
    inner = OPTIMIZERS["momentum"](params[:2])
    larc = LARC(inner)
    larc.add_param_group({"params": [params[2]], "lr": 0.25})
    larc.step()
    assert larc.param_groups is inner.param_groups
    assert larc.state is inner.state
    assert larc.defaults is inner.defaults
    assert repr(larc) == repr(inner)
    for other in (copy.deepcopy(larc), pickle.loads(pickle.dumps(larc))):  # noqa: S301
        assert other.trust_coefficient == larc.trust_coefficient
        assert other.state_dict()["param_groups"] == inner.state_dict()["param_groups"]
    saved = copy.deepcopy(larc.state_dict())
    larc.param_groups[0]["lr"] = 7.0
    larc.load_state_dict(saved)
    assert inner.param_groups[0]["lr"] == LR
    larc.zero_grad()
    assert params[0].grad is None


def test_closure_is_called_once() -> None:
    """Law: gradients of a closure are adapted too; its loss is returned."""
    (param, twin), calls = weights()[:2], []
    twin.data = param.data.clone()

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        param.grad = None
        loss = param.square().sum()
        loss.backward()
        return loss

    expected = param.detach().square().sum()
    loss = LARC(torch.optim.SGD([param], LR)).step(closure)
    assert torch.equal(loss.detach(), expected)
    twin.grad = 2 * twin.detach()
    LARC(torch.optim.SGD([twin], LR)).step()
    assert torch.equal(param, twin)
    assert calls == [True]


def test_failed_step_keeps_the_decay() -> None:
    """Law: whatever the optimizer raises, its weight decay is its own again."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise OSError(closure)

    inner = Broken(weights(), LR, weight_decay=DECAY)
    with pytest.raises(OSError, match="None"):
        LARC(inner).step()
    assert inner.param_groups[0]["weight_decay"] == DECAY


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_under_amp(level: str) -> None:
    """Law: amp unscales before LARC looks, gives it masters, and leaves steps out."""
    model = net()
    larc: Any = LARC(torch.optim.SGD(model.parameters(), LR, momentum=0.9))
    model, larc = amp.initialize(
        model, larc, opt_level=level, loss_scale="dynamic", verbosity=0
    )
    data = torch.randn(16, 4)
    losses = []
    for step in range(6):
        larc.zero_grad()
        loss = model(data).float().square().mean()
        with amp.scale_loss(loss, larc) as scaled:
            (scaled * (torch.inf if step == 2 else 1)).backward()
        before = [p.detach().clone() for p in amp.master_params(larc)]
        larc.step()
        after = list(amp.master_params(larc))
        assert all(map(torch.equal, before, after)) == (step == 2)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    dtypes = {param.dtype for param in amp.master_params(larc)}
    assert dtypes == {torch.float16 if level == "O3" else torch.float32}


def test_in_an_fp16_optimizer() -> None:
    """Law: FP16_Optimizer takes it, as apex's did; masters are what it adapts."""
    model = net().half()
    inner = torch.optim.SGD(model.parameters(), LR)
    optimizer = fp16_utils.FP16_Optimizer(LARC(inner), static_loss_scale=128.0)
    data = torch.randn(16, 4).half()
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(data).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.dtype is torch.float32 for p in inner.param_groups[0]["params"])
