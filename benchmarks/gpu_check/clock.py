"""When the device waits for the host: between runs, and between the kernels of a run."""

import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_check.part import one_line


class RunClock:
    """Stands in for a `run` and notes when each run was handed over, and when it was done.

    A thread waits for each run's last result. Python's threads take turns of 5 ms, so a run can seem to be done that
    much later than it was while the host is busy, and an idle time that much shorter.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._waiter = ThreadPoolExecutor(1)
        self.clear()

    def clear(self) -> None:
        self._called: list[float] = []
        self._returned: list[float] = []
        self._done: list[Future[float]] = []

    def __call__(self, *args: Any) -> Any:
        self._called.append(time.perf_counter())
        state, events = self._run(*args)
        self._returned.append(time.perf_counter())
        self._done.append(self._waiter.submit(_when_ready, events.num_steps))
        return state, events

    @property
    def num_runs(self) -> int:
        return len(self._called)

    @property
    def dispatch_seconds(self) -> float:
        """Time that the host spent in the calls. Near the time of all runs: a call returns when its run is over."""
        return sum(b - a for a, b in zip(self._called, self._returned, strict=True))

    @property
    def idle_seconds(self) -> float:
        """From the end of each run to the hand-over of the next one, where that came later."""
        done = [future.result() for future in self._done]
        return sum(max(0.0, called - before) for called, before in zip(self._called[1:], done, strict=False))


def _when_ready(array: jax.Array) -> float:
    array.block_until_ready()
    return time.perf_counter()


def busy_share(work: Callable[[], Any]) -> dict[str, Any]:
    """The share of the time, from the first kernel's start to the last one's end, in which any was running.

    From the profiler. `{"error": ...}` where it cannot tell; that is no failure of the check.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                work()
            (path,) = Path(folder).rglob("*.xplane.pb")
            planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    except Exception as error:
        work()
        return {"error": one_line(error)}
    intervals = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    if not intervals:
        return {"error": "the profiler shows no stream of a GPU"}
    window = max(end for _, end in intervals) - min(start for start, _ in intervals)
    return {"share": union(intervals) / window, "window_seconds": window / 1e9, "kernels": len(intervals)}


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what the intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
