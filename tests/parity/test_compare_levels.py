"""`halfstep.compare`: what the runs share, what the verdicts are, what is refused."""

import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import UserError
from halfstep.parity.training_run import checksum
from halfstep.train import dependencies

Make = Callable[[int], Any]


Batch = tuple[Tensor, Tensor]
_DRAW = torch.Generator().manual_seed(0)
TEACHER = torch.randn(16, 4, generator=_DRAW)
INPUTS = torch.randn(10, 32, 16, generator=_DRAW)
BATCHES: list[Batch] = [(x, (x @ TEACHER).argmax(1)) for x in INPUTS]
QUICK: dict[str, Any] = {"steps": 4, "seeds": 2}


def net(dropout: float = 0.0) -> nn.Module:
    layers = (nn.Linear(16, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))
    return nn.Sequential(*layers)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def adam(lr: float = 3e-3, **options: Any) -> Make:
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


CONTROLS: list[tuple[Make, int, dict[str, str]]] = [
    (
        *(adam(3e-4), 100),
        {"O2": "equivalent", "O2:split": "equivalent", "O2:none": "worse"},
    ),
    (
        *(tiny_gradients, 30),
        {"O1:fp16": "equivalent", "O1:fp16:loss_scale=none": "worse"},
    ),
]
REPEATED = pytest.param(range(1, 20), marks=pytest.mark.slow)


@pytest.mark.parametrize("numbers", [range(1), REPEATED])
@pytest.mark.parametrize(("make", "steps", "expected"), CONTROLS)
def test_controls(
    make: Make, steps: int, expected: dict[str, str], numbers: range
) -> None:
    """Law: what must fail fails, and what must pass passes, 20 times in 20.

    bf16 weights without master weights fail at a small learning rate; so does fp16
    without a loss scale where gradients are tiny, which are then all lost.
    """
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        teacher = torch.randn(16, 4, generator=draw)
        inputs = torch.randn(20, 64, 16, generator=draw)
        batches = [(x, (x @ teacher).argmax(1)) for x in inputs]
        seeds = range(3 * number, 3 * number + 3)
        levels = list(expected)
        result = hs.compare(make, batches, levels, seeds=seeds, steps=steps)
        kinds = {level: verdict.kind for level, verdict in result.verdicts.items()}
        assert kinds == {"O0:ulp": "equivalent", **expected}, number
        base, perturbed = (run.losses for run in result.runs[:2])
        assert base != perturbed  # one ulp makes a difference


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
    """Law: weights, batches and random numbers of each step are those of fp32.

    A loss at a level differs from fp32's by rounding only; that of another seed or
    dropout mask by far more. Here the level draws more numbers than fp32.
    """

    def make(seed: int) -> Any:
        model, optimizer, _ = adam(dropout=0.5)(seed)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            result = loss_fn(model, batch)
            torch.rand(5 if model[0].weight.dtype == torch.bfloat16 else 1)
            return result

        return model, optimizer, loss

    result = hs.compare(make, BATCHES, ["O1", "O2"], **QUICK)
    losses = {(run.level, run.seed): run.losses for run in result.runs}
    for seed in (0, 1):
        base = losses["O0", seed]
        assert losses["O0:ulp", seed] == pytest.approx(base, rel=1e-5)
        for level in ("O1", "O2"):
            assert losses[level, seed] == pytest.approx(base, rel=5e-3)
            assert losses[level, seed] != base
    assert losses["O0", 0][0] != pytest.approx(losses["O0", 1][0], rel=1e-2)


