"""Checks that the packages of a command or a flag are installed."""

from __future__ import annotations

from importlib.util import find_spec

from halfstep.errors import UserError

TO_PREDICT, TO_TRAIN, TENSORBOARD = "train", "train,report", "tensorboard"
"""Extras of halfstep, as pip takes them."""
_PREDICT = ("datasets", "numpy", "safetensors", "transformers")
_PACKAGES = {
    TO_PREDICT: _PREDICT,
    TO_TRAIN: (*_PREDICT, "jinja2", "matplotlib", "scikit-learn", "tomli-w"),
    TENSORBOARD: ("tensorboard",),
}
_MODULES = {"scikit-learn": "sklearn", "tomli-w": "tomli_w"}
"""Distribution -> module, where the names differ."""


def check(what: str, extras: str, *packages: str) -> None:
    """Raise UserError if a package of `extras` is missing, before `what` starts.

    `packages` are those that `what` needs of them; without any, all.
    """
    packages = packages or _PACKAGES[extras]
    missing = [name for name in packages if not find_spec(_MODULES.get(name, name))]
    if missing:
        raise UserError(
            f"{what} needs {', '.join(missing)}: install with pip install "
            f"'halfstep[{extras}]', or in a checkout pip install -e '.[{extras}]'."
        )
