"""What `amp.initialize` prints: apex's lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from apex_programs.process import fresh
from torch import nn

from halfstep.compat.apex import amp

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def start(level: str, **kwargs: Any) -> None:
    """Prepare a net and its optimizer."""
    net = nn.Linear(2, 2)
    amp.initialize(net, torch.optim.SGD(net.parameters()), opt_level=level, **kwargs)


SAID = """\
Selected optimization level O3:  Pure FP16 training.
Defaults for this optimization level are:
enabled                : True
opt_level              : O3
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : False
loss_scale             : 1.0
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O3
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : False
loss_scale             : 8.0
"""
BRIEFS = {
    "O0": "Pure FP32 training.",
    "O1": "Insert automatic casts around Pytorch functions and Tensor methods.",
    "O2": "FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "Pure FP16 training.",
}


def test_says_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: verbosity 1 prints what apex did, to the letter; 0 nothing."""
    start("O3", loss_scale=8)
    assert capsys.readouterr().out == SAID
    for level, brief in BRIEFS.items():
        start(level)
        first, *_ = capsys.readouterr().out.splitlines()
        assert first == f"Selected optimization level {level}:  {brief}"
    start("O3", verbosity=0)
    assert capsys.readouterr().out == ""
