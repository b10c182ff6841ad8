"""Adapters: the interfaces of apex, Accelerate, Lightning and transformers.

Except for that of apex, each module needs its library installed.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_OF_IMPORTS = {"__path__", "__file__", "__cached__", "__loader__", "__spec__"}


def require(package: str, at_least: str) -> None:
    """Check that the library of an adapter is installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"halfstep.compat.{package} needs {package}: "
            f"pip install '{package}>={at_least}'."
        )


def library_names(
    library: ModuleType, own: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of an adapter, which has its library's names.

    Args:
        library: The library.
        own: `globals()` of the adapter.
    """

    def get(name: str) -> Any:
        # Names by which the import system describes a module are not the adapter's.
        if name in _OF_IMPORTS or not hasattr(library, name):
            message = f"module {own['__name__']!r} has no attribute {name!r}"
            raise AttributeError(message)
        return getattr(library, name)

    def list_names() -> list[str]:
        return sorted({*own, *(name for name in dir(library) if name[0] != "_")})

    return get, list_names
