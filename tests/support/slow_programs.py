"""Small training programs, each of them slow for one known reason.

In: nothing. Out: `PROGRAMS`: a name, the rule that knows the reason, and what makes
the program. Sizes are such that the reason takes most of a step on any processor.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import halfstep as hs

FAST = {"fp32": 0.2, "bf16": 1.5, "fp16": 0.2}
"""Rates of a processor with AMX, TFLOP/s."""
EMULATES = {"fp32": 0.2, "bf16": 0.02, "fp16": 0.01}
"""Rates of one that has no instructions for 16 bits."""


@dataclass
class Running:
    """A program that has begun, as `hs.diagnose` takes it."""

    step: Callable[..., object]
    batches: Iterable[Any] | None = None
    live: dict[str, Any] = field(default_factory=dict)
    """Session, model, optimizer: what else the program would hand over."""


@dataclass(frozen=True)
class Program:
    start: Callable[[], Running]
    rule: str
    """Name of the rule that must be named first."""
    rates: dict[str, float] = field(default_factory=lambda: FAST)
    """Of the machine that it is to be judged for."""


def _trained(
    model: nn.Module, level: str = "O2", lr: float = 1e-3, **options: Any
) -> hs.Session:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return hs.prepare(model, optimizer, level=level, dtype="bf16", **options)


def _step(session: hs.Session, x: Tensor) -> None:
    with session.autocast():
        loss = session.model(x).float().square().mean()
    session.backward(loss)
    session.step()


def _running(session: hs.Session, x: Tensor) -> Running:
    return Running(partial(_step, session, x), live={"session": session})


class _Texts(Dataset[Tensor]):
    """Texts that are taken apart character by character each time they are read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        text = f"the {index}th text of a collection " * 150
        seen: dict[str, int] = {}
        ids = [seen.setdefault(character, len(seen)) for character in text]
        counts = [ids.count(number) for number in range(32)]
        return torch.tensor(counts, dtype=torch.float32)


def data_loading() -> Running:
    """Tokenise in the loop what could have been tokenised before it."""
    # The inputs are counts of some hundreds: a larger rate diverges.
    session = _trained(nn.Linear(32, 32), lr=1e-9)
    return Running(
        partial(_step, session),
        DataLoader(_Texts(), batch_size=8),
        {"session": session},
    )


def python() -> Running:
    """Keep a book of the predictions in Python, number by number."""
    session = _trained(nn.Linear(64, 10))
    x = torch.randn(512, 64)
    book: dict[tuple[int, int], int] = {}

    def step() -> None:
        _step(session, x)
        with torch.no_grad():
            rows = session.model(x.bfloat16()).float().tolist()
        for place, row in enumerate(rows):
            for column, number in enumerate(row):
                key = (place % 10, column if number > 0 else -1)
                book[key] = book.get(key, 0) + 1

    return Running(step, live={"session": session})


class _Recurrent(nn.Module):
    """A recurrent layer, which goes from step to step with few rows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(x)[1]
        return found


def small_products() -> Running:
    """Go through a sequence step by step, a few rows at once."""
    return _running(_trained(_Recurrent()), torch.randn(128, 120, 128))


class _Odd(nn.Module):
    """Layers whose widths are one more than a tile."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(33, 33) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x).mean(0)
        return found


def odd_sizes() -> Running:
    """Make layers 33 wide, which cost what 64 and 48 would."""
    return _running(_trained(_Odd()), torch.randn(1 << 17, 33))


def casts() -> Running:
    """Cast large weights that do not learn, each step anew, for a few rows."""
    frozen = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(2)))
    frozen.requires_grad_(requires_grad=False)
    model = nn.Sequential(frozen, nn.Linear(4096, 32))
    return _running(_trained(model, "O1", policy="torch"), torch.randn(16, 4096))


class _Spectral(nn.Module):
    """A layer, and a transform that there is in fp32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.fft.rfft(self.layer(x), dim=0).abs()
        return found


def fp32_only() -> Running:
    """Spend the step in Fourier transforms, which have no 16-bit kernel."""
    return _running(_trained(_Spectral(), "O1"), torch.randn(8192, 64))


def emulated() -> Running:
    layers = (nn.Linear(1024, 1024) for _ in range(2))
    return _running(_trained(nn.Sequential(*layers)), torch.randn(512, 1024))


def no_region() -> Running:
    """Forget the region: the level asks for bf16, and all products run in fp32."""
    session = _trained(nn.Sequential(*(nn.Linear(512, 512) for _ in range(2))), "O1")
    x = torch.randn(512, 512)

    def step() -> None:
        loss = session.model(x).square().mean()
        session.backward(loss)
        session.step()

    return Running(step, live={"session": session})


def unfused_update() -> Running:
    """Update many weights for a few rows, with Adam as torch makes it by default."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    return _running(
        hs.prepare(model, optimizer, "O1", dtype="bf16"), torch.randn(64, 1024)
    )


def waits() -> Running:
    """Read a number after every product, for which the host waits."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        made = x
        for _ in range(8):
            made = made @ x
            made = made / made.abs().max().item()

    return Running(step, live={"level": "O3"})


PROGRAMS = {
    "data loading": Program(data_loading, "data loading"),
    "python": Program(python, "overhead"),
    "small products": Program(small_products, "small products"),
    "odd sizes": Program(odd_sizes, "sizes and AMX tiles"),
    "casts": Program(casts, "casts"),
    "fp32 only": Program(fp32_only, "fp32 operations"),
    "emulated": Program(emulated, "emulated", EMULATES),
    "no region": Program(no_region, "fp32 matmuls"),
    "unfused update": Program(unfused_update, "unfused update"),
}
"""Name -> program. Each holds on a CPU."""

ON_A_GPU = {"waits": Program(waits, "waits")}
"""What costs nothing where there is no device to wait for."""
