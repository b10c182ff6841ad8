"""`halfstep bench optimizer`: bytes, copies, and its table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from torch import nn

from halfstep import cli
from halfstep.bench import commands, measure, optimizer, update_cases
from halfstep.errors import UserError
from halfstep.machine import hardware
from halfstep.session.factory import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

WORK = update_cases.Workload("cpu", "bf16", layers=2, width=8)
BYTES = 2 * 8 * 8
"""Parameters: so many bytes are one a parameter."""


@pytest.fixture(autouse=True, scope="module")
def _measured() -> Iterator[None]:
    """Plant rates that warn of nothing."""
    with pytest.MonkeyPatch.context() as patch:
        rates = {"fp32": 1.0, "bf16": 2.0, "fp16": 2.0}
        patch.setattr(hardware, "gemm_rates", lambda *_, **__: rates)
        yield


def test_words() -> None:
    """Law: the flags' words are those that can be measured."""
    assert tuple(update_cases.FORMS) == commands.FORMS
    assert tuple(update_cases.RULES) == commands.RULES


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


@pytest.mark.parametrize("name", update_cases.FORMS)
def test_what_is_expected(name: str) -> None:
    """Law: bytes held are the published ones of each scheme; bytes moved, by hand."""
    form = update_cases.FORMS[name]
    for moments, held, moved in zip((0, 2), HELD[name], MOVED[name], strict=True):
        assert form.expected_bytes(moments) == held
        assert form.bytes_moved(moments) == moved


@pytest.mark.parametrize("name", update_cases.FORMS)
def test_real_memory(name: str) -> None:
    """Law: what AdamW holds at the end of a backward pass is what the form promises."""
    rule, form = update_cases.RULES["adamw"], update_cases.FORMS[name]
    made = update_cases.make_update(rule, form, WORK, update_cases.draw_gradients(WORK))
    found = optimizer.memory_after_backward(made)
    row = optimizer.cells(measure.Times({}), name, rule, found, WORK)
    assert row[-2], row


@pytest.mark.parametrize("word", update_cases.RULES)
def test_moments(word: str) -> None:
    """Law: an optimizer keeps as many tensors of the weights' size as is said."""
    rule = update_cases.RULES[word]
    made = update_cases.make_update(
        rule,
        update_cases.FORMS["torch-foreach"],
        WORK,
        update_cases.draw_gradients(WORK),
    )
    found = optimizer.memory_after_backward(made)
    assert found["weights"] == found["gradients"] == 4 * BYTES
    assert found["masters"] == 0
    assert 0 <= found["moments"] - rule.moments * 4 * BYTES <= 2 * 8


def test_storages_count_once() -> None:
    """Law: bytes are of whole storages, and views of one share it."""
    whole = torch.zeros(10)
    assert update_cases.storage_bytes([whole, whole[:5], whole[5:]]) == 40
    assert (
        update_cases.storage_bytes([whole[:1], torch.zeros(3, dtype=torch.int16)]) == 46
    )
    assert update_cases.storage_bytes([]) == 0


def test_gradients() -> None:
    """Law: they are exact in 16 bits, one each, none 0, and the loss has just these."""
    sources, same = update_cases.draw_gradients(WORK), update_cases.draw_gradients(WORK)
    assert [tuple(each.shape) for each in sources] == [(8, 8)] * 2
    assert all(map(torch.equal, sources, same))
    assert all(torch.equal(s, s.bfloat16().float()) and s.all() for s in sources)
    for form in ("torch-fused", "fp32"):
        made = update_cases.make_update(
            update_cases.RULES["sgd"],
            update_cases.FORMS[form],
            WORK,
            update_cases.draw_gradients(WORK),
        )
        update_cases.loss_of(made.model, sources).backward()
        for weight, source in zip(made.model.parameters(), sources, strict=True):
            assert weight.grad is not None
            assert torch.equal(weight.grad.float(), source)


@pytest.mark.parametrize("name", ["fp32", "torch-foreach"])
def test_each_step_is_a_whole_update(name: str) -> None:
    """Law: each armed step moves the weights by rate x gradient.

    That the one before it spoilt and cleared what it was given does not matter. The
    twin is SGD in float64; a rate of 1/8 moves bf16 weights visibly.
    """
    rule = replace(update_cases.RULES["sgd"], kind=partial(torch.optim.SGD, lr=2**-3))
    sources = update_cases.draw_gradients(WORK)
    drawn = [source.clone() for source in sources]
    made = update_cases.make_update(rule, update_cases.FORMS[name], WORK, sources)
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
    """An update that says what is planted, and whose calls are counted."""

    def __init__(self, name: str, memory: dict[str, int]) -> None:
        self.name, self._memory = name, memory
        self.model = nn.Identity()
        self.seen: list[str] = []

    def backward(self) -> None:
        """Take it down."""
        self.seen.append("backward")

    def write_gradients(self) -> None:
        """Take it down."""
        self.seen.append("arm")

    def step(self) -> object:
        """Take it down."""
        self.seen.append("step")
        return None

    def memory(self) -> dict[str, int]:
        """Take it down; say what is planted."""
        self.seen.append("memory")
        return self._memory


def test_memory_is_of_a_second_backward_pass() -> None:
    """Law: bytes are counted with all state made, after a backward, before a step."""
    fake = Fake("", {})
    optimizer.memory_after_backward(fake)
    assert fake.seen == ["backward", "step", "backward", "memory", "step"]


