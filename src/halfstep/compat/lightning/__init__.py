"""Precision plugins that give Lightning's Trainer and Fabric the levels O0 to O3.

In: a program written for `lightning`. Out: the same program with a plugin in place of
`precision=`. `docs/lightning.md` lists what differs.
"""

from __future__ import annotations

from halfstep.errors import UserError

try:
    import lightning as _  # noqa: F401
except ImportError as error:
    _MESSAGE = (
        "halfstep.compat.lightning needs Lightning: pip install 'lightning>=2.5'."
    )
    raise UserError(_MESSAGE) from error

from halfstep.compat.lightning.plugins import FabricMixedPrecision, MixedPrecision

__all__ = ["FabricMixedPrecision", "MixedPrecision"]
