"""What public functions return is short at a prompt, and HTML in a notebook."""

import inspect
from collections.abc import Callable
from functools import cache
from html import unescape
from html.parser import HTMLParser
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.checkpoint import Checkpoint
from halfstep.reporting.table import MOST_ROWS, REPR_LENGTH, Table

pytestmark = pytest.mark.filterwarnings("ignore:dtype=fp16:UserWarning")
HOSTILE = "<b>&"
"""Name of a layer."""
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(HOSTILE, nn.Linear(8, width))
    model.add_module("last", nn.Linear(width, 1))
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


@cache
def session() -> hs.Session:
    """Return a session that has made a step."""
    model = net()
    prepared = hs.prepare(model, torch.optim.Adam(model.parameters()), "O2")
    with prepared.autocast():
        loss = loss_of(prepared.model, X)
    prepared.backward(loss)
    prepared.step()
    return prepared


def last_step() -> hs.StepReport:
    model = net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), hs.GradScaler("cpu")
    scaler.scale(loss_of(model, X * torch.inf)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step


def diagnosis() -> object:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, X * torch.nan).backward()
        optimizer.step()

    return hs.diagnose(step)


def found(factor: float) -> object:
    model = net()
    return hs.find_nonfinite(model, lambda: loss_of(model, X * factor))


def comparison() -> object:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = net()
        return model, torch.optim.SGD(model.parameters(), 0.01), loss_of

    quick: dict[str, Any] = {"steps": 2, "seeds": 2}
    return hs.compare(make, [X, X], levels=["O1"], **quick)


def checkpoint() -> Checkpoint:
    return Checkpoint({"w": torch.ones(9999)}, {"s": torch.ones(9999)}, {"step": 3})


RESULTS: dict[str, Callable[[], object]] = {
    "check": lambda: hs.check(net(), loss_of, X, level="O1", dtype="bf16", steps=2),
    "checkpoint.load": checkpoint,
    "compare": comparison,
    "diagnose": diagnosis,
    "find_nonfinite": lambda: found(torch.nan),
    "find_nonfinite, nothing": lambda: found(1.0),
    "machine.capabilities": hs.machine.capabilities,
    "machine.recommend": hs.machine.recommend,
    "plan": lambda: hs.plan(net(), (X,)),
    "policy.decide": lambda: hs.policy.decide("mm", [torch.float32], "cpu"),
    "prepare": session,
    "session.explain": lambda: session().explain(),
    "session.memory": lambda: session().memory(),
    "session.step": lambda: session().flush(),
    "scaler.last_step": last_step,
}
"""Function -> a result of it."""

OTHERS = {
    *("autocast", "custom_bwd", "custom_fwd", "full_precision", "low_precision"),
    *("promote", "rewrite", "use_fast_dropout"),
    *("checkpoint.read_manifest", "checkpoint.save", "machine.keep_memory"),
    "machine.gemm_rates",
    *("scaling.advance", "scaling.unscale_", "fsdp.fsdp_policy", "fsdp.load"),
    *("fsdp.full_tensors", "fsdp.save"),
}
"""They return None, what they were given, or values of Python and torch."""


class Tags(HTMLParser):
    """Collects the tags of a page, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.opened.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def test_every_function_is_listed() -> None:
    """Law: what a new public function returns is judged here, or is not ours."""
    listed = {name for name in hs.__all__ if inspect.isfunction(getattr(hs, name))}
    for name in ("checkpoint", "machine", "policy", "scaling", "fsdp"):
        module = getattr(hs, name)
        public = ((each, getattr(module, each)) for each in module.__all__)
        listed |= {
            f"{name}.{each}"
            for each, value in public
            if callable(value) and not inspect.isclass(value)
        }
    methods = {"find_nonfinite, nothing", "scaler.last_step"}
    methods |= {name for name in RESULTS if name.startswith("session.")}
    assert listed - OTHERS == RESULTS.keys() - methods


@pytest.mark.parametrize("name", RESULTS)
def test_at_a_prompt_and_in_a_notebook(name: str) -> None:
    """Law: one line of at most 200 characters, or a table of 20 rows; then all as HTML.

    Names in it are escaped.
    """
    result = RESULTS[name]()
    text = repr(result)
    if isinstance(result, Table):
        assert len(result.head().rows) <= MOST_ROWS
        assert text == result.head().text()
    else:
        assert len(text) <= REPR_LENGTH
        assert "\n" not in text
    html = methodcaller("_repr_html_")(result)
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert not tags.opened
    assert tags.tags == {"pre"}
    assert HOSTILE not in html
    assert unescape(html) == f"<pre>{result}</pre>"


def test_nothing_found_is_falsy() -> None:
    """Law: a finite step gives a result that says so, and is false."""
    result = found(1.0)
    assert not result
    assert str(result) == (
        "Nothing found: loss and all gradients are finite, at loss scale 1."
    )
    assert found(torch.nan)


def test_a_long_result_is_cut(tmp_path: Path) -> None:
    """Law: a prompt shows no tensors of a checkpoint, and as much of its notes."""
    hs.checkpoint.save(tmp_path / "run", {"w": torch.ones(9)}, {}, {"note": "x" * 999})
    loaded = hs.checkpoint.load(tmp_path / "run")
    assert str(loaded).startswith("1 tensor of weights, {'note': 'xxx")
    assert len(repr(loaded)) == REPR_LENGTH
    assert repr(loaded).endswith("xxx...>")
