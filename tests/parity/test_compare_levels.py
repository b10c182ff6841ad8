"""`halfstep.compare`: what the runs share, what the verdicts are, what is refused."""

from __future__ import annotations

import errno
import json
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Make = Callable[[int], Any]

Batch = tuple[Tensor, Tensor]
_DRAW = torch.Generator().manual_seed(0)
TEACHER = torch.randn(16, 4, generator=_DRAW)
INPUTS = torch.randn(10, 32, 16, generator=_DRAW)
BATCHES: list[Batch] = [(x, (x @ TEACHER).argmax(1)) for x in INPUTS]
QUICK: dict[str, Any] = {"steps": 4, "seeds": 2, "gradient_steps": ()}


def net(dropout: float = 0.0) -> nn.Module:
    """Return a small classifier."""
    layers = (nn.Linear(16, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))
    return nn.Sequential(*layers)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def adam(lr: float = 3e-3, **options: Any) -> Make:
    """Return a `make` of the small classifier."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = net(**options)
        return model, torch.optim.AdamW(model.parameters(), lr=lr), loss_fn

    return make


def tiny_gradients(seed: int) -> Any:
    """Make a model whose gradients are below fp16's smallest number."""
    torch.manual_seed(seed)
    model = net()

    def tiny_loss(model: nn.Module, batch: Batch) -> Tensor:
        return loss_fn(model, batch) * 1e-7

    return model, torch.optim.SGD(model.parameters(), lr=5e6), tiny_loss


# Verdicts


def test_negative_controls_fail() -> None:
    """Law: bf16 weights without master weights at a small learning rate are worse."""
    result = hs.compare(adam(3e-4), BATCHES, ["O2", "O2:none"], steps=100, seeds=3)
    assert result.verdicts["O2:none"].kind == "worse"
    assert result.verdicts["O2"].kind == "equivalent"
    assert result.verdicts["O0:ulp"].kind == "equivalent"


def test_fp16_needs_its_loss_scale() -> None:
    """Law: fp16 without a loss scale is worse where gradients are tiny, with it not."""
    levels = ["O1:fp16", "O1:fp16:loss_scale=none"]
    result = hs.compare(tiny_gradients, BATCHES, levels, steps=30, seeds=3)
    assert [result.verdicts[level].kind for level in levels] == ["equivalent", "worse"]
    lost = {run.level: run.gradients[0].overall.flushed for run in result.runs[2:4]}
    assert lost == {levels[0]: pytest.approx(0, abs=0.01), levels[1]: 1.0}


def test_too_few_seeds_cannot_tell() -> None:
    """Law: a difference that varies more than the margin gives no verdict."""
    options: dict[str, Any] = {"steps": 20, "seeds": 2, "margin": 1e-9}
    verdict = hs.compare(adam(), BATCHES, ["O1"], **options).verdicts["O1"]
    if verdict.kind == "unknown":
        assert str(verdict).startswith("cannot tell (90 % CI ")
    assert verdict.kind != "equivalent"


def test_diverged() -> None:
    """Law: a level whose loss becomes NaN is worse, and the run says since when."""

    def make(seed: int) -> Any:
        model, optimizer, _ = adam()(seed)

        def overflowing(model: nn.Module, batch: Batch) -> Tensor:
            output = model(batch[0])
            large = (
                output * 1e30 if output.dtype == torch.float32 else output * math_inf
            )
            return (large * 1e-30).square().mean()

        return model, optimizer, overflowing

    math_inf = float("inf")
    options = QUICK | {"steps": 30}
    with pytest.warns(UserWarning, match="skipped|nan|inf"):
        result = hs.compare(make, BATCHES, ["O1:bf16"], **options)
    assert str(result.verdicts["O1:bf16"]) == "worse: 2 runs diverged"
    assert "diverged: O1:bf16, seed 0: the loss is " in str(result)
    assert "since step 1" in str(result)


# Pairs


