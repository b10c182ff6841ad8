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
    """Law: after install() `import apex` finds us, in all the ways it is written."""
    for name in ("apex", *(f"apex.{part}" for part in vars(apex))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "apex", None)
    for part in ("amp", "parallel", *apex._SUBMODULES):
        monkeypatch.setitem(sys.modules, f"apex.{part}", None)
    program = """
import apex
from apex import amp
from apex.amp import _amp_state
from apex.amp._amp_state import _amp_state as inner, maybe_print, master_params
from apex.amp.frontend import initialize
from apex.amp.handle import disable_casts, scale_loss
from apex.amp.scaler import LossScaler as AmpLossScaler
import apex.amp.scaler
attribute = apex.amp.scaler.LossScaler
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
"""
    with pytest.raises(ModuleNotFoundError):
        exec(program, {})  # noqa: S102 -- a program is what is tested
    apex.install()
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert names["amp"] is amp
    assert names["_amp_state"] is names["inner"] is amp._amp_state
    assert names["scale_loss"] is amp.scale_loss
    assert names["attribute"] is names["AmpLossScaler"]
    amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)
    (scaler,) = amp._amp_state.loss_scalers
    assert isinstance(scaler, names["AmpLossScaler"])
    assert names["DDP"] is nn.parallel.DistributedDataParallel
