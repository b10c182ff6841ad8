"""Graphs that an autopsy must leave as they are, and not accuse without cause."""

import math
from collections.abc import Callable

import pytest
import torch
from calls import calls_of
from planted_faults import HEALTHY, planted
from processes import group_of_one
from required import required
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep.nonfinite.graph import find_in_graph
from halfstep.nonfinite.origin import BadOp

FP16, FP32 = torch.float16, torch.float32
INF, NAN = math.inf, math.nan
TARGETS = torch.tensor([0, 1, 2, 0])


SPOILT = ("mlp data nan", "t5 overflow plain", "bert zero row plain")


def name(parameter: Tensor) -> str:
    return f"w{tuple(parameter.shape)}".replace(" ", "")


@pytest.mark.parametrize("fault", [*HEALTHY, *SPOILT])
def test_the_backward_pass_is_the_same_afterwards(fault: str) -> None:
    """Law: gradients and buffers are bit for bit those of a pass not examined.

    Where loss and gradients are finite, nothing is found.
    """
    twin, run = planted(fault), planted(fault)
    finding = None
    with group_of_one():
        for one in (twin, run):
            torch.manual_seed(3)
            loss = one.step(one.wrapped())
            if one is run:
                finding = find_in_graph(loss, name)
            torch.autograd.backward(loss)
    assert (finding is None) == (fault in HEALTHY), finding
    for (key, mine), (_, theirs) in zip(
        run.model.named_parameters(), twin.model.named_parameters(), strict=True
    ):
        if mine.grad is None or theirs.grad is None:
            assert mine.grad is theirs.grad, key
        else:
            bits = (mine.grad.view(torch.int32), theirs.grad.view(torch.int32))
            assert torch.equal(*bits), key
    for key, buffer in run.model.named_buffers():
        torch.testing.assert_close(
            buffer, twin.model.get_buffer(key), rtol=0, atol=0, equal_nan=True
        )


def test_hooks_on_saved_tensors_are_not_called() -> None:
    """Law: what was offloaded or is recomputed is not brought back, and so it says."""
    unpacked = []
    weight = nn.Parameter(torch.zeros(3))

    def unpack(value: Tensor) -> Tensor:
        unpacked.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        loss = weight.exp().log().log().sum()
    finding = find_in_graph(loss, name)
    assert not unpacked
    assert finding is not None
    assert finding.evidence.startswith("exp (w(3,)) to sum: ")
    assert "not read" in finding.evidence
    assert "Switch that off" in finding.advice
    torch.autograd.backward(loss)
    assert len(unpacked) == 3


def test_a_recomputed_block_that_overflows_is_told_by_its_ends() -> None:
    """Law: behind a checkpoint no operation is accused, and the way to it is shown."""
    x, inner, outer = torch.full((4, 8), 256.0), nn.Linear(8, 8), nn.Linear(8, 3)
    with torch.no_grad():
        inner.weight.fill_(32.0)  # 8 * 256 * 32 = 65536
    with torch.autocast("cpu", FP16):
        hidden = checkpoint(inner, x, use_reentrant=False)
        loss = functional.cross_entropy(outer(hidden), TARGETS)
    finding = required(find_in_graph(loss, name))
    assert finding.cause == "forward range"
    assert "w(8,8)" in finding.evidence
    assert "not read" in finding.evidence


def test_what_cannot_be_read_is_passed_over() -> None:
    """Law: a saved tensor that was freed or changed in place is no error."""
    weight = nn.Parameter(torch.ones(3))
    changed = weight.exp()
    loss = changed.sum()
    changed.add_(1)
    assert find_in_graph(loss, name) is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)
    freed = (weight * INF - weight * INF).sum()
    torch.autograd.backward(freed)
    finding = required(find_in_graph(freed, name))
    assert finding.cause == "zero"


def searched(depth: int) -> tuple[BadOp | None, int]:
    """Return what is found behind so many pairs of nodes, and the calls it took."""
    weight = nn.Parameter(torch.ones(2))
    value: Tensor = weight
    for _ in range(depth):
        value = (value + 1).neg()
    assert find_in_graph(value.sum(), name) is None
    loss = (value * 0).log().sum()
    return calls_of(lambda: find_in_graph(loss, name))


def test_a_graph_of_thousands_of_nodes_is_no_burden() -> None:
    """Law: depth costs no recursion; twice the depth is about twice the work."""
    finding, calls = searched(1250)
    assert searched(2500)[1] < 2.1 * calls
    assert finding is not None
    assert finding.evidence.startswith("log, after add (w(2,)): ")


def test_a_loss_without_a_graph_says_nothing() -> None:
    """Law: where there is no graph there is nothing to find."""
    assert find_in_graph(torch.tensor(NAN), name) is None
    assert find_in_graph(nn.Parameter(torch.tensor(NAN)), name) is None


