"""Ctrl-C at any moment of entering and leaving a context."""

import dis
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from twins import autocast_state, patched

import halfstep
from halfstep.casting import active_context
from halfstep.casting.autocast_mode import autocast
from halfstep.casting.weight_cache import CastCache

HALFSTEP = str(Path(halfstep.__file__).parent)
CHANGES = ("__enter__", "__exit__", "pre_forward", "post_forward")
MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
RULES = "torch + module:0=promote + module:1=fp32"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "off": {"enabled": False},
    "lean": {"policy": "lean", "cache_enabled": False},
    "cache": {"cache": CastCache(), "dtype": torch.float16},
    "modules": {"policy": RULES, "model": MODEL},
}


class Interrupt:
    """Raises KeyboardInterrupt at the n-th moment at which Python would.

    Python handles signals when a function starts, after a call of a C function, and
    where a loop goes back. Moments count in frames of halfstep in `__enter__` and
    `__exit__` of a context, and in the hooks of module rules. The start of `__exit__`
    is left out: it precedes all code of ours, as with any context manager in Python.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.raised = False

    def __enter__(self) -> None:
        sys.settrace(self.call)
        sys.setprofile(self.after_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not is_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if frame.f_code.co_name != "__exit__":
            self.tick()
        return self.opcode

    def opcode(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if operation.startswith("JUMP_BACKWARD"):
                self.tick()
        return self.opcode

    def after_call(self, frame: FrameType, event: str, _: object) -> None:
        if event == "c_return" and is_ours(frame):
            self.tick()

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.raised = True
            raise KeyboardInterrupt


def is_ours(frame: FrameType | None) -> bool:
    """Return whether a frame of halfstep is in a function that changes contexts."""
    if frame is None or not frame.f_code.co_filename.startswith(HALFSTEP):
        return False
    outer: FrameType | None = frame
    while outer is not None:
        is_halfstep = outer.f_code.co_filename.startswith(HALFSTEP)
        if is_halfstep and outer.f_code.co_name in CHANGES:
            return True
        outer = outer.f_back
    return False


def state() -> tuple[object, ...]:
    """Return all that a context changes in torch."""
    devices = torch._C._autocast_supported_devices()
    key = active_context.KEY
    return (
        autocast_state(),
        [torch.is_autocast_enabled(device) for device in devices],
        torch._C._dispatch_tls_is_dispatch_key_included(key),
        torch._C._dispatch_tls_is_dispatch_key_excluded(key),
        torch.compiler.config.cache_key_tag,
        active_context.active("cpu"),
        active_context.in_context(),
        patched(),
    )


def forward_pass(context: Any) -> None:
    with context:
        MODEL(torch.ones(1, 2))


def nested(context: Any) -> None:
    with context, autocast("cpu", enabled=False), context:
        MODEL(torch.ones(1, 2))


# Python itself drops what is raised while an object is finalized.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:policy rule")
@pytest.mark.parametrize("program", [forward_pass, nested])
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c(kind: str, program: Callable[[Any], None]) -> None:
    """Law: wherever a context is interrupted, all is as before, and the next works."""
    context = autocast("cpu", **KINDS[kind])
    program(context)
    outside = state()
    number, raised = 0, True
    while raised:
        number += 1
        interrupt = Interrupt(number)
        with suppress(KeyboardInterrupt), interrupt:
            program(context)
        raised = interrupt.raised
        assert state() == outside, number
        forward_pass(context)
        assert state() == outside, number
    assert number > 50
