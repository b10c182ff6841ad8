"""Helpers for your tests of mixed-precision training.

They cause an overflow, and assert formats of modules or that a step changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfstep.errors import UserError, require_int
from halfstep.numerics import formats
from halfstep.numerics.local_tensor import inner_tensors
from halfstep.session.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["assert_dtypes", "assert_unchanged", "overflow_in_backward"]


@contextlib.contextmanager
def overflow_in_backward(model: nn.Module, at: int = 1) -> Iterator[None]:
    """Write inf into the gradients of one backward pass, as an overflow does.

    Args:
        model: The gradient of its first trainable parameter becomes inf.
        at: Number of the backward pass in the context, >= 1.

    Raises:
        UserError: If the model has no trainable parameter, or `at` is below 1.
        AssertionError: At the end, if there were fewer backward passes.

    Example:
        >>> import halfstep as hs
        >>> from halfstep.testing import overflow_in_backward
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> session = hs.prepare(model, optimizer, "O1", dtype="bf16")
        >>> with overflow_in_backward(model):
        ...     with session.autocast():
        ...         loss = model(torch.ones(1, 2)).sum()
        ...     session.backward(loss)
        >>> session.step().skipped
        True
    """
    at = require_int("at", at, 1)
    param = next((p for p in model.parameters() if p.requires_grad), None)
    if param is None:
        message = f"{type(model).__name__} has no parameter that requires a gradient."
        raise UserError(message)
    num_passes = 0

    def make_inf(grad: Tensor) -> Tensor | None:
        nonlocal num_passes
        num_passes += 1
        return torch.full_like(grad, torch.inf) if num_passes == at else None

    handle = param.register_hook(make_inf)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()
    if num_passes < at:
        message = f"the overflow was to be in backward pass {at}; {num_passes} came"
        raise AssertionError(message)


@contextlib.contextmanager
def assert_unchanged(*objects: Any) -> Iterator[None]:  # noqa: ANN401
    """Assert that models, optimizers and sessions are bit-identical at the end.

    Args:
        objects: Objects with a `state_dict`. Of a `Session` the fp32 weights and the
            optimizer's state are compared.

    Raises:
        AssertionError: At the end, with the names of the entries that differ.

    Example:
        >>> from halfstep.testing import assert_unchanged
        >>> model = torch.nn.Linear(2, 1)
        >>> with assert_unchanged(model):
        ...     _ = model(torch.ones(1, 2))
    """
    before = [_leaves(each) for each in objects]
    yield
    for each, leaves in zip(objects, before, strict=True):
        now = _leaves(each)
        differs = [
            name
            for name in leaves | now
            if name not in leaves
            or name not in now
            or not _is_equal(leaves[name], now[name])
        ]
        if differs:
            names = ", ".join(differs[:_MAX_NAMES])
            more = len(differs) - _MAX_NAMES
            names += f" and {more} more" if more > 0 else ""
            raise AssertionError(f"{type(each).__name__} has changed: {names}")


_MAX_NAMES = 5
"""Names listed in an error."""


def _leaves(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return path -> tensor or number of a state, copied."""
    if isinstance(value, Session):  # its state_dict is not available before a step
        optimizer = value.optimizer.state_dict()
        state = {"weights": value.weights(), "optimizer": optimizer}
    else:
        state = value.state_dict()
    pairs, _ = pytree.tree_flatten_with_path(state)
    return {
        f"{pytree.keystr(path)}{number or ''}": copy.deepcopy(part)
        for path, leaf in pairs
        for number, part in enumerate(
            inner_tensors(leaf) if isinstance(leaf, Tensor) else [leaf]
        )
    }


def _is_equal(one: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
    return bool(one == other)


@contextlib.contextmanager
def assert_dtypes(
    model: nn.Module, expected: Mapping[str, tuple[str, str]]
) -> Iterator[None]:
    """Assert the formats of the floating inputs and outputs of modules.

    Args:
        model: The model whose modules are observed while the context is open.
        expected: Path of a module, or a pattern of paths (`encoder.*.norm`; "" is the
            model itself) -> formats of its floating inputs and outputs, as "fp32",
            "bf16" or "fp16".

    Raises:
        UserError: If a pattern matches no module, or a format is unknown.
        AssertionError: At the end, with the first module that differs, or was not
            called.

    Example:
        >>> import halfstep as hs
        >>> from halfstep.testing import assert_dtypes
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> with assert_dtypes(model, {"0": ("fp32", "bf16"), "1": ("bf16", "bf16")}):
        ...     with hs.autocast("cpu", torch.bfloat16):
        ...         _ = model(torch.ones(1, 2))
    """
    seen: dict[str, set[tuple[str, str]]] = {}
    wanted: dict[str, tuple[str, str]] = {}
    for pattern, pair in expected.items():
        paths = [p for p, _ in model.named_modules() if fnmatch.fnmatchcase(p, pattern)]
        if not paths:
            raise UserError(f"{pattern!r} is no module of this {type(model).__name__}.")
        names = tuple(formats.parse(word).name for word in pair)
        wanted |= dict.fromkeys(paths, names)

    def watch(path: str) -> Any:  # noqa: ANN401
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ANN401
            seen.setdefault(path, set()).add((_words((args, kwargs)), _words(output)))

        return hook

    handles = [
        model.get_submodule(path).register_forward_hook(watch(path), with_kwargs=True)
        for path in wanted
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for path, pair in wanted.items():
        for actual in seen.get(path, {("", "")}):
            if actual != pair:
                what = f"module {path!r}" if path else "the model"
                came = (
                    f"took {actual[0]} and returned {actual[1]}" if any(actual) else ""
                )
                raise AssertionError(
                    f"{what} {came or 'was not called'}; expected were {pair[0]} and "
                    f"{pair[1]}"
                )


def _words(value: Any) -> str:  # noqa: ANN401
    """Return the formats of the floating-point tensors in a value."""
    tensors = (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
    dtypes = {t.dtype for t in tensors if t.is_floating_point()}
    return " and ".join(sorted(map(formats.word, dtypes)))
