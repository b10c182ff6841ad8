"""The house: the face is small and light."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from docs.pictures import house

import halfstep

SRC = Path(halfstep.__file__).parent


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


FILES = {name_of(path): path for path in sorted(SRC.rglob("*.py"))}


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
    assert len(names) <= 35
    assert dir(halfstep) == names
    for name in names:
        assert getattr(halfstep, name).__doc__, name
        room = halfstep._MODULE_OF_NAME.get(name)
        if room:
            assert getattr(halfstep, name) is getattr(
                import_module(f"halfstep.{room}"), name
            )


def test_face_says_the_same_to_type_checkers() -> None:
    """Law: what type checkers read and what is loaded on first use are one list."""
    tree = ast.parse(FILES["__init__"].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    where = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            package = (node.module or "").removeprefix("halfstep").removeprefix(".")
            path = f"{package}.{alias.name}".removeprefix(".")
            is_module = path in FILES or f"{path}.__init__" in FILES
            where[alias.asname or alias.name] = path if is_module else package
    assert sorted(where) == halfstep.__all__
    assert where == halfstep._MODULE_OF_NAME | halfstep._MODULES


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


LIBRARIES = [
    *("torch", "numpy", "transformers", "sklearn"),
    *("matplotlib", "lightning", "accelerate", "torchao"),
]
KINDS = ("profiling", "probe", "replay", "doctor", "preflight")
DIAGNOSIS = [f"halfstep.diagnostics.{kind}" for kind in KINDS]


@pytest.mark.parametrize(
    ("modules", "heavy", "loaded"),
    [
        ("halfstep, halfstep.cli, halfstep.compat", LIBRARIES, []),
        ("halfstep.numerics.formats", LIBRARIES, ["torch", "numpy"]),
        ("halfstep.session.factory, halfstep.scaling.grad_scaler", DIAGNOSIS, []),
        ("halfstep.casting.autocast_mode", DIAGNOSIS, []),
        ("halfstep.diagnostics.profiling", DIAGNOSIS, DIAGNOSIS[:1]),
    ],
)
def test_import_is_light(modules: str, heavy: list[str], loaded: list[str]) -> None:
    """Law: `import halfstep`, and the command line's, load no torch; a room does.

    Who trains does not wait for what looks for faults. Two cases are twins that
    show that it would be seen.
    """
    program = PROGRAM.format(module=modules, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == loaded


def test_picture_is_current() -> None:
    """Law: the picture of the packages shows them all, on their floors."""
    assert {name for floor in house.floors() for name in floor} == {*house.PURPOSES}
    advice = "run python docs/pictures/house.py"
    assert house.PICTURE.read_text(encoding="utf-8") == house.draw(), advice
