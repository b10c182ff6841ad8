"""Sessions of one to three losses, with inf planted in each backward pass in turn.

In: which backward pass of which iteration leaves inf in whose gradient. Out: weights
and optimizer state, compared to the bit with a plain fp32 loop that knows no scaler and
leaves out the same optimizer steps.

Scales are powers of two, by which fp32 multiplies and divides without rounding.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ranks
import torch
from grids import thinned
from master_cases import masters_of
from session_cases import same
from torch import Tensor, nn, optim

import halfstep as hs
from halfstep.scaling import ScaleRule

Make = Callable[[Any], optim.Optimizer]

ITERATIONS = 4
INF = math.inf
# Rates are powers of two, as weights and gradients of a session's model are short.
SGD = functools.partial(optim.SGD, lr=2.0**-4, momentum=0.5)
ADAMW = functools.partial(optim.AdamW, lr=2.0**-4)


@dataclass(frozen=True)
class Plant:
    iteration: int
    loss: int
    model: int
    value: float = INF


Plants = tuple[Plant, ...]


def _name(plants: Plants) -> str:
    return " ".join(f"{p.iteration}.{p.loss}.{p.model}" for p in plants) or "clean"


def _bits(
    params: Sequence[Tensor], optimizers: Sequence[optim.Optimizer]
) -> dict[str, Tensor]:
    """Return weights and state; state that is 0 throughout is as good as none."""
    found = {str(n): param.detach() for n, param in enumerate(params)}
    for which, optimizer in enumerate(optimizers):
        for number, param in enumerate(optimizer.param_groups[0]["params"]):
            for key, value in optimizer.state.get(param, {}).items():
                if value is not None and torch.as_tensor(value).any():
                    found[f"{which} {number} {key}"] = torch.as_tensor(value)
    return found


def _planted(model: nn.Module, value: float) -> Any:
    """Let the gradient of a model's first bias have a bad number; return the hook."""
    bias = next(param for param in model.parameters() if param.dim() == 1)
    at = torch.tensor([1])
    register: Any = bias.register_hook
    return register(lambda gradient: gradient.index_fill(0, at, value))


class Short(nn.Module):
    """A model whose gradients are whole numbers up to 8, whatever its weights are.

    bf16 holds them, fp16 too when they are scaled; so each level must come to the same
    fp32 weights as fp32 training does.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.cat([self.first(batch), self.second(batch)], 1)


def _short_loss(model: nn.Module, iteration: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * iteration + number)
    batch = torch.randint(-2, 3, (4, 4), generator=generator).float()
    signs = torch.randint(-1, 2, (4, 5), generator=generator).float()
    outputs: Tensor = model(batch).float()
    return (outputs * signs).sum()


@functools.cache
def _short_reference(
    make: Make, losses: int, skipped: frozenset[int]
) -> dict[str, Tensor]:
    model = Short()
    optimizer = make(model.parameters())
    for iteration in range(ITERATIONS):
        for number in range(losses):
            torch.autograd.backward(_short_loss(model, iteration, number))
        if iteration not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    return _bits([*model.parameters()], [optimizer])


PLACES: dict[str, Any] = {
    f"{losses} losses inf {_name(places)}": (losses, places)
    for losses in (1, 2, 3)
    for places in (
        (),
        *((Plant(i, n, n % 2),) for i in (0, 2) for n in range(losses)),
        (Plant(1, 0, 1), Plant(2, losses - 1, 0, math.nan)),
        (Plant(0, 0, 0, -INF), Plant(0, losses - 1, 1)),
    )
}
SESSIONS: dict[str, Any] = {
    f"{kind}-{'own scales' if names else 'one scale'}-{name}": (kind, names, make)
    for kind in ("O0 fp32", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16")
    for names in ("", "abc")
    for name, make in (("sgd", SGD), ("adamw", ADAMW))
}


@pytest.mark.parametrize(
    ("losses", "plants", "kind", "names", "make"), thinned(PLACES, SESSIONS, 5)
)
def test_session(
    losses: int, plants: Plants, kind: str, names: str, make: Make
) -> None:
    """Law: at each level, inf in any pass skips the step; only its own scale falls."""
    model = Short()
    level, dtype = kind.split()
    rule = ScaleRule(2.0**7, growth_interval=2)
    session = hs.prepare(
        model, make(model.parameters()), level, dtype=dtype, loss_scale=rule
    )
    if make is ADAMW:
        # The compiled arithmetic of Adam is torch's up to its last bits.
        masters_of(session).kernel = None
    scales = []
    for iteration in range(ITERATIONS):
        spoilt = []
        for number in range(losses):
            bad = [p for p in plants if (p.iteration, p.loss) == (iteration, number)]
            layers = [(model.first, model.second)[plant.model] for plant in bad]
            hooks = [_planted(x, p.value) for x, p in zip(layers, bad, strict=True)]
            with session.autocast():
                loss = _short_loss(session.model, iteration, number)
            session.backward(loss, name=names[number : number + 1])
            for hook in hooks:
                hook.remove()
            spoilt += [("first.bias", "second.bias")[plant.model] for plant in bad]
        report = session.step()
        assert (report.skipped, report.applied) == (bool(spoilt), not spoilt)
        assert report.found_inf_in == tuple(sorted(set(spoilt)))
        state = session.state_dict()["scales"]
        scales.append({name: one["scale"] for name, one in state.items()})
    skipped = frozenset(plant.iteration for plant in plants)
    ours = _bits([*session.weights().values()], [session.optimizer])
    same(ours, _short_reference(make, losses, skipped))
    for number, name in enumerate(names[:losses] or [""]):
        bad_here = {p.iteration for p in plants if not names or p.loss == number}
        expected = ranks.scales(bad_here, 2.0**7, ITERATIONS, interval=2)
        assert [scale[name] for scale in scales] == expected[1:]
