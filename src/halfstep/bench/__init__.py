"""Benchmarks of halfstep's levels against torch.amp."""
