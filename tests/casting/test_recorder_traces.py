"""Recording changes nothing, leaves nothing behind, and may begin anywhere."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small_net import Net, X, loss, rows
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules import module as torchs_modules
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache
from halfstep.policy import op_tables


@pytest.mark.parametrize("policy", ["torch", "lean", "lean + op:gelu=fp32"])
def test_numbers_are_the_same(policy: str) -> None:
    """Law: losses and gradients are those without recording, to the bit."""
    found = []
    for record in (False, True):
        model = Net()
        with autocast("cpu", policy=policy, record=record):
            total = loss(model) + loss(model)
        total.backward()  # type: ignore[no-untyped-call]
        found.append([total, *(param.grad for param in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def left_behind() -> dict[str, object]:
    """Return what recording puts into torch."""
    names = sorted(op_tables.LEAN["cpu"].keys() | op_tables.TABLES["cpu"].keys())
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        "kernels": [n for n in names if has_kernel(f"aten::{n}", "AutocastCPU")],
        "hooks": [
            len(torchs_modules._global_forward_pre_hooks),
            len(torchs_modules._global_forward_hooks),
            len(torchs_modules._global_forward_hooks_always_called),
        ],
        "modes": torch._C._len_torch_dispatch_stack(),
        "flag": is_in_torch_dispatch_mode(),
    }


def test_nothing_is_left_behind() -> None:
    """Law: kernels, hooks and modes go when the region closes, also by an error."""
    before = left_behind()
    assert before["hooks"] == [0, 0, 0]
    inside = []
    for fails in (False, True):
        with autocast("cpu", policy="lean", record=True):
            loss(Net())
            inside.append(left_behind())
            if fails:
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    Net()(torch.ones(3, 3))
        assert left_behind() == before
    region = autocast("cpu", policy="lean", record=True)
    message = "stop"
    with pytest.raises(ValueError, match=message), region:
        raise ValueError(message)
    assert left_behind() == before
    assert inside[0] == inside[1] != before


def test_errors_are_not_counted() -> None:
    """Law: an operation that failed has no row; what follows has its own."""
    with autocast("cpu", record=True) as region:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.mm(X, X)
        torch.mm(X, X.T)
    assert [row[0] for row in rows(region)] == ["mm"]
    assert rows(region)[0][-3:] == (1, 2, 32)


# Nested, in threads, inside of models


def test_nested() -> None:
    """Law: each operation with a row is in the table of the innermost that records."""
    outer, inner = (autocast("cpu", policy="lean", record=True) for _ in range(2))
    with outer:
        torch.mm(X, X.T)
        with inner:
            torch.mm(X.T, X)
        torch.softmax(X, 0)
    assert [row[0] for row in rows(inner)] == ["mm"]
    assert [row[0] for row in rows(outer) if row[4] != "no row"] == [
        "mm",
        "softmax.int",
    ]


def test_threads_share_a_region() -> None:
    """Law: threads that record through one region add up, each with its own paths."""
    region = autocast("cpu", policy="lean", record=True)
    barrier = threading.Barrier(2, timeout=30)

    def work(_: int) -> None:
        model = Net()
        for _ in range(5):
            barrier.wait()
            with region:
                loss(model)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    calls = {row[:2]: row[6] for row in rows(region)}
    assert calls == {
        ("linear", "body.0"): 10,
        ("gelu", "body.1"): 10,
        ("layer_norm", "body.2"): 10,
        ("softmax.int", ""): 10,
        ("mse_loss", ""): 10,
    }


def test_threads_leave_torch_compile_as_it_was() -> None:
    """Law: compiled code is observed until its own thread's region closes, not longer.

    Of two threads the first to open is the first to close.
    """
    region = autocast("cpu", policy="lean", record=True)
    counter = CompileCounter()
    product = torch.compile(lambda x: torch.mm(x, x.T), backend=counter)
    before = left_behind()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for thread in (first, second):
            thread.submit(region.__enter__).result()
        first.submit(region.__exit__, None, None, None).result()
        second.submit(product, X).result()
        found = (counter.frame_count, rows(region)[0][6])
        second.submit(region.__exit__, None, None, None).result()
    assert found == (0, 1)
    assert left_behind() == before
    torch.compiler.reset()  # what it met under a mode it would leave alone for good
    product(X)
    assert counter.frame_count == 1
    torch.compiler.reset()


class Inside(nn.Module):
    """A model that records in the middle of its own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.region = autocast("cpu", policy="lean", record=True)

    def forward(self, x: Tensor) -> Tensor:
        """Open the region, and leave it open."""
        self.region.__enter__()
        out: Tensor = self.net(x)
        return out


def test_begun_inside_a_module() -> None:
    """Law: a module that was entered before, or is left after, disturbs no path."""
    model = Inside()
    model.register_forward_hook(lambda *_: None)
    model(X)
    model.net(X)
    model.region.__exit__(None, None, None)
    calls = {row[:2]: row[6] for row in rows(model.region)}
    assert calls[("linear", "body.0")] == 2
    assert {path for _, path in calls} == {"", "body.0", "body.1", "body.2"}


@pytest.mark.parametrize("rules", ["", " + module:body.2=promote"])
def test_recomputation_is_not_recorded(rules: str) -> None:
    """Law: what a backward pass computes again is not in the table, in modules too."""
    model, cache = Net(), CastCache()
    part = model.body[2] if rules else model
    part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    words = f"lean{rules}"
    region = autocast("cpu", policy=words, model=model, cache=cache, record=True)
    with region, set_checkpoint_early_stop(enable=False):
        out = model(X)
    before = rows(region)
    with autocast("cpu", policy="lean"):  # its kernels stay
        pass
    out.sum().backward()
    assert rows(region) == before
