"""Mixed precision for unedited scripts: `halfstep run`, or `HALFSTEP=bf16`.

torch calls `autoload` at the end of `import torch`, in every process of an environment
where this package is installed, so it must cost nothing if the variable is unset.
"""

from __future__ import annotations

import os

VARIABLE = "HALFSTEP"
"""Environment variable with one of `DTYPES`."""
DTYPES = ("bf16", "fp16", "auto")
"""auto: bf16, or fp16 on a GPU without bf16."""
PID_VARIABLE = "HALFSTEP_RUN_PID"
"""Environment variable with the pid of `halfstep run`, which the script's process
keeps."""


def one_of(words: tuple[str, ...]) -> str:
    """Return "a, b or c"."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def autoload() -> None:
    """Install mixed precision in this process if the environment asks for it.

    The entry point in the group "torch.backends".

    Raises:
        SystemExit: If the variable has an invalid value.
    """
    dtype = os.environ.get(VARIABLE, "").lower()
    if not dtype:
        return
    from halfstep.launch import script_training

    script_training.install(dtype)
