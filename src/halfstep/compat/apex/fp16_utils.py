"""Implements apex's older tools: fp16 models and master weights handled by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from halfstep.compat.apex.fp16_optimizer import (
    DynamicLossScaler,
    FP16_Optimizer,
    LossScaler,
)
from halfstep.compat.apex.models import convert_module, convert_network
from halfstep.compat.apex.state import AmpError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """A module that casts its input to fp16."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- apex's name
        """Cast the input."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # noqa: N802 -- apex's name
    """Convert the batch norms of a model to fp32."""
    for part in module.modules():
        if isinstance(part, _BatchNorm):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return an fp16 model that accepts fp32 inputs; its batch norms stay fp32."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


class FP16Model(nn.Module):
    """An fp16 model with fp32 batch norms that casts its inputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """Cast the inputs and call the model."""
        return self.network(*(value.half() for value in inputs))


@torch.no_grad()
def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return a model's trainable parameters, and fp32 master weights for them.

    `flat_master`: one flat master tensor; the parameters must have one dtype.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        copies = [param.detach().to(torch.float32, copy=True) for param in params]
        return params, [copy.requires_grad_() for copy in copies]
    dtypes = {param.dtype for param in params}
    if len(dtypes) != 1:
        raise AmpError(
            f"flat_master=True needs parameters of one dtype, not {dtypes}: use "
            "flat_master=False, or FP16_Optimizer."
        )
    flat = nn.Parameter(torch.cat([p.reshape(-1) for p in params]).float())
    flat.grad = torch.zeros_like(flat)
    return params, [flat]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor],
    master_params: Sequence[Tensor],
    flat_master: bool = False,
) -> None:
    """Copy gradients to the master weights; both lists are of `prep_param_lists`."""
    if flat_master:
        grads = (
            torch.zeros_like(p) if p.grad is None else p.grad for p in model_params
        )
        total = master_params[0]
        total.grad = torch.cat([grad.reshape(-1) for grad in grads]).to(total.dtype)
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(param.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor],
    master_params: Sequence[Tensor],
    flat_master: bool = False,
) -> None:
    """Copy the master weights, rounded, to the model's parameters."""
    values = list(master_params)
    if flat_master:
        sizes = [param.numel() for param in model_params]
        parts = torch.split(master_params[0], sizes)
        values = [v.view_as(p) for v, p in zip(parts, model_params, strict=True)]
    for param, value in zip(model_params, values, strict=True):
        param.copy_(value)


def to_python_float(t: Any) -> float:
    """Return the value of a tensor or sequence with one element."""
    return float(t.item() if hasattr(t, "item") else t[0])
