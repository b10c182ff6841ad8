"""Metrics of a model's outputs."""
