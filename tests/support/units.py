"""Modules that take down in which dtypes they compute.

In: a name, and modules inside. Out: a list of what each product and loss gave.
"""

import torch
from torch import Tensor, nn

Seen = list[tuple[str, torch.dtype, torch.dtype]]
"""Module, what its product gave, what its loss gave."""


class Unit(nn.Module):
    """A product and a loss, which take down their dtypes; then what is inside."""

    def __init__(self, name: str, seen: Seen, **inside: nn.Module) -> None:
        super().__init__()
        self.name, self.seen = name, seen
        self.weight = nn.Parameter(torch.eye(4))
        for child, module in inside.items():
            self.add_module(child, module)

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        out = torch.mm(x, self.weight)
        loss = nn.functional.mse_loss(out, out)
        self.seen.append((self.name, out.dtype, loss.dtype))
        if depth:
            return self(out.float(), depth - 1)  # type: ignore[no-any-return]
        for child in self.children():
            out = child(out.float())
        if self.name == "fails":
            message = "inside"
            raise ValueError(message)
        return out
