"""Loads scaler states of torch, apex and halfstep.

In: what `torch.amp.GradScaler`, halfstep or apex saved. Out: torch's five keys.
"""

from __future__ import annotations

from typing import Any


def from_foreign_state(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a state in torch's terms.

    Args:
        state: Of torch or halfstep (returned as it is); of apex.amp, {"loss_scaler0":
            {"loss_scale": 65536.0, "unskipped": 12}}; or one entry of it. Of several
            losses, the first counts.
        own: The scaler's own state, for what apex does not save.
    """
    entry = state.get("loss_scaler0", state)
    if isinstance(entry, dict) and {"loss_scale", "unskipped"} <= entry.keys():
        scale, clean = float(entry["loss_scale"]), int(entry["unskipped"])
        return own | {"scale": scale, "_growth_tracker": clean}
    return state
