"""Implements the casts of O1, which apply everywhere from `initialize` on.

An `AmpHandle` keeps autocast contexts open whose policy has apex's lists, patches
functions that no policy can match, and wraps functions that the user registers.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from halfstep.casting.autocast_mode import Autocast, PolicyAutocast, autocast
from halfstep.casting.weight_cache import CastCache
from halfstep.compat.apex.state import STATE, AmpError
from halfstep.numerics.formats import cast_floating, is_low, tensors_in
from halfstep.policy import decision
from halfstep.policy.op_tables import FP32, LOW, PROMOTE
from halfstep.policy.rules import Policy, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

P = ParamSpec("P")
R = TypeVar("R")
HALF = torch.float16

_HALF = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc
    linear prelu addmm addmv addr matmul mm mv addbmm baddbmm bmm lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell
"""
_HALF_LAYERS = {"cpu": "lstm gru rnn_tanh rnn_relu"}
"""Recurrent layers; on CUDA torch's own kernel casts the weights that cuDNN packs."""

_FP32_WORDS = """
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod
    cumsum dist norm prod std sum var renorm
"""
FP32_NAMES = tuple(_FP32_WORDS.split())
"""Functions of `torch`, most of them methods of tensors too."""

_FLOAT = (
    _FP32_WORDS
    + """
    linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
    softplus log_softmax softmax gelu layer_norm group_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss cross_entropy_loss hinge_embedding_loss
    kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
    multi_margin_loss nll_loss nll_loss2d nll_loss_nd binary_cross_entropy_with_logits
    smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss binary_cross_entropy
"""
)
_WIDEST = "addcdiv addcmul atan2 cross linalg_cross bilinear dot cat stack"
"""apex's list without arithmetic and comparisons, which torch promotes itself."""

PATCHED_FP32 = ("local_response_norm", "multilabel_soft_margin_loss")
"""Implemented in Python, by operations that are on no list."""


@functools.cache
def policy_for(device: str) -> Policy:
    """Return O1's policy on a device."""
    half = f"{_HALF} {_HALF_LAYERS.get(device, '')}"
    return Policy(
        (
            _rule(half, LOW, "apex's O1 runs it in fp16: products and convolutions"),
            _rule(_FLOAT, FP32, "apex's O1 runs it in fp32: range and sums"),
            _rule(_WIDEST, PROMOTE, "apex's O1 runs it in its widest operand's dtype"),
        )
    )


def _rule(names: str, category: str, reason: str) -> Rule:
    return Rule("op", f"/{'|'.join(names.split())}/", category, reason)


