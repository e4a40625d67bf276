"""How long the runs took, and what share of it each phase had."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from jaxpaged.engine.events import Events


@dataclass(frozen=True)
class RunStats:
    """One run: seconds of the device, steps and tokens by phase. A step that prefills and decodes is a prefill step."""

    seconds: float
    prefill_steps: int
    decode_steps: int
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds and tokens of each phase over several runs."""

    prefill_seconds: float
    decode_seconds: float
    prefill_tokens: int
    decode_tokens: int


def run_stats(events: Events, seconds: float) -> RunStats:
    num_steps = int(events.num_steps)
    scheduled, decodes = events.steps.scheduled[:num_steps], events.steps.decodes[:num_steps]
    prefilled = np.where(decodes, 0, scheduled)
    prefill_steps = int(np.count_nonzero(prefilled.sum(axis=1)))
    return RunStats(seconds, prefill_steps, num_steps - prefill_steps, int(prefilled.sum()), int(decodes.sum()))


def phase_times(runs: Collection[RunStats]) -> PhaseTimes:
    """Split the runs' time by phase.

    Steps inside a run have no clock. Runs that only decode give the time of a decode step; the rest of a run that
    prefilled, too, is prefill. Without such runs all steps count the same.
    """
    pure = [run for run in runs if run.decode_steps and not run.prefill_steps]
    all_steps = sum(run.prefill_steps + run.decode_steps for run in runs)
    timed = pure or runs
    timed_steps = sum(run.decode_steps for run in pure) if pure else all_steps
    decode_step = sum(run.seconds for run in timed) / max(timed_steps, 1)
    decode_seconds = sum(min(run.seconds, run.decode_steps * decode_step) for run in runs)
    return PhaseTimes(
        prefill_seconds=sum(run.seconds for run in runs) - decode_seconds,
        decode_seconds=decode_seconds,
        prefill_tokens=sum(run.prefill_tokens for run in runs),
        decode_tokens=sum(run.decode_tokens for run in runs),
    )
