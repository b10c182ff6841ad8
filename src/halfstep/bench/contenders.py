"""The contenders of the benches, as data: name -> description and settings.

Importing this loads no torch, so that the command line can list all names quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepContender:
    """One way to train the network of `bench recipe` and `bench accumulate`."""

    description: str
    loop: str
    """Key of `loops.MAKERS`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loop."""

    @property
    def package(self) -> str | None:
        """The package that it needs besides torch."""
        return {"accelerate": "accelerate", "fabric": "lightning_fabric"}.get(self.loop)


_AMP = StepContender("torch.autocast, and torch's GradScaler with fp16", "plain")
_O2 = StepContender(
    "halfstep: 16-bit weights, fp32 master weights", "session", {"level": "O2"}
)


def _o2(description: str, master: str) -> StepContender:
    return StepContender(description, "session", {"level": "O2", "master": master})


MEMORY_HELD_SUFFIX = "-kept"
"""Suffix of contenders whose C allocator returns no memory to the system."""

RECIPE = {
    "fp32": StepContender(
        "weights, gradients and matmuls in fp32", "plain", {"low": 0}
    ),
    "torch.amp": _AMP,
    f"torch.amp{MEMORY_HELD_SUFFIX}": StepContender(
        "the same; the C library's allocator keeps all memory", "plain"
    ),
    "accelerate": StepContender(
        "Hugging Face Accelerate, mixed_precision as --dtype", "accelerate"
    ),
    "fabric-mixed": StepContender(
        "Lightning Fabric, 16-bit matmuls of fp32 weights", "fabric", {"kind": "mixed"}
    ),
    "fabric-true": StepContender(
        "Lightning Fabric, 16-bit weights without master weights",
        "fabric",
        {"kind": "true"},
    ),
    "naive-O2": StepContender(
        "16-bit weights and fp32 master weights by hand",
        "manual",
        {"masters": True},
    ),
    "pure": StepContender(
        "16-bit weights by hand: no master weights, no loss scale",
        "manual",
        {"masters": False},
    ),
    "O1": StepContender(
        "halfstep: fp32 weights, operations cast one by one",
        "session",
        {"level": "O1"},
    ),
    "O2": _O2,
    f"O2{MEMORY_HELD_SUFFIX}": StepContender(
        "the same; the C library's allocator keeps all memory", "session", _O2.settings
    ),
    "O2-split": _o2("halfstep: bf16 weights and the low 16 bits of fp32", "split"),
    "O2-kahan": _o2("halfstep: bf16 weights and a compensation term", "kahan"),
    "O2-stochastic": _o2(
        "halfstep: 16-bit weights, stochastically rounded updates", "stochastic"
    ),
    "O3": StepContender(
        "halfstep: 16-bit weights without master weights", "session", {"level": "O3"}
    ),
}
"""Contenders of `bench recipe`."""

ACCUMULATE = {"torch.amp": _AMP} | {
    f"{level} {policy}": StepContender(
        "halfstep", "session", {"level": level, "policy": policy}
    )
    for level, policy in (("O1", "torch"), ("O1", "lean"), ("O2", "lean"))
}
"""Contenders of `bench accumulate`."""

WIRE: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0", "dtype": "fp32"},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2-split": {"level": "O2", "master": "split"},
    "torch.amp": {},
    "torch.amp-hook": {"hook": True},
}
"""Contenders of `bench wire`: settings of `prepare`, or of torch.amp under DDP."""

ENCODER = {"fp32": None, "torch.amp": None, "O1 torch": "torch", "O1 lean": "lean"}
"""Contenders of `bench encoder`: policy of a Session at O1; None: a plain loop."""

TRAIN: dict[str, dict[str, Any]] = {
    "plain-fp32": {"amp": False},
    "plain-amp": {"amp": True},
    "O0": {"level": "O0"},
    "O1-bf16": {"level": "O1", "dtype": "bf16"},
    "O2-bf16": {"level": "O2", "dtype": "bf16"},
    "O3-bf16": {"level": "O3", "dtype": "bf16"},
    "O1-fp16": {"level": "O1", "dtype": "fp16"},
    "O2-fp16": {"level": "O2", "dtype": "fp16"},
}
"""Contenders of `bench train`: settings of `halfstep train` or of the plain loop."""

_BF16 = {"level": "O2", "dtype": "bf16"}

QUALITY: dict[str, dict[str, str]] = {
    "fp32": {"level": "O0"},
    "O1": {"level": "O1", "dtype": "bf16"},
    "O2": _BF16 | {"master": "fp32"},
    "O2-split": _BF16 | {"master": "split"},
    "O2-kahan": _BF16 | {"master": "kahan"},
    "O2-stochastic": _BF16 | {"master": "stochastic"},
    "O2-none": _BF16 | {"master": "none"},
    "O3": {"level": "O3", "dtype": "bf16"},
}
"""Contenders of `bench quality`: settings of `halfstep train`."""

NER: dict[str, dict[str, str]] = {
    "fp32": {"level": "O0"},
    "O1-fp16-unscaled": {"level": "O1", "dtype": "fp16", "loss_scale": "none"},
    "O1-fp16": {"level": "O1", "dtype": "fp16", "loss_scale": "dynamic"},
    "O1-bf16": {"level": "O1", "dtype": "bf16"},
    "O2-bf16": {"level": "O2", "dtype": "bf16"},
}
"""Contenders of `bench ner`: settings of `halfstep train`."""


@dataclass(frozen=True)
class MasterForm:
    """One encoding of the master weights, and its bytes per parameter."""

    weight: int
    """Bytes per parameter of the weight; the other fields likewise."""
    gradient: int
    """After the backward pass, before the update."""
    extra: int
    """Besides the weight: the fp32 master, or the residual of a compact encoding."""
    moment: int
    """Each of the optimizer's moments."""
    settings: dict[str, Any]
    """Arguments of `prepare`; if `is_torch`, of torch's optimizer on fp32 weights."""
    is_torch: bool = False

    def expected_bytes(self, moments: int) -> int:
        """Return the bytes per parameter at the end of a backward pass."""
        return self.weight + self.gradient + self.extra + moments * self.moment

    def bytes_moved(self, moments: int) -> int:
        """Return the minimum bytes per parameter that an update reads and writes.

        State is read and written; a gradient is only read, and a weight with an fp32
        master is only written.
        """
        weight = self.weight * (1 if self.extra > self.weight else 2)
        gradient = self.gradient or self.weight
        return weight + gradient + 2 * (self.extra + moments * self.moment)


