"""Flags are those of each tensor, also of those that are not read."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.diagnostics.test_probe import Broken
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import halfstep as hs
from halfstep.diagnostics.probe import output_tracker
from halfstep.diagnostics.probe.nonfinite_flow import (
    PROPAGATING_MODULES,
    propagates_nonfinite,
)
from halfstep.diagnostics.probe.step_records import StepRecords

if TYPE_CHECKING:
    from collections.abc import Callable

INF, NAN = float("inf"), float("nan")
WIDTH = 6

MADE: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(17, 33), (70, 17)),
    (lambda: nn.Linear(128, 128), (256, 128)),
    (lambda: nn.Linear(1, 1), (1, 1)),
    (lambda: nn.LayerNorm(17), (5, 17)),
    (lambda: nn.RMSNorm(17), (5, 17)),
    (lambda: nn.BatchNorm1d(17), (70, 17)),
    (lambda: nn.BatchNorm1d(17).eval(), (70, 17)),
    (lambda: nn.BatchNorm2d(3), (3, 3, 4, 6)),
    (lambda: nn.BatchNorm3d(2), (2, 2, 3, 4, 5)),
    (lambda: nn.Dropout(0.3), (30, 17)),
    (lambda: nn.Dropout(1.0), (30, 17)),
    (lambda: nn.Dropout(0.3, inplace=True), (30, 17)),
    (nn.GELU, (70, 17)),
    (lambda: nn.GELU("tanh"), (70, 17)),
    (nn.SiLU, (70, 17)),
]


def test_all_are_tried() -> None:
    """Law: no class is in the table that the next test leaves out."""
    assert {type(make()) for make, _ in MADE} == set(PROPAGATING_MODULES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", range(len(MADE)))
def test_carriers(kind: int, dtype: torch.dtype) -> None:
    """Law: one inf or NaN anywhere shows in the result, in both directions.

    With weights of zero, too, with large numbers, and where dropout drops it.
    """
    make, shape = MADE[kind]
    torch.manual_seed(0)
    for trial in range(60):
        module = make().to(dtype)
        if trial % 2:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        value = (INF, -INF, NAN)[trial % 3]
        x = (torch.randn(shape) * (1, 30)[trial % 4 < 2]).to(dtype)
        bad = x.clone()
        bad.view(-1)[trial * 7919 % bad.numel()] = value
        assert not module(bad).isfinite().all()
        x.requires_grad_()
        out = module(x * 1)
        if not out.isfinite().all():
            continue
        gradient = torch.randn_like(out)
        gradient.view(-1)[trial * 104729 % out.numel()] = value
        (found,) = torch.autograd.grad(out, x, gradient)
        assert not found.isfinite().all()


def test_who_vouches_for_nothing() -> None:
    """Law: hooks of others, another forward, and subclasses end what a class promises.

    The probe's own hook does not.
    """

    class Mended(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.nan_to_num())

    def own() -> nn.Linear:
        module = nn.Linear(2, 2)
        module.register_forward_hook(lambda *_: None)
        return module

    assert propagates_nonfinite(own())
    kinds: list[Callable[[nn.Linear], object]] = [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
        lambda module: setattr(module, "forward", lambda x: x),
    ]
    for edit in kinds:
        module = own()
        edit(module)
        assert not propagates_nonfinite(module)
    assert not propagates_nonfinite(Mended(2, 2))


class Residual(nn.Module):
    """Adds what it is given to what a part makes of it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        out: Tensor = x + self.part(x)
        return out


class Three(nn.Module):
    """Three results of one input, as queries, keys and values are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        first, second, third = (part(x) for part in self.parts)
        return torch.tanh(first * second) + third


class Pair(nn.Module):
    """Returns two tensors; who comes next takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = Broken()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute."""
        return self.broken(x), x.abs().detach()


class Pairs(nn.Module):
    """Takes the first of two."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        out: Tensor = self.last(self.pair(x)[0])
        return out


class WrittenOver(nn.Module):
    """Every other time, an output is written over before anybody takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Broken(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        out: Tensor = self.last(torch.relu_(self.first(x)))
        return out


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.2),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "relu_": lambda: nn.ReLU(inplace=True),
    "silu_": lambda: nn.SiLU(inplace=True),
    "nothing": nn.Identity,
    "three": Three,
    "pairs": Pairs,
    "over": WrittenOver,
    "broken": Broken,
    "residual": lambda: Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())),
}


def made(words: list[str], shared: bool) -> nn.Sequential:
    """Return a model of parts; the first again at the end, if `shared`."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), *(PARTS[word]() for word in words)]
    return nn.Sequential(*parts, *parts[: int(shared)])


