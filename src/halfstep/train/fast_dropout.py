"""Dropout on the CPU: masks several times as quick where torch draws on one thread.

Why: torch draws a mask on one thread, one call of its generator an element: 5.2 ms a
million on the machine measured, 22 to 40 % of a step of the small models. For
processors that it recognises as Intel's it has a parallel path; there the gain is not
measured. (The machine measured is Intel's, in a sandbox, and did not take that path.)
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.library import Library
from torch.nn import functional

STEPS = 1 << 16
"""Keep probabilities are multiples of one over this: 0.9 becomes 58982 / 65536."""

_SEEDS = 2**63 - 1
_MATH = "_scaled_dot_product_attention_math"
_RANK = 4  # texts, heads, positions, numbers of each


def use_fast_dropout(model: nn.Module) -> None:
    """Let a model's dropouts draw cheap masks while it trains on the CPU.

    Elements are kept independently, with a probability rounded to a multiple of
    1/65536, and scaled by exactly its inverse. The masks follow from
    `torch.manual_seed`, and recomputation draws them again; they are not torch's.

    Changed are `nn.Dropout` modules (their class becomes `FastDropout`), and modules
    whose class is called an attention, in which torch's own function drops likewise;
    neither parameters nor buffers nor the config. Calls of `nn.functional.dropout` in
    a model's own code stay torch's. So does everything in evaluation, under
    torch.compile, in `torch.func`, on other devices and for subclasses of Tensor.
    """
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = FastDropout
        elif "Attention" in type(module).__name__:
            # They run again where activations are computed again.
            module.register_forward_pre_hook(_enter_attention)
            module.register_forward_hook(_leave_attention, always_call=True)


class FastDropout(nn.Dropout):
    """`nn.Dropout` with `dropout` in place of torch's."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Drop elements while training."""
        if not self.training:
            return input
        return dropout(input, self.p, inplace=self.inplace)


def dropout(x: Tensor, p: float, *, inplace: bool = False) -> Tensor:
    """Return `x` with elements dropped independently, the others scaled up.

    Torch's own function takes what are not plain tensors of real numbers on the CPU,
    probabilities that are 0 or 1 in 16 bits, and all while torch.compile traces.
    """
    dropped = round(p * STEPS)
    if not 0 < dropped < STEPS or not _is_supported(x):
        return functional.dropout(x, p, training=True, inplace=inplace)
    mask = _mask(x.shape, dropped)
    # Two products: the scale has no value in 16 bits, torch's own is off by 0.2%.
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
    """Return ones and zeros, a byte each: zeros with probability `dropped` / `STEPS`.

    torch's generator gives the seed, so that what saves and restores its state saves
    and restores the masks. numpy promises that a seed's bits never change.
    """
    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    count = shape.numel()
    words = np.random.SFC64(seed).random_raw(-(-count // 4))
    bits = words.view(np.uint16)[:count]
    # Bytes, for torch is four times as slow to multiply bf16 by bool.
    return torch.from_numpy((bits >= dropped).view(np.uint8)).view(shape)


# Attention


class _Thread(threading.local):
    depth = 0  # of attention modules that were changed, each inside the next


_thread = _Thread()


def _enter_attention(module: nn.Module, args: object) -> None:
    del module, args
    _register_kernel()
    _thread.depth += 1


def _leave_attention(module: nn.Module, args: object, output: object) -> None:
    del module, args, output
    _thread.depth -= 1


@functools.cache
def _register_kernel() -> Library:
    """Stand before what torch's attention comes down to on the CPU with dropout.

    Why here: autocast, with whatever policy, has cast the operands by then.
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
    """Compute as torch does unless fast dropout is active in this thread."""
    dropped = round(dropout_p * STEPS)
    ours = (
        _thread.depth
        and 0 < dropped < STEPS
        and dropout_mask is None
        and not (is_causal or enable_gqa)
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
    output: tuple[Tensor, Tensor] = _AttentionWithDropout.apply(  # type: ignore[no-untyped-call]
        query, key, value, attn_mask, dropped, scale
    )
    return output


class _AttentionWithDropout(torch.autograd.Function):
    """Attention with dropout on its probabilities: the output, and what is not dropped.

    Formulas, with S of softmax, M the mask, L = S * M and c = 1 / (1 - p): the output
    is c L V. From its gradient G come those of V, c L^T G, and of the scores, c times
    softmax's own from H = G V^T * M, which is S * (H - sum(H * S)). Scores and softmax
    are in fp32; all else, as in torch's kernels, in the format of the operands.

    Shapes: B texts, A heads, T and U positions of query and key, D numbers of each.
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
        """Return both: (B, A, T, D) and (B, A, T, U)."""
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
            RuntimeError: If their own gradients will be asked for.
        """
        if torch.is_grad_enabled():
            message = (
                "attention with quick dropout has no gradient of a gradient; use "
                "--dropout 0, or the model without `use_fast_dropout`."
            )
            raise RuntimeError(message)
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
    """Return factor * one @ other, each number rounded once."""
    nothing = one.new_empty(())
    product = torch.baddbmm(
        nothing, one.flatten(0, 1), other.flatten(0, 1), beta=0, alpha=factor
    )
    return product.view(*one.shape[:2], *product.shape[1:])


def attention_probs(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return softmax(query @ key^T * scale + mask), in fp32 or wider.

    A row without any key that is not masked is zero, as in torch.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    # Scores of 16 bits would cost digits that torch's kernels keep. Contiguous, for
    # the product would else copy what the cast has just written.
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
    # Its softmax would be NaN, and so its gradient, whatever is multiplied by it.
    mask = mask.masked_fill(empty, 0).to(wide)
    probs = torch.softmax(torch.add(mask, scores, alpha=scale), -1)
    return probs.masked_fill(empty, 0)
