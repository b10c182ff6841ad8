"""Plans for weights stored in 16 bits, which need no cast: level O2."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.graph import Plan, load_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Encoder(nn.Module):
    """An embedding that is the output layer as well, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.hidden(self.embed(tokens)).relu())
        scores: Tensor = self.out(hidden)
        return scores


def encoder() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Encoder(), (torch.randint(0, 11, (3, 5)),)


def planned(model: nn.Module, batch: tuple[Tensor], policy: str = "lean") -> Plan:
    return hs.plan(model, batch, method="painting", level="O2", policy=policy)


def session_of(model: nn.Module) -> hs.Session:
    return hs.prepare(model, torch.optim.AdamW(model.parameters()), "O2", dtype="bf16")


def train(session: hs.Session, run: nn.Module, batch: tuple[Tensor]) -> list[float]:
    losses = []
    for _ in range(3):
        with session.autocast():
            loss = run(*batch).square().mean()
        session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


def test_planned_steps_are_those_of_the_level() -> None:
    """Law: with O2's decisions, the losses and weights of O2, to the bit."""
    model, batch = encoder()
    eager = copy.deepcopy(model)
    plan = planned(model, batch)
    assert len(plan.low) == len(plan.nodes)
    session = session_of(model)
    expected = train(session_of(eager), eager, batch)
    assert train(session, hs.rewrite(model, plan), batch) == expected
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    assert all(own.equal(other) for own, other in pairs)


def test_low_weights_need_no_cast() -> None:
    """Law: casts are of inputs and results; norms keep fp32, and what rules say."""
    model, batch = encoder()
    plan = planned(model, batch)
    assert set(plan.low_weights) == {
        "embed.weight",
        "hidden.weight",
        "hidden.bias",
        "out.weight",
    }
    assert {(cast.tensor, cast.to) for cast in plan.casts} == {("linear_1", "fp32")}
    ruled = planned(model, batch, policy="lean + module:hidden=fp32")
    assert set(ruled.low_weights) == {"embed.weight", "out.weight"}


def test_an_fp32_operation_takes_a_low_weight() -> None:
    """Law: where an operation stays fp32, its weight is cast up."""
    model, batch = encoder()
    fp32 = hs.plan(model, batch, level="O2", kinds={"embedding": "deny"})
    assert ("embed_weight", "fp32") in {(c.tensor, c.to) for c in fp32.casts} | {
        (c.tensor.replace("out", "embed"), c.to) for c in fp32.casts
    }
    session_of(model)
    assert hs.rewrite(model, fp32)(*batch).dtype == torch.float32


def test_a_file_keeps_them(tmp_path: Path) -> None:
    """Law: a plan for low weights is one from its file, too; unknown ones are not."""
    model, batch = encoder()
    plan, path = planned(model, batch), tmp_path / "plan.toml"
    plan.save(path)
    again = load_plan(path, model, batch)
    assert (again.low_weights, len(again.casts)) == (plan.low_weights, len(plan.casts))
    for spoilt in ('["hidden.weigth"]', "1"):
        text = path.read_text().splitlines()
        text[3] = f"low_weights = {spoilt}"
        path.write_text("\n".join(text))
        with pytest.raises(hs.UserError, match=r"has .*, which is no parameter"):
            load_plan(path, model, batch)


def test_the_order_of_calls() -> None:
    """Law: plan, prepare, rewrite; any other order ends in one line."""
    model, batch = encoder()
    low, fp32 = planned(model, batch), hs.plan(model, batch, method="painting")
    refused: dict[str, Callable[[], object]] = {
        "level='O3' must be O1 or O2": lambda: hs.plan(model, batch, level="O3"),
        r"'embed.weight' is fp32: call halfstep.prepare\(model, optimizer, 'O2', "
        r"dtype='bf16'\) first": lambda: hs.rewrite(model, low),
    }
    for message, call in refused.items():
        with pytest.raises(hs.UserError, match=message):
            call()
    session_of(model)
    refused = {
        "for fp32 weights, and 'embed.weight' is bf16": lambda: hs.rewrite(model, fp32),
        "is bf16: plan the model while": lambda: planned(model, batch),
    }
    for message, call in refused.items():
        with pytest.raises(hs.UserError, match=message):
            call()
