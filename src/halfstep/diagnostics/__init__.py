"""Finds problems of a model, a training step or a run; changes none of them."""
