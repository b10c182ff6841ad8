"""What the tests of all codecs share: bit patterns, and compilers to run them through.

In: nothing. Out: fp32 numbers that cover each high half, backends, and a fixture that
compiles anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# torch's own import of it warns.
_QUIET = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
_INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, _QUIET])
backends = pytest.mark.parametrize("backend", ["aot_eager", _INDUCTOR])
shapes = pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
LOWS = (0, 1, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


@pytest.fixture(name="fresh_compiler")
def fresh_compiler_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile anew, and leave nothing in the user's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def dense() -> NDArray[np.uint32]:
    """Every high half with each of `LOWS`, and one with a low half drawn for it."""
    highs = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    drawn = np.random.default_rng(0).integers(1 << 16, size=1 << 16, dtype=np.uint32)
    return np.concatenate([*(highs | np.uint32(low) for low in LOWS), highs | drawn])


def floats(patterns: NDArray[np.uint32] | list[int]) -> Tensor:
    """Return fp32 numbers of these bits."""
    unsigned = np.asarray(patterns, dtype=np.uint32)
    return torch.from_numpy(unsigned.view(np.int32)).view(torch.float32)


def strided(shape: tuple[int, ...]) -> Tensor:
    """Return random numbers of a shape, transposed if it has two dimensions."""
    values = torch.randn(shape)
    return values.T if len(shape) > 1 else values
