"""The loop: the schedule, the groups, and what one step does and says."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training import letters, one_thread, small_and_measured
from torch import nn

from halfstep.errors import UserError
from halfstep.train import result as room
from halfstep.train import text
from halfstep.train.batches import Encoded, batches
from halfstep.train.config import TrainConfig
from halfstep.train.data import Corpus, Example, load
from halfstep.train.loop import Trainer, parameter_groups, rate_factor
from halfstep.train.run import pick_device, resolve, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

KINDS = ("O0 auto", "O1 bf16", "O1 fp16", "O2 bf16", "O2 fp16", "O3 bf16")
ROWS, DEV = 100, 10
QUIET = {"dropout": 0.0, "mask_tokens": 0.0}
RECORD = {
    *("step", "epoch", "loss", "lr", "scale", "skipped", "skipped_total"),
    *("found_inf_in", "grad_norm", "examples_per_s"),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A small model gains nothing from a second thread, and waits for it."""
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _small_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a small size, draw no figures."""
    small_and_measured(monkeypatch)
    # Figures take longer than all the training here.
    monkeypatch.setattr(room, "page", lambda *_: "<html></html>")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a short run on texts whose characters tell their class."""
    rows = letters(ROWS, "defxy", "abcxy", lengths=(3, 20))
    source = tmp_path / "letters.json"
    source.write_text(json.dumps(rows), encoding="utf-8")
    return {
        "data": str(source),
        "dev_share": DEV / ROWS,
        "model": "mini",
        "level": "O0",
        "lr": 5e-3,
        "epochs": 2,
        "batch_size": 16,
        "out": str(tmp_path / "run"),
    }


