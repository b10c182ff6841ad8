"""Implements apex's `parallel`: torch's classes with apex's arguments, and LARC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import SyncBatchNorm as _TorchSyncBatchNorm
from torch.nn.parallel import DistributedDataParallel as _TorchDDP

from halfstep.compat.apex.state import AmpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["LARC", "DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"]

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
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
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
                raise AmpError(
                    f"{name}={value!r} has no counterpart in torch's "
                    f"DistributedDataParallel, which does {name}={default!r}: leave it "
                    "out, or set a communication hook."
                )
        sizes = [param.element_size() for param in module.parameters()] or [0]
        bucket = message_size * sum(sizes) / len(sizes) / _MEGABYTE
        super().__init__(
            module, bucket_cap_mb=max(bucket, 1), find_unused_parameters=delay_allreduce
        )


class SyncBatchNorm(_TorchSyncBatchNorm):
    """torch's batch norm over all ranks; raises `AmpError` with `fuse_relu`.

    `channel_last` is not used.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        del channel_last
        if fuse_relu:
            raise AmpError(
                f"SyncBatchNorm: fuse_relu={fuse_relu!r} has no counterpart in "
                "torch's, which applies no ReLU: leave it out, and put nn.ReLU() "
                "behind the layer."
            )
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, process_group
        )


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
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


class LARC:
    """Layer-wise adaptive rate control over any optimizer.

    Formula, for each parameter w with gradient g, weight decay d, learning rate lr:

        trust = trust_coefficient * |w| / (|g| + d * |w| + eps)
        factor = min(trust / lr, 1) if clip else trust
        g' = factor * (g + d * w)

    The wrapped optimizer then steps with g' and no weight decay of its own. A parameter
    whose weights or gradients are all zero keeps its gradient, without decay.

    Args:
        optimizer: Any optimizer; its groups may have a `weight_decay`.
        trust_coefficient: Size of a step relative to the norm of the parameter.
        clip: Limit the rate to the optimizer's learning rate; False: multiply both.
        eps: Avoids division by zero.

    References:
        You et al., "Large Batch Training of Convolutional Networks", 2017.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the optimizer, such as `state_dict`."""
        if name == "optim":  # not set yet while an instance is copied or unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        """Return the repr of the optimizer."""
        return repr(self.optim)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, then call the optimizer's step, and return its result.

        A closure is called once, before the gradients are scaled; its result is then
        returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.optim.param_groups
        decays = [group.get("weight_decay") for group in groups]
        for group in groups:
            self._scale(group)
        try:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = 0.0
            result = self.optim.step()
        finally:
            for group, decay in zip(groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    @torch.no_grad()
    def _scale(self, group: dict[str, Any]) -> None:
        """Multiply the gradients of a group, without device synchronization."""
        decay = group.get("weight_decay") or 0.0
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            weight_norm, grad_norm = _norm(param), _norm(grad)
            trust = self.trust_coefficient * weight_norm
            trust = trust / (grad_norm + decay * weight_norm + self.eps)
            factor = (trust / group["lr"]).clamp(max=1.0) if self.clip else trust
            moves = (weight_norm != 0) & (grad_norm != 0)
            factor = torch.where(moves, factor, 1.0)
            if decay:
                grad.add_(param * torch.where(moves, decay, 0.0))
            grad.mul_(factor)


def _norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm in fp32, since sums of squares overflow in fp16."""
    wide = None if tensor.dtype is torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return norm
