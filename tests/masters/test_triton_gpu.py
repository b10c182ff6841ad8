"""Fused updates on a true GPU: the same to the bit as torch's, without waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton_cases import ADAM, BF16, CASES, CLOCK, WEIGHTS, item_of, moved, same

from halfstep.errors import UserError
from halfstep.masters import triton_kernels as tk

if TYPE_CHECKING:
    from halfstep.masters.fused_step import Adam, ParamUpdate

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MANY = 1000


def step(items: list[ParamUpdate], rule: Adam, form: str, one: torch.Tensor) -> None:
    """Look at gradients and update; nothing changes, for the flag is up."""
    tk.update(items, rule, form, inverse=one, clock=CLOCK, found_inf=one)
    tk.check_finite([item.gradient for item in items], norm=True)


def small(form: str, count: int) -> list[ParamUpdate]:
    dtypes = (WEIGHTS[form][0], BF16)
    items = [item_of(form, ADAM, 8, dtypes, 2 * (n % 9)) for n in range(count)]
    return [moved(item, CUDA) for item in items]


def test_available() -> None:
    """Law: a device that runs CUDA builds of torch has these kernels."""
    assert tk.available(CUDA)
    assert "one launch" in tk.describe()


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    """Law: kernels give what torch's operations give on a CPU, to the bit."""
    CASES[name](CUDA)


@pytest.mark.parametrize("form", WEIGHTS)
def test_no_waiting(form: str) -> None:
    """Law: neither the update nor the look waits for the device."""
    items, one = small(form, 20), torch.ones((), device=CUDA)
    step(items, ADAM, form, one)  # kernels are compiled, memory is mapped
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(items, ADAM, form, one)
        with pytest.raises(RuntimeError, match="synchron"):
            one.item()  # it would be seen
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_many_small_tensors() -> None:
    """Law: a thousand small tensors are two launches, and give what one by one gives.

    One works out Adam's corrections, the other updates.
    """
    ours, alone = small("split", MANY), small("split", MANY)
    one = torch.ones((), device=CUDA)
    zero = one - one
    step(ours, ADAM, "split", one)
    both = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=both, acc_events=True) as seen:
        tk.update(ours, ADAM, "split", inverse=one, clock=CLOCK, found_inf=zero)
        torch.cuda.synchronize()
    kernels = [
        event.name
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith("Mem")
    ]
    assert sorted(kernels) == ["correct", "update"]
    for mine, other in zip(ours, alone, strict=True):
        tk.update([other], ADAM, "split", inverse=one, clock=CLOCK, found_inf=zero)
        same(mine.weight, other.weight.cpu(), "weight")


def compiled() -> int:
    """Return how many kernels there are; where Triton keeps them has changed."""
    count = 0
    for kernel in tk._code().values():
        if hasattr(kernel, "device_caches"):
            count += sum(len(kept[0]) for kept in kernel.device_caches.values())
        else:
            count += sum(len(kept) for kept in kernel.cache.values())
    return count


def test_numbers_make_no_kernels() -> None:
    """Law: no learning rate, and no count of tensors, is compiled into a kernel."""
    one = torch.ones((), device=CUDA)
    rule = replace(ADAM, amsgrad=True)
    items = [moved(item_of("fp32", rule, 8, (BF16, BF16), 2), CUDA) for _ in range(17)]
    before = compiled()
    step(items, rule, "fp32", one)
    first = compiled()
    assert first > before, "they would be seen"
    for lr, count in ((0.0, 1), (1.0, 2), (1, 16), (16, 17), (0.3, 4)):
        step(items[:count], replace(rule, lr=lr), "fp32", one)
    assert compiled() == first


def test_large_offsets() -> None:
    """Law: elements beyond 2**31 are read where they are."""
    free, _ = torch.cuda.mem_get_info()
    numel = (1 << 31) + 5000
    if free < 3 * numel:
        pytest.skip(f"needs {3 * numel >> 30} GiB of device memory")
    gradient = torch.zeros(numel, dtype=BF16, device=CUDA)
    gradient[-1] = 3
    found, total = tk.check_finite([gradient], norm=True)
    assert (float(found), float(total)) == (0, 9)  # type: ignore[arg-type]
    gradient[-2] = torch.inf
    assert float(tk.check_finite([gradient], norm=False)[0]) == 1


def test_capture_is_refused() -> None:
    """Law: what would repeat one step's numbers for ever is not recorded."""
    items, one = small("plain", 2), torch.ones((), device=CUDA)
    step(items, ADAM, "plain", one)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            one.add_(0)  # torch warns of an empty graph
            tk.update(items, ADAM, "plain", inverse=one, clock=CLOCK, found_inf=one)

    with pytest.raises(UserError, match="cannot be captured in a CUDA graph"):
        capture()
