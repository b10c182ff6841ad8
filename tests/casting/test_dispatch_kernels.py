"""Kernels of a policy: they run where a frame is in force, torch's alone elsewhere."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F  # noqa: N812 -- its usual name
from twins import Watch
from versions import torch_has_lstm

from halfstep.casting import active_context, dispatch_kernels
from halfstep.casting.active_context import CastContext, OpCast
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.dispatch_kernels import install, overload_of
from halfstep.casting.dispatch_table import check_policy, op_casts_for
from halfstep.casting.weight_cache import CastCache
from halfstep.errors import UserError
from halfstep.policy import LEAN as LEAN_ONLY
from halfstep.policy import TORCH, Policy, op_tables
from halfstep.policy.op_tables import LEAN, LOW, PROMOTE, TABLES
from halfstep.policy.rules import KEEP

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
X = torch.linspace(-2, 2, 16).view(4, 4)

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


@contextmanager
def steered(
    rows: dict[str, str],
    low: torch.dtype = BF16,
    *,
    cache: CastCache | None = None,
    policy: Policy = TORCH,
    rule: int | None = None,
) -> Iterator[CastContext]:
    """Be in a region in which operations run as they are given a category."""
    plan = {
        name: OpCast(category, rule, is_torch_default=False)
        for name, category in rows.items()
    }
    install(plan)
    frame = CastContext(policy, plan, cache, set())
    with torch.autocast("cpu", low):
        pushed = active_context.push("cpu", frame)
        try:
            yield frame
        finally:
            active_context.pop(pushed)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(X, X),
    "softmax.int": lambda: torch.softmax(X.to(BF16), 0),
    "cat": lambda: torch.cat([X, X.to(BF16)]),
    "add_.Tensor": lambda: X.clone().add_(1),
    "einsum": lambda: torch.einsum("ij,jk", X, X),
}
_ONE = torch.ones((), requires_grad=True)
NUMBER, INTEGER = ((_ONE * value).grad_fn._saved_other for value in (2.5, 3))
"""Tensors that stand for numbers: with float16 such a float gives float16, as no other
of fp64 does. To a kernel in Python torch gives them as plain numbers."""
PROGRAMS |= {
    "ne.Tensor": lambda: torch.ne(NUMBER, INTEGER),
    "exp": NUMBER.exp,
    "sub.Tensor": lambda: NUMBER - X[0, 0].to(FP16),
    "maximum": lambda: torch.maximum(X[0, 0].to(FP16), NUMBER),
    "stack": lambda: torch.stack([X[0, 0], INTEGER]),
    "where.self": lambda: torch.where(X > 0, X.to(FP16), NUMBER),
    "addcmul": lambda: torch.addcmul(X, NUMBER, X, value=2),
}
if torch_has_lstm(BF16):
    PROGRAMS["lstm.input"] = lambda: nn.LSTM(4, 4)(X[None])[0]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_policy_leaves_to_torch(name: str, enabled: bool) -> None:
    """Law: without a row in a frame, and without a frame, results are torch's.

    What an operation calls inside is cast too, as einsum's products are. A row that
    keeps dtypes gives what torch gives outside of any context.
    """

    def run(frame: Any) -> Any:
        torch.manual_seed(0)
        with frame, torch.autocast("cpu", BF16, enabled=enabled):
            return PROGRAMS[name]()

    expected = run(contextlib.nullcontext())
    install([name])
    frames = [contextlib.nullcontext(), steered({})]
    if not enabled:
        frames.append(steered({name: "keep"}))
    for frame in frames:
        torch.testing.assert_close(run(frame), expected, rtol=0, atol=0)


def test_torch_asks_its_own_kernels() -> None:
    """Law: torch's autocast keys hold what they held, while a frame is in force too.

    So no thread under plain `torch.autocast` runs, or waits for, code of ours.
    """
    keys = [f"Autocast{device}" for device in ("CPU", "CUDA", "MPS", "XPU")]

    def registered(name: str) -> list[str]:
        table = torch._C._dispatch_dump_table(f"aten::{name}").splitlines()
        return [line for line in table if line.split(":")[0] in keys]

    names = ["linear", "mm", "gelu", "layer_norm"]
    before = {name: registered(name) for name in names}
    assert "autocast_mode.cpp" in "".join(before["linear"])
    with steered(dict.fromkeys(names, "fp32")):
        assert F.linear(X, X).dtype == FP32
        assert {name: registered(name) for name in names} == before


def test_higher_order_operators_run() -> None:
    """Law: operators that torch dispatches in Python run under a policy."""
    with steered({"mm": "fp32"}):
        out = torch.cond(X.sum() > 0, lambda x: x.mm(x), lambda x: x.mm(x).sin(), (X,))
    assert out.dtype == FP32


@pytest.mark.parametrize("low", [BF16, FP16])
def test_a_norm_keeps_its_weights(low: torch.dtype) -> None:
    """Law: on a CPU a norm in 16 bits is weighed in fp32; nothing but data is cast."""
    copy = torch.ops.aten._to_copy.default
    weight, bias = nn.Parameter(torch.rand(4) + 1), nn.Parameter(torch.rand(4))
    data = X.to(low)
    right = F.layer_norm(data.float(), [4], weight, bias).to(low)
    with steered({"layer_norm": "follow"}, low):
        with Watch() as watch:
            found = F.layer_norm(data, [4], weight, bias)
            mixed = F.layer_norm(data, [4], weight, bias.to(low))
        assert F.layer_norm(data, [4]).dtype == low
        assert F.layer_norm(data, [4], weight).dtype == low
        assert F.layer_norm(data, [4], None, bias).dtype == low
    # One cast of the bias is the test's own; beside it the weight must be cast, too.
    assert watch.seen.count(copy) == 2
    assert found.dtype == mixed.dtype == low
    close = torch.finfo(low).eps
    assert torch.allclose(found, right, rtol=close, atol=close)
    found.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_an_asked_for_dtype_stays() -> None:
    """Law: where the caller asks for a dtype himself, fp32 is not asked for."""
    low = X.to(BF16)
    names = ("softmax.int", "sum", "sum.dim_IntList", "linalg_vector_norm")
    with steered(dict.fromkeys(names, "fp32_result")):
        assert torch.softmax(low, 0).dtype == FP32
        assert torch.softmax(low, 0, dtype=BF16).dtype == BF16
        assert torch.softmax(low, 0, FP64).dtype == FP64
        assert torch.sum(low).dtype == FP32
        assert torch.sum(low, dtype=BF16).dtype == BF16
        assert torch.sum(low, 0, dtype=FP64).dtype == FP64
        assert torch.sum(X.double()).dtype == FP64
        assert torch.sum(torch.ones(3, dtype=torch.int32)).dtype == torch.int64
        norm = torch.linalg.vector_norm
        assert norm(low, dtype=FP64).dtype == FP64
        assert norm(low).dtype == FP32


def test_a_result_is_not_made_of_a_copy() -> None:
    """Law: an fp32 result comes from 16-bit operands, without an fp32 copy of them."""
    low, copy = X.to(BF16), torch.ops.aten._to_copy.default
    for category, copies in {"fp32_result": 0, "fp32": 1}.items():
        with steered({"sum": category}), Watch() as watch:
            assert torch.sum(low).dtype == FP32
        assert watch.seen.count(copy) == copies


def test_banned() -> None:
    """Law: the error names the operation, and the rule or torch's table."""
    policy = Policy.parse("torch + op:mm=banned")
    told = pytest.raises(RuntimeError, match="mm is banned by the rule 'op:mm=banned'")
    with steered({"mm": "banned"}, policy=policy, rule=0), told:
        torch.mm(X, X)
    told = pytest.raises(RuntimeError, match="mm is unsafe in 16 bits: torch's table")
    with steered({"mm": "banned"}), told:
        torch.mm(X, X)


