"""Faster dropout on the CPU, where torch draws masks on one thread.

torch makes one generator call per element on one thread: 5.2 ms per million on the
machine measured, which is 22 to 40 % of a step of the small models. It has a parallel
path for CPUs that it recognizes as Intel's (the machine measured was Intel's, in a
sandbox, and did not take that path); the gain over that path was not measured.
"""

from __future__ import annotations

import functools
import threading
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.library import Library
from torch.nn import functional

from halfstep.errors import UserError

STEPS = 1 << 16
"""Keep probabilities are rounded to multiples of 1 / STEPS: 0.9 to 58982 / 65536."""

_SEEDS = 2**63 - 1
_MATH = "_scaled_dot_product_attention_math"
_RANK = 4  # texts, heads, positions, numbers per head


def use_fast_dropout(model: nn.Module) -> None:
    """Replace a model's dropout by a faster one with the same distribution, on the CPU.

    Elements are kept independently, with a probability rounded to a multiple of
    1/65536, and scaled by exactly its inverse. The masks depend on
    `torch.manual_seed`, and activation checkpointing redraws the same ones; they are
    not the masks that torch draws, so a run is not the same to the bit as without.

    Changes `nn.Dropout` modules (their class becomes `FastDropout`), and
    `scaled_dot_product_attention` with dropout in modules with "Attention" in their
    class name, which becomes one autograd node without a double backward. Parameters,
    buffers and config stay. Calls of `nn.functional.dropout` in a model's own code are
    not affected, nor are evaluation, torch.compile, `torch.func`, other devices,
    grouped-query attention and subclasses of Tensor.

    Args:
        model: Changed in place; a second call changes nothing.

    Raises:
        UserError: If numpy is not installed.

    Example:
        >>> import torch, halfstep as hs
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
        >>> hs.use_fast_dropout(model)
        >>> model[1]
        FastDropout(p=0.1, inplace=False)
    """
    if find_spec("numpy") is None:
        raise UserError(
            "hs.use_fast_dropout draws its random bits with numpy, which is not "
            "installed: pip install numpy."
        )
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = FastDropout
        elif (
            "Attention" in type(module).__name__
            and _enter_attention not in module._forward_pre_hooks.values()  # noqa: SLF001
        ):
            # Hooks, because they also run when activations are recomputed.
            module.register_forward_pre_hook(_enter_attention)
            module.register_forward_hook(_leave_attention, always_call=True)


class FastDropout(nn.Dropout):
    """`nn.Dropout` with the fast `dropout`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Apply dropout while training."""
        if not self.training:
            return input
        return dropout(input, self.p, inplace=self.inplace)


