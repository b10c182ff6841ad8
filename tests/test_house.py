"""The house: imports point down, files are short, the face is small and light."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import halfstep

SRC = Path(halfstep.__file__).parent
LINES = 600
TABLES_OF_DATA = {"optable"}

LAYER = {
    # Facts: they know nobody, or a lower one of these.
    "errors": 0,
    "buckets": 1,
    "finding": 1,
    "optable": 0,
    "checkpoint": 2,
    "distributed": 1,
    "formats": 1,
    "policy_file": 1,
    "report": 1,
    "report_page": 2,
    "sealed": 1,
    "index": 2,
    "shard_files": 3,
    "late": 0,
    "random_state": 0,
    "nested": 2,
    "marks": 0,
    "schedule": 1,
    "parameters": 1,
    "scaler.known": 1,
    "scaler.rule": 2,
    "scaler.saved": 1,
    "scaler.closure": 1,
    "scaler.unscale": 1,
    "stats": 2,
    "scaler.exponents": 2,
    "tensor_counts": 3,
    "tensor_stats": 4,
    "probe.carriers": 0,
    "probe.looks": 4,
    "probe.traced": 4,
    "probe.comings": 5,
    "probe.hooks": 6,
    "probe.probe": 7,
    "probe.__init__": 8,
    "scaler.singular": 1,
    "scaler.autopsy": 3,
    "scaler.logmax": 3,
    "scaler.measured": 3,
    "scaler.strategy": 4,
    "scaler.past": 1,
    "scaler.told": 4,
    "scaler.skip_log": 4,
    "scaler.collapse": 5,
    "scaler.loss_scaler": 6,
    "scaler.isolate": 7,
    "scaler.scales": 7,
    "scaler.passes": 8,
    "scaler.__init__": 8,
    "bad_op": 2,
    "replay.domains": 2,
    "replay.values": 2,
    "replay.words": 3,
    "replay.calls": 0,
    "replay.places": 4,
    "replay.indices": 5,
    "replay.watching": 6,
    "replay.given": 1,
    "replay.gradients": 2,
    "replay.untouched": 8,
    "replay.sums": 8,
    "replay.verdict": 8,
    "replay.searching": 9,
    "replay.__init__": 10,
    "complaints": 2,
    # Rooms of the core, each with one job.
    "fold": 2,
    "fused": 2,
    "levels": 2,
    "policy": 2,
    "stale": 2,
    "cast_cache": 3,
    "apart": 8,
    "stepping": 3,
    "grad_scaler": 9,
    "cpu": 0,
    "gemm": 2,
    "rate_cache": 3,
    "machine": 4,
    "master.arithmetic": 2,
    "hooks": 1,
    "patches": 0,
    "entries": 0,
    "untraced": 0,
    "master.kahan": 1,
    "master.split": 0,
    "master.triton_bits": 0,
    "master.triton_code": 1,
    "master.triton_kernels": 3,
    "master.build": 1,
    "master.stochastic": 1,
    "master.form": 2,
    "master.folding": 4,
    "master.piecewise": 3,
    "master.quick": 2,
    "master.chunks": 3,
    "master.native": 3,
    "master.chunked": 4,
    "master.direct": 5,
    "master.weights": 6,
    "master.nomasters": 7,
    "master.__init__": 8,
    "mismatch": 3,
    "choice": 5,
    "arguments": 6,
    "emulated": 5,
    "sign": 4,
    "gate": 4,
    "kernels": 5,
    "profiling.result": 2,
    "profiling.timeline": 2,
    "profiling.steps": 3,
    "profiling.__init__": 4,
    "record": 5,
    "steering": 5,
    "carry": 7,
    "recompute": 6,
    "explain": 9,
    "functions": 7,
    "scopes": 7,
    "steered": 8,
    "traced": 7,
    "casting": 9,
    "convert": 9,
    "forward": 10,
    # The one room that knows the core, and the face.
    "exchange": 9,
    "arriving": 10,
    "footprint": 9,
    "shards": 9,
    "lost": 9,
    "release": 9,
    "model_hooks": 6,
    "grad_versions": 1,
    "accumulation": 1,
    "session_state": 10,
    "updating": 9,
    "session": 11,
    "preparing": 12,
    # The doctor: plain values in, findings out.
    "doctor.plain": 1,
    "doctor.tally": 2,
    "doctor.facts": 3,
    "doctor.rule": 4,
    "doctor.products": 4,
    "doctor.rules_learning": 5,
    "doctor.rules_range": 5,
    "doctor.rules_scale": 5,
    "doctor.rules_weights": 5,
    "doctor.rules_speed": 5,
    "doctor.rules": 6,
    "doctor.__init__": 7,
    "doctor.files": 4,
    "doctor.here": 5,
    "doctor.text": 5,
    "doctor.heat": 0,
    "doctor.page": 6,
    "sharded": 13,
    # The check before training.
    "preflight.boundaries": 2,
    "preflight.operations": 3,
    "preflight.fidelity": 0,
    "preflight.buffers": 0,
    "preflight.facts": 2,
    "preflight.rules": 3,
    "preflight.verdict": 4,
    "preflight.report": 5,
    "preflight.counts": 4,
    "preflight.guards": 6,
    "preflight.twin": 13,
    "preflight.trials": 14,
    "preflight.costs": 15,
    "preflight.checking": 16,
    "preflight.__init__": 17,
    "__init__": 18,
    "step_numerics": 12,
    "diagnosis": 13,
    # The fine-tuning program.
    "train.lines": 18,
    "train.locks": 18,
    "train.marked": 19,
    "train.__init__": 20,
    "train.batches": 20,
    "train.board": 20,
    "train.cache": 20,
    "train.clock": 20,
    "train.config": 20,
    "train.groups": 20,
    "train.judged": 20,
    "train.installed": 18,
    "train.launch": 20,
    "train.parallel": 20,
    "train.progress": 20,
    "train.quick": 20,
    "train.records": 20,
    "train.rows": 19,
    "train.spans": 20,
    "train.stopping": 20,
    "train.tags": 20,
    "train.text": 20,
    "train.judge_entities": 21,
    "train.judge_labels": 21,
    "train.page": 21,
    "train.settings": 21,
    "train.store": 21,
    "train.data": 22,
    "train.flags": 22,
    "train.folder": 22,
    "train.encode": 23,
    "train.tasks": 24,
    "train.evaluate": 25,
    "train.feed": 25,
    "train.plan": 26,
    "train.predict": 26,
    "train.job": 27,
    "train.predicted": 27,
    "train.saving": 28,
    "train.replayed": 27,
    "train.looking": 28,
    "train.loop": 29,
    "train.findings": 30,
    "train.result": 31,
    "train.foresight": 32,
    "train.rehearsal": 33,
    "train.run": 34,
    # The measuring program.
    "bench.__init__": 40,
    "bench.baselines": 40,
    "bench.journal": 39,
    "bench.living": 40,
    "bench.loops": 40,
    "bench.flags": 40,
    "bench.updates": 40,
    "bench.optimizer": 41,
    "bench.peers": 42,
    "bench.rank": 42,
    "bench.quality": 41,
    "bench.entities": 42,
    "bench.recipe": 43,
    "bench.wire": 43,
    "bench.measure": 40,
    "bench.operations": 40,
    "bench.accumulate": 41,
    "bench.autocast": 41,
    "bench.contender": 41,
    "bench.encoder": 41,
    "bench.probe": 42,
    "bench.scaler": 41,
    "bench.traces": 41,
    "bench.train": 42,
    "bench.commands": 44,
    # Other people's interfaces.
    "compat.__init__": 20,
    "compat.apex.state": 20,
    "compat.apex.masters": 20,
    "compat.apex.larc": 20,
    "compat.apex.amp_C": 21,
    "compat.apex.multi_tensor_apply": 20,
    "compat.apex.optimizers": 21,
    "compat.apex.parallel": 21,
    "compat.apex.properties": 21,
    "compat.apex.lists": 20,
    "compat.apex.stash": 21,
    "compat.apex.loss_scaler": 20,
    "compat.apex.scaling": 22,
    "compat.apex.casts": 21,
    "compat.apex.fp16_optimizer": 22,
    "compat.apex.fp16_utils": 23,
    "compat.apex.models": 24,
    "compat.apex.frontend": 25,
    "compat.apex.amp": 26,
    "compat.apex.__init__": 27,
    # What the user starts.
    "parser": 1,
    "cli": 50,
    "__main__": 51,
}
"""Module -> floor. An import must lead to a strictly lower one; a new module gets the
lowest floor above all that it imports."""

Imports = dict[str, set[str]]


def name_of(path: Path) -> str:
    """Return a file's name in the table."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


