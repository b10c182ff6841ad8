"""fp32 masters against a plain fp32 loop that is given the same gradients."""

import copy
import functools

import pytest
import torch
from master_cases import adopted
from torch import Tensor, nn

from halfstep.errors import UserError
from halfstep.masters import MasterWeights

LOW = [torch.bfloat16, torch.float16]


def weights(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 3), (5,))]


def gradients(params: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def give(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def test_buffers_are_reused() -> None:
    """Law: from the first step on, gradients and masters lie where they lay."""
    params = weights(torch.bfloat16)
    optimizer = torch.optim.SGD(params, 0.1)
    masters = MasterWeights(optimizer)
    places = set()
    for seed in range(4):
        give(params, gradients(params, seed))
        masters.accumulate_grads()
        owned = adopted(optimizer)
        places.add(tuple(p.grad.data_ptr() for p in owned if p.grad is not None))
        places.add(tuple(p.data_ptr() for p in owned))
        optimizer.step()
        optimizer.zero_grad()
        masters.publish()
    assert len(places) == 2
    assert all(len(place) == 2 for place in places)


def test_originals_are_kept_exactly() -> None:
    """Law: a master starts from the fp32 value it is given, not the rounded one."""
    (weight, other) = weights(torch.bfloat16)
    original = weight.detach().float() + 2.0**-20
    optimizer = torch.optim.SGD([weight, other], 0.1)
    masters = MasterWeights(optimizer, {weight: original})
    first, second = adopted(optimizer)
    assert torch.equal(first, original)
    assert first.data_ptr() == original.data_ptr()
    assert torch.equal(second, other.float())
    assert masters.model_param(first) is weight
    assert masters.model_param(weight) is weight


def test_existing_state_moves_along() -> None:
    """Law: momentum gathered before adoption counts on, in fp32, under the master."""
    make = functools.partial(torch.optim.AdamW, lr=0.01)
    params = weights(torch.bfloat16)
    optimizer = make(params)
    give(params, gradients(params, 0))
    optimizer.step()
    twins = [nn.Parameter(p.detach().float()) for p in params]
    reference = make(twins)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    masters = MasterWeights(optimizer)
    assert set(optimizer.state) == set(adopted(optimizer))
    give(params, gradients(params, 1))
    give(twins, [grad.float() for grad in gradients(params, 1)])
    masters.accumulate_grads()
    optimizer.step()
    reference.step()
    assert all(map(torch.equal, adopted(optimizer), twins))
    assert [entry["step"].item() for entry in optimizer.state.values()] == [2.0, 2.0]
    assert {e["exp_avg"].dtype for e in optimizer.state.values()} == {torch.float32}


def test_sparse_gradients() -> None:
    """Law: sparse gradients stay sparse, add up in fp32, and SparseAdam takes them."""
    table = nn.Embedding(10, 4, sparse=True, dtype=torch.bfloat16)
    twin = nn.Embedding(10, 4, sparse=True)
    twin.load_state_dict(table.state_dict())
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    reference = torch.optim.SparseAdam(twin.parameters(), 0.1)
    masters = MasterWeights(optimizer)
    for batch in ([1, 1, 7], [7, 2, 2]):
        for rows in (batch, [3, 1, 3]):
            # Small whole numbers: sums are exact in bf16 too, so one twin serves.
            for model in (table, twin):
                columns = torch.tensor([1.0, 2.0, 3.0, 4.0])
                torch.autograd.backward((model(torch.tensor(rows)) * columns).sum())
            masters.accumulate_grads()
        (master,) = adopted(optimizer)
        assert master.grad.is_sparse
        assert torch.equal(master.grad.to_dense(), twin.weight.grad.to_dense())
        optimizer.step()  # type: ignore[no-untyped-call]
        reference.step()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        reference.zero_grad()
        masters.publish()
    assert torch.equal(table.weight, twin.weight.bfloat16())


def test_masters_are_asked_for() -> None:
    """Law: master="none" has no master weights, and other words no meaning."""
    for word, text in (("none", "keeps no master weights"), ("fp64", "is not a form")):
        with pytest.raises(UserError, match=text):
            MasterWeights(torch.optim.SGD(weights(torch.bfloat16), 0.1), master=word)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("numel", [1 << 16, (1 << 16) + 7])
def test_large_sums_are_added_up_exactly(low: torch.dtype, numel: int) -> None:
    """Law: what a kernel adds up is what torch does, to the bit, inf and NaN too."""
    param = nn.Parameter(torch.zeros(numel, dtype=low))
    masters = MasterWeights(torch.optim.SGD([param], lr=0.1))
    total = torch.zeros(numel)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        part = (torch.randn(numel, generator=generator) * 100).to(low)
        part[5], part[6] = torch.inf, torch.nan
        param.grad = part.clone()
        total += part
        masters.accumulate_grads()
    (master,) = adopted(masters.optimizer)
    torch.testing.assert_close(master.grad, total, rtol=0, atol=0, equal_nan=True)
