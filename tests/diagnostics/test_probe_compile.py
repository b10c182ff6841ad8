"""A probe inside graphs of torch.compile, beside the same model uncompiled."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnostics.test_probe import INF, NAN, X, net, passes, step
from torch import nn

import halfstep as hs

# torch's own import of it warns.
QUIET = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, QUIET])
# torch.compile itself makes one of each autograd.Function that it meets, and looks at
# gradients of what are no leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not"),
]
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
BLIND = "If torch.compile ran it before the probe was attached, attach first"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew in each test, and leave nothing in the user's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def broken(value: float, *, backward: bool) -> nn.Sequential:
    """Return a model that breaks when its input is above 10, in one direction."""

    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if backward:
                return Gate.apply(x)
            return x * torch.where(x.abs().amax() > 10, value, 1.0)

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return gradients[0] * torch.where(x.abs().amax() > 10, value, 1.0)

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), Breaks(), nn.Linear(4, 4))


@BACKENDS
@pytest.mark.parametrize(("mode", "value"), [("flags", INF), ("full", NAN)])
def test_the_same_is_found(mode: Any, value: float, backend: str) -> None:
    """Law: in one graph, forward and backward, as much is found as without it.

    Names come in the order of the modules, which is that of a chain.
    """
    for backward in (False, True):
        torch._dynamo.reset()
        model = broken(value, backward=backward)
        with hs.Probe(model, mode) as probe:
            eager = [step(probe, model, x) for x in (X, X * 1000, X)]
        with hs.Probe(model, mode) as probe:
            compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
            found = [step(probe, compiled, x) for x in (X, X * 1000, X)]
        assert [{*names} for names in found] == [{*names} for names in eager]
        first = "1:grad" if backward else "2:output"
        assert found[1][0] == eager[1][0] == first
        assert found[0] == found[2] == ()


@BACKENDS
@pytest.mark.parametrize("again", [None, False])
def test_statistics(again: bool | None, backend: str) -> None:
    """Law: so are statistics, of what the graph computes; no graph for each kind.

    A checkpoint inside the graph changes nothing.
    """
    model = net(again)
    with hs.Probe(model, "full") as probe:
        step(probe, model)
        eager = {name: stats.data() for name, stats in probe.stats.items()}
    with hs.Probe(model, "sampled", every=2) as probe:
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        frames = torch._dynamo.utils.counters["frames"]
        before = frames["ok"]
        for number in range(5):
            step(probe, compiled)
            assert probe.arrived == 1 + number // 2 * 2
        found = {name: stats.data() for name, stats in probe.stats.items()}
        assert frames["ok"] - before <= 2
    assert found.keys() == eager.keys()
    for name, data in found.items():
        assert data["count"] == eager[name]["count"], name
        # Terms of size 1 cancel in a normalisation's gradient; there are a few dozen.
        near = pytest.approx(eager[name]["amax"], rel=2.0**-20, abs=64 * 2.0**-23)
        assert data["amax"] == near, name


@BACKENDS
def test_without_a_trace(backend: str) -> None:
    """Law: the graph computes the same bits with a probe, in a pause and after it."""
    model = net()
    out = passes(torch.compile(model, backend=backend))
    torch._dynamo.reset()
    probe = hs.Probe(model)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(passes(compiled), out)
    probe.step()
    with probe.paused():
        passes(compiled, X * NAN)
    assert step(probe, compiled) == ()
    assert "0:output" in step(probe, compiled, X * NAN)
    probe.detach()
    held = probe._hooks.flags
    assert torch.equal(passes(compiled), out)
    passes(compiled, X * NAN)
    assert not any(flags.gt(0).any() for flags in held)


def test_attached_too_late() -> None:
    """Law: a probe that sees nothing because of torch.compile says so, once."""
    model = net()
    compiled: Any = torch.compile(model, backend="aot_eager")
    passes(compiled)
    with hs.Probe(compiled) as probe:
        passes(compiled)
        with pytest.warns(UserWarning, match="nothing of the model") as caught:
            probe.step()
        assert BLIND in str(caught[0].message)
        assert caught[0].filename == __file__
        assert len(str(caught[0].message).split()) <= 35
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(probe, compiled)
    torch.compiler.reset()
    with hs.Probe(compiled) as probe:
        assert "0:output" in step(probe, compiled, X * NAN)


def test_a_part_compiled_too_late() -> None:
    """Law: so it does where only a part is compiled, and names it."""
    model = net()
    model[1].compile(backend="aot_eager")
    passes(model)
    with hs.Probe(model) as probe:
        passes(model)
        with pytest.warns(UserWarning, match=r"nothing of '1'\. If"):
            probe.step()


@pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    reason="torch 2.9 saves the probe's flags in the part's compiled backward pass",
    raises=RuntimeError,
    strict=True,
)
def test_a_part_compiled_in_time() -> None:
    """Law: a part that is compiled once the probe is there is looked at."""
    model = net()
    model[1].compile(backend="aot_eager")
    with hs.Probe(model) as probe:
        step(probe, model)
        found = step(probe, model, X * NAN)
        assert {"0:output", "1.first:output", "1.first:grad", "1:output"} <= {*found}


def test_wrapped_before() -> None:
    """Law: a model that torch.compile has wrapped, and not run, can be probed."""
    compiled: Any = torch.compile(net(), backend="aot_eager", fullgraph=True)
    with hs.Probe(compiled, "full") as probe:
        assert probe.names[0] == "0:output"
        step(probe, compiled)
        assert "model:output" in step(probe, compiled, X * NAN)