def scores(finite: float = 0.0) -> tuple[nn.Parameter, Tensor]:
    """Return a leaf and 2 rows of 3 scores, of which the causal mask takes 3."""
    leaf = nn.Parameter(torch.full((2, 3), finite))
    return leaf, torch.tensor([[False, True, True], [False, False, True]])


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda x, mask: x.masked_fill(mask, -INF),
    "added": lambda x, mask: x + torch.zeros(2, 3).masked_fill(mask, -INF),
    "chosen": lambda x, mask: torch.where(mask, -INF, x),
    "lowest": lambda x, mask: x.masked_fill(mask, torch.finfo(FP32).min),
}
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "exp": torch.exp,
    "logsumexp": lambda x: x.logsumexp(1),
    "maximum": lambda x: x.amax(1),
    "loss": lambda x: functional.cross_entropy(x, torch.tensor([0, 1])),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_masks_are_legal(
    mask: Callable[[Tensor, Tensor], Tensor], use: Callable[[Tensor], Tensor]
) -> None:
    """Law: -inf that is used up is not named: alone, or before a true cause."""
    leaf, hidden = scores()
    used = use(mask(leaf, hidden))
    assert find_in_graph(used.sum(), name) is None
    finding = required(find_in_graph((used * 0).log().sum(), name))
    assert finding.evidence.startswith("log, after ")
    assert ": its argument is 0" in finding.evidence


def test_an_operand_of_inf_may_be_legal() -> None:
    """Law: a bound of -inf in maximum() is not taken for what was added after it."""
    leaf, _ = scores()
    bounded = torch.maximum(leaf, torch.full((2, 3), -INF))
    finding = required(find_in_graph((bounded + NAN).sum(), name))
    assert "NaN comes in" in finding.evidence


def test_a_masked_target_is_found() -> None:
    """Law: cross entropy of a class that a mask took out is told as that."""
    leaf, hidden = scores()
    masked = leaf.masked_fill(hidden, -INF)
    finding = required(
        find_in_graph(functional.cross_entropy(masked, torch.tensor([1, 1])), name)
    )
    assert (finding.cause, finding.evidence[:11]) == ("zero", "log_softmax")
    assert "a target names a class that is masked" in finding.evidence
    assert "mask no class that a target names" in finding.advice


def test_targets_that_are_all_ignored_are_found() -> None:
    """Law: a mean over no target is told as that."""
    leaf, _ = scores()
    loss = functional.cross_entropy(leaf, torch.full((2,), -100))
    finding = required(find_in_graph(loss, name))
    assert finding.cause == "label"
    assert str(finding) == (
        "model produced NaN: nll_loss, after log_softmax (w(2,3)): its mean is over "
        "nothing: every label is -100, or weighs 0. Skip such a batch, or divide a sum "
        "by max(count, 1)."
    )


class Chain(nn.Module):
    """Two layers, then a logarithm: three places where something may be planted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float) -> Tensor:
        size: Tensor = self.outer(self.inner(x)).abs() + 1e-3
        return (size * factor).log().sum()


@pytest.mark.parametrize(
    ("planted", "where"),
    [
        ("data weight zero", "model: the input of linear (inner.weight, inner.bias): "),
        ("weight zero", "outer: outer.bias: "),
        ("zero", "model: log, after linear (outer.weight, outer.bias): "),
    ],
)
def test_the_first_in_forward_order_is_named(planted: str, where: str) -> None:
    """Law: of several causes the one upstream is named."""
    model, x = Chain(), torch.randn(4, 8)
    if "data" in planted:
        x[0, 0] = NAN
    if "weight" in planted:
        with torch.no_grad():
            model.outer.bias[0] = NAN
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    loss = model(x, 0.0)
    finding = required(find_in_graph(loss, lambda parameter: names[id(parameter)]))
    assert finding.cause == planted.partition(" ")[0]
    assert f"{finding.place}: {finding.evidence}".startswith(where)


def test_running_statistics_count_where_they_are_used() -> None:
    """Law: NaN in a batch norm's buffers is no cause in training, one in evaluation."""
    norm, x = nn.BatchNorm1d(8), nn.Parameter(torch.randn(4, 8))
    assert norm.running_mean is not None
    norm.running_mean.fill_(NAN)
    assert find_in_graph(norm(x).sum(), name) is None
    finding = required(find_in_graph((norm(x) + NAN).sum(), name))
    assert "NaN comes in" in finding.evidence
    finding = required(find_in_graph(norm.eval()(x).sum(), name))
    assert finding.cause == "data"
    where = "the running_mean of batch_norm (w(8,), w(4,8))"
    assert "reset_running_stats()" in finding.advice
    assert finding.evidence == f"{where}: it holds NaN at 8 of 8 places"
