"""Sessions and the training program on a CUDA GPU."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from session_cases import KINDS, build, everything, same
from torch import nn

from halfstep.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from halfstep.session.session import Session

pytestmark = pytest.mark.gpu
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02, eps=1e-3, fused=True)
OPTIMIZERS: dict[str, Any] = {"sgd": SGD, "adamw": ADAMW}
FORMS = ("split", "kahan", "stochastic")
CASES = [
    *((kind, name, {}) for kind in KINDS for name in OPTIMIZERS),
    *(("O2 bf16", name, {"master": form}) for form in FORMS for name in OPTIMIZERS),
    ("O2 fp16", "adamw", {"clip_grad_norm": 0.1, "accumulate": 2}),
]


def train(session: Session, steps: range) -> list[float]:
    losses = []
    device = next(session.model.parameters()).device
    for step in steps:
        generator = torch.Generator().manual_seed(step % 2)
        x = torch.randn(16, 6, generator=generator).to(device)
        with session.autocast():
            out = session.model(x)
            loss = nn.functional.mse_loss(out.float(), x[:, :3] * x[:, 3:])
        session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("kind", "optimizer", "options"), CASES)
def test_training(kind: str, optimizer: str, options: dict[str, Any]) -> None:
    """Law: losses are a CPU's within rounding; a saved session goes on to the bit."""
    make = OPTIMIZERS[optimizer]
    session = build(kind, make, device="cuda", **options)
    losses = train(session, range(10))
    on_cpu = train(build(kind, make, **options), range(10))
    assert losses == pytest.approx(on_cpu, rel=1e-3 if kind == "O0 fp32" else 0.05)
    file = io.BytesIO()
    torch.save([session.model.state_dict(), session.state_dict()], file)
    file.seek(0)
    model_state, state = torch.load(file, weights_only=True)
    resumed = build(kind, make, seed=1, device="cuda", **options)
    resumed.model.load_state_dict(model_state)
    resumed.load_state_dict(state)
    assert train(session, range(10, 14)) == train(resumed, range(10, 14))
    same(everything(resumed), everything(session))


@pytest.mark.parametrize(
    "precision",
    [
        ["--level", "O2", "--dtype", "fp16", "--probe", "full"],
        ["--level", "O2", "--master-weights", "split", "--recompute"],
        ["--level", "O1", "--dtype", "fp16", "--compare-fp32", "3"],
        ["--level", "O3"],
    ],
    ids=" ".join,
)
def test_the_training_program(
    precision: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: it trains, evaluates, predicts and is diagnosed on the GPU."""

    def printed(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    out = str(tmp_path / "run")
    few = "--max-steps", "20", "--limit", "300", "--batch-size", "16"
    assert "Quality on test" in printed("train", "--out", out, *few, *precision)
    assert "今天真开心" in printed("predict", out, "今天真开心")
    assert "on cuda, 20 steps" in " ".join(printed("doctor", out).split())
