"""Masters and gradients under DDP: the same on every rank, and as exact as DDP's.

However DDP is set up, the mean stays the mean. fp16 on its way between ranks makes no
overflow that was not there.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from master_cases import masters_of
from ranks import FOUR, agreed, batch, held, saw, start
from small_training import same
from tests.session.test_session_ranks import RULE
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs

Group = dist.ProcessGroup

FILES = ("tests.session.test_ddp_sync",)
FORMS = ("fp32", "split", "kahan", "stochastic", "none")
ROUTES = ("direct", "generic")
RUNS = [
    (form, accumulate, route)
    for i, form in enumerate(FORMS)
    for accumulate, route in ((1, ROUTES[i % 2]), (3, ROUTES[1 - i % 2]))
]
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""


@contextlib.contextmanager
def no_false_alarm() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "weights were changed")
        yield


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))


def prepared(model: nn.Module, lr: float = 0.01, **more: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return hs.prepare(model, optimizer, "O2", **({"dtype": "bf16"} | more))


def wrap(session: Any, group: Group, **more: Any) -> None:
    session.model = DistributedDataParallel(session.model, process_group=group, **more)


def micro_batch(session: Any, inputs: Tensor) -> Any:
    with session.autocast():
        loss = session.model(inputs).float().square().mean()
    session.backward(loss)
    return session.step()


def one_step(session: Any, step: int, micros: int = 1) -> None:
    for micro in range(micros):
        micro_batch(session, batch(micros * step + micro))


def truths(session: Any) -> list[Tensor]:
    masters = masters_of(session)
    params = [p for group in masters.optimizer.param_groups for p in group["params"]]
    return [masters.fp32_value(param).clone() for param in params]


def all_of(session: Any) -> dict[str, Any]:
    slots = masters_of(session).master_params.values()
    return held(session.model, session.optimizer) | {
        "weights by name": session.weights(),
        "truths": truths(session),
        "extras": [s.residual.clone() for s in slots if s.residual is not None],
        "clock": masters_of(session).rng.step,
    }


def forms(group: Group, form: str, accumulate: int, route: str) -> dict[str, Any]:
    session = prepared(net(dist.get_rank()), master=form, accumulate=accumulate)
    if route == "generic":
        masters_of(session).kernel = None
    before = truths(session)
    wrap(session, group)
    with no_false_alarm():
        with session.autocast():
            pass
        begun = truths(session)
        for step in range(8):
            one_step(session, step, accumulate)
    return {"all": all_of(session), "before": before, "begun": begun}


def without_region(group: Group) -> dict[str, Any]:
    session = prepared(net(dist.get_rank()))
    wrap(session, group)
    with no_false_alarm():
        for step in range(3):
            loss = session.model(batch(step).bfloat16()).float().square().mean()
            session.backward(loss)
            session.step()
    return all_of(session)


class Watched:
    """A session whose gradients are compared with their exact mean over ranks.

    Args:
        session: Over a model that is not wrapped yet.
        group: Ranks that share a mean.
    """

    def __init__(self, session: Any, group: Group) -> None:
        self.session, self.group = session, group
        masters = masters_of(session)
        groups = session.optimizer.param_groups
        self.params = [param for held in groups for param in held["params"]]
        weights = [masters.model_param(param) for param in self.params]
        self.sums = [torch.zeros(w.shape, dtype=torch.float64) for w in weights]
        self.wires = [w.dtype for w in weights]
        self.seen = [False] * len(weights)
        self.applied: list[Tensor | None] = []
        for place, weight in enumerate(weights):
            weight.register_hook(functools.partial(self._made, place))
        # A step with hooks is the optimizer's own, over gradients in `.grad`.
        session.optimizer.register_step_pre_hook(self._used)

    def _made(self, place: int, gradient: Tensor) -> None:
        self.seen[place] = True
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self.sums[place] += dense.double()

    def _used(self, *_: Any) -> None:
        found = [param.grad for param in self.params]
        self.applied = [
            None if g is None else (g.to_dense() if g.is_sparse else g).clone()
            for g in found
        ]

    def errors(self) -> list[tuple[float, float]]:
        """Return (error of what was applied, bound) of each number; begin anew.

        A sender rounds once what it sends, and so does each addition on the way: with
        n ranks an error is at most n half ulps of the mean of absolute values.
        """
        ranks_there = self.group.size()
        found = []
        for place, (total, wire) in enumerate(zip(self.sums, self.wires, strict=True)):
            exact, largest = total.clone(), total.abs()
            there = torch.tensor(float(self.seen[place]))
            for tensor in (exact, largest, there):
                dist.all_reduce(tensor, group=self.group)
            used = self.applied[place]
            assert (used is not None) == bool(there), f"parameter {place}"
            if used is not None:
                half = HALF_ULP.get(wire, 2.0**-24) * ranks_there * (1 + 2.0**-5)
                error = (used.double() - exact / ranks_there).abs().flatten()
                bound = (half * largest / ranks_there).flatten()
                found += zip(error.tolist(), bound.tolist(), strict=True)
            total.zero_()
            self.seen[place] = False
        return found


def worst(errors: list[tuple[float, float]]) -> float:
    return max(error / bound if bound else 2.0 * error for error, bound in errors)


def messages(group: Group) -> dict[str, Any]:
    session = prepared(net(0), accumulate=2)
    wrap(session, group)
    calls = []
    for step in range(3):
        with ranks.counted() as made:
            one_step(session, step, 2)
        calls.append(made)
    return {"calls": calls[1:]}


def again(group: Group) -> dict[str, Any]:
    session = prepared(net(dist.get_rank()), master="split")
    bare = session.model
    with no_false_alarm():
        wrap(session, group)
        for step in range(3):
            one_step(session, step)
        before = all_of(session)
        session.model = bare
        wrap(session, group)
        with session.autocast():
            pass
        kept = same(all_of(session), before)
        for step in range(3, 6):
            one_step(session, step)
    return {"all": all_of(session), "kept": kept}


CASES: dict[str, Callable[[Group], dict[str, Any]]] = {
    **ranks.cases(forms, *RUNS),
    "without region": without_region,
    "messages": messages,
    "again": again,
}


@pytest.fixture(scope="module", params=[2, FOUR])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param, FILES)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_forms(seen: list[dict[str, Any]], run: tuple[str, int, str]) -> None:
    """Law: ranks begin with the first one's truth, and stay the same to the bit."""
    case = f"forms {run}"
    agreed(seen, case, "all", "begun")
    first = saw(seen, case)[0]
    assert same(first["begun"], first["before"])
    other = saw(seen, case)[1]
    assert not same(other["before"], other["begun"])
    assert not same(first["all"]["truths"], first["begun"])


