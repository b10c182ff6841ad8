"""Programs written for other trainers, on halfstep. Each module needs its library.

In: the interface of apex, Accelerate, Lightning or transformers. Out: halfstep's.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType


def require(package: str, at_least: str) -> None:
    """Say what to install for an adapter.

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
    """Return a public name of the library that an adapter stands for.

    Raises:
        AttributeError: If the library has no such name, or it is not public: the import
            system must not take an adapter for a package.
    """
    if name.startswith("_") or not hasattr(library, name):
        message = f"module {adapter!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(library, name)
