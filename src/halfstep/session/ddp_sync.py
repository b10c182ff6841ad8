"""Averages gradients and broadcasts master weights over data-parallel processes.

In: a model, wrapped in DDP or not, and its masters. Out: the same masters on every
rank, and gradients that are averaged once a step, in 16 bits where weights are.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.distributed import bucketed_all_reduce, ddp
from halfstep.errors import UserError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from halfstep.masters import MasterWeights


class GradientSync:
    """Decides for each micro-batch whether DDP or the session averages gradients."""

    def __init__(
        self, masters: MasterWeights, low: torch.dtype, accumulate: int
    ) -> None:
        self._masters = masters
        self._low_dtype = low
        self._accumulate = accumulate
        self._skips_ddp_sync = self._pending = False
        self._ddp: DistributedDataParallel | None = None
        self._is_new_ddp = False
        self._ddp_params: dict[Tensor, bool] = {}
        self._averager = bucketed_all_reduce.BucketedAllReduce()

    def forward_context(
        self, model: nn.Module, num_done: int, *, per_pass: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context for the forward pass of a micro-batch.

        Gradients that are checked after each micro-batch (`per_pass`) are averaged
        each time, by DDP. Those that leave the model for their masters are averaged
        once, by the session; others by DDP, in the last micro-batch. A communication
        hook is called each time: it may do something else than take a mean.

        Raises:
            UserError: If ranks may run out of data while there are masters.
        """
        wrapper = self._bind_ddp(model)
        self._skips_ddp_sync = False
        if wrapper is None:
            return contextlib.nullcontext()
        leaves, hooked = bool(self._masters.master_params), bool(wrapper._comm_hooks)  # noqa: SLF001
        if leaves and wrapper._join_config.enable:  # noqa: SLF001 -- tells nobody else
            message = (
                "DDP's join() beside master weights: a rank that runs out of data "
                "would miss updates of its masters. Give all ranks as many batches, as "
                "DistributedSampler does, or use level='O1'."
            )
            raise UserError(message)
        last = num_done + 1 == self._accumulate
        is_ours = leaves and self._accumulate > 1
        # A static graph is learnt in a pass that DDP averages. The mean of that and of
        # what each rank keeps to itself after it is still the mean.
        by_ddp = (
            per_pass
            or (leaves and hooked)
            or (self._is_new_ddp and wrapper.static_graph)
        )
        self._skips_ddp_sync = not by_ddp and (is_ours or not last)
        if not self._skips_ddp_sync:
            return contextlib.nullcontext()
        if is_ours and num_done == 0:
            # DDP gives out the first rank's buffers after a pass that it averaged,
            # and it averages none here.
            wrapper.require_forward_param_sync = True
        return wrapper.no_sync()

    def _bind_ddp(self, model: nn.Module) -> DistributedDataParallel | None:
        """Return the DDP in a model; if it is new, make all masters the first rank's.

        Why: wrapping gave every rank the weights of the first, but in 16 bits.
        """
        wrapper = ddp.find_ddp(model)
        if wrapper is None or wrapper is self._ddp:
            return wrapper
        self._masters.broadcast_(
            partial(bucketed_all_reduce.broadcast_, wrapper.process_group)
        )
        self._ddp, self._is_new_ddp = wrapper, True
        self._ddp_params = _averaged_by(wrapper)
        return wrapper

    def after_backward(self, *, per_pass: bool) -> None:
        """Take note that a backward pass has run."""
        self._pending = self._skips_ddp_sync and not per_pass
        self._is_new_ddp = False

    @property
    def is_pending(self) -> bool:
        """Gradients of the last backward pass are still each rank's own."""
        return self._pending

    def discard(self) -> None:
        """Forget what was left to average: its gradients are gone."""
        self._pending = False

    def reduce_now(self, model: nn.Module) -> None:
        """Average what has been kept to each rank, for it is checked now."""
        if self._skips_ddp_sync or self._pending:
            self._average(model)

    def finish_step(self, model: nn.Module) -> None:
        """Average what is left to do at the end of a step."""
        self._bind_ddp(model)  # a level without autocast opens no context
        if self._pending:
            self._average(model)

    def _average(self, model: nn.Module) -> None:
        self._pending = False
        wrapper = self._bind_ddp(model)
        if wrapper is None:
            return
        group, masters = wrapper.process_group, self._masters
        comm_dtypes: dict[Tensor, torch.dtype] = {}
        for param_group in masters.optimizer.param_groups:
            for param in param_group["params"]:
                is_sparse = self._ddp_params.get(masters.model_param(param))
                if is_sparse:
                    _average_sparse(param, group)
                elif is_sparse is not None:
                    is_low = param in masters.master_params
                    comm_dtypes[param] = self._low_dtype if is_low else param.dtype
        headroom = 1
        if self._low_dtype == torch.float16:
            # What each micro-batch could hold, their sum must not overflow.
            headroom = 1 << (self._accumulate - 1).bit_length()
        self._averager.mean_(comm_dtypes, group, predivide_factor=headroom)


def _averaged_by(wrapper: DistributedDataParallel) -> dict[Tensor, bool]:
    """Return the parameters that DDP averages; True if their gradients are sparse."""
    sparse = {
        module.weight
        for module in wrapper.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return {
        param: param in sparse
        for name, param in wrapper.module.named_parameters()
        if param.requires_grad and name not in wrapper.parameters_to_ignore
    }


@torch.no_grad()
def _average_sparse(param: Tensor, group: dist.ProcessGroup) -> None:
    """Average a gradient of which each rank holds some rows."""
    grad = param.grad
    if grad is None:
        grad = torch.zeros(
            param.shape,
            dtype=param.dtype,
            device=param.device,
            layout=torch.sparse_coo,
        )
    grad = (grad / group.size()).coalesce()
    dist.all_reduce(grad, group=group)
    param.grad = grad if grad._nnz() else None  # noqa: SLF001
