"""torch's cache of casts in our regions: what it keeps, and when it starts anew."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_forked
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import EYE, Watch, linear, patched

from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache

BF16, FP16 = torch.bfloat16, torch.float16


def casts_of_weight(make: Any, between: Callable[[nn.Linear], None]) -> int:
    """Return how often a weight is cast for two passes, and what is done between."""
    layer = linear()
    low = EYE.bfloat16()
    with make("cpu"), Watch() as watch:
        layer(low)
        between(layer)
        layer(low)
    return watch.seen.count(torch.ops.aten._to_copy.default)


def nothing(_: nn.Linear) -> None:
    """Leave the weight as it is."""


def look(layer: nn.Linear) -> None:
    """Read the weight where nothing is recorded."""
    with torch.no_grad():
        assert layer.weight.sum() > 0


def nest(_: nn.Linear) -> None:
    with autocast("cpu"), autocast("cpu", enabled=False):
        pass


def nest_torchs(_: nn.Linear) -> None:
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        pass


def nest_other(_: nn.Linear) -> None:
    with autocast("cpu", FP16):
        pass


@pytest.mark.parametrize(
    ("make", "between", "casts"),
    [
        (autocast, nothing, 1),
        (autocast, nest, 1),
        (autocast, nest_torchs, 1),
        (autocast, look, 1 if torch.__version__ >= "2.13" else 2),
        (autocast, nest_other, 2),
        (partial(autocast, cache_enabled=False), nothing, 2),
    ],
)
def test_casts_are_kept(
    make: Any, between: Callable[[nn.Linear], None], casts: int
) -> None:
    """Law: a weight is cast once, as in torch; another dtype drops the cast."""
    assert casts_of_weight(make, between) == casts


def test_inside_a_region_of_torchs() -> None:
    """Law: what a region of torch's has cast is not served to ours, nor back."""
    layer = linear()
    with torch.autocast("cpu", BF16):
        assert layer(EYE).dtype == BF16
        with autocast("cpu", FP16):
            assert layer(EYE).dtype == FP16
        assert layer(EYE).dtype == BF16


def by_a_list(layer: nn.Linear) -> bool:
    """Change the weight by a function of lists: is it seen?"""
    layer(EYE)
    with torch.no_grad():
        torch._foreach_zero_([layer.weight])
    return not layer(EYE).any()


def detached(layer: nn.Linear) -> bool:
    """Likewise behind autograd's back, though it counts."""
    layer(EYE)
    layer.weight.detach().zero_()
    return not layer(EYE).any()


def data(layer: nn.Linear) -> bool:
    """Likewise so that nobody counts."""
    layer(EYE)
    layer.weight.data.zero_()
    return not layer(EYE).any()


@pytest.mark.parametrize(
    ("edit", "counted"), [(by_a_list, True), (detached, True), (data, False)]
)
def test_unseen_edits(edit: Callable[[nn.Linear], bool], counted: bool) -> None:
    """Law: these edits are not seen, as the docstring says; a `CastCache` sees two."""
    regions: dict[str, Any] = {
        "torch": {},
        "version": {"cache": CastCache()},
        "none": {"cache_enabled": False},
    }
    fresh = {}
    for name, more in regions.items():
        with autocast("cpu", **more):
            fresh[name] = edit(linear())
    torchs = fresh.pop("torch")
    assert not torchs or torch.__version__ < "2.13"
    assert fresh == {"version": counted, "none": True}


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["bf16", "fp16", "off", "close", "use", "edit", "step"]),
    ),
    max_size=25,
)


@given(steps=STEPS)
def test_no_thread_gets_a_wrong_cast(steps: list[tuple[int, str]]) -> None:
    """Law: whatever threads open, close and change, each gets its dtype and value."""
    layer = linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.weight.grad = torch.ones(4, 4)
    opened: list[list[tuple[Any, torch.dtype]]] = [[], [], []]

    def do(number: int, what: str) -> None:
        stack = opened[number]
        if what == "edit":
            with torch.no_grad():
                layer.weight.add_(1)
        elif what == "step":
            optimizer.step()
        elif what == "close" and stack:
            stack.pop()[0].__exit__(None, None, None)
        elif what in ("bf16", "fp16", "off"):
            dtype = {"bf16": BF16, "fp16": FP16, "off": torch.float32}[what]
            region = autocast(
                "cpu", BF16 if what == "off" else dtype, enabled=what != "off"
            )
            region.__enter__()
            stack.append((region, dtype))
        seen = layer(EYE)
        expected = stack[-1][1] if stack else torch.float32
        assert torch.equal(seen, layer.weight.detach().T.to(expected))
        assert seen.dtype == expected

    with ExitStack() as pools:
        threads = [pools.enter_context(ThreadPoolExecutor(1)) for _ in opened]
        for number, what in steps:
            threads[number].submit(do, number, what).result()
        for number, stack in enumerate(opened):
            while stack:
                threads[number].submit(do, number, "close").result()
    assert not patched()


HANDLED_CASTS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import halfstep as hs

def under(*make):
    def handle(self, func, types, args=(), kwargs=None):
        with make[0](*make[1:]):
            return func(*args, **(kwargs or {}))
    return type("Handler", (TorchDispatchMode,), {"__torch_dispatch__": handle})()

with hs.autocast("cpu", torch.bfloat16), under(hs.autocast, "cpu", torch.float16):
    torch.nn.Linear(4, 4)(torch.ones(2, 4))
print("ended")
"""


def test_contexts_in_a_handler_of_operations(tmp_path: Path) -> None:
    """Law: what handles a cast may end contexts, though torch locks its cache then."""
    (tmp_path / "script.py").write_text(HANDLED_CASTS)
    (done,) = run_forked(str(tmp_path / "script.py"))
    assert done.stdout == "ended\n", done.stderr


class Steps(TorchDispatchMode):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        weight.grad = weight.detach().clone()
        self.optimizer = torch.optim.SGD([weight], lr=1.0)

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.optimizer.step()
        return out


def test_a_step_in_a_handler_of_operations() -> None:
    """Law: no old cast is used after it, and the setting of the cache comes back."""
    layer = linear()
    with autocast("cpu", BF16):
        with Steps(layer.weight):
            layer(EYE)
        assert not layer(EYE).any()
    assert torch.is_autocast_cache_enabled()
