"""Master weights: fp32 values of 16-bit parameters, and compact encodings of them."""

from halfstep.masters.master_weights import MasterWeights, NoMasters

__all__ = ["MasterWeights", "NoMasters"]