@pytest.fixture
def library() -> Iterator[str]:
    lib: Any = Library("halfstep_test_kernels", "DEF")  # type: ignore[no-untyped-call]
    lib.define("twice(Tensor x, float by=2.0) -> Tensor")
    lib.impl("twice", lambda x, by=2.0: x * by, "CompositeExplicitAutograd")
    yield "halfstep_test_kernels::twice"
    dispatch_kernels._installed.pop("halfstep_test_kernels::twice", None)
    lib._destroy()


def test_in_front_of_another_kernel(library: str) -> None:
    """Law: a rule steers a library's operator, and is asked before its own kernel."""
    other = Library("halfstep_test_kernels", "IMPL")  # type: ignore[no-untyped-call]
    other.impl("twice", lambda x, _=2.0: x + 100, "AutocastCPU")  # type: ignore[no-untyped-call]
    twice = overload_of(library)
    try:
        with steered({library: "low"}) as frame:
            assert torch.equal(twice(X, 3.0), X.to(BF16) * 3)
            frame.op_casts = {}
            assert torch.equal(twice(X), X + 100)
        with torch.autocast("cpu"):
            assert torch.equal(twice(X), X + 100)
    finally:
        other._destroy()  # type: ignore[no-untyped-call]


def test_threads_install_once() -> None:
    """Law: threads that install the same at once get one kernel, that works."""
    names = ["lgamma", "digamma", "erf", "erfc", "sinc"]
    barrier = threading.Barrier(4, timeout=30)

    def work(_: int) -> Tensor:
        barrier.wait()
        with steered(dict.fromkeys(names, "low")):
            return torch.erf(X)

    with ThreadPoolExecutor(4) as pool:
        assert {out.dtype for out in pool.map(work, range(4))} == {BF16}


