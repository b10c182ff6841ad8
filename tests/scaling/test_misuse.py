"""What the drop-in scaler says when it is misused: torch's words, then the culprit."""

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
MAKES = (SGD, FUSED)


class Loop:
    def __init__(self, scaler: Any, make: Make = SGD, *, named: bool = True) -> None:
        self.model: Any = nn.Linear(2, 1)
        nn.init.ones_(self.model.weight)
        nn.init.ones_(self.model.bias)
        given = self.model.named_parameters() if named else self.model.parameters()
        self.optimizer: Any = make(given)
        self.scaler = scaler

    def run(self, program: str) -> None:
        for call in program.split():
            getattr(self, call)()

    def backward(self) -> None:
        out = self.model(torch.ones(1, 2, dtype=self.model.weight.dtype))
        self.scaler.scale(out.float().sum()).backward()

    def scale(self) -> None:
        self.scaler.scale(torch.ones(1))

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        self.scaler.update()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def freeze(self) -> None:
        self.model.requires_grad_(requires_grad=False)

    def move(self) -> None:
        """Give the optimizer what was made from parameters, and so is no leaf."""
        # torch's optimizers refuse those; some of others do not.
        parts = [param * 1 for param in self.model.parameters()]
        self.optimizer.param_groups[0]["params"] = parts

    def widen(self) -> None:
        wide: Any = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
        self.optimizer = SGD(wide.named_parameters())

    def backward_fp16(self, *names: str) -> None:
        for name in names or ("bias",):
            param = getattr(self.model, name)
            param.data = param.data.half()
        total = self.model.weight.float().sum() + self.model.bias.float().sum()
        self.scaler.scale(total).backward()

    def backward_all_fp16(self) -> None:
        self.backward_fp16("bias", "weight")


def said(program: str, **more: Any) -> str:
    """Return what our message adds to torch's, once both are judged.

    Torch's come from torch's own scaler; ours begin with them, have the same type,
    are one line of at most 60 words, and end with a full stop.
    """
    errors, texts = [], []
    for scaler in (torch.amp.GradScaler("cpu"), hs.GradScaler("cpu")):
        loop = Loop(scaler, **more)
        with pytest.raises((AssertionError, RuntimeError, ValueError)) as caught:
            loop.run(program)
        errors.append(caught.value)
        # A session that another test has left alive adds its own advice.
        texts.append(str(caught.value).partition("\n-> If a halfstep session")[0])
    assert type(errors[1]) is type(errors[0])
    theirs, ours = texts
    assert ours.startswith(theirs)
    assert "\n" not in ours
    assert len(ours.split()) <= 60
    assert ours.endswith(".")
    return ours[len(theirs) :]


CLEARED = (
    " Likely cause: no backward() since they were cleared, a loss that does not depend "
    "on them, or an optimizer over another model's parameters."
)
NO_LEAVES = (
    " Likely cause: some are not leaf tensors: make the optimizer after moving the "
    "model."
)
HALF = (
    " is stored in float16: keep weights in float32 and use autocast (level O1), or "
    "let halfstep.prepare(model, optimizer, 'O2') keep float32 master weights."
)
PLAIN: dict[str, str] = {
    "backward clear step": f" No gradient in weight, bias.{CLEARED}",
    "freeze scale step": (
        " No gradient in weight, bias. Likely cause: they are frozen (requires_grad is "
        "False)."
    ),
    "scale move step": f" No gradient in weight, bias.{NO_LEAVES}",
    "backward widen step": (
        f" No gradient in 0.weight, 0.bias, 1.weight and 77 more.{CLEARED}"
    ),
    "scale unscale backward step": (
        " Its gradients came after unscale_(): call that after backward()."
    ),
}
FUSED_TOO: dict[str, str | None] = {
    "backward update": " Call step(optimizer) before update().",
    "backward step unscale": None,
    "backward_fp16 unscale": f" bias{HALF}",
    "backward_all_fp16 unscale": f" weight and 1 more{HALF}",
    **dict.fromkeys(("unscale", "step", "update"), ""),
}
CASES = [
    *((program, SGD, words) for program, words in PLAIN.items()),
    *((program, make, FUSED_TOO[program]) for program in FUSED_TOO for make in MAKES),
    # A fused step says nothing, as torch's; the update after it names them.
    ("scale step update", FUSED, f" No gradient in weight, bias.{CLEARED}"),
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("program", "make", "words"), CASES)
def test_a_wrong_call(program: str, make: Make, words: str | None) -> None:
    """Law: torch's words are followed by parameters, likely cause and what to call."""
    added = said(program, make=make)
    assert words in {None, added}


def test_parameters_without_names() -> None:
    added = said("backward clear step", named=False)
    names = "group 0 parameter 0 (1, 2), group 0 parameter 1 (1,)"
    assert added == f" No gradient in {names}.{CLEARED}"


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_called_twice(call: str, make: Make) -> None:
    """Law: a second call tells file and line of the first, in this file."""

    def run(scaler: Any) -> str:
        loop = Loop(scaler, make)
        loop.backward()
        method = getattr(scaler, call)
        method(loop.optimizer)
        with pytest.raises(RuntimeError) as caught:
            method(loop.optimizer)
        return str(caught.value)

    theirs, ours = map(run, (torch.amp.GradScaler("cpu"), hs.GradScaler("cpu")))
    when = (
        "for each optimizer, and"
        if call == "step"
        else "after the last micro-batch, and"
    )
    cure = f"call it once in an iteration, {when} update() at its end."
    place = f"{__file__}:{run.__code__.co_firstlineno + 4}"
    assert ours == f"{theirs} The first call was at {place}; {cure}"


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
