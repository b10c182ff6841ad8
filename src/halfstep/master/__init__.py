"""Master weights: the truth behind 16-bit parameters, and its lean forms.

In: an optimizer over 16-bit parameters. Out: updates that are not lost to rounding.
"""

from halfstep.master.nomasters import NoMasters
from halfstep.master.weights import MasterWeights

__all__ = ["MasterWeights", "NoMasters"]
