"""Programs written for other trainers, on halfstep. Each module needs its library.

In: the interface of apex, Accelerate, Lightning or transformers. Out: halfstep's.
"""

from __future__ import annotations

import importlib.util

from halfstep.errors import UserError


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
