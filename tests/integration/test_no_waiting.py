"""Nothing in a step waits for the device.

Fake tensors stand for those of a GPU: they know their dtype and shape, and refuse to
give a number to the host. Where a GPU is there, its driver is asked to refuse.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import halfstep as hs
from halfstep._torch import async_read
from halfstep.casting import convert_model
from halfstep.masters import fused_step
from halfstep.masters.encoding import FP32, RoundingRng
from halfstep.session import factory

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": functools.partial(torch.optim.Adam, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
}
ON_GPU = FUSED | {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}
"""The kernel of SGD has no fake form."""
STEPS = 4
FAKE = torch.device("cpu")
"""Fake tensors of other devices need those devices' drivers."""


@pytest.fixture(name="gpu", autouse=True)
def _gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Be where every number must be waited for, and none arrives in time."""
    if request.node.get_closest_marker("gpu"):
        yield
        return
    monkeypatch.setattr(async_read, "READABLE_DEVICES", frozenset())
    monkeypatch.setattr(async_read.DelayedScalars, "submit", lambda *_: None)
    # The kernels of a CPU read memory, which fake tensors have none of.
    monkeypatch.setattr(fused_step, "why_not_fused", lambda _: "torch's own step")
    monkeypatch.setattr(factory, "warnings_for", lambda *_, **__: ())
    with FakeTensorMode():
        yield


def net(device: torch.device) -> nn.Module:
    """Return a small model; what is in it matters to nobody."""
    return nn.Sequential(*(nn.Linear(8, 8, device=device) for _ in range(2)))


def fill(model: nn.Module) -> None:
    """Leave gradients as a backward pass does, which needs a true GPU."""
    for param in model.parameters():
        param.grad = torch.empty_like(param)


def test_a_fake_gpu_refuses() -> None:
    """Law: the tests below can fail: reading one number raises."""
    with pytest.raises(DataDependentOutputException):
        bool(torch.ones((), device=FAKE) > 0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("adamw", {}), ("adam", {"strategy": "none"}), ("adam", {"hysteresis": 2})],
)
def test_scaler(kind: str, more: dict[str, Any]) -> None:
    """Law: scale, unscale_, clipping, step and update of fused optimizers do not."""
    model = net(FAKE)
    optimizer = FUSED[kind](model.parameters())
    scaler = hs.GradScaler("cpu", max_consecutive_skips=3, **more)
    for step in range(STEPS):
        assert scaler.scale(torch.empty((), device=FAKE)).device == FAKE
        fill(model)
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16"])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0, "accumulate": 2}])
def test_session(level: str, options: dict[str, Any]) -> None:
    """Law: nor does a session, at any level, with a fused optimizer."""
    model = net(FAKE)
    optimizer = FUSED["adamw"](model.parameters())
    name, _, dtype = level.partition(" ")
    # Weights beyond fp16 are looked for once, when the session is made.
    with convert_model.allow_overflow():
        session = hs.prepare(model, optimizer, name, dtype=dtype or "auto", **options)
    for _ in range(STEPS):
        loss = torch.empty((), device=FAKE)
        session.scaler.observe_loss(loss)
        session._window.loss = loss
        fill(model)
        session._grad_versions = session._read_grad_versions()
        session.step()


def test_kernels() -> None:
    """Law: nor does an update whose kernel skips by itself; it counts Adam's steps."""
    param = nn.Parameter(torch.empty(8, device=FAKE))
    param.grad = torch.empty_like(param)
    optimizer = torch.optim.AdamW([param])
    kernel = fused_step.Kernel(
        "", lambda: (param, None), lambda *_, **__: None, on_device=True
    )
    step = fused_step.FusedStep(kernel, optimizer, FP32, {}, {param: 0})
    (group,) = optimizer.param_groups
    zero, rng = torch.zeros((), device=FAKE), RoundingRng(0, 0)
    for _ in range(STEPS):
        step.update(group, [param], inverse=zero, rng=rng, found_inf=zero)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
def test_the_driver_sees_no_wait(kind: str) -> None:
    """Law: on a true GPU, `set_sync_debug_mode("error")` finds nothing to refuse."""
    device = torch.device("cuda")
    model = net(device)
    optimizer = ON_GPU[kind](model.parameters())
    scaler = hs.GradScaler("cuda")
    batch = torch.randn(4, 8, device=device)

    def step() -> None:
        with hs.autocast("cuda", torch.float16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    while scaler.call_order_watch:  # it reads weights in the first steps
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 2.0**16
