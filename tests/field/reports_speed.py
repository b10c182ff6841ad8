"""Mixed precision that makes nothing faster or smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.field.report import Program, report
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.field.report import Amp


@report(
    says=r"of a step of .* in fp32 matmuls.*inside the autocast", truth="autocast|fp32"
)
def only_the_loss_in_autocast(amp: Amp, *, cured: bool) -> Program:
    # Products large enough to take most of a step, also on a busy machine.
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, dtypes = torch.randn(512, 256), set()

    def forward() -> Tensor:
        y = model(x)
        dtypes.add(y.dtype)
        return y

    def step() -> None:
        optimizer.zero_grad()
        y = None if cured else forward()
        with amp.autocast(torch.bfloat16):
            y = forward() if y is None else y
            loss = y.float().square().mean()
        loss.backward()
        optimizer.step()

    return Program(model, step, lambda: dtypes == {torch.float32})