def test_arguments_of_prepare() -> None:
    """Law: fp32 is a plain loop, with micro-batches, schedule and clipping."""

    def make(seed: int) -> Any:
        model, optimizer, loss = adam()(seed)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        more = {"accumulate": 2, "scheduler": scheduler, "clip_grad_norm": 0.1}
        return model, optimizer, loss, more

    result = hs.compare(make, BATCHES, ["O2"], **QUICK)
    model, optimizer, _, more = make(1)
    expected = []
    for step in range(4):  # a plain loop
        losses = [loss_fn(model, each) for each in BATCHES[2 * step : 2 * step + 2]]
        loss = sum(losses) / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        more["scheduler"].step()
        expected.append(loss.item())
    run = next(each for each in result.runs if (each.level, each.seed) == ("O0", 1))
    assert list(run.losses) == pytest.approx(expected, rel=1e-5)


def test_one_ulp() -> None:
    """Law: only weights that are trained, in fp32, differ by one ulp."""
    weights: list[list[Tensor]] = []

    def make(seed: int) -> Any:
        model, optimizer, _ = adam()(seed)
        model[0].to(torch.bfloat16).requires_grad_(requires_grad=False)

        def loss(model: nn.Module, _: Batch) -> Tensor:
            weights.append([each.detach().clone() for each in model.parameters()])
            return model[3].weight.square().mean()

        return model, optimizer, loss

    hs.compare(make, BATCHES, [], **QUICK | {"steps": 1})
    _trial, base, perturbed = weights[:3]
    for frozen, same in zip(base[:2], perturbed[:2], strict=True):
        assert torch.equal(frozen, same)
    for trained, other in zip(base[2:], perturbed[2:], strict=True):
        torch.testing.assert_close(other, trained, rtol=2**-23, atol=0)
        assert not torch.equal(other, trained)


def test_checksum() -> None:
    """Law: a checksum sees every bit of every tensor, of any dtype and layout."""
    zero, turned = torch.zeros(3), torch.ones(2, 3).t()
    assert checksum([zero]) == checksum({"a": torch.zeros(3)})
    assert checksum([zero]) != checksum([-zero])
    assert checksum([zero.bfloat16(), turned]) == checksum(
        [zero.bfloat16(), turned.clone(memory_format=torch.contiguous_format)]
    )


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
    blind = hs.compare(adam(), BATCHES, ["O1"], metric=lambda _: 0.9, **QUICK)
    verdict = blind.verdicts["O1"]
    assert str(verdict) == "no verdict: the metric is the same in all runs"
    metrics = [run.metric for run in result.runs if run.seed == 0]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)
    assert metrics[0] != metrics[2]


# Output


def test_output(tmp_path: Path) -> None:
    """Law: JSON holds all runs; the page has curves; a row for fp32 and each level."""
    result = hs.compare(adam(), BATCHES, ["O1"], **QUICK)
    result.save(tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(result.data()))
    assert data["verdicts"]["O1"]["text"] == str(result.verdicts["O1"])
    assert [len(run["losses"]) for run in data["runs"]] == [4] * 6
    for table in result.tables():
        assert [row[0] for row in table.rows] == ["O0", "O0:ulp", "O1"]
        assert table.text() in str(result)
    result.page(tmp_path / "result.html")
    page = (tmp_path / "result.html").read_text(encoding="utf-8")
    for text in ("color-scheme: light dark", "Verdicts", "<svg"):
        assert text in page
    assert str(result.verdicts["O1"]) in page


# Stored runs


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    """Law: a later call runs only what is missing, and gives what one call gives."""
    lines: list[str] = []
    options = {**QUICK, "progress": lines.append}
    hs.compare(adam(), BATCHES, ["O1"], out=tmp_path, **options)
    assert len(lines) == 6
    stored = (tmp_path / "runs.jsonl").read_bytes()
    lines.clear()
    more = hs.compare(
        adam(), BATCHES, ["O1", "O2"], out=tmp_path, **options | {"seeds": 3}
    )
    assert sum("from an earlier call" in line for line in lines) == 6
    assert len(lines) == 12
    assert (tmp_path / "runs.jsonl").read_bytes().startswith(stored)
    whole = hs.compare(adam(), BATCHES, ["O1", "O2"], **options | {"seeds": 3})
    assert more.verdicts == whole.verdicts
    timed = {"seconds", "peak_bytes"}
    for one, other in zip(more.runs, whole.runs, strict=True):
        pairs = {
            k: (v, other.data()[k]) for k, v in one.data().items() if k not in timed
        }
        assert all(mine == theirs for mine, theirs in pairs.values())


