"""Planted faults: module, operation and cause are told; healthy runs raise no alarm."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from planted_faults import FAULTS, HEALTHY, Run, alarmed, searched, spoilt
from planted_models import build
from processes import group_of_one
from small_training import one_thread
from torch.nn import functional

from halfstep.diagnostics.replay import find_nonfinite
from halfstep.nonfinite.origin import BadOp
from halfstep.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

PLACES, REASONS = 0.95, 0.90
"""Least shares of faults whose module and operation, and whose cause, are right."""
STRUCK = [name for name, fault in FAULTS.items() if fault.cause == "hardware"]


MOST_ROWS = 8
"""After which rows count as no cure."""


def planted(name: str, rule: str = "") -> Run:
    """Return a run with a fault in it, under a row; it is not said to have failed."""
    fault = FAULTS[name]
    run = Run(**fault.run, rule=rule)
    fault.plant(run)
    run.more["failed"] = False
    return run


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> Iterator[None]:
    """Be a process group of one, for DDP; a second thread would only wait."""
    with one_thread(), group_of_one():
        yield


@pytest.fixture(scope="module")
def found() -> dict[str, BadOp | None]:
    """Return what is said of each fault."""
    return {name: searched(name) for name in FAULTS}


def test_there_are_enough() -> None:
    """Law: all kinds of model, run and cause are among the faults."""
    runs = [fault.run for fault in FAULTS.values()]
    assert len(FAULTS) >= 60
    assert {run["name"] for run in runs} == {"mlp", "cnn", "bert", "gpt", "t5", "lstm"}
    modes = {run.get("mode", "eager") for run in runs}
    assert modes == {"eager", "plain", "reentrant", "ddp"}
    causes = {fault.cause for fault in FAULTS.values()}
    assert len(causes) == 9
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in STRUCK])
def test_each_fault_is_one(name: str) -> None:
    """Law: what is planted spoils loss or gradients, as torch alone sees them."""
    loss, gradient = spoilt(name)
    assert loss or gradient
    assert not (loss and FAULTS[name].phase == "backward")


def test_places(found: dict[str, BadOp | None]) -> None:
    """Law: module and operation are right for 95 % of the faults."""
    verdicts = {name: FAULTS[name].judge(bad) for name, bad in found.items()}
    wrong = {
        n: str(found[n])
        for n, (module, op, _) in verdicts.items()
        if not (module and op)
    }
    assert len(wrong) <= (1 - PLACES) * len(FAULTS), wrong


def test_causes(found: dict[str, BadOp | None]) -> None:
    """Law: the cause is right for 90 % of the faults."""
    wrong = {n: str(bad) for n, bad in found.items() if not FAULTS[n].judge(bad)[2]}
    assert len(wrong) <= (1 - REASONS) * len(FAULTS), wrong


def test_healthy_runs_raise_no_alarm() -> None:
    """Law: infinities that are meant, or that reach nothing, are no faults."""
    alarms = {name: alarmed(name) for name in HEALTHY}
    assert not {name: str(bad) for name, bad in alarms.items() if bad is not None}


def test_a_wrong_answer_is_noticed(found: dict[str, BadOp | None]) -> None:
    """Law: the judge can say no: of another fault's answer, and of none."""
    fault = FAULTS["mlp overflow eager"]
    assert fault.judge(found["mlp overflow eager"]) == (True, True, True)
    assert fault.judge(found["mlp root eager"]) == (True, False, False)
    assert fault.judge(found["cnn div eager"]) == (False, False, False)
    assert fault.judge(None) == (False, False, False)


def test_every_sentence_is_whole(found: dict[str, BadOp | None]) -> None:
    """Law: an answer names its place, gives evidence and says what to do."""
    for name, bad in found.items():
        assert bad is not None, name
        text = str(bad)
        assert text.startswith(bad.module), text
        assert bad.evidence in text
        assert text.endswith("."), text
        assert bad.reproduced == (FAULTS[name].cause != "hardware")
        assert not bad.rule or f"rule '{bad.rule}'" in bad.advice
        assert BadOp.from_data(bad.data()) == bad


RANGE = [
    name
    for name, fault in FAULTS.items()
    if fault.cause == "forward range" and fault.curable
]


@pytest.mark.parametrize("name", RANGE)
def test_the_advised_rows_cure_it(name: str, found: dict[str, BadOp | None]) -> None:
    """Law: a row that is advised ends the overflow there; some rows end them all.

    What may be left is an overflow of gradients, which a smaller loss scale cures.
    Numbers that stay large overflow again where the next module casts them: then that
    one is named.
    """
    fault, bad = FAULTS[name], found[name]
    rules: list[str] = []
    while bad is not None and bad.rule and len(rules) < MOST_ROWS:
        assert bad.rule not in rules, str(bad)
        rules.append(bad.rule)
        bad = planted(name, " + ".join(rules)).found()
    assert bad is None or bad.normal or not fault.curable, (rules, str(bad))
    assert len(rules) == 1 or not fault.at_once, rules


