"""Eager autocast: contexts, kernels, module rules, casts of weights."""
