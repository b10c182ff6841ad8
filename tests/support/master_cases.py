"""Sessions over masters whose gradients a test chooses, beside plain fp32 loops.

In: a make of an optimizer, a form of masters. Out: a session of a model whose loss has
the given slopes; the gradients its 16-bit weights saw; torch's own optimizer in fp32
that goes on from what the session has stored.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.masters import MasterWeights
from halfstep.scaling.step_report import StepReport
from halfstep.session.session import Session

Make = Callable[[Any], torch.optim.Optimizer]


FORMS = ("fp32", "split", "kahan", "stochastic")
LEAN = FORMS[1:]
SGD: Make = partial(torch.optim.SGD, lr=0.05)
MOMENTUM: Make = partial(
    torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
)
ADAM: Make = partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1)
ADAMW_PLAIN: Make = torch.optim.AdamW
ADAMW: Make = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
NADAM: Make = partial(torch.optim.NAdam, lr=0.01)
BUILT_IN: dict[str, Make] = {
    "sgd": SGD,
    "damped sgd": partial(
        torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, maximize=True
    ),
    "nesterov": MOMENTUM,
    "adam": ADAM,
    "adamw": ADAMW,
}
"""Those whose arithmetic the kernels know."""
OPTIMIZERS: dict[str, Make] = BUILT_IN | {
    "nadam": NADAM,
    "radam": partial(torch.optim.RAdam, lr=0.01, decoupled_weight_decay=True),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "asgd": partial(torch.optim.ASGD, lr=0.01, t0=1.0),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = partial(torch.optim.Muon, lr=0.02)

every_form = pytest.mark.parametrize("form", FORMS)
every_lean = pytest.mark.parametrize("form", LEAN)
both_ways = pytest.mark.parametrize("kernel", [True, False])
"""By a kernel, and by the optimizer itself."""

windows = pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (3, 0.5)])
"""Micro-batches of a step, and the largest norm."""


class Mixed(nn.Module):
    def __init__(self, *, matrices: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 6, bias=not matrices)
        self.other = nn.Linear(3, 4, bias=False)
        self.other.weight = nn.Parameter(torch.randn(3, 4).t())
        if not matrices:
            self.norm = nn.LayerNorm(6)
            self.conv = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, slopes: dict[str, Tensor]) -> Tensor:
        parts = [
            (param * slopes[name].to(param.dtype)).float().sum()
            for name, param in self.named_parameters()
            if name in slopes
        ]
        return torch.stack(parts).sum()


def model_for(name: str) -> Mixed:
    return Mixed(matrices=name == "muon")


def prepare(
    model: nn.Module, optimizer: Any, *, kernel: bool = True, **more: Any
) -> Session:
    session = hs.prepare(model, optimizer, "O2", dtype="bf16", **more)
    if not kernel:
        masters_of(session).kernel = None
    return session


def masters_of(session: Session) -> MasterWeights:
    return session._masters


def start(
    make: Make, form: str, model: nn.Module | None = None, **more: Any
) -> Session:
    """Return a session over a model, `Mixed` unless another is given."""
    held = Mixed() if model is None else model
    return prepare(held, make(held.parameters()), master=form, **more)


def slopes_of(model: nn.Module, seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Return random slopes that bf16 holds; one parameter, in turn, has none."""
    draw = torch.Generator().manual_seed(seed)
    found = {
        name: (torch.randn(param.shape, generator=draw) * scale).bfloat16()
        for name, param in model.named_parameters()
    }
    found.pop([*found][seed % len(found)])
    return found


class Watched:
    """The gradients that autograd hands to each parameter, since `clear`."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_hook(partial(self._take, name))

    def _take(self, name: str, gradient: Tensor) -> None:
        self.seen.setdefault(name, []).append(gradient.clone())

    def clear(self) -> None:
        self.seen.clear()


def go(session: Session, *slopes: dict[str, Tensor]) -> StepReport:
    for each in slopes:
        with session.autocast():
            loss = session.model(each)
        session.backward(loss)
        report = session.step()
    return report


def trained(form: str, steps: int = 2, **more: Any) -> Session:
    session = start(ADAMW, form, **more)
    for number in range(steps):
        go(session, slopes_of(session.model, number))
    return session


def by_name(session: Session) -> dict[str, Tensor]:
    masters = masters_of(session)
    held = {id(masters.model_param(p)): p for p in adopted(session.optimizer)}
    return {
        name: held[id(param)]
        for name, param in session.model.named_parameters()
        if id(param) in held
    }


def adopted(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Twin:
    """torch's own optimizer in fp32, from what a session has stored."""

    def __init__(self, make: Make, session: Session) -> None:
        truths = session.weights()
        names = [name for name, _ in session.model.named_parameters()]
        self.params = {name: nn.Parameter(truths[name].clone()) for name in names}
        self.optimizer = make(self.params.values())
        # Moments become fp32 here, which is exact.
        self.optimizer.load_state_dict(copy.deepcopy(session.optimizer.state_dict()))

    def step(
        self, seen: dict[str, list[Tensor]], clip: float | None = None
    ) -> Tensor | None:
        """Step with sums, in fp32, of the gradients seen; return their norm."""
        for name, param in self.params.items():
            param.grad = None
            for gradient in seen.get(name, []):
                if param.grad is None:
                    param.grad = torch.zeros_like(param).copy_(gradient)
                else:
                    param.grad += gradient
        norm = None
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.params.values(), clip)
        self.optimizer.step()
        return norm


def everything(session: Session) -> Any:
    """Return copies of all that a step changes, in the order it is kept."""
    masters = masters_of(session)
    parts: Sequence[Any] = [
        [p.detach() for p in session.model.parameters()],
        [slot.residual for slot in masters.master_params.values()],
        {n: session.optimizer.state.get(p, {}) for n, p in by_name(session).items()},
        [masters.rng.seed, masters.rng.step],
    ]
    return copy.deepcopy(parts)