def flagged(model: nn.Module, x: Tensor) -> set[str]:
    """Run a step; return what was not finite, by hooks that read everything."""
    bad: set[str] = set()

    def note(name: str, value: Tensor) -> None:
        if not value.isfinite().all():
            bad.add(name)

    def hook(path: str) -> Callable[..., None]:
        def seen(_: object, __: object, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                note(f"{path}:output", tensor.detach())
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda g: note(f"{path}:grad", g))

        return seen

    handles = [
        module.register_forward_hook(hook(path or "model"))
        for path, module in model.named_modules()
    ]
    run(model, x)
    for handle in handles:
        handle.remove()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            note(f"{name}:grad", parameter.grad)
    return bad


def run(model: nn.Module, x: Tensor) -> None:
    """Run a forward and a backward pass."""
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().sum().backward()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=6),
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.sampled_from(["forward_value", "backward_value"]),
            st.sampled_from([INF, -INF, NAN, None]),
        ),
        min_size=2,
        max_size=4,
    ),
)
def test_as_if_all_were_read(
    words: list[str], shared: bool, faults: list[tuple[int, str, float | None]]
) -> None:
    """Law: whatever the model and the fault, flags are those of hooks that read all."""
    model = made(words, shared)
    twin = copy.deepcopy(model)
    places = [
        path for path, module in model.named_modules() if isinstance(module, Broken)
    ]
    x = torch.linspace(-2, 2, 5 * WIDTH).view(5, WIDTH)
    try:
        run(copy.deepcopy(model), x)
    except RuntimeError:  # it writes over what its backward pass needs
        reject()
    with hs.Probe(model) as probe:
        for number in range(3):
            run(model, x)  # it learns, without a fault
            probe.step()
            assert set(probe.non_finite) == flagged(twin, x), number
        for where, what, value in faults:
            given_ = x
            if places:
                path = places[where % len(places)]
                for one in (model, twin):
                    setattr(one.get_submodule(path), what, value)
            elif value is not None:
                given_ = x.clone()
                given_.view(-1)[where % x.numel()] = value
            run(model, given_)
            probe.step()
            assert set(probe.non_finite) == flagged(twin, given_)
            for path in places:
                for one in (model, twin):
                    setattr(one.get_submodule(path), what, None)


def test_less_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: after a step, a finite tensor is read only where nothing vouches for it."""
    model = nn.Sequential(
        *(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Dropout(0.1)),
        *(nn.LayerNorm(4), nn.Tanh()),
    )
    read: list[int] = []
    found = StepRecords.measure

    def counted(self: StepRecords, tensor: Tensor) -> Any:
        read.append(0)
        return found(self, tensor)

    monkeypatch.setattr(StepRecords, "measure", counted)
    counts = []
    with hs.Probe(model) as probe:
        for _ in range(3):
            read.clear()
            run(model, torch.ones(2, 4))
            probe.step()
            counts.append(len(read))
    # Of six outputs those of the norm and Tanh: a chain of four is held. Of as many
    # gradients those of Tanh and of the first layer, the end of such a chain.
    assert counts == [6 + 2, 2 + 2, 2 + 2]


def test_what_is_held_is_read_in_the_end() -> None:
    """Law: a pass that breaks off, or asks for no gradient below, loses no flag."""
    model = nn.Sequential(Broken(), nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.ones(2, 4)
    with hs.Probe(model) as probe:
        for _ in range(2):
            run(model, x)
            probe.step()
        model[0].forward_value = INF
        with torch.no_grad():
            model[0](x)
        probe.step()
        assert probe.non_finite == ("0:output",)
        model[0].forward_value = None
        out = model(x)
        gradient = torch.full_like(out, NAN)
        torch.autograd.grad(out, model[1].weight, gradient)
        probe.step()
        assert set(probe.non_finite) == {"2:grad", "1:grad", "model:grad"}


def test_what_was_written_over_is_not_made_up() -> None:
    """Law: where a habit is broken and an output is lost, nothing is said of it."""
    model = nn.Sequential(Broken(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with hs.Probe(model) as probe, torch.no_grad():
        for _ in range(2):
            model(x)
            probe.step()
        model[0].forward_value = -INF
        model[0](x).relu_()
        probe.step()
        assert probe.non_finite == ()
        assert 0 not in probe._hooks.records.nonfinite
        model[0](x).relu_()  # from now on it is read at once
        probe.step()
        assert probe.non_finite == ("0:output",)


def test_little_is_held() -> None:
    """Law: of a chain, however long, only so many tensors are kept alive."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    held = []
    with hs.Probe(model) as probe:
        for module in model:
            module.register_buffer("nothing", None)
        for _ in range(3):
            out = model(torch.ones(2, 4))
            held.append(len(probe._hooks._tracker._pending_outputs))
            out.sum().backward()
            held.append(len(probe._hooks._tracker._pending_grads))
            probe.step()
    assert max(held) <= output_tracker.MAX_PENDING