FILES = {name_of(path): path for path in sorted(SRC.rglob("*.py"))}


def target_of(words: list[str]) -> str | None:
    """Return the module of ours that a dotted name leads to, or None."""
    if words[0] != "halfstep":
        return None
    inner = ".".join(words[1:])
    for candidate in (inner, f"{inner}.__init__".removeprefix(".")):
        if candidate in FILES:
            return candidate
    return target_of(words[:-1])


def imports_of(source: str) -> set[str]:
    """Return the modules of ours that a source text imports, wherever it does."""
    found: set[str | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {target_of(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "write absolute imports"
            base = (node.module or "").split(".")
            found |= {target_of([*base, alias.name]) for alias in node.names}
    return {name for name in found if name is not None}


def uphill(imports: Imports, layer: dict[str, int]) -> list[str]:
    """Return each arrow that does not lead to a strictly lower floor."""
    return [
        f"{source} ({layer[source]}) -> {target} ({layer[target]})"
        for source, targets in sorted(imports.items())
        for target in sorted(targets)
        if layer[target] >= layer[source]
    ]


def circle(imports: Imports) -> list[str]:
    """Return modules that import each other in a ring, [] where there are none."""
    left = dict(imports)
    while True:
        free = [name for name, targets in left.items() if not targets & left.keys()]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]


IMPORTS = {
    name: imports_of(path.read_text(encoding="utf-8")) for name, path in FILES.items()
}


def test_every_module_has_a_floor() -> None:
    """Law: the table names exactly the modules that there are."""
    new, gone = sorted(FILES.keys() - LAYER), sorted(LAYER.keys() - FILES)
    assert not new, (
        f"no floor for {new}: add it to LAYER in tests/test_house.py, one above the "
        f"highest that it imports: {[sorted(IMPORTS[name]) for name in new]}"
    )
    assert not gone, f"LAYER in tests/test_house.py names {gone}, which are no files"


def test_imports_point_down() -> None:
    """Law: every import, in functions and TYPE_CHECKING too, leads to a lower floor."""
    known = {name: IMPORTS[name] & LAYER.keys() for name in FILES if name in LAYER}
    assert not uphill(known, LAYER)


def test_no_circle() -> None:
    """Law: no modules import each other, whatever the table says."""
    assert not circle(IMPORTS)


TWIN = """
from __future__ import annotations
import halfstep.train.data, torch
from typing import TYPE_CHECKING
from halfstep import __version__, optable
from halfstep.policy import decide
if TYPE_CHECKING:
    from halfstep.session import Session
def function():
    from halfstep import bench
    from halfstep.cli import main
"""


def test_imports_are_found() -> None:
    """Law: the reader sees all forms of import, and tells modules from their names."""
    expected = {"__init__", "optable", "policy", "session", "cli"}
    assert imports_of(TWIN) == expected | {"train.data", "bench.__init__"}
    assert imports_of("import halfstep") == {"__init__"}
    assert imports_of("import halfsteps, os.path\nfrom torch import nn") == set()
    assert IMPORTS["session"] >= {"casting", "choice", "convert", "report"}


def test_uphill_is_noticed() -> None:
    """Law: both checks can fail: upwards, on one floor, and round."""
    assert uphill({"formats": {"session", "errors"}}, LAYER) == [
        "formats (1) -> session (11)"
    ]
    assert uphill({"formats": {"report"}}, LAYER) == ["formats (1) -> report (1)"]
    ring = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circle(ring) == ["a", "b", "c", "e"]
    assert circle({"a": {"b"}, "b": set()}) == []


@pytest.mark.parametrize("name", sorted(FILES.keys() - TABLES_OF_DATA))
def test_files_are_short(name: str) -> None:
    """Law: a file has at most 400 lines, tables of data apart."""
    lines = len(FILES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= LINES, f"{name} has {lines} lines: split it, and say why"


def test_sources_are_ascii() -> None:
    """Law: our files are ASCII; only the built-in texts are not."""
    texts = {".py", ".typed", ".html", ".css", ".json", ".toml"}
    for path in SRC.rglob("*"):
        if path.suffix in texts and "emotions" not in path.relative_to(SRC).parts:
            assert path.read_bytes().isascii(), path


def test_face() -> None:
    """Law: the face is small, sorted and true: each name is there, and documented."""
    names = halfstep.__all__
    assert names == sorted(set(names))
    assert len(names) <= 30
    assert dir(halfstep) == names
    for name in names:
        assert getattr(halfstep, name).__doc__, name
        room = halfstep._ROOM_OF.get(name)
        if room:
            assert getattr(halfstep, name) is getattr(
                import_module(f"halfstep.{room}"), name
            )


def test_face_says_the_same_to_type_checkers() -> None:
    """Law: what type checkers read and what is loaded on first use are one list."""
    tree = ast.parse(FILES["__init__"].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    rooms = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            rooms[alias.name] = (node.module or "").removeprefix("halfstep.")
    assert sorted(rooms) == halfstep.__all__
    alone = {name for name, room in rooms.items() if room == "halfstep"}
    assert alone == set(halfstep._ROOMS)
    assert {n: r for n, r in rooms.items() if n not in alone} == halfstep._ROOM_OF


def test_unknown_name() -> None:
    """Law: a name that the face has not is an AttributeError, as of any module."""
    with pytest.raises(AttributeError) as caught:
        _ = halfstep.nonsense  # type: ignore[attr-defined]
    assert str(caught.value) == "module 'halfstep' has no attribute 'nonsense'"


PROGRAM = """
import sys
import {module}
print(*(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("module", "loaded"),
    [("halfstep", []), ("halfstep.cli", []), ("halfstep.formats", ["torch", "numpy"])],
)
def test_import_is_light(module: str, loaded: list[str]) -> None:
    """Law: `import halfstep`, and the command line's, load no torch; a room does.

    The last is the twin that shows that torch would be seen.
    """
    heavy = ["torch", "numpy", "transformers", "sklearn", "matplotlib", "rich"]
    program = PROGRAM.format(module=module, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == loaded


def test_training_loads_no_diagnosis() -> None:
    """Law: who trains does not wait for what looks for faults to be loaded.

    The last is the twin that shows that it would be seen.
    """
    kinds = ("profiling", "probe", "replay", "doctor", "preflight")
    heavy = [f"halfstep.{kind}" for kind in kinds]
    for module, loaded in (
        ("halfstep.preparing, halfstep.casting, halfstep.grad_scaler", []),
        ("halfstep.profiling", ["halfstep.profiling"]),
    ):
        program = PROGRAM.format(module=module, heavy=heavy)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == loaded
