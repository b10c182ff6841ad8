"""Regions in the replicas of `nn.DataParallel`, each of which runs in its own thread.

On a CPU torch's `parallel_apply` runs with what it asks of an accelerator replaced.
"""

import contextlib
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import parallel

from halfstep.casting import active_context, recompute
from halfstep.casting.autocast_mode import autocast

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
        "current_accelerator": lambda *_: torch.device("cpu"),
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
@pytest.mark.parametrize(
    ("policy", "mm", "mv"),
    [(None, 16, 32), ("torch", 16, 32), ("lean", 16, 16), (RULES, 32, 32)],
)
@pytest.mark.parametrize("cache", [True, False])
def test_replicas_run_as_the_caller(
    low: torch.dtype, policy: str | None, mm: int, mv: int, cache: bool
) -> None:
    """Law: dtype, policy and cache of the region hold in each replica.

    Gradients come back.
    """
    model = Seen()
    with autocast("cpu", low, policy=policy, cache_enabled=cache):
        seen = apply([model] * 3)
        here = active_context.active("cpu")
    assert len({one["thread"] for one in seen}) == 3
    bits = {16: low, 32: torch.float32}
    for one in seen:
        assert torch.equal(one["mm"], X.to(bits[mm]))
        assert (one["mm"].dtype, one["mv"].dtype) == (bits[mm], bits[mv])
        assert one["frame"] is here
        assert (one["island"], one["cache"]) == (torch.float32, cache)
    total = torch.stack([one["mm"] for one in seen]).float().sum()
    total.backward()  # type: ignore[no-untyped-call]
    # Each replica adds the sums of the input's columns.
    assert torch.equal(model.weight.grad, 3 * X.sum(0)[:, None].expand(4, 4))


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
        wrapped = parallel.parallel_apply
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
