"""What the drop-in scaler says when it is misused: torch's words, then the culprit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs

SGD = functools.partial(torch.optim.SGD, lr=0.5)
FUSED = functools.partial(SGD, fused=True)
Make = Callable[[Any], torch.optim.Optimizer]

makes = pytest.mark.parametrize("make", [SGD, FUSED], ids=["plain", "fused"])


class Loop:
    def __init__(self, scaler: Any, make: Make = SGD, *, named: bool = True) -> None:
        self.model: Any = nn.Linear(2, 1)
        nn.init.ones_(self.model.weight)
        nn.init.ones_(self.model.bias)
        given = self.model.named_parameters() if named else self.model.parameters()
        self.optimizer: Any = make(given)
        self.scaler = scaler

    def backward(self, factor: float = 1.0) -> None:
        """Run a backward pass; all gradients are `factor`."""
        out = self.model(torch.ones(1, 2, dtype=self.model.weight.dtype))
        self.scaler.scale(out.float().sum() * factor).backward()


Program = Callable[[Loop], Any]


def said(program: Program, **more: Any) -> tuple[str, str]:
    """Return torch's words for a program, and what ours adds, once both are judged.

    Torch's come from torch's own scaler; ours begin with them, have the same type,
    are one line of at most 60 words, and end with a full stop.
    """
    errors, texts = [], []
    for scaler in (torch.amp.GradScaler("cpu"), hs.GradScaler("cpu")):
        with pytest.raises((AssertionError, RuntimeError, ValueError)) as caught:
            program(Loop(scaler, **more))
        errors.append(caught.value)
        # A session that another test has left alive adds its own advice.
        texts.append(str(caught.value).partition("\n-> If a halfstep session")[0])
    assert type(errors[1]) is type(errors[0])
    theirs, ours = texts
    assert ours.startswith(theirs)
    assert "\n" not in ours
    assert len(ours.split()) <= 60
    assert ours.endswith(".")
    return theirs, ours[len(theirs) :]


# No gradients


def forgotten(loop: Loop) -> None:
    """Step without a backward pass since gradients were cleared."""
    loop.backward()
    loop.optimizer.zero_grad()
    loop.scaler.step(loop.optimizer)


def frozen(loop: Loop) -> None:
    loop.model.requires_grad_(requires_grad=False)
    loop.scaler.scale(torch.ones(1))
    loop.scaler.step(loop.optimizer)


def moved(loop: Loop) -> None:
    """Step what was made from parameters, and so is no leaf."""
    loop.scaler.scale(torch.ones(1))
    # torch's optimizers refuse those; some of others do not.
    parts = [param * 1 for param in loop.model.parameters()]
    loop.optimizer.param_groups[0]["params"] = parts
    loop.scaler.step(loop.optimizer)


CLEARED = (
    " Likely cause: no backward() since they were cleared, a loss that does not depend "
    "on them, or an optimizer over another model's parameters."
)
NO_LEAVES = (
    " Likely cause: some are not leaf tensors: make the optimizer after moving the "
    "model."
)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (forgotten, CLEARED),
        (frozen, " Likely cause: they are frozen (requires_grad is False)."),
        (moved, NO_LEAVES),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_no_gradients(program: Program, cause: str) -> None:
    """Law: a step without gradients names the parameters, and the likely cause."""
    for named, names in (
        (True, "weight, bias"),
        (False, "group 0 parameter 0 (1, 2), group 0 parameter 1 (1,)"),
    ):
        _, added = said(program, named=named)
        assert added == f" No gradient in {names}.{cause}"


def test_many_names_are_counted() -> None:
    """Law: of many parameters three are named, and the others counted."""

    def program(loop: Loop) -> None:
        wide: Any = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
        optimizer = SGD(wide.named_parameters())
        loop.backward()
        loop.scaler.step(optimizer)

    _, added = said(program)
    assert added == f" No gradient in 0.weight, 0.bias, 1.weight and 77 more.{CLEARED}"


def test_gradients_after_unscaling() -> None:
    """Law: gradients that came after `unscale_` are told apart from none at all."""

    def program(loop: Loop) -> None:
        loop.scaler.scale(torch.ones(1))
        loop.scaler.unscale_(loop.optimizer)
        loop.backward()
        loop.scaler.step(loop.optimizer)

    _, added = said(program)
    words = " Its gradients came after unscale_(): call that after backward()."
    assert added == words


def test_fused_without_gradients() -> None:
    """Law: a fused step says nothing, as torch's; the update after it names them."""

    def program(loop: Loop) -> None:
        loop.scaler.scale(torch.ones(1))
        assert loop.scaler.step(loop.optimizer) is None
        loop.scaler.update()

    _, added = said(program, make=FUSED)
    assert added == f" No gradient in weight, bias.{CLEARED}"


