"""What users do between a session's calls: nothing may go wrong in silence.

They step, cast, edit and clear by hand, and add weights and load states late.
"""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import kernel_twin
import master_cases as cases
import pytest
import torch
from small_training import same
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import UserError
from halfstep.masters import cpu_kernels
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

FORMS = ("fp32", "split", "stochastic")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "release": {"optimizer_in_backward": True},
}


def rows(names: str, *cases: str) -> Any:
    """Try each case, whose words are values of the arguments."""
    return pytest.mark.parametrize(names.split(), [case.split() for case in cases])


def crossed(name: str, *values: Any, every: int = 3) -> Any:
    """Cross forms, ways and values so that each two of them meet, not each three."""
    return pytest.mark.parametrize(
        ("form", "way", name),
        [
            (form, way, value)
            for i, form in enumerate(FORMS)
            for j, way in enumerate(WAYS.values())
            for k, value in enumerate(values)
            if (i + j + k) % every == 0
        ],
    )


def backward(session: Session, slopes: dict[str, Tensor]) -> None:
    with session.autocast():
        loss = session.model(slopes)
    session.backward(loss)


def window(session: Session, first: int) -> None:
    for number in range(session.accumulate):
        report = cases.go(session, cases.slopes_of(session.model, first + number))
    assert report.applied


def step(session: Session, *seeds: int) -> StepReport:
    slopes = [cases.slopes_of(session.model, seed) for seed in seeds]
    return cases.go(session, *slopes[: session.accumulate])


def without(model: nn.Module, name: str) -> tuple[int, int]:
    """Return two seeds whose slopes leave a parameter out."""
    names = [each for each, _ in model.named_parameters()]
    place = names.index(name)
    assert name not in cases.slopes_of(model, place)
    return place, place + len(names)


def plainly(model: nn.Module, slopes: dict[str, Tensor]) -> None:
    model(slopes).backward()


def elsewhere(model: nn.Module, slopes: dict[str, Tensor]) -> None:
    before = nn.Linear(1, 1)
    other = cases.start(cases.SGD, "fp32", before)
    with other.autocast():
        loss = model(slopes) + before(torch.ones(1, 1)).float().sum()
    other.backward(loss)
    other.step()


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize(("run", "inside"), [(plainly, True), (elsewhere, False)])
def test_passes_of_others(
    form: str, run: Callable[[nn.Module, dict[str, Tensor]], None], *, inside: bool
) -> None:
    """Law: what another pass leaves stays on the model, and is folded into nothing."""
    sessions = [cases.start(cases.ADAMW, form, accumulate=2) for _ in range(2)]
    ours = sessions[0]
    for session in sessions:
        window(session, 1)
        if inside:
            cases.go(session, cases.slopes_of(session.model, 3))
    slots = cases.masters_of(ours).master_params
    folded = copy.deepcopy([slot.master.grad for slot in slots.values()])
    weights = {id(slot.weight) for slot in slots.values()}
    named = dict(ours.model.named_parameters())
    slopes = {n: torch.ones_like(p) for n, p in named.items() if id(p) in weights}
    run(ours.model, slopes)
    assert same([slot.master.grad for slot in slots.values()], folded)
    for name, slope in slopes.items():
        assert same(named[name].grad, slope)
        named[name].grad = None if inside else named[name].grad
    if not inside:  # nothing is folded yet that this would clear
        ours.optimizer.zero_grad()
        assert all(param.grad is None for param in named.values())
    for session in sessions:
        if inside:
            cases.go(session, cases.slopes_of(session.model, 4))
        window(session, 5)
    assert same(*map(cases.everything, sessions))


@rows("form scheduler", "fp32 before", "split after", "stochastic none")
def test_a_step_that_was_replaced(form: str, scheduler: str) -> None:
    """Law: a user's `optimizer.step` is called once a step, and never for a skip."""
    model = cases.Mixed()
    optimizer = cases.ADAMW(model.parameters())
    calls: list[int] = []
    schedule = partial(torch.optim.lr_scheduler.ConstantLR, optimizer, factor=0.5)
    if scheduler == "before":
        schedule()
    own = optimizer.step

    def step(_: Any, *args: Any, **more: Any) -> Any:
        calls.append(1)
        return own(*args, **more)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    if scheduler == "after":
        schedule()
    session = cases.prepare(model, optimizer, master=form)
    for number in range(3):
        assert cases.go(session, cases.slopes_of(model, number)).applied
        assert len(calls) == number + 1
    assert "its step was replaced" in cases.masters_of(session).describe()
    bad = cases.slopes_of(model, 1, scale=math.inf)
    assert cases.go(session, bad).skipped
    assert len(calls) == 3


