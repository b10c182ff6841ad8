"""What malloc has from the system, as itself counts it."""

import ctypes


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def mapped() -> int:
    """Return bytes."""
    mallinfo = ctypes.CDLL(None).mallinfo
    mallinfo.restype = _Mallinfo
    return mallinfo().arena + mallinfo().hblkhd
