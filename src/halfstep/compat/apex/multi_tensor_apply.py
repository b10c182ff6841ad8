"""apex's `multi_tensor_apply`: one call for an operation over lists of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls functions of `amp_C`.

    Args:
        chunk_size: Handed to them; those of halfstep do not use it.
    """

    available = True
    """Programs ask it before they import `amp_C`."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Return: there is nothing that could be missing."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Call an operation on lists of tensors.

        Args:
            op: A function of `amp_C`.
            noop_flag_buffer: Becomes 1 if a number is not finite.
            tensor_lists: The operation's lists.
            args: What else it takes.
        """
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