@pytest.mark.parametrize(("form", "accumulate"), [("fp32", 2), ("stochastic", 1)])
def test_many_losses(form: str, accumulate: int) -> None:
    """Law: losses of one step add up in fp32: 1 + 300 * 1/300 is 2.

    In bf16 it is 1 for ever: 1/300 is less than half an ulp there.
    """
    one = torch.ones((), dtype=torch.bfloat16)
    assert one + one / 300 == one
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.LayerNorm(1))
    session = cases.start(
        cases.SGD, form, model, accumulate=accumulate, clip_grad_norm=math.inf
    )
    for _ in range(accumulate):
        for slope in (1.0, *[1 / 300] * 300):
            with session.autocast():
                loss = (model[0].weight * slope).float().sum()
            session.backward(loss)
        report = session.step()
    assert report.grad_norm == pytest.approx(2.0, rel=2.0**-8)


@rows("form cast word", "fp32 half float16", "split float float32")
def test_a_model_that_was_cast(form: str, cast: str, word: str) -> None:
    """Law: weights of another dtype are refused wherever masters meet them."""
    session = cases.start(cases.ADAMW, form)
    window(session, 1)
    getattr(session.model, cast)()
    for act in (session.weights, session.state_dict, partial(window, session, 2)):
        with pytest.raises(UserError, match=f"became torch.{word} after prepare"):
            act()


@pytest.mark.parametrize(
    ("make", "kernel"), [(cases.ADAMW, True), (cases.SGD, False), (cases.NADAM, True)]
)
def test_masters_in_other_memory(make: cases.Make, *, kernel: bool) -> None:
    """Law: fp32 masters may get other memory; the weights still are what they say."""
    sessions = [cases.start(make, "fp32", kernel=kernel) for _ in range(2)]
    for session in sessions:
        window(session, 1)
    for master in cases.adopted(sessions[0].optimizer):
        master.data = master.data.clone()
    for session in sessions:
        window(session, 2)
        window(session, 3)
        truths = session.weights()
        for name, weight in session.model.named_parameters():
            assert torch.equal(truths[name].to(weight.dtype), weight), name
    assert same(sessions[0].weights(), sessions[1].weights())
    assert same(*map(cases.everything, sessions))


@pytest.mark.parametrize("form", ["fp32", "none"])
def test_a_dead_column(form: str) -> None:
    """Law: counts are of a sample of the whole tensor, whatever its shape.

    One input of 64 is dead; every 64th number of the matrix is its column. The share
    is that of all numbers within 2 points: a sample of 65536 is off by 0.2 of one.
    """
    norm, wide = nn.LayerNorm(64), nn.Linear(64, 65536)
    with torch.no_grad():
        norm.weight[0] = 0.0
    model = nn.Sequential(norm, wide)
    session = cases.start(partial(torch.optim.SGD, lr=2.0**-13), form, model)
    session.count_rounding_loss(every=1)
    before = wide.weight.detach().clone()
    with session.autocast():
        loss = (model(torch.randn(1, 64)).float() * torch.randn(65536)).sum()
    session.backward(loss)
    session.step()
    (found,) = session.lost_updates()
    stays = float((wide.weight == before)[:, 1:].float().mean())
    assert 0.1 < stays < 0.9
    assert found.below_publish == pytest.approx(stays, abs=0.02)
    size = sum(param.numel() for param in model.parameters())
    looked = 2**16 * (1 - 2**16 / size)
    assert float(found.counts[0]) == pytest.approx(looked, rel=0.005)


