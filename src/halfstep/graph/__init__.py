"""Precision planned once for a whole graph: capture, plan, rewrite, check."""

from halfstep.graph.plan import Plan
from halfstep.graph.plan_file import load_plan

__all__ = ["Plan", "load_plan"]
