"""All that the benchmark knows of an engine's insides, in one place: its runs, its weights, its pools, its trace.

Whether the device waits for the host is seen from outside. A run's hand-over is the call that dispatches it; its end is
when a thread that waits for its last result wakes. The device was idle from the end of a run to the hand-over of
the next one, if that came later: the engine dispatches the next run before it reads the last one, so mostly it came
long before. On CPU, where the host's threads compute, too, this counts the time in which no run was under way. What
passes inside of a run, between a step and the next, belongs to the run: there the host has no part.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxpaged.engine.engine import Engine
from jaxpaged.engine.events import Events
from jaxpaged.llm import LLM
from jaxpaged.trace.sink import JsonlSink

# Python's threads take turns of 5 ms otherwise, and the end of a run would seem to come so much later.
_SWITCH_SECONDS = 1e-4


@dataclass(frozen=True)
class Run:
    """One run, in seconds of `time.perf_counter`. start: from when on the device could work at it."""

    start: float
    end: float
    events: Events

    @property
    def seconds(self) -> float:
        return self.end - self.start


class RunClock:
    """Stands in for an engine's jitted `run`; notes when each run was handed over, and when it was done."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._waiter = ThreadPoolExecutor(1)
        self._noted: list[tuple[float, Future[float], Events]] = []

    def __call__(self, *args: Any) -> Any:
        handed_over = time.perf_counter()
        state, events = self._run(*args)
        self._noted.append((handed_over, self._waiter.submit(_when_ready, events.num_steps), events))
        return state, events

    def close(self) -> list[Run]:
        """Wait for the last run, and give them all."""
        self._waiter.shutdown()
        runs: list[Run] = []
        for handed_over, done, events in self._noted:
            start = max(handed_over, runs[-1].end) if runs else handed_over
            runs.append(Run(start, max(start, done.result()), events))
        return runs


def _when_ready(array: jax.Array) -> float:
    array.block_until_ready()
    return time.perf_counter()


@contextmanager
def recorded(engine: Engine) -> Iterator[list[Run]]:
    """The runs between `with` and its end, which are in the list after it. Those without a step are left out."""
    clock = RunClock(engine._run)
    runs: list[Run] = []
    engine._run, original, switch_seconds = clock, engine._run, sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield runs
    finally:
        engine._run = original
        sys.setswitchinterval(switch_seconds)
        runs += [run for run in clock.close() if int(run.events.num_steps)]


@contextmanager
def traced(llm: LLM, path: Path) -> Iterator[None]:
    """Write the scheduler trace to `path` as JSON lines. It is turned on and off while the engine has nothing to do."""
    before = llm._trace
    with path.open("w", encoding="utf-8") as file:
        llm._trace = llm.engine._emit = JsonlSink(file)
        try:
            yield
        finally:
            llm._trace = llm.engine._emit = before


def weights(engine: Engine) -> dict[tuple[Any, ...], jax.Array]:
    """The model's parameters by their paths, as the engine holds them."""
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(engine._params)}


def pool_bytes(engine: Engine) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(engine._state.kv))


def state_bytes(engine: Engine) -> int:
    """Of everything in the engine's state but the pools: queue, tokens, tables."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(engine._state)) - pool_bytes(engine)
