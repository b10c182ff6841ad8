"""A probe on a model that torch.compile runs, beside the same model uncompiled."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnostics.test_probe import INF, NAN, X, net, passes, step

import halfstep as hs

# torch's own import of inductor warns.
QUIET = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, QUIET])
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
# torch.compile itself looks at gradients of what are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that")


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew in each test, and leave nothing in the user's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@BACKENDS
@pytest.mark.parametrize(("mode", "again"), [("flags", None), ("full", False)])
def test_the_same_is_found(mode: Any, again: bool | None, backend: str) -> None:
    """Law: names, order and statistics are those of the model uncompiled.

    Forward and backward, whether it was wrapped before the probe came or after, and
    with a checkpoint inside.
    """
    found: list[list[tuple[str, ...]]] = []
    amax: list[dict[str, float]] = []
    for wrapped in (None, "before", "after"):
        torch._dynamo.reset()
        model: Any = net(again)
        run = torch.compile(model, backend=backend) if wrapped == "before" else model
        with hs.Probe(run, mode) as probe:
            if wrapped == "after":
                run = torch.compile(model, backend=backend)
            names = [step(probe, run)]
            amax.append({name: stats.amax for name, stats in probe.stats.items()})
            model[1].broken.backward_value = NAN
            names.append(step(probe, run))
            model[1].broken.backward_value = None
            found.append([*names, step(probe, run, X * INF), step(probe, run)])
    assert found[0] == found[1] == found[2]
    assert found[0][1][0] == "1.first:grad"
    assert found[0][0] == found[0][3] == ()
    for compiled in amax[1:]:
        # Terms of size 1 cancel in a normalisation's gradient; there are a few dozen.
        assert compiled == pytest.approx(amax[0], rel=2.0**-20, abs=64 * 2.0**-23)


@BACKENDS
def test_without_a_trace(backend: str) -> None:
    """Law: the same bits with a probe and after it; a pause is not observed."""
    model = net()
    compiled: Any = torch.compile(model, backend=backend)
    with hs.Probe(model) as probe:
        out = passes(compiled)
        probe.step()
        with probe.paused():
            passes(compiled, X * NAN)
        assert step(probe, compiled) == ()
    assert torch.equal(passes(compiled), out)
    passes(compiled, X * NAN)
    probe.flush()
    assert not probe.history


def test_one_graph_is_refused() -> None:
    """Law: where the program asks for one graph, torch's error names the probe."""
    model = net()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        hs.Probe(model),
        pytest.raises(torch._dynamo.exc.Unsupported, match=r"halfstep\.Probe reads"),
    ):
        compiled(X)


@pytest.mark.parametrize("part", [False, True])
def test_attached_too_late(*, part: bool) -> None:
    """Law: what ran compiled before the probe came is named, once."""
    model = net()
    if part:
        model[1].compile(backend="aot_eager")
    run: Any = model if part else torch.compile(model, backend="aot_eager")
    passes(run)
    with hs.Probe(run) as probe:
        passes(run)
        missed = "nothing of '1'" if part else "nothing of the model"
        with pytest.warns(UserWarning, match=missed) as caught:
            probe.step()
        assert "attach first, or call torch.compiler.reset()" in str(caught[0].message)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(probe, run)
    torch.compiler.reset()
    with hs.Probe(run) as probe:
        assert "1.first:output" in step(probe, run, X * NAN)
