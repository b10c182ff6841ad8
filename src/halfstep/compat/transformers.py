"""Provides transformers' `Trainer`, training in a halfstep session.

This adds the levels O0 to O3, correct skipped-step flags, and fp32 weights in
checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfstep.compat import library_names, require

require("transformers", "5.0")

import transformers

from halfstep.compat.accelerate import Accelerator

if TYPE_CHECKING:
    from halfstep.session.session import Session

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """Base class to put before a subclass of `transformers.Trainer`.

    `TrainingArguments` keep their meaning: `bf16`, `fp16`, `max_grad_norm`,
    `gradient_accumulation_steps`. Checkpoints hold fp32 weights, and the session's
    state as `optimizer.pt`; a run resumes from it bit-exactly.

    Args:
        args: Arguments of the Trainer.
        level: "O0" to "O3", or "auto". None: O1 with `bf16` or `fp16`, else O0, as the
            Trainer itself does.
        policy: As for `halfstep.prepare`.
        master: As for `halfstep.prepare`, at O2.
        kwargs: Arguments of the Trainer.

    Example:
        >>> from halfstep.compat.transformers import TrainerMixin
        >>> class MyTrainer(TrainerMixin, transformers.Trainer):
        ...     pass
    """

    accelerator: Accelerator
    model: Any
    args: Any

    def __init__(
        self,
        *args: Any,
        level: str | None = None,
        policy: str = "lean",
        master: str = "fp32",
        **kwargs: Any,
    ) -> None:
        self._precision = level, policy, master
        super().__init__(*args, **kwargs)

    @property
    def session(self) -> Session | None:
        """The session that trains; None before `train`."""
        return self.accelerator.session

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's Accelerator and change its class to halfstep's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # The Trainer hardcodes Accelerate's class.
        self.accelerator.__class__ = Accelerator
        self.accelerator.set_precision(*self._precision)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save fp32 weights, which are the master weights if there are any."""
        if self.session is not None and state_dict is None:
            state_dict = self.session.weights()
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        config = getattr(self.model, "config", None)
        if self.session is not None and config is not None and self.args.should_save:
            # transformers writes the model's current dtype into the config, and
            # `from_pretrained` would load the fp32 file in 16 bits.
            config.dtype = "float32"
            config.save_pretrained(output_dir or self.args.output_dir)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on a session; see `TrainerMixin` for what it takes."""


__getattr__, __dir__ = library_names(transformers, globals())
