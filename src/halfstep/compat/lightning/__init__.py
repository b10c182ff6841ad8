"""Precision plugins that give Lightning's Trainer and Fabric the levels O0 to O3.

In: a program written for `lightning`. Out: the same program with a plugin in place of
`precision=`. `docs/lightning.md` lists what differs.
"""

from __future__ import annotations

from halfstep.compat import require

require("lightning", "2.5")

from halfstep.compat.lightning.plugins import (
    FabricMixedPrecision,
    MixedPrecision,
)

__all__ = ["FabricMixedPrecision", "MixedPrecision"]
