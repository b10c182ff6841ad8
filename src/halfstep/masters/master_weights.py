"""Master weights: what the optimizer updates, while the model holds 16-bit copies.

In: an optimizer over 16-bit parameters. Out: the same optimizer over their fp32 truth,
with gradients folded up to it and updated weights published down.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep._torch import optimizer_hooks
from halfstep.masters import encoding as forms
from halfstep.masters import fused_step, generic_step
from halfstep.masters.encoding import Clock, Slot
from halfstep.masters.fused_step import Direct
from halfstep.masters.generic_step import absent
from halfstep.masters.grad_accumulation import clear_together, fold, fold_on_arrival
from halfstep.numerics.formats import is_low

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from halfstep.masters.fused_step import Kernel


class MasterWeights:
    """The fp32 truth behind the 16-bit parameters of any torch optimizer.

    Why: a 16-bit weight swallows a small update. At the usual ratio of update to
    weight, 1e-3, bf16 loses more than half of all updates to rounding.

    The optimizer's parameter groups then hold the masters, fp32 parameters of their
    own; learning-rate schedules, added groups and `state_dict` work as before. In a
    lean form a master has no memory of its own between steps: it reads as NaN, and
    `step` fills it in, some parameters at a time.

    Args:
        optimizer: Over 16-bit parameters, fp32 ones, or both; fp32 ones are left.
        originals: Parameter -> fp32 values to begin with, where they are known; they
            are taken out of it. Otherwise the master starts from the 16-bit weight.
        master: "fp32", "split", "kahan" or "stochastic": what is kept beside a weight.
        seed: Of random rounding. It must be the same on every rank, or replicas
            drift apart; so the default does not ask torch.

    Raises:
        UserError: If there is no such form, or it needs bf16 and weights are fp16.

    Example:
        >>> weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=2.0**-10)
        >>> masters = MasterWeights(optimizer)
        >>> for _ in range(4):
        ...     weight.sum().backward()
        ...     masters.step()
        ...     optimizer.zero_grad()
        >>> weight[0].item(), optimizer.param_groups[0]["params"][0][0].item()
        (0.99609375, 0.99609375)

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
    """

    keeps = True
    """16-bit parameters get masters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        originals: dict[nn.Parameter, Tensor] | None = None,
        *,
        master: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.form = forms.kept(master)
        self.clock = Clock(seed, 0)
        self.slots: dict[Tensor, Slot] = {}
        """Master -> all that belongs to it, in the order they were adopted."""
        self.numbers: dict[Tensor, int] = {}
        """Parameter of the optimizer -> its number, for random rounding."""
        self.kernel: Kernel | None = None
        """What updates weights straight from 16-bit gradients, where there is one."""
        self.how = ""
        """That kernel in words, or why there is none."""
        self._direct: Direct | None = None
        self.stepping = False
        """The optimizer steps because we say so."""
        self._versions: list[int] = []
        self._folds_in_backward = False
        self.adopt(originals)
        if self.keeps:
            clear_together(optimizer, self.clear)

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """(16-bit parameter, fp32 master), in the order they were adopted."""
        return [(slot.weight, slot.master) for slot in self.slots.values()]

    @torch.no_grad()
    def adopt(self, originals: dict[nn.Parameter, Tensor] | None = None) -> None:
        """Give masters to those 16-bit parameters of the optimizer that have none.

        Args:
            originals: As for the class; masters take these tensors out of it.
        """
        groups = self.optimizer.param_groups
        if all(param in self.numbers for group in groups for param in group["params"]):
            return
        self.refresh()
        for group in self.optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                held = param
                if is_low(param.dtype):
                    forms.check(self.form, param.dtype)
                    value = (originals or {}).pop(param, param.detach())
                    held = group["params"][index] = self._adopted(param, value.float())
                    del value  # lean forms need it no more, and the next is large too
                self.numbers.setdefault(held, len(self.numbers))
        held_by_model = [self.stored(param) for param in self.numbers]
        self.kernel, self.how = fused_step.choose(self.optimizer, held_by_model)
        self.written()

    def _adopted(self, param: nn.Parameter, truth: Tensor) -> nn.Parameter:
        number = len(self.numbers)
        if self.form.lean:
            kept = self.form.extra
            extra = None if kept is None else torch.empty_like(param, dtype=kept)
            master = nn.Parameter(absent(param), requires_grad=param.requires_grad)
        else:
            master = nn.Parameter(truth, requires_grad=param.requires_grad)
            extra = master
        slot = Slot(param, master, extra, number, param.dtype)
        if self.form.lean:
            slot.encode_(self.form, truth, self.clock)
        self.slots[master] = slot
        self.numbers[master] = number
        if param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
            generic_step.narrow_states(self.optimizer, slot, self.form, None)
        return master

    def stored(self, param: Tensor) -> Tensor:
        """Return the model's parameter behind one of the optimizer's."""
        slot = self.slots.get(param)
        return param if slot is None else slot.weight

    @torch.no_grad()
    def truth(self, param: Tensor) -> Tensor:
        """Return the numbers that updates of a parameter of the optimizer add up in.

        New memory in a lean form.
        """
        slot = self.slots.get(param)
        if slot is None or not self.form.lean:
            return param.detach()
        wide = torch.empty_like(slot.weight, dtype=torch.float32)
        slot.decode_(self.form, wide)
        return wide

    @torch.no_grad()
    def put(self, param: Tensor, truth: Tensor, weight: Tensor | None = None) -> None:
        """Set a parameter of the optimizer, and the weight it publishes.

        Args:
            param: With a master or without.
            truth: Its new value.
            weight: The 16-bit weight that went with it; default: rounded from it.
        """
        slot = self.slots.get(param)
        if slot is None:
            param.copy_(truth)
            return
        held = truth.to(param.device, param.dtype)
        slot.encode_(self.form, held, self.clock)
        if weight is not None:
            slot.weight.copy_(weight)
            if slot.extra is not None and slot.extra.dtype == torch.bfloat16:
                # Two pairs may have one sum; who resumes must find the same pair.
                slot.extra.copy_(held - slot.weight)
        self.written()

    def fold(self) -> None:
        """Add the gradients of the 16-bit parameters to their masters', and free them.

        Called after each backward pass, this accumulates micro-batches in fp32. The
        buffers are kept, so that no step maps fresh memory for them.
        """
        self.adopt()
        for slot in self.slots.values():
            fold(slot)

    def fold_in_backward(self, *, on: bool = True) -> None:
        """Fold each gradient from now on as soon as a backward pass has made it.

        Why: the 16-bit gradients of a whole model then never exist at once.

        Args:
            on: Not under DDP, which averages gradients after that.
        """
        self._folds_in_backward = on
        for slot in self.slots.values() if on else ():
            fold_on_arrival(slot, self._wants_at_once)

    def _wants_at_once(self) -> bool:
        return self._folds_in_backward

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter of the optimizer, its gradient), folded or not yet."""
        found = []
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param in params:
            slot = self.slots.get(param)
            if slot is not None and slot.master.grad is not None:
                fold(slot)  # what came later belongs to the same sum
            gradient = param.grad if slot is None else slot.weight.grad
            if gradient is None:
                gradient = param.grad
            if gradient is not None:
                found.append((param, gradient))
        return found

    @torch.no_grad()
    def update(
        self,
        inverse: Tensor,
        *,
        found_inf: Tensor | None = None,
        only: tuple[dict[str, Any], Tensor] | None = None,
    ) -> None:
        """Unscale, update and publish in one pass, with `kernel`.

        Args:
            inverse: What gradients are multiplied by. fp32, shape ().
            found_inf: 1.0 if nothing must change, shape (); for a kernel on a device.
            only: A group of the optimizer and its one parameter to update, of those
                that make up this step; default: all of them.
        """
        assert self.kernel is not None, "there is no kernel"  # noqa: S101
        if self._direct is None or self._direct.kernel is not self.kernel:
            parts = self.optimizer, self.form, self.slots, self.numbers
            self._direct = Direct(self.kernel, *parts)
        if only is None:
            self.refresh()
            work = [(group, group["params"]) for group in self.optimizer.param_groups]
        else:
            work = [(only[0], [only[1]])]
        for group, params in work:
            self._direct.update(
                group, params, inverse=inverse, clock=self.clock, found_inf=found_inf
            )
        # What torch's own step would have told.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        if only is None:
            optimizer_hooks.tell(self.optimizer)
            self.tick()

    @torch.no_grad()
    def step_over(self, param: Tensor) -> None:
        """Let the optimizer step over one parameter, whose gradient is unscaled."""
        slot = self.slots.get(param)
        if slot is not None:
            fold(slot)
        lean = self.slots.values() if self.form.lean else ()
        with self.told():
            generic_step.step(self.optimizer, lean, self.form, self.clock, only=param)
        if slot is not None and not self.form.lean:
            slot.weight.copy_(slot.master)

    def describe(self) -> str:
        """Say in one line how weights are updated."""
        name = type(self.optimizer).__name__
        why = fused_step.hindrance(self.optimizer)
        if self.kernel is not None and not why:
            return f"{name} in one pass over memory: {self.how}"
        way = "piece by piece" if self.form.lean else "then published"
        return f"{name}'s own step, {way}: {why or self.how}"

    def note(self) -> str:
        """Say in one line what is kept, and of how many weights."""
        count = sum(slot.weight.numel() for slot in self.slots.values())
        return f"master weights of {count} numbers: {self.form.promise}"

    @torch.no_grad()
    def share(self, first: Callable[[list[Tensor]], None]) -> None:
        """Take over another rank's weights and what is kept beside them.

        Args:
            first: Gives tensors, in place, the values of the first rank.
        """
        self.adopt()
        slots = self.slots.values()
        if not self.form.lean:
            # Weights that were loaded after adoption. Not said: wrapping in DDP writes
            # to weights too. Lean forms keep what is off by less than rounding.
            for slot in self._changed():
                slot.reread(self.form, self.clock)
        first([slot.weight.detach() for slot in slots])
        first([slot.extra.detach() for slot in slots if slot.extra is not None])
        self.written()

    def clear(self) -> None:
        """Forget the gradients of a step."""
        for slot in self.slots.values():
            slot.weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Fold gradients, let the optimizer step over the masters, and publish them."""
        self.fold()
        self.refresh()
        with self.told():
            if self.form.lean:
                slots = self.slots.values()
                generic_step.step(self.optimizer, slots, self.form, self.clock)
            else:
                self.optimizer.step()
        self.publish()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Open the region in which the optimizer steps because we say so."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the 16-bit parameters; lean ones are there already."""
        if self.slots and not self.form.lean:
            weights, masters = zip(*self.pairs, strict=True)
            torch._foreach_copy_(weights, masters)
        self.tick()

    def tick(self) -> None:
        """Count an update; no two get the same random numbers."""
        self.clock = Clock(self.clock.seed, self.clock.step + 1)
        self.written()

    @torch.no_grad()
    def pull(self) -> None:
        """Take the 16-bit parameters as the new masters, after an outside edit."""
        for weight, master in self.pairs:
            self.put(master, weight.detach().float())

    def resume(self, seed: int, step: int) -> None:
        """Go on with the random numbers of a saved run."""
        self.clock = Clock(seed, step)

    def settle_states(self) -> None:
        """Bring moments that were loaded into the form's dtype, and their own memory.

        Why: torch takes over tensors that another optimizer may be at work with.
        """
        for state in self.optimizer.state.values():
            tensors = [key for key, held in state.items() if torch.is_tensor(held)]
            state.update({key: state[key].clone() for key in tensors})
        for slot in self.slots.values():
            generic_step.narrow_states(self.optimizer, slot, self.form, None)

    def written(self) -> None:
        """Remember that the weights are as the masters would have them."""
        self._versions = [slot.weight._version for slot in self.slots.values()]  # noqa: SLF001

    @torch.no_grad()
    def refresh(self) -> None:
        """Take in what others have written to the weights since they were published.

        Why: `model.load_state_dict`, clamping or an average of weights change the
        model, and a master that does not know would undo it at the next step. An
        edit through `.data` is not seen: torch does not count it.
        """
        for slot in self.slots.values():
            slot.check()
        changed = sum(slot.reread(self.form, self.clock) for slot in self._changed())
        self.written()
        if changed:
            message = (
                f"weights were changed outside the optimizer ({changed} numbers): "
                "their masters were set to the 16-bit values found there. To load a "
                "checkpoint in fp32, load it before, or into the session."
            )
            warnings.warn(message, stacklevel=3)

    def _changed(self) -> list[Slot]:
        """Return those whose weights were written to since they were published."""
        pairs = zip(self.slots.values(), self._versions, strict=True)
        return [slot for slot, was in pairs if slot.weight._version != was]  # noqa: SLF001