def records(settings: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Train; return the records of the steps."""
    found = run(settings | more, overwrite=True).folder.records()
    return [record for record in found if "event" not in record]


def test_rate_by_hand() -> None:
    """Law: the rate rises over the warm-up, then falls to zero after the last step."""
    rates = [rate_factor(applied, 10, 0.4) for applied in range(11)]
    rise, fall = [1 / 4, 2 / 4, 3 / 4, 1], [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]
    assert rates == pytest.approx(rise + fall)


def test_no_warm_up() -> None:
    """Law: without a warm-up the first step has the peak rate."""
    rates = [rate_factor(applied, 4, 0.0) for applied in range(4)]
    assert rates == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4])


@given(st.integers(1, 500), st.floats(0, 1, exclude_max=True))
def test_rate_properties(total: int, warmup: float) -> None:
    """Law: each step has a rate above 0; one peak of 1; straight lines beside it."""
    rates = [rate_factor(applied, total, warmup) for applied in range(total + 1)]
    assert all(0 < rate <= 1 for rate in rates[:-1])
    assert max(rates) == 1
    assert 0 <= rates[-1] <= 1e-9 or math.ceil(warmup * total) > total
    peak = rates.index(1)
    assert peak <= max(0, math.ceil(warmup * total) - 1)
    steps = [after - before for before, after in pairwise(rates)]
    rise, fall = steps[:peak], steps[peak + 1 :]
    for part, sign in ((rise, 1), (fall, -1)):
        assert all(step * sign > 0 for step in part)
        assert part == pytest.approx(part[:1] * len(part))


def test_parameter_groups() -> None:
    """Law: each parameter is in one group; matrices decay, the rest does not."""
    model = nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    decayed, spared = parameter_groups(model, 0.01)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.01, 0.0)
    embedding, norm, linear = model
    assert [id(p) for p in decayed["params"]] == [
        id(embedding.weight),
        id(linear.weight),
    ]
    left = (norm.weight, norm.bias, linear.bias)
    assert [id(p) for p in spared["params"]] == [id(p) for p in left]


def corpus_of(count: int) -> Corpus:
    """Return a corpus with a number of training texts."""
    return Corpus("c", ("a", "b"), (Example("x", 0),) * count, (Example("y", 1),), ())


@pytest.mark.parametrize(
    ("count", "scratch", "epochs", "rate", "mask"),
    [
        (4999, True, 20, 5e-4, 0.3),
        (5000, True, 3, 5e-4, 0.3),
        (10, False, 3, 3e-5, 0.0),
    ],
)
def test_plan_defaults(
    count: int, scratch: bool, epochs: int, rate: float, mask: float
) -> None:
    """Law: defaults are those that the help states, by texts and by model."""
    plan = resolve(TrainConfig(), corpus_of(count), from_scratch=scratch)
    steps = math.ceil(count / 32)
    assert (plan.epochs, plan.lr, plan.mask_tokens) == (epochs, rate, mask)
    assert (plan.eval_every, plan.total_steps) == (steps, steps * epochs)


def test_plan_as_told() -> None:
    """Law: what is set is taken, a hiding share of zero included."""
    told = TrainConfig(epochs=2, lr=0.1, mask_tokens=0.0, eval_every=7, batch_size=3)
    plan = resolve(told, corpus_of(10), from_scratch=True)
    assert (plan.epochs, plan.lr, plan.mask_tokens) == (2, 0.1, 0.0)
    assert (plan.eval_every, plan.batch_size, plan.total_steps) == (7, 3, 8)


def test_fingerprint() -> None:
    """Law: the fingerprint tells texts, labels, their names, order, splits apart."""
    one, two = Example("x", 0), Example("x", 1)
    makes = [
        ((one, two), (one,)),
        ((two, one), (one,)),
        ((one,), (two, two)),
        ((one, two), (two,)),
        ((one, two, one), ()),
        ((Example("x\n0\ty", 0), one), (one,)),
    ]
    corpora = [Corpus("c", ("a", "b"), train, dev, ()) for train, dev in makes]
    corpora.append(Corpus("c", ("b", "a"), *makes[0], ()))
    plans = [resolve(TrainConfig(), each, from_scratch=True) for each in corpora]
    assert len({plan.fingerprint for plan in plans}) == len(corpora)


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
    result = run(settings | {"level": level, "dtype": dtype, "epochs": 4})
    losses = [r["loss"] for r in result.folder.records() if "event" not in r]
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


def test_first_loss_by_hand(settings: dict[str, Any]) -> None:
    """Law: the loss of a step is the mean cross-entropy of its batch."""
    found = records(settings, **QUIET, seed=5)
    source = Path(settings["data"])
    corpus = load(source, label_names=None, limit=None, dev_share=DEV / ROWS, seed=5)
    texts = [example.text for example in corpus.train]
    torch.manual_seed(5)
    made = text.build("mini", texts, corpus.labels, max_length=128, dropout=0.0)
    ids = text.encode(made.tokenizer, texts)
    first = batches([len(each) for each in ids], 16, seed=5, epoch=0)[0]
    losses = []
    for index in first:  # one at a time: no padding
        logits = made.model(torch.tensor([ids[index]])).logits
        truth = torch.tensor([corpus.train[index].label])
        losses.append(nn.functional.cross_entropy(logits, truth).item())
    assert found[0]["loss"] == pytest.approx(math.fsum(losses) / 16, rel=1e-5)


@pytest.mark.parametrize("accumulate", [3, 40])
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
    """Law: the same seed gives the same losses, another gives others."""
    one, again = records(settings), records(settings)
    assert [r["loss"] for r in one] == [r["loss"] for r in again]
    assert one[0]["loss"] != records(settings, seed=1)[0]["loss"]


def test_hidden_tokens() -> None:
    """Law: the share asked for is hidden, and never a special token or padding."""
    trainer = Trainer.__new__(Trainer)
    trainer.plan = resolve(
        TrainConfig(mask_tokens=0.3), corpus_of(4), from_scratch=True
    )
    trainer._mask_id = 4
    trainer._special = torch.tensor([0, 1, 2, 3, 4])
    ids = torch.arange(10).repeat(4000, 1)
    hidden = trainer._hide(ids)
    assert torch.equal(hidden[:, :5], ids[:, :5])
    changed = hidden[:, 5:] != ids[:, 5:]
    assert set(hidden[:, 5:][changed].tolist()) == {4}
    # 20,000 draws: five standard deviations are 5 * sqrt(0.21 / 20000) = 0.0162.
    assert float(changed.float().mean()) == pytest.approx(0.3, abs=0.0162)
    assert torch.equal(ids, torch.arange(10).repeat(4000, 1))


def test_hiding_leaves_evaluation_alone(settings: dict[str, Any]) -> None:
    """Law: tokens are hidden from training only."""
    result = run(settings | {"mask_tokens": 0.99, "dropout": 0.0, "lr": 1e-9})
    found = result.folder.records()
    evals = [r["dev_loss"] for r in found if r.get("event") == "eval"]
    # The weights hardly move, so any difference would be the hiding's.
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)
    losses = [r["loss"] for r in found if "event" not in r]
    assert len({round(loss, 6) for loss in losses}) > 1


def test_encoded_once(settings: dict[str, Any]) -> None:
    """Law: what trains is what was encoded: every text in each epoch, once."""
    seen: list[int] = []
    collate = Encoded.collate

    def noting(self: Encoded, indices: list[int], *rest: int) -> dict[str, Tensor]:
        if len(self.labels) == ROWS - DEV:
            seen.extend(indices)
        return collate(self, indices, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoded, "collate", noting)
        records(settings, epochs=2, accumulate=2)
    assert sorted(seen[: ROWS - DEV]) == list(range(ROWS - DEV))
    assert sorted(seen[ROWS - DEV :]) == list(range(ROWS - DEV))
