"""Names of apex: its alias, and those that are torch's here."""

import sys
from typing import Any

import pytest
from torch import nn

from halfstep.compat import apex
from halfstep.compat.apex import amp, parallel


def test_convert_syncbn_model() -> None:
    """Law: each batch norm becomes torch's of all ranks."""
    converted: Any = parallel.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(2)))
    assert type(converted[0]) is nn.SyncBatchNorm is parallel.SyncBatchNorm


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: after install() `import apex` finds this package, however it is written."""
    for name in ("apex", "apex.amp", "apex.parallel"):
        monkeypatch.setitem(sys.modules, name, None)
    program = """
import apex
import apex.amp
from apex import amp
from apex.amp import _amp_state, scale_loss
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
"""
    with pytest.raises(ModuleNotFoundError):
        exec(program, {})  # noqa: S102 -- a program is what is tested
    apex.install()
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert names["amp"] is names["apex"].amp is amp
    assert names["_amp_state"] is amp._amp_state
    assert names["scale_loss"] is amp.scale_loss
    assert names["DDP"] is nn.parallel.DistributedDataParallel
