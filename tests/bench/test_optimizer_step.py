"""`halfstep bench optimizer`: bytes, copies, and its table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from bench_runs import flags
from torch import nn

from halfstep.bench import measure, optimizer_step
from halfstep.bench.contenders import FORMS, UPDATE_RULES, MasterForm, TorchOptimizer
from halfstep.bench.optimizer_step import Update, Workload, draw_gradients
from halfstep.errors import UserError
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

WORK = Workload("cpu", "bf16", layers=2, width=8)
BYTES = 2 * 8 * 8
"""Parameters: so many bytes are one a parameter."""


def update(form: str, rule: TorchOptimizer) -> Update:
    """Return an update of the small network."""
    return Update(rule, FORMS[form], WORK, draw_gradients(WORK))


HELD = {
    "fp32": (8, 16),
    "split": (6, 14),
    "split-released": (4, 12),
    "kahan": (6, 10),
    "stochastic": (4, 8),
    "none": (4, 8),
    "torch-foreach": (8, 16),
    "torch-fused": (8, 16),
}
"""Form -> bytes a parameter with SGD, with AdamW."""

MOVED = {
    "fp32": (2 + 2 + 2 * 4, 2 + 2 + 2 * 4 + 2 * 8),  # the 16-bit weight is written only
    "split": (2 + 2 * 2 + 2 * 2, 2 + 2 * 2 + 2 * 2 + 2 * 8),
    "split-released": (2 + 2 * 2 + 2 * 2, 2 + 2 * 2 + 2 * 2 + 2 * 8),
    "kahan": (2 + 2 * 2 + 2 * 2, 2 + 2 * 2 + 2 * 2 + 2 * 4),
    "stochastic": (2 + 2 * 2, 2 + 2 * 2 + 2 * 4),
    "none": (2 + 2 * 2, 2 + 2 * 2 + 2 * 4),
    "torch-foreach": (4 + 2 * 4, 4 + 2 * 4 + 2 * 8),
    "torch-fused": (4 + 2 * 4, 4 + 2 * 4 + 2 * 8),
}
"""Form -> bytes moved: a gradient once, weight, extra and moments twice."""


@pytest.mark.parametrize("name", FORMS)
def test_bytes(name: str) -> None:
    """Law: bytes are the published ones of each scheme; bytes moved, by hand.

    AdamW holds at the end of a backward pass what the form promises.
    """
    form = FORMS[name]
    for moments, held, moved in zip((0, 2), HELD[name], MOVED[name], strict=True):
        assert form.expected_bytes(moments) == held
        assert form.bytes_moved(moments) == moved
    made = update(name, UPDATE_RULES["adamw"])
    memory = optimizer_step.memory_after_backward(made)
    none = measure.Times({})
    cells = optimizer_step.table_cells(none, name, "adamw", memory, WORK)
    assert cells["as expected"] is True, cells


@pytest.mark.parametrize("word", UPDATE_RULES)
def test_moments(word: str) -> None:
    """Law: an optimizer keeps as many tensors of the weights' size as is declared."""
    rule = UPDATE_RULES[word]
    memory = optimizer_step.memory_after_backward(update("torch-foreach", rule))
    assert memory["weights"] == memory["gradients"] == 4 * BYTES
    assert memory["masters"] == 0
    assert 0 <= memory["moments"] - rule.moments * 4 * BYTES <= 2 * 8


def test_storages_count_once() -> None:
    """Law: bytes are of whole storages, and views of one share it."""
    whole, small = torch.zeros(10), torch.zeros(3, dtype=torch.int16)
    assert optimizer_step.storage_bytes([whole, whole[:5], whole[5:]]) == 40
    assert optimizer_step.storage_bytes([whole[:1], small]) == 46
    assert optimizer_step.storage_bytes([]) == 0


