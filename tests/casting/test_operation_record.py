"""What ran how, observed: tables by hand, nothing changed, nothing left behind."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from processes import group_of_one
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules import module as torchs_modules
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import halfstep as hs
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache
from halfstep.policy import op_tables

BF16 = torch.bfloat16
AS_CALLED = ("no row", "it runs as it is called")
Row = tuple[Any, ...]

X = torch.linspace(-1, 1, 8).view(2, 4)
"""Eight numbers: 16 bytes in 16 bits, 32 in fp32."""


class Net(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.body(x), -1)


def loss(model: nn.Module) -> Tensor:
    """Return a loss in fp32."""
    return nn.functional.mse_loss(model(X), X)


def rows(region: Any) -> list[Row]:
    return list(region.report().rows)


def recorded(net: nn.Module, times: int = 1, **more: Any) -> list[Row]:
    with autocast("cpu", record=True, **more) as region:
        for _ in range(times):
            loss(net)
    return rows(region)


def why(op: str, base: str) -> tuple[str, str]:
    row = op_tables.NAMED[base]["cpu"][op]
    return f"{base} cpu table: {op}={row.category}", row.reason


def test_torchs_table() -> None:
    """Law: each operation, its module, formats, row, calls, casts and bytes.

    Cast are x, 16 bytes, and the weight's 16 numbers and the bias's 4, 40 bytes.
    mse_loss has bf16 and fp32 and casts the first, to 32 bytes.
    """
    linear = "linear", "body.0", "fp32", "bf16", *why("linear", "torch")
    gelu = "gelu", "body.1", "bf16", "bf16", *AS_CALLED
    norm = "native_layer_norm", "body.2", "bf16, fp32", "bf16, fp32", *AS_CALLED
    softmax = "_softmax", "", "bf16", "bf16", *AS_CALLED
    mse = "mse_loss", "", "bf16, fp32", "fp32", *why("mse_loss", "torch")
    assert recorded(Net()) == [
        (*linear, 1, 3, 56),
        (*gelu, 1, 0, 0),
        (*norm, 1, 0, 0),
        (*softmax, 1, 0, 0),
        (*mse, 1, 1, 32),
    ]


LINEAR = "linear", "body.0", "fp32", "bf16", *why("linear", "lean")
NORM = "layer_norm", "body.2", "bf16, fp32", "bf16", *why("layer_norm", "lean")
GELU = "gelu", "body.1", "bf16", "bf16", *AS_CALLED
SOFTMAX = "softmax.int", "", "bf16", "bf16", *why("softmax.int", "lean")
MSE = "mse_loss", "", "bf16, fp32", "fp32", *why("mse_loss", "lean")


def test_the_lean_table() -> None:
    """Law: likewise; the norm follows x, beside its weight and bias in fp32.

    The second time the weight is not cast again.
    """
    assert recorded(Net(), 2, policy="lean") == [
        (*LINEAR, 2, 4, 72),
        (*GELU, 2, 0, 0),
        (*NORM, 2, 0, 0),
        (*SOFTMAX, 2, 0, 0),
        (*MSE, 2, 2, 64),
    ]


def test_rules() -> None:
    """Law: a rule that decided is named, with its reason; in modules it speaks of."""
    policy = hs.Policy.parse("lean + op:softmax=fp32 + module:body.0=fp32")
    rule = hs.Rule("op", "gelu", "fp32", "its tail is flat")
    model = Net()
    found = recorded(model, policy=policy + rule, model=model)
    mine = "your rule", 1, 0, 0
    assert found == [
        ("linear", "body.0", "fp32", "fp32", "module:body.0=fp32", *mine),
        ("gelu", "body.1", "fp32", "fp32", "op:gelu=fp32", "its tail is flat", 1, 0, 0),
        ("layer_norm", "body.2", "fp32", "fp32", *why("layer_norm", "lean"), 1, 0, 0),
        ("softmax.int", "", "fp32", "fp32", "op:softmax=fp32", *mine),
        ("mse_loss", "", "fp32", "fp32", *why("mse_loss", "lean"), 1, 0, 0),
    ]
    low = recorded(model, policy="lean + module:body.0=low", model=model)
    # The scope casts what goes in; the product casts its weight and bias.
    copy = "_to_copy", "body.0", "fp32", "bf16", "no row", "a cast in the code"
    linear = "linear", "body.0", "bf16, fp32", "bf16", "module:body.0=low", "your rule"
    assert low[:2] == [(*copy, 1, 1, 16), (*linear, 1, 2, 40)]


def test_composites() -> None:
    """Law: a layer in C++ is one call, with all that was cast inside it.

    Cast are x and the two states, 24 + 8 + 8 numbers, two 16 x 4 weights and two
    biases of 16: 200 numbers of 2 bytes.
    """
    model = nn.LSTM(4, 4)
    with autocast("cpu", policy="lean", record=True) as region:
        model(torch.ones(3, 2, 4))
    found = rows(region)
    assert sum(row[-2] for row in found) == 7
    assert sum(row[-1] for row in found) == 400
    assert {row[1] for row in found} == {""}
    assert {row[3] for row in found} == {"bf16"}


def test_operations_without_a_module() -> None:
    """Law: outside of modules the path is empty; a cast in code is one; views are none.

    Operations on integers are none either, nor those that failed.
    """
    with autocast("cpu", record=True) as region:
        low = X.to(BF16)
        low.view(-1).double()
        torch.arange(3) + 1
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.mm(X, X)
    assert rows(region) == [
        ("_to_copy", "", "fp32", "bf16", "no row", "a cast in the code", 1, 1, 16),
        ("_to_copy", "", "bf16", "float64", "no row", "a cast in the code", 1, 1, 64),
    ]


def test_the_table() -> None:
    """Law: columns, title, and a sum below; over all entries of the region.

    Paths are those in the outermost module that was called.
    """
    region = autocast("cpu", record=True)
    assert rows(region) == []
    for _ in range(2):
        with region:
            Net().body[0](X)
    table = region.report()
    assert table.title == "Recorded operations"
    assert table.columns == (
        *("operation", "module", "in", "out", "rule", "reason"),
        *("calls", "casts", "bytes cast"),
    )
    assert table.notes == ("6 casts in total, which wrote 112 bytes",)
    assert [(row[1], *row[-3:]) for row in table.rows] == [("", 2, 6, 112)]


@pytest.fixture
def _group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.mark.usefixtures("_group")
def test_wrappers_are_not_in_paths() -> None:
    """Law: DDP, DataParallel, and both around each other leave paths as they are."""
    model = Net()
    expected = recorded(model, policy="lean")
    ddp = nn.parallel.DistributedDataParallel(model)
    for wrapped in (ddp, nn.DataParallel(Net())):
        found = recorded(wrapped, policy="lean")
        assert [row for row in found if row[1] != "DistributedDataParallel"] == expected


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model() -> None:
    """Law: compiled code runs eagerly while it is observed, with the paths it has."""
    model = Net()
    compiled: Any = torch.compile(model, backend="aot_eager")
    assert recorded(compiled, policy="lean") == recorded(model, policy="lean")


def test_a_session_explains() -> None:
    """Law: after one recorded region `explain` is that table, with the session's notes.

    Before, it is the table of modules.
    """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hs.prepare(model, optimizer, "O1", dtype="bf16")
    assert session.explain().title == "Precision"
    for record in (False, True, False):
        with session.autocast(record=record):
            total = loss(session.model)
        session.backward(total)
        session.step()
    table = session.explain()
    assert table.title == "Recorded operations"
    assert list(table.rows) == [
        # Weights are cast again, since the step before has changed them.
        (*LINEAR, 1, 3, 56),
        (*GELU, 1, 0, 0),
        (*NORM, 1, 0, 0),
        (*SOFTMAX, 1, 0, 0),
        (*MSE, 1, 1, 32),
    ]
    assert table.notes[0] == "4 casts in total, which wrote 88 bytes"
    assert table.notes[2] == "policy: lean"


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
    assert calls == {row[:2]: 10 for row in (LINEAR, GELU, NORM, SOFTMAX, MSE)}


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
        self.region.__enter__()
        return self.net(x)


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
