"""Typed use of the public API: mypy reads this file strictly, nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.checkpoint import Checkpoint, CheckpointError
from halfstep.diagnostics.preflight import CheckReport
from halfstep.machine import Capabilities, Recommendation
from halfstep.nonfinite.origin import BadOp
from halfstep.numerics.formats import FloatFormat, cast_floating
from halfstep.parity.comparison import Comparison
from halfstep.policy.levels import Level
from halfstep.reporting.finding import Finding
from halfstep.reporting.table import Table

if TYPE_CHECKING:
    from pathlib import Path


def two_lines(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Train with a session: what somebody with a loop of their own writes."""
    optimizer = torch.optim.AdamW(model.parameters())
    session = hs.prepare(model, optimizer)
    assert_type(session, hs.Session)
    for x, y in batches:
        with session.autocast():
            loss = nn.functional.cross_entropy(session.model(x), y)
        (slope,) = session.grad(loss, x, create_graph=True, allow_unused=False)
        assert_type(slope, Tensor)
        session.backward(loss + slope.square().mean())
        assert_type(dict(session.grads()), dict[str, Tensor])
        assert_type(session.grad_norm(), Tensor)
        report = session.step()
        assert_type(report, hs.StepReport)
        assert_type(report.skipped, bool)
        assert_type(report.applied, bool)
        assert_type(report.complete, bool)
        assert_type(report.step, int)
        assert_type(report.scale, float)
        assert_type(report.grad_norm, float | None)
        assert_type(report.found_inf_in, tuple[str, ...])
    bad = hs.find_nonfinite(session.model, lambda: model(x).mean(), losses=[1.0])
    assert_type(bad, BadOp)
    assert_type(bool(bad), bool)
    assert_type(bad.finding(), Finding)
    session.optimizer.zero_grad()
    assert_type(session.steps_applied, int)
    assert_type(session.steps_skipped, int)
    assert_type(session.policy, hs.Policy)
    return session.scaler.state.scale.item()


def before_training(model: nn.Module, batch: tuple[Tensor, Tensor]) -> str:
    """Check a model before it trains."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    report = hs.check(model, loss_fn, batch, level="O2", dtype="fp16", steps=3)
    assert_type(report, CheckReport)
    assert_type(report.good, bool)
    assert_type(report.findings, tuple[Finding, ...])
    assert_type(report.facts.safe_scale, float | None)
    assert_type(report.tables(), tuple[Table, ...])
    assert_type(report.data(), dict[str, Any])
    return report.verdict


def as_good_as_fp32(model: nn.Module, batches: list[Tensor], out: Path) -> float | None:
    """Compare levels with fp32."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).mean()

    result = hs.compare(make, batches, ("O1", "O2:split"), seeds=3, out=out)
    assert_type(result, Comparison)
    assert_type(result.tables(), tuple[Table, ...])
    assert_type(result.data(), dict[str, Any])
    result.save(out / "result.json")
    result.page(out / "report.html")
    return result.verdicts["O1"].difference


def every_word(model: nn.Module, group: torch.distributed.ProcessGroup) -> hs.Session:
    """Give every argument of `prepare`."""
    return hs.prepare(
        model,
        torch.optim.SGD(model.parameters()),
        "O2",
        dtype=torch.float16,
        policy=hs.Policy.parse("torch") + hs.Rule("type", "LayerNorm", "fp32"),
        loss_scale=1024.0,
        clip_grad_norm=1.0,
        accumulate=4,
        master="fp32",
        named_parameters=model.named_parameters(),
        process_group=group,
    )


def words_as_well(model: nn.Module) -> str:
    """Give words where values do as well; show what came of it."""
    session = hs.prepare(
        model,
        torch.optim.SGD(model.parameters()),
        level="auto",
        dtype="auto",
        policy="torch + module:head=fp32",
        loss_scale="dynamic",
        clip_grad_norm=None,
        named_parameters=None,
        process_group=None,
    )
    return session.explain().text()