def shared(gamma: float = 0.9, **arguments: Any) -> Make:
    def make(seed: int) -> Any:
        model, optimizer, loss = adam()(seed)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
        more = {"accumulate": 1, "scheduler": scheduler}
        return model, optimizer, loss, more | arguments

    return make


OTHERS = {
    "steps": {"steps": 5},
    "metric": {"metric": lambda _: 0.5},
    "lr": {"make": adam(lr=0.1)},
    "weights": {"make": lambda n: shared()(n + 1)},
    "batches": {"batches": BATCHES[1:]},
    "accumulate": {"make": shared(accumulate=2)},
    "schedule": {"make": shared(gamma=0.5)},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_stored_runs_of_other_settings(other: dict[str, Any], tmp_path: Path) -> None:
    """Law: runs that differ from what is asked for are not used; nor are they lost."""
    lines: list[str] = []
    given = {"make": shared(), "batches": BATCHES, "levels": [], "out": tmp_path}
    given |= {**QUICK, "progress": lines.append}
    first = hs.compare(**given)
    hs.compare(**given | other)
    assert len(lines) == 8
    assert not any("from an earlier call" in line for line in lines)
    again = hs.compare(**given)
    assert again.verdicts == first.verdicts


def test_damaged_run(tmp_path: Path) -> None:
    """Law: a run whose line is damaged is trained again."""
    lines: list[str] = []
    more: Any = {**QUICK, "out": tmp_path, "progress": lines.append}
    again: Any = partial(hs.compare, adam(), BATCHES, [], **more)
    again()
    path = tmp_path / "runs.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    whole = json.loads(first)
    damages: tuple[dict[str, Any], ...] = (
        *({"losses": []}, {"losses": [1.0]}, {"losses": [10**400] * 4}),
        *({"seconds": []}, {"metric": "nan"}, {"diverged": 5}),
        *({"skipped": None}, {"peak_bytes": "1"}),
    )
    wrong = [json.dumps({**whole, "run": whole["run"] | each}) for each in damages]
    lines_ = (b"{", b"[]", b"\xff", b'{"level": "O0"}', b"[" * 100_000)
    for line in (*lines_, *map(str.encode, wrong)):
        path.write_bytes(b"".join((line, b"\n", *others)))
        lines.clear()
        again()
        assert sum("from an earlier call" in each for each in lines) == 3


def test_unusable_folder(tmp_path: Path) -> None:
    """Law: a folder that cannot be read is refused."""
    (tmp_path / "runs.jsonl").mkdir()
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match=f"{folder}/runs.jsonl cannot be read: "):
            hs.compare(adam(), BATCHES, [], out=folder, **QUICK)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without space, the error counts the finished runs, which are kept."""
    real, calls = os.fsync, []

    def fsync(file: int) -> None:
        calls.append(file)
        if len(calls) == 3:  # two runs are written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError) as caught:
        hs.compare(adam(), BATCHES, ["O1"], out=tmp_path, **QUICK)
    assert str(caught.value) == (
        f"{tmp_path}/runs.jsonl cannot be written: No space left on device. "
        "2 finished runs stored there: call again with the same folder to continue."
    )
    lines: list[str] = []
    hs.compare(adam(), BATCHES, ["O1"], out=tmp_path, progress=lines.append, **QUICK)
    assert sum("from an earlier call" in line for line in lines) == 2


# Bad input


def unseeded(seed: int) -> Any:
    model, *others = adam()(seed)
    for param in model[3].parameters():
        param.data += torch.rand(1, generator=_DRAW)
    return model, *others


def noisy(seed: int) -> Iterator[Batch]:
    del seed
    return ((x + torch.rand(1, generator=_DRAW), y) for x, y in BATCHES)


def without_bf16(seed: int) -> Any:
    model, optimizer, _ = adam()(seed)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model[0].weight.dtype == torch.bfloat16:
            message = "\"inv\" not implemented for'BFloat16'\nsecond line"
            raise NotImplementedError(message)
        return loss_fn(model, batch)

    return model, optimizer, loss


LIST = "it must be a list of batches, "
PAIR = "2 or more different seeds, or their number: a verdict needs "


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("make", None, "make is of type NoneType; it must be a function of a seed."),
        ("make", lambda _: net(), "make(0) returned a Sequential; it must return ("),
        ("make", lambda n: adam()(n)[:2], "make(0) returned (Sequential, AdamW); it "),
        (
            "make",
            unseeded,
            "other initial weights in a second call, first in '3.weight'",
        ),
        (
            "levels",
            ["O2:fp16:split"],
            "O2:fp16:split cannot run: master='split' needs ",
        ),
        ("seeds", 1, f"seeds=1 must be {PAIR}"),
        ("seeds", [3, 3], f"seeds=[3, 3] must be {PAIR}"),
        ("seeds", "12", "seeds='12' must be a whole number of at least 0."),
        ("seeds", [1, 2**31], "seeds=2147483648 must be below 2**31 each."),
        ("steps", 0, "steps=0 must be a whole number of at least 1."),
        ("margin", 0, "margin=0 must be above 0, in units of the metric."),
        ("metric", 3, "metric is of type int; it must be a function of a model."),
        ("metric", lambda _: "x", "metric(model) returned a str; it must return a "),
        ("metric", lambda _: 0.0, "margin must be given: fp32's mean metric is 0, "),
        ("progress", 1, "progress is of type int; it must be a function of a line"),
        ("batches", iter(BATCHES), "batches is a list_iterator, which the first run "),
        ("batches", [], f"batches is of type list; {LIST}"),
        ("batches", lambda _: BATCHES[:3], "batches(seed) ended before step 4 of 4: "),
        ("batches", noisy, "batches of O0 and O0:ulp differ for seed 0: make and "),
    ],
)
def test_bad_arguments(name: str, value: Any, message: str) -> None:
    """Law: each message gives the bad value and what would be right, in one line."""
    given = {"make": adam(), "batches": BATCHES, "levels": ["O1"], **QUICK}
    with pytest.raises(UserError) as caught:
        hs.compare(**given | {name: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: without scipy no run begins, and the error names the extra that has it."""
    monkeypatch.setattr(dependencies, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs scipy: .*'halfstep\[train\]'"):
        hs.compare(lambda _: pytest.fail("a run began"), BATCHES)


def test_function_of_batches_needs_steps() -> None:
    """Law: without a list, the number of steps must be given."""
    with pytest.raises(UserError, match="steps must be given if batches"):
        hs.compare(adam(), lambda _: BATCHES)


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: under torchrun every process would train all runs, so none does."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one of 2: start it without torchrun"):
        hs.compare(adam(), BATCHES, ["O1"], **QUICK)


def test_level_that_cannot_run() -> None:
    """Law: a level without kernels is named, before anything is trained; fp32 can."""
    lines: list[str] = []
    options = QUICK | {"progress": lines.append}
    hs.compare(without_bf16, BATCHES, ["O1"], **options)
    lines.clear()
    with pytest.raises(UserError) as caught:
        hs.compare(without_bf16, BATCHES, ["O1", "O3"], **options)
    expected = (
        "O3 cannot run: NotImplementedError: \"inv\" not implemented for'BFloat16'"
    )
    assert str(caught.value) == expected
    assert lines == []


def test_error_of_the_program() -> None:
    """Law: an error that fp32 raises, too, is the caller's own, unchanged."""

    def make(seed: int) -> Any:
        model, optimizer, _ = adam()(seed)
        return model, optimizer, lambda model, batch: model(batch[1])

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        hs.compare(make, BATCHES, ["O1"], **QUICK)
