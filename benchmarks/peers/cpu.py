"""Who used the processor: /proc's counters. None where there is no /proc."""

import os
from pathlib import Path

_PROC = Path("/proc")


def session_seconds(session: int) -> float | None:
    """CPU time of all living processes of a session."""
    ticks = [_ticks(stat, session) for stat in _PROC.glob("[0-9]*/stat")]
    return sum(ticks) / _ticks_a_second() if ticks else None


def machine_seconds() -> float | None:
    """CPU time of everything on this machine, and what its hypervisor took away."""
    try:
        line = (_PROC / "stat").read_text().partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _ticks_a_second()


def _ticks(stat: Path, session: int) -> int:
    """Of one process if it is of this session, else 0."""
    try:
        # The name, in parentheses, may hold spaces.
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0


def _ticks_a_second() -> int:
    return os.sysconf("SC_CLK_TCK")
