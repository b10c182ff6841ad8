"""A probe under DDP and FSDP2, over two ranks.

Under torchrun, `ranks` runs the cases of this file in each of several processes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import ranks
from tests.diagnostics.test_probe import NAN, X, net
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from halfstep.numerics.tensor_stats import measure

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from torch import nn

MODES = ("flags", "full")
KINDS = ("ddp", "fsdp")


def _wrapped(kind: str, group: dist.ProcessGroup) -> nn.Module:
    model = net()
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model[1], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _case(
    kind: str, mode: Any, *, over_ranks: bool
) -> Callable[[dist.ProcessGroup], dict[str, Any]]:
    """Return a program: a clean step, one that is bad on the second rank, a clean one.

    Each rank has its own part of the batch.
    """

    def case(group: dist.ProcessGroup) -> dict[str, Any]:
        model = _wrapped(kind, group)
        inner = model.module if kind == "ddp" else model
        found, counted = [], {}
        with hs.Probe(model, mode, over_ranks=over_ranks, group=group) as probe:
            for number in range(3):
                bad = number == 1 and group.rank() == 1
                inner[1].broken.backward_value = NAN if bad else None
                model.zero_grad()
                model(X[group.rank() :: 2]).square().sum().backward()
                probe.step()
                found.append(probe.non_finite)
            counted = {name: stats.data() for name, stats in probe.stats.items()}
            grads = {
                f"{name}:grad": _whole(parameter.grad)
                for name, parameter in inner.named_parameters()
            }
        return {"found": found, "stats": counted, "grads": grads}

    return case


def _whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


CASES = {
    f"{kind} {mode} {'all' if over_ranks else 'own'}": _case(
        kind, mode, over_ranks=over_ranks
    )
    for kind in KINDS
    for mode in MODES
    for over_ranks in (False, True)
}


def _saw(case: str) -> list[dict[str, Any]]:
    return ranks.saw(ranks.start(2, ("tests.diagnostics.test_probe_ranks",)), case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_sees_its_own(kind: str, mode: str) -> None:
    """Law: what broke on one rank is flagged there; gradients, once averaged, on both.

    They are looked at when DDP and FSDP2 have finished them.
    """
    for rank, seen in enumerate(_saw(f"{kind} {mode} own")):
        clean, bad, after = seen["found"]
        assert clean == after == ()
        assert ("1.first:grad" in bad) == (rank == 1)
        assert "0.weight:grad" in bad
        assert not [name for name in bad if name.endswith(":output")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_over_ranks(kind: str, mode: str) -> None:
    """Law: over ranks all say the same, and begin with what broke."""
    first, second = _saw(f"{kind} {mode} all")
    assert {*first["found"][1]} == {*second["found"][1]}
    assert second["found"][1][0] == "1.first:grad"
    assert "1.first:grad" in first["found"][1]
    assert first["found"][0] == first["found"][2] == ()
    for name, stats in first["stats"].items():
        assert stats["count"] == second["stats"][name]["count"]
        assert stats["exponents"] == second["stats"][name]["exponents"]


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_over_ranks(kind: str) -> None:
    """Law: statistics over ranks are those of all ranks' numbers, to the bit.

    Counts are added, and the largest is the largest of any rank. Together ranks count
    the whole batch and whole weights; under DDP each has all of a weight's gradient.
    """
    (first, _) = _saw(f"{kind} full all")
    own = [seen["stats"] for seen in _saw(f"{kind} full own")]
    model = net()
    with hs.Probe(model, "full") as probe:
        model(X).square().sum().backward()
        probe.step()
        counts = {name: probe.stats[name].count for name in probe.names}
    assert counts.keys() == first["stats"].keys()
    for name, stats in first["stats"].items():
        of_ranks = [each[name] for each in own]
        times = 2 if kind == "ddp" and name in first["grads"] else 1
        added = sum((Counter(each["exponents"]) for each in of_ranks), Counter())
        assert stats["count"] == times * counts[name], name
        assert stats["exponents"] == added, name
        assert stats["amax"] == max(each["amax"] for each in of_ranks), name
        if name in first["grads"]:
            assert stats["amax"] == measure(first["grads"][name]).amax, name
