"""Runs a few training steps of a program and checks their values and their speed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.diagnostics.doctor import (
    RunFacts,
    examination,
    run_record,
    text,
    worst_first,
)
from halfstep.diagnostics.doctor.run_record import Config, LostUpdates, MachineFacts
from halfstep.diagnostics.profiling import profile
from halfstep.diagnostics.step_calls import CHECKED
from halfstep.diagnostics.step_numerics import CheckedSteps
from halfstep.distributed import ddp
from halfstep.errors import require_type
from halfstep.masters.master_weights import NoMasters
from halfstep.masters.rounding_loss import RoundingLossCounter, lr_of
from halfstep.numerics import formats
from halfstep.policy import levels
from halfstep.reporting.table import Report, wrap
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.optim import Optimizer

    from halfstep.diagnostics.doctor.rule import Examination
    from halfstep.diagnostics.profiling.profile_result import Profile
    from halfstep.diagnostics.step_numerics import Numerics
    from halfstep.reporting.finding import Finding

_FLAGS = (
    "Flags such as --level O2 are those of halfstep train. In a loop of your own: "
    "prepare(level=, dtype=, loss_scale=, policy=, master=), torch.compile, and "
    "num_workers of the data loader."
)

_WRONG = "speed is judged once the errors above are fixed"

_HINTS = {
    "level": "the level is not known (level=)",
    "weights": "the weights are not known (model=)",
    "lost updates": "updates were not counted (optimizer=)",
}
"""Missing fact -> why, and the argument that provides it. Facts of a run's records and
of a probe have no hint: a few steps have neither."""
_SESSION_HINTS = {
    "lost updates": "updates were not counted (session.count_rounding_loss(every=1))"
}


@dataclass(frozen=True, repr=False)
class Diagnosis(Report):
    """The result of `halfstep.diagnose`; prints as a report."""

    facts: RunFacts
    """The facts that the rules were evaluated on."""
    profile: Profile
    """Where the time of a step goes."""
    examination: Examination
    """Findings, and rules that were not evaluated."""
    numerics: Numerics
    """Which values were finite, and which were not."""
    calls: tuple[Finding, ...] = ()
    """Findings about the order of calls in the first steps."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, worst first; of one severity, those of speed come last."""
        return self.examination.findings

    def __str__(self) -> str:
        """Return the report as text."""
        lines = [] if self.numerics.findings() else [str(self.numerics)]
        if self.numerics.checked:
            wrong = {each.rule for each in self.calls}
            right = [words for rule, words in CHECKED.items() if rule not in wrong]
            line = f"No problem found in the first {self.numerics.checked} steps with: "
            lines.append(f"{line}{', '.join(right)}.")
        if any("--" in finding.advice for finding in self.findings):
            lines.append(_FLAGS)
        parts = ["\n".join(wrap(line, text.WIDTH)) for line in lines]
        return "\n\n".join([text.text(self.facts, self.examination), *parts])

    def data(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        report = text.data(self.facts, self.examination)
        more = {"profile": self.profile.data(), "numerics": self.numerics.data()}
        return {**report, **more}


def diagnose(
    step: Callable[..., object],
    *,
    session: Session | None = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scaler: Any | None = None,  # noqa: ANN401 -- torch's, ours or another
    batches: Iterable[Any] | None = None,
    level: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    steps: int = 3,
    warmup: int = 3,
    profiled: int = 3,
) -> Diagnosis:
    """Run some training steps, and report what is wrong with them and how to fix it.

    The steps are real: weights, optimizer and scaler change `warmup + steps + profiled`
    times. Pass a function over copies where that matters.

    Numerics come first: losses, gradients, skipped steps, weights and buffers; then the
    calls of the loss scaler, the schedule, and sums in 16 bits; then speed. The first
    warm-up step with a non-finite number is repeated by `find_nonfinite`, which calls
    `step` up to its backward pass some more times. Model, scaler and session are
    restored; other side effects of `step` before its backward pass are not.

    Args:
        step: Makes one training step. It is called without arguments, or with a batch.
        session: The session of the step. It implies model, optimizer and scaler.
        model: The model as it is called, DDP included. Default: what the first step
            runs; then only the numerics are checked.
        optimizer: The optimizer of the step; updates lost to rounding are counted.
        scaler: A GradScaler of torch, of halfstep or another. Default: the first of
            torch's or halfstep's that the steps use.
        batches: Iterable of batches, one for each step, so that data loading is timed.
        level: Level that the program trains at; `torch.autocast` over fp32 weights is
            "O1". Default: the session's.
        dtype: Dtype that the program trains in. Default: the session's, or that of its
            matmuls.
        device: "cpu" or "cuda". Default: the model's.
        steps: Steps that are timed, >= 1.
        warmup: Steps before those whose numbers are checked, >= 0.
        profiled: Steps under torch's profiler, >= 1. The shortest is reported.

    Returns:
        The diagnosis; `print` it.

    Raises:
        UserError: If an argument is of the wrong type or out of range, or there are too
            few `batches`.
        LossScaleCollapse: If the step raises it; with the result of the replay.
        DtypeMismatch: In place of torch's error, if the step mixes dtypes.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> print(diagnose(step, model=model, optimizer=optimizer).numerics)
        Losses of 9 steps, gradients of the first 3, weights and buffers are finite.
    """
    require_type("step", step, callable(step), "a function that makes one step")
    steppable = hasattr(optimizer, "register_step_pre_hook")
    for name, value, good, right in (
        ("session", session, isinstance(session, Session), "a halfstep.Session"),
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("optimizer", optimizer, steppable, "a torch.optim.Optimizer"),
        ("scaler", scaler, hasattr(scaler, "is_enabled"), "a GradScaler"),
    ):
        require_type(name, value, value is None or good, right)
    word = None if dtype is None else formats.parse(dtype).name
    level = None if level is None else levels.parse(level).name
    if session is not None:
        model, choice = session.model, session.choice
        level, word = level or choice.level.name, word or choice.format.name
        optimizer = None  # count_rounding_loss of the session counts instead
    where = device if device is not None else _place(model)
    checked = warmup if isinstance(warmup, int) else 0  # `profile` raises for others
    checked_steps = CheckedSteps(
        step,
        checked,
        same_batch=batches is not None,
        session=session,
        model=model,
        scaler=scaler,
    )
    with _counted(optimizer) as lost, checked_steps.watched():
        profile_result = profile(
            checked_steps,
            batches=batches,
            device=where,
            level=level,
            dtype=word,
            steps=steps,
            warmup=warmup,
            profiled=profiled,
        )
    if word is None and profile_result.dtype == "fp32":
        checked_steps.calls.on_fp32_products()
        contexts = map(formats.word, checked_steps.calls.dtypes)
        profile_result = replace(profile_result, dtype=next(contexts, "fp32"))
    weights = {}
    if session is None and model is not None:
        weights = run_record.weight_formats(ddp.unwrap(model))
    is_low = profile_result.dtype != "fp32"
    if level is None and is_low and set(weights.values()) == {"fp32"}:
        level = levels.O1.name
    scaling, place = _scaling(checked_steps), profile_result.device
    config = Config(level, profile_result.dtype, loss_scale=scaling, device=place)
    if session is not None:
        config = _config(session, config)
        lost = [
            LostUpdates(each.step, each.group, each.share)
            for each in session.lost_updates()
            if each.share is not None
        ]
    facts = RunFacts(
        name="this program",
        config=config,
        lost=tuple(lost),
        profile=profile_result,
        machine=MachineFacts.from_data(
            run_record.machine_data(profile_result.device or "cpu")
        ),
        weights=weights,
    )
    hints = _HINTS if session is None else _SESSION_HINTS
    numerics, calls = checked_steps.numerics(), checked_steps.calls.findings()
    step_findings = *numerics.findings(), *calls
    is_wrong = any(each.severity == "error" for each in step_findings)
    examined = examination(facts, hints, _WRONG if is_wrong else "")
    findings = worst_first((*step_findings, *examined.findings))
    examined = replace(examined, findings=findings)
    return Diagnosis(facts, profile_result, examined, numerics, calls)


def _place(model: nn.Module | None) -> torch.device | None:
    params = () if model is None else model.parameters()
    return next((param.device for param in params), None)


def _scaling(checked_steps: CheckedSteps) -> str:
    """Return the loss scale setting of steps without a session."""
    scaler, by_hand = checked_steps.scaler, checked_steps.calls.scale_by_hand
    if scaler is not None and scaler.is_enabled():
        return "dynamic"
    return "none" if by_hand == 1 else f"{by_hand:g}"


def _config(session: Session, config: Config) -> Config:
    """Return `config` with the settings of a session."""
    rule, level = session.scaler.rule, session.choice.level
    scaling = "dynamic"
    if rule.backoff_factor == 1:
        scaling = "none" if rule.init_scale == 1 else f"{rule.init_scale:g}"
    return replace(
        config,
        master_weights=None if level.masters else "none",
        loss_scale=scaling,
        accumulate=session.accumulate,
    )


@contextlib.contextmanager
def _counted(optimizer: Optimizer | None) -> Iterator[list[LostUpdates]]:
    """Count updates of 16-bit weights lost to rounding, in the first step inside."""
    lost_updates: list[LostUpdates] = []
    if optimizer is None:
        yield lost_updates
        return
    groups = optimizer.param_groups
    counter = RoundingLossCounter(NoMasters(optimizer), every=1)
    measuring = contextlib.ExitStack()

    def before(each: Optimizer, *_: object) -> None:
        # With a learning rate of 0 (first step of a warm-up) nothing changes, nor in
        # a fused update at an overflow: torch's scaler passes it `found_inf`.
        moves = any(float(lr_of(group)) for group in groups)
        skips = float(getattr(each, "found_inf", None) or 0.0)
        if moves and not skips and not counter.last:
            measuring.enter_context(counter.measure(StepReport(1, complete=True)))

    with (
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: measuring.close()),
    ):
        yield lost_updates
    for loss in counter.last:
        low = any(formats.is_low(p.dtype) for p in groups[loss.group]["params"])
        if low and loss.share is not None:
            lost_updates.append(LostUpdates(loss.step, loss.group, loss.share))