def test_a_loop_without_regions(seen: list[dict[str, Any]]) -> None:
    """Law: masters are the first rank's too where no forward region is opened."""
    agreed(seen, "without region")


def test_messages(seen: list[dict[str, Any]]) -> None:
    """Law: a step is one message in bf16 and one in fp32."""
    for rank in saw(seen, "messages"):
        assert rank["calls"] == [["all_reduce"] * 2] * 2


def test_wrapping_again(seen: list[dict[str, Any]]) -> None:
    """Law: another wrapper changes nothing, and ranks stay the same."""
    assert all(rank["kept"] for rank in saw(seen, "again"))
    agreed(seen, "again", "all")


def near(group: Group, accumulate: int) -> dict[str, Any]:
    model = nn.Linear(3, 1, bias=False)  # its gradient is its input
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = replace(RULE, init_scale=1.0)
    session = hs.prepare(
        model, optimizer, "O2", dtype="fp16", accumulate=accumulate, loss_scale=rule
    )
    used: list[Tensor] = []
    model.weight.data.zero_()
    (param,) = session.optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: used.append(param.grad.clone()))
    wrap(session, group)
    signs = torch.tensor([1.0, -1.0, 1.0 if dist.get_rank() % 2 else -1.0])
    for _ in range(accumulate):
        with session.autocast():
            out = session.model(60000 * signs)
        session.backward(out.float().sum() * accumulate)
        report = session.step()
    return {"used": used, "skipped": report.skipped}