def test_runs_of_a_seed_share_everything() -> None:
    """Law: weights, batches and dropout masks are the same at all levels.

    The first loss at a level differs from fp32's by rounding only; that of another
    seed, or mask, by far more.
    """
    result = hs.compare(adam(dropout=0.5), BATCHES, ["O1", "O2"], **QUICK)
    first = {(run.level, run.seed): run.losses[0] for run in result.runs}
    for seed in (0, 1):
        base = first["O0", seed]
        assert first["O0:ulp", seed] == pytest.approx(base, rel=1e-5)
        for level in ("O1", "O2"):
            assert first[level, seed] == pytest.approx(base, rel=5e-3)
            assert first[level, seed] != base
    assert first["O0", 0] != pytest.approx(first["O0", 1], rel=1e-2)


def test_losses_are_those_of_a_plain_loop() -> None:
    """Law: fp32's losses are those of a loop in plain PyTorch."""
    result = hs.compare(adam(), BATCHES, [], **QUICK)
    model, optimizer, _ = adam()(1)
    expected = []
    for batch in BATCHES[:4]:
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    run = next(each for each in result.runs if (each.level, each.seed) == ("O0", 1))
    assert list(run.losses) == pytest.approx(expected, rel=1e-6)


def test_arguments_of_prepare() -> None:
    """Law: a dict from `make` reaches `prepare`: micro-batches, schedule, clipping."""
    seen: list[float] = []

    def make(seed: int) -> Any:
        model, optimizer, loss = adam()(seed)
        factor = lambda step: seen.append(step) or 1.0  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return model, optimizer, loss, {"accumulate": 3, "scheduler": scheduler}

    options = QUICK | {"gradient_steps": (2,)}
    result = hs.compare(make, BATCHES, ["O2"], **options)
    assert max(seen) == 4
    parts = [loss_fn(make(0)[0], batch).item() for batch in BATCHES[:3]]
    assert result.runs[0].losses[0] == pytest.approx(sum(parts) / 3, rel=1e-5)
    assert result.runs[2].gradients[0].overall.cosine > 0.999


def test_gradients() -> None:
    """Law: gradients are compared by module, with the weights of fp32."""
    options = QUICK | {"gradient_steps": (1, 3)}
    result = hs.compare(adam(dropout=0.5), BATCHES, ["O1", "O2:fp16"], **options)
    rows = {run.level: run.gradients for run in result.runs if run.gradients}
    assert {name: [one.step for one in each] for name, each in rows.items()} == {
        "O1": [1, 3],
        "O2:fp16": [1, 3],
    }
    for each in (*rows["O1"], *rows["O2:fp16"]):
        assert [one.where for one in each.modules] == ["0", "3"]
        assert 0.99 < each.overall.cosine < 1
        assert 25 < each.overall.sqnr < 80


