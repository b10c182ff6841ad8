"""Keeps rows and tokens as files in the cache folder of `datasets`.

A file is named by a hash of what determines it, and is complete or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from halfstep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABANDONED = 86400  # seconds without a write: the process was killed


def silence() -> None:
    """Turn off the bars and warnings of `datasets` and the hub's library."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def path_of(facts: list[Any], prefix: str = "") -> Path:
    """Return the path of what the facts, which JSON can hold, determine."""
    import datasets

    silence()
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "halfstep"
    return folder / f"{prefix}{key}.arrow"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is absent until it is complete.

    Raises:
        UserError: If it cannot be written.
    """
    # Not one of tempfile, which only this user may read: a cache may be shared.
    part = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob("*.part"):
            with contextlib.suppress(OSError):
                if old.stat().st_mtime < time.time() - _ABANDONED:
                    old.unlink()
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise UserError(
            f"{error.filename or path.parent} cannot be written: "
            f"{error.strerror or error}; set HF_DATASETS_CACHE to a writable folder "
            "with free space."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
