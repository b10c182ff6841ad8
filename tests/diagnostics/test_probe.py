"""A probe sees what is there, where it is, once, and leaves nothing behind."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from no_waiting import NoWaiting
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep._torch import async_read
from halfstep.errors import UserError
from halfstep.numerics.tensor_stats import measure

INF, NAN = float("inf"), float("nan")


class Broken(nn.Module):
    """Passes its input on; writes a number into it, or into its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_value: float | None = None
        self.backward_value: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if self.forward_value is not None:
            x = torch.cat([torch.full_like(x[:1], self.forward_value), x[1:]])
        if self.backward_value is not None and x.requires_grad:
            value = self.backward_value
            x.register_hook(lambda g: torch.full_like(g, value))
        return x * 1


class Block(nn.Module):
    """Two layers with something that breaks between them."""

    def __init__(self, width: int, again: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.broken = Broken()
        self.last = nn.Linear(width, width)
        self.again = again

    def inside(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.broken(self.first(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Compute, now and perhaps once more in the backward pass."""
        if self.again is None:
            return self.inside(x)
        out: Tensor = checkpoint(self.inside, x, use_reentrant=self.again)
        return out


def net(again: bool | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Block(6, again), nn.LayerNorm(6))


X = torch.linspace(-1, 1, 12).view(3, 4)
OUTPUTS = ["0", "1.first", "1.broken", "1.last", "1", "2", "model"]
PARAMETERS = ["0", "1.first", "1.last", "2"]


def passes(model: nn.Module, x: Tensor = X) -> Tensor:
    """Run a forward and a backward pass; return the output."""
    model.zero_grad()
    out: Tensor = model(x)
    out.square().sum().backward()
    return out.detach()


def step(probe: hs.Probe, model: nn.Module, x: Tensor = X) -> tuple[str, ...]:
    """Run a step; return what was not finite."""
    passes(model, x)
    probe.step()
    return probe.non_finite


# Names and values


@pytest.mark.parametrize("again", [None, False, True])
def test_statistics_are_those_of_the_tensors(again: bool | None) -> None:
    """Law: by name, each output and gradient as autograd has it, counted once.

    A checkpoint that runs modules again in the backward pass changes nothing.
    """
    model = net(again)
    held: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: object, __: object, output: Tensor) -> None:
            if torch._C._current_graph_task_id() == -1:
                held[f"{name}:output"] = output.detach().clone()
            if output.requires_grad:
                output.register_hook(
                    lambda g: held.__setitem__(f"{name}:grad", g.clone())
                )

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(keep(name or "model"))
    with hs.Probe(model, "full") as probe:
        step(probe, model)
        held |= {
            f"{name}:grad": parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        assert probe.stats.keys() == held.keys()
        assert set(probe.names) == held.keys()
        for name, stats in probe.stats.items():
            assert stats.data() == measure(held[name]).data(), name


def test_names() -> None:
    """Law: names are paths; the model itself is called that; parts come first."""
    model = net()
    with hs.Probe(model) as probe:
        assert probe.names == (
            *(f"{path}:output" for path in OUTPUTS),
            *(f"{path}:grad" for path in OUTPUTS),
            *(f"{path}.{w}:grad" for path in PARAMETERS for w in ("weight", "bias")),
        )
        assert step(probe, model) == ()
        assert (probe.steps, probe.arrived) == (1, 1)


@pytest.mark.parametrize("again", [None, False, True])
@pytest.mark.parametrize("mode", ["flags", "full"])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_broke_comes_first(mode: Any, value: float, again: bool | None) -> None:
    """Law: forward and backward, the first name is where it began; none before it."""
    model = net(again)
    broken = model[1].broken
    events: list[dict[str, Any]] = []
    with hs.Probe(model, mode, log=events.append) as probe:
        assert step(probe, model) == ()
        broken.forward_value = value
        found = step(probe, model)
        after = ["1.broken", "1.last", "1", "2", "model"]
        assert [*found[:5]] == [f"{path}:output" for path in after]
        broken.forward_value, broken.backward_value = None, value
        found = step(probe, model)
        assert found[0] == "1.first:grad"  # its gradient is what broken has made
        assert not [name for name in found if name.endswith(":output")]
        assert {"0.weight:grad", "1.first.bias:grad"} <= {*found}
        assert "1.last.weight:grad" not in found
        broken.backward_value = None
        assert step(probe, model) == ()
    assert [number for number, _ in probe.history] == [2, 3]
    told = [event for event in events if event["event"] == "non_finite"]
    assert [(e["step"], tuple(e["where"])) for e in told] == list(probe.history)


def test_a_single_number() -> None:
    """Law: one inf among a million is seen, and huge finite numbers are none."""
    model = nn.Identity()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        huge = torch.full((1000, 1000), torch.finfo(dtype).max, dtype=dtype)
        bad = torch.zeros(1000, 1000, dtype=dtype)
        bad[999, 999] = -INF
        with hs.Probe(model) as probe:
            for x, expected in [(huge, ()), (bad, ("model:output",))]:
                model(x)
                probe.step()
                assert probe.non_finite == expected


def test_outputs_of_all_kinds() -> None:
    """Law: tensors in tuples, dicts and lists are seen; integers and None are not."""

    class Many(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            complex_ = torch.complex(x, x)
            return {"a": [x, None, (x.half(), {"b": complex_})], "n": x.long(), "s": ""}

    model = Many()
    with hs.Probe(model, "full") as probe:
        model(X)
        probe.step()
        both = torch.cat([X, X, X])
        assert probe.stats["model:output"].data() == measure(both).data()
        half = probe.stats["model:output (fp16)"]
        assert half.data() == measure(X.half()).data()
    with hs.Probe(model) as probe:
        for place in range(2):
            x = X.clone()
            x[place] = NAN
            model(x)
            probe.step()
            assert probe.non_finite == ("model:output",)


class Ragged(nn.Module):
    """Rows of several lengths, in both of torch's forms."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = [x[:1], x[1:2, :-1]]
        strided = torch.nested.nested_tensor(rows)
        return strided, torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["flags", "full"])
def test_nested_tensors(mode: Any) -> None:
    """Law: rows of several lengths are looked at, all of them."""
    model = Ragged()
    with hs.Probe(model, mode) as probe:
        model(torch.ones(2, 4))
        probe.step()
        assert not probe.non_finite
        if mode == "full":
            assert probe.stats["model:output"].count == 2 * (4 + 3)
        model(torch.full((2, 4), NAN))
        probe.step()
        assert probe.non_finite == ("model:output",)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_scripted_parts() -> None:
    """Law: a part that torch lets nobody hook is passed over, and the rest is seen."""
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(scripted, nn.ReLU())
    with hs.Probe(model) as probe:
        model(torch.full((2, 2), NAN)).sum().backward()
        probe.step()
        assert probe.non_finite == ("1:output", "model:output")


def test_a_step_of_several_passes() -> None:
    """Law: outputs of all passes of a step count; gradients of parameters as left."""
    model = net()
    with hs.Probe(model, "full") as probe:
        model.zero_grad()
        for x in (X, 2 * X, 3 * X):
            model(x).square().sum().backward()
        probe.step()
        stats = probe.stats
        assert stats["0:output"].count == 3 * 18
        assert stats["0:grad"].count == 3 * 18
        assert stats["0.weight:grad"].data() == measure(model[0].weight.grad).data()
    with hs.Probe(model) as probe:
        model(X * INF)
        model(X)
        probe.step()
        assert "0:output" in probe.non_finite


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_tensors_that_are_written_over(mode: Callable[[], Any]) -> None:
    """Law: a tensor that a later module changes is read again, as it is then.

    So it is in inference mode, where tensors have no version.
    """
    model = nn.Sequential(Broken(), nn.ReLU(inplace=True), nn.Identity())
    model[0].forward_value = -INF
    with hs.Probe(model) as probe, mode():
        model(X)
        probe.step()
    assert probe.non_finite == ("0:output",)


def test_a_module_that_runs_twice() -> None:
    """Law: its name stands for both results, and for the gradients of both."""
    broken = Broken()
    model = nn.Sequential(nn.Linear(4, 4), broken, nn.Tanh(), broken)
    broken.backward_value = NAN
    with hs.Probe(model, "full") as probe:
        found = step(probe, model)
        assert probe.stats["1:output"].count == probe.stats["1:grad"].count == 24
        assert {"1:grad", "2:grad"} <= {*found}
        assert "model:grad" not in found


def test_tensors_without_elements() -> None:
    """Law: a tensor without elements is finite."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: initializing zero-element tensors
        model = nn.Sequential(Broken(), nn.Linear(4, 0), nn.Linear(0, 3))
    with hs.Probe(model) as probe:
        model[0].forward_value = INF
        out = model(X)
        out.backward(torch.full_like(out, NAN))
        probe.step()
    assert probe.non_finite[:3] == ("0:output", "2:grad", "model:grad")


# When


def test_sampled(tmp_path: Path) -> None:
    """Law: statistics in the first step and each K from then on, in the file too.

    Events have the number and the loss scale that a step was given, if any.
    """
    model = net()
    path = tmp_path / "metrics.jsonl"
    counted = []
    with hs.Probe(model, "sampled", every=3, log=path) as probe:
        for number in range(6):
            step(probe, model, X * (number + 1))
            counted.append(probe.arrived)
        assert counted == [1, 1, 1, 4, 4, 4]
        passes(model)
        probe.step(41, scale=1024.0)
        last = {name: stats.data() for name, stats in probe.stats.items()}
    events = [json.loads(text) for text in path.read_text().splitlines()]
    told = [(event["step"], event.get("scale")) for event in events]
    assert told == [(1, None), (4, None), (41, 1024.0)]
    assert {event["event"] for event in events} == {"stats"}
    assert events[-1]["tensors"] == last
    assert events[-1]["tensors"]["0:output"]["count"] == 18


def test_gradients_are_told_once() -> None:
    """Law: a step without a backward pass does not tell the gradients before it."""
    model = net()
    with hs.Probe(model, "full") as probe:
        passes(model)
        probe.step()
        assert "0.weight:grad" in probe.stats
        model(X)
        probe.step()
        assert {*probe.stats} == {f"{path}:output" for path in OUTPUTS}
    with hs.Probe(model) as probe:
        assert "0.weight:grad" in step(probe, model, X * NAN)
        model(X)
        probe.step()
        assert probe.non_finite == ()


@pytest.mark.parametrize("other", ["pause", "copy"])
def test_what_is_not_observed(other: str) -> None:
    """Law: what runs in a pause, and a deep copy made meanwhile, are not observed."""
    model = net()
    with hs.Probe(model, "full") as probe:
        if other == "copy":
            copy.deepcopy(model)(X * NAN)
        else:
            with probe.paused():
                passes(model, X * NAN)
        step(probe, model)
        assert probe.non_finite == ()
        assert probe.stats["0:output"].count == 18


@pytest.mark.parametrize("ends", [True, False])
def test_a_failed_pass(*, ends: bool) -> None:
    """Law: after a pass that an error ended, the same step sees another one whole.

    And the next step, if that step ends there.
    """
    model = net()
    with hs.Probe(model) as probe:
        with pytest.raises(RuntimeError, match="shapes"):
            model(X[:, :2])
        out = model(X)
        handle = model[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        handle.remove()
        if ends:
            probe.step()
        model[1].broken.backward_value = NAN
        assert "0.weight:grad" in step(probe, model)


@pytest.mark.parametrize("mode", ["flags", "full"])
def test_elsewhere(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: as on a GPU, where flags stay on the device: the same is found.

    No number is read from a tensor, in passes or in `step`.
    """
    model = net()
    model[1].broken.forward_value = INF
    with hs.Probe(model, mode) as probe:
        here = step(probe, model)
    monkeypatch.setattr(async_read, "READABLE_DEVICES", frozenset())
    with hs.Probe(model, mode) as probe:
        assert step(probe, model) == here
    monkeypatch.setattr(async_read.DelayedTensors, "submit", lambda *_: [])
    with hs.Probe(model, mode) as probe, NoWaiting():
        for _ in range(3):
            step(probe, model)


def test_order_over_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: names come in the order of the tensors, whatever their dtypes."""
    wide, narrow = net(), net().half()
    model = nn.ModuleList([net()[0], narrow[0], wide[0]])
    for where in ("here", "elsewhere"):
        if where == "elsewhere":
            monkeypatch.setattr(async_read, "READABLE_DEVICES", frozenset())
        with hs.Probe(model) as probe:
            model[0](X)
            model[1](X.half() * NAN)
            model[2](X * NAN)
            probe.step()
            assert probe.non_finite == ("1:output", "2:output")


# Without a trace


def hooks_of(model: nn.Module) -> list[tuple[str, int]]:
    held = [item for module in model.modules() for item in vars(module).items()]
    return [(key, len(value)) for key, value in held if "hooks" in key]


@pytest.mark.parametrize("mode", ["flags", "sampled", "full"])
def test_without_a_trace(mode: Any) -> None:
    """Law: attached or detached, the model computes the same bits; no hook is left."""
    model = net()
    out = passes(model)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    before, keys = hooks_of(model), list(model.state_dict())
    with hs.Probe(model, mode) as probe:
        with_probe = passes(model)
        assert torch.equal(out, with_probe)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, gradients, found))
        assert list(model.state_dict()) == keys
        probe.step()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert torch.equal(out, passes(model))
    assert all(map(torch.equal, gradients, found))
    assert hooks_of(model) == before
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    with pytest.raises(RuntimeError, match="the probe was detached; make another one"):
        probe.step()
    probe = hs.Probe(model, "full")
    out = model(X)
    probe.detach()
    out.sum().backward()  # a graph that outlives the probe
    assert not probe.stats


REFUSED: dict[str, Callable[[], object]] = {
    "mode='all'": lambda: hs.Probe(net(), "all"),
    "every=0": lambda: hs.Probe(net(), every=0),
    "every=True": lambda: hs.Probe(net(), every=True),
    "after=-1": lambda: hs.Probe(net(), after=-1),
    "scale=0.0": lambda: hs.Probe(net()).step(scale=0.0),
    "log=none/x: there is no folder": lambda: hs.Probe(net(), log="none/x"),
    "dtype='fp8'": lambda: hs.Probe(net(), casts=("fp8",)),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    """Law: a value that makes no sense is refused."""
    with pytest.raises(UserError, match=f"^{text}"):
        REFUSED[text]()


# With a session


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_session(level: str) -> None:
    """Law: beside a session, with `step` after the session's, gradients are seen."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    session = hs.prepare(model, optimizer, level, dtype="bf16")
    with hs.Probe(session.model, "full") as probe:
        for _ in range(2):
            with session.autocast():
                loss = session.model(X).float().square().mean()
            session.backward(loss)
            session.step()
            probe.step()
            assert probe.stats.keys() == {*probe.names}
        kinds = {name: stats.dtype for name, stats in probe.stats.items()}
    assert kinds["0:output"] == kinds["0:grad"] == "bfloat16"
    assert kinds["0.weight:grad"] == ("bfloat16" if level == "O2" else "float32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["flags", "full"])
def test_cuda(mode: Any) -> None:
    """Law: on a GPU nothing waits, and a step is known of two steps later."""
    model = net().cuda()
    x = X.cuda()
    with hs.Probe(model, mode) as probe:
        step(probe, model, x)  # kernels are loaded, tables copied, memory is mapped
        passes(model, x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            probe.step()
            for value in (1.0, INF, 1.0, 1.0):
                step(probe, model, x * value)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert probe.arrived == probe.steps - async_read.DELAY_STEPS
        assert probe.non_finite[0] == "0:output"
        probe.flush()
        assert (probe.arrived, probe.non_finite) == (probe.steps, ())
