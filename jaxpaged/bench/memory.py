"""Peak memory, of the process and, where it has its own, of the device."""

import resource
import sys
from pathlib import Path

import jax

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"  # proc(5)


def peak_host_bytes() -> int:
    """The most memory that the process held at once, since it started or since `forget_peak` worked."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def held_host_bytes() -> int | None:
    """The memory that the process holds now; None where only the peak is known."""
    return _status("VmRSS")


def _status(key: str) -> int | None:
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def forget_peak() -> bool:
    """Let the peak start from what is held now. Only Linux can; False elsewhere."""
    try:
        _CLEAR.write_text(_CLEAR_PEAK)
    except OSError:
        return False
    return True


def peak_device_bytes() -> int | None:
    """The most memory in use on the device at once; None where it has none of its own, or does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