def test_a_backend_that_uses_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where another backend needs the dispatch key, a policy is rejected."""
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    with pytest.raises(UserError, match="the backend 'npu' uses"):
        autocast("cpu", policy="lean")
    with autocast("cpu"):
        assert torch.mm(X, X).dtype == BF16


def test_devices_in_the_dispatchers_order() -> None:
    """Law: the device whose autocast key torch comes to first decides."""
    keys: Any = torch._C.DispatchKey.__members__
    numbers = [
        int(keys[dispatch_kernels.KEYS[device]])
        for device in dispatch_kernels._DEVICE_ORDER
    ]
    assert numbers == sorted(numbers, reverse=True)
    assert int(active_context.KEY) > numbers[0]  # type: ignore[call-overload]


def test_devices_have_torchs_keys() -> None:
    """Law: for each device with a table, the key is the one torch casts at."""
    assert dispatch_kernels.KEYS.keys() == {"cpu", "cuda", "mps", "xpu"}
    for device, key in dispatch_kernels.KEYS.items():
        assert has_kernel("aten::mm", key), device


def test_a_rule_acts_on_its_device() -> None:
    """Law: a rule of a context for one device says nothing of tensors on another."""
    meta = torch.ones(4, 4, device="meta")
    for category in ("low", "banned"):
        with steered({"mm": category}, rule=0) as frame:
            assert torch.mm(meta, meta).dtype == FP32
            assert frame.matched_rules == set()
    with steered({"mm": "low"}, rule=3) as frame:
        assert torch.mm(X, X).dtype == BF16
        assert frame.matched_rules == {3}


# Which operations a policy takes out of torch's hands


DEVICES = pytest.mark.parametrize("device", TABLES)


def parse(*words: str) -> Policy:
    return Policy.parse(" + ".join(words))


def word(table: dict[str, op_tables.Row], op: str) -> str:
    return table[op].category if op in table else KEEP


@DEVICES
def test_torchs_table_steers_nothing(device: str) -> None:
    """Law: what torch does by itself it does without us."""
    assert op_casts_for(TORCH, device) == {}


@DEVICES
def test_lean_steers_what_differs(device: str) -> None:
    """Law: of lean, just the rows that torch's table has otherwise, or fails at."""
    own, lean = TABLES[device], LEAN[device]
    differ = {op for op in own.keys() | lean.keys() if word(own, op) != word(lean, op)}
    # torch refuses to promote a mix of 16-bit formats.
    differ |= {op for op in lean if word(lean, op) == PROMOTE}
    rows = op_casts_for(LEAN_ONLY, device)
    assert rows.keys() == differ
    assert not any(
        row.is_torch_default or row.rule_index is not None for row in rows.values()
    )


@DEVICES
def test_weights_take_in_products(device: str) -> None:
    """Law: a cache of casts sees every product with weights, and no attention."""
    rows = op_casts_for(TORCH, device, cache_weights=True)
    low = {op for op, row in TABLES[device].items() if row.category == LOW}
    attention = "scaled_dot_product_attention", "_scaled_dot_product_flash_attention"
    assert rows.keys() == low.difference(attention)
    assert "linear" in rows
    assert not any(row.is_torch_default for row in rows.values())


@DEVICES
def test_everything_takes_in_all_rows(device: str) -> None:
    """Law: to be observed, each operation with a row; those of torch run as torch's."""
    rows = op_casts_for(TORCH, device, record_all=True)
    assert rows.keys() == TABLES[device].keys()
    assert all(row.is_torch_default for row in rows.values())
    assert op_casts_for(LEAN_ONLY, device, record_all=True).keys() == (
        TABLES[device].keys() | LEAN[device].keys()
    )


def test_operators_that_come_later() -> None:
    """Law: a refused name is asked for again: a library may have come since."""
    policy = Policy.parse("torch + op:halfstep_test_steering::late=low")
    with pytest.raises(UserError, match="matches no operation"):
        check_policy(policy, "cpu", None)
    library: Any = Library("halfstep_test_steering", "DEF")  # type: ignore[no-untyped-call]
    library.define("late(Tensor x) -> Tensor")
    check_policy(policy, "cpu", None)
    library._destroy()
