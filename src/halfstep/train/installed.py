"""The libraries that training needs beside torch.

In: nothing. Out: one line, if some are missing. Importing this needs none of them.
"""

from __future__ import annotations

from importlib.util import find_spec

from halfstep.errors import UserError

_NEEDED = (
    *("jinja2", "matplotlib", "nervaluate", "numpy", "rich", "safetensors"),
    *("sklearn", "tomli_w", "transformers"),
)


def check() -> None:
    """Find every library that a run will need, before it begins.

    Raises:
        UserError: If one is missing.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        message = (
            f"training needs {', '.join(missing)}: install with pip install "
            "'halfstep[train,report]'."
        )
        raise UserError(message)
