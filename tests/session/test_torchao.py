"""Optimizers of torchao, whose state is in 8 or 4 bits, step in a session."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchao import optim

import halfstep as hs
from halfstep.testing import assert_unchanged, overflow_in_backward

pytestmark = pytest.mark.numeric
CASES = [
    ("AdamW8bit", "O1", "fp32"),
    ("AdamW8bit", "O2", "fp32"),
    ("AdamW8bit", "O2", "split"),
    ("AdamW4bit", "O2", "stochastic"),
    ("AdamWFp8", "O2", "fp32"),
    ("AdamW8bit", "O3", "fp32"),
]
INPUTS = torch.randn(12, 32, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Run what torchao compiles as it is: not every machine has a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def start(name: str, level: str, master: str) -> hs.Session:
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 1)
    model = nn.Sequential(*layers)
    optimizer = getattr(optim, name)(model.parameters(), lr=3e-3)
    return hs.prepare(model, optimizer, level, dtype="bf16", master=master)


def step(session: hs.Session, number: int) -> float:
    x = INPUTS[number]
    with session.autocast():
        target = x.sin().sum(-1, keepdim=True) / 8
        loss = nn.functional.mse_loss(session.model(x), target)
    session.backward(loss)
    session.step()
    return loss.item()


@pytest.mark.parametrize(("name", "level", "master"), CASES)
def test_torchao(name: str, level: str, master: str) -> None:
    """Law: the loss falls, a skipped step changes nothing, resumed is uninterrupted."""
    session = start(name, level, master)
    losses = [step(session, number) for number in range(6)]
    assert losses[-1] < losses[0] / 2
    states = [
        value for state in session.optimizer.state.values() for value in state.values()
    ]
    kinds = {type(value).__name__ for value in states}
    assert kinds == {"Tensor", f"OptimState{name.removeprefix('AdamW').capitalize()}"}
    small = 8 if "8" in name else 4
    moments = session.memory()["moments"]
    assert moments < 0.4 * 8 * 64 * 128 * small / 8 + 4 * 8 * 400
    with assert_unchanged(session), overflow_in_backward(session.model):
        step(session, 6)
    assert session.steps_skipped == 1
    file = io.BytesIO()
    torch.save(session.state_dict(), file)
    file.seek(0)
    state: Any = torch.load(file, weights_only=True)
    resumed = start(name, level, master)
    resumed.load_state_dict(state)
    for number in range(6, 12):
        assert step(session, number) == step(resumed, number)


def test_loaded_state_is_a_copy() -> None:
    """Law: a session goes on without changing the state it was loaded from."""
    session = start("AdamW8bit", "O2", "fp32")
    step(session, 0)
    state = session.state_dict()
    moment = state["optimizer"]["state"][0]["exp_avg"]
    codes = moment.codes.clone()
    other = start("AdamW8bit", "O2", "fp32")
    other.load_state_dict(state)
    step(other, 1)
    assert torch.equal(moment.codes, codes)
    assert not torch.equal(
        other.optimizer.state_dict()["state"][0]["exp_avg"].codes, codes
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    """Law: quantized moments load into a new session, or are rejected in one line."""
    session, loaded = (start("AdamW8bit", "O2", "fp32") for _ in range(2))
    step(session, 0)
    dcp.save({"train": hs.fsdp.Stateful(session)}, checkpoint_id=tmp_path / "x")
    dcp.load({"train": hs.fsdp.Stateful(loaded)}, checkpoint_id=tmp_path / "x")
    for number in range(1, 4):
        assert step(session, number) == step(loaded, number)
    with pytest.raises(hs.UserError, match=r"0.weight/exp_avg is a OptimState8bit"):
        hs.fsdp.save(session, tmp_path / "y")
    assert not (tmp_path / "y").exists()
