"""Which libraries training and predicting need; importing this needs none of them."""

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
"""Package as it is installed -> module as it is imported."""
TO_TRAIN = TO_PREDICT | {
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "scikit-learn": "sklearn",
    "tomli-w": "tomli_w",
}


def check(what: str, packages: Mapping[str, str]) -> None:
    """Find every library that a command will need, before it begins.

    Args:
        what: Needs them.
        packages: `TO_TRAIN` or `TO_PREDICT`.
    """
    missing = [name for name, module in packages.items() if find_spec(module) is None]
    if missing:
        extras = "train,report" if packages is TO_TRAIN else "train"
        message = (
            f"{what} needs {', '.join(missing)}: install with pip install "
            f"'halfstep[{extras}]'."
        )
        raise UserError(message)
