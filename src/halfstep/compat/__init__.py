"""Adapters: the interfaces of apex, Accelerate, Lightning and transformers.

Except for that of apex, each module needs its library installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

_OF_IMPORTS = {"__path__", "__file__", "__cached__", "__loader__", "__spec__"}


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
    """Return a name of the library that an adapter replaces.

    Raises:
        AttributeError: If the library has no such name, or it is one by which the
            import system describes a module, as `__path__` describes a package.
    """
    if name in _OF_IMPORTS or not hasattr(library, name):
        message = f"module {adapter!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(library, name)


def all_names(library: ModuleType, own: Iterable[str]) -> list[str]:
    """Return an adapter's own names and the public ones of its library, sorted."""
    return sorted({*own, *(name for name in dir(library) if name[0] != "_")})
