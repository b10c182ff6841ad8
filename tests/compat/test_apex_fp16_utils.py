"""apex's older tools: halved models, masters by hand, FP16_Optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_training import same
from torch import Tensor, nn
from torch.nn import functional

import halfstep as hs
from halfstep.compat.apex import amp, fp16_utils

HALF, FLOAT = torch.float16, torch.float32


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.norm = nn.BatchNorm2d(2)
        self.free = nn.BatchNorm2d(2, affine=False)
        self.register_buffer("table", torch.ones(2, 1, 1))
        self.register_buffer("places", torch.ones(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layers(x)) * self.table


@pytest.mark.parametrize("wrap", ["FP16Model", "network_to_half", "convert_network"])
def test_halved_models(wrap: str) -> None:
    """Law: all is fp16 but batch norms with weights and integers; outputs are fp16."""
    net = Deep()
    if wrap == "convert_network":
        model: Any = fp16_utils.convert_network(net, HALF)
        assert model is net
    else:
        model = getattr(fp16_utils, wrap)(net)
        assert model(torch.ones(2, 1, 3, 3)).dtype == HALF
        nested = getattr(fp16_utils, wrap)(nn.Sequential(model, nn.Conv2d(2, 1, 1)))
        assert nested(torch.ones(2, 1, 3, 3)).dtype == HALF
    assert net.layers[0].weight.dtype == net.table.dtype == HALF
    for norm in (net.layers[1], net.norm):
        assert norm.weight.dtype == norm.running_var.dtype == FLOAT
    assert net.places.dtype == torch.int64
    if wrap == "convert_network":  # halves a batch norm without weights, as in apex
        assert net.free.running_mean.dtype == HALF
        fp16_utils.BN_convert_float(net.half())
        assert net.free.running_mean.dtype == net.norm.weight.dtype == FLOAT


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat: bool) -> None:
    """Law: the three functions make a training loop that equals one with masters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).half()
    twin = copy.deepcopy(net)
    params, masters = fp16_utils.prep_param_lists(net, flat_master=flat)
    assert len(masters) == (1 if flat else 4)
    assert {m.dtype for m in masters} == {FLOAT}
    hand = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    ours = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    kept = hs.MasterWeights(ours)
    x = torch.randn(5, 3).half()
    for _ in range(3):
        for model in (net, twin):
            model.zero_grad()
            model(x).float().pow(2).mean().backward()
        fp16_utils.model_grads_to_master_grads(params, masters, flat_master=flat)
        hand.step()
        fp16_utils.master_params_to_model_params(params, masters, flat_master=flat)
        kept.step()
        ours.zero_grad()
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


def test_masters_by_hand_without_gradients() -> None:
    """Law: a parameter without gradient has a master without, or with zeros if flat."""
    net = nn.Linear(2, 1)
    net.weight.sum().backward()
    params, masters = fp16_utils.prep_param_lists(net)
    masters[1].grad = torch.ones(1)
    fp16_utils.model_grads_to_master_grads(params, masters)
    assert masters[1].grad is None
    params, (flat,) = fp16_utils.prep_param_lists(net, flat_master=True)
    fp16_utils.model_grads_to_master_grads(params, [flat], flat_master=True)
    assert torch.equal(flat.grad, torch.tensor([1.0, 1.0, 0.0]))
    mixed = nn.Sequential(net, nn.Linear(1, 1).half())
    with pytest.raises(amp.AmpError, match="needs parameters of one dtype"):
        fp16_utils.prep_param_lists(mixed, flat_master=True)


def test_small_tools() -> None:
    """Law: to_python_float, tofp16 and clip_grad_norm do what they are named for."""
    assert fp16_utils.to_python_float(torch.tensor(2.5)) == 2.5
    assert fp16_utils.to_python_float([2.5]) == 2.5
    assert fp16_utils.tofp16()(torch.ones(1)).dtype == HALF
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    assert fp16_utils.clip_grad_norm([weight], 1.0) == 2.0


