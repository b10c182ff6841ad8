"""Adapters: the interfaces of apex, Accelerate, Lightning and transformers.

Except for that of apex, each module needs its library installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType


def require(package: str, at_least: str) -> None:
    """Check that the library of an adapter is installed.

    Raises:
        UserError: If the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        message = (
            f"halfstep.compat.{package} needs {package}: "
            f"pip install '{package}>={at_least}'."
        )
        raise UserError(message)


def library_name(library: ModuleType, adapter: str, name: str) -> Any:  # noqa: ANN401
    """Return a public name of the library that an adapter replaces.

    Raises:
        AttributeError: If the library has no such name or the name is private. Names
            such as `__path__` would make the import system treat the adapter as a
            package.
    """
    if name.startswith("_") or not hasattr(library, name):
        message = f"module {adapter!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(library, name)
