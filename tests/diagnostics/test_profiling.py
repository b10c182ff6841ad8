"""Where the time of a step goes: every share is where it was put, and only there."""

import json
import math
import os
from dataclasses import fields
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.utils.data import DataLoader

import halfstep as hs
from halfstep.diagnostics.profiling import profile, timeline
from halfstep.diagnostics.profiling.profile_result import GEMM, Profile, Row
from halfstep.diagnostics.profiling.profile_step import summary
from halfstep.errors import UserError


def rows_of(found: Profile, op: str) -> list[Row]:
    return [row for row in found.rows if row.op == op]


def test_rows_tell_shapes_dtypes_and_calls() -> None:
    """Law: calls of one operation on the same shapes and dtypes are one row."""
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    low = x.bfloat16(), w.bfloat16()

    def step() -> None:
        torch.mm(x, w)
        torch.mm(x, w)
        torch.mm(*low)

    found = profile(step, steps=1)
    rows = {row.dtypes: row for row in rows_of(found, "mm")}
    assert set(rows) == {("fp32", "fp32"), ("bf16", "bf16")}
    assert [rows[key].calls for key in sorted(rows)] == [1, 2]
    assert rows["fp32", "fp32"].shapes == ((8, 16), (16, 4))


def test_nothing_is_counted_twice() -> None:
    """Law: operations' own time, Python's and input's are parts of one whole."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 64))

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()

    found = profile(step, batches=[torch.randn(32, 64)])
    told = sum(row.self_s for row in found.rows) + found.python_s + found.input_s
    assert told == pytest.approx(found.wall_s, rel=0.02)
    assert min(row.self_s for row in found.rows) >= 0


@pytest.mark.parametrize("fetch", ["batches", "loader inside"])
def test_input_is_seen(fetch: str) -> None:
    """Law: fetching a batch is input, with all that it calls; what follows is not."""
    loader = DataLoader([torch.ones(4)] * 100, batch_size=1)
    if fetch == "batches":
        found = profile(torch.neg, batches=loader)
    else:
        source = iter(loader)
        found = profile(lambda: next(source).neg())
    assert found.input_s > 0
    assert {row.op for row in found.rows} == {"neg"}
    assert profile(lambda: torch.ones(4).neg()).input_s == 0


class Event:
    """What the profiler tells of one event on the host."""

    def __init__(self, name: str, begin: int, end: int, *dtypes: str) -> None:
        told = {"name": name, "start_ns": begin, "end_ns": end, "dtypes": dtypes}
        told |= {"duration_ns": end - begin, "shapes": [[1]] * len(dtypes)}
        told |= {"device_type": DeviceType.CPU, "start_thread_id": 1}
        told["is_user_annotation"] = "::" not in name
        for word, value in told.items():
            setattr(self, word, lambda value=value: value)


def test_each_nanosecond_is_where_it_was_spent() -> None:
    """Law: what no operation and no fetching covers is the host's own.

    Copies between float dtypes are casts; from ints, or of one dtype, they are none.
    Operations in fp32 count in a run in 16 bits, and those of the update do not.
    """
    copy = partial(Event, "aten::copy_")
    events = (
        Event("step", 1000, 2000),
        Event(timeline.INPUT, 1010, 1110),
        Event("aten::stack", 1020, 1100),
        Event("aten::to", 1200, 1300, "float"),
        copy(1220, 1270, "c10::BFloat16", "float"),
        copy(1300, 1330, "float", "float"),
        copy(1400, 1420, "float", "long int"),
        Event("aten::softmax", 1500, 1700, "float"),
        Event("aten::softmax", 1700, 1710, "c10::BFloat16"),
        Event("aten::mm", 1710, 1730, "float", "float"),
        Event("Optimizer.step#SGD.step", 1740, 1850),
        Event("aten::add_", 1750, 1820, "float"),
    )
    (step,) = timeline.read(events, "step")
    found = summary(step, dtype="bf16")
    assert found.wall_s == pytest.approx(1000e-9)
    assert found.input_s == pytest.approx(100e-9)
    assert found.casts_s == pytest.approx(50e-9)
    assert (found.update_s, found.optimizer) == (pytest.approx(70e-9), "SGD")
    in_operations = 100 + 30 + 20 + 200 + 10 + 20 + 70
    assert found.python_s == pytest.approx((1000 - 100 - in_operations) * 1e-9)
    # What "to" did itself, the copy that is no cast, and the softmax.
    in_fp32 = (100 - 50) + (30 + 20) + 200
    assert found.fp32_only_s == pytest.approx(in_fp32 * 1e-9)
    assert summary(step).fp32_only_s == 0


def test_casts_are_seen() -> None:
    """Law: of torch's operations, copies between float dtypes are casts, no others."""
    wide, whole = torch.randn(64), torch.ones(64, dtype=torch.int64)
    assert profile(lambda: (wide.clone(), whole.float())).casts_s == 0
    assert profile(wide.bfloat16).casts_s > 0


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_waits_are_counted(low: torch.dtype) -> None:
    """Law: each number that is read out of a tensor is one wait."""
    x = torch.ones(3, dtype=low)

    def step() -> None:
        float(x[0])
        x[1].item()
        if x[2]:
            x.add(1)

    assert profile(step).waits == 3