@pytest.mark.parametrize("name", RANGE)
def test_bfloat16_cures_it(name: str, found: dict[str, BadOp | None]) -> None:
    """Law: where bfloat16 is advised, the same step is finite in it."""
    bad = found[name]
    assert bad is not None
    assert ("train in bfloat16" in bad.advice) == (bad.wide == "finite")
    if bad.wide == "finite":
        run = planted(name)
        run.dtype = torch.bfloat16
        assert run.found() is None


def test_what_is_advised_ends_it(found: dict[str, BadOp | None]) -> None:
    """Law: where bfloat16, or a smaller scale, is advised, the same step is finite."""
    seen = set()
    for name, bad in found.items():
        assert bad is not None
        # What the model's own code casts to float16 stays there.
        bfloat16 = "train in bfloat16" in bad.advice and FAULTS[name].curable
        seen |= {bad.cause} if bfloat16 or bad.normal else set()
        if bfloat16:
            run = planted(name)
            run.dtype = torch.bfloat16
            assert run.found() is None, name
        if bad.normal:
            run = planted(name)
            run.scale = 1.0
            assert run.found() is None, name
    assert seen == {"forward range", "backward range", "data", "loss function"}


BACK = [name for name, fault in FAULTS.items() if fault.cause == "backward range"]


@pytest.mark.parametrize("name", BACK)
def test_rows_for_gradients(name: str, found: dict[str, BadOp | None]) -> None:
    """Law: a row is advised where no scale helps; it ends the overflow there.

    Gradients that stay large overflow again in whatever is before: then that one is
    named, until there is none, or nothing that a row can speak of.
    """
    bad = found[name]
    assert bad is not None
    assert bad.normal != bool(bad.rule)
    rules: list[str] = []
    while bad is not None and bad.rule:
        assert bad.rule not in rules, str(bad)
        rules.append(bad.rule)
        assert len(rules) <= MOST_ROWS
        bad = planted(name, " + ".join(rules)).found()
    assert bad is None or bad.normal or "train in bfloat16" in bad.advice


def test_evidence_has_figures(found: dict[str, BadOp | None]) -> None:
    """Law: each cause is told with a number, or with the value that was met."""
    for name, bad in found.items():
        assert bad is not None
        counted = re.search(r"\d| two | inf", bad.evidence)
        assert counted, (name, bad.evidence)
        assert not bad.rule or Policy.parse(f"torch + {bad.rule}")


ENDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # In float32; then its gradient is told to need a mean, or a divisor.
    "mlp loss squares": lambda y, _: (y.float() * 9e3).square().mean() / 1e6,
    "mlp loss sum": lambda y, _: y.float().mean(),
    "cnn loss exp": lambda y, _: (y.float() * 0 + 200).clamp(max=20).exp().mean(),
    "bert loss inf": lambda y, _: y.sum() * 3.0,
    "mlp loss log": lambda y, t: functional.cross_entropy(y.float(), t),
    "lstm loss root": lambda y, _: (
        ((y - y.detach()).float().square() + 1e-6).mean().sqrt()
    ),
}
"""Losses as the advice has them."""


@pytest.mark.parametrize("name", ENDED)
def test_losses_that_are_mended_as_advised(name: str) -> None:
    """Law: with the loss that is advised nothing is left but, perhaps, a scale."""
    run = planted(name)
    run.loss_of = ENDED[name]
    bad = run.found()
    assert bad is None or bad.normal, str(bad)


def test_random_numbers_gradients_and_buffers_are_put_back() -> None:
    """Law: a replay leaves no trace: it can be told from nothing that it was made."""
    for name, mode in (("cnn", "eager"), ("bert", "reentrant"), ("t5", "plain")):
        run = Run(name, mode)
        for parameter in run.model.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        before = {k: v.clone() for k, v in run.model.state_dict().items()}
        versions = [p._version for p in run.model.parameters()]
        grads = [p.grad for p in run.model.parameters()]
        state = torch.get_rng_state()
        assert run.found() is not None  # "failed", and it was not
        assert torch.equal(torch.get_rng_state(), state)
        after = run.model.state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before), name
        assert versions == [p._version for p in run.model.parameters()]
        for parameter, grad in zip(run.model.parameters(), grads, strict=True):
            assert parameter.grad is grad
            assert bool((grad == 3).all())
        assert not run.model._forward_pre_hooks


def test_the_same_numbers_are_drawn() -> None:
    """Law: a fault that comes by chance is found from that random state alone."""
    model = build("mlp").train()
    x = torch.ones(1, 16)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            drawn = torch.rand(())
            return (model(x).float() * torch.where(drawn > 0.5, 1.0, torch.inf)).sum()

    states = []
    for seed in range(8):
        torch.manual_seed(seed)
        states.append((torch.get_rng_state(), bool(torch.rand(()) <= 0.5)))
    assert {bad for _, bad in states} == {True, False}
    for state, bad in states:
        assert (find_nonfinite(model, step, generator_state=state) is not None) == bad


def test_a_compiled_model_is_replayed_as_it_was_written() -> None:
    """Law: the modules of a compiled model are told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fault = FAULTS["mlp cast eager"]
        run = Run("mlp")
        fault.plant(run)
        compiled = torch.compile(run.model, backend="eager")
        bad = find_nonfinite(compiled, lambda: run.step(compiled), scale=run.scale)
    assert fault.judge(bad) == (True, True, True)
