"""Bytes a parameter, at the end of a backward pass, in every form."""

import gc
import json

import master_cases as cases
import pytest
import torch
from torch import Tensor, nn

from halfstep.session.memory import Footprint
from halfstep.session.session import Session

SIDE = 768
NUMEL = SIDE * SIDE
LARGE = NUMEL * 3 // 2
"""Bytes: less than a matrix in 16 bits, more than any chunk of scratch memory."""

BYTES = {
    "fp32": {"weights": 2, "gradients": 2, "masters": 4, "moments": 8},
    "split": {"weights": 2, "gradients": 2, "masters": 2, "moments": 8},
    "kahan": {"weights": 2, "gradients": 2, "masters": 2, "moments": 4},
    "stochastic": {"weights": 2, "gradients": 2, "masters": 0, "moments": 4},
    "none": {"weights": 2, "gradients": 2, "masters": 0, "moments": 4},
}
"""AdamW's: 16, 14, 10, 8 and 8 in all; without gradients 14, 12, 8, 6 and 6."""


@pytest.fixture(autouse=True)
def _from_here_on() -> None:
    """Leave out whatever lived before: `gc` does not tell of what is frozen."""
    gc.collect()
    gc.freeze()


def alive() -> int:
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # Not isinstance, which asks things for their class: some of torch's then warn.
        if issubclass(type(thing), Tensor):
            held = [thing]
            if thing.is_leaf and thing.grad is not None:
                held.append(thing.grad)
            for storage in (tensor.untyped_storage() for tensor in held):
                found[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in found.values() if size >= LARGE)


def backward(session: Session) -> None:
    with session.autocast():
        loss = session.model(torch.ones(1, SIDE)).float().square().sum()
    session.backward(loss)


def trained(word: str, *, release: bool) -> Session:
    model = nn.Linear(SIDE, SIDE, bias=False)
    session = cases.start(cases.ADAMW_PLAIN, word, model, optimizer_in_backward=release)
    backward(session)
    session.step()
    backward(session)
    return session


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("word", BYTES)
def test_bytes_a_parameter(word: str, *, release: bool) -> None:
    """Law: each form takes what it promises, as reported and as living memory."""
    session = trained(word, release=release)
    right = dict(BYTES[word])
    if release:
        right["gradients"] = 0
    found = session.memory()
    # Counters and placeholders: some numbers in all.
    assert {k: round(v / NUMEL, 3) for k, v in found.items()} == right
    assert alive() == sum(right.values()) * NUMEL
    session.step()
    assert session.memory()["gradients"] == 0


def test_folded_gradients_count() -> None:
    """Law: an optimizer that steps itself keeps an fp32 buffer, and it is counted."""
    model = nn.Linear(SIDE, SIDE, bias=False)
    session = cases.start(torch.optim.RMSprop, "split", model)
    backward(session)
    session.step()
    assert session.memory()["gradients"] == 4 * NUMEL
    backward(session)
    assert session.memory()["gradients"] == (4 + 2) * NUMEL


def test_stretches_count_once() -> None:
    """Law: views of one stretch of memory, and tied weights, count once; sparse too."""
    table = nn.Embedding(64, 8, sparse=True)
    model = nn.Sequential(table, nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = cases.prepare(model, optimizer)
    numel = 64 * 8 + 64
    assert session.memory()["weights"] == 2 * numel
    assert session.memory()["masters"] == 4 * numel
    with session.autocast():
        loss = model(torch.tensor([1, 5])).float().sum()
    session.backward(loss)
    # Two rows of 8 in bf16 and their numbers in int64; a matrix in bf16.
    assert session.memory()["gradients"] == 2 * 16 + 2 * 8 + 2 * 64


def test_printed() -> None:
    """Law: bytes are shown in units, with their sum; the numbers stay a dict's."""
    held = Footprint(weights=2**30 * 3 // 2, gradients=1023, masters=1024, moments=0)
    parts = "weights 1.5 GiB, gradients 1023 B, masters 1.0 KiB, moments 0 B"
    assert str(held) == repr(held) == f"{parts}: 1.5 GiB in all"
    assert dict(held) == held
    assert json.loads(json.dumps(held)) == held
