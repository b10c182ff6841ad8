"""Adapters without the library that they adapt."""

import importlib
import sys

import pytest

from halfstep import UserError

LIBRARIES = ["accelerate", "lightning", "transformers"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_one_line_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: where the library is missing, a UserError names it and its version."""
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"halfstep.compat.{name}", raising=False)
    with pytest.raises(UserError, match=rf"needs {name}: pip install '{name}>=\d"):
        importlib.import_module(f"halfstep.compat.{name}")


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_one_import_line_changes(name: str) -> None:
    """Law: an adapter also has its library's other public names, and no others."""
    library = importlib.import_module(name)
    adapter = importlib.import_module(f"halfstep.compat.{name}")
    assert adapter.logging is library.logging
    assert adapter.__version__ == library.__version__
    assert {"logging", *adapter.__all__} <= set(dir(adapter))
    assert not hasattr(adapter, "__path__")  # or imports would take it for a package
    with pytest.raises(AttributeError, match=f"{name}' has no attribute 'Trainr'"):
        _ = adapter.Trainr
