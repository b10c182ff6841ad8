"""The loop: what one step does and says, and what a whole run writes."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_training import (
    small_settings,
    steps_of,
    timeless,
    write_letters,
)

from halfstep.errors import UserError
from halfstep.train.run import pick_device, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("small_runs")

KINDS = ("O0 auto", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16")
ROWS, DEV = 100, 10
QUIET = {"dropout": 0.0, "mask_tokens": 0.0}
RECORD = {
    *("step", "epoch", "loss", "lr", "scale", "skipped", "skipped_total"),
    *("found_inf_in", "grad_norm", "examples_per_s", "seconds"),
}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a short run on texts whose characters tell their class."""
    source = write_letters(tmp_path, ROWS, "defxy", "abcxy")
    share = DEV / ROWS
    return small_settings(
        tmp_path, source, dev_share=share, level="O0", lr=5e-3, epochs=2
    )


def records(settings: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Train; return the records of the steps."""
    return steps_of(run(settings | more, overwrite=True).folder.records())


def test_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: asking for a device that is not there is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("cpu") == "cpu"
    with pytest.raises(UserError) as caught:
        pick_device("cuda")
    assert str(caught.value) == (
        "--device cuda: torch sees no CUDA device here; use --device cpu."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_learns(settings: dict[str, Any], kind: str) -> None:
    """Law: at every level the loss falls and separable texts are told apart."""
    level, dtype = kind.split()
    # Hidden characters and dropout would keep the loss up, however good the model.
    given = settings | QUIET | {"level": level, "dtype": dtype, "epochs": 4}
    result = run(given)
    losses = [r["loss"] for r in steps_of(result.folder.records())]
    assert losses[0] == pytest.approx(math.log(2), rel=0.1)
    assert losses[-1] < losses[0] / 2
    assert result.summary["dev"]["accuracy"] == 1.0
    assert result.summary["level"] == level


def test_what_is_written(settings: dict[str, Any]) -> None:
    """Law: metrics hold each step and evaluation once; the summary agrees with them."""
    result = run(settings | {"eval_every": 5, "loss_scale": "8"})
    found = result.folder.records()
    steps = [record for record in found if "event" not in record]
    assert [record["step"] for record in steps] == list(range(1, 13))  # 2 x 90 / 16
    assert [record["epoch"] for record in steps] == [0] * 6 + [1] * 6
    for record in steps:
        assert record.keys() == RECORD
        assert (record["scale"], record["skipped"], record["found_inf_in"]) == (
            (8.0, False, [])
        )
        assert record["grad_norm"] > 0
    evals = [record for record in found if record.get("event") == "eval"]
    assert [record["step"] for record in evals] == [5, 10, 12]
    written = json.loads((result.folder.path / "summary.json").read_text())
    assert written == json.loads(json.dumps(result.summary))
    assert (written["steps"], written["applied"], written["skipped"]) == (12, 12, 0)
    best = max(evals, key=lambda record: float(record["dev_macro_f1"]))
    assert written["best_step"] == best["step"]
    assert written["dev"]["macro_f1"] == best["dev_macro_f1"]


def test_the_parts_of_a_step_are_its_time(settings: dict[str, Any]) -> None:
    """Law: seconds by part add up to what the rate of examples says a step took."""
    result = run(settings | {"epochs": 1})
    steps = [r for r in result.folder.records() if "event" not in r]
    sizes = [16, 16, 16, 16, 16, 10]
    assert sorted(sizes) == sorted(
        round(r["examples_per_s"] * sum(r["seconds"].values())) for r in steps
    )
    for record in steps:
        assert record["seconds"].keys() == {
            *("input", "forward", "backward", "update", "rest")
        }
        assert min(record["seconds"].values()) >= 0


@pytest.mark.parametrize("accumulate", [3, 16])
def test_accumulation_changes_nothing(
    settings: dict[str, Any], accumulate: int
) -> None:
    """Law: micro-batches, even or not, more than texts even, are one batch in fp32."""
    whole = records(settings, **QUIET)
    parts = records(settings, **QUIET, accumulate=accumulate)
    assert [r["loss"] for r in parts] == pytest.approx(
        [r["loss"] for r in whole], rel=1e-4
    )
    assert [r["grad_norm"] for r in parts] == pytest.approx(
        [r["grad_norm"] for r in whole], rel=1e-3
    )


def test_a_seed_is_a_run(settings: dict[str, Any]) -> None:
    """Law: the same seed gives the same records, another gives others."""
    one, again = records(settings), records(settings)
    assert timeless(one) == timeless(again)
    assert one[0]["loss"] != records(settings, seed=1)[0]["loss"]


def test_hiding_leaves_evaluation_alone(settings: dict[str, Any]) -> None:
    """Law: tokens are hidden from training only."""
    result = run(settings | {"mask_tokens": 0.99, "dropout": 0.0, "lr": 1e-9})
    found = result.folder.records()
    evals = [r["dev_loss"] for r in found if r.get("event") == "eval"]
    # The weights hardly move, so any difference would be the hiding's.
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    assert len({round(r["loss"], 6) for r in steps_of(found)}) > 1