def test_random_state_is_restored() -> None:
    """Law: the random states of torch, Python and numpy are as before."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 -- the global state is what is tested
    expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002, S311
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    hs.compare(adam(), BATCHES, [], **QUICK)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected  # noqa: NPY002, S311


def test_metric() -> None:
    """Law: the metric is computed in evaluation mode, at the level."""

    def metric(model: nn.Module) -> Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        return model(INPUTS[0]).float().mean()

    result = hs.compare(adam(), BATCHES, ["O1"], metric=metric, **QUICK)
    assert (result.metric, result.lower_is_better) == ("metric", False)
    metrics = [run.metric for run in result.runs if run.seed == 0]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)
    assert metrics[0] != metrics[2]


# Output


def test_json_and_page(tmp_path: Path) -> None:
    """Law: JSON holds all runs; the page verdicts, curves, both color schemes."""
    options = QUICK | {"gradient_steps": (1,)}
    result = hs.compare(adam(), BATCHES, ["O1"], **options)
    result.save(tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(result.data()))
    assert data["verdicts"]["O1"]["text"] == str(result.verdicts["O1"])
    assert [len(run["losses"]) for run in data["runs"]] == [4] * 6
    result.page(tmp_path / "result.html")
    page = (tmp_path / "result.html").read_text(encoding="utf-8")
    for text in (
        "color-scheme: light dark",
        "Verdicts",
        "Gradients against fp32",
        "<svg",
    ):
        assert text in page
    assert str(result.verdicts["O1"]) in page


def test_tables() -> None:
    """Law: it prints a row for fp32, for fp32 with one ulp, and for each level."""
    result = hs.compare(adam(), BATCHES, ["O1", "O2:split"], **QUICK)
    verdicts, costs = result.tables()
    levels = ["O0", "O0:ulp", "O1", "O2:split"]
    assert [row[0] for row in verdicts.rows] == levels
    assert [row[0] for row in costs.rows] == levels
    assert str(result) == repr(result) == f"{verdicts.text()}\n\n{costs.text()}"


# Stored runs


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    """Law: a later call runs only what is missing, and gives what one call gives."""
    lines: list[str] = []
    options = {**QUICK, "gradient_steps": (1,), "progress": lines.append}
    hs.compare(adam(), BATCHES, ["O1"], out=tmp_path, **options)
    assert len(lines) == 6
    stored = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    lines.clear()
    more = hs.compare(
        adam(), BATCHES, ["O1", "O2"], out=tmp_path, **options | {"seeds": 3}
    )
    assert sum("from an earlier call" in line for line in lines) == 6
    assert len(lines) == 12
    assert all(path.read_bytes() == content for path, content in stored.items())
    whole = hs.compare(adam(), BATCHES, ["O1", "O2"], **options | {"seeds": 3})
    assert more.verdicts == whole.verdicts
    timed = {"seconds", "peak_bytes"}
    for one, other in zip(more.runs, whole.runs, strict=True):
        pairs = {
            k: (v, other.data()[k]) for k, v in one.data().items() if k not in timed
        }
        assert all(mine == theirs for mine, theirs in pairs.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 5}, "holds runs with steps=4, not 5; use that, or choose another "),
        ({"metric": len}, "holds runs with metric=loss of the last steps, not len; "),
        ({"gradient_steps": (1,)}, "holds runs with gradient_steps=[], not [1]; "),
        ({"make": adam(lr=0.1)}, "holds runs with optimizer.lr=0.003, not 0.1; "),
        (
            {"make": lambda seed: adam()(seed + 1)},
            "initial weights of O0 and O2 differ for seed 0: make and batches must ",
        ),
        ({"batches": BATCHES[1:]}, "batches of O0 and O2 differ for seed 0: "),
    ],
)
def test_stored_runs_of_other_settings(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Law: what would not compare with the stored runs is refused, by name."""
    given = {"make": adam(), "batches": BATCHES, "out": tmp_path, **QUICK}
    hs.compare(levels=["O1"], **given)
    with pytest.raises(UserError) as caught:
        hs.compare(levels=["O2"], **given | changed)
    assert message in str(caught.value)


def test_damaged_run(tmp_path: Path) -> None:
    """Law: a damaged file is named, and what to do."""
    hs.compare(adam(), BATCHES, [], out=tmp_path, **QUICK)
    path = tmp_path / "runs" / "O0-seed-1.json"
    for text in ("{", "[]", '{"level": "O0"}', "\ufffe"):
        path.write_text(text, encoding="utf-16")
        with pytest.raises(UserError) as caught:
            hs.compare(adam(), BATCHES, [], out=tmp_path, **QUICK)
        assert f"{path} is damaged (" in str(caught.value)
        assert "); delete it, and it is made again." in str(caught.value)
    path.unlink()
    hs.compare(adam(), BATCHES, [], out=tmp_path, **QUICK)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without space, the error counts the finished runs, which are kept."""
    real, calls = os.fsync, []

    def fsync(file: int) -> None:
        calls.append(file)
        if len(calls) == 4:  # the settings and two runs are written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError) as caught:
        hs.compare(adam(), BATCHES, ["O1"], out=tmp_path, **QUICK)
    assert str(caught.value) == (
        f"{tmp_path}/runs/O1-seed-0.json cannot be written: No space left on device. "
        "2 finished runs stored there: call again with the same folder to continue."
    )
    lines: list[str] = []
    hs.compare(adam(), BATCHES, ["O1"], out=tmp_path, progress=lines.append, **QUICK)
    assert sum("from an earlier call" in line for line in lines) == 2


# Bad input


def unseeded(seed: int) -> Any:
    """Make another model in each call, with one seed."""
    model, *others = adam()(seed)
    for param in model[3].parameters():
        param.data += torch.rand(1, generator=_DRAW)
    return model, *others


class Inverse(nn.Linear):
    """A layer that uses an operation without a 16-bit kernel on its weight."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply by the inverse of the weight."""
        return inputs @ torch.linalg.inv(self.weight).to(inputs)


