"""Collects the facts for environment.json: the machine, and formats of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep.machine import hardware
from halfstep.numerics import formats

if TYPE_CHECKING:
    from torch import nn


def machine_data(device: str) -> dict[str, Any]:
    """Return the machine's capabilities, as `MachineFacts.from_data` reads them.

    Args:
        device: "cpu" or "cuda". Its GEMM rates are measured if no cache has them.
    """
    capabilities = hardware.capabilities()
    on_gpu = device == "cuda" and bool(capabilities.gpus)
    matmul = torch.backends.cuda.matmul
    return {
        "chip": capabilities.gpus[0].name if on_gpu else capabilities.cpu,
        "instruction_sets": list(capabilities.instruction_sets),
        "cores": capabilities.cores,
        "threads": capabilities.threads,
        "torch": capabilities.torch,
        "rates": hardware.gemm_rates(device),
        "fp16_accumulation": bool(getattr(matmul, "allow_fp16_accumulation", False)),
    }


def weight_formats(model: nn.Module) -> dict[str, str]:
    """Return the format of each trained parameter: name -> such as "bf16".

    Frozen parameters are left out: they lose no updates.
    """
    return {
        name: formats.word(param.dtype)
        for name, param in model.named_parameters()
        if param.is_floating_point() and param.requires_grad
    }