def test_copies_move_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a copy reads half of the bytes that the update moves, and writes as many.

    Forms that move as many share one. Steps are timed, and arming is not.
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
    made = {name: Fake(name, {}) for name in ("stochastic", "none", "torch-fused")}
    times = optimizer.take_times(update_cases.RULES["adamw"], {**made}, WORK, 2)
    copies = {"copy of 14", "copy of 28"}
    assert times.rounds == {name: [1.0, 1.0] for name in [*made, *copies]}
    once = [14 * BYTES, 28 * BYTES]
    assert moved == once + once + once[::-1]
    assert all(fake.seen == ["arm", "step"] * 3 for fake in made.values())


def memory_of(*shares: int) -> dict[str, int]:
    """Return bytes of weights, gradients, masters, moments, given a parameter's."""
    bytes_ = (share * BYTES for share in shares)
    return dict(zip(update_cases.KINDS, bytes_, strict=True))


def test_cells() -> None:
    """Law: a ratio is to the copy of the form's own bytes, round by round.

    Counters of steps are forgiven; a byte beyond them is not, nor one too few. Ratios
    2, 3, 8; their quartiles are 2.5 and 5.5.
    """
    rounds = {"kahan": (2.0, 6.0, 8.0), "copy of 18": (1.0, 2.0, 1.0)}
    times, rule = measure.Times(rounds), update_cases.RULES["adamw"]
    memory = memory_of(2, 2, 2, 4)
    row = optimizer.cells(times, "kahan", rule, memory, WORK)
    assert row == (6e3, 1e3, 3.0, 1.5, 18, 10.0, 10, True, "2 + 2 + 2 + 4")

    def as_expected(more: int) -> Any:
        changed = memory | {"moments": memory["moments"] + more}
        return optimizer.cells(times, "kahan", rule, changed, WORK)[-2]

    counters = 2 * 8  # of two tensors
    assert as_expected(counters)
    assert not as_expected(counters + 1)
    assert not as_expected(-1)


def test_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a row for each optimizer and form; one that is refused says so.

    One whose updates happen in the backward pass has bytes, and no time.
    """
    made: list[Fake] = []

    def make(
        rule: update_cases.Rule,
        form: update_cases.Form,
        work: update_cases.Workload,
        sources: object,
    ) -> Fake:
        assert work == WORK
        assert len(update_cases.draw_gradients(work)) == len(sources)  # type: ignore[arg-type]
        if form is update_cases.FORMS["stochastic"] and not rule.moments:
            message = "has no moments"
            raise UserError(message)
        form_bytes = form.weight, form.gradient, form.extra, rule.moments * form.moment
        made.append(Fake("", memory_of(*form_bytes)))
        return made[-1]

    monkeypatch.setattr(optimizer, "make_update", make)
    forms = ["split", "split-released", "stochastic"]
    words = asdict(WORK) | {"optimizer": ["sgd", "adamw"], "rounds": 2}
    (table,) = optimizer.tables(Namespace(forms=forms, **words))
    rows = {row[:2]: row[2:] for row in table.rows}
    assert list(rows) == [(rule, form) for rule in ("sgd", "adamw") for form in forms]
    assert rows["sgd", "stochastic"] == (*[None] * 9, "refused")
    assert "sgd, stochastic refused: has no moments" in table.notes
    for (_, form), row in rows.items():
        if row[-1] is None:
            assert row[-3] is True
            assert all((cell is None) == (form == "split-released") for cell in row[:4])
    assert rows["adamw", "split-released"][4:9] == (26, 12.0, 12, True, "2 + 0 + 2 + 8")
    assert "arm" not in made[1].seen
    assert made[0].seen.count("arm") == 1 + 2
    assert capsys.readouterr().err == "sgd: done\nadamw: done\n"


def test_settings_reach_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each form is asked for in the words of `prepare`, over the optimizer."""
    asked: list[dict[str, Any]] = []

    def asking(model: nn.Module, its: torch.optim.Optimizer, **settings: Any) -> Any:
        assert isinstance(its, torch.optim.AdamW)
        asked.append(settings)
        return prepare(model, its, "O2", dtype="bf16")

    monkeypatch.setattr(update_cases, "prepare", asking)
    for form in update_cases.FORMS.values():
        update_cases.make_update(
            update_cases.RULES["adamw"], form, WORK, update_cases.draw_gradients(WORK)
        )
    common = {"level": "O2", "dtype": "bf16"}
    assert asked == [
        common | {"master": "fp32"},
        common | {"master": "split"},
        common | {"master": "split", "optimizer_in_backward": True},
        common | {"master": "kahan"},
        common | {"master": "stochastic"},
        common | {"master": "none"},
    ]


def test_the_command_repeats_the_run() -> None:
    """Law: the command in the notes, read again, gives the very same settings."""
    parser = ArgumentParser()
    commands.BENCHES["optimizer"].add_flags(parser)
    words = "--forms split,torch-fused --optimizer adam --width 8 --device cpu"
    given = parser.parse_args(words.split())
    _, command, *_ = measure.conditions("optimizer", "cpu", given)
    repeated = command.removeprefix("halfstep bench optimizer ").split()
    assert parser.parse_args(repeated) == given


REFUSALS = {
    "--forms apex": "--forms: 'apex' must be all or of fp32, split,",
    "--optimizer sgd,lion": "--optimizer: 'lion' must be all or of sgd,",
    "--optimizer sgd,sgd": "--optimizer: 'sgd' must stand there once",
    "--width x": "--width: 'x' must be a whole number of at least 1",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_bad_flags(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a flag that cannot be used is refused in one line that names it."""
    with pytest.raises(SystemExit) as left:
        cli.run(["bench", "optimizer", *words.split()])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"halfstep: error: argument {REFUSALS[words]}")


@pytest.mark.parametrize("bench", ["optimizer", "recipe"])
def test_no_cuda(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: --device cuda without CUDA is refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["bench", bench, "--device", "cuda"]) == 2
    assert "torch sees no CUDA device here" in capsys.readouterr().err
