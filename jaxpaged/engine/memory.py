"""Memory that the process holds and does not use."""

import ctypes
import ctypes.util
import sys


def give_back_unused() -> None:
    """Return to the system what compiling left free in the C library's heap: hundreds of megabytes.

    Only glibc keeps so much, and only there anything happens.
    """
    library = ctypes.util.find_library("c") if sys.platform == "linux" else None
    trim = getattr(ctypes.CDLL(library), "malloc_trim", None) if library else None
    if trim:
        trim(0)
