"""What DDP can be told, beside master weights: the mean stays the mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import FOUR, agreed, batch, cases, saw, start
from small_training import same
from tests.session.test_ddp_sync import (
    FILES,
    Watched,
    all_of,
    net,
    no_false_alarm,
    one_step,
    prepared,
    truths,
    worst,
    wrap,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import halfstep as hs

Group = dist.ProcessGroup

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "views, static": {"gradient_as_bucket_view": True, "static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
MEANS = [
    (setting, *more) for setting in SETTINGS for more in ((1, "none"), (3, "fp32"))
] + [("views, static", 3, "none")]


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
            with session.autocast():
                loss = session.model(batch(micro)).float().square().mean()
            session.backward(loss)
            session.step()
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
    hide = torch.nn.parallel.DistributedDataParallel
    hide._set_params_and_buffers_to_ignore_for_model(session.model, names)
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
            inputs = batch(3 * step + micro)[: 1 + (micro + dist.get_rank()) % 4]
            with session.autocast():
                loss = session.model(inputs).float().square().mean()
            session.backward(loss)
            session.step()
        errors += watched.errors()
    return {"gap": worst(errors), "all": all_of(session)}


OTHERS: dict[str, Callable[[Group], dict[str, Any]]] = {
    "sparse": sparse,
    "uneven": uneven,
}
CASES: dict[str, Callable[[Group], dict[str, Any]]] = {
    **cases(mean, *MEANS),
    **cases(unused, 1, 2, 3),
    **cases(subgroups, 1, 2),
    **cases(released, "fp32", "split"),
    **OTHERS,
    "buffers": buffers,
    "hooked": hooked,
    "joined": joined,
    "ignored": ignored,
}


@pytest.fixture(scope="module", params=[2, FOUR])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param, FILES)


@pytest.mark.parametrize("run", MEANS, ids=str)
def test_settings(seen: list[dict[str, Any]], run: tuple[str, int, str]) -> None:
    """Law: however DDP is set up, gradients are the mean within one message's bound."""
    found = agreed(seen, f"mean {run}", "all", "gap")
    # Without masters micro-batches add up in bf16, which rounds more than once.
    assert found["gap"] <= (1 if run[1] == 1 or run[2] == "fp32" else run[1])


@pytest.mark.parametrize("case", [*(f"unused {n}" for n in (1, 2, 3)), *OTHERS])
def test_gradients_of_other_kinds(seen: list[dict[str, Any]], case: str) -> None:
    """Law: sparse ones, and those of batches of any size, are averaged alike.

    A rank that did not use a parameter counts as 0; nobody's is left alone.
    """
    found = agreed(seen, case)
    assert found["gap"] <= 1
    assert case in OTHERS or found["kept"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_groups_of_their_own(seen: list[dict[str, Any]], accumulate: int) -> None:
    """Law: ranks share what they begin with, and gradients, within their group."""
    found = saw(seen, f"subgroups {accumulate}")
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


@pytest.mark.parametrize("form", ["fp32", "split"])
def test_released(seen: list[dict[str, Any]], form: str) -> None:
    """Law: under DDP too, updates inside the backward pass are the same to the bit."""
    found = agreed(seen, f"released {form}")
    assert same(found["released"], found["ordinary"])
