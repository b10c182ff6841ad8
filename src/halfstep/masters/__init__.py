"""Master weights: the truth behind 16-bit parameters, and its lean forms.

In: an optimizer over 16-bit parameters. Out: updates that are not lost to rounding.
"""

from halfstep.masters.master_weights import MasterWeights
from halfstep.masters.no_masters import NoMasters

__all__ = ["MasterWeights", "NoMasters"]
