"""`halfstep bench optimizer`: bytes, copies, and its table."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from bench_runs import flags, tables
from torch import nn

from halfstep.bench import loops, measure, optimizer
from halfstep.bench.optimizer import (
    FORMS,
    UPDATE_RULES,
    MasterForm,
    Update,
    UpdateRule,
    draw_gradients,
)
from halfstep.errors import UserError
from halfstep.session.factory import prepare

T = TypeVar("T")

WORK = flags("optimizer", "--layers 2 --width 8 --rounds 2 --device cpu")
BYTES = 2 * 8 * 8
"""Parameters: so many bytes are one a parameter."""


MOVED = {
    "fp32": (2 + 2 + 2 * 4, 2 + 2 + 2 * 4 + 2 * 8),  # the 16-bit weight is written only
    "split": (2 + 2 * 2 + 2 * 2, 2 + 2 * 2 + 2 * 2 + 2 * 8),
    "kahan": (2 + 2 * 2 + 2 * 2, 2 + 2 * 2 + 2 * 2 + 2 * 4),
    "stochastic": (2 + 2 * 2, 2 + 2 * 2 + 2 * 4),
    "none": (2 + 2 * 2, 2 + 2 * 2 + 2 * 4),
    "torch-foreach": (4 + 2 * 4, 4 + 2 * 4 + 2 * 8),
    "torch-fused": (4 + 2 * 4, 4 + 2 * 4 + 2 * 8),
}
"""Form -> bytes moved: a gradient once, weight, extra and moments twice."""


def test_bytes() -> None:
    """Law: bytes moved are those by hand."""
    moved = {name: (f.bytes_moved(0), f.bytes_moved(2)) for name, f in FORMS.items()}
    assert moved == MOVED


def test_gradients() -> None:
    """Law: they are exact in 16 bits, one each, and none is 0."""
    sources, same = draw_gradients(WORK), draw_gradients(WORK)
    assert [tuple(each.shape) for each in sources] == [(8, 8)] * 2
    assert all(map(torch.equal, sources, same))
    assert all(torch.equal(s, s.bfloat16().float()) and s.all() for s in sources)


@pytest.mark.parametrize("name", ["fp32", "torch-foreach"])
def test_each_step_is_a_whole_update(name: str) -> None:
    """Law: each step from written gradients moves the weights by rate x gradient.

    That the one before it changed and cleared what it was given does not matter. The
    twin is SGD in float64; a rate of 1/8 moves bf16 weights visibly.
    """
    rule = UpdateRule(partial(torch.optim.SGD, lr=2**-3), 0)
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
    """An update whose calls are counted."""

    def __init__(self, bytes_moved: int) -> None:
        self.calls: list[str] = []
        self.bytes_moved = bytes_moved

    def write_gradients(self) -> None:
        self.calls.append("write")

    def step(self) -> object:
        self.calls.append("step")
        return None


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
    made: dict[str, Any] = {n: Fake(FORMS[n].bytes_moved(2)) for n in names}
    times = optimizer.take_times("adamw", made, WORK)
    copies = {"copy of 14", "copy of 28"}
    assert times.rounds == {name: [1.0, 1.0] for name in [*made, *copies]}
    once = [14 * BYTES, 28 * BYTES]
    assert moved == once + once + once[::-1]
    assert all(fake.calls == ["write", "step"] * 3 for fake in made.values())


def test_cells() -> None:
    """Law: a ratio is to the copy of the form's own bytes, round by round.

    Ratios 2, 3, 8; their quartiles are 2.5 and 5.5.
    """
    rounds = {"kahan": (2.0, 6.0, 8.0), "copy of 18": (1.0, 2.0, 1.0)}
    cells = optimizer.table_cells(measure.Times(rounds), "kahan", "adamw")
    assert tuple(cells.values()) == (6e3, 1e3, 3.0, 1.5, 18, None)


def test_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a row for each optimizer and form; one that is rejected says so."""

    def make(
        rule: UpdateRule, form: MasterForm, _work: Any, sources: Sequence[Any]
    ) -> Fake:
        assert len(sources) == WORK.layers
        if form is FORMS["stochastic"] and not rule.moments:
            message = "has no moments"
            raise UserError(message)
        return Fake(form.bytes_moved(rule.moments))

    monkeypatch.setattr(optimizer, "Update", make)
    words = "--forms split,stochastic --optimizer sgd,adamw --rounds 2 --layers 2"
    (table,) = tables("optimizer", f"{words} --width 8 --device cpu")
    cells = {row[:2]: row[2:] for row in table.rows}
    assert cells["sgd", "stochastic"] == (*[None] * 5, "rejected")
    assert "sgd, stochastic rejected: has no moments" in table.notes
    ran = [key for key, row in cells.items() if row[-1] is None]
    assert ran == [("sgd", "split"), ("adamw", "split"), ("adamw", "stochastic")]
    assert cells["adamw", "split"][4] == 26
    assert capsys.readouterr().err == "sgd: done\nadamw: done\n"


def test_settings_reach_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each form is asked for in the words of `prepare`, over the optimizer."""
    asked: list[dict[str, Any]] = []

    def asking(model: nn.Module, its: torch.optim.Optimizer, **settings: Any) -> Any:
        assert isinstance(its, torch.optim.AdamW)
        asked.append(settings)
        return prepare(model, its, "O2", dtype="bf16")

    monkeypatch.setattr(loops, "prepare", asking)
    for form in FORMS.values():
        Update(UPDATE_RULES["adamw"], form, WORK, draw_gradients(WORK))
    masters = ("fp32", "split", "kahan", "stochastic", "none")
    common = {"level": "O2", "dtype": "bf16", "accumulate": 1}
    expected: list[dict[str, Any]] = [common | {"master": each} for each in masters]
    assert asked == expected
