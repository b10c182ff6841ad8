"""Programs that tests start import it: they end sooner, without collecting garbage."""

import atexit
import gc
import sys


@atexit.register
def _freeze() -> None:
    if "triton" not in sys.modules:  # it reports what is left
        gc.freeze()
