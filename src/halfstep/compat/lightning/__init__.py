"""Provides precision plugins for Lightning's Trainer and Fabric: levels O0 to O3.

A plugin replaces `precision=`. `docs/lightning.md` lists what differs.
"""

from __future__ import annotations

from halfstep.compat import require

require("lightning", "2.5")

from halfstep.compat.lightning.plugins import FabricMixedPrecision, MixedPrecision

__all__ = ["FabricMixedPrecision", "MixedPrecision"]
