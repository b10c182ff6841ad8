"""Where an inf or a NaN came from, as a value; what a loss's autograd graph says of it.

`halfstep.find_nonfinite`, which runs a step again, is `diagnostics.replay.search`.
"""
