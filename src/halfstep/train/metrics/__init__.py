"""Metrics of the model's outputs, per task."""
