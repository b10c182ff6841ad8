"""Finds the origin of an inf or NaN in the autograd graph of a loss.

`halfstep.find_nonfinite`, which runs a step again, is in `diagnostics.replay.search`.
"""