def test_gradients() -> None:
    """Law: they are exact in 16 bits, one each, none 0, and the loss has just these."""
    sources, same = draw_gradients(WORK), draw_gradients(WORK)
    assert [tuple(each.shape) for each in sources] == [(8, 8)] * 2
    assert all(map(torch.equal, sources, same))
    assert all(torch.equal(s, s.bfloat16().float()) and s.all() for s in sources)
    for form in ("torch-fused", "fp32"):
        made = update(form, UPDATE_RULES["sgd"])
        optimizer_step.loss_of(made.model, sources).backward()
        for weight, source in zip(made.model.parameters(), sources, strict=True):
            assert weight.grad is not None
            assert torch.equal(weight.grad.float(), source)


@pytest.mark.parametrize("name", ["fp32", "torch-foreach"])
def test_each_step_is_a_whole_update(name: str) -> None:
    """Law: each step from written gradients moves the weights by rate x gradient.

    That the one before it changed and cleared what it was given does not matter. The
    twin is SGD in float64; a rate of 1/8 moves bf16 weights visibly.
    """
    rule = replace(UPDATE_RULES["sgd"], settings={"lr": 2**-3})
    sources = draw_gradients(WORK)
    drawn = [source.clone() for source in sources]
    made = Update(rule, FORMS[name], WORK, sources)
    torch.manual_seed(1)
    begun = [nn.Linear(8, 8, bias=False).weight.detach().double() for _ in range(2)]
    for count in (1, 2, 3):
        made.write_gradients()
        given = [weight.grad for weight in made.model.parameters()]
        made.step()
        for each in given:
            assert each is not None
            each.zero_()
        for weight, old, source in zip(
            made.model.parameters(), begun, drawn, strict=True
        ):
            assert weight.grad is None
            expected = old - count * 2**-3 * source.double()
            error = (weight.detach().double() - expected).abs()
            ulp = torch.finfo(weight.dtype).eps * expected.abs().clamp(min=2**-10)
            assert (error <= ulp + count * 2**-24).all()
    assert all(map(torch.equal, sources, drawn))


class Fake:
    """An update whose memory is planted, and whose calls are counted."""

    def __init__(self, memory: dict[str, int], bytes_moved: int = 0) -> None:
        self.calls: list[str] = []
        self.planted, self.bytes_moved = memory, bytes_moved

    def backward(self) -> None:
        """Count."""
        self.calls.append("backward")

    def write_gradients(self) -> None:
        """Count."""
        self.calls.append("write")

    def step(self) -> object:
        """Count."""
        self.calls.append("step")
        return None

    def memory(self) -> dict[str, int]:
        """Count; return the planted bytes."""
        self.calls.append("memory")
        return self.planted


def test_copies_move_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a copy reads half of the bytes that the update moves, and writes as many.

    Forms that move as many share one. Steps are timed, and writing gradients is not.
    """
    moved: list[int] = []

    def timed(call: Callable[[], T], device: str) -> tuple[T, float]:
        assert device == "cpu"
        result = call()
        if isinstance(result, torch.Tensor):
            source = getattr(call, "args")[0]  # noqa: B009 -- of a partial
            assert source.data_ptr() != result.data_ptr()
            assert source.nbytes == result.nbytes
            moved.append(2 * result.nbytes)
        return result, 1.0

    monkeypatch.setattr(measure, "timed", timed)
    names = ("stochastic", "none", "torch-fused")
    made: dict[str, Any] = {n: Fake({}, FORMS[n].bytes_moved(2)) for n in names}
    times = optimizer_step.take_times(made, WORK, 2)
    copies = {"copy of 14", "copy of 28"}
    assert times.rounds == {name: [1.0, 1.0] for name in [*made, *copies]}
    once = [14 * BYTES, 28 * BYTES]
    assert moved == once + once + once[::-1]
    assert all(fake.calls == ["write", "step"] * 3 for fake in made.values())


def memory_of(*shares: int) -> dict[str, int]:
    """Return bytes of weights, gradients, masters, moments, given a parameter's."""
    bytes_ = (share * BYTES for share in shares)
    return dict(zip(optimizer_step.KINDS, bytes_, strict=True))


