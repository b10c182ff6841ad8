"""Mixed precision for unedited scripts: `halfstep run`, or `HALFSTEP=bf16`.

torch calls `autoload` at the end of `import torch`, in every process of an environment
where this package is installed, so it must cost nothing if the variable is unset.
"""

from __future__ import annotations

import contextlib
import os
import sys

VARIABLE = "HALFSTEP"
"""Environment variable with one of `DTYPES` or `OFF`, in any case."""
DTYPES = ("bf16", "fp16", "auto")
"""auto: bf16, or fp16 on a GPU without bf16."""
OFF = ("", "0", "off", "false", "no")
PID_VARIABLE = "HALFSTEP_RUN_PID"
"""Environment variable with the pid of `halfstep run`, which the script's process
keeps."""


def one_of(words: tuple[str, ...]) -> str:
    """Return "a, b or c"."""
    return f"{', '.join(words[:-1])} or {words[-1]}"


def print_line(text: str) -> None:
    """Print a line on standard error, if there is one."""
    if sys.stderr is not None:  # None under pythonw
        with contextlib.suppress(OSError, ValueError):  # closed
            sys.stderr.write(f"halfstep: {text}\n")


def autoload() -> None:
    """Install mixed precision in this process if the environment asks for it.

    The entry point in the group "torch.backends". What goes wrong here is printed:
    torch would pass an exception on to each program that imports it.
    """
    word = os.environ.get(VARIABLE, "")
    dtype = word.strip().lower()
    if dtype in OFF:
        return
    problem = f"set {one_of(DTYPES)}, or 0 for off."
    if dtype in DTYPES:
        try:
            from halfstep.launch import script_training

            script_training.install(dtype)
        except Exception as error:  # noqa: BLE001 -- a defect of ours, too
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            return
    print_line(f"{VARIABLE}={word!r} has no effect: {problem}")
