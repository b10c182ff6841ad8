"""Names of apex's `parallel`: torch's own classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Return a model whose batch norms share statistics over the ranks of a group.

    `channel_last` is not used: torch reads the memory format itself.
    """
    del channel_last
    converted: nn.Module = SyncBatchNorm.convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
    return converted
