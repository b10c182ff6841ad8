"""Implements apex's `parallel`: torch's classes with apex's arguments, and LARC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import SyncBatchNorm as _TorchSyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as _TorchDDP

from halfstep.compat.apex.larc import LARC
from halfstep.compat.apex.state import AmpError

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "SyncBatchNorm",
    "convert_syncbn_model",
]

_MEGABYTE = 1024 * 1024


class DistributedDataParallel(_TorchDDP):
    """torch's wrapper with apex's arguments.

    `message_size` is the number of elements in a bucket. `delay_allreduce` is used as
    `find_unused_parameters`, the case for which apex needed it. Arguments about how
    apex sends are not used.

    Raises:
        AmpError: If an argument asks for another average than torch's.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,  # noqa: ANN401
        allreduce_trigger_params: Any = None,  # noqa: ANN401
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,  # noqa: ANN401
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        del allreduce_trigger_params, retain_allreduce_buffers
        del num_allreduce_streams, allreduce_communicators
        required = {
            "allreduce_always_fp32": (allreduce_always_fp32, False),
            "gradient_average": (gradient_average, True),
            "gradient_predivide_factor": (gradient_predivide_factor, 1.0),
            "gradient_average_split_factor": (gradient_average_split_factor, None),
            "shared_param": (shared_param, None),
            "prof": (prof, False),
        }
        for name, (value, default) in required.items():
            if value != default:
                message = (
                    f"{name}={value!r} has no counterpart in torch's "
                    f"DistributedDataParallel, which does {name}={default!r}: leave it "
                    "out, or set a communication hook."
                )
                raise AmpError(message)
        sizes = [param.element_size() for param in module.parameters()] or [0]
        bucket = message_size * sum(sizes) / len(sizes) / _MEGABYTE
        super().__init__(
            module,
            bucket_cap_mb=max(bucket, 1),
            find_unused_parameters=delay_allreduce,
        )


class SyncBatchNorm(_TorchSyncBatchNorm):
    """torch's batch norm over all ranks; `channel_last` is not used.

    Raises:
        AmpError: With `fuse_relu`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,  # noqa: ANN401
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        del channel_last
        if fuse_relu:
            message = (
                f"SyncBatchNorm: fuse_relu={fuse_relu!r} has no counterpart in "
                "torch's, which applies no ReLU: leave it out, and put nn.ReLU() "
                "behind the layer."
            )
            raise AmpError(message)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, process_group
        )


def convert_syncbn_model(
    module: nn.Module,
    process_group: Any = None,  # noqa: ANN401
    channel_last: bool = False,
) -> nn.Module:
    """Return a model whose batch norms share statistics over the ranks of a group.

    `channel_last` is not used: torch reads the memory format itself.
    """
    del channel_last
    converted: nn.Module = _TorchSyncBatchNorm.convert_sync_batchnorm(  # type: ignore[no-untyped-call]
        module, process_group
    )
    for part in converted.modules():
        if type(part) is _TorchSyncBatchNorm:
            # torch always makes its own class; halfstep's subclass adds no state.
            part.__class__ = SyncBatchNorm
    return converted
