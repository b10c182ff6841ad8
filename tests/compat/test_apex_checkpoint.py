"""Checkpoints between all levels, masters that follow the model, apex's own files."""

import copy
import io
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from apex_programs.process import LEVELS
from small_training import same
from torch import Tensor, nn
from torch.nn import functional

from halfstep import UserError
from halfstep.compat.apex import amp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.factor = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(functional.relu(self.conv(x * self.factor)))


Pair = tuple[Net, Any]
DATA = torch.randn(6, 4, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def build(seed: int) -> Pair:
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def prepare(pair: Pair, level: str, num_losses: int) -> None:
    kwargs: dict[str, Any] = {"loss_scale": 128.0} if level in {"O0", "O3"} else {}
    amp.initialize(*pair, opt_level=level, num_losses=num_losses, verbosity=0, **kwargs)


def train(pair: Pair, batches: Tensor, num_losses: int) -> list[Tensor]:
    net, optimizer = pair
    outs = []
    for batch in batches:
        optimizer.zero_grad()
        out = net(batch)
        for number in range(num_losses):
            loss = (out.float() ** 2 - (number + 1) * out.float()).mean()
            with amp.scale_loss(loss, optimizer, loss_id=number) as scaled:
                scaled.backward(retain_graph=number + 1 < num_losses)
        optimizer.step()
        outs.append(out.detach())
    return outs


def saved(pair: Pair) -> dict[str, Any]:
    state = {"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}
    file = io.BytesIO()
    torch.save(state | {"amp": amp.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(pair: Pair, state: dict[str, Any]) -> None:
    pair[0].load_state_dict(state["model"])
    pair[1].load_state_dict(state["optimizer"])


@pytest.mark.parametrize(("first", "num_losses"), [("amp", 2), ("load", 1)])
@pytest.mark.parametrize("there", LEVELS)
@pytest.mark.parametrize("here", LEVELS)
def test_between_levels(here: str, there: str, first: str, num_losses: int) -> None:
    """Law: a checkpoint is fp32, fits every level, and goes on exactly at its own."""
    run = build(0)
    prepare(run, here, num_losses)
    train(run, DATA[:3], num_losses)
    state = saved(run)
    floating = [v for v in state["model"].values() if v.is_floating_point()]
    assert {value.dtype for value in floating} == {torch.float32}
    expected = train(run, DATA[3:], num_losses)
    at_the_end = saved(run)

    other = build(1)
    if first == "amp":
        prepare(other, there, num_losses)
        load(other, state)
    else:
        load(other, state)
        prepare(other, there, num_losses)
    amp.load_state_dict(state["amp"])
    found = other[0].state_dict()
    for name, value in state["model"].items():
        # O3 has no masters: what it cannot hold is rounded.
        right = value.half().float() if rounds(there, value) else value
        assert torch.equal(found[name], right), name
    outs = train(other, DATA[3:], num_losses)
    if here == there:
        assert same(saved(other), at_the_end)
        assert same(outs, expected)
    else:
        # Sums of 18 products below 10 standard deviations, of factors rounded to fp16.
        bound = 18 * 10 * 3 * 2.0**-11
        torch.testing.assert_close(
            outs[0].float(), expected[0].float(), rtol=0, atol=bound
        )
        assert all(out.isfinite().all() for out in outs)


def rounds(level: str, value: Tensor) -> bool:
    return level == "O3" and value.is_floating_point()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scales_fall_apart(level: str) -> None:
    """Law: three losses have three scales; the state counts overflows of each."""
    net, optimizer = build(0)
    amp.initialize(net, optimizer, opt_level=level, num_losses=3, verbosity=0)
    falls = [0, 1, 2]
    for iteration in range(2):
        optimizer.zero_grad()
        for number in range(3):
            with amp.scale_loss(
                net(DATA[0]).float().mean(), optimizer, loss_id=number
            ) as scaled:
                scaled.backward()
                if iteration < falls[number]:
                    net.factor.grad.fill_(torch.inf)
        optimizer.step()
    assert amp.state_dict() == {
        f"loss_scaler{n}": {"loss_scale": 2.0 ** (16 - n), "unskipped": 2 - n}
        for n in range(3)
    }


def test_apexs_own_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: apex's dictionaries load; other counts are told; other keys are refused.

    A level's static scale is not replaced by a file's dynamic one.
    """
    prepare(build(0), "O3", 1)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 3}})
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0
    pair = build(0)
    amp.initialize(*pair, opt_level="O2", num_losses=2, verbosity=1)
    capsys.readouterr()
    apexs = OrderedDict(
        loss_scaler0={"loss_scale": 1024.0, "unskipped": 7},
        loss_scaler1={"loss_scale": 2.0, "unskipped": 0},
        loss_scaler2={"loss_scale": 4.0, "unskipped": 1},
    )
    amp.load_state_dict(apexs)
    said = capsys.readouterr().out
    assert "contains 3 entries, while 2 loss_scalers are used" in said
    assert "Skipping loss_scaler[2], since num_losses was 2" in said
    del apexs["loss_scaler2"]
    into: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(into) is into
    assert into == {"mine": 1, **apexs}
    with pytest.raises(amp.AmpError, match="amp's state holds"):
        amp.load_state_dict({"loss_scaler0": apexs["loss_scaler0"], "scale": 1})
    good = {"loss_scale": 8.0, "unskipped": 0}
    for scale in (math.nan, -2.0):
        bad = {"loss_scale": scale, "unskipped": 0}
        with pytest.raises(UserError, match=f"^loss_scaler1's scale={scale} must be"):
            amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": bad})
        assert amp.state_dict() == apexs


# Masters


def step(pair: Pair) -> None:
    """Take one step that changes nothing: the rate is 0."""
    net, optimizer = pair
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train((net, optimizer), DATA[:1], 1)


EDITS = ["copy_", "data", "load", "part", "init"]


@pytest.mark.parametrize("edit", EDITS)
def test_masters_follow_edits_before_the_first_pass(edit: str) -> None:
    """Law: what is written into a model after initialize is what is trained."""
    pair = build(0)
    prepare(pair, "O2", 1)
    net = pair[0]
    if edit == "copy_":
        with torch.no_grad():
            net.factor.fill_(0.1)
    elif edit == "data":
        net.factor.data.fill_(0.1)
    elif edit == "load":
        net.load_state_dict({**net.state_dict(), "factor": torch.tensor([0.1])})
    elif edit == "part":
        net.load_state_dict({"factor": torch.tensor([0.1])}, strict=False)
    else:
        nn.init.constant_(net.factor, 0.1)
    step(pair)
    (master,) = (m for m in amp.master_params(pair[1]) if m.shape == (1,))
    exact = torch.tensor([0.1])
    # A load is exact; an edit of the 16-bit weight is what fp16 holds of it.
    right = exact if edit in {"load", "part"} else exact.half().float()
    assert torch.equal(master, right)
    assert torch.equal(net.factor, exact.half())


def test_masters_begin_with_the_fp32_weights() -> None:
    """Law: initialize loses no bit, of moments either; the model holds them rounded."""
    pair = build(0)
    pair[0](DATA[0]).pow(3).mean().backward()
    pair[1].step()
    exact = copy.deepcopy(pair[0].state_dict())
    moments = [s["momentum_buffer"].clone() for s in pair[1].state.values()]
    prepare(pair, "O2", 1)
    assert same(exact, pair[0].state_dict())
    found = [pair[1].state[p]["momentum_buffer"] for p in amp.master_params(pair[1])]
    assert same(found, moments)
    step(pair)
    assert torch.equal(exact["conv.weight"], pair[0].state_dict()["conv.weight"])
    assert torch.equal(pair[0].conv.weight, exact["conv.weight"].half())


def test_state_dicts_are_fp32_copies() -> None:
    """Law: a kept state_dict, of a part too, does not change as training goes on.

    apex's was a copy too, and programs keep `best = model.state_dict()`. A load of it
    reaches the masters, to the last bit.
    """
    pair = build(0)
    prepare(pair, "O2", 1)
    net = pair[0]
    assert net.conv.weight.dtype == torch.float16
    kept, part = net.state_dict(), net.conv.state_dict()["weight"]
    was = {name: t.clone() for name, t in kept.items()}
    assert part.dtype == torch.float32
    train(pair, DATA[:2], 1)
    assert torch.equal(kept["conv.weight"], was["conv.weight"])
    assert torch.equal(part, was["conv.weight"])
    assert not torch.equal(net.state_dict()["conv.weight"], part)
    net.load_state_dict(was)
    step(pair)
    after = net.state_dict()
    assert all(torch.equal(after[n], was[n]) for n in ("conv.weight", "factor"))