@makes
def test_update_before_step(make: Make) -> None:
    """Law: an update without a step says which call is missing."""

    def program(loop: Loop) -> None:
        loop.backward()
        loop.scaler.update()

    _, added = said(program, make=make)
    assert added == " Call step(optimizer) before update()."


# Out of order


def test_unscaled_twice() -> None:
    """Law: a second `unscale_` tells file and line of the first, in this file."""

    def program(loop: Loop) -> None:
        loop.backward()
        loop.scaler.unscale_(loop.optimizer)
        loop.scaler.unscale_(loop.optimizer)

    _, added = said(program)
    place = f"{__file__}:{program.__code__.co_firstlineno + 2}"
    cure = "call it once in an iteration, after the last micro-batch, and update()"
    assert added == f" The first call was at {place}; {cure} at its end."


@makes
def test_stepped_twice(make: Make) -> None:
    """Law: a step without an update before it is told what is missing."""

    def program(loop: Loop) -> None:
        loop.backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.step(loop.optimizer)

    _, added = said(program, make=make)
    assert added.endswith(
        "call it once in an iteration, for each optimizer, and update() at its end."
    )
    assert f"{__file__}:{program.__code__.co_firstlineno + 2};" in added


def test_a_neighbour_of_the_package_is_named() -> None:
    """Law: a package whose path merely begins as this one's is the user's own."""
    loop = Loop(hs.GradScaler("cpu"))
    file = str(hs.__file__).replace("__init__.py", "").rstrip("/") + "_recipes/loop.py"
    code = compile("scaler.unscale_(optimizer)", file, "exec")
    loop.backward()
    exec(code, {"scaler": loop.scaler, "optimizer": loop.optimizer})  # noqa: S102
    with pytest.raises(RuntimeError) as caught:
        loop.scaler.unscale_(loop.optimizer)
    assert f" The first call was at {file}:1; " in str(caught.value)


@makes
def test_unscaled_after_step(make: Make) -> None:
    """Law: unscaling what was stepped is refused in torch's words."""

    def program(loop: Loop) -> None:
        loop.backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.unscale_(loop.optimizer)

    said(program, make=make)


@makes
@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
def test_before_scale(make: Make, method: str) -> None:
    """Law: without a scaled loss each method says so, in torch's words."""

    def program(loop: Loop) -> None:
        args = () if method == "update" else (loop.optimizer,)
        getattr(loop.scaler, method)(*args)

    theirs, added = said(program, make=make)
    assert f"Attempted {method} but _scale is None." in theirs
    assert added == ""


def test_neither_tensors_nor_numbers() -> None:
    """Law: other objects are refused in torch's words, full stop or none."""
    errors = []
    for scaler in (torch.amp.GradScaler("cpu"), hs.GradScaler("cpu")):
        with pytest.raises(ValueError, match="outputs must be a Tensor") as caught:
            scaler.scale(3)  # type: ignore[call-overload]
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


# fp16 gradients


@makes
@pytest.mark.parametrize("both", [False, True])
def test_fp16_gradients(make: Make, both: bool) -> None:
    """Law: the parameter is named, and the level that fits."""

    def program(loop: Loop) -> None:
        loop.model.bias.data = loop.model.bias.data.half()
        if both:
            loop.model.weight.data = loop.model.weight.data.half()
        total = loop.model.weight.float().sum() + loop.model.bias.float().sum()
        loop.scaler.scale(total).backward()
        loop.scaler.unscale_(loop.optimizer)

    _, added = said(program, make=make)
    whose = "weight and 1 more" if both else "bias"
    assert added == (
        f" {whose} is stored in float16: keep weights in float32 and use autocast "
        "(level O1), or let halfstep.prepare(model, optimizer, 'O2') keep float32 "
        "master weights."
    )