def save_and_resume(session: hs.Session, folder: Path) -> Checkpoint:
    """Write a checkpoint and read it back."""
    state = session.state_dict()
    assert_type(state, dict[str, Any])
    weights = session.weights()
    assert_type(weights, dict[str, Tensor])
    hs.checkpoint.save(folder, weights, state, {"step": 1})
    try:
        found = hs.checkpoint.load(folder)
    except CheckpointError as error:
        refusal: hs.UserError = error
        raise refusal from None
    session.load_state_dict(found.state)
    return found


def drop_in(model: nn.Module, x: Tensor) -> None:
    """Replace `torch.amp`, by position and by name."""
    scaler = hs.GradScaler("cuda", 2.0**16, 2.0, 0.5, 2000, enabled=True)
    scaler = hs.GradScaler("cpu", min_scale=1.0, hysteresis=2)
    as_torchs: torch.amp.GradScaler = scaler
    optimizer = torch.optim.SGD(model.parameters())
    with hs.autocast("cuda", torch.float16, True, None) as region:  # noqa: FBT003
        ran: str = region.report().text()
        assert ran
        loss: Tensor = model(x).sum()
    with hs.autocast("cpu", dtype=torch.bfloat16, enabled=False, policy="torch"):
        as_torchs.scale(loss)
    try:
        scaler.step(optimizer)
        scaler.update()
    except hs.LossScaleCollapse as error:
        collapse: RuntimeError = error
        raise collapse from None
    assert_type(scaler.last_step, hs.StepReport)


def decisions() -> torch.dtype | None:
    """Ask the one decider."""
    rule = hs.Rule.parse("op:softmax*=fp32")
    assert_type(rule, hs.Rule)
    policy = hs.Policy((rule,))
    found = hs.policy.decide("mm", [torch.float32], "cpu", policy=policy)
    assert_type(found, hs.Decision)
    assert_type(found.reason, str)
    return found.dtype


def facts() -> None:
    """Read formats, levels and the machine."""
    assert_type(hs.formats.parse("bf16"), FloatFormat)
    assert_type(hs.levels.parse("O2"), Level)
    assert_type(hs.levels.LEVELS, dict[str, Level])
    assert_type(hs.machine.capabilities(), Capabilities)
    assert_type(hs.machine.recommend(), Recommendation)
    assert_type(hs.machine.gemm_rates("cpu", refresh=True), dict[str, float])
    nested = {"x": [torch.ones(1)], "y": [torch.ones(2)]}
    assert_type(cast_floating(nested, torch.float16), dict[str, list[Tensor]])


def masters(model: nn.Module) -> None:
    """Keep fp32 masters without a session."""
    optimizer = torch.optim.AdamW(model.parameters())
    kept = hs.MasterWeights(optimizer)
    kept.accumulate_grads()
    optimizer.step()
    kept.publish()
    assert_type(kept.pairs, list[tuple[nn.Parameter, nn.Parameter]])
    lean = hs.MasterWeights(optimizer, master="split", seed=1)
    lean.step()
    session = hs.prepare(model, optimizer, "O2", master="kahan")
    session.count_rounding_loss(every=100)
    assert_type([lost.share for lost in session.lost_updates()], list[float | None])
    assert_type(session.memory(), dict[str, int])
    assert_type(hs.machine.keep_memory(), bool)
    hs.prepare(model, optimizer, "O2", master="split", optimizer_in_backward=True)


def refused(model: nn.Module) -> None:
    """Make errors that a type checker sees; an ignore without one is itself one."""
    optimizer = torch.optim.SGD(model.parameters())
    hs.prepare(model, optimizer, 2)  # type: ignore[arg-type]
    hs.prepare(model, optimizer, "O2", "bf16")  # type: ignore[call-arg]
    hs.prepare(model, optimizer, clip_grad_norm="1")  # type: ignore[arg-type]
    hs.autocast("cpu", policy=1)  # type: ignore[arg-type]
    hs.nonsense()  # type: ignore[attr-defined]
