"""Regions in the replicas of `nn.DataParallel`, each of which runs in its own thread.

On a CPU torch's `parallel_apply` runs with what it asks of an accelerator replaced.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import parallel

from halfstep.casting import active_context, recompute
from halfstep.casting.autocast_mode import autocast

if TYPE_CHECKING:
    from collections.abc import Callable

torch_only = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason=f"the defect was seen in torch 2.13, this is {torch.__version__}",
)
"""Marks twins, in which torch.autocast shows the defect."""
DTYPES = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
RULES = "torch + op:mm=fp32"


@pytest.fixture(autouse=True)
def _cpu_as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU be what `parallel_apply` runs on."""
    if torch.cuda.is_available():
        return
    room = sys.modules["torch.nn.parallel.parallel_apply"]
    if "accelerator" not in room.parallel_apply.__code__.co_names:
        pytest.skip(f"torch {torch.__version__} runs replicas on CUDA alone")
    asked = torch.is_autocast_enabled
    for name, answer in {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cpu"),
        "current_stream": lambda _: contextlib.nullcontext(),
        "device_index": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    # Without an argument it asks about CUDA.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda on="cpu": asked(on))
    monkeypatch.setattr(room, "_get_device_index", lambda *_: 0)


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor, *, fails: bool = False) -> dict[str, Any]:
        if fails:
            message = "on purpose"
            raise ValueError(message)
        with torch.autocast("cpu", enabled=False):
            island = x.mm(self.weight).dtype
        return {
            "mm": x.mm(self.weight),
            "mv": self.weight.mv(x[0]),
            "island": island,
            "cache": torch.is_autocast_cache_enabled(),
            "frame": active_context.active("cpu"),
            "thread": threading.current_thread(),
        }


X = torch.arange(8.0).view(2, 4) + 1


def apply(modules: list[Any], **keywords: Any) -> list[dict[str, Any]]:
    """Run replicas as `nn.DataParallel` does, on the same input."""
    each = [(X,)] * len(modules)
    wrapper = object.__new__(nn.DataParallel)
    vars(wrapper)["device_ids"] = [0] * len(modules)
    return wrapper.parallel_apply(modules, each, [keywords] * len(modules))


cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is used instead")


@cpu_only
@DTYPES
@pytest.mark.parametrize("count", [1, 2, 3])
def test_replicas_run_in_the_callers_dtype(low: torch.dtype, count: int) -> None:
    """Law: each replica multiplies in the region's dtype, and gradients come back."""
    model = Seen()
    with autocast("cpu", low):
        seen = apply([model] * count)
        assert len({one["thread"] for one in seen}) == count
    expected = X.to(low)
    for one in seen:
        assert torch.equal(one["mm"], expected)
        assert one["mm"].dtype == low
        assert (one["island"], one["cache"]) == (torch.float32, True)
    total = torch.stack([one["mm"] for one in seen]).float().sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    # Each replica adds the sums of the input's columns.
    assert torch.equal(model.weight.grad, count * X.sum(0)[:, None].expand(4, 4))


@cpu_only
@torch_only
def test_twin_torch_takes_the_default_dtype() -> None:
    """Law: torch's threads know that autocast is on, but take the device's dtype.

    Where this fails, torch was mended and `casting.recompute` need only carry
    policies.
    """
    with torch.autocast("cpu", torch.float16):
        seen = apply([Seen(), Seen()])
    assert [one["mm"].dtype for one in seen] == [torch.bfloat16] * 2


@cpu_only
@DTYPES
@pytest.mark.parametrize(
    ("policy", "mm", "mv"),
    [("torch", 16, 32), ("lean", 16, 16), (RULES, 32, 32)],
)
def test_replicas_obey_the_policy(
    low: torch.dtype, policy: str, mm: int, mv: int
) -> None:
    """Law: what the policy says of an operation holds in each replica."""
    with autocast("cpu", low, policy=policy):
        seen = apply([Seen(), Seen()])
        here = active_context.active("cpu")
    bits = {16: low, 32: torch.float32}
    for one in seen:
        assert (one["mm"].dtype, one["mv"].dtype) == (bits[mm], bits[mv])
        assert one["frame"] is here


@cpu_only
def test_replicas_obey_rules_on_modules() -> None:
    """Law: a rule on a module acts in every replica at once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with autocast("cpu", policy="torch + module:1=fp32", model=model):
        seen: list[Any] = apply([model, model, model])
    assert [out.dtype for out in seen] == [torch.float32] * 3
    with autocast("cpu"):
        assert model(X).dtype == torch.bfloat16


@cpu_only
def test_the_cache_flag_is_carried() -> None:
    """Law: a region without a cache has none in replicas."""
    with autocast("cpu", cache_enabled=False):
        assert [one["cache"] for one in apply([Seen(), Seen()])] == [False, False]


@cpu_only
def test_no_region_no_change() -> None:
    """Law: outside, inside torch's regions and where autocast is off, torch decides."""
    assert apply([Seen()])[0]["mm"].dtype == torch.float32
    with autocast("cpu", torch.float16), torch.autocast("cpu", enabled=False):
        assert apply([Seen()])[0]["mm"].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert apply([Seen()])[0]["mm"].dtype == torch.bfloat16


@cpu_only
def test_a_callers_thread_is_left_as_it_was() -> None:
    """Law: `in_caller_context` closes what it opens, in this thread too, or not."""
    with autocast("cpu", torch.float16, policy="lean"):
        (run,) = recompute.in_caller_context([Seen()])
    assert run(X)["mm"].dtype == torch.float16
    with pytest.raises(ValueError, match="on purpose"):
        run(X, fails=True)
    assert not torch.is_autocast_enabled("cpu")
    assert active_context.active("cpu") is None


def test_torch_is_wrapped_while_a_context_is_open() -> None:
    """Law: torch's function is wrapped once inside, in both places, and not outside."""
    original = parallel.parallel_apply
    globals_: Any = nn.DataParallel.parallel_apply.__globals__
    assert original.__module__ == "torch.nn.parallel.parallel_apply"
    with autocast("cpu"):
        wrapped: Callable[..., Any] = parallel.parallel_apply
        with autocast("cpu", policy="lean"):
            assert parallel.parallel_apply is wrapped
        assert wrapped.__name__ == "parallel_apply"
        assert vars(wrapped)["__wrapped__"] is original
        assert vars(globals_["parallel_apply"])["__wrapped__"] is original
    assert parallel.parallel_apply is globals_["parallel_apply"] is original


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("policy", [None, "lean"])
def test_data_parallel_on_devices(low: torch.dtype, policy: str | None) -> None:
    """Law: nn.DataParallel computes what the bare model does, in the same dtype."""
    devices = list(range(torch.cuda.device_count()))
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).cuda()
    wrapped = nn.DataParallel(model, devices)
    x = torch.randn(4, 8, device="cuda")
    with autocast("cuda", low, policy=policy):
        expected, actual = model(x), wrapped(x)
    assert actual.dtype == expected.dtype == (low if policy else torch.float32)
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(low).eps, atol=1e-3)