def test_the_format_seen_is_that_of_the_products() -> None:
    """Law: unless it is told, the dtype is the one that products ran in."""
    x = torch.randn(64, 64)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.softmax(x @ x, -1)

    assert profile(step).dtype == "bf16"
    assert profile(lambda: x @ x).dtype == "fp32"
    told = profile(lambda: x @ x, level="O1", dtype="fp16")
    assert (told.level, told.dtype) == ("O1", "fp16")


def test_kernels_in_c_are_no_python() -> None:
    """Law: a session's update in C is part of the update, not time without work."""
    net = nn.Linear(512, 512)
    session = hs.prepare(
        net, torch.optim.AdamW(net.parameters(), fused=True), level="O2", dtype="bf16"
    )
    x = torch.randn(8, 512)

    def step() -> None:
        with session.autocast():
            loss = session.model(x).square().mean()
        session.backward(loss)
        session.step()

    found = profile(step)
    ours = rows_of(found, "halfstep::update")
    assert ours
    assert found.update_s >= sum(row.self_s for row in ours) > 0


@pytest.mark.parametrize(
    ("op", "is_one"),
    [
        *((name, True) for name in ("mm", "addmm", "bmm", "mkldnn_convolution")),
        *((name, True) for name in ("convolution_backward", "mkldnn_rnn_layer")),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", True),
        *((name, False) for name in ("copy_", "add", "addcmul_", "native_layer_norm")),
        *((name, False) for name in ("comm", "mul", "amax", "_fused_adamw_")),
    ],
)
def test_what_is_a_product(op: str, is_one: bool) -> None:
    """Law: products are known by name, and nothing else is taken for one."""
    assert bool(GEMM.fullmatch(op)) == is_one


def test_round_trip() -> None:
    """Law: a profile is plain values, and comes back from JSON as it was."""
    rows = (Row("mm", ((2, 3), (3, 4)), ("bf16", "bf16"), 2, 0.25),)
    seconds = [(index + 1) / 16 for index in range(6)]
    *parts, wait = seconds
    found = Profile(2.5, rows, *parts, 3, wait, 0.5, "cuda", "O1", "bf16", "AdamW")
    default = {field.name: field.default for field in fields(Profile)}
    assert all(getattr(found, name) != value for name, value in default.items())
    assert Profile.from_data(json.loads(json.dumps(found.data()))) == found
    assert {"wall_s", "rows", "casts_s", "gemm_s", "fp32_only_s"} <= found.data().keys()


def test_batches_begin_again_or_run_out() -> None:
    """Law: a collection is begun again; what can be read once says that it ended."""
    seen: list[int] = []
    profile(seen.append, steps=2, warmup=1, batches=[1, 2])
    profile(seen.append, steps=2, warmup=1, batches=iter(range(6, 11)))
    assert seen == [1, 2, 1, 2, 1, 6, 7, 8, 9, 10]
    with pytest.raises(UserError, match=r"batches ran out: give a collection"):
        profile(seen.append, batches=iter([1]))


def test_nothing_is_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the profiler's library says nothing, and the environment is as it was."""
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    profile(lambda: torch.ones(3).sum())
    assert capfd.readouterr() == ("", "")
    with monkeypatch.context() as patch:
        patch.setenv("KINETO_LOG_LEVEL", "7")
        profile(lambda: torch.ones(3).sum())
    assert "KINETO_LOG_LEVEL" not in os.environ


Spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: (p[0], sum(p)))
)


@given(Spans)
def test_union_of_spans(spans: list[tuple[int, int]]) -> None:
    """Law: the length of a union is the number of points in it."""
    points = {at for begin, end in spans for at in range(begin, end)}
    assert timeline.total(spans) == len(points)
    step = timeline.Timeline((10, 30))
    assert step.inside(spans) == len(points & set(range(10, 30)))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Law: on a GPU, kernels are charged to operations, and waits are counted."""
    x = torch.randn(8192, 8192, device="cuda")

    def step() -> float:
        return (x @ x).sum().item()

    found = profile(step, device="cuda")
    assert found.device == "cuda"
    assert found.waits == 1
    assert found.share(found.gemm_s) > 0.3
    assert math.isfinite(found.python_s)
    assert found.python_s < found.wall_s
