"""Names of operations as users know them, and rows of a policy that speak of them.

In: an overload of aten's. Out: a word such as "linear", and a row that keeps it, or its
module, in float32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from halfstep.policy.rules import Rule, matching_ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_WORDS = {
    "addmm": "linear",
    "bmm": "matmul",
    "to_copy": "to",
    "nll_loss2d": "nll_loss",
    "linalg_vector_norm": "norm",
    "mkldnn_rnn_layer": "lstm",
    "thnn_fused_lstm_cell": "lstm",
    "thnn_fused_gru_cell": "gru",
    "cudnn_rnn": "rnn",
}
_AFFIXES = re.compile(r"^_*(native_|cudnn_|miopen_|mkldnn_|safe_|fused_)?|_forward$|_$")
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
_TRANSPOSED = 6
"""Place of that argument of aten's convolution."""
_ATTENTION = "scaled_dot_product"


def base(func: torch._ops.OpOverload) -> str:
    """Return aten's name of an operation, without library, overload and "in place"."""
    name: str = func._schema.name.partition("::")[2]  # noqa: SLF001
    return name.rstrip("_") if not name.startswith("__") else name


def is_product(name: str) -> bool:
    """Say whether an operation is what matrix products and convolutions become."""
    return name in _PRODUCTS or name.endswith("convolution")


def word(
    func: torch._ops.OpOverload, rank: int, args: Sequence[object], *, weighted: bool
) -> str:
    """Return what a user calls an operation.

    Args:
        func: As the dispatcher has it.
        rank: Dimensions of its result.
        args: That it takes.
        weighted: One of its operands is a weight.
    """
    name = base(func)
    if _ATTENTION in name:
        return "scaled_dot_product_attention"
    if name.endswith("convolution"):
        across = "_transpose" if name == "convolution" and args[_TRANSPOSED] else ""
        return f"conv{across}{max(1, rank - 2)}d"
    if name == "mm":
        return "linear" if weighted else "matmul"
    plain = name.lstrip("_")
    short = _AFFIXES.sub("", name)
    return _WORDS.get(plain) or _WORDS.get(short) or short


def node_word(name: str) -> str:
    """Return what a user calls the operation behind a node such as "SqrtBackward0"."""
    kind = re.sub(r"Backward\d*$", "", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()


def op_rule(name: str) -> str:
    """Return a row that keeps an operation in float32; "" if a policy cannot."""
    rule = Rule("op", name, "fp32")
    return str(rule) if matching_ops(rule) else ""