def dropout(x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """Return `x` with elements dropped independently, and the others scaled up.

    Falls back to torch for anything but plain real tensors on the CPU, for
    probabilities that round to 0 or 1, and while torch.compile traces.
    """
    dropped = round(p * STEPS)
    if not 0 < dropped < STEPS or not _is_supported(x):
        return functional.dropout(x, p, training=True, inplace=inplace)
    mask = _mask(x.shape, dropped)
    # Two multiplications, as a low dtype cannot hold the scale: torch's is off by 0.2%.
    masked = x.mul_(mask) if inplace else x.mul(mask)
    return masked.mul_(STEPS / (STEPS - dropped))


def _is_supported(x: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and type(x) in {Tensor, nn.Parameter}
        and x.is_cpu
        and x.is_floating_point()
        and x.layout is torch.strided
        and not torch._C._get_tracing_state()  # noqa: SLF001
        and not _functorch.is_functorch_wrapped_tensor(x)
    )


def _mask(shape: torch.Size, dropped: int) -> Tensor:
    """Draw a byte mask of ones and zeros; zero with probability `dropped` / `STEPS`.

    The seed comes from torch's generator, so saving and restoring its state reproduces
    the masks. numpy guarantees a stable bit stream per seed.
    """
    import numpy as np  # torch works without it

    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    count = shape.numel()
    words = np.random.SFC64(seed).random_raw(-(-count // 4))
    bits = words.view(np.uint16)[:count]
    # uint8, because torch multiplies bf16 by bool four times as slowly.
    return torch.from_numpy((bits >= dropped).view(np.uint8)).view(shape)


# Attention


class _Thread(threading.local):
    depth = 0  # nesting depth of the attention modules with hooks


_thread = _Thread()


def _enter_attention(module: nn.Module, args: object) -> None:
    del module, args
    if not torch.compiler.is_compiling():
        _register_kernel()
        _thread.depth += 1


def _leave_attention(module: nn.Module, args: object, output: object) -> None:
    del module, args, output
    if not torch.compiler.is_compiling():
        # Where an earlier pre-hook raised, this module was not entered.
        _thread.depth = max(0, _thread.depth - 1)


@functools.cache
def _register_kernel() -> Library:
    """Override the CPU kernel that torch's attention with dropout ends up in.

    At this level autocast, under any policy, has already cast the operands.
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(_MATH, _attention_kernel, "AutogradCPU")  # type: ignore[no-untyped-call]
    return library


def _attention_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run torch's kernel, or ours inside an attention module with hooks."""
    dropped = round(dropout_p * STEPS)
    ours = (
        _thread.depth
        and 0 < dropped < STEPS
        and dropout_mask is None
        and not enable_gqa
        and not (is_causal and attn_mask is not None)  # torch's error
        and query.dtype == key.dtype == value.dtype
        and (attn_mask is None or not attn_mask.requires_grad)
        and all(
            each.dim() == _RANK and _is_supported(each) for each in (query, key, value)
        )
    )
    if not ours:
        torchs: Any = torch.ops.aten._scaled_dot_product_attention_math.default  # noqa: SLF001
        result: tuple[Tensor, Tensor] = torchs.decompose(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            dropout_mask,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return result
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    output: tuple[Tensor, Tensor] = _AttentionWithDropout.apply(  # type: ignore[no-untyped-call]
        query, key, value, attn_mask, dropped, scale
    )
    return output


class _AttentionWithDropout(torch.autograd.Function):
    """Attention with dropout on its probabilities; also returns the dropped ones.

    With S the softmax, M the mask, L = S * M and c = 1 / (1 - p), the output is c L V.
    For its gradient G, the gradient of V is c L^T G; that of the scores is c times the
    softmax gradient of H = G V^T * M, which is S * (H - sum(H * S)). Scores and softmax
    are in fp32, all else in the dtype of the operands, as in torch's kernels.

    Shapes: B texts, A heads, T query and U key positions, D numbers per head.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropped: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the output (B, A, T, D) and dropped probabilities (B, A, T, U)."""
        probs = attention_probs(query, key, mask, scale).to(value.dtype)
        dropout_mask = _mask(probs.shape, dropped)
        dropped_probs = probs * dropout_mask
        ctx.save_for_backward(query, key, value, probs, dropped_probs, dropout_mask)
        ctx.scale, ctx.factor = scale, STEPS / (STEPS - dropped)
        ctx.mark_non_differentiable(dropped_probs)
        return _scaled_matmul(dropped_probs, value, ctx.factor), dropped_probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of query, key and value.

        Raises:
            RuntimeError: If double backward is requested.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attention after hs.use_fast_dropout has no double backward: set its "
                "dropout to 0, or leave the model without use_fast_dropout."
            )
        query, key, value, probs, dropped_probs, dropout_mask = ctx.saved_tensors
        grad_probs = (grad @ value.transpose(-1, -2)).mul_(dropout_mask)
        scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)  # noqa: SLF001
        factor = ctx.scale * ctx.factor
        return (
            _scaled_matmul(scores, key, factor),
            _scaled_matmul(scores.transpose(-1, -2), query, factor),
            _scaled_matmul(dropped_probs.transpose(-1, -2), grad, ctx.factor),
            None,
            None,
            None,
        )


def _scaled_matmul(one: Tensor, other: Tensor, factor: float) -> Tensor:
    """Return factor * one @ other, rounded once."""
    nothing = one.new_empty(())
    product = torch.baddbmm(
        nothing, one.flatten(0, 1), other.flatten(0, 1), beta=0, alpha=factor
    )
    return product.view(*one.shape[:2], *product.shape[1:])


def attention_probs(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return softmax(query @ key^T * scale + mask), in fp32 or wider.

    Fully masked rows are zero, as in torch.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    # 16-bit scores would be less precise than in torch's kernels. Contiguous, because
    # the matmul would otherwise copy what the cast has just written.
    query, key = (
        each.to(wide, memory_format=torch.contiguous_format) for each in (query, key)
    )
    scores = query @ key.transpose(-1, -2)
    if mask is None:
        return torch.softmax(scores.mul_(scale), -1)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -torch.inf)
    empty = mask.isneginf().all(-1, keepdim=True)
    if not empty.any():
        return torch.softmax(torch.add(mask.to(wide), scores, alpha=scale), -1)
    # A fully masked row would become NaN, and so would its gradient.
    mask = mask.masked_fill(empty, 0).to(wide)
    probs = torch.softmax(torch.add(mask, scores, alpha=scale), -1)
    return probs.masked_fill(empty, 0)
