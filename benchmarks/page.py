"""What the scripts of this folder share: their flag, and how a page begins and ends."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import sys
from pathlib import Path

import torch

from halfstep.machine import hardware


def parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the flag --write; `text` is the script's docstring."""
    flags = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page there"
    )
    return flags


def head(title: str, command: str, versions: str = "") -> str:
    """Return a title with today's date, the machine, the versions and the command."""
    threads = os.environ.get("OMP_NUM_THREADS")
    prefix = f"OMP_NUM_THREADS={threads} " if threads else ""
    return (
        f"# {dt.datetime.now(tz=dt.UTC).date()}: {title}\n\n"
        f"{hardware.capabilities().cpu}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, Python {platform.python_version()}{versions}. "
        f"`{prefix}{command}`"
    )


def write(text: str, file: Path | None) -> None:
    """Print a page, or write it to a file."""
    if file is None:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")
