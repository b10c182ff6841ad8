"""Checks that the packages for training or prediction are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

TO_PREDICT = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "transformers": "transformers",
}
"""Distribution name -> module name."""
TO_TRAIN = TO_PREDICT | {
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "scikit-learn": "sklearn",
    "tomli-w": "tomli_w",
}


def check(what: str, packages: Mapping[str, str]) -> None:
    """Raise UserError if a package is missing, before a command starts to work.

    Args:
        what: The command, for the message.
        packages: `TO_TRAIN` or `TO_PREDICT`.
    """
    missing = [name for name, module in packages.items() if find_spec(module) is None]
    if missing:
        extras = "train,report" if packages is TO_TRAIN else "train"
        message = (
            f"{what} needs {', '.join(missing)}: install with pip install "
            f"'halfstep[{extras}]', or in a checkout pip install -e '.[{extras}]'."
        )
        raise UserError(message)