def test_dynamic_scaler() -> None:
    """Law: the scale falls by its factor, not below 1, and grows after its window."""
    scaler = fp16_utils.DynamicLossScaler(init_scale=8.0, scale_window=3)
    seen = []
    for overflow in (True, False, False, False, True, True, True, True, False):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [4.0, 4.0, 4.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert fp16_utils.DynamicLossScaler().cur_scale == 2.0**32
    weight = nn.Parameter(torch.ones(1))
    assert not scaler.has_overflow([weight])
    weight.grad = torch.tensor([torch.nan])
    assert scaler.has_overflow([weight])


def test_static_scaler() -> None:
    """Law: a static scale multiplies losses and gradients, and stays."""
    scaler = fp16_utils.LossScaler(4)
    weight = nn.Parameter(torch.ones(1))
    scaler.backward(weight.sum(), retain_graph=False)
    assert weight.grad == torch.tensor([4.0])
    scaler.update_scale(overflow=True)
    assert scaler.loss_scale == 4.0
    (scaled,) = scaler.scale_gradient(None, (torch.ones(1),), None)
    assert scaled == torch.tensor([4.0])


# FP16_Optimizer


def wrapped(**kwargs: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4).half(), Widen(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, fp16_utils.FP16_Optimizer(optimizer, **kwargs)


class Widen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def loss_of(net: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(5, 3, generator=draw), torch.randn(5, 2, generator=draw)
    return functional.mse_loss(net(x.half()), y)


WAYS: list[dict[str, Any]] = [
    {},
    {"static_loss_scale": 128.0},
    {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 256.0}},
]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("way", range(3))
def test_fp16_optimizer_trains(way: int, together: bool) -> None:
    """Law: it trains as fp32 does, two passes a step, unscaled at once or late."""
    net, optimizer = wrapped(**WAYS[way], verbose=False)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for iteration in range(3):
        optimizer.zero_grad()
        inner.zero_grad()
        for seed in (2 * iteration, 2 * iteration + 1):
            optimizer.backward(loss_of(net, seed), update_master_grads=not together)
            loss_of(lambda x: plain(x.float()), seed).backward()
        if together:
            optimizer.update_master_grads()
        optimizer.step()
        inner.step()
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    # Three steps with gradients below 4 through some ten fp16 roundings.
    for master, param in zip(masters, plain.parameters(), strict=True):
        torch.testing.assert_close(master, param, rtol=0, atol=3 * 4 * 10 * 2.0**-12)
    (low,) = optimizer.fp32_from_fp16_groups
    assert torch.equal(low[0].half(), net[0].weight)


def test_fp16_optimizer_skips(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: an overflow leaves weights and masters, lowers the scale, and is told."""
    net, optimizer = wrapped(**WAYS[2])
    before = [p.clone() for p in net.parameters()]
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, 0) * torch.inf)
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert "Attempted loss scale: 256.0, reducing to 128.0" in capsys.readouterr().out
    assert all(map(torch.equal, net.parameters(), before))
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, 0))
    assert optimizer.clip_master_grads(2.0**-4) > 2.0**-4
    (found,) = optimizer.inspect_master_grad_data()
    norm = torch.stack([g.norm() for g in found]).norm()
    torch.testing.assert_close(norm, torch.tensor(2.0**-4), rtol=2.0**-10, atol=0)
    optimizer.step()
    assert not all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("way", range(3))
def test_fp16_optimizer_resumes(way: int) -> None:
    """Law: a restored run equals one that was not interrupted, to the bit."""
    runs = []
    for interrupted in (False, True):
        net, optimizer = wrapped(**WAYS[way], verbose=False)
        for iteration in range(4):
            if interrupted and iteration == 2:
                model = copy.deepcopy(net.state_dict())
                state = copy.deepcopy(optimizer.state_dict())
                net, optimizer = wrapped(**WAYS[way], verbose=False)
                net.load_state_dict(model)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            optimizer.backward(loss_of(net, iteration))
            optimizer.step()
        runs.append([net.state_dict(), optimizer.state_dict()])
    assert same(*runs)


def test_fp16_optimizer_with_a_closure() -> None:
    """Law: a closure runs with a static scale, and is refused with a dynamic one."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2).half()
    lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    optimizer = fp16_utils.FP16_Optimizer(lbfgs, static_loss_scale=128.0)

    def wide(x: Tensor) -> Tensor:
        return net(x).float()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(wide, 0)
        optimizer.backward(loss)
        return loss

    first = loss_of(wide, 0).item()
    for _ in range(3):
        optimizer.step(closure)
    assert loss_of(wide, 0).item() < first
    _, dynamic = wrapped(dynamic_loss_scale=True)
    with pytest.raises(amp.AmpError, match="set static_loss_scale"):
        dynamic.step(closure)


def test_fp16_optimizer_refuses_other_masters() -> None:
    """Law: a state of another model is refused before anything is changed."""
    _, optimizer = wrapped()
    other = fp16_utils.FP16_Optimizer(
        torch.optim.SGD(nn.Linear(2, 2).half().parameters(), lr=0.1)
    )
    with pytest.raises(amp.AmpError, match="masters, of other shapes than the 2"):
        optimizer.load_state_dict(other.state_dict())