class Mends(nn.Module):
    """Passes its input on; a tensor hook inside of it mends the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        out = x * 1
        out.register_hook(torch.nan_to_num)
        return out


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_others_on_tensors(inside: bool) -> None:
    """Law: a gradient is read where another hook could mend it, or its source's."""
    middle = Mends() if inside else nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))
    with hs.Probe(model) as probe:
        out = model(torch.ones(2, 4))
        if not inside:
            out.register_hook(lambda gradient: gradient.clamp_(-1, 1))
        out.backward(torch.full_like(out, NAN if inside else INF))
        probe.step()
    assert probe.non_finite[:2] == ("2:grad", "model:grad")


def test_nothing_vouches_for_nothing() -> None:
    """Law: a tensor without numbers is finite, and says nothing of another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: initializing zero-element tensors
        empty, full = nn.Linear(4, 0), nn.Linear(0, 3)
    model = nn.Sequential(Broken(), empty, full)
    with hs.Probe(model) as probe:
        for value in (None, None, INF):
            model[0].forward_value = value
            out = model(torch.ones(2, 4))
            out.backward(torch.full_like(out, 1 if value is None else NAN))
            probe.step()
    assert probe.non_finite[:3] == ("0:output", "2:grad", "model:grad")


def test_other_weights_vouch_for_nothing() -> None:
    """Law: a weight of another layout or class may compute something else."""

    class Other(nn.Parameter):
        pass

    for weight in (
        nn.Parameter(torch.eye(2).to_sparse()),
        Other(torch.eye(2)),
    ):
        module = nn.Linear(2, 2)
        module.register_forward_hook(lambda *_: None)
        assert propagates_nonfinite(module)
        module.weight = weight
        assert not propagates_nonfinite(module)


def test_hooks_on_all_modules() -> None:
    """Law: no module vouches while torch has a hook that may mend every result."""
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert not propagates_nonfinite(module)
    finally:
        handle.remove()
    assert propagates_nonfinite(module)


def test_inference_tensors_are_read_at_once() -> None:
    """Law: nobody could tell that one was written over; none is held."""
    model = nn.Sequential(Broken(), nn.Linear(4, 4), nn.Linear(4, 4))
    with hs.Probe(model) as probe:
        for _ in range(2):
            run(model, torch.ones(2, 4))
            probe.step()
        model[0].forward_value = INF
        with torch.inference_mode():
            model(torch.ones(2, 4))
        probe.step()
    assert probe.non_finite == ("0:output", "1:output", "2:output", "model:output")


def test_an_evaluation_unlearns_nothing() -> None:
    """Law: passes in inference mode do not end what was learned."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with hs.Probe(model) as probe:
        run(model, x)
        probe.step()
        learned = dict(probe._hooks._tracker._implied_finite)
        assert any(learned.values())
        with torch.inference_mode():
            model(x)
            model(x)
        assert probe._hooks._tracker._implied_finite == learned


def test_what_is_written_over_later_is_not_held_again() -> None:
    """Law: an output that is written over while it is held is read from then on."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = (
                Broken(),
                nn.Dropout(0.0),
                nn.LayerNorm(4),
            )

        def forward(self, x: Tensor) -> Tensor:
            early = self.first(x)
            out = self.drop(early) + 0
            early.mul_(0)
            found: Tensor = self.last(out)
            return found

    model = Late()
    with hs.Probe(model) as probe, torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
            probe.step()
        model.first.forward_value = -INF
        model(torch.ones(2, 4))
        probe.step()
        assert "first:output" in probe.non_finite


def test_gradients_of_several_passes() -> None:
    """Law: a parameter's flag is that of all passes of a step."""
    model = nn.Linear(4, 4)
    with hs.Probe(model) as probe:
        for value in (NAN, 1.0):
            model.zero_grad()
            model(torch.full((2, 4), value)).sum().backward()
        probe.step()
        assert "weight:grad" in probe.non_finite