@pytest.mark.parametrize(
    ("form", "accumulate", "make", "schedule"),
    [
        ("fp32", 1, cases.ADAMW, "before"),
        ("split", 2, cases.NADAM, "after"),
        ("stochastic", 2, cases.ADAMW, None),
    ],
)
def test_a_step_by_hand(
    form: str, accumulate: int, make: cases.Make, schedule: str | None
) -> None:
    """Law: `optimizer.step()` is refused while gradients wait; nothing has changed."""
    sessions = []
    for _ in range(2):
        model = cases.Mixed()
        optimizer = make(model.parameters())
        attach = partial(torch.optim.lr_scheduler.ConstantLR, optimizer, factor=0.5)
        if schedule == "before":
            attach()
        more = {"master": form, "accumulate": accumulate}
        sessions.append(cases.prepare(model, optimizer, **more))
        if schedule == "after":
            attach()
        window(sessions[-1], 1)
    ours = sessions[0]
    for session in sessions:
        backward(session, cases.slopes_of(session.model, 3))
    before = cases.everything(ours)
    with pytest.raises(UserError, match=r"session\.step\(\)"):
        ours.optimizer.step()
    assert same(cases.everything(ours), before)
    for session in sessions:
        session.step()
        for number in range(accumulate - 1):
            cases.go(session, cases.slopes_of(session.model, 4 + number))
    assert same(*map(cases.everything, sessions))
    assert ours.steps_applied == 2


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copies(act: Callable[[Session], object]) -> None:
    """Law: a copy, whose hooks would be the original's, is refused."""
    with pytest.raises(UserError, match=r"session\.state_dict\(\)"):
        act(cases.start(cases.SGD, "split"))


