"""Indices that point nowhere, and other words and labels that torch refuses.

In: an operation and its arguments, before it runs. Out: nothing, or an `OutOfRange`.

Why before: on a GPU such an index ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from halfstep.diagnostics.replay.module_stack import ModuleStack, Place


_TABLES = {
    "embedding": "embedding",
    "_embedding_bag": "embedding_bag",
    "_embedding_bag_forward_only": "embedding_bag",
}


class OutOfRange(RuntimeError):  # noqa: N818 -- it is caught where it is made
    """An index that an operation cannot use.

    Args:
        place: Where it runs.
        word: The operation.
        label: The index is a label, not a word.
        says: What is wrong, with numbers.
    """

    def __init__(self, place: Place, word: str, *, label: bool, says: str) -> None:
        super().__init__(says)
        self.place, self.word, self.label, self.says = place, word, label, says


def check(name: str, args: Sequence[Any], places: ModuleStack) -> None:
    """Refuse indices that are out of range. Waits for the device.

    Args:
        name: aten's name of the operation.
        args: What it takes.
        places: Knows where it runs.

    Raises:
        OutOfRange: If there are any.
    """
    if name in {"nll_loss_forward", "nll_loss2d_forward"}:
        logits, target, ignored = args[0], args[1], args[4]
        count = logits.shape[1 if logits.dim() > 1 else 0]
        bad = (target != ignored) & ((target < 0) | (target >= count))
        label, what = True, f"classes are 0 to {count - 1}, and {ignored} is left out"
        places_of, word = target, "cross_entropy"
    elif name in _TABLES:
        count, places_of = args[0].shape[0], args[1]
        bad = (places_of < 0) | (places_of >= count)
        label, what = False, f"the table has rows 0 to {count - 1}"
        word = _TABLES[name]
    elif name in {"gather", "index_select"} and args[0].dim():
        count, places_of = args[0].shape[args[1]], args[2]
        bad = (places_of < 0) | (places_of >= count)
        # A loss that is written by hand looks up the label's place so.
        label, what = places.current().is_loss, f"there are 0 to {count - 1}"
        word = name
    elif name == "binary_cross_entropy":
        targets = args[1]
        good = (targets >= 0) & (targets <= 1)
        if bool(good.all()):
            return
        says = f"{int((~good).sum())} of {good.numel()} targets are not inside 0 to 1"
        raise OutOfRange(places.current(), name, label=True, says=says)
    else:
        return
    if bool(bad.any()):
        says = f"index {_first(places_of, bad)} at {int(bad.sum())} of {bad.numel()}"
        says = f"{says} places, yet {what}"
        raise OutOfRange(places.current(), word, label=label, says=says)


def _first(values: Tensor, bad: Tensor) -> int:
    return int(values[bad].flatten()[0])
