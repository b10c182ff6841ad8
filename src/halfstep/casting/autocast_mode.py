"""Eager autocast: torch's regions, made right, steerable and able to say what they did.

In: a device and a dtype, perhaps a policy. Out: a context manager and decorator under
which each operation runs as the policy says.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.amp.autocast_mode import autocast as torch_autocast

from halfstep._torch.dynamo import dynamo_disable
from halfstep._torch.patches import SharedPatches
from halfstep.casting import (
    active_context,
    compile_guard,
    data_parallel,
    dispatch_table,
    dtype_mismatch,
    module_rules,
    recompute,
    torch_cache,
)
from halfstep.casting.compile_region import traceable_autocast
from halfstep.casting.entered_contexts import PerThreadStack
from halfstep.casting.policy_autocast import PolicyAutocast
from halfstep.errors import UserError
from halfstep.policy.rules import TORCH, Policy

if TYPE_CHECKING:
    from types import TracebackType

    from halfstep.casting.weight_cache import CastCache
    from halfstep.reporting.table import Table


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | None = None,
    model: torch.nn.Module | None = None,
    cache: CastCache | None = None,
    record: bool = False,
) -> Autocast | PolicyAutocast:
    """Open a region in which operations run in the format that a policy gives them.

    Why: it is `torch.autocast` with its defects mended. It may be entered again while
    it is entered, by itself or by another thread; a nested region may have another
    dtype; a weight changed inside, by an optimizer or in a `no_grad` block, is cast
    anew after it; replicas of `nn.DataParallel` get the dtype. And it obeys rules, and
    tells what ran how.

    It sets torch's own state, so everything that asks torch whether autocast is on
    (checkpointing, DDP, model code, third-party kernels) gets the true answer.

    Args:
        device_type: "cpu", "cuda", "mps", "xpu", or another that torch casts on.
        dtype: The 16-bit dtype; default that of the region around, else torch's for
            the device.
        enabled: False makes the region run as called.
        cache_enabled: Whether weights cast once stay cast for the region; default
            as it is set now.
        policy: "torch", "lean", with rules ("lean + op:softmax=fp32"), the path of a
            TOML file, or a `Policy`. None: that of the region around, else torch's.
        model: The model whose modules the policy's rules on modules and types mean.
        cache: Serves every weight that is cast, for as long as its owner likes. None:
            torch's cache, and one of the region's own for operations that the policy
            takes from torch.
        record: Observe each operation for `report()`; slow.

    Returns:
        A context manager, also a decorator, which may be used any number of times.
        One with a policy that torch.compile is to trace must be made where it is
        opened, or decorate.

    Raises:
        UserError: If a rule can match nothing, or speaks of modules without `model`.
    """
    if torch.compiler.is_compiling():
        settings = (device_type, dtype, enabled, cache_enabled)
        modules = model is not None
        return traceable_autocast(settings, policy, record=record, modules=modules)  # type: ignore[return-value]
    context = Autocast(device_type, dtype, enabled, cache_enabled)
    chosen = Policy.parse(policy) if isinstance(policy, str) else policy
    if chosen in (None, TORCH) and cache is None and not record:
        context.policy = chosen
        return context
    dispatch_table.check_policy(chosen or TORCH, device_type, model)
    if chosen is not None and model is not None:
        module_rules.attach(model, chosen)
    return PolicyAutocast(
        context, chosen, cache, cache_weights=cache is not None, record=record
    )


_patches = SharedPatches(*torch_cache.PATCHES, *data_parallel.PATCHES)


class _Entry(NamedTuple):
    """One entry of a region, and what it has to restore."""

    context: torch_autocast
    pushed: tuple[int, active_context.Pushed] | None
    entered: torch_cache.EnteredContext | None


class Autocast(torch_autocast):
    """A region under torch's own table; `autocast` makes it."""

    policy: Policy | None = None
    """TORCH: whatever the region around says. None: as that says, if there is one."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None,
        enabled: bool,
        cache_enabled: bool | None,
    ) -> None:
        super().__init__(device_type, dtype, enabled, cache_enabled)
        self._settings = dict(vars(self))
        self._entries: PerThreadStack[_Entry] = PerThreadStack()

    @dynamo_disable
    def __enter__(self) -> Self:
        """Open a region."""
        active_context.run_pending()
        # A region of torch's for each entry: it keeps on itself what it will restore.
        context = object.__new__(torch_autocast)
        vars(context).update(self._settings)
        context.__enter__()  # type: ignore[no-untyped-call]
        _patches.acquire()
        entered = pushed = None
        if self._enabled:
            entered = torch_cache.on_enter(self.device, self.fast_dtype)
        if self.policy is not None and active_context.active(self.device) is not None:
            pushed = (
                compile_guard.set_policy_guard(TORCH),
                recompute.push(self.device, None),
            )
        self._entries.push(_Entry(context, pushed, entered))
        return self

    @dynamo_disable
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:  # noqa: ANN401 -- torch's signature
        """Close the region opened last, and restore what was before it.

        Raises:
            DtypeMismatch: In place of torch's error, with the operation and the rule
                that mends it.
        """
        context, pushed, entered = self._entries.pop()
        if pushed is not None:
            guard, context_entry = pushed
            recompute.pop(
                context_entry, partial(compile_guard.restore_policy_guard, guard)
            )
        if entered is not None:
            torch_cache.on_exit(entered)
        _patches.release()
        context.__exit__(exc_type, exc_value, traceback)
        if exc_value is not None:
            mismatch = dtype_mismatch.explain(exc_value)
            if mismatch is not None:
                raise mismatch from exc_value
            dtype_mismatch.add_cure(exc_value)
        return False

    def report(self) -> Table:
        """Refuse, because nothing was recorded.

        Raises:
            UserError: Always.
        """
        message = (
            "this region recorded nothing, since recording is slow: open it as "
            "autocast(..., record=True) to have a report."
        )
        raise UserError(message)
