"""Mixed precision for a script that nobody edits: `halfstep run`, or `HALFSTEP=bf16`.

In: a script, or the environment of any program that imports torch. Out: the program
itself, run by Python as ever, its forward passes in 16 bits.

torch calls `autoload` at the end of `import torch`, in every process of an environment
where this package is installed: with the variable unset it must cost nothing.
"""

from __future__ import annotations

import os

VARIABLE = "HALFSTEP"
"""Environment variable that holds one of `DTYPES`."""
DTYPES = ("bf16", "fp16", "auto")
"""auto: bf16, and fp16 on a GPU without bf16."""
PID_VARIABLE = "HALFSTEP_RUN_PID"
"""Environment variable that holds the process `halfstep run` was; it became the
script's."""


def autoload() -> None:
    """Train this process in mixed precision, if its environment asks for it.

    The entry point of the group "torch.backends".

    Raises:
        SystemExit: If the variable holds another word.
    """
    dtype = os.environ.get(VARIABLE, "").lower()
    if not dtype:
        return
    from halfstep.launch import script_training

    script_training.install(dtype)
