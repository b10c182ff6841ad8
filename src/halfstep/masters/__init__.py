"""Master weights: fp32 values of 16-bit parameters, and compact encodings of them.

In: an optimizer over 16-bit parameters. Out: updates that are not lost to rounding.
"""

from halfstep.masters.master_weights import MasterWeights, NoMasters

__all__ = ["MasterWeights", "NoMasters"]