def inverting(seed: int) -> Any:
    """Make a model with an `Inverse`."""
    torch.manual_seed(seed)
    model = nn.Sequential(Inverse(16, 16), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"make": None}, "make is of type NoneType; it must be a function of a seed."),
        (
            {"make": lambda _: net()},
            "make(0) returned a Sequential; it must return (model, optimizer, ",
        ),
        (
            {"make": lambda seed: adam()(seed)[:2]},
            "make(0) returned (Sequential, AdamW); it must return ",
        ),
        (
            {"make": unseeded},
            (
                "make(0) gave other initial weights in a second call, first in "
                "'3.weight': draw all random numbers from the seed, and build the "
                "model anew in each call."
            ),
        ),
        ({"levels": ["O5"]}, "levels holds 'O5': 'O5' is unknown; choose O0, O1, "),
        (
            {"levels": ["O2:fp16:split"]},
            "O2:fp16:split cannot run: master='split' needs bf16 weights, not ",
        ),
        (
            {"seeds": 1},
            "seeds=[0] must be 2 or more different seeds, or their number: ",
        ),
        ({"seeds": [3, 3]}, "seeds=[3, 3] must be 2 or more different seeds, "),
        ({"seeds": "12"}, "seeds='12' must be a whole number of at least 0."),
        ({"seeds": [1, 2**31]}, "seeds=2147483648 must be below 2**31 each."),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1."),
        ({"margin": 0}, "margin=0 must be above 0, in units of the metric."),
        ({"gradient_steps": [5]}, "gradient_steps=5 must be at most steps=4."),
        ({"metric": 3}, "metric is of type int; it must be a function of a model."),
        (
            {"metric": lambda _: "good"},
            "metric(model) returned a str; it must return a number.",
        ),
        ({"metric": lambda _: 0.0}, "margin must be given: fp32's mean metric is 0, "),
        (
            {"batches": iter(BATCHES)},
            "batches is a list_iterator, which the first run ",
        ),
        ({"batches": []}, "batches is of type list; it must be a list of batches, "),
        (
            {"batches": lambda _: BATCHES[:3]},
            "batches(seed) ended before step 4 of 4: return an iterable that is long ",
        ),
        (
            {"batches": lambda _: BATCHES, "steps": None},
            "steps must be given if batches is a function: how many steps to train.",
        ),
    ],
)
def test_bad_arguments(changed: dict[str, Any], message: str) -> None:
    """Law: each message gives the bad value and what would be right, in one line."""
    given = {"make": adam(), "batches": BATCHES, "levels": ["O1"], **QUICK}
    with pytest.raises(UserError) as caught:
        hs.compare(**given | changed)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_level_that_cannot_run() -> None:
    """Law: a level without kernels is named, before anything is trained; fp32 can."""
    lines: list[str] = []
    options = QUICK | {"gradient_steps": None, "progress": lines.append}
    hs.compare(inverting, BATCHES, ["O1"], **options)
    lines.clear()
    with pytest.raises(UserError) as caught:
        hs.compare(inverting, BATCHES, ["O1", "O3"], **options)
    assert str(caught.value).startswith("O3 cannot run: ")
    assert lines == []


def test_error_of_the_program() -> None:
    """Law: an error that fp32 raises, too, is the caller's own, unchanged."""

    def make(seed: int) -> Any:
        model, optimizer, _ = adam()(seed)
        return model, optimizer, lambda model, batch: model(batch[1])

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        hs.compare(make, BATCHES, ["O1"], **QUICK)


def test_batches_that_differ_between_runs() -> None:
    """Law: data drawn anew in each run are noticed."""
    draw = torch.Generator().manual_seed(1)

    def batches(seed: int) -> Iterator[Batch]:
        del seed
        for x, y in BATCHES:
            yield x + torch.rand(x.shape, generator=draw), y

    with pytest.raises(
        UserError, match=r"^batches of O0 and O0:ulp differ for seed 0: "
    ):
        hs.compare(adam(), batches, ["O1"], **QUICK)
