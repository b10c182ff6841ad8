"""`halfstep run`: replaces itself by Python running a script, with HALFSTEP set.

Because of `exec`, arguments, `__main__`, `sys.path`, tracebacks, signals and the exit
status are those of `python script.py`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from halfstep.errors import UserError
from halfstep.launch import DTYPES, PID_VARIABLE, VARIABLE, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = ("auto", "O0", "O1")


def exec_script(
    words: Sequence[str], *, level: str, dtype: str, module: bool
) -> NoReturn:
    """Replace this process by Python running a script.

    `words` are the script, or a module as for `python -m`, and its arguments. Level
    "auto" is O1 if 16 bits were measured to be faster on this machine.

    Raises:
        UserError: If the script or module does not exist, the level needs an edited
            script, or torch would not call `halfstep.launch.autoload`.
    """
    _check_target(words, module=module)
    if level in ("O2", "O3"):
        raise UserError(
            f"--level {level} stores weights in 16 bits, for which the script must "
            "call halfstep.prepare; a script that is not edited runs at O1, O0 or auto."
        )
    for flag, word, choices in (("level", level, LEVELS), ("dtype", dtype, DTYPES)):
        if word not in choices:
            raise UserError(f"--{flag} {word} must be {one_of(choices)}.")
    if level == "auto":
        import torch

        from halfstep.machine import hardware

        advice = hardware.recommend("cuda" if torch.cuda.is_available() else "cpu")
        level = "O0" if advice.level == "O0" else "O1"
        if level == "O0":
            sys.stderr.write(f"halfstep: O0, the script as it is: {advice.reason}\n")
    environment = {**os.environ, PID_VARIABLE: str(os.getpid())}
    environment.pop(VARIABLE, None)
    if level == "O1":
        _check_autoload()
        environment[VARIABLE] = dtype
    flags = interpreter_flags(sys.orig_argv)
    arguments = [sys.executable, *flags, *(["-m"] if module else []), *words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, arguments, environment)  # noqa: S606 -- no shell is wanted


def interpreter_flags(arguments: Sequence[str]) -> list[str]:
    """Return the interpreter's own flags of a command line, to start another.

    Example:
        >>> interpreter_flags(["python", "-u", "-X", "dev", "-m", "halfstep", "run"])
        ['-u', '-X', 'dev']
        >>> interpreter_flags(["python", "-Iu", "/usr/bin/halfstep", "run", "-u"])
        ['-Iu']
        >>> interpreter_flags(["python", "-Bm", "halfstep"])
        ['-B']
    """
    flags: list[str] = []
    words = iter(arguments[1:])
    for word in words:
        is_short = word.startswith("-") and not word.startswith("--")
        if is_short and word[-1] in "mc" and word[1] not in "XW":
            return flags + ([word[:-1]] if len(word) > len("-m") else [])
        if not word.startswith("-"):
            break
        flags.append(word)
        if word in _FLAGS_WITH_VALUE:
            flags += [next(words, "")]
    return flags


_FLAGS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def _check_target(words: Sequence[str], *, module: bool) -> None:
    if not words:
        raise UserError(
            "no script was given: halfstep run script.py, or run -m module."
        )
    target = words[0]
    if module:
        sys.path.insert(0, "")  # where `python -m` looks first
        # find_spec("a.b") would import a, here and again in the script's process.
        first = target.partition(".")[0]
        if not first or importlib.util.find_spec(first) is None:
            raise UserError(f"there is no module named {target}.")
    elif not Path(target).exists():
        raise UserError(f"there is no script {target}.")


def _check_autoload() -> None:
    """Raise rather than run a script that would silently train in fp32."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise UserError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1, so torch loads no extensions; "
            "unset it for halfstep run."
        )
    names = {each.value for each in entry_points(group="torch.backends")}
    if "halfstep.launch:autoload" not in names:
        raise UserError(
            "halfstep is not installed in this environment (its entry point for torch "
            "is missing): run pip install halfstep, or pip install -e . in its folder."
        )