CASES |= ranks.cases(near, 1, 3)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_near_the_largest_number(seen: list[dict[str, Any]], accumulate: int) -> None:
    """Law: neither a mean over ranks nor a sum of micro-batches overflows on the way.

    60000 is 1875 times 32: it, its parts and their sums come out whole.
    """
    found = agreed(seen, f"near {accumulate}")
    assert not found["skipped"]
    expected = 60000.0 * accumulate
    # With 3, what travels is divided by 4: 45000 lies halfway between two numbers.
    used = found["used"][0][0]
    step = 32 * 4 if accumulate == 3 else 0
    assert abs(used[0].item() - expected) <= step
    assert abs(used[1].item() + expected) <= step
    assert used[2].item() == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "views, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
MEANS = [
    *((setting, 3, "fp32") for setting in SETTINGS),
    *(("plain", 1, "none"), ("views, static", 3, "none")),
]


def gaps(watched: Watched, micros: int, steps: int = 5) -> float:
    errors = []
    with no_false_alarm():
        for step in range(steps):
            one_step(watched.session, step, micros)
            errors += watched.errors()
    return worst(errors)


def mean(group: Group, setting: str, accumulate: int, form: str) -> dict[str, Any]:
    session = prepared(net(0), accumulate=accumulate, master=form)
    watched = Watched(session, group)
    wrap(session, group, **SETTINGS[setting])
    return {"gap": gaps(watched, accumulate), "all": all_of(session)}


class Branches(nn.Module):
    """Three layers, of which a rank uses one in turn; nobody uses the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[(self.calls + dist.get_rank()) % 2](inputs)


def unused(group: Group, accumulate: int) -> dict[str, Any]:
    session = prepared(Branches(), accumulate=accumulate)
    watched = Watched(session, group)
    wrap(session, group, find_unused_parameters=True)
    before = truths(session)[-2:]
    gap = gaps(watched, accumulate)
    kept = same(before, truths(session)[-2:])
    return {"gap": gap, "all": all_of(session), "kept": kept}


def subgroups(_group: Group, accumulate: int) -> dict[str, Any]:
    half = dist.get_world_size() // 2
    halves = [list(range(half)), list(range(half, 2 * half))]
    mine, _ = dist.new_subgroups_by_enumeration(halves)
    assert mine is not None
    session = prepared(net(dist.get_rank()), accumulate=accumulate)
    watched = Watched(session, mine)
    wrap(session, mine)
    return {"gap": gaps(watched, accumulate), "all": all_of(session)}


def sparse(group: Group) -> dict[str, Any]:
    torch.manual_seed(5)
    model = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hs.prepare(model, optimizer, "O2", dtype="bf16", accumulate=2)
    watched = Watched(session, group)
    wrap(session, group)
    errors = []
    for step in range(4):
        for micro in range(2):
            # The first rank looks nothing up in the first step.
            draw = torch.Generator().manual_seed(10 * step + dist.get_rank() + micro)
            rows = torch.randint(0, 8, (5, 2), generator=draw)
            with session.autocast():
                out = session.model(rows[: 0 if step + dist.get_rank() == 0 else 5])
            session.backward(out.float().square().sum())
            session.step()
        errors += watched.errors()
    return {"gap": worst(errors), "all": all_of(session)}


def buffers(group: Group) -> dict[str, Any]:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    session = prepared(model, accumulate=2)
    found: list[Tensor] = []
    norm = model[1]
    norm.register_forward_pre_hook(lambda *_: found.append(norm.running_mean.clone()))
    wrap(session, group)
    for step in range(4):
        one_step(session, step, 2)
    return {"begins": found[::2], "moved": [float((f != 0).any()) for f in found[2::2]]}


def hooked(group: Group) -> dict[str, Any]:
    session = prepared(net(0), accumulate=2)
    wrap(session, group)
    asked = [0]

    def hook(state: Any, bucket: Any) -> Any:
        asked[-1] += 1
        return bf16_compress_hook(state, bucket)

    hook.__annotations__.clear()  # DDP wants types there, and these are strings
    session.model.register_comm_hook(group, hook)
    with no_false_alarm():
        for micro in range(4):
            micro_batch(session, batch(micro))
            asked.append(0)
    return {"asked": asked[:-1], "all": all_of(session)}


def joined(group: Group) -> dict[str, Any]:
    said = ""
    session = prepared(net(0))
    wrap(session, group)
    try:
        with session.model.join():
            one_step(session, 0)
    except hs.UserError as error:
        said = str(error)
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")
    wrap(session, group)
    with session.model.join():
        for step in range(2 + dist.get_rank()):
            one_step(session, step)
    return {"said": said, "weights": session.weights()}


def ignored(group: Group) -> dict[str, Any]:
    session = prepared(net(0), accumulate=2)
    names = ["3.weight"]
    hide = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    hide(session.model, names)
    wrap(session, group)
    for step in range(4):
        one_step(session, step, 2)
    weights = session.weights()
    own = weights.pop("3.weight")
    return {"shared": {n: w for n, w in weights.items() if n[0] == "3"}, "own": own}


def released(group: Group, form: str) -> dict[str, Any]:
    found = []
    for release in (True, False):
        session = prepared(net(1), master=form, optimizer_in_backward=release)
        wrap(session, group)
        for step in range(8):
            one_step(session, step)
        found.append(all_of(session))
    return {"released": found[0], "ordinary": found[1]}


def uneven(group: Group) -> dict[str, Any]:
    session = prepared(net(0), accumulate=3)
    watched = Watched(session, group)
    wrap(session, group)
    errors = []
    for step in range(4):
        for micro in range(3):
            rows = 1 + (micro + dist.get_rank()) % 4
            micro_batch(session, batch(3 * step + micro)[:rows])
        errors += watched.errors()
    return {"gap": worst(errors), "all": all_of(session)}


OTHERS: dict[str, Callable[[Group], dict[str, Any]]] = {
    "sparse": sparse,
    "uneven": uneven,
}
CASES |= {
    **ranks.cases(mean, *MEANS),
    **ranks.cases(unused, 1, 3),
    **ranks.cases(subgroups, 2),
    **ranks.cases(released, "split"),
    **OTHERS,
    "buffers": buffers,
    "hooked": hooked,
    "joined": joined,
    "ignored": ignored,
}


@pytest.mark.parametrize("run", MEANS, ids=str)
def test_settings(seen: list[dict[str, Any]], run: tuple[str, int, str]) -> None:
    """Law: however DDP is set up, gradients are the mean within one message's bound."""
    found = agreed(seen, f"mean {run}", "all", "gap")
    # Without masters micro-batches add up in bf16, which rounds more than once.
    assert found["gap"] <= (1 if run[1] == 1 or run[2] == "fp32" else run[1])


