"""Precision planned once for a whole graph: capture, plan, rewrite, check."""
