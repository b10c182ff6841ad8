"""Programs that tests start import it: they end sooner, without collecting garbage."""

import atexit
import gc

atexit.register(gc.freeze)
