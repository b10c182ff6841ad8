"""Regions under policies: inside one another, around model code, and what they say."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.dtype_mismatch import DtypeMismatch
from halfstep.casting.weight_cache import CastCache
from halfstep.policy import LEAN, TORCH, Policy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
A, V = torch.eye(4), torch.ones(4)


def mm() -> torch.dtype:
    return A.mm(A).dtype


def mv() -> torch.dtype:
    """Return in which dtype a product with a vector runs."""
    return A.mv(V).dtype


def ran() -> tuple[torch.dtype, torch.dtype]:
    """Return both: every table has a row for the first, only lean for the second."""
    return mm(), mv()


STOCK, ALL_LOW, NONE_LOW = (BF16, FP32), (BF16, BF16), (FP32, FP32)
MM = "torch + op:mm=fp32"
MV = "torch + op:mv=low"


def test_tables(tmp_path: Path) -> None:
    """Law: what is compared below: nothing, torch's table, the lean one, rules.

    A policy is a word, a `Policy`, a sum of one and a rule, or the path of a file.
    """
    assert ran() == NONE_LOW
    file = tmp_path / "rules.toml"
    Policy.parse(MV).save(file)
    both = "lean + op:mm=fp32"
    for policy, expected in (
        (None, STOCK),
        ("torch", STOCK),
        ("lean", ALL_LOW),
        (MM, NONE_LOW),
        (MV, ALL_LOW),
        (both, (FP32, BF16)),
        (Policy.parse(both), (FP32, BF16)),
        (LEAN + "op:mm=fp32", (FP32, BF16)),
        (file, ALL_LOW),
        (str(file), ALL_LOW),
    ):
        with autocast("cpu", policy=policy):
            assert ran() == expected
            # Inside matmul, mm is not asked about: the outer operation decides.
            assert A.matmul(A).dtype == BF16
        assert ran() == NONE_LOW


@pytest.mark.parametrize("outer", ["lean", MM, MV])
def test_no_policy_is_that_of_the_region_around(outer: str) -> None:
    """Law: policy=None inherits, with its own dtype; "torch" resets; both end."""
    with autocast("cpu", policy=outer):
        before = ran()
        for more in ({}, {"cache": CastCache()}, {"record": True}):
            with autocast("cpu", FP16, **more):
                assert ran() == tuple(FP16 if t == BF16 else t for t in before)
            assert ran() == before
            with autocast("cpu", policy="torch", **more):
                assert ran() == STOCK
        for policy in ("torch", TORCH, Policy()):
            with autocast("cpu", policy=policy):
                with autocast("cpu"):
                    assert ran() == STOCK
                with autocast("cpu", policy="lean"):
                    assert ran() == ALL_LOW
                # Rules of two regions do not add up.
                with autocast("cpu", policy=MM):
                    assert ran() == NONE_LOW
                assert ran() == STOCK
            assert ran() == before


# Model code with regions of torch's


def model_code() -> dict[str, tuple[torch.dtype, torch.dtype]]:
    seen = {"around": ran()}
    with torch.autocast("cpu", enabled=False):
        seen["island"] = ran()
        with torch.autocast("cpu", torch.float16):
            seen["inside the island"] = ran()
    with torch.autocast("cpu", torch.float16):
        seen["other dtype"] = ran()
    with torch.amp.autocast("cpu", torch.bfloat16, cache_enabled=False):
        seen["no cache"] = ran()
    seen["decorated"] = torch.autocast("cpu", enabled=False)(ran)()
    seen["after"] = ran()
    return seen


@pytest.mark.parametrize(
    ("policy", "mm_low", "mv_low"),
    [
        (None, True, False),
        ("torch", True, False),
        ("lean", True, True),
        (MM, False, False),
    ],
)
def test_regions_of_torchs_inside(
    policy: str | None, mm_low: bool, mv_low: bool
) -> None:
    """Law: torch's regions say whether and in which dtype; the policy, for what."""

    def expected(low: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        return low if mm_low else FP32, low if mv_low else FP32

    with autocast("cpu", BF16, policy=policy):
        seen = model_code()
    assert seen == {
        "around": expected(BF16),
        "island": NONE_LOW,
        "inside the island": expected(FP16),
        "other dtype": expected(FP16),
        "no cache": expected(BF16),
        "decorated": NONE_LOW,
        "after": expected(BF16),
    }
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("policy", ["torch", "lean", MM])
def test_an_island_of_ours_is_one(policy: str) -> None:
    """Law: enabled=False is off, whatever policy it is given, in and out of regions."""
    with autocast("cpu", enabled=False, policy=policy):
        assert ran() == NONE_LOW
    with autocast("cpu", policy="lean"):
        with autocast("cpu", enabled=False, policy=policy):
            assert ran() == NONE_LOW
        assert ran() == ALL_LOW


def test_a_region_of_torchs_around_ours() -> None:
    """Law: ours inside torch's is as it is alone, and torch's goes on after it."""
    with torch.autocast("cpu", FP16):
        with autocast("cpu", policy="lean"):
            # Without a dtype it is that of the region around, as in torch.
            assert ran() == (FP16, FP16)
        with autocast("cpu", BF16, policy="lean"):
            assert ran() == ALL_LOW
        assert ran() == (FP16, FP32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
        return self.body(x).dtype, self.head(x).dtype


# What rules say of themselves

_fresh = itertools.count()


def fresh(word: str) -> str:
    """Return a policy that no other test has: each rule is told of once a process."""
    return f"{word} + op:/lgamma|fresh{next(_fresh)}/=fp32"


def test_an_unmatched_rule_is_told_of_once() -> None:
    """Law: a rule that no operation met is warned of when its region ends, once.

    A region that an exception left early warns of nothing.
    """
    word = fresh("torch")
    region = autocast("cpu", policy=word)
    with pytest.raises(KeyError), region:
        raise KeyError
    with pytest.warns(UserWarning, match="matched nothing") as caught, region:
        A.mm(A)
    rule = word.removeprefix("torch + ")
    assert len(caught) == 1
    assert str(caught[0].message) == (
        f"policy rule {rule!r} matched nothing: no such operation or module ran in the "
        "context. An operation inside another, as addmm in linear, follows the outer."
    )
    assert caught[0].filename == __file__
    for again in (region, autocast("cpu", policy=word)):
        with again:  # A warning is an error here.
            A.mm(A)


def test_a_matched_rule_is_not() -> None:
    """Law: a rule that decided something is never warned of, in any region."""
    word = fresh("torch + op:mm=fp32")
    with autocast("cpu", policy=word):
        A.mm(A)
        A.lgamma()
    with autocast("cpu", policy=word):
        A.exp()


@pytest.mark.parametrize("decorated", [False, True])
def test_a_warning_that_is_an_error(decorated: bool) -> None:
    """Law: the warning comes when all is restored."""
    region = autocast("cpu", policy=fresh("torch"))

    def run() -> None:
        with region:
            ran()

    with pytest.raises(UserWarning, match="matched nothing"):
        (region(ran) if decorated else run)()
    assert not torch.is_autocast_enabled("cpu")
    assert active_context.active("cpu") is None


def test_rules_on_modules_match_by_being_entered() -> None:
    """Law: a module rule is met when its module runs, though nothing is cast in it."""
    net = Net()
    word = fresh("torch + module:body=keep + module:head=fp32")
    with autocast("cpu", policy=word, model=net):
        net(A)
        A.lgamma()
    other = word.replace("fresh", "other")
    told = pytest.warns(UserWarning, match="'module:head=fp32' matched nothing")
    with told, autocast("cpu", policy=other, model=net):
        net.body(A)
        A.lgamma()


def attend(x: Tensor, y: Tensor) -> Tensor:
    return torch.dot(x, y)


@pytest.mark.parametrize("policy", [None, "torch", MM])
def test_a_mismatch_is_explained(policy: str | None) -> None:
    """Law: torch's error leaves a region with operation, dtypes and the rule.

    Regions around it pass on the first explanation.
    """
    region = autocast("cpu", policy=policy)
    with pytest.raises(DtypeMismatch) as caught, autocast("cpu"), autocast("cpu", FP16):
        region(attend)(V.bfloat16(), V)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.operation, error.rule) == ("dot", "op:dot=promote")
    assert error.dtypes == (BF16, FP32)
    assert type(error.__cause__) is RuntimeError
    assert not torch.is_autocast_enabled("cpu")
    with autocast("cpu", policy=f"torch + {error.rule}"):
        assert attend(V.bfloat16(), V) == 4
