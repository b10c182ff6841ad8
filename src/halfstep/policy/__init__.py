"""Defines precision policies: rules, op tables, levels, and the lookup `decide`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.policy.decision import Decision, decide
    from halfstep.policy.rules import CATEGORIES, LEAN, TORCH, Policy, Rule

__all__ = ["CATEGORIES", "LEAN", "TORCH", "Decision", "Policy", "Rule", "decide"]

if not TYPE_CHECKING:  # a type checker must still see a misspelt name

    def __getattr__(name: str) -> object:
        """Import a name on first use, so that submodules can be used without torch."""
        if name in __all__:
            from halfstep.policy import decision, rules

            module = rules if hasattr(rules, name) else decision
            return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