def test_cells() -> None:
    """Law: a ratio is to the copy of the form's own bytes, round by round.

    Counters of steps are forgiven; a byte beyond them is not, nor one too few. Ratios
    2, 3, 8; their quartiles are 2.5 and 5.5.
    """
    rounds = {"kahan": (2.0, 6.0, 8.0), "copy of 18": (1.0, 2.0, 1.0)}
    memory = memory_of(2, 2, 2, 4)

    def cells(more: int = 0) -> dict[str, Any]:
        changed = memory | {"moments": memory["moments"] + more}
        times = measure.Times(rounds)
        return {**optimizer_step.table_cells(times, "kahan", "adamw", changed, WORK)}

    expected = (6e3, 1e3, 3.0, 1.5, 18, 10.0, 10, True, "2 + 2 + 2 + 4")
    assert tuple(cells().values()) == expected
    counters = 2 * 8  # of two tensors
    assert cells(counters)["as expected"] is True
    assert cells(counters + 1)["as expected"] is False
    assert cells(-1)["as expected"] is False


def test_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a row for each optimizer and form; one that is refused says so.

    One whose updates happen in the backward pass has bytes, and no time. Bytes are
    counted with all state made, after a backward pass, before a step.
    """
    made: list[Fake] = []

    def make(
        rule: TorchOptimizer, form: MasterForm, work: Workload, sources: Sequence[Any]
    ) -> Fake:
        assert work == WORK
        assert len(sources) == WORK.layers
        if form is FORMS["stochastic"] and not rule.moments:
            message = "has no moments"
            raise UserError(message)
        each = form.weight, form.gradient, form.extra, rule.moments * form.moment
        made.append(Fake(memory_of(*each), form.bytes_moved(rule.moments)))
        return made[-1]

    monkeypatch.setattr(optimizer_step, "Update", make)
    forms = ["split", "split-released", "stochastic"]
    words = f"--forms {','.join(forms)} --optimizer sgd,adamw --rounds 2 --layers 2"
    words += " --width 8 --device cpu"
    (table,) = optimizer_step.optimizer(flags("optimizer", words))
    cells = {row[:2]: row[2:] for row in table.rows}
    assert list(cells) == [(rule, form) for rule in ("sgd", "adamw") for form in forms]
    assert cells["sgd", "stochastic"] == (*[None] * 9, "rejected")
    assert "sgd, stochastic rejected: has no moments" in table.notes
    for (_, form), row in cells.items():
        if row[-1] is None:
            assert row[-3] is True
            assert all((cell is None) == (form == "split-released") for cell in row[:4])
    released = cells["adamw", "split-released"]
    assert released[4:9] == (26, 12.0, 12, True, "2 + 0 + 2 + 8")
    counted = ["backward", "step", "backward", "memory", "step"]
    assert made[0].calls == [*counted, *["write", "step"] * (1 + 2)]
    assert made[1].calls == counted
    assert capsys.readouterr().err == "sgd: done\nadamw: done\n"


def test_settings_reach_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each form is asked for in the words of `prepare`, over the optimizer."""
    asked: list[dict[str, Any]] = []

    def asking(model: nn.Module, its: torch.optim.Optimizer, **settings: Any) -> Any:
        assert isinstance(its, torch.optim.AdamW)
        asked.append(settings)
        return prepare(model, its, "O2", dtype="bf16")

    monkeypatch.setattr(optimizer_step, "prepare", asking)
    for form in FORMS:
        update(form, UPDATE_RULES["adamw"])
    masters = ("fp32", "split", "split", "kahan", "stochastic", "none")
    common = {"level": "O2", "dtype": "bf16"}
    expected: list[dict[str, Any]] = [common | {"master": each} for each in masters]
    expected[2] |= {"optimizer_in_backward": True}
    assert asked == expected