@pytest.mark.parametrize("case", ["unused 1", "unused 3", *OTHERS])
def test_gradients_of_other_kinds(seen: list[dict[str, Any]], case: str) -> None:
    """Law: sparse ones, and those of batches of any size, are averaged alike.

    A rank that did not use a parameter counts as 0; nobody's is left alone.
    """
    found = agreed(seen, case)
    assert found["gap"] <= 1
    assert case in OTHERS or found["kept"]


def test_groups_of_their_own(seen: list[dict[str, Any]]) -> None:
    """Law: ranks share what they begin with, and gradients, within their group."""
    found = saw(seen, "subgroups 2")
    half = len(found) // 2
    for rank in found:
        assert rank["gap"] <= 1
    for members in (found[:half], found[half:]):
        assert all(same(member["all"], members[0]["all"]) for member in members)
    assert not same(found[0]["all"], found[-1]["all"])


def test_buffers(seen: list[dict[str, Any]]) -> None:
    """Law: every step begins with the first rank's buffers, as in DDP alone."""
    found = agreed(seen, "buffers", "begins")
    assert found["moved"] == [1.0] * 3


def test_communication_hooks(seen: list[dict[str, Any]]) -> None:
    """Law: who registers a hook is asked in each backward pass."""
    found = agreed(seen, "hooked")
    # Once for what is in bf16, once for what is in fp32.
    assert found["asked"] == [2] * 4


def test_join(seen: list[dict[str, Any]]) -> None:
    """Law: ranks may run out of data where no masters would miss it."""
    found = agreed(seen, "joined")
    assert "join()" in found["said"]


def test_ignored_parameters(seen: list[dict[str, Any]]) -> None:
    """Law: what DDP was told to leave alone is each rank's own."""
    found = saw(seen, "ignored")
    agreed(seen, "ignored", "shared")
    assert not torch.equal(found[0]["own"], found[1]["own"])


def test_released(seen: list[dict[str, Any]]) -> None:
    """Law: under DDP too, updates inside the backward pass are the same to the bit."""
    found = agreed(seen, "released split")
    assert same(found["released"], found["ordinary"])