def _form(master: str, extra: int, moment: int) -> MasterForm:
    return MasterForm(2, 2, extra, moment, {"level": "O2", "master": master})


_SPLIT_RELEASED = {"level": "O2", "master": "split", "optimizer_in_backward": True}
FORMS = {
    "fp32": _form("fp32", 4, 4),
    "split": _form("split", 2, 4),
    "split-released": MasterForm(2, 0, 2, 4, _SPLIT_RELEASED),
    "kahan": _form("kahan", 2, 2),
    "stochastic": _form("stochastic", 0, 2),
    "none": _form("none", 0, 2),
    "torch-foreach": MasterForm(4, 4, 0, 4, {"foreach": True}, is_torch=True),
    "torch-fused": MasterForm(4, 4, 0, 4, {"fused": True}, is_torch=True),
}
"""Encodings of `bench optimizer`."""


@dataclass(frozen=True)
class TorchOptimizer:
    """A torch optimizer."""

    class_name: str
    settings: dict[str, Any] = field(default_factory=dict)
    moments: int = 0
    """Number of state tensors as large as the weights."""


UPDATE_RULES = {
    "sgd": TorchOptimizer("SGD"),
    "sgd-momentum": TorchOptimizer("SGD", {"momentum": 0.9}, 1),
    "adam": TorchOptimizer("Adam", moments=2),
    "adamw": TorchOptimizer("AdamW", moments=2),
}
"""Optimizers of `bench optimizer`."""

SCALER_OPTIMIZERS = {
    "none": None,
    "sgd": TorchOptimizer("SGD", {"foreach": True}),
    "adamw": TorchOptimizer("AdamW", {"foreach": True}),
    "sgd-fused": TorchOptimizer("SGD", {"fused": True}),
    "adamw-fused": TorchOptimizer("AdamW", {"fused": True}),
}
"""Optimizers of `bench scaler`; None: one whose step does nothing."""

PLANNED = ("bert", "resnet", "gpt", "t5", "mlp")
"""Models of `bench plan`."""
