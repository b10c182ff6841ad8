"""Graph plans: capture a model, choose each operation's precision, rewrite it."""

from halfstep.graph.plan import Plan
from halfstep.graph.plan_file import load_plan

__all__ = ["Plan", "load_plan"]