@pytest.mark.parametrize(("level", "more"), [("O2", {"master": "none"}), ("O3", {})])
def test_epsilon_in_fp16(level: str, more: dict[str, Any]) -> None:
    """Law: an epsilon that fp16 rounds to 0 is told wherever state is in fp16."""
    model = cases.Mixed()
    adam = torch.optim.AdamW(model.parameters(), eps=1e-8)
    with pytest.warns(UserWarning, match="eps=1e-08 rounds to 0 in fp16"):
        hs.prepare(model, adam, level, dtype="fp16", **more)


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_that_no_kernel_reads(*, bad: bool) -> None:
    """Law: without a loss scale, a float64 and an expanded gradient are checked too."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")
    with session.autocast():
        loss = model[0].weight.sum() + model[1].weight.sum()
    if bad:
        loss.register_hook(lambda gradient: gradient * torch.inf)
    session.backward(loss)
    assert session.step().skipped == bad


@pytest.mark.parametrize(("form", "others"), [("fp32", True), ("stochastic", False)])
def test_passes_of_others_and_updates_in_backward(form: str, *, others: bool) -> None:
    """Law: a gradient of another pass is not used, and stays where it was left."""
    ours, right = (
        cases.start(cases.ADAMW, form, optimizer_in_backward=True) for _ in range(2)
    )
    for session in (ours, right):
        step(session, 1)
    slopes = {n: torch.ones_like(p) for n, p in ours.model.named_parameters()}
    if others:
        elsewhere(ours.model, slopes)
    else:
        ours.model(slopes).backward()
    assert same(cases.everything(ours), cases.everything(right))
    assert same({n: p.grad for n, p in ours.model.named_parameters()}, slopes)
    ours.optimizer.zero_grad()
    assert all(param.grad is None for param in ours.model.parameters())
    for session in (ours, right):
        step(session, 2)
    assert same(cases.everything(ours), cases.everything(right))


@crossed("name", "linear.weight", "other.weight", "norm.weight")
def test_an_unfrozen_weight(form: str, way: dict[str, Any], name: str) -> None:
    """Law: it trains from then on, as one that had only had no gradient before."""
    sessions = []
    for frozen in (True, False):
        model = cases.Mixed()
        weight = model.get_parameter(name).requires_grad_(requires_grad=not frozen)
        session = cases.prepare(
            model, cases.ADAMW(model.parameters()), master=form, **way
        )
        step(session, *without(model, name))
        before = weight.detach().clone()
        model.get_parameter(name).requires_grad_()
        step(session, 1, 4)
        step(session, 4, 5)
        assert not torch.equal(model.get_parameter(name), before)
        sessions.append(session)
    assert same(*map(cases.everything, sessions))


@crossed("make", cases.ADAMW, cases.OPTIMIZERS["rmsprop"], every=2)
def test_parameters_appended(form: str, way: dict[str, Any], make: cases.Make) -> None:
    """Law: what joins a group trains as if there before; 16-bit ones get a master."""
    sessions = []
    for late in (True, False):
        model = cases.Mixed()
        weight = model.other.weight
        weight.data = weight.data.bfloat16().float()
        joining = [model.norm.bias, weight]
        rest = [p for p in model.parameters() if not any(p is q for q in joining)]
        optimizer = make(rest if late else [*rest, *joining])
        session = cases.prepare(model, optimizer, master=form, **way)
        slopes = cases.slopes_of(model, 1)
        for name in ("other.weight", "norm.bias"):
            slopes.pop(name, None)
        cases.go(session, *[slopes] * session.accumulate)
        before = weight.detach().clone()
        if late:
            optimizer.param_groups[0]["params"].extend(joining)
        step(session, 1, 3)
        step(session, 4, 5)
        last = optimizer.param_groups[0]["params"][-1]
        assert last.dtype == torch.float32
        assert cases.masters_of(session).model_param(last) is weight
        assert not torch.equal(weight, before)
        sessions.append(session)
    assert same(*map(cases.everything, sessions))


@crossed("make", cases.ADAMW, cases.OPTIMIZERS["rmsprop"])
def test_loaded_in_mid_step(form: str, way: dict[str, Any], make: cases.Make) -> None:
    """Law: no state is given while a step is under way; one may be loaded then."""
    sessions = [cases.start(make, form, **way) for _ in range(2)]
    for session in sessions:
        step(session, 1, 2)
        saved = copy.deepcopy(session.state_dict())
        step(session, 2, 3)
    ours, right = sessions
    for act in (backward, cases.go)[: ours.accumulate]:
        act(ours, cases.slopes_of(ours.model, 3))
        with pytest.raises(RuntimeError, match="would lose their gradients"):
            ours.state_dict()
        ours.load_state_dict(saved)
        right.load_state_dict(saved)
        assert same(*map(cases.everything, sessions))
    for session in sessions:
        for seed in (4, 5):
            assert step(session, seed, seed + 1).left_out == ()
    assert same(*map(cases.everything, sessions))
    assert ours.steps_applied == right.steps_applied == 3


@pytest.mark.parametrize("release", [False, True])
def test_what_may_be_set(release: bool) -> None:
    """Law: a norm that is none, or for which no weight waits, is refused later."""
    more = {"optimizer_in_backward": True} if release else {"accumulate": 2}
    session = cases.start(cases.SGD, "split", **more)
    for bad in (-1, 0.0, -math.inf, math.nan, *([1.0] if release else [])):
        with pytest.raises(UserError, match="clip_grad_norm"):
            session.clip_grad_norm = bad
    assert session.clip_grad_norm is None
    for good in (math.inf, None if release else 0.5):
        session.clip_grad_norm = good
        assert session.clip_grad_norm == good
    assert step(session, 1, 2).applied
    with pytest.raises(AttributeError):
        session.accumulate = 4  # type: ignore[misc]
    assert session.accumulate == (1 if release else 2)


@pytest.mark.parametrize(
    ("form", "kernel", "value"),
    [
        ("fp32", True, -math.inf),
        ("fp32", False, math.nan),
        ("split", True, math.nan),
        ("stochastic", False, -math.inf),
    ],
)
def test_all_gradients_bad(form: str, value: float, *, kernel: bool) -> None:
    """Law: a step that moved nothing is a skipped one."""
    session = cases.start(cases.ADAMW, form, optimizer_in_backward=True, kernel=kernel)
    assert step(session, 1).applied
    weights, extras, states, _ = cases.everything(session)
    slopes = cases.slopes_of(session.model, 2)
    bad = {name: slope.float() * value for name, slope in slopes.items()}
    report = cases.go(session, bad)
    assert report.skipped
    assert not report.applied
    assert {*report.left_out} == {*bad}
    if math.isnan(value):
        assert (report.inf_in, {*report.nan_in}) == ((), {*bad})
    assert (session.steps_applied, session.steps_skipped) == (1, 1)
    assert same([weights, extras, states], cases.everything(session)[:3])
    report = cases.go(session, slopes | {"conv.weight": bad["conv.weight"]})
    assert (report.applied, report.left_out) == (True, ("conv.weight",))
    assert (session.steps_applied, session.steps_skipped) == (2, 1)


def words_model() -> nn.Sequential:
    """Return a table of words, of which a batch reads a few, and layers."""
    torch.manual_seed(0)
    table = nn.Embedding(9, 4, sparse=True)
    return nn.Sequential(table, nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.mark.parametrize("form", FORMS[1:])
@cases.both_ways
def test_sparse_gradients(form: str, *, kernel: bool) -> None:
    """Law: sparse gradients are released as they are used in an ordinary step.

    Words that no batch reads stay; a word that it reads twice counts twice. A kernel
    may round other weights otherwise than the ordinary step, which has none here.
    """
    sessions = [
        cases.start(
            *(cases.SGD, form, words_model()),
            optimizer_in_backward=release,
            kernel=kernel,
        )
        for release in (True, False)
    ]
    before = sessions[0].model[0].weight.detach().clone()
    for words in ([1, 4, 4], [2, 1, 1]):
        for session in sessions:
            with session.autocast():
                out = session.model(torch.tensor(words)).float()
                loss = (out - torch.tensor([1.0, -1.0])).square().sum()
            session.backward(loss)
            assert session.step().applied
        if words[0] == 1:
            tables = [session.weights()["0.weight"] for session in sessions]
            assert same(*tables)
    if not kernel:
        assert same(*map(cases.everything, sessions))
    moved = (sessions[0].model[0].weight != before).any(1)
    assert moved.tolist() == [word in {1, 2, 4} for word in range(9)]


def counters(session: Session) -> list[float]:
    return [float(state["step"]) for state in session.optimizer.state.values()]


@rows("form cause", "fp32 kernel", "split state", "stochastic kernel")
def test_an_update_that_fails(form: str, cause: str) -> None:
    """Law: an error inside an update leaves counters, weights and clock alone."""
    kernel_twin.ready(cpu_kernels)
    sessions = [cases.start(cases.ADAMW, form) for _ in range(2)]
    for session in sessions:
        for seed in (1, 2):  # by then each parameter has a state
            step(session, seed)
    ours = sessions[0]
    counted = counters(ours)
    masters = cases.masters_of(ours)
    kernel = masters.kernel
    assert kernel is not None
    state = ours.optimizer.state[cases.by_name(ours)["linear.weight"]]
    moment = state["exp_avg"]
    before = cases.everything(ours)

    def fail(*_: object, **__: object) -> None:
        message = "the kernel fails"
        raise RuntimeError(message)

    if cause == "kernel":
        masters.kernel = dataclasses.replace(kernel, update=fail)
    else:
        state["exp_avg"] = torch.zeros(7)
    with pytest.raises((RuntimeError, ValueError), match=r"kernel fails|size|shape"):
        step(ours, 4)
    masters.kernel = kernel
    state["exp_avg"] = moment
    assert counters(ours) == counted
    assert same(cases.everything(ours), before)
    ours.zero_grad()
    for session in sessions:
        step(session, 5)
    assert counters(ours) == counters(sessions[1])
    assert same(*map(cases.everything, sessions))


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "int": (int, "step"),
    "float64": (Tensor.double, "step"),
    "fp64 moments": (Tensor.double, "exp_avg exp_avg_sq"),
}


@crossed("edit", *EDITS)
def test_states_of_other_types(form: str, way: dict[str, Any], edit: str) -> None:
    """Law: Adam's counter, and moments, may be of any type; training goes on alike."""
    kernel_twin.ready(cpu_kernels)
    sessions = [cases.start(cases.ADAMW, form, **way) for _ in range(2)]
    for session in sessions:
        step(session, 0, 1)
        step(session, 2, 3)
    convert, keys = EDITS[edit]
    for state in sessions[0].optimizer.state.values():
        state.update({key: convert(state[key]) for key in keys.split()})
    for session in sessions:
        step(session, 4, 5)
        step(session, 6, 7)
    assert same(*map(cases.everything, sessions))


def num_hooks(model: nn.Module) -> list[int]:
    tables = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks")
    options = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    modules = [*model.modules()]
    return [sum(len(getattr(m, each)) for m in modules) for each in tables + options]


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))  # noqa: S301 -- our own bytes


@pytest.mark.filterwarnings("ignore:policy rule", "ignore:the copy of the model holds")
@pytest.mark.parametrize(
    ("level", "twin"), [("O1", pickled), ("O2", copy.deepcopy), ("O3", pickled)]
)
def test_a_copy_that_is_prepared_drops_hooks(
    level: str, twin: Callable[[nn.Module], nn.Module]
) -> None:
    """Law: a model has the hooks of its own session, and none of others."""

    def prepare(model: nn.Module, rule: str) -> Session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hs.prepare(model, optimizer, level, dtype="bf16", policy=rule)

    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    for rule in ("torch + module:0=fp32", "torch + module:2=fp32", "torch"):
        session = prepare(model, rule)
        with session.autocast():
            session.model(torch.ones(1, 2))
        fresh = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
        prepare(fresh, rule)
        assert num_hooks(model) == num_hooks(fresh)
        model = twin(model)
