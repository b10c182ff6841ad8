"""Eager autocast: contexts, dispatch kernels, module rules and cached weight casts."""
