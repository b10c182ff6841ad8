"""First bad operation: a replay leaves a model exactly as it was."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

X = torch.linspace(-1, 1, 32).view(4, 8)


def buffers(model: nn.Module) -> None:
    """Register two, one of a size that a set remembers; replace and resize others."""
    if not hasattr(model, "table"):
        model.register_buffer("table", torch.ones(8))
    if 8 not in model.sizes:
        model.sizes.add(8)
        model.register_buffer("mask8", torch.ones(8), persistent=False)
    model.old = torch.zeros(len(model.old) + 1)
    model.older.resize_(5).fill_(7)


def removed(model: nn.Module) -> None:
    if hasattr(model, "old"):
        del model.old


def weights(model: nn.Module) -> None:
    """Write into a weight and its gradient, as a table with a largest norm does."""
    with torch.no_grad():
        model.inner.weight.mul_(0.5)
    model.inner.weight.grad.zero_()
    model.inner.bias.requires_grad_(requires_grad=False)


def memory(model: nn.Module) -> None:
    """Put other memory under weights, one in another format, and write there."""
    weight, bias = model.inner.weight, model.inner.bias
    weight.data = weight.data * 0.5
    weight.data.add_(1)
    bias.data.add_(1)
    bias.data = bias.data.half()


def modules(model: nn.Module) -> None:
    model.eval()
    model.inner.register_forward_hook(lambda *_: None)
    model.register_full_backward_pre_hook(lambda *_: None)
    model.register_parameter("more", nn.Parameter(torch.zeros(2)))
    model.add_module("other", nn.Linear(2, 2))


def containers(model: nn.Module) -> None:
    """Count, list, and write into a tensor that is no buffer."""
    model.calls += 1
    model.seen.append(1)
    model.deep["a"].append(2)
    model.plain.add_(1)
    model.state[1][0].add_(1)
    model.kinds["a"] += 1


def random_numbers(model: nn.Module) -> None:
    import numpy as np

    del model
    torch.rand(3)
    random.random()  # noqa: S311 -- no secret
    np.random.rand(3)  # noqa: NPY002 -- what old layers drop by


class Restless(nn.Module):
    """A layer that changes something in each pass."""

    old: Tensor

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("old", torch.ones(3))
        self.register_buffer("older", torch.ones(3))
        self.sizes: set[int] = set()
        self.seen: list[int] = []
        self.deep: dict[str, list[int]] = {"a": [1]}
        self.plain, self.calls = torch.zeros(2), 0
        self.state = 0, (torch.zeros(2), torch.zeros(2))
        self.kinds = Counter("ab")
        self.inner.weight.grad = torch.ones(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.change(self)
        return out


def state(model: nn.Module) -> dict[str, Any]:
    """Return all that can be told of a model, and of random numbers."""
    import numpy as np

    found: dict[str, Any] = {"random": random.getstate()}
    found["torch"] = torch.get_rng_state().tolist()
    found["numpy"] = np.random.get_state()[1].tolist()  # noqa: NPY002
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = repr(value)
    for name, param in model.named_parameters():
        found[name] = id(param), param.tolist(), param.requires_grad
        found[f"{name}.data"] = param.data_ptr(), param.dtype
        found[f"{name}.grad"] = id(param.grad), repr(param.grad)
    for name, buffer in model.named_buffers():
        found[name] = id(buffer), buffer.tolist()
    return found


CHANGES = buffers, removed, weights, memory, modules, containers, random_numbers


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("ends", ["well", "badly", "raised"])
def test_nothing_is_left_behind(change: Callable[[nn.Module], None], ends: str) -> None:
    """Law: whatever a pass does to its model is undone, however the replay ends."""
    model = Restless(change)
    before = state(model)

    def step() -> Tensor:
        out = model(X).sum()
        if ends == "raised":
            raise KeyError(ends)
        return out * float("nan" if ends == "badly" else 1)

    if ends == "raised":
        with pytest.raises(KeyError):
            hs.find_nonfinite(model, step)
    else:
        assert (not hs.find_nonfinite(model, step)) == (ends == "well")
    assert state(model) == before
    # What it remembers of its buffers fits them.
    assert model(X).shape == X.shape
    assert state(model) != before


def test_weights_that_nobody_writes_are_not_copied() -> None:
    """Law: the versions of weights and buffers tell of no write."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval())

    def versions() -> list[int]:
        return [tensor._version for tensor in (*model.parameters(), *model.buffers())]

    before = versions()
    assert not hs.find_nonfinite(model, lambda: model(X).sum())
    assert versions() == before


def test_rules_on_modules_still_act() -> None:
    """Law: hooks of a region that was first opened in a replay come again after it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def run() -> Tensor:
        policy = "torch + module:0=fp32"
        with hs.autocast("cpu", torch.float16, policy=policy, model=model):
            return model[0](X)

    assert not hs.find_nonfinite(model, lambda: run().sum())
    assert run().dtype == torch.float32
