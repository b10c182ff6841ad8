"""Steps any optimizer over compact master weights, a few parameters at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halfstep._torch import optimizer_hooks
from halfstep._torch.optimizer_params import params_of
from halfstep.numerics.local_tensor import is_quantized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from halfstep.masters.encoding import MasterEncoding, MasterParam, RoundingRng

MAX_PIECE_NUMEL = 1 << 22
"""Elements decoded at once: 16 MiB of fp32."""


def nan_placeholder(like: Tensor) -> Tensor:
    """Return fp32 NaN in the shape of `like`, with the memory of one element."""
    nan = torch.full((), torch.nan, dtype=torch.float32, device=like.device)
    return nan.expand(like.shape)


@torch.no_grad()
def step(
    optimizer: Optimizer,
    master_params: Iterable[MasterParam],
    encoding: MasterEncoding,
    rng: RoundingRng,
    only: Tensor | None = None,
) -> None:
    """Step an optimizer over compact master weights and write the weights.

    torch's own optimizers keep their state per parameter, so they are stepped for a few
    parameters at a time. Others, and those with step hooks, may count each call as a
    step; they are stepped once, with all parameters decoded.

    Gradients are in the masters' `.grad`. `only` is the one parameter to step, or None.
    """
    param_of: dict[Tensor, MasterParam] = {p.master: p for p in master_params}
    groups = optimizer.param_groups
    if not optimizer_hooks.runs_only_torch_code(optimizer):
        # Others' optimizers may also change parameters without a gradient.
        present = [param_of[p] for p in params_of(optimizer) if p in param_of]
        due = [p for p in present if p.master.requires_grad or _has_gradient(p)]
        _step_piece(optimizer, due, encoding, rng)
        return
    due_lists = [
        [p for p in group["params"] if only is None or p is only] for group in groups
    ]
    try:
        for piece in _pieces(due_lists, param_of, MAX_PIECE_NUMEL):
            # Copies, so that Ctrl-C finds the groups whole. torch writes to none.
            optimizer.param_groups = [
                group | {"params": params}
                for group, params in zip(groups, piece, strict=True)
                if params
            ]
            present = [param_of[p] for p in params_of(optimizer) if p in param_of]
            due = [*filter(_has_gradient, present)]
            _step_piece(optimizer, due, encoding, rng)
        optimizer.param_groups = groups
    except BaseException:
        optimizer.param_groups = groups
        raise


def _has_gradient(param: MasterParam) -> bool:
    return param.master.grad is not None


def _pieces(
    param_lists: Sequence[list[Tensor]],
    param_of: dict[Tensor, MasterParam],
    limit: int,
) -> Iterator[list[list[Tensor]]]:
    """Yield parameter lists, one per group, of at most `limit` elements in total."""
    piece: list[list[Tensor]] = [[] for _ in param_lists]
    size = 0
    for index, params in enumerate(param_lists):
        for param in params:
            own = param.numel() if param in param_of else 0
            if size and size + own > limit:
                yield piece
                piece, size = [[] for _ in param_lists], 0
            piece[index].append(param)
            size += own
    if any(piece):
        yield piece


def _step_piece(
    optimizer: Optimizer,
    master_params: list[MasterParam],
    encoding: MasterEncoding,
    rng: RoundingRng,
) -> None:
    """Decode master weights, step the optimizer, and encode them again.

    If the step raises, values that it has not changed keep their bits.
    """
    with_grad = {id(p) for p in master_params if _has_gradient(p)}
    for param in master_params:
        fp32 = param.decoded(encoding)
        param.master.data = fp32
        for state, key, moment in _moments(optimizer, param.master, fp32.shape):
            state[key] = moment.float()
    updated: set[int] = set()
    values: list[Tensor] = []

    def encode() -> None:
        # Not the tensors from above: optimizers may assign others to `.data`.
        values[:] = values or [p.master.detach().float() for p in master_params]
        for param, fp32 in zip(master_params, values, strict=True):
            is_updated = id(param) in updated
            if is_updated or not _same_bits(fp32, param.decoded(encoding)):
                param.encode_(encoding, fp32, rng)
            param.master.data = nan_placeholder(param.weight)
            narrow_states(optimizer, param, encoding, rng)

    try:
        optimizer.step()
        updated = with_grad
        encode()
    except BaseException:
        encode()  # all of it again, with the same random numbers, if it was interrupted
        raise


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _moments(
    optimizer: Optimizer, param: Tensor, shape: torch.Size
) -> Iterable[tuple[dict[str, Any], str, Tensor]]:
    """Yield (state, key, tensor) of state tensors shaped like the parameter.

    Tensors that the optimizer itself quantizes are left out.
    """
    state: dict[str, Any] = optimizer.state.get(param, {})
    for key, value in list(state.items()):
        fits = torch.is_tensor(value) and value.shape == shape
        fits = fits and not is_quantized(value)
        if fits and key != "step" and value.is_floating_point():
            yield state, key, value


def narrow_states(
    optimizer: Optimizer,
    master_param: MasterParam,
    encoding: MasterEncoding,
    rng: RoundingRng | None,
) -> None:
    """Convert an optimizer's moments for a weight to the encoding's `state_dtype`.

    Rounding to bf16 is stochastic, because Adam's second moment shrinks by a thousandth
    per step, which rounding to nearest would undo each time. Without `rng`, for a
    single conversion, it is to nearest.
    """
    moments = _moments(optimizer, master_param.master, master_param.weight.shape)
    for number, (state, key, moment) in enumerate(moments, start=1):
        if moment.dtype == encoding.state_dtype:
            continue
        if encoding.state_dtype == torch.bfloat16 and not moment.dim():
            # For a scalar parameter, step counters (NAdam, ASGD) look like moments.
            continue
        if rng is None or encoding.state_dtype != torch.bfloat16:
            state[key] = moment.to(encoding.state_dtype)
        else:
            low = torch.empty_like(moment, dtype=encoding.state_dtype)
            rng.round_(master_param.param_index, number, moment, low)
            state[key] = low


def narrow_all(optimizer: Optimizer, params: Iterable[Tensor]) -> None:
    """Convert the optimizer's moments to the dtypes of their parameters."""
    for param in params:
        for state, key, moment in _moments(optimizer, param, param.shape):
            state[key] = moment.to(param.dtype)
