"""Averages gradients and broadcasts master weights over data-parallel processes.

Gradients are averaged once per step, those of 16-bit weights in 16 bits.
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
        self.is_pending = False
        """Whether gradients of the last backward pass are not averaged yet."""
        self._skips_ddp_sync = False
        self._ddp: DistributedDataParallel | None = None
        self._is_new_ddp = False
        self._ddp_params: dict[Tensor, bool] = {}
        self._averager = bucketed_all_reduce.BucketedAllReduce()

    def forward_context(
        self, model: nn.Module, num_done: int
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context for the forward pass of a micro-batch.

        With master weights, gradients are averaged once, by the session; otherwise by
        DDP, in the last micro-batch. A communication hook is called each time: it may
        do something else than average.
        """
        wrapper = self._bind_ddp(model)
        self._skips_ddp_sync = False
        if wrapper is None:
            return contextlib.nullcontext()
        has_masters = bool(self._masters.master_params)
        if has_masters and wrapper._join_config.enable:  # noqa: SLF001 -- no public API
            raise UserError(
                "DDP's join() does not support master weights: a rank that runs out of "
                "data would miss updates. Give all ranks equally many batches, as "
                "DistributedSampler does, or use level='O1'."
            )
        last = num_done + 1 == self._accumulate
        by_session = has_masters and self._accumulate > 1
        # DDP records a static graph in a pass that it averages. Averaging again, with
        # later gradients that are still local to each rank, gives the same mean.
        by_ddp = (
            has_masters and bool(wrapper._comm_hooks)  # noqa: SLF001
        ) or (self._is_new_ddp and wrapper.static_graph)
        self._skips_ddp_sync = not by_ddp and (by_session or not last)
        if not self._skips_ddp_sync:
            return contextlib.nullcontext()
        if by_session and num_done == 0:
            # DDP broadcasts rank 0's buffers only after a pass that it averaged, and
            # here it averages none.
            wrapper.require_forward_param_sync = True
        return wrapper.no_sync()

    def _bind_ddp(self, model: nn.Module) -> DistributedDataParallel | None:
        """Return the DDP in a model; if it is new, broadcast rank 0's master weights.

        Why: DDP has broadcast only the 16-bit weights.
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

    def after_backward(self) -> None:
        """Record that a backward pass has run."""
        self.is_pending = self._skips_ddp_sync
        self._is_new_ddp = False

    def finish_step(self, model: nn.Module) -> None:
        """Average gradients that are still local, at the end of a step."""
        self._bind_ddp(model)  # a level without autocast opens no context
        if not self.is_pending:
            return
        self.is_pending = False
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
        self._averager.mean_(comm_dtypes, group, num_summed=self._accumulate)


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
    """Average a sparse gradient; ranks may have different rows."""
    grad = param.grad
    if grad is None:
        grad = torch.zeros_like(param, layout=torch.sparse_coo)
    grad = (grad / group.size()).coalesce()
    dist.all_reduce(grad, group=group)
    param.grad = grad if grad._nnz() else None  # noqa: SLF001