class AmpHandle:
    """Activates O1's casts in the thread that creates it, until `close`.

    The contexts stay open because apex patched torch's functions, so that a loss
    outside of the model was cast too. Of other threads, only replicas of
    `nn.DataParallel` are in them.
    """

    def __init__(self, devices: frozenset[str]) -> None:
        self.devices = sorted(devices)
        self.caches = {device: CastCache() for device in self.devices}
        """Weights that are cast once from one `scale_loss` to the next."""
        with contextlib.ExitStack() as stack:  # undone if a context cannot be opened
            self._exit_stack = stack
            self._patch()
            for registered in STATE.registered:
                self.wrap(*registered)
            for device, cache in self.caches.items():
                context = PolicyAutocast(
                    Autocast(device, HALF, enabled=True, cache_enabled=True),
                    policy_for(device),
                    cache,
                    cache_weights=True,
                    record=False,
                    matched_rules=set(),
                )
                stack.enter_context(context)
            self._exit_stack = stack.pop_all()

    def close(self) -> None:
        """Leave the contexts, and undo the patches."""
        self._exit_stack.close()
        self.devices = []

    def is_active(self) -> bool:
        """Return whether the casts are active in this thread."""
        return any(torch.is_autocast_enabled(device) for device in self.devices)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable the casts in a `with` block."""
        with contextlib.ExitStack() as contexts:
            for device in self.devices:
                if torch.is_autocast_enabled(device):
                    contexts.enter_context(autocast(device, enabled=False))
            yield

    def clear_cache(self) -> None:
        """Clear the cached casts of weights, which may have changed through `.data`."""
        for cache in self.caches.values():
            cache.clear()

    # Patches

    def _patch_attribute(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        """Set an attribute; `close` restores it."""
        inherited = name not in vars(owner)
        old = getattr(owner, name)
        setattr(owner, name, new)

        def restore() -> None:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

        self._exit_stack.callback(restore)

    def _patch(self) -> None:
        """Patch functions that are not dispatcher operations, or that apex rejects."""
        for name in PATCHED_FP32:
            self.wrap(functional, name, FP32)
        self._patch_attribute(Tensor, "cpu", self._fp32_cpu(Tensor.cpu))
        self._reject_low(
            functional,
            "binary_cross_entropy",
            "loses probabilities near 0 and 1: use binary_cross_entropy_with_logits, "
            "or amp.register_float_function(torch, 'sigmoid') before amp.initialize",
        )
        for owner in (Tensor, torch):
            for name in [*(f"{name}_" for name in FP32_NAMES), "__ipow__"]:
                if hasattr(owner, name):
                    advice = "computes in fp32: use the form that returns a new tensor"
                    self._reject_low(owner, name, advice)

    def _reject_low(self, owner: Any, name: str, advice: str) -> None:
        """Make a function raise if its first argument is 16-bit, as apex does."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            dtypes = _dtypes([*args, *kwargs.values()][:1])
            if any(map(is_low, dtypes)) and self.is_active():
                message = f"{name} got {dtypes[0]}, and {advice}."
                raise NotImplementedError(message)  # apex's class, too
            return function(*args, **kwargs)

        self._patch_attribute(owner, name, run)

    def _fp32_cpu(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            wide = self.is_active() and is_low(tensor.dtype)
            return function(tensor.float() if wide else tensor, *args, **kwargs)

        return cpu

    def wrap(self, owner: Any, name: str, category: str) -> None:
        """Cast the arguments of a function of a module or class until `close`."""
        function = getattr(owner, name)
        # Inside torch's own functions the policy would cast a second time.
        torchs = any(owner is each for each in (torch, functional, Tensor))
        leaf = torchs or not isinstance(function, types.FunctionType)
        self._patch_attribute(owner, name, _casting(function, category, leaf=leaf))


def clear_cache_if_evaluating(*_: object) -> None:
    """Clear cached casts before a forward pass without gradients (forward pre-hook).

    Averaged weights are often set by `weight.data`, which changes no version counter.
    """
    if STATE.handle is not None and not torch.is_grad_enabled():
        STATE.handle.clear_cache()


def _casting(
    function: Callable[P, R], category: str, *, leaf: bool = False
) -> Callable[P, R]:
    """Return a function whose arguments are cast under O1; `leaf`: and nothing else."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        handle = STATE.handle
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        dtype = decision.cast_to(category, _dtypes((args, kwargs)), HALF)
        cast: Any = (args, kwargs)
        cast = cast if dtype is None else cast_floating(cast, dtype)
        with handle.off() if leaf else contextlib.nullcontext():
            return function(*cast[0], **cast[1])

    return run


def _dtypes(value: object) -> list[torch.dtype]:
    """Return the dtypes of the floating tensors in a nested value."""
    return [each.dtype for each in tensors_in(value) if each.is_floating_point()]


def _register(module: Any, name: str, category: str) -> None:
    if not hasattr(module, name):
        owner = getattr(module, "__name__", repr(module))
        message = f"{owner} has no function {name!r} to register: check its spelling."
        raise AmpError(message)
    STATE.registered.append((module, name, category))
    if STATE.handle is not None and STATE.handle.is_active():
        STATE.handle.wrap(module, name, category)


def register_half_function(module: Any, function_name: str) -> None:
    """Cast the floating arguments of `module.function_name` to 16 bits under O1.

    Raises:
        AmpError: If there is no such function.
    """
    _register(module, function_name, LOW)


def register_float_function(module: Any, function_name: str) -> None:
    """Cast the floating arguments of `module.function_name` to fp32 under O1."""
    _register(module, function_name, FP32)


def register_promote_function(module: Any, function_name: str) -> None:
    """Cast the arguments of `module.function_name` to their widest dtype under O1."""
    _register(module, function_name, PROMOTE)


def half_function(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: under O1 its floating arguments are cast to 16 bits."""
    return _casting(function, LOW)


def float_function(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: under O1 its floating arguments are cast to fp32."""
    return _casting(function, FP32)


def promote_function(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: under O1 its arguments are cast to their widest dtype."""
    return _casting(function, PROMOTE)


def devices_of(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Return the device types on which to cast.

    Includes CUDA if available, since a model on a CPU may be moved later.
    """
    types = {tensor.device.type for tensor in tensors} or {"cpu"}
    return frozenset(types | ({"cuda"} if torch.cuda.is_available() else set()))
