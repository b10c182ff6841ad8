"""Checks indices and targets before an operation runs.

Why before: on a GPU an index out of range ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfstep.diagnostics.replay.module_stack import ModuleStack, Place

_TABLES = {
    "embedding": "embedding",
    "_embedding_bag": "embedding_bag",
    "_embedding_bag_forward_only": "embedding_bag",
}


class OutOfRange(RuntimeError):  # noqa: N818 -- the search catches it
    """An index or target that an operation cannot use: a label, or a token."""

    def __init__(self, place: Place, op: str, *, is_label: bool, evidence: str) -> None:
        super().__init__(evidence)
        self.place, self.op = place, op
        self.is_label, self.evidence = is_label, evidence


def check(name: str, args: Sequence[Any], modules: ModuleStack) -> None:
    """Check that the indices of aten's operation `name` are in range. Synchronizes.

    Raises:
        OutOfRange: If one is not.
    """
    op, is_label = _TABLES.get(name, name), False
    if name in {"nll_loss_forward", "nll_loss2d_forward"}:
        op, is_label = "cross_entropy", True
        logits, indices, ignored = args[0], args[1], args[4]
        size = logits.shape[1 if logits.dim() > 1 else 0]
        right = f"classes are 0 to {size - 1}, and {ignored} is left out"
        invalid = (indices != ignored) & ((indices < 0) | (indices >= size))
    elif name in _TABLES or (name in {"gather", "index_select"} and args[0].dim()):
        if name in _TABLES:
            size, indices = args[0].shape[0], args[1]
            right = f"the table has rows 0 to {size - 1}"
        else:
            size, indices = args[0].shape[args[1]], args[2]
            right = f"there are 0 to {size - 1}"
            # A hand-written loss looks up labels so.
            is_label = modules.current().is_loss
        invalid = (indices < 0) | (indices >= size)
    elif name == "binary_cross_entropy":
        is_label = True
        invalid = ~((args[1] >= 0) & (args[1] <= 1))
    else:
        return
    if not bool(invalid.any()):
        return
    count = f"{int(invalid.sum())} of {invalid.numel()}"
    if name == "binary_cross_entropy":
        evidence = f"{count} targets are not inside 0 to 1"
    else:
        index = int(indices[invalid].flatten()[0])
        evidence = f"index {index} at {count} places, yet {right}"
    raise OutOfRange(modules.current(), op, is_label=is_label, evidence=evidence)
